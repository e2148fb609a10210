"""Times of calls, taken in turns."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], object]


@dataclass(frozen=True)
class Prepared:
    """A call of what ``prepare()`` returns, which is made before each call and not timed."""

    prepare: Callable[[], Any]
    run: Callable[[Any], object]


#: More than the last cache of any GPU holds.
CACHE_BYTES = 128 << 20
#: Times ``CACHE_BYTES`` is a write that takes longer than the launches of most layers: on an H200
#: about 140 microseconds.
_WRITES = 4


@dataclass(frozen=True)
class Timing:
    """A contender's times, in the order in which they were taken."""

    milliseconds: list[float]
    #: Until each call returned.
    host_microseconds: list[float]

    def clear(self) -> None:
        self.milliseconds.clear()
        self.host_microseconds.clear()

    def fields(self) -> dict[str, float | int]:
        """As a record names them."""
        times = self.milliseconds
        deciles = (
            statistics.quantiles(times, n=10, method="inclusive") if len(times) > 1 else times * 9
        )
        return {
            "median_ms": statistics.median(times),
            "p10_ms": deciles[0],
            "p90_ms": deciles[-1],
            "reps": len(times),
            "host_us": statistics.median(self.host_microseconds),
        }


class Clock:
    """Times calls on the current CUDA stream, or on the processor where there is no GPU: for
    ``seconds`` a contender, at least ``least`` and else at most ``most`` times, in whole turns.

    ``flushes``: on a GPU each call follows a write of several ``CACHE_BYTES``. So it finds nothing
    of its own in the cache, and as it is launched while the GPU writes, launches that take no
    longer than that do not count.

    ``in_a_row``: how often a contender is called whenever its turn comes. The first quarter of
    these calls does not count: they find the host's caches full of the others' code."""

    def __init__(
        self,
        device: torch.device,
        seconds: float,
        least: int,
        most: int = 200,
        flushes: bool = False,
        in_a_row: int = 1,
    ) -> None:
        self.cuda = device.type == "cuda"
        self.seconds, self.least, self.most = seconds, least, most
        self.in_a_row, self._uncounted = in_a_row, in_a_row // 4
        self._written = (
            torch.empty(_WRITES * CACHE_BYTES, dtype=torch.int8, device=device)
            if self.cuda and flushes
            else None
        )

    def once(self, call: Call | Prepared) -> tuple[float, float]:
        """(milliseconds on the device, microseconds until the call returned)."""
        if isinstance(call, Prepared):
            call = functools.partial(call.run, call.prepare())
        if not self.cuda:
            start = time.perf_counter()
            call()
            elapsed = time.perf_counter() - start
            return elapsed * 1e3, elapsed * 1e6
        torch.cuda.synchronize()
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if self._written is not None:
            self._written.zero_()
        first.record()
        start = time.perf_counter()
        call()
        host = time.perf_counter() - start
        last.record()
        last.synchronize()
        return first.elapsed_time(last), host * 1e6

    def measure(self, calls: Sequence[Call | Prepared]) -> Timing:
        """Times of repeated calls taken in turn."""
        (timing,) = self.interleave([calls])
        return timing

    def interleave(self, contenders: Sequence[Sequence[Call | Prepared]]) -> list[Timing]:
        """The same for several contenders at a time, which take one turn each in every round.

        Who begins changes from round to round, and every second round runs backwards. In a round
        no two begin with the call of the same place in their lists, unless these are shorter than
        the number of contenders: calls on the same tensors would find them in the caches.
        """
        count = len(contenders)
        timings = [Timing([], []) for _ in contenders]
        start = time.perf_counter()

        def lasts() -> bool:
            return time.perf_counter() - start < self.seconds * count

        for number in range(max((3, *map(len, contenders)))):
            if number == 0 or lasts():
                self.play(number, contenders, timings)
        for timing in timings:
            timing.clear()
        start = time.perf_counter()
        number = 0
        taken = self.in_a_row - self._uncounted  # of a contender in a round
        while number * taken < self.least or (number * taken < self.most and lasts()):
            self.play(number, contenders, timings)
            number += 1
        return timings

    def play(
        self,
        number: int,
        contenders: Sequence[Sequence[Call | Prepared]],
        timings: Sequence[Timing],
    ) -> None:
        """The round of a number, of those that ``interleave`` describes."""
        count = len(contenders)
        order = [(number // 2 + place) % count for place in range(count)]
        for index in order if number % 2 == 0 else reversed(order):
            calls = contenders[index]
            for repeat in range(self.in_a_row):
                place = number * self.in_a_row + repeat + index
                milliseconds, host = self.once(calls[place % len(calls)])
                if repeat >= self._uncounted:
                    timings[index].milliseconds.append(milliseconds)
                    timings[index].host_microseconds.append(host)
