"""What tests of a convolution's gradients on the GPU share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def output_gradient(kind: str, output: Tensor) -> Tensor:
    """Of the output's shape and dtype, lying in memory as ``kind`` says."""
    if kind == "channels last":
        return in_layout(torch.randn_like(output), "nhwc")
    if kind == "expanded":
        return torch.randn_like(output[..., :1]).expand_as(output)
    if kind == "sliced":
        columns = output.shape[-1]
        wide = torch.randn(*output.shape[:-1], columns + 3, device=output.device)
        return wide.to(output.dtype)[..., 1 : columns + 1]
    return torch.randn_like(output)


def in_layout(tensor: Tensor, layout: str) -> Tensor:
    """A dense tensor of any rank in a layout."""
    if layout == "nchw":
        return tensor.contiguous()
    return tensor.movedim(1, -1).contiguous().movedim(-1, 1)


def operands(case: dict[str, Any], dtype: torch.dtype, layout: str = "nchw") -> list[Tensor]:
    x = case["draw"](case["batch"], case["channels"], *case["spatial"], device="cuda")
    x = in_layout(x, layout)
    weight = torch.randn(case["channels"], case["out"], *case["kernel"], device="cuda")
    weight = in_layout(weight, case.get("weight_layout", "nchw"))
    bias = torch.randn(case["out"], device="cuda")
    return [x.to(dtype), (weight / case["channels"] ** 0.5).to(dtype), bias.to(dtype)]


#: Of a convolution, what a case may name.
GEOMETRY = ("stride", "padding", "output_padding", "dilation")


def eager(x: Tensor, weight: Tensor, bias: Tensor, **geometry: list[int]) -> Tensor:
    operator = getattr(torch.nn.functional, f"conv_transpose{x.dim() - 2}d")
    result: Tensor = operator(x, weight, bias, **geometry)
    return result


#: Of a result whose operands were rounded to 10 bits behind the point: half a unit of the last.
TF32_ERROR = 2.0**-11
NAMES = ("input", "weight", "bias")


def gradients(
    function, tensors: list[Tensor], grad: Tensor, wanted: tuple[str, ...] = NAMES, **keywords
) -> tuple[Tensor, ...]:
    leaves = [
        tensor.detach().requires_grad_(name in wanted)
        for name, tensor in zip(NAMES, tensors, strict=True)
    ]
    asked = [leaf for leaf in leaves if leaf.requires_grad]
    return torch.autograd.grad(function(*leaves, **keywords), asked, grad)
