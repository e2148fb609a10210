"""BatchNorm of inference behind a convolution on the GPU, in one node of autograd: against fp64,
relative to eager's error."""

from __future__ import annotations

import pytest
import torch
from gpu_checks import poison
from reference import ACTIVATIONS, GRADIENT_FLOOR, LAYOUTS, relative_error
from torch import nn
from torch.nn import functional as F

import fusedconv
from fusedconv import functional, ops
from fusedconv.ops import seen

pytestmark = pytest.mark.gpu

NODE = "DirectBatchNormBackward"
PRECISIONS = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture(params=PRECISIONS)
def dtype(request):
    """The dtype, with torch's switch for the precision set."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic
    torch.backends.cudnn.allow_tf32 = request.param == "tf32"
    torch.backends.cudnn.deterministic = True  # which kernels of ours are anyway
    yield PRECISIONS[request.param]
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = before


class Layer(nn.Module):
    """What torch computes; ``ours`` is the same in one call."""

    def __init__(self, channels=64, out=32, weight=True, bias=True, activation="relu"):
        super().__init__()
        self.conv = nn.ConvTranspose2d(channels, out, 4, 2, 1)
        self.norm = nn.BatchNorm2d(out, eps=1e-3).eval()
        for each in (self.norm.running_mean, self.norm.weight, self.norm.bias):
            nn.init.uniform_(each, -1.0, 1.0)
        nn.init.uniform_(self.norm.running_var, 0.5, 2.0)
        self.norm.weight = self.norm.weight if weight else None
        self.norm.bias = self.norm.bias if bias else None
        self.activation = activation

    def forward(self, x):
        norm = self.norm
        x = F.batch_norm(
            self.conv(x), norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps
        )
        return ACTIVATIONS[self.activation](x)

    def ours(self, x, **keywords):
        conv, norm = self.conv, self.norm
        return functional.conv_transpose_act_norm(
            x, conv.weight, conv.bias, conv.stride, conv.padding, conv.output_padding, conv.groups,
            conv.dilation, activation=self.activation, order="norm_act", norm="batch",
            norm_weight=norm.weight, norm_bias=norm.bias, running_mean=norm.running_mean,
            running_var=norm.running_var, eps=norm.eps, **keywords,
        )  # fmt: skip


def layer_and_input(dtype, layout="nchw", **keywords):
    torch.manual_seed(0)
    layer = Layer(**keywords).cuda().to(dtype)
    if layout == "nhwc":
        layer = layer.to(memory_format=torch.channels_last)
    x = LAYOUTS[layout](torch.randn(4, 64, 16, 16, device="cuda").to(dtype))
    return layer, x.requires_grad_()


def step(layer, function, x, grad):
    """The output and every gradient."""
    output = function(x)
    return output.detach(), *torch.autograd.grad(output, (x, *layer.parameters()), grad)


def exact(layer, x, grad):
    dtype = x.dtype
    wide = layer.double()
    found = step(wide, wide, x.detach().double().requires_grad_(), grad.double())
    layer.to(dtype)
    return found


def assert_as_accurate(actual, torchs, right, dtype):
    for one, other, fp64 in zip(actual, torchs, right, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        limit = 2 * relative_error(other, fp64) + 4 * GRADIENT_FLOOR[dtype]
        assert relative_error(one, fp64) <= limit


@pytest.fixture
def recalls(monkeypatch):
    """Whether each call was known again, in order."""
    found = []
    recall = ops.recall

    def noting(*arguments):
        known = recall(*arguments)
        found.append(known is not None)
        return known

    monkeypatch.setattr(ops, "recall", noting)
    return found


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
# torch's own BatchNorm of inference has no gradients of a bias without a weight on CUDA.
@pytest.mark.parametrize(("weight", "bias"), [(True, True), (True, False), (False, False)])
def test_a_training_step(dtype, layout, weight, bias, recalls):
    layer, x = layer_and_input(dtype, layout, weight=weight, bias=bias)
    grad = LAYOUTS[layout](torch.randn(4, 32, 32, 32, device="cuda").to(dtype))
    torchs = step(layer, layer, x, grad)
    right = exact(layer, x, grad)
    assert layer.ours(x).grad_fn.name() == NODE
    found = []
    for _ in range(3):
        poison()
        found.append(step(layer, layer.ours, x, grad))
        assert_as_accurate(found[-1], torchs, right, dtype)
    if seen._Guards is not None:
        assert recalls == [False, True, True, True]
    for one in found[1:]:
        assert all(map(torch.equal, found[0], one)), "other bits"


def test_recompute(dtype):
    layer, x = layer_and_input(dtype)
    grad = torch.randn(4, 32, 32, 32, device="cuda").to(dtype)
    torchs, right = step(layer, layer, x, grad), exact(layer, x, grad)
    for _ in range(2):
        found = step(layer, lambda x: layer.ours(x, recompute=True), x, grad)
        assert_as_accurate(found, torchs, right, dtype)


@pytest.mark.parametrize("grad", [False, True])
def test_changes_in_place_are_seen(dtype, grad, recalls):
    """Of running statistics and parameters between calls; their addresses stay."""
    layer, x = layer_and_input(dtype)
    layer.requires_grad_(grad)
    x.requires_grad_(grad)
    layer.ours(x)
    norm = layer.norm
    for each in (norm.running_mean, norm.running_var, norm.weight, norm.bias, layer.conv.weight):
        with torch.no_grad():
            each.mul_(1.5)
        actual = layer.ours(x).detach()
        torchs, right = layer(x), layer.double()(x.double())
        layer.to(dtype)
        assert_as_accurate([actual], [torchs.detach()], [right.detach()], dtype)
    if seen._Guards is not None:
        assert all(recalls[1:])


@pytest.mark.parametrize(
    "needed", ["input", "conv.weight", "conv.bias", "norm.weight", "norm.bias"]
)
def test_one_gradient(needed):
    layer, x = layer_and_input(torch.bfloat16, "nhwc")
    grad = LAYOUTS["nhwc"](torch.randn(4, 32, 32, 32, device="cuda").bfloat16())
    whole = dict(zip(("input", "conv.weight", "conv.bias", "norm.weight", "norm.bias"),
                     step(layer, layer.ours, x, grad)[1:], strict=True))  # fmt: skip
    leaves = {"input": x, **dict(layer.named_parameters())}
    for name, each in leaves.items():
        each.requires_grad_(name == needed)
    for _ in range(2):
        (found,) = torch.autograd.grad(layer.ours(x), [leaves[needed]], grad)
        limit = 4 * GRADIENT_FLOOR[torch.bfloat16]
        assert relative_error(found, whole[needed].double()) <= limit


def test_autocast():
    """Parameters and statistics in float32, the convolution in bfloat16; folded in each call."""
    layer, x = layer_and_input(torch.float32)
    grad = torch.randn(4, 32, 32, 32, device="cuda")
    right = exact(layer, x, grad)

    def under(function):
        with torch.autocast("cuda", torch.bfloat16):
            output = function(x)
        assert output.dtype == torch.bfloat16
        leaves = (x, *layer.parameters())
        return output.detach(), *torch.autograd.grad(output, leaves, grad.bfloat16())

    assert_as_accurate(under(layer.ours), under(layer), right, torch.bfloat16)


def test_second_derivatives():
    torch.manual_seed(0)
    layer = Layer(4, 6, activation="silu").cuda()
    x = torch.randn(2, 4, 5, 6, device="cuda", requires_grad=True)

    def second(function, layer, x):
        leaves = (x, *layer.parameters())
        output = function(x)
        first = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(each.square().sum() for each in first), leaves)

    layer.ours(x)
    actual = second(layer.ours, layer, x)
    wide = layer.double()
    right = second(wide, wide, x.detach().double().requires_grad_())
    for one, other in zip(actual, right, strict=True):
        assert relative_error(one, other) <= 1e-2


def test_a_step_does_not_wait_for_the_device(no_synchronisation):
    layer, x = layer_and_input(torch.bfloat16, "nhwc")
    grad = LAYOUTS["nhwc"](torch.randn(4, 32, 32, 32, device="cuda").bfloat16())
    step(layer, layer.ours, x, grad)
    with no_synchronisation():
        step(layer, layer.ours, x, grad)


def test_a_converted_model_is_served_by_it():
    model = nn.Sequential(nn.ConvTranspose2d(64, 64, 4, 2, 1), nn.BatchNorm2d(64), nn.ReLU())
    model = model.cuda().bfloat16().eval()
    fusedconv.convert(model)
    x = torch.randn(4, 64, 16, 16, device="cuda").bfloat16()
    assert model(x).grad_fn.name() == NODE
