"""Gradients through LayerNorm over channels, affine maps of channels and activations alone on the
GPU, alone and behind convolutions, and of the bias alone, against fp64, relative to eager's
error."""

from __future__ import annotations

import pytest
import torch
import ungrouped
from gpu_checks import poison
from problems import explained
from reference import ACTIVATIONS, GRADIENT_FLOOR, LAYOUTS, relative_error
from reference import conv_transpose_act_norm as composition
from torch import nn
from ungrouped import PRECISION, STAGES, problem_of

import fusedconv
from fusedconv.device import device_record
from fusedconv.functional import conv_transpose_act_norm, fold_batch_norm
from fusedconv.kernels.cuda.ungrouped_gradients import UngroupedBackward, UngroupedBias
from fusedconv.plan import BackwardTensors

pytestmark = pytest.mark.gpu

DTYPES = pytest.mark.parametrize("dtype", PRECISION, ids=str)
KERNEL = UngroupedBackward()


def assert_as_accurate(*arguments):
    ungrouped.assert_as_accurate(KERNEL, *arguments, prepare=poison)


def tensors_of(channels, spatial, layout, dtype, batch=3, affine_dtype=None):
    torch.manual_seed(channels)
    x = torch.randn(batch, channels, *spatial, device="cuda").to(dtype)
    weight, bias = torch.randn(2, channels, device="cuda").to(affine_dtype or dtype).unbind()
    return LAYOUTS[layout](x), weight, bias


