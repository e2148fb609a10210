"""Gradients through GroupNorm on the GPU: each kernel against fp64, relative to eager's error."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from gpu_checks import poison
from problems import explained
from reference import GRADIENT_FLOOR, channels_last, double, relative_error
from reference import conv_transpose_act_norm as composition
from reference import group_norm as eager
from test_gpu_group_norm import CASES, FLOOR, LARGE_CASES, with_layouts
from torch import Tensor

import fusedconv
from fusedconv.functional import conv_transpose_act_norm, group_norm

pytestmark = pytest.mark.gpu

TWO_PASS, STREAMED = "groupnorm_backward_two_pass", "groupnorm_backward_streamed"
KERNELS = (TWO_PASS, STREAMED)
#: Forced beside one of them: every forward pass on our kernels, and no other gradient of theirs.
FORWARD = "groupnorm_two_pass,cutlass_sm80,cutlass_sm90"
LEAVES = ("input", "weight", "bias")
SUBSETS = [names for count in (1, 2, 3) for names in itertools.combinations(LEAVES, count)]


def serves_gradients(
    kernel: str,
    shape: tuple[int, ...],
    groups: int,
    dtype: torch.dtype,
    channels_last: bool,
    *,
    capability: tuple[int, int],
    multiprocessors: int,
    wide: bool = False,
) -> bool:
    """Whether a kernel must serve aligned, dense tensors whose gradients are all asked for: the
    conditions in its header. ``wide``: the output's gradient takes twice the input's bytes."""
    if kernel == TWO_PASS:
        return True
    channels, pixels = shape[1], math.prod(shape[2:])
    vector = 16 // dtype.itemsize  # elements
    if channels_last or channels // groups * pixels % vector or capability != (9, 0):
        return False
    # Tiles of 8 KiB of the input and as much of the gradient, or of a third of 16 KiB and twice as
    # much, loaded from multiples of 128 bytes, which do not straddle planes: those may begin and
    # end within 16 bytes.
    plane = math.ceil((pixels + vector - math.gcd(vector, pixels)) / vector)
    most = (336 if wide else 512) - 7  # vectors
    tiles = math.ceil(plane / most)
    if plane < most // 2 or math.ceil(pixels / vector) <= (tiles - 1) * most:
        return False
    tiles *= channels // groups
    blocks = min(multiprocessors, 160, shape[0] * groups * tiles)
    table = math.ceil(channels * 8 / 128) * 128
    slots = min(13, ((227 << 10) - table - (6 << 10)) // (16 << 10))
    return slots >= 6 and math.ceil(tiles / blocks) < slots


@pytest.fixture
def backward(force):
    """backward(kernel, *others): the gradients through GroupNorm are this kernel's; skips where the
    device cannot run it."""

    def use(kernel: str, *others: str) -> None:
        if kernel == STREAMED and torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("the kernel runs on compute capability 9.0")
        force(",".join((FORWARD, kernel, *others)))

    return use


def gradients(function, tensors: Sequence[Tensor], grad: Tensor, **keywords) -> list[Tensor]:
    """Of leaves like ``tensors``, which keep their strides."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    output = function(*leaves, **keywords)
    return list(torch.autograd.grad(output, leaves, grad.to(output.dtype)))


def assert_close_to(actual, torchs, exact, floor: float, scale: float) -> None:
    """Sums of many terms: at most twice eager's error, and a floor."""
    for what, (a, t, r) in enumerate(zip(actual, torchs, exact, strict=True)):
        if float(r.norm()) < 1e-6 * scale:
            continue  # cancels to nothing: a group of one or two elements
        error, limit = relative_error(a, r), relative_error(t, r)
        assert error <= 2 * limit + floor, (what, error, limit)


