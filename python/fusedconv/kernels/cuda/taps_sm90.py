"""Tap lists by warpgroup products, on compute capability 9.0.

Both operands lie in shared memory with channels innermost, so that a tap of the filter is a start
address among staged positions. Loading warps stage the input in that order, whatever its layout and
alignment; two consumer warpgroups multiply, and finish their tiles as the other rows of tap lists
do. A row is a way in which products are formed, and how many rows (output channels of sub-pixel
phases) a consumer has for how many positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fusedconv import _C
from fusedconv.device import Device
from fusedconv.kernels.cuda.conditions import FAMILIES, NotBuiltForward
from fusedconv.kernels.cuda.program import launched_chunks
from fusedconv.kernels.cuda.taps import TapsRow
from fusedconv.plan import Kernel
from fusedconv.problem import ForwardProblem

#: Of an instruction, in cycles at full rate, for each of its columns and steps of 32 bytes.
COLUMN_CYCLES = 0.5
STEP_PIECES = 2


@dataclass(frozen=True)
class CostConstants:
    """What ``TapsSm90.estimate`` multiplies, in cycles of a multiprocessor but for ``pack``."""

    #: A block's products, over their cycles at full rate, by precision.
    products: Mapping[str, float]
    #: 16 bytes of channels that are staged, by how they are read and bytes of an element.
    staged: Mapping[tuple[str, int], float]
    #: A chunk of channels beside these.
    chunk: float
    #: A row group's column in the epilogue, by layout.
    column: Mapping[str, float]
    #: The moments of one, by a row's row groups and columns.
    moments: Mapping[tuple[int, int], float]
    #: A block beside these.
    block: float
    #: Adding up what blocks have that share a tile's channels.
    split: float
    #: Seconds of an element of the packed filter.
    pack: float
    #: All of these but ``pack``, over their sum, by a row's columns and bytes of an element; others
    #: take as long as their sum.
    whole: Mapping[tuple[int, int], float]


#: Fitted to the times of 22 layers of real models in both layouts, tf32 and bf16, on an H200: the
#: cheapest row by these takes 1.2 % longer than the best. Moments are of the layers with GroupNorm
#: or InstanceNorm among them, and of three on an H100. Strict fp32 was measured apart, and what
#: ``whole`` adds beside the other families, with 97 forward passes of such layers on an H200 and an
#: H100: the cheapest row of all families takes 1.8 % longer than the best.
COSTS = CostConstants(
    products={"tf32": 1.24, "fp32": 5.5, "fp16": 1.36, "bf16": 1.36},
    staged={
        ("nchw", 2): 0.678,
        ("nhwc", 2): 0.3,
        ("nhwc", 4): 0.3,
        ("element by element", 2): 1.8,
        ("element by element", 4): 2.25,
    },
    chunk=865.0,
    column={"nchw": 31.1, "nhwc": 25.2},
    moments={(1, 256): 25.0, (2, 128): 78.0, (1, 64): 62.0, (1, 128): 42.0},
    block=2320.0,
    split=6450.0,
    pack=1e-11,
    whole={(256, 4): 1.3, (128, 4): 1.15, (256, 2): 1.2, (128, 2): 1.2, (64, 2): 1.2},
)


class TapsSm90(TapsRow):
    """A row of ``_C.sm90.taps.rows()``."""

    provider = "taps_sm90"
    architecture = 90
    most_blocks = (1 << 30) - 1

    def sample_blocks(self, problem: ForwardProblem, config: Any) -> int:
        return super().sample_blocks(problem, config) * int(config.splits)

    def cost(self, problem: ForwardProblem, device: Device) -> float:
        return self.estimate(problem, device, COSTS)

    def estimate(self, problem: ForwardProblem, device: Device, costs: CostConstants) -> float:
        """Milliseconds of a supported problem, were the constants these."""
        assert problem.conv is not None
        config = self.config(problem, device)
        multiprocessors = max(1, device.multiprocessors)
        size = problem.dtype.itemsize
        pieces = math.ceil(problem.conv.in_channels // problem.conv.groups * size / 16)
        steps = config.taps * math.ceil(pieces / STEP_PIECES)
        products = costs.products[self.precision] * steps * self.row.columns * COLUMN_CYCLES
        staged = costs.staged[config.reads, size] * config.positions * config.pieces
        main_loop = max(products / config.chunks, staged) + costs.chunk  # of a chunk of channels
        columns = self.row.row_groups * self.row.columns * 2
        moments = problem.norm_groups > 0
        column = costs.column[problem.output_layout]
        if moments:
            column += costs.moments[self.row.row_groups, self.row.columns]
        beside = columns * column + costs.block
        chunk = self.chunk(problem, config)
        splits = config.splits
        block = math.ceil(config.chunks / splits) * main_loop + beside
        if splits > 1:
            block += costs.split
        cycles = 0.0
        for samples, launches in launched_chunks(problem.batch, chunk):
            blocks = (
                config.launch_tiles(samples, moments=moments)
                * config.blocks_m
                * problem.conv.groups
            )
            cycles += launches * math.ceil(blocks * splits / multiprocessors) * block
        if self.precision != "fp32":
            cycles *= costs.whole.get((self.row.columns, size), 1.0)
        moved = (problem.input_elements + problem.output_elements) * size
        milliseconds = max(cycles * 1e3 / device.clock_hertz, device.copy_milliseconds(moved))
        packed = config.filter_bytes / size * costs.pack * 1e3
        chunks = -(-problem.batch // chunk)
        return milliseconds + packed + self.milliseconds_beside(problem, device, chunks)


def kernels() -> list[Kernel]:
    if "sm90" not in FAMILIES:
        return [NotBuiltForward("sm90_taps", "taps_sm90")]
    room = _C.sm90.taps
    return [TapsSm90(room, index, row) for index, row in enumerate(room.rows())]
