"""What rows share that upsample lines, channels first, by filters of up to two strides."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from fusedconv.device import Device
from fusedconv.kernels.cuda.taps import TransposedRow
from fusedconv.problem import ForwardProblem

#: Tiles of a launch, a few less than 2**31.
MOST_TILES = (1 << 31) - (1 << 17)
#: Cycles of a launch beside its tiles'.
LAUNCH_CYCLES = 3000.0


class LineRow(TransposedRow):
    """A row whose blocks go over a line's tiles with one group each of the filter's columns."""

    architecture = 90
    #: Cycles of waiting for the pass that packs the filter.
    pack_cycles: ClassVar[float]
    #: What a launch takes whose bytes bound it, over a copy of as many.
    bytes_bound: ClassVar[float]

    def kept_cycles(self, config: Any) -> float:
        """Of copying what a block keeps of the filter in shared memory."""
        return 0.0

    def most_samples(self, problem: ForwardProblem, config: Any) -> int:
        return int(MOST_TILES // config.tiles)

    def cost(self, problem: ForwardProblem, device: Device) -> float:
        config = self.config(problem, device)
        blocks = max(1, device.multiprocessors // config.groups)
        waves = math.ceil(problem.batch * config.tiles / blocks)
        waves *= math.ceil(config.groups / max(1, device.multiprocessors))
        cycles = LAUNCH_CYCLES + self.pack_cycles + waves * config.tile_cycles
        cycles += self.kept_cycles(config)
        return self.milliseconds_of(problem, device, cycles, self.bytes_bound)
