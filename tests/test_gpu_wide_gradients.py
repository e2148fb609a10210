"""Gradients in float32 through normalisations of 16 bits, as autocast asks for them, on the GPU:
each kernel against fp64, relative to eager's error."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import ungrouped
from gpu_checks import poison
from problems import explained
from reference import GRADIENT_FLOOR, LAYOUTS, channels_last, relative_error
from reference import conv_transpose_act_norm as composition
from reference import group_norm as eager
from test_gpu_gradients import KERNELS, STREAMED, TWO_PASS, assert_close_to, serves_gradients
from test_gpu_gradients import backward as backward  # a fixture
from test_gpu_group_norm import CASES, FLOOR, LARGE_CASES, with_layouts
from torch import nn

import fusedconv
from fusedconv.functional import conv_transpose_act_norm, group_norm
from fusedconv.kernels.cuda.ungrouped_gradients import UngroupedBackward

pytestmark = pytest.mark.gpu

LOW = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


def lowered(function, dtype):
    """``function`` under autocast, which float64 does not see."""

    def run(*tensors, **keywords):
        with torch.autocast("cuda", dtype, enabled=tensors[0].dtype != torch.float64):
            return function(*tensors, **keywords)

    return run


def gradients(function, tensors, grad, **keywords):
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    output = function(*leaves, **keywords)
    assert output.dtype == (torch.float64 if leaves[0].dtype == torch.float64 else torch.float32)
    return list(torch.autograd.grad(output, leaves, grad.to(output.dtype)))


@LOW
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
        wide=True,
    )
    for activation, order, affine in (
        (None, "act_norm", True),
        ("gelu", "act_norm", True),
        ("gelu", "norm_act", True),
        ("silu", "act_norm", True),
        ("gelu_tanh", "norm_act", False),
        ("relu", "act_norm", False),
        ("relu", "norm_act", True),
    ):
        parameters = torch.randn(2, shape[1], device="cuda").unbind() if affine else ()
        grad = torch.randn_like(x, dtype=torch.float32)

        def call(function, x, *affine, activation=activation, order=order):
            return function(x, groups, *affine, activation=activation, order=order)

        ours, composed = (lowered(partial(call, each), dtype) for each in (group_norm, eager))
        if not served:
            with pytest.raises(fusedconv.NoKernelError, match=kernel):
                gradients(ours, (x, *parameters), grad)
            continue
        poison()
        actual = gradients(ours, (x, *parameters), grad)
        torchs = gradients(composed, (x, *parameters), grad)
        exact = gradients(composed, [t.double() for t in (x, *parameters)], grad)
        assert actual[0].stride() == x.stride()
        floor = (20 if x.numel() > 1000 else 50) * FLOOR[dtype]
        assert_close_to(actual, torchs, exact, floor, float(grad.double().norm()))
        again = gradients(ours, (x, *parameters), grad)
        assert all(torch.equal(a, b) for a, b in zip(actual, again, strict=True))


@pytest.mark.parametrize("shift", [0, 1, 2, 4])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_addresses_of_the_gradient(layout, shift, backward):
    """Of a gradient that begins between vectors of sixteen or of eight elements' bytes."""
    backward(TWO_PASS)
    torch.manual_seed(0)
    x = LAYOUTS[layout](torch.randn(5, 24, 48, 56, device="cuda").bfloat16())
    affine = torch.randn(2, 24, device="cuda").unbind()
    memory = torch.full((x.numel() + 8,), torch.nan, device="cuda")
    grad = memory[shift : shift + x.numel()].as_strided(x.shape, x.stride())
    grad.copy_(torch.randn(x.shape, device="cuda"))
    call = lowered(lambda x, *affine: group_norm(x, 3, *affine, activation="gelu"), x.dtype)
    found = gradients(call, (x, *affine), grad)
    dense = torch.empty_like(x, dtype=torch.float32).copy_(grad)
    for a, b in zip(found, gradients(call, (x, *affine), dense), strict=True):
        assert relative_error(a, b) < 1e-5 + GRADIENT_FLOOR[x.dtype]


