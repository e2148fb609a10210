"""Transposed convolution of any stride, filter, group and layout by lists of taps, in one kernel.

The sub-pixel phases of the output share a grid of positions. A block multiplies some output
channels of some phases by a rectangle of positions: each phase reads its own taps of one box of the
input, the epilogue adds the bias, activates, stores the phases side by side in the caller's layout
and leaves the moments of GroupNorm. What normalises goes over the output in place. A row is a way
in which products are formed, and how many channels of phases a block has for how many positions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fusedconv import _C
from fusedconv.device import Device
from fusedconv.kernels.compiled import readable_aligned, transposed_problem
from fusedconv.kernels.cuda.conditions import FAMILIES, NotBuiltForward
from fusedconv.kernels.cuda.convolution import InPlaceRow, supports_partials, supports_transposed
from fusedconv.kernels.cuda.program import launched_chunks
from fusedconv.lowering import lower
from fusedconv.plan import Kernel
from fusedconv.problem import ConvTransposeGeometry, ForwardProblem
from fusedconv.support import Support

#: Blocks of a launch and partial moments of a group are counted to, a few less than 2**31.
MOST_BLOCKS = (1 << 31) - (1 << 10)
#: Of a block by ``mma.sync``: its rows times its positions, and bytes of channels in a stage.
BLOCK_AREA = 1 << 14
CHUNK_BYTES = 64


@dataclass(frozen=True)
class CostConstants:
    """What ``TapsSm80.estimate`` multiplies, in cycles of a multiprocessor but for ``pack``."""

    #: A block's products, over what the tensor cores take for them at full rate, by precision.
    products: Mapping[str, float]
    #: A byte of the filter that a block reads.
    filter: float
    #: A position of a box whose chunk of channels is staged, by how they are read.
    staged: Mapping[str, float]
    #: A block beside these: its list of taps and its epilogue.
    block: float
    #: What blocks take, in times of the above, where one of two on a multiprocessor is missing as
    #: there are too few, and where shared memory has no room for a second.
    alone: float
    crowded: float
    #: Seconds of an element of the packed filter.
    pack: float


#: Of the rows by ``mma.sync``, fitted to the times of 41 layers, mostly those of real models, in
#: three precisions on an H200: the cheapest row by these takes 1.8 % longer than the best.
COSTS = CostConstants(
    products={"tf32": 2.16, "fp32": 2.15, "fp16": 1.46, "bf16": 1.46},
    filter=0.0475,
    staged={"nchw": 6.22, "nhwc": 6.22, "element by element": 16.5},
    block=13300.0,
    alone=1.18,
    crowded=1.23,
    pack=2.86e-11,
)


@functools.lru_cache(maxsize=4096)
def _config(
    room: Any,
    row: int,
    conv: ConvTransposeGeometry,
    spatial: tuple[int, ...],
    layout: str,
    aligned: bool,
    device: Device,
) -> Any:
    return room.Config(
        room.rows()[row],
        problem=transposed_problem(conv, spatial, layout, aligned),
        device=device.compiled,
    )


def taps_config(
    room: Any,
    row: int,
    problem: ForwardProblem,
    layout: str,
    aligned: bool,
    device: Device,
) -> Any:
    """How a row serves a problem with a convolution, whose tensors it meets in ``layout`` and at
    addresses that are multiples of 16 bytes if ``aligned``."""
    assert problem.conv is not None
    return _config(room, row, problem.conv, problem.spatial, layout, aligned, device)


class TransposedRow(InPlaceRow):
    """A row whose config is of the problem and of how its input lies."""

    #: The only compute capability, times ten, that it runs on; None for 8.0 and later.
    architecture: int | None = None

    def config(self, problem: ForwardProblem, device: Device) -> Any:
        aligned = readable_aligned(problem)
        return taps_config(self.room, self.index, problem, problem.output_layout, aligned, device)

    def supports(self, problem: ForwardProblem, device: Device) -> Support:
        common = supports_transposed(
            problem, device, self.precision, self.ungrouped, self.architecture
        )
        return Support.of(self.config(problem, device).support) if common else common

    def milliseconds_of(
        self, problem: ForwardProblem, device: Device, cycles: float, bytes_bound: float
    ) -> float:
        """What a problem takes whose convolution is so many cycles or, where its bytes bound it,
        ``bytes_bound`` times a copy of as many, and whose moments are a pass of their own."""
        size = problem.dtype.itemsize
        moved = (problem.input_elements + problem.output_elements) * size
        computed = cycles / device.clock_hertz * 1e3
        total = max(computed, bytes_bound * device.copy_milliseconds(moved))
        chunks = -(-problem.batch // self.chunk(problem, self.config(problem, device)))
        if problem.norm_groups:
            total += device.copy_milliseconds(problem.output_elements * size)
            total += chunks * device.launch_milliseconds
        return total + self.milliseconds_beside(problem, device, chunks)


class TapsRow(TransposedRow):
    """What rows of ``_C.taps``, ``_C.sm90.taps`` and ``_C.sm90.boxes`` serve: the same problems."""

    #: Of a launch.
    most_blocks = MOST_BLOCKS

    def sample_blocks(self, problem: ForwardProblem, config: Any) -> int:
        """Blocks that a sample of a served problem takes."""
        assert problem.conv is not None
        return int(math.prod(config.tiles) * config.blocks_m * problem.conv.groups)

    def supports(self, problem: ForwardProblem, device: Device) -> Support:
        support = super().supports(problem, device)
        if not support:
            return support
        config = self.config(problem, device)
        blocks = self.sample_blocks(problem, config)
        if blocks > self.most_blocks:
            return Support.no(
                f"a sample makes {blocks} blocks, at most {self.most_blocks} are served"
            )
        if not self.takes_moments(problem, config):
            return Support.yes()
        return supports_partials(problem, config)

    def most_samples(self, problem: ForwardProblem, config: Any) -> int:
        return self.most_blocks // self.sample_blocks(problem, config)


class TapsSm80(TapsRow):
    """A row of ``_C.taps.rows()``."""

    provider = "taps_sm80"

    def cost(self, problem: ForwardProblem, device: Device) -> float:
        return self.estimate(problem, device, COSTS)

    def estimate(self, problem: ForwardProblem, device: Device, costs: CostConstants) -> float:
        """Milliseconds of a supported problem, were the constants these."""
        config = self.config(problem, device)
        multiprocessors = max(1, device.multiprocessors)
        steps = config.chunks * _block_steps(problem, config)
        rate = device.tensor_flops(self.precision)
        flops = 2.0 * BLOCK_AREA * CHUNK_BYTES / problem.dtype.itemsize
        step = costs.products[self.precision] * flops * multiprocessors / rate * device.clock_hertz
        loop = (
            steps * (step + _step_bytes(problem, config) * costs.filter)
            + config.chunks * config.stages * math.prod(config.box) * costs.staged[config.reads]
        )
        # Strict fp32 takes the registers of a second block.
        if self.precision != "fp32" and 2 * config.shared_bytes > device.shared_bytes:
            loop *= costs.crowded
        chunk = self.chunk(problem, config)
        cycles = 0.0
        for samples, launches in launched_chunks(problem.batch, chunk):
            waves = math.ceil(samples * self.sample_blocks(problem, config) / multiprocessors)
            cycles += launches * (max(costs.alone, waves) * loop + waves * costs.block)
        moved = (problem.input_elements + problem.output_elements) * problem.dtype.itemsize
        milliseconds = max(cycles * 1e3 / device.clock_hertz, device.copy_milliseconds(moved))
        packed = config.filter_bytes / problem.dtype.itemsize * costs.pack * 1e3
        chunks = -(-problem.batch // chunk)
        return milliseconds + packed + self.milliseconds_beside(problem, device, chunks)


def _step_bytes(problem: ForwardProblem, config: Any) -> float:
    """Of the packed filter, for a tap of a block and a chunk of its channels."""
    assert problem.conv is not None
    blocks = config.blocks_m * problem.conv.groups
    return float(config.filter_bytes / (blocks * config.chunks * config.stages * config.steps))


def _block_steps(problem: ForwardProblem, config: Any) -> float:
    """Taps of a block on average: those that any of its phases has."""
    assert problem.conv is not None
    phases = [[phase.taps for phase in axis] for axis in lower(problem.conv, problem.spatial).axes]
    # A block's phases are neighbours, first along width, then along height and depth.
    several = math.ceil(math.prod(map(len, phases)) / config.blocks_m)
    steps = 1.0
    for axis, joined in zip(reversed(phases), (config.width_phases, 1, 1), strict=True):
        span = max(joined, min(several, len(axis)))
        most = [max(axis[i : i + span]) for i in range(0, len(axis), span)]
        steps *= sum(most) / len(most)
        several = math.ceil(several / len(axis))
    return steps


def kernels() -> list[Kernel]:
    if "taps" not in FAMILIES:
        return [NotBuiltForward("taps_conv", "taps_sm80")]
    return [TapsSm80(_C.taps, index, row) for index, row in enumerate(_C.taps.rows())]