@DTYPES
@pytest.mark.parametrize("kind", ["layer", "affine"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("spatial", [(16, 16), (5, 7), (3,), (2, 3, 6)], ids=str)
@pytest.mark.parametrize("channels", [1, 3, 8, 64, 72, 200, 384, 1000, 1024])
def test_against_fp64(channels, spatial, layout, kind, dtype):
    x, weight, bias = tensors_of(channels, spatial, layout, dtype)
    for before, after in STAGES:
        # Of three values alike, which an activation may make, one rounding decides.
        if channels >= 8 or before is None:
            assert_as_accurate(kind, x, weight, bias, before, after)


@DTYPES
@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("spatial", [(16, 16), (5, 7), (3,), (2, 3, 6), (96, 160)], ids=str)
@pytest.mark.parametrize("channels", [1, 3, 8, 64, 72, 200, 384, 1025])
def test_activations_alone(channels, spatial, layout, activation, dtype):
    x, *_ = tensors_of(channels, spatial, layout, dtype)
    assert_as_accurate(None, x, None, None, activation, None)
    assert_as_accurate(None, x, None, None, activation, None, ["conv_output"])


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("channels", [5, 64])
@pytest.mark.parametrize("kind", [None, "affine"])
def test_what_relu_stops_is_zero_whatever_comes(kind, channels, layout):
    x = LAYOUTS[layout](-torch.ones(2, channels, 6, 4, device="cuda", dtype=torch.bfloat16))
    x[0, :, 0, 0] = 1
    grad = torch.full_like(x, float("inf"))
    grad[0] = 2
    problem = problem_of(kind, x, None, None, None if kind else "relu", "relu" if kind else None)
    plan = KERNEL.compile(problem, device_record(x.device))
    found = plan.run(BackwardTensors(grad, x, None, x, None, None, None, None))
    assert torch.equal(found.conv_output, torch.where(x > 0, grad, 0))
    assert torch.equal(found.bias, torch.full_like(found.bias, 2))


@DTYPES
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("spatial", [(16, 16), (5, 7), (3,), (2, 3, 6), (96, 160)], ids=str)
@pytest.mark.parametrize("channels", [1, 3, 8, 64, 72, 200, 384, 1025])
def test_the_bias_alone(channels, spatial, layout, dtype):
    grad, *_ = tensors_of(channels, spatial, layout, dtype)
    problem = problem_of(None, grad, None, None, None, None, ["bias"])
    kernel, device = UngroupedBias(), device_record(grad.device)
    support = kernel.supports(problem, device)
    assert support, support.reason
    plan = kernel.compile(problem, device)
    poison()
    found, again = (
        plan.run(BackwardTensors(grad, grad, None, None, None, None, None, None)).bias
        for _ in range(2)
    )
    assert torch.equal(found, again)
    axes = (0, *range(2, grad.dim()))
    exact = grad.double().sum(axes)
    limit = 2 * relative_error(grad.sum(axes), exact) + 4 * GRADIENT_FLOOR[dtype]
    assert relative_error(found, exact) <= limit


def test_the_bias_alone_of_a_gradient_that_lies_otherwise():
    grad, *_ = tensors_of(24, (7, 9), "nhwc", torch.float32)
    problem = problem_of(None, grad.contiguous(), None, None, None, None, ["bias"])
    plan = UngroupedBias().compile(problem, device_record(grad.device))
    given = BackwardTensors(grad[:1].expand(3, -1, -1, -1), grad, *(None,) * 6)
    torch.testing.assert_close(plan.run(given).bias, 3 * grad[0].sum((1, 2)))
    found = plan.run(given._replace(grad_conv_output=grad)).bias
    torch.testing.assert_close(found, grad.sum((0, 2, 3)))


@DTYPES
@pytest.mark.parametrize("kind", ["layer", "affine"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("given", ["neither", "weight", "bias", "wide"])
def test_weights_that_are_absent_or_of_another_dtype(given, layout, kind, dtype):
    x, weight, bias = tensors_of(96, (9, 8), layout, dtype, affine_dtype=torch.float32)
    if given in ("neither", "bias"):
        weight = None
    if given in ("neither", "weight"):
        bias = None
    assert_as_accurate(kind, x, weight, bias, None, "gelu")


@DTYPES
@pytest.mark.parametrize("kind", ["layer", "affine"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("names", [["conv_output"], ["norm_weight"], ["bias", "conv_output"]])
def test_some_of_the_gradients(names, layout, kind, dtype):
    x, weight, bias = tensors_of(64, (12, 10), layout, dtype)
    assert_as_accurate(kind, x, weight, bias, None, "relu", names)


@DTYPES
@pytest.mark.parametrize("kind", ["layer", "affine"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("channels", [64, 128, 384])
@pytest.mark.parametrize("spatial", [(160, 144), (159, 142)], ids=str)
def test_many_pixels(spatial, channels, layout, kind, dtype):
    """So many that each block goes over several tiles, the last of them in part."""
    x, weight, bias = tensors_of(channels, spatial, layout, dtype, batch=4)
    assert_as_accurate(kind, x, weight, bias, None, "gelu")


@DTYPES
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_pixels_of_a_large_mean(layout, dtype):
    x, weight, bias = tensors_of(64, (12, 10), layout, dtype)
    x = LAYOUTS[layout](x + 100)
    assert_as_accurate("layer", x, weight, bias, None, None)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_addresses_between_whole_vectors(layout):
    torch.manual_seed(0)
    memory = torch.randn(2 * 64 * 120 + 1, device="cuda").to(torch.bfloat16)
    x = memory[1:].view(2, 12, 10, 64).movedim(-1, 1)
    if layout == "nchw":
        x = memory[1:].view(2, 64, 12, 10)
    weight, bias = torch.randn(2, 64, device="cuda").unbind()
    for kind in ("layer", "affine"):
        assert_as_accurate(kind, x, weight, bias, None, "gelu")
    assert_as_accurate(None, x, None, None, "gelu", None)


def test_more_channels_than_registers_hold_are_torchs():
    x, weight, bias = tensors_of(1025, (4,), "nchw", torch.float32)
    problem = problem_of("layer", x, weight, bias, None, None)
    support = KERNEL.supports(problem, device_record(x.device))
    assert not support and "1025 channels" in support.reason


# ---- behind convolutions -------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("norm", ["layer", "affine"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize(
    ("channels", "out", "spatial", "kernel", "stride"),
    [
        (64, 64, (16, 24), 2, 2),
        (64, 128, (9, 11), 4, 2),
        (24, 40, (5, 6, 8), 3, 2),
        (16, 8, (40,), 4, 2),
    ],
    ids=str,
)
def test_behind_convolutions(channels, out, spatial, kernel, stride, layout, norm, dtype):
    torch.manual_seed(channels)
    shape = (channels, out, *(kernel,) * len(spatial))
    x = LAYOUTS[layout](torch.randn(2, channels, *spatial, device="cuda").to(dtype))
    weight = (torch.randn(shape, device="cuda") * (stride**2 / (channels * kernel**2)) ** 0.5).to(
        dtype
    )
    bias, scale, shift = torch.randn(3, out, device="cuda").unbind()
    given = [x, weight, bias.to(dtype), scale, shift]
    keywords = dict(stride=stride, padding=kernel // 4, activation="gelu", order="norm_act")

    def gradients(function, tensors, grad=None, **more):
        leaves = [t.detach().requires_grad_() for t in tensors]
        output = function(
            *leaves[:3], norm=norm, norm_weight=leaves[3], norm_bias=leaves[4], **keywords, **more
        )
        grad = torch.randn_like(output) if grad is None else grad
        return grad, list(torch.autograd.grad(output, leaves, grad.to(output.dtype)))

    def eager(x, *others, **more):
        return composition(x, *others, **more).to(x.dtype)

    precision = {"precision": "fp32"} if dtype is torch.float32 else {}
    grad, actual = gradients(conv_transpose_act_norm, given, **precision)
    allowed = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        narrow = [t.to(dtype) for t in given]
        _, torchs = gradients(eager, narrow, grad)
        _, exact = gradients(eager, [t.double() for t in given], grad)
    finally:
        torch.backends.cudnn.allow_tf32 = allowed
    for one, other, right in zip(actual, torchs, exact, strict=True):
        limit = 2 * relative_error(other, right) + 4 * GRADIENT_FLOOR[dtype]
        assert relative_error(one, right) <= limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_batch_norm_of_inference_has_gradients(dtype):
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(32).cuda().to(dtype).eval()
    for each in (norm.running_mean, norm.weight, norm.bias):
        nn.init.uniform_(each, -1.0, 1.0)
    nn.init.uniform_(norm.running_var, 0.5, 2.0)
    given = (norm.running_mean, norm.running_var)
    found = fold_batch_norm(*given, norm.weight, norm.bias, norm.eps)
    grads = torch.randn(2, 32, device="cuda").unbind()
    actual = torch.autograd.grad(found, (norm.weight, norm.bias), grads, retain_graph=True)
    weight, bias = (each.detach().double().requires_grad_() for each in (norm.weight, norm.bias))
    wide = fold_batch_norm(*(each.double() for each in given), weight, bias, norm.eps)
    exact = torch.autograd.grad(
        wide, (weight, bias), [each.double() for each in grads], retain_graph=True
    )
    floor = torch.finfo(dtype).eps
    for one, right, of in zip(
        (*found, *actual), (*wide, *exact), (0, 0, dtype, dtype), strict=True
    ):
        assert not of or one.dtype == of
        assert relative_error(one, right) <= (2 * floor if of else 2e-6)


def test_a_converted_batch_norm_trains_in_one_call():
    torch.manual_seed(0)
    model = nn.Sequential(nn.ConvTranspose2d(64, 64, 4, 2, 1), nn.BatchNorm2d(64), nn.ReLU())
    model = model.cuda().to(torch.bfloat16, memory_format=torch.channels_last).eval()
    x = torch.randn(4, 64, 16, 16, device="cuda").to(torch.bfloat16)
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    grad = torch.randn(4, 64, 32, 32, device="cuda").to(torch.bfloat16)
    leaves = (x, *model.parameters())
    torchs = torch.autograd.grad(model(x), leaves, grad)
    wide = model.double()
    exact = torch.autograd.grad(wide(x.double()), (x, *wide.parameters()), grad.double())
    model.to(torch.bfloat16)
    fusedconv.convert(model)
    actual = torch.autograd.grad(model(x), (x, *model.parameters()), grad)
    for one, other, right in zip(actual, torchs, exact, strict=True):
        limit = 2 * relative_error(other, right) + 4 * GRADIENT_FLOOR[torch.bfloat16]
        assert relative_error(one, right) <= limit
    assert KERNEL.name in explained(model, x, gradients=True)[-1].kernel