@LOW
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("spatial", [(16, 16), (5, 7), (3,), (2, 3, 6), (159, 142)], ids=str)
@pytest.mark.parametrize("channels", [1, 3, 8, 64, 72, 200, 384, 1000, 1024])
def test_layer_norm(channels, spatial, layout, dtype):
    torch.manual_seed(channels)
    x = LAYOUTS[layout](torch.randn(3, channels, *spatial, device="cuda").to(dtype))
    weight, bias = torch.randn(2, channels, device="cuda").unbind()
    check = partial(
        ungrouped.assert_as_accurate,
        UngroupedBackward(),
        "layer",
        prepare=poison,
        grad_dtype=torch.float32,
    )
    for before, after in ungrouped.STAGES:
        # Of three values alike, which an activation may make, one rounding decides.
        if channels >= 8 or before is None:
            check(x, weight, bias, before, after)
    check(x, None, None, None, "gelu")
    check(x, weight, bias, None, "relu", ["norm_weight"])
    for shift in (1, 2, 4):  # of the gradient's address, in elements
        check(x, weight, bias, None, "gelu", shift=shift)


# ---- a step of training --------------------------------------------------------------------------


class Layer(nn.Module):
    """``norm`` None is GroupNorm."""

    def __init__(self, function, stride, channels, norm):
        super().__init__()
        self.function, self.norm = function, norm
        self.conv = nn.ConvTranspose2d(channels, 48, 4 if stride == 2 else 3, stride, 1)
        self.weight, self.bias = (nn.Parameter(torch.randn(48)) for _ in range(2))

    def forward(self, x):
        conv = self.conv
        return self.function(
            x,
            conv.weight,
            conv.bias,
            stride=conv.stride,
            padding=conv.padding,
            activation="gelu",
            norm_weight=self.weight,
            norm_bias=self.bias,
            **({"num_groups": 4} if self.norm is None else {"norm": self.norm}),
        )


def step(model, x, grad, dtype=None):
    model.zero_grad()
    leaf = x.detach().requires_grad_()
    with torch.autocast("cuda", dtype or torch.float16, enabled=dtype is not None):
        output = model(leaf)
    output.backward(grad.to(output.dtype))
    return [leaf.grad, *(parameter.grad.clone() for parameter in model.parameters())]