@pytest.mark.parametrize("dtype", FLOOR, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("shape", "groups", "layout"), with_layouts(CASES + LARGE_CASES), ids=str)
def test_against_fp64(shape, groups, layout, kernel, dtype, backward):
    backward(kernel)
    torch.manual_seed(sum(shape))
    x = (torch.randn(shape, device="cuda") + 0.3).to(dtype)
    if layout == "nhwc":
        x = channels_last(x)
    served = serves_gradients(
        kernel,
        shape,
        groups,
        dtype,
        not x.is_contiguous(),
        capability=torch.cuda.get_device_capability(),
        multiprocessors=torch.cuda.get_device_properties(0).multi_processor_count,
    )
    for activation, order, affine in (
        (None, "act_norm", True),
        ("gelu", "act_norm", True),
        ("gelu", "norm_act", True),
        ("silu", "act_norm", True),
        ("silu", "norm_act", True),
        ("gelu_tanh", "norm_act", False),
        ("relu", "act_norm", False),
        ("relu", "norm_act", True),
    ):
        parameters = torch.randn(2, shape[1], device="cuda").to(dtype).unbind() if affine else ()
        grad = torch.randn_like(x)

        def ours(x, *affine, activation=activation, order=order):
            return group_norm(x, groups, *affine, activation=activation, order=order)

        def composed(x, *affine, activation=activation, order=order):
            return eager(x, groups, *affine, activation=activation, order=order)

        if not served:
            with pytest.raises(fusedconv.NoKernelError, match=kernel):
                gradients(ours, (x, *parameters), grad)
            continue
        poison()
        actual = gradients(ours, (x, *parameters), grad)
        torchs = gradients(composed, (x, *parameters), grad)
        exact = gradients(composed, [t.double() for t in (x, *parameters)], grad)
        assert actual[0].stride() == x.stride()
        # Over a few values chance parts errors that are alike.
        floor = (20 if x.numel() > 1000 else 50) * FLOOR[dtype]
        assert_close_to(actual, torchs, exact, floor, float(grad.double().norm()))
        again = gradients(ours, (x, *parameters), grad)
        assert all(torch.equal(a, b) for a, b in zip(actual, again, strict=True))


# ---- a plane that every kernel serves ------------------------------------------------------------

SHAPE, GROUPS = (5, 12, 48, 56), 3


def operands(layout: str = "nchw") -> list[Tensor]:
    x = torch.randn(SHAPE, device="cuda") + 0.3
    weight, bias = torch.randn(2, SHAPE[1], device="cuda")
    return [channels_last(x) if layout == "nhwc" else x, weight, bias]


def normed(x, weight, bias):
    return group_norm(x, GROUPS, weight, bias, activation="gelu")


PAIRS = [(TWO_PASS, "nchw"), (TWO_PASS, "nhwc"), (STREAMED, "nchw")]


@pytest.mark.parametrize("names", SUBSETS, ids="+".join)
@pytest.mark.parametrize(("kernel", "layout"), PAIRS)
def test_what_is_not_asked_for_changes_nothing(kernel, layout, names, backward):
    backward(kernel)
    tensors = operands(layout)
    grad = torch.randn_like(tensors[0])
    every = dict(zip(LEAVES, gradients(normed, tensors, grad), strict=True))
    leaves = {
        name: tensor.detach().requires_grad_(name in names)
        for name, tensor in zip(LEAVES, tensors, strict=True)
    }
    wanted = [leaves[name] for name in names]
    output = normed(*leaves.values())
    poison()
    if kernel == STREAMED and "input" not in names:
        with pytest.raises(fusedconv.NoKernelError, match="gradient, which is not asked for"):
            torch.autograd.grad(output, wanted, grad)
        return
    found = torch.autograd.grad(output, wanted, grad)
    for name, gradient in zip(names, found, strict=True):
        assert torch.equal(gradient, every[name]), name


