"""The reference provider: torch's own operators. Serves everything torch serves."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional as F

from fusedconv.plan import Outputs, Plan
from fusedconv.problem import (
    ConvTransposeGeometry,
    NormGeometry,
    Problem,
    conv_fp32_precision,
    layout_of,
)
from fusedconv.registry import Kernel, Registry, Support

_CONV = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def activate(x: Tensor, activation: str | None) -> Tensor:
    """torch's operator for an activation's name. TorchScript compiles it too."""
    if activation is None or activation == "identity":
        return x
    elif activation == "relu":
        return F.relu(x)
    elif activation == "gelu":
        return F.gelu(x)
    elif activation == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    elif activation == "silu":
        return F.silu(x)
    else:
        raise ValueError(f"activation: got {activation}, expected the name of one")


def conv_transpose(
    conv: ConvTransposeGeometry, input: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """torch's transposed convolution of one, two or three spatial axes."""
    result: Tensor = _CONV[len(conv.kernel_size)](
        input,
        weight,
        bias,
        conv.stride,
        conv.padding,
        conv.output_padding,
        conv.groups,
        conv.dilation,
    )
    return result


@contextmanager
def precision_scope(precision: str) -> Iterator[None]:
    """torch's switch for fp32 convolutions set to "tf32" or "fp32" for the scope."""
    if precision not in ("tf32", "fp32") or conv_fp32_precision() == precision:
        yield
        return
    setter = getattr(torch._C, "_set_fp32_precision_setter", None)
    if setter is None:
        previous = torch.backends.cudnn.allow_tf32
        torch.backends.cudnn.allow_tf32 = precision == "tf32"
        try:
            yield
        finally:
            torch.backends.cudnn.allow_tf32 = previous
        return
    setting = torch._C._get_fp32_precision_getter("cuda", "conv")
    setter("cuda", "conv", "tf32" if precision == "tf32" else "ieee")
    try:
        yield
    finally:
        setter("cuda", "conv", setting)


def compose(
    problem: Problem,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
) -> Outputs:
    """The problem in torch's operators, which autograd and torch.func follow by themselves."""
    x = input
    conv_output = mean = rstd = None
    if problem.conv is not None:
        assert weight is not None
        x = conv_output = conv_transpose(problem.conv, x, weight, bias)
    x = activate(x, problem.activation_before)
    norm = problem.norm
    if norm is not None:
        x = x.to(problem.output_dtype)
        if x.device.type == "cpu" and torch.is_grad_enabled():
            # torch's gradient for channels last on processors writes the input's gradient even
            # where none is asked for, through a null pointer.
            x = x.contiguous()
        norm_weight, norm_bias = affine(x, norm_weight, norm_bias)
        if problem.save:
            x, mean, rstd = _group_norm_with_statistics(norm, x, norm_weight, norm_bias)
        else:
            # Not torch.nn.functional's, which refuses single values that a group may consist of.
            x = torch.group_norm(x, norm.num_groups, norm_weight, norm_bias, norm.eps)
    output = dense(activate(x, problem.activation_after), problem.output_layout)
    return Outputs(output, conv_output if problem.save else None, mean, rstd)


def affine(
    x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Weight and bias as torch's GroupNorm of ``x`` takes them: of its dtype, or of float32 where
    it has 16 bits; and no bias without a weight, which its gradient on processors refuses."""
    given = weight if weight is not None else bias
    if given is None:
        return None, None
    dtype = given.dtype
    if dtype not in (x.dtype, torch.float32):
        dtype = torch.promote_types(x.dtype, torch.float32)
    if weight is None:
        weight = given.new_ones(given.shape)
    return weight.to(dtype), None if bias is None else bias.to(dtype)


def _group_norm_with_statistics(
    norm: NormGeometry, x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    batch, channels, *spatial = x.shape
    # torch's operator takes them for contiguous, whatever their strides.
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    output, mean, rstd = torch.ops.aten.native_group_norm(
        x.contiguous(), weight, bias, batch, channels, math.prod(spatial), norm.num_groups, norm.eps
    )
    statistics = statistics_dtype(x)
    return output, mean.to(statistics), rstd.to(statistics)


def statistics_dtype(x: Tensor) -> torch.dtype:
    """Of means and deviations, and of what is computed between roundings: float32 or wider."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def output_layout(x: Tensor) -> str:
    """The dense layout of what is computed from a tensor: channels last where that is."""
    return "nhwc" if layout_of(tuple(x.shape), x.stride()) == "nhwc" else "nchw"


def dense(tensor: Tensor, layout: str) -> Tensor:
    """The tensor in dense channels-first or channels-last strides; a copy only where it is not."""
    axes = tensor.dim()
    if layout == "nchw":
        return tensor.contiguous()
    order = [0, *range(2, axes), 1]
    back = [0, axes - 1, *range(1, axes - 1)]
    return tensor.permute(order).contiguous().permute(back)


class TorchPlan(Plan):
    is_reference = True

    def __init__(self, problem: Problem) -> None:
        self.kernel = "torch"
        self.problem = problem
        steps = []
        if problem.conv is not None:
            steps.append(f"torch.conv_transpose{len(problem.conv.kernel_size)}d (vendor library)")
        if problem.activation_before != "identity":
            steps.append(f"torch {problem.activation_before}")
        if problem.norm is not None:
            steps.append("torch.group_norm")
        if problem.activation_after != "identity":
            steps.append(f"torch {problem.activation_after}")
        self.steps = tuple(steps)

    def run(
        self,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
    ) -> Outputs:
        with precision_scope(self.problem.precision):
            return compose(self.problem, input, weight, bias, norm_weight, norm_bias)


class TorchReference(Kernel):
    name = "torch"
    provider = "torch"

    def supports(self, problem: Problem) -> Support:
        return Support.yes()

    def cost(self, problem: Problem) -> float:
        """What eager costs: the vendor's convolution and one or more trips through memory a step.

        A last resort on CUDA: only a kernel that cannot serve loses to it.
        """
        if problem.device != "cuda":
            # An order of magnitude for a processor; the cpu provider's estimate has the same unit.
            passes = 2.0 + 2.0 * (problem.norm is not None) + (problem.activation != "identity")
            return problem.conv_flops / 1e8 + passes * problem.minimal_bytes / 1e7
        return 1e6

    def compile(self, problem: Problem) -> Plan:
        return TorchPlan(problem)


def register(registry: Registry) -> None:
    registry.register(TorchReference())
