"""Activations that kernels do not have: torch's operators behind calls of ours or between them.
No GPU."""

from __future__ import annotations

import warnings

import pytest
import reference
import torch
from problems import explained
from reference import (
    GRADIENT_FLOOR,
    LAYOUTS,
    ORDERS,
    TORCH_SCRIPTS,
    assert_as_accurate_as_torch,
    cotangent,
)
from torch import nn
from torch.nn import functional as F

import fusedconv
from fusedconv.activations import ACTIVATIONS, NAMES, UNFUSED, parsed
from fusedconv.functional import conv_transpose_act_norm, group_norm

BY_HAND = {
    "leaky_relu": F.leaky_relu,
    "leaky_relu(0.2)": lambda x: F.leaky_relu(x, 0.2),
    "leaky_relu(-1e-1)": lambda x: F.leaky_relu(x, -0.1),
    "elu": F.elu,
    "elu(0.5)": lambda x: F.elu(x, 0.5),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "hardswish": F.hardswish,
    "mish": F.mish,
}
NORMS = ["group", "instance", "layer", "affine", None]


def test_every_name_is_tested():
    assert {name.partition("(")[0] for name in BY_HAND} == set(UNFUSED)
    assert (*ACTIVATIONS, *UNFUSED) == NAMES


def tensors(dtype, layout="nchw"):
    generator = torch.Generator().manual_seed(3)
    shapes = [(2, 4, 7, 6), (4, 6, 3, 3), *[(6,)] * 3]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    made = [each.to(dtype) for each in made]
    made[0] = LAYOUTS[layout](made[0])
    return made


def arguments(norm, norm_weight, norm_bias):
    if norm is None:
        return {}
    groups = {"num_groups": 3} if norm == "group" else {}
    return {"norm": norm, "norm_weight": norm_weight, "norm_bias": norm_bias, **groups}


def plain(activation, norm, order, x, weight, bias, norm_weight, norm_bias):
    act = BY_HAND[activation]
    x = F.conv_transpose2d(x, weight, bias, 2)
    if norm is None:
        return act(x)
    given = (norm_weight, norm_bias, 1e-5, 3)
    if order == "act_norm":
        return reference.normalised(norm, act(x), *given)
    return act(reference.normalised(norm, x, *given))


def ours(activation, norm, order, x, weight, bias, norm_weight, norm_bias):
    return conv_transpose_act_norm(
        x, weight, bias, 2, activation=activation, order=order,
        **arguments(norm, norm_weight, norm_bias),
    )  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("activation", BY_HAND)
