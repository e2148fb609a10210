"""The drop-ins of the three systems and the general modules, against torch's compositions."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import reference
import torch
from reference import (
    GRADIENT_FLOOR,
    assert_as_accurate_as_torch,
    channels_last,
    is_channels_last,
    memory_at,
    strided,
)
from systems import SMALL, perturbed
from torch import nn

import fusedconv
from fusedconv import (
    ConvTransposeActNorm1d,
    ConvTransposeActNorm2d,
    ConvTransposeActNorm3d,
    GroupNorm,
    functional,
)
from fusedconv.kernels.cpu import CpuPlan
from fusedconv.models import SYSTEMS

CONVS = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
MODULES = {1: ConvTransposeActNorm1d, 2: ConvTransposeActNorm2d, 3: ConvTransposeActNorm3d}


def seeded(make, *arguments, **keywords):
    torch.manual_seed(1)
    return make(*arguments, **keywords)


# ---- the three systems ---------------------------------------------------------------------------


def test_the_top_level_drop_in_is_system_1():
    assert fusedconv.ModelNew is SYSTEMS["system1"].model
    assert {name: type(module).__name__ for name, module in SYSTEMS.items()} == dict.fromkeys(
        ("system1", "system2", "system3"), "System"
    )


@pytest.mark.parametrize("name", SYSTEMS)
def test_same_seed_same_parameters_and_random_numbers(name):
    system = SYSTEMS[name]
    original = seeded(system.original, *SMALL[name][0])
    after_original = torch.rand(3)
    model = seeded(system.model, *SMALL[name][0])
    assert torch.equal(torch.rand(3), after_original)
    expected, actual = original.state_dict(), model.state_dict()
    assert list(actual) == list(expected)
    for key, value in expected.items():
        assert torch.equal(actual[key], value), key
        assert actual[key].dtype == value.dtype
    assert [child for child, _ in model.named_children()] == [
        child for child, _ in original.named_children()
    ]
    assert [n for n, p in model.named_parameters() if p.requires_grad] == [
        n for n, p in original.named_parameters() if p.requires_grad
    ]


@pytest.mark.parametrize(
    ("name", "children", "parameters"),
    [
        (
            "system1",
            ["conv_transpose", "group_norm"],
            [
                "conv_transpose.weight",
                "conv_transpose.bias",
                "group_norm.weight",
                "group_norm.bias",
            ],
        ),
        (
            "system2",
            ["conv_transpose", "relu", "group_norm"],
            ["conv_transpose.weight", "group_norm.weight", "group_norm.bias"],
        ),
        ("system3", ["gn"], ["gn.weight", "gn.bias"]),
    ],
)
def test_names_and_sizes_are_the_systems(name, children, parameters):
    system = SYSTEMS[name]
    model = system.model(*system.init_arguments)
    assert [child for child, _ in model.named_children()] == children
    assert [key for key, _ in model.named_parameters()] == parameters
    shapes = {
        "system1": ((64, 64, 3, 1, 8, 8), (128, 64, 256, 256)),
        "system2": ((64, 128, 3, 8, False), (16, 64, 32, 32, 32)),
        "system3": ((64, 8), (112, 64, 512, 512)),
    }
    assert (system.init_arguments, system.input_shape) == shapes[name]


def test_system_2_takes_a_bias_and_keywords():
    system = SYSTEMS["system2"]
    arguments = {
        "in_channels": 4, "out_channels": 8, "kernel_size": 3, "groups": 2, "bias": True
    }  # fmt: skip
    original = perturbed(seeded(system.original, **arguments))
    model = system.model(**arguments)
    model.load_state_dict(original.state_dict(), strict=True)
    x = torch.randn(1, 4, 3, 4, 5)
    exact = copy.deepcopy(original).double()(x.double())
    assert_as_accurate_as_torch(model(x), original(x), exact)


def test_system_1_ignores_groups_of_the_convolution_and_takes_a_stride():
    model = fusedconv.ModelNew(
        in_channels=6, out_channels=8, kernel_size=4, stride=2, groups=3, num_groups=4
    )
    assert model.conv_transpose.groups == 1
    assert model.conv_transpose.stride == (2, 2)
    assert model(torch.randn(2, 6, 5, 7)).shape == (2, 8, 12, 16)


@pytest.mark.parametrize("name", SYSTEMS)
def test_state_dicts_load_both_ways(name):
    system = SYSTEMS[name]
    original = perturbed(seeded(system.original, *SMALL[name][0]))
    model = system.model(*SMALL[name][0])
    model.load_state_dict(original.state_dict(), strict=True)
    back = system.original(*SMALL[name][0])
    back.load_state_dict(model.state_dict(), strict=True)
    for key, value in original.state_dict().items():
        assert torch.equal(back.state_dict()[key], value)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", SYSTEMS)
def test_outputs_and_gradients_are_the_originals(name, dtype, layout):
    system = SYSTEMS[name]
    original = perturbed(seeded(system.original, *SMALL[name][0])).to(dtype)
    model = system.model(*SMALL[name][0]).to(dtype)
    model.load_state_dict(original.state_dict())
    exact = copy.deepcopy(original).double()
    x = torch.rand(SMALL[name][1], generator=torch.Generator().manual_seed(3)).to(dtype)
    if layout == "nhwc":
        x = channels_last(x)
    results = {}
    for key, module in (("ours", model), ("torch", original), ("exact", exact)):
        inputs = x.detach().to(next(module.parameters()).dtype).clone().requires_grad_()
        output = module(inputs)
        # A gradient that is not constant, the same for all three.
        weights = torch.linspace(-1, 2, output.numel(), dtype=torch.float64).reshape(output.shape)
        output.backward(weights.to(output.dtype))
        results[key] = [output, inputs.grad, *(p.grad for p in module.parameters())]
    names = ["output", "input", *(n for n, _ in model.named_parameters())]
    for what, ours, torchs, true in zip(
        names, results["ours"], results["torch"], results["exact"], strict=True
    ):
        assert ours is not None, what
        floor = None if what == "output" else GRADIENT_FLOOR[dtype]
        assert_as_accurate_as_torch(ours, torchs, true, floor)


@pytest.mark.parametrize("name", SYSTEMS)
def test_without_gradients_as_with(name):
    model = perturbed(SYSTEMS[name].model(*SMALL[name][0]))
    x = torch.rand(SMALL[name][1])
    with torch.no_grad():
        plain = model(x)
    with torch.inference_mode():
        inference = model(x)
    assert not plain.requires_grad
    assert model(x).requires_grad
    assert torch.equal(plain, inference)
    assert torch.equal(plain, model(x))
    assert torch.equal(plain, model.eval()(x))


@pytest.mark.parametrize("name", SYSTEMS)
def test_frozen_parameters_get_no_gradient(name):
    model = SYSTEMS[name].model(*SMALL[name][0])
    frozen, *rest = model.parameters()
    frozen.requires_grad_(False)
    model(torch.rand(SMALL[name][1])).square().sum().backward()
    assert frozen.grad is None
    assert all(parameter.grad is not None for parameter in rest)


@pytest.mark.parametrize("name", SYSTEMS)
def test_models_copy_and_pickle(name):
    model = perturbed(SYSTEMS[name].model(*SMALL[name][0]))
    x = torch.rand(SMALL[name][1])
    expected = model(x)
    assert torch.equal(copy.deepcopy(model)(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), expected)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = SYSTEMS[name].model(*SMALL[name][0])
    loaded.load_state_dict(torch.load(file, weights_only=True), strict=True)
    assert torch.equal(loaded(x), expected)


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_training_step_moves_parameters_as_the_originals(name):
    system = SYSTEMS[name]
    modules = [seeded(make, *SMALL[name][0]) for make in (system.model, system.original)]
    x = torch.rand(SMALL[name][1])
    for module in modules:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            module(x).sub(0.5).square().mean().backward()
            optimizer.step()
    for (key, ours), (_, torchs) in zip(
        *(module.named_parameters() for module in modules), strict=True
    ):
        torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-5, msg=key)


def test_a_changed_parameter_is_seen_by_the_next_call():
    model = fusedconv.ModelNew(4, 8, 3, 1, 1, 2)
    x = torch.rand(1, 4, 5, 5)
    with torch.no_grad():
        first = model(x)
        model.conv_transpose.weight.mul_(-1)
        model.group_norm.bias.add_(3)
        second = model(x)
        fresh = copy.deepcopy(model)(x)
    assert not torch.allclose(first, second)
    assert torch.equal(second, fresh)


# ---- the general modules -------------------------------------------------------------------------


def composition(module: nn.Module, x: torch.Tensor, dtype: torch.dtype, output_padding=None):
    """torch's operators with a module's parameters, in ``dtype``."""
    conv, norm = module.conv_transpose, module.group_norm
    cast = {
        key: None if value is None else value.detach().to(dtype)
        for key, value in {
            "weight": conv.weight,
            "bias": conv.bias,
            "norm_weight": None if norm is None else norm.weight,
            "norm_bias": None if norm is None else norm.bias,
        }.items()
    }
    return reference.conv_transpose_act_norm(
        x.to(dtype),
        cast["weight"],
        cast["bias"],
        conv.stride,
        conv.padding,
        conv.output_padding if output_padding is None else output_padding,
        conv.groups,
        conv.dilation,
        activation=module.activation,
        order=module.order,
        num_groups=None if norm is None else norm.num_groups,
        norm_weight=cast["norm_weight"],
        norm_bias=cast["norm_bias"],
        eps=1e-5 if norm is None else norm.eps,
    )


SPATIAL = {1: (11,), 2: (6, 7), 3: (4, 3, 5)}


@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
@pytest.mark.parametrize("order", reference.ORDERS)
@pytest.mark.parametrize("num_groups", [None, 1, 4, 8])
@pytest.mark.parametrize("axes", MODULES)
def test_module_against_composition(axes, num_groups, order, activation):
    module = perturbed(
        MODULES[axes](6, 8, 3, num_groups=num_groups, activation=activation, order=order)
    )
    x = torch.randn(2, 6, *SPATIAL[axes])
    exact = composition(module, x, torch.float64)
    torchs = composition(module, x, torch.float32)
    assert_as_accurate_as_torch(module(x), torchs, exact)
    with torch.no_grad():
        assert_as_accurate_as_torch(module(x), torchs, exact)


#: (in, out, kernel, keywords, spatial): what our kernels refuse, and what they must not confuse.
GEOMETRIES = [
    (4, 6, 2, {"stride": 2}, (5, 6)),
    (4, 6, 3, {"stride": 2, "padding": 1, "output_padding": 1}, (5, 6)),
    (4, 6, (3, 2), {"stride": (1, 3), "padding": (0, 1), "output_padding": (0, 2)}, (5, 6)),
    (4, 6, 3, {"groups": 2}, (5, 6)),
    (6, 6, 3, {"groups": 6, "stride": 2}, (5, 6)),
    (4, 6, 3, {"dilation": 2}, (5, 6)),
    (4, 6, (2, 4), {"dilation": (3, 1), "padding": (3, 2), "output_padding": (2, 0)}, (7, 6)),
    (4, 6, 1, {"bias": False}, (5, 6)),
    (1, 2, 5, {}, (1, 1)),
    (3, 4, 4, {"padding": 3}, (9, 8)),
    (4, 6, 3, {"padding": 4, "stride": 3}, (9, 8)),
    (4, 6, 2, {"stride": 3}, (5, 6)),
]


@pytest.mark.parametrize(
    ("channels", "out_channels", "kernel", "keywords", "spatial"), GEOMETRIES, ids=str
)
def test_geometries(channels, out_channels, kernel, keywords, spatial):
    for activation, num_groups in (("gelu", 2), ("silu", None)):
        module = perturbed(
            ConvTransposeActNorm2d(
                channels,
                out_channels,
                kernel,
                num_groups=num_groups,
                activation=activation,
                **keywords,
            )
        )
        for x in (torch.randn(3, channels, *spatial), torch.randn(1, channels, *spatial)):
            exact = composition(module, x, torch.float64)
            torchs = composition(module, x, torch.float32)
            assert_as_accurate_as_torch(module(x), torchs, exact)


def test_same_seed_same_parameters_as_the_composition():
    module = seeded(ConvTransposeActNorm2d, 4, 6, 3, stride=2, num_groups=3)
    torch.manual_seed(1)
    conv, norm = nn.ConvTranspose2d(4, 6, 3, stride=2), nn.GroupNorm(3, 6)
    assert torch.equal(module.conv_transpose.weight, conv.weight)
    assert torch.equal(module.conv_transpose.bias, conv.bias)
    module.conv_transpose.load_state_dict(conv.state_dict(), strict=True)
    module.group_norm.load_state_dict(norm.state_dict(), strict=True)
    assert list(module.state_dict()) == [
        "conv_transpose.weight",
        "conv_transpose.bias",
        "group_norm.weight",
        "group_norm.bias",
    ]


def test_arguments_of_torchs_modules_in_torchs_order():
    module = ConvTransposeActNorm2d(
        4, 6, (3, 2), (2, 2), (1, 0), (1, 1), 2, False, (1, 1), "zeros", None, torch.float64,
        num_groups=3, eps=1e-3, affine=False,
    )  # fmt: skip
    conv = module.conv_transpose
    assert (conv.kernel_size, conv.stride, conv.padding) == ((3, 2), (2, 2), (1, 0))
    assert (conv.output_padding, conv.groups, conv.bias) == ((1, 1), 2, None)
    assert conv.weight.dtype == torch.float64
    assert (module.group_norm.eps, module.group_norm.weight) == (1e-3, None)
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    torch.testing.assert_close(module(x), composition(module, x, torch.float64))
    assert ConvTransposeActNorm2d(4, 6, 3, device="meta").conv_transpose.weight.is_meta


def test_without_norm_and_activation_it_is_the_convolution():
    module = ConvTransposeActNorm2d(4, 6, 3)
    assert module.group_norm is None
    x = torch.randn(2, 4, 5, 5)
    assert torch.equal(module(x), module.conv_transpose(x))
    assert list(module.state_dict()) == ["conv_transpose.weight", "conv_transpose.bias"]


@pytest.mark.parametrize("axes", MODULES)
def test_output_size_picks_among_those_a_stride_allows(axes):
    module = perturbed(MODULES[axes](3, 4, 3, stride=2, padding=1, num_groups=2))
    conv = module.conv_transpose
    x = torch.randn(2, 3, *SPATIAL[axes])
    smallest = module(x).shape[2:]
    for extra in (0, 1):
        size = [extent + extra for extent in smallest]
        result = module(x, output_size=size)
        assert list(result.shape[2:]) == size
        assert result.shape == conv(x, output_size=size).shape
        exact = composition(module, x, torch.float64, (extra,) * axes)
        assert_as_accurate_as_torch(
            result, composition(module, x, torch.float32, (extra,) * axes), exact
        )
        assert torch.equal(module(x, output_size=[2, 4, *size]), result)
    with pytest.raises(ValueError, match="output size"):
        module(x, output_size=[extent + 2 for extent in smallest])


@pytest.mark.parametrize("size", [12, "ab", [12.0, 14.0], [True, 14], torch.ones(2)])
def test_an_output_size_of_another_type_is_refused(size):
    module = MODULES[2](3, 4, 3, stride=2)
    with pytest.raises(TypeError, match=r"^output_size: got .*, expected a sequence of integers"):
        module(torch.randn(2, 3, 5, 6), output_size=size)
    with pytest.raises(TypeError, match=r"^input: got list, expected torch\.Tensor"):
        module([1.0], output_size=[12, 14])


@pytest.mark.parametrize("axes", MODULES)
def test_unbatched_input_where_torchs_convolution_takes_it(axes):
    module = MODULES[axes](3, 4, 3, activation="gelu")
    x = torch.randn(3, *SPATIAL[axes])
    torch.testing.assert_close(module(x), module(x[None])[0])
    torch.testing.assert_close(module(x), torch.nn.functional.gelu(module.conv_transpose(x)))


def test_empty_batch():
    for module, x in (
        (ConvTransposeActNorm2d(3, 4, 3, num_groups=2, activation="relu"), torch.empty(0, 3, 5, 5)),
        (ConvTransposeActNorm1d(3, 4, 3), torch.empty(0, 3, 5)),
        (GroupNorm(3, 3, activation="gelu"), torch.empty(0, 3, 5, 5)),
        (GroupNorm(3, 3), torch.empty(0, 3)),
    ):
        x.requires_grad_()
        result = module(x)
        assert result.shape[0] == 0
        if isinstance(module, GroupNorm):
            assert result.shape == x.shape
        result.sum().backward()
        assert x.grad.shape == x.shape
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name


@pytest.mark.parametrize("axes", MODULES)
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_layout_in_is_layout_out(axes, gradients, dtype):
    conv = MODULES[axes](6, 8, 3, num_groups=2, activation="gelu", dtype=dtype)
    alone = MODULES[axes](6, 8, 3, 2, activation="gelu", dtype=dtype)
    norm = GroupNorm(2, 6, activation="gelu", order="norm_act", dtype=dtype)
    x = torch.randn(2, 6, *SPATIAL[axes], dtype=dtype, requires_grad=gradients)
    for module in (conv, alone, norm):
        with torch.set_grad_enabled(gradients):
            expected = module(x)
            last = module(channels_last(x))
            other = module(strided(x.detach()))
        assert expected.is_contiguous(), module
        assert is_channels_last(last), module
        assert not is_channels_last(other), module
        torch.testing.assert_close(last, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(other, expected, rtol=1e-5, atol=1e-5)


def test_channels_last_weights_are_served():
    module = perturbed(ConvTransposeActNorm2d(6, 8, 3, num_groups=2, activation="gelu"))
    x = torch.randn(2, 6, 5, 6)
    expected = module(x)
    other = copy.deepcopy(module).to(memory_format=torch.channels_last)
    assert not other.conv_transpose.weight.is_contiguous()
    torch.testing.assert_close(other(x), expected, rtol=1e-5, atol=1e-5)
    both = other(x.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(both, expected, rtol=1e-5, atol=1e-5)
    assert both.is_contiguous(memory_format=torch.channels_last)


def test_one_plan_does_not_serve_another_layout_or_alignment(monkeypatch):
    """Same shape and dtype, other memory: each call runs a plan of its layout and alignment."""
    module = perturbed(ConvTransposeActNorm2d(5, 8, 3, num_groups=2, activation="relu"))
    norm = perturbed(GroupNorm(5, 5))
    x = torch.randn(3, 5, 7, 9)
    aligned = memory_at(x, 0)
    assert aligned.data_ptr() % 16 == 0
    ran = []
    run = CpuPlan.run

    def spy(plan, *tensors):
        ran.append(plan.problem)
        return run(plan, *tensors)

    monkeypatch.setattr(CpuPlan, "run", spy)
    inputs = [
        (aligned, "nchw", True),
        (memory_at(x, 4), "nchw", False),
        (channels_last(x), "nhwc", None),
        (strided(x), "strided", None),
        (memory_at(x, 8), "nchw", False),
        (aligned, "nchw", True),
    ]
    with torch.no_grad():
        for each in (module, norm):
            expected = each(x)
            for _ in range(2):  # the second time from the cache
                for other, layout, is_aligned in inputs:
                    ran.clear()
                    torch.testing.assert_close(each(other), expected, rtol=1e-5, atol=1e-5)
                    (problem,) = ran
                    assert problem.layout == layout
                    assert problem.aligned == (other.data_ptr() % 16 == 0)
                    if is_aligned is not None:
                        assert problem.aligned == is_aligned
                    (explanation,) = fusedconv.explain(each, other, file=io.StringIO())
                    assert explanation.problem == problem


def test_group_norm_module_is_torchs_with_an_activation():
    module = seeded(GroupNorm, 4, 12, 1e-3, activation="silu", order="norm_act")
    assert isinstance(module, nn.GroupNorm)
    plain = nn.GroupNorm(4, 12, 1e-3)
    module.load_state_dict(plain.state_dict(), strict=True)
    plain.load_state_dict(module.state_dict(), strict=True)
    perturbed(module)
    for shape in ((2, 12), (2, 12, 5), (2, 12, 5, 6), (2, 12, 2, 3, 4), (2, 12, 1, 2, 2, 3)):
        x = torch.randn(shape)
        arguments = (4, module.weight, module.bias, 1e-3, "silu", "norm_act")
        exact = reference.group_norm(
            x.double(), 4, module.weight.double(), module.bias.double(), *arguments[3:]
        )
        assert_as_accurate_as_torch(module(x), reference.group_norm(x, *arguments), exact)
    assert GroupNorm(4, 12, affine=False).weight is None
    assert GroupNorm(4, 12, device="meta", dtype=torch.float16).weight.dtype == torch.float16


def test_repr_shows_what_the_modules_do():
    module = ConvTransposeActNorm2d(
        4, 6, 3, num_groups=2, activation="gelu", order="norm_act", precision="fp32"
    )
    text = repr(module)
    for part in ("activation='gelu'", "order='norm_act'", "precision='fp32'", "GroupNorm(2, 6"):
        assert part in text
    assert "2, 4" in repr(GroupNorm(2, 4, activation="relu"))
    assert "activation='relu'" in repr(GroupNorm(2, 4, activation="relu"))


@pytest.mark.parametrize("num_groups", [None, 2])
@pytest.mark.parametrize("order", reference.ORDERS)
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_on_the_processor_is_torchs(num_groups, order, low):
    module = perturbed(
        ConvTransposeActNorm2d(4, 6, 3, num_groups=num_groups, activation="gelu", order=order)
    )
    norm = perturbed(GroupNorm(2, 4, activation="gelu", order=order))
    x = torch.randn(2, 4, 5, 6)
    with torch.autocast("cpu", low):
        expected, result = composition(module, x, torch.float32), module(x)
        expected_norm = reference.group_norm(
            x, 2, norm.weight, norm.bias, activation="gelu", order=order
        )
        result_norm = norm(x)
        result.float().sum().backward()
    assert result.dtype == expected.dtype
    assert_as_accurate_as_torch(result, expected, composition(module, x, torch.float64))
    assert result_norm.dtype == expected_norm.dtype
    torch.testing.assert_close(result_norm, expected_norm, rtol=1e-5, atol=1e-5)
    assert module.conv_transpose.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_casts_what_comes_in_the_low_precision(low):
    """The second layer of a network gets the first one's low-precision output."""
    module = perturbed(ConvTransposeActNorm2d(4, 6, 3, num_groups=2, activation="gelu"))
    x = torch.randn(2, 4, 5, 6).to(low)
    with torch.autocast("cpu", low):
        torch.testing.assert_close(module(x), composition(module, x.float(), torch.float32))
        alone = ConvTransposeActNorm2d(4, 6, 3)
        assert torch.equal(alone(x), alone.conv_transpose(x))


