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
from fusedconv.kernels.cuda.program import FAMILIES, NotBuiltForward
from fusedconv.kernels.cuda.taps import TransposedRow
from fusedconv.plan import Kernel
from fusedconv.problem import ForwardProblem

#: Tiles of a launch, a few less than 2**31.
MOST_TILES = (1 << 31) - (1 << 17)
#: Cycles of a launch beside its tiles', of a byte of the filter that a block copies first, and of
#: waiting for the pass that packs it.
LAUNCH_CYCLES = 3000.0
KEPT_BYTE_CYCLES = 0.04
PACK_CYCLES = 5700.0
#: What a launch takes whose bytes bound it, over a copy of as many.
BYTES_BOUND = 1.15


class LinesSm90(TransposedRow):
    """A row of ``_C.sm90.lines.rows()``."""

    provider = "lines_sm90"
    architecture = 90

    def most_samples(self, problem: ForwardProblem, config: Any) -> int:
        return int(MOST_TILES // config.tiles)

    def cost(self, problem: ForwardProblem, device: Device) -> float:
        config = self.config(problem, device)
        blocks = max(1, device.multiprocessors // config.groups)
        waves = math.ceil(problem.batch * config.tiles / blocks)
        waves *= math.ceil(config.groups / max(1, device.multiprocessors))
        cycles = LAUNCH_CYCLES + PACK_CYCLES + waves * config.tile_cycles
        cycles += KEPT_BYTE_CYCLES * config.kept_bytes
        return self.milliseconds_of(problem, device, cycles, BYTES_BOUND)


def kernels() -> list[Kernel]:
    if "sm90" not in FAMILIES:
        return [NotBuiltForward("sm90_lines", "lines_sm90")]
    room = _C.sm90.lines
    return [LinesSm90(room, index, row) for index, row in enumerate(room.rows())]
