"""Gradients of depthwise transposed convolutions on the GPU, against fp64, relative to eager's
error."""

from __future__ import annotations

import random

import pytest
import torch
from gpu_checks import output_extent, poison, random_axis
from problems import explained
from reference import CONVOLUTIONS, GRADIENT_FLOOR, LAYOUTS, relative_error

from fusedconv.functional import conv_transpose_act_norm

pytestmark = pytest.mark.gpu

KERNEL = "direct_gradients"
DTYPES = pytest.mark.parametrize("dtype", list(GRADIENT_FLOOR)[1:], ids=str)
LAYOUT = pytest.mark.parametrize("layout", ["nchw", "nhwc"])


@pytest.fixture(autouse=True)
def strict(monkeypatch, force):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    force(KERNEL)


def gradients(function, tensors, grad, needs=(True, True, True), **keywords):
    leaves = [
        tensor.detach().requires_grad_(need) for tensor, need in zip(tensors, needs, strict=True)
    ]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    return torch.autograd.grad(function(*leaves, **keywords), wanted, grad.to(leaves[0].dtype))


def assert_as_accurate(x, weight, bias, needs=(True, True, True), **keywords):
    axes = x.dim() - 2
    convolution = CONVOLUTIONS[axes]
    tensors = (x, weight, bias)
    with torch.no_grad():
        grad = torch.randn_like(convolution(*tensors, **keywords))
    poison()
    actual = gradients(conv_transpose_act_norm, tensors, grad, needs, **keywords)
    again = gradients(conv_transpose_act_norm, tensors, grad, needs, **keywords)
    torchs = gradients(convolution, tensors, grad, needs, **keywords)
    exact = gradients(convolution, [each.double() for each in tensors], grad, needs, **keywords)
    for one, same, other, right in zip(actual, again, torchs, exact, strict=True):
        assert torch.equal(one, same)
        if float(right.norm()) < 0.2 * float(grad.double().norm()):
            continue  # terms cancel
        limit = 2 * relative_error(other, right) + 10 * GRADIENT_FLOOR[x.dtype]
        assert relative_error(one, right) <= limit, (x.shape, weight.shape, keywords)


def tensors_of(channels, spatial, kernel, layout, dtype, batch=2):
    x = torch.randn(batch, channels, *spatial, device="cuda").to(dtype)
    weight = torch.randn(channels, 1, *kernel, device="cuda").to(dtype)
    bias = torch.randn(channels, device="cuda").to(dtype)
    return LAYOUTS[layout](x), weight, bias


@DTYPES
@LAYOUT
@pytest.mark.parametrize(
    ("spatial", "kernel", "stride"),
    [
        ((40,), 3, 2),
        ((300,), 4, 2),
        ((31, 33), 2, 2),
        ((17, 40), 3, 1),
        ((64, 64), 4, 2),
        ((20, 9), 5, 3),
        ((9, 12, 7), 2, 2),
        ((16, 17, 18), 3, 2),
        ((50, 50), 7, 4),
        ((8, 9, 10), 5, 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("channels", [1, 24, 33])
def test_against_fp64(channels, spatial, kernel, stride, layout, dtype):
    torch.manual_seed(channels)
    tensors = tensors_of(channels, spatial, (kernel,) * len(spatial), layout, dtype)
    keywords = dict(stride=stride, padding=kernel // 3, groups=channels)
    assert_as_accurate(*tensors, **keywords)


@DTYPES
@LAYOUT
@pytest.mark.parametrize(
    "needs",
    [(True, False, False), (False, True, False), (False, True, True), (False, False, True)],
    ids=str,
)
@pytest.mark.parametrize("kernel", [4, 6])
def test_some_of_the_gradients(kernel, needs, layout, dtype):
    tensors = tensors_of(32, (30, 28), (kernel, kernel), layout, dtype)
    assert_as_accurate(*tensors, needs, stride=2, padding=1, groups=32)


@DTYPES
def test_random_problems(dtype):
    generator = random.Random(str(dtype))
    torch.manual_seed(0)
    for _ in range(60):
        axes = generator.choice((1, 2, 2, 3))
        drawn = [random_axis(generator, {1: 200, 2: 24, 3: 8}[axes]) for _ in range(axes)]
        if any(output_extent(*axis) < 1 for axis in drawn):
            continue
        extent, kernel, stride, padding, extra, dilation = zip(*drawn, strict=True)
        channels = generator.choice((1, 3, 8, 32, 40))
        layout = generator.choice(list(LAYOUTS))
        tensors = tensors_of(channels, extent, kernel, layout, dtype, generator.randint(1, 4))
        assert_as_accurate(
            *tensors,
            stride=stride,
            padding=padding,
            output_padding=extra,
            dilation=dilation,
            groups=channels,
        )


def test_a_weight_of_other_strides_and_an_expanded_gradient():
    x, weight, bias = tensors_of(16, (20, 20), (4, 4), "nchw", torch.float32)
    weight = weight.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)
    assert_as_accurate(x, weight, bias, stride=2, padding=1, groups=16)
    leaves = [each.requires_grad_() for each in (x, weight, bias)]
    output = conv_transpose_act_norm(*leaves, 2, 1, groups=16)
    one = torch.autograd.grad(output.sum(), leaves)
    output = CONVOLUTIONS[2](*leaves, 2, 1, groups=16)
    for mine, theirs in zip(one, torch.autograd.grad(output.sum(), leaves), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_it_is_chosen(force):
    force("")
    x, weight, bias = tensors_of(128, (32, 32, 32), (3, 3, 3), "nchw", torch.bfloat16)
    leaves = [each.requires_grad_() for each in (x, weight, bias)]
    _, backward = explained(
        lambda: conv_transpose_act_norm(*leaves, 2, 1, groups=128), gradients=True
    )
    assert KERNEL in backward.kernel
