"""Training that keeps no output of the convolution, on a GPU: gradients and memory."""

from __future__ import annotations

import pytest
import torch
from gpu_checks import poison
from reference import normalised, relative_error

from fusedconv.benchmark import DTYPES
from fusedconv.functional import conv_transpose_act_norm
from fusedconv.layout import layout_of

pytestmark = pytest.mark.gpu

#: Activations are smooth: behind a normalisation a value near zero that is computed anew may come
#: to lie on the other side of a kink.
STAGES = {
    "group": {"activation": "gelu", "num_groups": 8},
    "group behind": {"activation": "silu", "num_groups": 4, "order": "norm_act"},
    "instance": {"activation": "gelu", "norm": "instance", "order": "norm_act"},
    "layer": {"activation": "gelu", "norm": "layer", "order": "norm_act"},
    "affine": {"activation": "silu", "norm": "affine", "order": "norm_act"},
    "activation": {"activation": "silu"},
}
#: Its place among an output and the gradients of input, weight, bias, norm weight and norm bias.
BIAS = 3


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("precision", ["tf32", "fp32", "fp16", "bf16"])
def test_against_fp64(precision, stride, layout, stage, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", precision == "tf32")
    dtype = DTYPES[precision]
    torch.manual_seed(0)
    form = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    x = torch.randn(3, 32, 40, 36, device="cuda").contiguous(memory_format=form)
    tensors = [x, torch.randn(32, 64, 2, 2, device="cuda") / 8, torch.randn(64, device="cuda")]
    if "num_groups" in STAGES[stage] or "norm" in STAGES[stage]:
        tensors += [torch.randn(64, device="cuda") for _ in range(2)]

    def gradients(dtype: torch.dtype, **keywords: bool) -> tuple[torch.Tensor, ...]:
        leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors]
        names = dict(zip(("norm_weight", "norm_bias"), leaves[3:], strict=False))
        output = conv_transpose_act_norm(
            *leaves[:3], stride=stride, **STAGES[stage], **names, **keywords
        )
        return (output, *torch.autograd.grad(output, leaves, cotangent(output)))

    def cotangent(output: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator("cuda").manual_seed(1)
        grad = torch.randn(output.shape, generator=generator, device="cuda").to(output.dtype)
        return grad.contiguous(memory_format=form)

    def summed_for_the_bias() -> torch.Tensor:
        """Magnitudes of what its gradient sums, by channel."""
        x, weight, bias, *affine = (tensor.double() for tensor in tensors)
        convolved = torch.nn.functional.conv_transpose2d(x, weight, bias, stride=stride)
        convolved.requires_grad_()
        output = torch.nn.functional.gelu(normalised("instance", convolved, *affine))
        (grad,) = torch.autograd.grad(output, convolved, cotangent(output))
        return grad.abs().sum((0, 2, 3))

    poison()
    anew = gradients(dtype, recompute=True)
    kept = gradients(dtype)
    tensors = [tensor.to(dtype) for tensor in tensors]  # what was rounded on the way in
    exact = gradients(torch.float64)
    assert layout_of(anew[1].shape, anew[1].stride()) == layout
    # The convolution's output may come from another kernel than the statistics: with TF32 asked
    # for, one of the two may be in strict fp32.
    floor = {"tf32": 1e-3, "fp32": 1e-6, "fp16": 1e-3, "bf16": 1e-2}[precision]
    for index, (found, other, right) in enumerate(zip(anew, kept, exact, strict=True)):
        if stage == "instance" and index == BIAS:
            # The normalisation takes away what the bias adds: zero but for rounding.
            errors = [(each.double() - right).abs() for each in (found, other)]
            assert bool((errors[0] <= 1.5 * errors[1] + floor * summed_for_the_bias()).all())
            continue
        assert relative_error(found, right) <= 1.5 * relative_error(other, right) + floor, index


@pytest.mark.parametrize("stage", ["group", "layer", "affine", "activation"])
def test_a_tensor_of_the_outputs_size_is_not_kept(stage):
    x = torch.randn(8, 64, 128, 128, device="cuda", requires_grad=True)
    weight = torch.randn(64, 64, 3, 3, device="cuda", requires_grad=True)
    affine = {}
    if stage != "activation":
        names = ("norm_weight", "norm_bias")
        affine = {name: torch.randn(64, device="cuda", requires_grad=True) for name in names}

    def requested() -> int:
        # What torch's allocator rounds up, by up to 2 MiB, is not held by anybody.
        return torch.cuda.memory_stats()["requested_bytes.all.current"]

    def held(**keywords: bool) -> int:
        torch.cuda.synchronize()
        before = requested()
        output = conv_transpose_act_norm(x, weight, **STAGES[stage], **affine, **keywords)
        size = output.numel() * output.element_size()
        return requested() - before - size

    size = 8 * 64 * 130 * 130 * 4
    assert held() >= size
    assert held(recompute=True) <= size // 100
