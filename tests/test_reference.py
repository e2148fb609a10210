"""torch's operators behind ours: dtypes, strides and what is saved are as ours promise."""

from __future__ import annotations

import pytest
import reference
import torch
from operators import CONV, NORM, of_fakes
from reference import LAYOUTS

from fusedconv.ops import common
from fusedconv.plan import Outputs

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _torch_serves(force):
    force("torch")


def affine(dtype):
    """Weight and bias of GroupNorm, every other value of their memory."""
    return [reference.strided(torch.randn(4).to(dtype)) for _ in range(2)]


def norm_arguments(x, output_dtype=None, order="act_norm"):
    return (x, 2, *affine(x.dtype), 1e-3, "silu", order, output_dtype)


def conv_arguments(x, save, num_groups=2, output_dtype=None):
    weight, bias = torch.randn(3, 4, 2, 3).to(x.dtype), torch.randn(4).to(x.dtype)
    norm = affine(x.dtype) if num_groups else (None, None)
    return (
        x, weight, bias, (1, 2), (1, 0), (0, 1), (1, 1), 1, "gelu", "act_norm", num_groups, *norm,
        1e-3, None, output_dtype, None, save,
    )  # fmt: skip


def assert_as_promised(operator, arguments):
    """Shapes, strides and dtypes are the fake implementation's; no output shares memory."""
    outputs = operator(*arguments)
    for real, fake in zip(outputs, of_fakes(operator, arguments), strict=True):
        assert (real.shape, real.dtype) == (fake.shape, fake.dtype)
        assert real.stride() == fake.stride()
    given = [a for a in arguments if isinstance(a, torch.Tensor)]
    addresses = [t.untyped_storage().data_ptr() for t in (*outputs, *given) if t.numel()]
    assert len(set(addresses)) == len(addresses)
    return outputs


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("gradients", [False, True])
def test_group_norm_is_as_promised(dtype, layout, gradients):
    x = LAYOUTS[layout](torch.randn(2, 4, 5, 6).to(dtype))
    arguments = norm_arguments(x)
    with torch.set_grad_enabled(gradients):
        output, mean, rstd = assert_as_promised(NORM, arguments)
    double = [t.double() for t in (x, *arguments[2:4])]
    expected = reference.group_norm(double[0], 2, *double[1:], 1e-3, activation="silu")
    assert reference.relative_error(output, expected) < 2 * torch.finfo(dtype).eps
    grouped = torch.nn.functional.silu(double[0]).reshape(2, 2, -1)
    tolerance = 4 * torch.finfo(dtype).eps
    assert reference.relative_error(mean, grouped.mean(-1)) < 4 * tolerance
    assert (
        reference.relative_error(rstd, (grouped.var(-1, correction=0) + 1e-3).rsqrt()) < tolerance
    )


@pytest.mark.parametrize("num_groups", [0, 2])
@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_convolution_is_as_promised(dtype, layout, save, num_groups):
    x = LAYOUTS[layout](torch.randn(2, 3, 5, 6).to(dtype))
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            assert_as_promised(CONV, conv_arguments(x, save, num_groups))


@pytest.mark.parametrize("order", reference.ORDERS)
def test_results_wider_than_the_input(order):
    """What autocast on CUDA asks for: GroupNorm in float32, with float32 parameters."""
    x, scale = torch.randn(2, 4, 5, 6).bfloat16(), affine(torch.float32)
    arguments = (x, 2, *scale, 1e-3, "silu", order, torch.float32)
    output, *_ = assert_as_promised(NORM, arguments)
    assert output.dtype == torch.float32
    if order == "norm_act":
        expected = reference.group_norm(x.float(), 2, *scale, 1e-3, "silu", order)
        torch.testing.assert_close(output, expected)
    for save in (False, True):
        arguments = list(conv_arguments(x[:, :3], save, 2, torch.float32))
        arguments[11:13] = scale
        output, *_ = assert_as_promised(CONV, arguments)
        assert output.dtype == torch.float32


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", ["identity", "relu", "silu"])
def test_what_is_saved_is_no_part_of_the_output(activation, layout):
    """Nothing behind a convolution alone, whose gradients do not read it, or with a ReLU, whose
    gradient reads the output."""
    arguments = list(conv_arguments(LAYOUTS[layout](torch.randn(2, 3, 5, 6)), True, 0))
    arguments[8] = activation
    output, conv_output, *_ = assert_as_promised(CONV, arguments)
    if activation != "silu":
        assert conv_output.numel() == 0
    else:
        torch.testing.assert_close(output, torch.nn.functional.silu(conv_output))
        output.fill_(7)
        assert not (conv_output == 7).any()


def test_what_a_kernel_returns_in_other_strides_is_made_dense():
    x = torch.randn(2, 4, 5, 6)
    for like in (x, reference.channels_last(x)):
        found = Outputs(reference.strided(x), reference.strided(x), None, None)
        output, conv_output, mean, rstd = common.operator_outputs(like, found)
        assert output.stride() == conv_output.stride() == like.stride()
        assert torch.equal(output, x)
        assert torch.equal(conv_output, x)
        assert mean.numel() == rstd.numel() == 0