def test_outputs_and_gradients(activation, norm, order, dtype, layout):
    given = tensors(dtype, layout)

    def run(function, cast):
        leaves = [cast(t).detach().requires_grad_() for t in given]
        y = function(activation, norm, order, *leaves)
        y.backward(cotangent(y))
        return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    exact = run(plain, torch.Tensor.double)
    torchs = run(plain, torch.Tensor.clone)
    found = run(ours, torch.Tensor.clone)
    assert len(found) == len(torchs) == (4 if norm is None else 6)
    for number, (one, other, true) in enumerate(zip(found, torchs, exact, strict=True)):
        if number == 3 and norm == "instance" and order == "norm_act":
            continue  # the bias's gradient is zero, and what is found the rounding of its terms
        # Its terms cancel in part where any normalisation takes off a mean behind it.
        assert_as_accurate_as_torch(one, other, true, GRADIENT_FLOOR[dtype] * (20 if number else 1))
    if layout == "nhwc":
        assert found[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("order", ORDERS)
def test_what_kernels_compute(order):
    """The convolution and the normalisation stay ours, in one call where the activation allows."""
    x, weight, bias, norm_weight, norm_bias = tensors(torch.float32)
    found = explained(ours, "tanh", "group", order, x, weight, bias, norm_weight, norm_bias)
    stages = [[str(stage) for stage in each.problem.epilogue] for each in found]
    assert stages == (
        [["bias"], ["group_norm 3"]] if order == "act_norm" else [["bias", "group_norm 3"]]
    )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("activation", BY_HAND)
def test_group_norm(activation, order):
    x = tensors(torch.float32)[0]
    act = BY_HAND[activation]
    expected = F.group_norm(act(x), 2) if order == "act_norm" else act(F.group_norm(x, 2))
    actual = group_norm(x, 2, activation=activation, order=order)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@TORCH_SCRIPTS
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("activation", BY_HAND)
def test_modules(activation, order):
    """Eager, scripted and with a child that must be called."""
    x = tensors(torch.float32)[0]
    module = fusedconv.ConvTransposeActNorm2d(
        4, 6, 3, num_groups=2, activation=activation, order=order
    )
    norm = fusedconv.GroupNorm(2, 4, activation=activation, order=order)
    for each in (module, norm):
        y = each(x)
        torch.testing.assert_close(torch.jit.script(each)(x), y)
        assert repr(activation) in repr(each)
    y = module(x)
    module.conv_transpose.register_forward_hook(lambda module, args, output: None)
    torch.testing.assert_close(module(x), y, rtol=1e-5, atol=1e-6)


def test_without_a_batch():
    x, weight, bias = tensors(torch.float32)[:3]
    expected = F.conv_transpose2d(x[0], weight, bias).tanh()
    actual = conv_transpose_act_norm(x[0], weight, bias, activation="tanh")
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("norm", NORMS)
def test_compiled(norm, compiled):
    given = tensors(torch.float32)

    def call(*tensors):
        return ours("leaky_relu(0.2)", norm, "norm_act", *tensors)

    graph = compiled(call, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(graph(*given), call(*given))


def test_under_autocast():
    given = tensors(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        actual = ours("mish", "group", "act_norm", *given)
        expected = plain("mish", "group", "act_norm", *given)
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("activation", "text"),
    [
        ("leaky_relu(x)", r"^activation: got 'leaky_relu\(x\)', expected a finite number in the"),
        ("elu(inf)", r"^activation: got 'elu\(inf\)', expected a finite number in the brackets"),
        ("leaky_relu()", "expected a finite number in the brackets"),
        ("tanh(2)", r"^activation: got 'tanh\(2\)', expected None or one of"),
        ("relu(1)", r"^activation: got 'relu\(1\)', expected None or one of"),
        ("leaky_relu(1))", "expected None or one of"),
        ("LeakyReLU", "expected None or one of"),
    ],
)
def test_names_that_are_refused(activation, text):
    x, weight, *_ = tensors(torch.float32)
    for call in (
        lambda: conv_transpose_act_norm(x, weight, activation=activation),
        lambda: group_norm(x, 2, activation=activation),
        lambda: fusedconv.ConvTransposeActNorm2d(4, 6, 3, activation=activation),
        lambda: fusedconv.GroupNorm(2, 4, activation=activation),
    ):
        with pytest.raises(ValueError, match=text):
            call()


def test_arguments_of_a_norm_behind_are_checked_first():
    x, weight, _, norm_weight, _ = tensors(torch.float32)
    for order in ORDERS:
        with pytest.raises(ValueError, match="norm_weight: got"):
            conv_transpose_act_norm(
                x, weight, activation="tanh", order=order, num_groups=3, norm_weight=norm_weight[:5]
            )
        with pytest.raises(ValueError, match="num_groups: got 4"):
            conv_transpose_act_norm(x, weight, activation="tanh", order=order, num_groups=4)


@pytest.mark.filterwarnings(r"ignore:`torch\.jit\.")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("norm", NORMS)
def test_traced_without_a_warning(norm, order):
    x, *given = tensors(torch.float32)

    def call(x):
        return ours("mish", norm, order, x, *given)

    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        traced = torch.jit.trace(call, (x,))
    other = torch.randn(3, *x.shape[1:])
    torch.testing.assert_close(traced(other), call(other))


def test_parsed():
    assert parsed(None) == ("identity", None)
    assert parsed("gelu") == ("gelu", None)
    assert parsed("leaky_relu") == ("leaky_relu", 0.01)
    assert parsed("elu(2)") == ("elu", 2.0)


@TORCH_SCRIPTS
def test_a_slope_of_zero_is_none():
    module = fusedconv.ConvTransposeActNorm2d(4, 6, 3, activation="leaky_relu(0)")
    x = tensors(torch.float32)[0]
    expected = nn.functional.relu(module.conv_transpose(x))
    torch.testing.assert_close(module(x), expected)
    torch.testing.assert_close(torch.jit.script(module)(x), expected)
