"""Gradients of depthwise transposed convolutions and of those of few input channels on the GPU,
against fp64, relative to eager's error."""

from __future__ import annotations

import random

import pytest
import torch
from gpu_checks import output_extent, poison, random_axis
from problems import explained
from reference import CONVOLUTIONS, GRADIENT_FLOOR, LAYOUTS, relative_error

import fusedconv
from fusedconv.functional import conv_transpose_act_norm

pytestmark = pytest.mark.gpu

KERNEL = "direct_gradients"
FEW = "direct_few_gradients"
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
@pytest.mark.parametrize("channels", [1, 24, 33, 130])
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


# ---- few input channels --------------------------------------------------------------------------


def few_tensors(channels, out_channels, spatial, kernel, dtype, batch=2):
    x = torch.randn(batch, channels, *spatial, device="cuda").to(dtype)
    weight = torch.randn(channels, out_channels, *kernel, device="cuda").to(dtype)
    bias = torch.randn(out_channels, device="cuda").to(dtype)
    return x, weight, bias


@pytest.fixture
def few_only(force):
    force(FEW)


@DTYPES
@pytest.mark.parametrize(
    ("spatial", "kernel", "stride"),
    [
        ((300,), 3, 2),
        ((77,), 4, 2),
        ((31, 33), 2, 2),
        ((17, 40), 3, 1),
        ((64, 64), 4, 2),
        ((33, 31), 3, 2),
        ((20, 9), 5, 3),
        ((19, 21), 5, 2),
        ((9, 12, 7), 2, 2),
        ((16, 17, 18), 3, 2),
        ((6, 16, 32), 3, 2),
        ((5, 6, 37), 4, 2),
        ((8, 9, 10), 3, 1),
        ((7, 5, 11), 3, 3),
    ],
    ids=str,
)
@pytest.mark.parametrize(("channels", "out_channels"), [(1, 33), (2, 7), (3, 16), (4, 9), (3, 1)])
def test_few_channels(few_only, channels, out_channels, spatial, kernel, stride, dtype):
    torch.manual_seed(channels)
    tensors = few_tensors(channels, out_channels, spatial, (kernel,) * len(spatial), dtype)
    assert_as_accurate(*tensors, stride=stride, padding=kernel // 3)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("spatial", [(64, 48), (7, 16, 32)], ids=str)
def test_few_channels_where_tf32_is_allowed(few_only, monkeypatch, spatial, channels):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    tensors = few_tensors(channels, 16, spatial, (3,) * len(spatial), torch.float32)
    assert_as_accurate(*tensors, stride=2, padding=1)


@DTYPES
@pytest.mark.parametrize(
    "needs",
    [(True, False, False), (False, True, False), (False, True, True), (True, False, True)],
    ids=str,
)
@pytest.mark.parametrize("stride", [2, 3])
def test_some_of_the_gradients_of_few_channels(few_only, stride, needs, dtype):
    tensors = few_tensors(3, 20, (11, 14, 33), (3, 3, 3), dtype)
    assert_as_accurate(*tensors, needs, stride=stride, padding=1)


@DTYPES
def test_random_problems_of_few_channels(few_only, dtype):
    generator = random.Random(str(dtype))
    torch.manual_seed(1)
    count = 0
    while count < 60:
        axes = generator.choice((1, 2, 2, 3))
        drawn = [random_axis(generator, {1: 200, 2: 40, 3: 12}[axes]) for _ in range(axes)]
        if any(output_extent(*axis) < 1 for axis in drawn):
            continue
        extent, kernel, stride, padding, extra, dilation = zip(*drawn, strict=True)
        if not 2 <= kernel[-1] <= 5:
            continue
        channels, out_channels = generator.randint(1, 4), generator.randint(1, 33)
        tensors = few_tensors(
            channels, out_channels, extent, kernel, dtype, generator.randint(1, 40)
        )
        keywords = dict(stride=stride, padding=padding, output_padding=extra, dilation=dilation)
        try:
            assert_as_accurate(*tensors, **keywords)
        except fusedconv.NoKernelError:  # a tile meets more lines than shared memory holds
            continue
        count += 1


@DTYPES
def test_blocks_of_several_tiles(few_only, dtype):
    """More tiles than parts of the weight's gradient are kept of."""
    tensors = few_tensors(3, 3, (64, 64), (3, 3), dtype, batch=700)
    assert_as_accurate(*tensors, stride=2, padding=1)


@DTYPES
def test_few_channels_of_other_strides_and_addresses(few_only, dtype):
    x, weight, bias = few_tensors(3, 16, (6, 16, 32), (3, 3, 3), dtype)
    weight = weight.permute(1, 2, 3, 4, 0).contiguous().permute(4, 0, 1, 2, 3)
    apart = torch.empty(x.numel() + 1, dtype=dtype, device="cuda")[1:].view(x.shape).copy_(x)
    assert_as_accurate(apart, weight, bias, stride=2, padding=1)
    assert_as_accurate(x[:, :, ::2], weight, bias, stride=2, padding=1)


def test_many_output_channels(few_only):
    """Pieces of the input's gradient are added up; the kernel's error grows no faster."""
    tensors = few_tensors(4, 300, (8, 8, 32), (3, 3, 3), torch.float32)
    assert_as_accurate(*tensors, stride=2, padding=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_few_channels_are_chosen(force, dtype):
    force("")
    x, weight, bias = few_tensors(3, 16, (16, 32, 32), (3, 3, 3), dtype, batch=128)
    leaves = [each.requires_grad_() for each in (x, weight, bias)]
    _, backward = explained(lambda: conv_transpose_act_norm(*leaves, 2, 1), gradients=True)
    assert FEW in backward.kernel
