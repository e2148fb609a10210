"""The drop-ins of the three systems: parameters, results and gradients are the originals'."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from reference import GRADIENT_FLOOR, assert_as_accurate_as_torch, channels_last, cotangent
from systems import SMALL, perturbed, seeded

import fusedconv
from fusedconv.models import SYSTEMS


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
        output.backward(cotangent(output))
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
