"""What tests of convolutions on the GPU share."""

from __future__ import annotations

import math
from typing import Any

import torch
from reference import LAYOUTS, relative_error
from reference import conv_transpose_act_norm as composition

import fusedconv
from fusedconv.functional import conv_transpose_act_norm


def poison(num_bytes: int = 64 << 20, device: str = "cuda") -> None:
    """Leaves NaN in the memory that the next allocations get."""
    blocks = [torch.full((size // 4,), torch.nan, device=device) for size in (num_bytes, 1 << 20)]
    del blocks


def bound(eager_error: float, precision: str) -> float:
    # 1.1 times eager's error, and a floor of a few roundings for results that eager has exact.
    return 1.1 * eager_error + {"tf32": 2e-6, "fp32": 4e-8, "fp16": 1e-5, "bf16": 1e-4}[precision]


def round_to_tf32(x: torch.Tensor) -> torch.Tensor:
    """To nearest, ties to even, as torch's TF32 convolutions round finite operands."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFF).view(torch.float32).reshape(x.shape)


def fused_against_fp64(
    case: dict[str, Any],
    dtype: torch.dtype,
    precision: str,
    device: str = "cuda",
    floor: float = 0.0,
) -> bool:
    """Computes a random problem by what FUSEDCONV_KERNEL names and holds it against float64; False
    where that serves it not. Beside sizes a case may name its ``layout``, ``stride``,
    ``output_padding`` and ``conv_groups``, how the input is drawn (``draw``), an ``offset`` of the
    bias, the ``order`` of activation and normalisation, and whether gradients are asked for
    (``saves``). ``floor`` adds to the bound."""
    draw, groups = case.get("draw", torch.randn), case["groups"]
    x = draw(case["batch"], case["channels"], *case["spatial"], device=device).to(dtype)
    x = LAYOUTS[case.get("layout", "nchw")](x)
    conv_groups, stride = case.get("conv_groups", 1), case.get("stride", [1])
    shape = (case["channels"], case["out"] // conv_groups, *case["kernel"])
    products = case["channels"] // conv_groups * math.prod(case["kernel"]) / math.prod(stride)
    weight = (torch.randn(shape, device=device) / products**0.5).to(dtype)
    bias = scale = shift = None
    if case["bias"]:
        bias = (case.get("offset", 0.0) + torch.randn(case["out"], device=device)).to(dtype)
    if groups:
        scale, shift = (torch.randn(case["out"], device=device).to(dtype) for _ in range(2))
    keywords = dict(
        padding=case["padding"],
        dilation=case["dilation"],
        stride=stride,
        output_padding=case.get("output_padding", 0),
        groups=conv_groups,
        activation=case["activation"],
        order=case.get("order", "act_norm"),
        num_groups=groups,
    )

    def run(x, weight, bias, scale, shift):
        return composition(x, weight, bias, norm_weight=scale, norm_bias=shift, **keywords)

    poison(device=device)
    saves = case.get("saves", False)
    with torch.set_grad_enabled(saves):
        try:
            actual = conv_transpose_act_norm(
                x.detach().requires_grad_(saves),
                weight,
                bias,
                norm_weight=scale,
                norm_bias=shift,
                precision=precision if dtype is torch.float32 else None,
                **keywords,
            ).detach()
        except fusedconv.NoKernelError:
            return False
    tensors = (x, weight, bias, scale, shift)
    wide = [None if t is None else t.double() for t in tensors]
    reference = run(*wide)
    eager_error = relative_error(run(*tensors), reference)
    if precision == "tf32":
        rounded = [round_to_tf32(x).double(), round_to_tf32(weight).double(), *wide[2:]]
        eager_error = max(eager_error, relative_error(run(*rounded), reference))
    error = relative_error(actual, reference)
    assert error <= bound(eager_error, precision) + floor, (case, error, eager_error)
    return True
