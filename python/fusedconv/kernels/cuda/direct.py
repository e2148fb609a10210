"""Transposed convolution of few channels a group, depthwise ones above all, by multiply-adds in
float32.

Each output gathers the taps of its sub-pixel phase; with so few products an output memory is the
limit. NCHW: a block stages the input under a tile and computes runs of neighbouring outputs, whole
16 bytes; channels last: threads lie along channels. The weight is read as it lies, and what
normalises goes over the output in place. A row is a type; the one of float32 serves TF32 as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fusedconv import _C
from fusedconv.device import Device
from fusedconv.kernels.cuda.conditions import FAMILIES, NotBuiltForward
from fusedconv.kernels.cuda.convolution import (
    InPlaceRow,
    reading_config,
    supports_multiply_adds,
    supports_partials,
)
from fusedconv.kernels.cuda.program import ForwardProgram
from fusedconv.plan import Kernel
from fusedconv.problem import ForwardProblem
from fusedconv.support import Support

#: Tiles of a launch are counted to, a few less than 2**31.
MOST_TILES = (1 << 31) - (1 << 10)


@dataclass(frozen=True)
class CostConstants:
    """What ``Direct.estimate`` multiplies, in cycles of a multiprocessor for 128 threads' work."""

    #: A product: of runs whose taps the compiler knows, of vectors of channels, one by one.
    run_product: float
    vector_product: float
    general_product: float
    #: An output of planes that are doubled from registers, in all.
    doubled: float
    #: An output beside its products, and an input that is staged.
    output: float
    staged: float
    #: A launch from its first block to its last, however small.
    shortest: float
    #: The share of memory's copy rate that is reached.
    copy_share: float


#: From the times of thirteen layers in either layout on an H200.
COSTS = CostConstants(
    run_product=1.25,
    vector_product=9.5,
    general_product=30.0,
    doubled=8.0,
    output=32.0,
    staged=30.0,
    shortest=9000.0,
    copy_share=0.7,
)


class Direct(InPlaceRow):
    """A row of ``_C.direct.rows()``."""

    provider = "direct"

    def config(self, problem: ForwardProblem, device: Device) -> Any:
        return reading_config(self.room, self.index, problem, device)

    # ---- what it serves ----

    def supports(self, problem: ForwardProblem, device: Device) -> Support:
        support = supports_multiply_adds(self, problem, device)
        if not support:
            return support
        config = self.config(problem, device)
        tiles = _sample_tiles(problem, config)
        if tiles > MOST_TILES:
            return Support.no(f"a sample makes {tiles} tiles, at most {MOST_TILES} are served")
        return supports_partials(problem, config)

    def most_samples(self, problem: ForwardProblem, config: Any) -> int:
        return MOST_TILES // _sample_tiles(problem, config)

    # ---- what it costs ----

    def cost(self, problem: ForwardProblem, device: Device) -> float:
        return self.estimate(problem, device, COSTS)

    def estimate(self, problem: ForwardProblem, device: Device, costs: CostConstants) -> float:
        """Milliseconds of a supported problem, were the constants these."""
        conv = problem.conv
        assert conv is not None
        config = self.config(problem, device)
        if problem.output_layout == "nhwc":
            product = costs.vector_product if config.vector > 1 else costs.general_product
        else:
            product = costs.run_product if config.compiled_taps else costs.general_product
        work = problem.conv_flops / 2 * product + problem.output_elements * costs.output
        staged = math.prod(config.box) * math.prod(config.tiles) * problem.batch * problem.channels
        work += staged * costs.staged
        if config.doubles and not (problem.norm_groups and self.takes_moments(problem, config)):
            work = problem.output_elements * costs.doubled
        cycles = max(costs.shortest, work / 128 / max(1, device.multiprocessors))
        computed = cycles / device.clock_hertz * 1e3
        size = problem.dtype.itemsize
        read = device.copy_milliseconds(problem.input_elements * size) / costs.copy_share
        written = device.copy_milliseconds(problem.output_elements * size) / costs.copy_share
        chunks = -(-problem.batch // self.chunk(problem, config))
        total = max(computed, read + written)
        return total + self.milliseconds_beside(problem, device, chunks)

    # ---- how it runs ----

    def pack_filter(self, program: ForwardProgram, config: Any) -> Any:
        """The weight, read as it lies."""
        return program.weight


def _sample_tiles(problem: ForwardProblem, config: Any) -> int:
    assert problem.conv is not None
    groups = problem.conv.groups if problem.output_layout == "nchw" else 1
    return int(math.prod(config.tiles) * config.channel_blocks * groups)


def kernels() -> list[Kernel]:
    if "direct" not in FAMILIES:
        return [NotBuiltForward("direct_conv", "direct")]
    return [Direct(_C.direct, index, row) for index, row in enumerate(_C.direct.rows())]