#: Gradients of the same values in other memory: each is copied to the output's layout first.
VIEWS = {
    "expanded": lambda grad: grad[:1].expand_as(grad),
    "of a sum": lambda grad: grad[:1, :1, :1, :1].expand_as(grad),
    "every other": lambda grad: grad.repeat_interleave(2, -1)[..., ::2],
    "transposed": lambda grad: grad.transpose(2, 3).contiguous().transpose(2, 3),
    "other layout": lambda grad: channels_last(grad) if grad.is_contiguous() else grad.contiguous(),
    "slice": lambda grad: torch.nn.functional.pad(grad, (1, 2, 3, 4))[..., 3:-4, 1:-2],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(("kernel", "layout"), PAIRS)
def test_output_gradients_of_other_strides(kernel, layout, view, backward):
    backward(kernel)
    tensors = operands(layout)
    grad = VIEWS[view](torch.randn_like(tensors[0]))
    dense = torch.empty_like(tensors[0]).copy_(grad)
    assert grad.stride() != dense.stride()
    poison()
    actual = gradients(normed, tensors, grad)
    expected = gradients(normed, tensors, dense)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_misaligned_output_gradients(layout, backward):
    tensors = operands(layout)
    grad = torch.randn_like(tensors[0])
    memory = torch.full((grad.numel() + 4,), torch.nan, device="cuda")
    shifted = memory[1 : 1 + grad.numel()].as_strided(grad.shape, grad.stride())
    shifted.copy_(grad)
    backward(TWO_PASS)
    expected = gradients(normed, tensors, grad)
    for a, b in zip(gradients(normed, tensors, shifted), expected, strict=True):
        assert relative_error(a, b) < 1e-5
    if layout == "nchw":
        backward(STREAMED)
        with pytest.raises(fusedconv.NoKernelError, match="not a multiple of 16 bytes"):
            gradients(normed, tensors, shifted)


@pytest.mark.parametrize("kernel", KERNELS)
def test_thousand_repetitions_are_bit_identical(kernel, backward):
    backward(kernel)
    x = torch.randn(9, 16, 256, 256, device="cuda")
    leaves = [t.requires_grad_() for t in (x, *torch.randn(2, 16, device="cuda"))]
    output = group_norm(leaves[0], 4, *leaves[1:])
    grad = torch.randn_like(x)

    def again():
        return torch.autograd.grad(output, leaves, grad, retain_graph=True)

    first = again()
    for _ in range(1000):
        assert all(torch.equal(a, b) for a, b in zip(again(), first, strict=True))


# ---- behind a convolution ------------------------------------------------------------------------

CONV_LEAVES = ("input", "weight", "bias", "norm_weight", "norm_bias")


def convolved(
    x, weight, bias, norm_weight, norm_bias, function=conv_transpose_act_norm, **keywords
):
    return function(
        x,
        weight,
        bias,
        activation="gelu",
        num_groups=3,
        norm_weight=norm_weight,
        norm_bias=norm_bias,
        **keywords,
    )


def conv_operands(dtype: torch.dtype, layout: str) -> list[Tensor]:
    x = torch.randn(3, 16, 46, 54, device="cuda")
    weight = torch.randn(16, 24, 3, 3, device="cuda") / 12
    others = torch.randn(3, 24, device="cuda").unbind()
    tensors = [tensor.to(dtype) for tensor in (x, weight, *others)]
    return [channels_last(tensors[0]) if layout == "nhwc" else tensors[0], *tensors[1:]]


@pytest.mark.parametrize("dtype", FLOOR, ids=str)
@pytest.mark.parametrize(("kernel", "layout"), PAIRS)
def test_a_plan_may_mix_providers(kernel, layout, dtype, backward, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    backward(kernel, "torch_convolution_backward")
    tensors = conv_operands(dtype, layout)
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    _, explanation = explained(lambda: convolved(*leaves), gradients=True)
    assert explanation.kernel == f"{kernel} + torch_convolution_backward"
    assert [parts for parts, _ in explanation.chosen] == [("epilogue", "bias"), ("input", "weight")]
    output = convolved(*tensors)
    grad = torch.randn_like(output)
    poison()
    actual = gradients(convolved, tensors, grad)
    plain = partial(convolved, function=composition)
    torchs = gradients(plain, tensors, grad)
    exact = gradients(plain, list(map(double, tensors)), grad)
    assert_close_to(actual, torchs, exact, GRADIENT_FLOOR[dtype], float(grad.double().norm()))
    again = gradients(convolved, tensors, grad)
    # cuDNN may add in another order each time.
    assert all(torch.equal(a, b) for a, b in zip(actual[3:], again[3:], strict=True))


@pytest.mark.parametrize("names", [("weight",), ("input", "norm_bias"), ("bias",)], ids="+".join)
@pytest.mark.parametrize(("kernel", "layout"), PAIRS)
def test_some_gradients_of_a_convolution(kernel, layout, names, backward):
    backward(kernel)
    tensors = conv_operands(torch.float32, layout)
    grad = torch.randn_like(convolved(*tensors))
    every = dict(zip(CONV_LEAVES, gradients(convolved, tensors, grad), strict=True))
    leaves = {
        name: tensor.detach().requires_grad_(name in names)
        for name, tensor in zip(CONV_LEAVES, tensors, strict=True)
    }
    poison()
    found = torch.autograd.grad(convolved(*leaves.values()), [leaves[name] for name in names], grad)
    for name, gradient in zip(names, found, strict=True):
        assert relative_error(gradient, every[name]) < 1e-5, name


def test_norm_weight_and_bias_of_a_convolution_alone(backward):
    """Nothing of the convolution is differentiated then."""
    backward(TWO_PASS)
    x, weight, bias, *affine = conv_operands(torch.float32, "nchw")
    leaves = [tensor.requires_grad_() for tensor in affine]
    _, explanation = explained(lambda: convolved(x, weight, bias, *leaves), gradients=True)
    assert explanation.kernel == TWO_PASS
    assert not any("gradient through" in step for step in explanation.steps)


@pytest.mark.parametrize("dtype", FLOOR, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("mean", "deviation"), [(3, 0.1), (-1, 0.1), (1, 0.0)])
def test_narrow_groups_and_gradients_of_some_mean(mean, deviation, kernel, dtype, backward):
    """The weight's gradient sums distances from the forward pass's mean: of a group in which all
    values are rounded alike, they must be of the values that this is the mean of."""
    backward(kernel, "groupnorm_streamed")
    x = (mean + deviation * torch.randn(4, 16, 128, 136, device="cuda")).to(dtype)
    grad = (torch.randn_like(x, dtype=torch.float32) + 0.5).to(dtype)
    weight, bias = torch.randn(2, 16, device="cuda").to(dtype)

    def of_weight(function, *tensors):
        run = partial(function, activation="gelu")
        return gradients(lambda x, *affine: run(x, 4, *affine), tensors, grad)[1].double()

    found, theirs = (of_weight(each, x, weight, bias) for each in (group_norm, eager))
    exact = of_weight(eager, x.double(), weight.double(), bias.double())
    scale = exact.norm() + grad.double().abs().sum().sqrt()  # zero where all values are equal
    error, eager_error = ((each - exact).norm() / scale for each in (found, theirs))
    assert error <= 1.1 * eager_error + GRADIENT_FLOOR[dtype], (error, eager_error)


@pytest.mark.parametrize("large", [7e4, 1e15, -7e4, -1e15, torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("all_of_a_group", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def test_large_values_stay_in_their_group(large, all_of_a_group, kernel, backward):
    """Of GELU in its quick form, which has no bound where a group's sums are taken."""
    backward(kernel, "groupnorm_streamed")
    x = torch.randn(8, 16, 128, 136, device="cuda")
    if all_of_a_group:
        x[3, 4:8] = (x[3, 4:8] + 4) * (large / 16)  # of some width about it
    for place in ((0, 0, 3, 5), (1, 5, -1, -1), (7, 15, 0, 0)):
        x[place] = large
    x, grad = x.bfloat16(), torch.randn_like(x).bfloat16()
    affine = torch.randn(2, 16, device="cuda").bfloat16()

    def of_input(function, *tensors):
        run = partial(function, activation="gelu")
        of_x = gradients(lambda x, *affine: run(x, 4, *affine), tensors, grad)[0]
        return of_x.reshape(8 * 4, -1).double()

    exact = of_input(eager, x.double(), *affine.double())
    by_group = (of_input(group_norm, x, *affine), of_input(eager, x, *affine), exact)
    for ours, theirs, reference in zip(*by_group, strict=True):
        if reference.isfinite().all():
            bound = 1.1 * relative_error(theirs, reference) + GRADIENT_FLOOR[x.dtype]
            assert relative_error(ours, reference) <= bound
        else:
            assert not ours.isfinite().all()