@LOW
@pytest.mark.parametrize("norm", [None, "layer"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(("channels", "spatial"), [(32, (64, 72)), (24, (31, 37))])
def test_a_step_behind_a_convolution(channels, spatial, stride, layout, norm, dtype):
    torch.manual_seed(0)
    ours = Layer(conv_transpose_act_norm, stride, channels, norm).cuda()
    theirs = copy.deepcopy(ours)
    theirs.function = composition
    exact = copy.deepcopy(theirs).double()
    x = LAYOUTS[layout](torch.randn(4, channels, *spatial, device="cuda"))
    with torch.autocast("cuda", dtype):
        _, explanation = explained(lambda: ours(x.requires_grad_()), gradients=True)
    x = x.detach()
    assert not explanation.kernel.startswith("torch_epilogue"), explanation.kernel
    grad = torch.randn_like(exact(x.double()).float())
    poison()
    actual = step(ours, x, grad, dtype)
    torchs = step(theirs, x, grad, dtype)
    reference = step(exact, x.double(), grad.double())
    for a, t, r in zip(actual, torchs, reference, strict=True):
        assert a.dtype == torch.float32
        limit = 1.1 * relative_error(t, r) + 2 * GRADIENT_FLOOR[dtype]
        assert relative_error(a, r) <= limit, explanation.kernel
    again = step(ours, x, grad, dtype)
    if "torch" not in explanation.kernel:  # cuDNN may add in another order each time
        assert all(torch.equal(a, b) for a, b in zip(actual, again, strict=True))


@LOW
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("spatial", [(64, 34), (48, 37), (20, 258), (46, 54)], ids=str)
def test_padded_lines_with_the_bias_beside_them(spatial, kernel, dtype, backward):
    """As convolutions in front read them on Hopper."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the gradients of the convolution run on compute capability 9.0")
    backward(kernel, "sm90_gradients_bf16", "sm90_gradients_f16")
    torch.manual_seed(0)
    ours = Layer(conv_transpose_act_norm, 1, 24, None).cuda()
    theirs = copy.deepcopy(ours)
    theirs.function = composition
    exact = copy.deepcopy(theirs).double()
    x = torch.randn(3, 24, *spatial, device="cuda")
    with torch.autocast("cuda", dtype):
        _, explanation = explained(lambda: ours(x.requires_grad_()), gradients=True)
    x = x.detach()
    assert explanation.kernel.startswith(f"{kernel} + sm90_gradients_"), explanation.kernel
    padded = any("padded to" in line for line in explanation.steps)
    assert padded == (spatial[-1] % 8 != 0), explanation.steps
    grad = torch.randn(3, 48, *spatial, device="cuda")
    poison()
    actual = step(ours, x, grad, dtype)
    torchs = step(theirs, x, grad, dtype)
    reference = step(exact, x.double(), grad.double())
    for a, t, r in zip(actual, torchs, reference, strict=True):
        assert relative_error(a, r) <= 1.1 * relative_error(t, r) + 2 * GRADIENT_FLOOR[dtype]
    again = step(ours, x, grad, dtype)
    assert all(torch.equal(a, b) for a, b in zip(actual, again, strict=True))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_captured_step(kernel, backward):
    backward(kernel, "sm90_gradients_bf16", "boxes_gradients_sm90", "torch_convolution_backward")
    torch.manual_seed(0)
    model = Layer(conv_transpose_act_norm, 1, 32, None).cuda()
    x = torch.randn(4, 32, 64, 72, device="cuda")
    grad = torch.randn(4, 48, 64, 72, device="cuda")
    static_x, static_grad = x.clone().requires_grad_(), grad.clone()

    def run():
        model.zero_grad(set_to_none=False)
        static_x.grad.zero_()
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            output = model(static_x)
        output.backward(static_grad)

    static_x.grad = torch.zeros_like(static_x)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for seed in range(2):
        torch.manual_seed(seed)
        with torch.no_grad():
            static_x.copy_(torch.randn_like(x))
        static_grad.copy_(torch.randn_like(grad))
        graph.replay()
        captured = [static_x.grad.clone(), *(p.grad.clone() for p in model.parameters())]
        run()
        directly = [static_x.grad, *(p.grad for p in model.parameters())]
        assert all(relative_error(a, b) < 1e-3 for a, b in zip(captured, directly, strict=True))


def test_scaled_gradients_train():
    torch.manual_seed(0)
    ours = Layer(conv_transpose_act_norm, 2, 32, None).cuda()
    theirs = copy.deepcopy(ours)
    theirs.function = composition
    losses = []
    for model in (ours, theirs):
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**12)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        generator = torch.Generator("cuda").manual_seed(0)
        found = []
        for _ in range(20):
            x = torch.randn(4, 32, 24, 24, device="cuda", generator=generator)
            target = torch.randn(4, 48, 48, 48, device="cuda", generator=generator)
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                loss = nn.functional.mse_loss(model(x), target)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            found.append(float(loss.detach()))
        losses.append(found)
        assert scaler.get_scale() == 2.0**12
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_what_streams_says_what_it_does_not_serve(backward):
    backward(STREAMED)
    x = torch.randn(2, 12, 32, 33, device="cuda").bfloat16()
    call = lowered(lambda x: group_norm(x, 3), x.dtype)
    with pytest.raises(fusedconv.NoKernelError, match="planes are smaller than half a tile"):
        gradients(call, (x,), torch.randn_like(x, dtype=torch.float32))
