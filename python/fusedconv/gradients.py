"""Gradients of activation and GroupNorm in either order, by our kernels or torch's operators."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedconv.kernels import cuda_program, torch_reference
from fusedconv.problem import DTYPE_CODES, device_properties


def activation_gradient(grad: Tensor, x: Tensor, activation: str) -> Tensor:
    """``grad`` times the activation's slope at ``x``."""
    aten = torch.ops.aten
    match activation:
        case "relu":
            result = aten.threshold_backward(grad, x, 0)
        case "gelu":
            result = aten.gelu_backward(grad, x)
        case "gelu_tanh":
            result = aten.gelu_backward(grad, x, approximate="tanh")
        case "silu":
            result = aten.silu_backward(grad, x)
        case _:
            result = grad
    return result


def norm_gradients(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    num_groups: int,
    activation: str,
    order: str,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of input, weight and bias, in their dtypes or wider; None where ``needs`` says so.

    ``x`` is the input of activation and GroupNorm, [N, C, *spatial]; ``mean`` and ``rstd`` are
    [N, num_groups]. Activation and normalised value are computed anew: by our kernels on CUDA where
    the gradient has the input's dtype, else with torch's operators, in float32 where ``x`` has 16
    bits, as a slope taken at rounded values would be off by the rounding.
    """
    before = activation if order == "act_norm" else "identity"
    after = activation if order == "norm_act" else "identity"
    if (
        x.is_cuda
        and cuda_program.HAS_CUDA
        and grad.dtype == x.dtype
        and x.dtype in DTYPE_CODES
        and x.numel()
        and device_properties(x.device.index or 0)[0] >= 80
    ):
        layout = torch_reference.output_layout(x)
        return cuda_program.group_norm_gradients(
            torch_reference.dense(grad, layout),
            torch_reference.dense(x, layout),
            mean,
            rstd,
            weight,
            bias,
            layout,
            num_groups,
            before,
            after,
            needs,
        )
    return _norm_gradients_in_torch(
        grad, x, mean, rstd, weight, bias, num_groups, before, after, needs
    )


def _norm_gradients_in_torch(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    num_groups: int,
    before: str,
    after: str,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    wide = torch_reference.statistics_dtype(x)
    batch, channels = x.shape[:2]
    pixels = x.numel() // max(1, batch * channels)
    grad, x, mean, rstd = grad.to(wide), x.to(wide), mean.to(wide), rstd.to(wide)
    weight, bias = torch_reference.affine(x, weight, bias)
    # torch's operator takes the weight for contiguous, whatever its stride.
    weight = None if weight is None else weight.to(wide).contiguous()
    # Contiguous: torch's kernel for channels last on processors writes the input's gradient even
    # where none is asked for, through a null pointer.
    activated = torch_reference.activate(x, before).contiguous()
    if after != "identity":
        flat = activated.reshape(batch, num_groups, channels // num_groups * pixels)
        normed = ((flat - mean[..., None]) * rstd[..., None]).reshape(x.shape)
        per_channel = (1, channels, *(1,) * (x.dim() - 2))
        if weight is not None:
            normed = normed * weight.reshape(per_channel)
        if bias is not None:
            normed = normed + bias.to(wide).reshape(per_channel)
        grad = activation_gradient(grad, normed, after)
    grad_x, grad_weight, grad_bias = torch.ops.aten.native_group_norm_backward(
        grad.contiguous(),
        activated,
        mean,
        rstd,
        weight,
        batch,
        channels,
        pixels,
        num_groups,
        list(needs),
    )
    if grad_x is not None and grad_x.numel():
        grad_x = activation_gradient(grad_x, x, before)
    return grad_x, grad_weight, grad_bias
