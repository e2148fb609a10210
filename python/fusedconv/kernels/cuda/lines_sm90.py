"""Transposed convolution along one axis, channels first in 16 bits, on compute capability 9.0.

Filters of more than one stride and up to two, as vocoders' upsamplings have them, give each phase
of the output two taps. Both are multiplied by the same lines of the input, which are read as they
lie, and what they gave at neighbouring positions is added behind the products; the filter stays in
shared memory. A row is how many groups of four warps multiply: each has rows of the filter of its
own, or where that is too large for it a tile of positions.
"""

from __future__ import annotations

import math
from typing import Any

from fusedconv import _C
from fusedconv.device import Device
from fusedconv.kernels.compiled import readable_aligned
from fusedconv.kernels.cuda.convolution import InPlaceRow, supports_transposed
from fusedconv.kernels.cuda.program import FAMILIES, NotBuiltForward
from fusedconv.kernels.cuda.taps import taps_config
from fusedconv.plan import Kernel
from fusedconv.problem import ForwardProblem
from fusedconv.support import Support

#: Tiles of a launch, a few less than 2**31.
MOST_TILES = (1 << 31) - (1 << 17)
#: Cycles of a launch beside its tiles', of a byte of the filter that a block copies first, and of
#: waiting for the pass that packs it.
LAUNCH_CYCLES = 3000.0
KEPT_BYTE_CYCLES = 0.04
PACK_CYCLES = 5700.0
#: What a launch takes whose bytes bound it, over a copy of as many.
BYTES_BOUND = 1.15


class LinesSm90(InPlaceRow):
    """A row of ``_C.sm90.lines.rows()``."""

    provider = "lines_sm90"

    def config(self, problem: ForwardProblem, device: Device) -> Any:
        aligned = readable_aligned(problem)
        return taps_config(self.room, self.index, problem, problem.output_layout, aligned, device)

    def supports(self, problem: ForwardProblem, device: Device) -> Support:
        common = supports_transposed(problem, device, self.precision, self.ungrouped, 90)
        return Support.of(self.config(problem, device).support) if common else common

    def most_samples(self, problem: ForwardProblem, config: Any) -> int:
        return int(MOST_TILES // config.tiles)

    def cost(self, problem: ForwardProblem, device: Device) -> float:
        config = self.config(problem, device)
        blocks = max(1, device.multiprocessors // config.groups)
        waves = math.ceil(problem.batch * config.tiles / blocks)
        waves *= math.ceil(config.groups / max(1, device.multiprocessors))
        cycles = LAUNCH_CYCLES + PACK_CYCLES + waves * config.tile_cycles
        cycles += KEPT_BYTE_CYCLES * config.kept_bytes
        chunks = -(-problem.batch // self.chunk(problem, config))
        computed = cycles / device.clock_hertz * 1e3
        size = problem.dtype.itemsize
        moved = (problem.input_elements + problem.output_elements) * size
        total = max(computed, BYTES_BOUND * device.copy_milliseconds(moved))
        if problem.norm_groups:  # their moments are a pass of their own
            total += device.copy_milliseconds(problem.output_elements * size)
            total += chunks * device.launch_milliseconds
        return float(total + self.milliseconds_beside(problem, device, chunks))


def kernels() -> list[Kernel]:
    if "sm90" not in FAMILIES:
        return [NotBuiltForward("sm90_lines", "lines_sm90")]
    room = _C.sm90.lines
    return [LinesSm90(room, index, row) for index, row in enumerate(room.rows())]
