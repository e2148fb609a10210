"""The argument ``norm``: instance and layer normalisation and affine maps behind a convolution,
against torch's operators. No GPU."""

from __future__ import annotations

import pytest
import reference
import torch
from reference import LAYOUTS, ORDERS, assert_as_accurate_as_torch, relative_error
from torch.nn import functional as F

from fusedconv.functional import conv_transpose_act_norm, fold_batch_norm

CHANNELS = 6


def plain(norm, order, activation, x, weight, bias, norm_weight, norm_bias):
    return reference.conv_transpose_act_norm(
        x, weight, bias, 2, activation=activation, order=order, norm=norm,
        norm_weight=norm_weight, norm_bias=norm_bias,
    )  # fmt: skip


def tensors(dtype, layout="nchw", requires_grad=False):
    generator = torch.Generator().manual_seed(6)
    shapes = [(2, 4, 5, 6), (4, CHANNELS, 3, 3), *[(CHANNELS,)] * 3]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    made = [each.to(dtype) for each in made]
    made[0] = LAYOUTS[layout](made[0])
    return [each.requires_grad_(requires_grad) for each in made]


def ours(norm, order, activation, x, weight, bias, norm_weight, norm_bias):
    return conv_transpose_act_norm(
        x,
        weight,
        bias,
        stride=2,
        activation=activation,
        order=order,
        norm=norm,
        norm_weight=norm_weight,
        norm_bias=norm_bias,
    )


@pytest.mark.parametrize("norm", ["instance", "layer", "affine"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_outputs(norm, order, activation, dtype, layout):
    given = tensors(dtype, layout)
    exact = plain(norm, order, activation, *(each.double() for each in given))
    torchs = plain(norm, order, activation, *given)
    actual = ours(norm, order, activation, *given)
    floor = 1e-2 if dtype is torch.bfloat16 else 1e-6
    assert_as_accurate_as_torch(actual, torchs, exact, floor)
    assert actual.is_contiguous(
        memory_format=torch.channels_last if layout == "nhwc" else torch.contiguous_format
    )


@pytest.mark.parametrize("norm", ["instance", "layer", "affine"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients(norm, order, compiled):
    def gradients(function):
        given = tensors(torch.float64, requires_grad=True)
        output = function(norm, order, "silu", *given)
        return torch.autograd.grad(output, given, output.detach().cos())

    if compiled:  # the operator, as traces hold it
        operator = torch.compile(ours, backend="aot_eager", fullgraph=True)
        found = gradients(operator)
    else:
        found = gradients(ours)
    for got, expected in zip(found, gradients(plain), strict=True):
        if expected.norm() > 1e-9:  # a bias in front of an instance norm has no gradient
            assert relative_error(got, expected) < 1e-10


def test_a_batch_norm_is_an_affine_map():
    norm = torch.nn.BatchNorm2d(CHANNELS).eval()
    with torch.no_grad():
        for each in (norm.weight, norm.bias, norm.running_mean):
            each.normal_()
        norm.running_var.uniform_(0.5, 2)
    x, weight, bias, *_ = tensors(torch.float32)
    folded = fold_batch_norm(norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.eps)
    actual = ours("affine", "norm_act", "relu", x, weight, bias, *folded)
    expected = F.relu(norm(F.conv_transpose2d(x, weight, bias, 2)))
    torch.testing.assert_close(actual, expected)
    bare = fold_batch_norm(norm.running_mean.half(), norm.running_var.half())
    assert [each.dtype for each in bare] == [torch.float32] * 2


NAMES = ("running_mean", "running_var", "weight", "bias")


@pytest.mark.parametrize("name", NAMES[1:])
def test_tensors_of_a_batch_norm_have_one_shape(name):
    given = dict.fromkeys(NAMES, torch.ones(6))
    with pytest.raises(ValueError, match=rf"{name}: got shape \(1,\), expected .*\(6,\)"):
        fold_batch_norm(**{**given, name: torch.ones(1)})


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"running_mean": torch.ones(1, 6)}, ValueError, r"running_mean: got shape \(1, 6\)"),
        ({"running_mean": torch.ones(())}, ValueError, r"running_mean: got shape \(\), expected o"),
        ({"bias": torch.ones(2, 3)}, ValueError, r"bias: got shape \(2, 3\), expected one axis"),
        (
            dict.fromkeys(NAMES, torch.ones(6, dtype=torch.int64)),
            TypeError,
            "running_mean: got dtype torch.int64, expected torch.float32 or ",
        ),
        ({"weight": torch.ones(6).bool()}, TypeError, "weight: got dtype torch.bool, expected "),
        (
            {"running_mean": torch.ones(6).double()},
            TypeError,
            "running_var: got dtype torch.float32, expected torch.float64 beside running_mean's ",
        ),
        ({"bias": torch.ones(6).double()}, TypeError, "bias: got dtype torch.float64, expected "),
        (
            {"running_var": torch.ones(6, device="meta")},
            ValueError,
            "running_var: got device meta, expected cpu as running_mean's",
        ),
        ({"weight": torch.ones(6).to_sparse()}, TypeError, "weight: got layout torch.sparse_coo"),
    ],
)
def test_tensors_that_no_batch_norm_has(given, error, text):
    with pytest.raises(error, match=f"^{text}"):
        fold_batch_norm(**{**dict.fromkeys(NAMES, torch.ones(6)), **given})


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"norm": "none"}, ValueError, "norm: got 'none', expected None or one of 'group', "),
        ({"norm": 3}, TypeError, "norm: got 3"),
        ({"norm": "layer", "num_groups": 2}, ValueError, "num_groups: got 2 for norm 'layer'"),
        ({"norm": "group"}, ValueError, "num_groups: got None for norm 'group', expected a posi"),
    ],
    ids=str,
)
def test_errors(arguments, error, text):
    x, weight, *_ = tensors(torch.float32)
    with pytest.raises(error, match=f"^{text}"):
        conv_transpose_act_norm(x, weight, **arguments)


def test_a_norm_needs_a_batch():
    x, weight, *_ = tensors(torch.float32)
    with pytest.raises(ValueError, match=r"^input: got shape"):
        conv_transpose_act_norm(x[0], weight, norm="layer")
