"""Times of calls, the rates of a device, and the floors that follow from them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from fusedconv.benchmark.cells import DTYPES


class Clock:
    """Times calls on the current CUDA stream, or on the processor where there is no GPU."""

    def __init__(self, device: torch.device, seconds: float, least: int) -> None:
        self.cuda = device.type == "cuda"
        self.seconds, self.least = seconds, least

    def once(self, call: Callable[[], object]) -> tuple[float, float]:
        """(milliseconds on the device, microseconds until the call returned)."""
        if not self.cuda:
            start = time.perf_counter()
            call()
            elapsed = time.perf_counter() - start
            return elapsed * 1e3, elapsed * 1e6
        torch.cuda.synchronize()
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        start = time.perf_counter()
        call()
        host = time.perf_counter() - start
        last.record()
        last.synchronize()
        return first.elapsed_time(last), host * 1e6

    def measure(self, calls: Sequence[Callable[[], object]]) -> tuple[list[float], float]:
        """Times of repeated calls taken in turn, and the median host time."""
        for index in range(max(3, len(calls))):
            self.once(calls[index % len(calls)])
        times: list[float] = []
        hosts: list[float] = []
        start = time.perf_counter()
        while len(times) < self.least or (
            time.perf_counter() - start < self.seconds and len(times) < 200
        ):
            milliseconds, host = self.once(calls[len(times) % len(calls)])
            times.append(milliseconds)
            hosts.append(host)
        return times, statistics.median(hosts)


def measured_rates(device: torch.device) -> dict[str, float]:
    """Copy bytes a second (reads and writes) and matrix FLOP/s by precision, of this device."""
    if device.type != "cuda":
        return {}
    clock = Clock(device, 0.3, 10)
    source = torch.rand(1 << 29, device=device)
    target = torch.empty_like(source)
    times, _ = clock.measure([lambda: target.copy_(source)])
    rates = {"copy": 2 * source.nbytes / statistics.median(times) * 1e3}
    size = 8192
    allowed = torch.backends.cuda.matmul.allow_tf32
    for precision, dtype in DTYPES.items():
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        times, _ = clock.measure([lambda a=a, b=b: a @ b])  # type: ignore[misc]
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
