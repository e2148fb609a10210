"""fusedconv.convert: sequences and single modules, what stays as it was, copies and reverting."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict

import pytest
import torch
from converting import assert_same, calls, converted, results
from reference import GRADIENT_FLOOR, LAYOUTS, assert_as_accurate_as_torch, cotangent
from systems import SPATIAL
from test_composing import HOOKS, Adapted, Scaled, doubling, replica_of
from torch import nn
from torch.nn.utils import parametrize

import fusedconv
from fusedconv import ConvTransposeActNorm2d, ModelNew

CONVS = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
INSTANCE = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}
BATCH = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}

#: By the name that calls have.
NORMS = {
    "group": lambda axes: nn.GroupNorm(2, 6),
    "instance": lambda axes: INSTANCE[axes](6, affine=True),
    "affine": lambda axes: BATCH[axes](6).eval(),
}
ACTIVATIONS = {
    "relu": lambda: nn.ReLU(inplace=True),
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU("tanh"),
    "silu": nn.SiLU,
}


def conv(axes=2, **keywords):
    return CONVS[axes](4, 6, 3, stride=2, **keywords)


def image(axes=2):
    return torch.randn(2, 4, *SPATIAL[axes])


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("axes", CONVS)
def test_a_sequence_is_one_call(axes, norm):
    for name, activation in ACTIVATIONS.items():
        parts = {norm: NORMS[norm](axes), name: activation()}
        for order in ([norm, name], [name, norm], [norm], [name]):
            model, original = converted(
                nn.Sequential(conv(axes), *(copy.deepcopy(parts[each]) for each in order))
            )
            model[1:].eval(), original[1:].eval()
            assert calls(model, image(axes)) == [" ".join(["conv", *order])]
            assert_same(model, original, image(axes))


def test_single_modules_are_computed_by_ours():
    for module, x, call in (
        (conv(), image(), "conv"),
        (conv(bias=False, groups=2, dilation=2, output_padding=1), image(), "conv"),
        (nn.GroupNorm(2, 4), image(), "group"),
        (nn.GroupNorm(2, 32, affine=False), torch.randn(3, 32), "group"),
    ):
        model, original = converted(module)
        assert calls(model, x) == [call]
        assert_same(model, original, x)
    model, original = converted(conv())
    for size in ([13, 15], [14, 16]):
        torch.testing.assert_close(model(image(), size).shape, original(image(), size).shape)
    single = image()[0]  # no batch
    torch.testing.assert_close(model(single), original(single))


def test_group_norms_with_activations_and_nested_sequences():
    model, original = converted(
        nn.Sequential(
            nn.Conv2d(4, 6, 3),
            nn.SiLU(),
            nn.GroupNorm(3, 6),
            nn.Sequential(nn.ReLU(inplace=True), nn.GroupNorm(2, 6), nn.Dropout(0.0)),
            nn.ReLU(inplace=True),
            CONVS[2](6, 4, 2),
            nn.Sequential(OrderedDict(norm=nn.InstanceNorm2d(4), drop=nn.Identity())),
            nn.GELU(),
            nn.GELU(),
        )
    )
    assert calls(model, image()) == ["silu group", "group relu", "conv instance gelu"]
    assert_same(model, original, image())


def test_what_the_report_says(capsys):
    model = nn.Sequential(
        OrderedDict(
            up=conv(),
            norm=nn.BatchNorm2d(6),
            act=nn.ReLU(),
            tail=nn.Sequential(CONVS[2](6, 4, 2), nn.GroupNorm(2, 4), nn.SiLU(), nn.GELU()),
            pool=nn.AvgPool2d(2),
            lone=nn.GroupNorm(1, 4),
        )
    )
    report = fusedconv.convert(model)
    assert [str(each) for each in report.replaced] == [
        "tail.0, tail.1, tail.2: ConvTranspose2d -> group_norm -> silu",
        "up: ConvTranspose2d",
        "lone: GroupNorm",
    ]
    assert [str(each) for each in report.kept] == [
        "norm: not fused with up: BatchNorm2d is in training mode, and fused in evaluation mode "
        "only",
        "tail.3: not fused with tail.0: GELU is one stage too many",
    ]
    assert repr(report) == "Conversion(3 replacements, 0 followed, 2 kept, dry_run=False)"
    for each in (*report.replaced, *report.kept):
        assert f"    {each}" in str(report).splitlines()
    assert str(fusedconv.convert(model)) == str(report)


def test_a_report_of_nothing_announces_nothing():
    assert str(fusedconv.convert(nn.Linear(2, 2))) == "replaced in modules: 0"


# ---- what stays as it was ------------------------------------------------------------------------


def test_state_dicts_parameters_and_optimizers_are_shared():
    model = nn.Sequential(conv(), nn.GroupNorm(2, 6), nn.ReLU())
    original = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = list(model.parameters())
    fusedconv.convert(model)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == list(original.state_dict())
    results(model, image())
    optimizer.step()
    with pytest.raises(AssertionError):
        torch.testing.assert_close(model[0].weight, original[0].weight)
    original.load_state_dict(model.state_dict())
    x = image()
    torch.testing.assert_close(model(x), original(x))
    model.load_state_dict({name: 2 * value for name, value in original.state_dict().items()})
    original.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(x), original(x), rtol=1e-4, atol=1e-5)


def test_batch_norm_in_training_mode_is_torchs():
    model, original = converted(nn.Sequential(conv(), nn.BatchNorm2d(6), nn.ReLU()))
    for _ in range(2):
        assert calls(model.train(), image()) == ["conv"]
        model, original = copy.deepcopy(original.train()), original
        fusedconv.convert(model)
        assert_same(model, original, image())
        for ours, torchs in zip(model.buffers(), original.buffers(), strict=True):
            torch.testing.assert_close(ours, torchs)
        assert calls(model.eval(), image()) == ["conv affine relu"]
        assert_same(model, original.eval(), image())


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("place", ["0", "1", "1.0", "2"])
def test_hooks_run_wherever_they_are(place, kind):
    model, original = converted(nn.Sequential(conv(), nn.Sequential(nn.GroupNorm(2, 6)), nn.GELU()))
    for hooked in (False, True):
        handles = [HOOKS[kind](each.get_submodule(place)) for each in (model, original) if hooked]
        assert (calls(model, image()) == ["conv group gelu"]) != hooked
        for ours, torchs in zip(results(model, image_1), results(original, image_1), strict=True):
            torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-4)
    for handle in handles:
        handle.remove()
    assert calls(model, image()) == ["conv group gelu"]


image_1 = torch.randn(2, 4, 6, 7, generator=torch.Generator().manual_seed(3))


def test_replaced_children_are_called():
    model, original = converted(nn.Sequential(conv(), nn.GroupNorm(2, 6), nn.GELU()))
    for each in (model, original):
        each[2] = nn.Tanh()
    assert calls(model, image()) == ["conv group"]
    assert_same(model, original, image())
    for each in (model, original):
        each[1].__class__ = Scaled
    assert calls(model, image()) == ["conv"]
    assert_same(model, original, image())
    for each in (model, original):
        each[0] = Adapted(each[0])
        each[2].forward = lambda x: x + 1
    assert_same(model, original, image())


def test_a_forward_replaced_later_is_called(monkeypatch):
    model, original = converted(nn.Sequential(conv(), nn.GroupNorm(2, 6)))
    monkeypatch.setattr(nn.GroupNorm, "forward", lambda self, x: 3 * x)
    torch.testing.assert_close(model(image_1), 3 * original[0](image_1))
    monkeypatch.setattr(nn.ConvTranspose2d, "forward", lambda self, x, output_size=None: x)
    assert torch.equal(model(image_1), 3 * image_1)
    monkeypatch.setattr(nn.Sequential, "forward", lambda self, x: x - 1)
    assert torch.equal(model(image_1), image_1 - 1)


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


class Derived(nn.ConvTranspose2d):
    def forward(self, input, output_size=None):
        return super().forward(input, output_size) + 1


def test_what_is_left_and_why():
    parametrised = parametrize.register_parametrization(conv(), "weight", Doubled())
    patched = conv()
    patched.forward = lambda x: x
    model = nn.ModuleDict(
        {
            "derived": Derived(4, 6, 3),
            "lazy": nn.LazyConvTranspose2d(6, 3),
            "parametrised": nn.Sequential(parametrised, nn.ReLU()),
            "patched": patched,
            "alone": parametrize.register_parametrization(conv(), "weight", Doubled()),
            "channels": nn.Sequential(conv(), nn.BatchNorm2d(5).eval()),
            "axes": nn.Sequential(conv(), nn.BatchNorm3d(6).eval()),
            "tracking": nn.Sequential(conv(), nn.InstanceNorm2d(6, track_running_stats=True)),
            "untracked": nn.Sequential(conv(), nn.BatchNorm2d(6, track_running_stats=False).eval()),
            "ours": ConvTransposeActNorm2d(4, 6, 3, num_groups=2),
            "drop_in": ModelNew(4, 6, 3, 1, 1, 2),
            "norm": fusedconv.GroupNorm(2, 6),
            "inplace": nn.Sequential(nn.ReLU(inplace=True), nn.GroupNorm(2, 4)),
        }
    )
    report = fusedconv.convert(model)
    assert {each.name: each.reason for each in report.kept} == {
        "derived": "Derived is not torch's class",
        "lazy": "LazyConvTranspose2d is not torch's class",
        "parametrised.0": "ParametrizedConvTranspose2d computes its parameters; within sequences "
        "it is fused",
        "patched": "it has a forward of its own",
        "alone": "ParametrizedConvTranspose2d computes its parameters; within sequences it is "
        "fused",
        "channels.1": "not fused with channels.0: BatchNorm2d has 5 channels, expected 6",
        "axes.1": "not fused with axes.0: BatchNorm3d is not for 2 spatial axes",
        "tracking.1": "not fused with tracking.0: InstanceNorm2d has running statistics",
        "untracked.1": "not fused with untracked.0: BatchNorm2d has no running statistics",
        "inplace.1": "not fused with inplace.0: it writes to its input",
    }
    assert calls(model["parametrised"], image()) == ["conv relu"]
    assert calls(model["ours"], image()) == ["conv group"]
    for name in ("ours", "drop_in", "norm"):
        assert not any(name in str(each) for each in report.replaced)


def test_inputs_that_ours_do_not_take_are_torchs():
    model, original = converted(nn.Sequential(conv(), nn.GroupNorm(3, 12), nn.ReLU()))
    # What torch takes for the channels of an input without a batch, its normalisation refuses.
    for x in (torch.randn(2, 4), torch.randn(4, 5, 5)):
        for each in (model, original):
            with pytest.raises((RuntimeError, ValueError), match="xpected"):
                each(x)
    for module, x in (
        (nn.ConvTranspose2d(4, 6, 3, dtype=torch.complex64), torch.randn(2, 4, 5, 5) + 1j),
        (nn.Sequential(CONVS[1](4, 6, 3), nn.InstanceNorm1d(6)), torch.randn(4, 5)),
    ):
        model, original = converted(module)
        assert torch.equal(model(x), original(x))


def test_modules_used_twice():
    act, shared = nn.ReLU(), CONVS[2](4, 4, 3)
    model, original = converted(
        nn.Sequential(shared, act, nn.GroupNorm(2, 4), shared, nn.GroupNorm(2, 4), act, shared)
    )
    assert calls(model, image()) == ["conv relu group", "conv group relu", "conv"]
    assert_same(model, original, image())


def test_a_layer_shared_with_a_module_of_ours():
    ours = ConvTransposeActNorm2d(4, 6, 3, num_groups=2)
    model, original = converted(
        nn.ModuleDict({"ours": ours, "plain": nn.Sequential(conv(), ours.group_norm)})
    )
    for name in model:
        assert_same(model[name], original[name], image())
    assert type(ours.group_norm) is nn.GroupNorm


# ---- copies --------------------------------------------------------------------------------------


def network():
    return nn.Sequential(
        conv(), nn.GroupNorm(2, 6), nn.GELU(), CONVS[2](6, 4, 3), nn.GroupNorm(1, 4)
    )


def test_copies_pickles_replicas_and_slices_are_converted():
    model, original = converted(network())
    expected = ["conv group gelu", "conv group"]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), replica_of(model)):
        assert calls(other, image()) == expected
        assert torch.equal(other(image_1), model(image_1))
    assert calls(model[:3], image()) == expected[:1]
    swapped = {key: 2 * value for key, value in model.state_dict().items()}
    torch.testing.assert_close(
        *(torch.func.functional_call(each, swapped, (image_1,)) for each in (model, original)),
        rtol=1e-4,
        atol=1e-5,
    )
    half = copy.deepcopy(model).to(torch.bfloat16)
    assert half(image_1.bfloat16()).dtype == torch.bfloat16
    assert calls(half, image_1.bfloat16()) == expected
    with torch.autocast("cpu", torch.bfloat16):
        assert model(image_1).dtype == original(image_1).dtype
        torch.testing.assert_close(model(image_1), original(image_1), rtol=3e-2, atol=3e-2)


def test_lazy_modules_are_called_by_their_user():
    model = nn.Sequential(nn.LazyConvTranspose2d(6, 3), nn.LazyBatchNorm2d(), nn.ReLU())
    with pytest.raises(ValueError, match=r"model: got 0\.weight without a shape, expected lazy"):
        fusedconv.convert(model, (image_1,))
    assert type(model) is nn.Sequential and type(model[0]) is nn.LazyConvTranspose2d
    fusedconv.convert(model)
    model(image_1)
    report = fusedconv.convert(model.eval(), (image_1,))
    assert "0, 1, 2: ConvTranspose2d -> batch_norm -> relu" in map(str, report.replaced)


def test_an_instance_of_one_value_is_refused_as_torch_does():
    model, original = converted(nn.Sequential(nn.ConvTranspose2d(4, 6, 1), nn.InstanceNorm2d(6)))
    for each in (model, original):
        with pytest.raises(ValueError, match="more than 1 spatial element"):
            each(image_1[..., :1, :1])
    assert_same(model, original, image_1[..., :1])


class Doubling(nn.Sequential):
    """A sequence that does more than its forward."""

    def __call__(self, x):
        return 2 * super().__call__(x)


def test_sequences_with_a_call_of_their_own_are_called():
    model, original = converted(nn.Sequential(conv(), Doubling(nn.GroupNorm(2, 6)), nn.GELU()))
    assert_same(model, original, image_1)
    assert calls(model, image()) == ["conv", "group"]


class Named(nn.Module):
    """A module whose child, parameter and buffer have names of the other kind of attributes."""

    def __init__(self):
        super().__init__()
        self.original = conv()
        self.members = nn.Parameter(torch.ones(6, 1, 1))
        self.register_buffer("converted", torch.ones(6, 1, 1))
        self.norm = nn.GroupNorm(2, 6)

    def forward(self, x):
        return nn.functional.gelu(self.norm(self.original(x))) * self.members + self.converted


def test_names_of_children_parameters_and_buffers_are_theirs(compiled):
    model, original = converted(Named())
    assert_same(model, original, image_1)
    assert calls(model, image()) == ["conv group gelu"]


def test_a_call_that_fails_leaves_the_model_as_it_was():
    model = network()
    with pytest.raises(ValueError, match="input: got 5 channels"):
        fusedconv.convert(model, (torch.randn(2, 5, 6, 7),))
    assert type(model) is nn.Sequential and type(model[0]) is nn.ConvTranspose2d


def test_the_reports_call_changes_no_buffer_and_no_random_number():
    model = nn.Sequential(conv(), nn.BatchNorm2d(6), nn.Dropout(0.5))
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    fusedconv.convert(model, (image_1,))
    assert torch.equal(torch.rand(3), expected)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("function", [fusedconv.convert, fusedconv.revert])
def test_what_is_no_model_is_refused(function):
    with pytest.raises(TypeError, match=r"model: got .*, expected a torch\.nn\.Module"):
        function(doubling)


@pytest.mark.parametrize(
    ("name", "value"), [("args", torch.ones(1, 4, 5, 5)), ("args", "x"), ("kwargs", [1])]
)
def test_arguments_of_a_call_are_a_tuple_and_names(name, value):
    model = network()
    with pytest.raises(TypeError, match=rf"^{name}: got .*, expected "):
        fusedconv.convert(model, **{name: value})
    assert type(model) is type(network())


def test_flags_are_flags():
    for name in ("follow", "dry_run"):
        with pytest.raises(TypeError, match=f"{name}: got 'yes'"):
            fusedconv.convert(network(), **{name: "yes"})


# ---- torch's compilers and tracers ---------------------------------------------------------------


def test_tracers_see_the_operators(compiled):
    model, original = converted(network())
    for traced in (
        compiled(model, fullgraph=True, backend="aot_eager"),
        torch.export.export(model, (image_1,)).module(),
        torch.fx.symbolic_trace(model),
    ):
        torch.testing.assert_close(traced(image_1), original(image_1), rtol=1e-5, atol=1e-5)
    program = torch.export.export(model, (image_1,))
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("fusedconv.conv_transpose_act_norm.default") == 2
    assert_same(compiled(model, fullgraph=True, backend="aot_eager"), original, image_1)
    out = torch.func.vmap(model)(torch.stack([image_1, image_1]))
    torch.testing.assert_close(out[1], original(image_1), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_torchscript_traces_and_refuses_to_script():
    model, original = converted(network())
    traced = torch.jit.trace(model, image_1)
    torch.testing.assert_close(traced(image_1), original(image_1), rtol=1e-5, atol=1e-5)
    with pytest.raises(NotImplementedError, match=r"fusedconv\.revert restores it"):
        torch.jit.script(nn.Sequential(model))


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("gradients", [False, True])
def test_a_trace_is_the_same_with_and_without_gradients(gradients):
    """torch checks a trace by one without them."""
    model, original = converted(nn.Sequential(conv(), nn.BatchNorm2d(6), nn.ReLU()).eval())
    original.eval()
    with torch.set_grad_enabled(gradients):
        traced = torch.jit.trace(model, image_1)
    assert "conv_transpose_act_norm" in str(traced.inlined_graph)
    assert "aten::batch_norm" not in str(traced.inlined_graph)
    assert_same(traced, original, image_1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_batch_norm_in_evaluation_mode_is_trained_through(dtype, layout):
    torch.manual_seed(0)
    x = image()
    original = nn.Sequential(conv(), nn.BatchNorm2d(6), nn.ReLU()).eval().to(dtype)
    nn.init.uniform_(original[1].running_mean, -1.0, 1.0)
    nn.init.uniform_(original[1].running_var, 0.5, 2.0)
    model = copy.deepcopy(original)
    report = fusedconv.convert(model)
    assert "batch_norm -> relu" in str(report)
    exact = copy.deepcopy(original).double()
    found = []
    for each, of in ((model, dtype), (original, dtype), (exact, torch.float64)):
        leaf = LAYOUTS[layout](x.to(dtype).to(of)).requires_grad_()
        output = each(leaf)
        found.append(torch.autograd.grad(output, [leaf, *each.parameters()], cotangent(output)))
    for actual, torchs, expected in zip(*found, strict=True):
        assert_as_accurate_as_torch(actual, torchs, expected, 4 * GRADIENT_FLOOR[dtype])
