"""The rates of a device, and the floors that follow from them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import torch

from fusedconv.benchmark.cells import AUTOCAST, DTYPES
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


def matrix_rate(precision: str, rates: Mapping[str, float]) -> float:
    """FLOP/s of convolutions: strict fp32 on tensor cores takes three TF32 products for one."""
    return rates["tf32"] / 3 if precision == "fp32" else rates[AUTOCAST.get(precision, precision)]


def work(flops: int, input_bytes: int, output_bytes: int, pass_: str) -> tuple[int, int]:
    """FLOPs and bytes that a pass cannot do without; ``flops`` are the forward convolution's."""
    moved = input_bytes + output_bytes
    if pass_ == "forward_backward":
        return 3 * flops, moved + output_bytes + 2 * input_bytes
    return flops, moved


def floor_ms(
    flops: int,
    input_bytes: int,
    output_bytes: int,
    precision: str,
    pass_: str,
    rates: Mapping[str, float],
) -> float | None:
    """What ``work`` takes at the device's rates; None without rates."""
    if not rates:
        return None
    flops, moved = work(flops, input_bytes, output_bytes, pass_)
    return max(flops / matrix_rate(precision, rates), moved / rates["copy"]) * 1e3
