"""Transposed convolution of few output channels, channels last, on compute capability 9.0.

All products of an input position, of every output channel at every tap, are a row of one matrix
product, whose columns are the weight as it lies. A block multiplies a box of positions, leaves the
rows in shared memory and adds up there what each output of its tile is made of (col2im): the input
is read once, whatever the taps, and no product is of a channel that is padding. A row is a way in
which products are formed and the most columns of a block. In 16 bits a weight is read as it lies
where the columns of each input channel begin at whole 16 bytes; else it is packed first.
"""

from __future__ import annotations

import math
from typing import Any

from fusedconv import _C
from fusedconv.device import Device
from fusedconv.kernels.cuda.conditions import FAMILIES, NotBuiltForward
from fusedconv.kernels.cuda.convolution import filter_source
from fusedconv.kernels.cuda.taps import TransposedRow
from fusedconv.plan import Kernel
from fusedconv.problem import ForwardProblem

#: Of a launch.
MOST_BLOCKS = (1 << 31) - 1
#: Cycles of a launch beside its blocks', whose estimate is their config's, and of one that waits
#: for a pass in front.
LAUNCH_CYCLES = 3000.0
BEHIND_PASS_CYCLES = 5700.0
#: What a launch takes whose bytes bound it, over a copy of as many: blocks do not overlap.
BYTES_BOUND = 1.4


class Col2imSm90(TransposedRow):
    """A row of ``_C.sm90.col2im.rows()``."""

    provider = "col2im_sm90"
    architecture = 90

    def reads_weight(self, problem: ForwardProblem, config: Any) -> bool:
        assert problem.conv is not None
        return bool(config.reads_weight(filter_source(problem.conv)))

    def most_samples(self, problem: ForwardProblem, config: Any) -> int:
        return int(MOST_BLOCKS // math.prod(config.tiles))

    def cost(self, problem: ForwardProblem, device: Device) -> float:
        config = self.config(problem, device)
        blocks = problem.batch * math.prod(config.tiles)
        waves = math.ceil(blocks / max(1, device.multiprocessors))
        cycles = LAUNCH_CYCLES + waves * config.block_cycles
        if not self.reads_weight(problem, config):
            cycles += BEHIND_PASS_CYCLES
        return self.milliseconds_of(problem, device, cycles, BYTES_BOUND)


def kernels() -> list[Kernel]:
    if "sm90" not in FAMILIES:
        return [NotBuiltForward("sm90_col2im", "col2im_sm90")]
    room = _C.sm90.col2im
    return [Col2imSm90(room, index, row) for index, row in enumerate(room.rows())]