def test_autocast_leaves_float64_alone():
    module = ConvTransposeActNorm2d(4, 6, 3, num_groups=2, dtype=torch.float64)
    x = torch.randn(2, 4, 5, 6, dtype=torch.float64)
    expected = module(x)
    with torch.autocast("cpu", torch.bfloat16):
        result = module(x)
    assert result.dtype == torch.float64
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


def test_precision_is_passed_on():
    x = torch.randn(1, 4, 5, 5)
    for precision in (None, "fp32", "tf32"):
        module = ConvTransposeActNorm2d(4, 6, 3, num_groups=2, precision=precision)
        (explanation,) = fusedconv.explain(module, x, file=io.StringIO())
        assert explanation.problem.precision == (precision or "fp32")
        module = ConvTransposeActNorm2d(4, 6, 3, precision=precision)
        for each in (x, x[0]):  # torch's convolution takes a sample without a batch
            (explanation,) = fusedconv.explain(module, each, file=io.StringIO())
            assert explanation.problem.precision == (precision or "fp32")
    with pytest.raises(ValueError, match="precision: got 'half'"):
        ConvTransposeActNorm2d(4, 6, 3, precision="half")(x)


def test_precision_leaves_torchs_switches_as_they_are():
    before = torch.backends.cudnn.allow_tf32
    x = torch.randn(1, 4, 5, 5, requires_grad=True)
    weight = torch.randn(4, 6, 3, 3, requires_grad=True)
    for precision in ("fp32", "tf32"):
        for keywords in ({}, {"stride": 2, "groups": 2}, {"num_groups": 2}):
            wide = {"weight": torch.randn(4, 3, 3, 3)} if "groups" in keywords else {}
            result = functional.conv_transpose_act_norm(
                x, wide.get("weight", weight), precision=precision, **keywords
            )
            result.sum().backward()
            assert torch.backends.cudnn.allow_tf32 == before


def test_state_of_modules_survives_copy_and_pickle():
    for module, x in (
        (
            ConvTransposeActNorm3d(3, 4, 2, num_groups=2, activation="silu", order="norm_act"),
            torch.randn(1, 3, 3, 4, 5),
        ),
        (GroupNorm(2, 4, activation="gelu_tanh"), torch.randn(2, 4, 6)),
    ):
        perturbed(module)
        expected = module(x)
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert torch.equal(other(x), expected)
            assert repr(other) == repr(module)


def test_a_parametrised_weight_is_followed():
    """Weight normalisation replaces the parameter by a computed tensor at each call."""
    module = ConvTransposeActNorm2d(4, 6, 3, num_groups=2, activation="gelu")
    nn.utils.parametrizations.weight_norm(module.conv_transpose)
    x = torch.randn(2, 4, 5, 5)
    module(x).square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
    exact = composition(module, x, torch.float64)
    assert_as_accurate_as_torch(module(x), composition(module, x, torch.float32), exact)
