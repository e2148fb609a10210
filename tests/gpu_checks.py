"""What tests of convolutions on the GPU share."""

from __future__ import annotations

import torch


def poison(num_bytes: int = 64 << 20) -> None:
    """Leaves NaN in the memory that the next allocations get."""
    blocks = [torch.full((size // 4,), torch.nan, device="cuda") for size in (num_bytes, 1 << 20)]
    del blocks


def bound(eager_error: float, precision: str) -> float:
    # 1.1 times eager's error, and a floor of a few roundings for results that eager has exact.
    return 1.1 * eager_error + {"tf32": 2e-6, "fp32": 4e-8, "fp16": 1e-5, "bf16": 1e-4}[precision]


def round_to_tf32(x: torch.Tensor) -> torch.Tensor:
    """To nearest, ties to even, as torch's TF32 convolutions round finite operands."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFF).view(torch.float32).reshape(x.shape)
