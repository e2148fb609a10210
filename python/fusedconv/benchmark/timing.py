"""The rates of a device, and the floors that follow from them."""

from __future__ import annotations

import statistics

import torch

from fusedconv.benchmark.cells import DTYPES
from fusedconv.timing import Clock


def measured_rates(device: torch.device) -> dict[str, float]:
    """Copy bytes a second (reads and writes) and matrix FLOP/s by precision, of this device."""
    if device.type != "cuda":
        return {}
    clock = Clock(device, 0.3, 10)
    source = torch.rand(1 << 29, device=device)
    target = torch.empty_like(source)
    times = clock.measure([lambda: target.copy_(source)]).milliseconds
    rates = {"copy": 2 * source.nbytes / statistics.median(times) * 1e3}
    size = 8192
    allowed = torch.backends.cuda.matmul.allow_tf32
    for precision, dtype in DTYPES.items():
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        times = clock.measure([lambda a=a, b=b: a @ b]).milliseconds  # type: ignore[misc]
        rates[precision] = 2 * size**3 / statistics.median(times) * 1e3
    torch.backends.cuda.matmul.allow_tf32 = allowed
    return rates


def floor_ms(
    flops: int,
    input_bytes: int,
    output_bytes: int,
    precision: str,
    pass_: str,
    rates: dict[str, float],
) -> float | None:
    """``fusedconv.benchmark``'s docstring gives the formula."""
    if not rates:
        return None
    moved = input_bytes + output_bytes
    if pass_ == "forward_backward":
        flops *= 3
        moved += output_bytes + 2 * input_bytes
    rate = rates["tf32"] / 3 if precision == "fp32" else rates[precision]
    return max(flops / rate, moved / rates["copy"]) * 1e3
