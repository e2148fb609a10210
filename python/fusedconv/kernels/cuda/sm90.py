"""Transposed convolution on Hopper's warpgroup tensor cores, built from CuTe (sm_90a).

One kernel reads the caller's tensor of either layout, rounds, convolves, adds the bias, activates
and reduces the moments of GroupNorm; one pass then normalises and writes the output. A row is a way
in which the two multiplying warpgroups of a block share the work.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

from fusedconv import _C
from fusedconv.device import Device
from fusedconv.kernels.compiled import conv_problem
from fusedconv.kernels.cuda.conditions import (
    FAMILIES,
    NotBuiltForward,
    supports_forward,
    supports_precision,
)
from fusedconv.kernels.cuda.convolution import CHUNK_BYTES, ConvolutionRow
from fusedconv.kernels.cuda.program import ForwardProgram, ProgramPlan, equal_chunk
from fusedconv.lowering import Phase, lower
from fusedconv.plan import Kernel
from fusedconv.problem import ForwardProblem
from fusedconv.support import Support

#: Rows of a filter (its extents but the innermost, multiplied) up to which strict fp32 is as exact
#: as eager: each row of each k-block is a sum of its own, which fp32 additions join.
MOST_STRICT_ROWS = 16
#: Input channels from which on that holds: fewer fill so little of a k-block that nearly each
#: product is an addition of its own, and the tensor cores' additions drop what fp32 would round.
FEWEST_STRICT_CHANNELS = 4


@dataclass(frozen=True)
class CostConstants:
    """What ``CutlassSm90.estimate`` multiplies, in thousands of cycles of a multiprocessor."""

    #: A k-block of 32 bytes for a tap of 64 channels and 256 positions, on the tensor cores.
    step_tf32: float
    step_fp32: float
    step_16_bits: float
    #: For each k-block of a stage: transposing 128 positions; an input row's TMA copy; transposing
    #: 128 positions that come element by element, each with its memory's latency.
    transpose: float
    row: float
    gather: float
    #: A k-iteration, beside its k-blocks.
    iteration: float

    def step(self, precision: str) -> float:
        return {"tf32": self.step_tf32, "fp32": self.step_fp32}.get(precision, self.step_16_bits)


#: Fitted by ``benchmarks/cost_model.py`` to the times of every row, measured on an H200.
COSTS = CostConstants(
    step_tf32=0.1902,
    step_fp32=0.4438,
    step_16_bits=0.2135,
    transpose=0.3385,
    row=0.06624,
    gather=1.006,
    iteration=0.2533,
)


@functools.lru_cache(maxsize=4096)
def _config(
    room: Any,
    row: int,
    channels: int,
    output_channels: int,
    lowered: Phase,
    layout: str,
    aligned: bool,
    device: Device,
    **how: Any,
) -> Any:
    return room.Config(
        room.rows()[row],
        problem=conv_problem(lowered, channels, output_channels),
        layout=_C.Layout[layout],
        aligned=aligned,
        device=device.compiled,
        **how,
    )


class Sm90Row(ConvolutionRow):
    """What all rows of the family have in common. ``room``: ``_C.sm90`` or a room in it."""

    provider = "cutlass_sm90"

    def __init__(self, room: Any, index: int, row: Any, **how: Any) -> None:
        """``how``: what else the room's configurations take."""
        super().__init__(room, index, row)
        self.how = how

    def lowered(self, problem: ForwardProblem) -> Phase | Support:
        """The one dense convolution that the row computes."""
        assert problem.conv is not None
        return lower(problem.conv, problem.spatial).single()

    def config(self, problem: ForwardProblem, device: Device) -> Any:
        """The schedule of a problem that the row lowers."""
        lowered = self.lowered(problem)
        assert isinstance(lowered, Phase)
        return self.config_of(problem, lowered, problem.output_channels, device, **self.how)

    def config_of(
        self,
        problem: ForwardProblem,
        lowered: Phase,
        channels: int,
        device: Device,
        *,
        copied: bool = False,
        **how: Any,
    ) -> Any:
        """The schedule of a convolution to so many output channels, of the input or, ``copied``, of
        an aligned copy of it."""
        copied = copied or problem.layout == "strided"  # to contiguous NCHW
        return _config(
            self.room,
            self.index,
            problem.channels,
            channels,
            lowered,
            problem.output_layout,
            copied or problem.aligned,
            device,
            **how,
        )

    def supports(self, problem: ForwardProblem, device: Device) -> Support:
        conv = problem.conv
        if conv is None:
            return Support.no("computes convolutions; the problem has none")
        for support in (
            supports_forward(problem, device, self.ungrouped, architecture=90),
            supports_precision(problem, self.precision),
        ):
            if not support:
                return support
        if conv.groups != 1:
            return Support.no(f"groups is {conv.groups}, only 1 is served")
        rows = math.prod(conv.kernel_size[:-1])
        if problem.precision == "fp32" and rows > MOST_STRICT_ROWS:
            return Support.no(
                f"a filter of {rows} rows; its sums are as exact as eager's up to "
                f"{MOST_STRICT_ROWS} in strict fp32"
            )
        if problem.precision == "fp32" and problem.channels < FEWEST_STRICT_CHANNELS:
            return Support.no(
                f"{problem.channels} input channels; its sums are as exact as eager's from "
                f"{FEWEST_STRICT_CHANNELS} on in strict fp32"
            )
        lowered = self.lowered(problem)
        if isinstance(lowered, Support):
            return lowered
        largest = max(math.prod(problem.spatial), math.prod(problem.output_spatial))
        if largest >= 1 << 30:
            return Support.no(f"a sample has {largest} pixels, positions are counted to 2**30")
        return Support.of(self.config(problem, device).support)


def only_phase(problem: ForwardProblem) -> Phase:
    """The one convolution that a supported problem lowers to."""
    assert problem.conv is not None
    lowered = lower(problem.conv, problem.spatial).single()
    assert isinstance(lowered, Phase)
    return lowered


class CutlassSm90(Sm90Row):
    """A row of ``_C.sm90.rows()``."""

    def cost(self, problem: ForwardProblem, device: Device) -> float:
        return self.estimate(problem, device, COSTS)

    def estimate(self, problem: ForwardProblem, device: Device, costs: CostConstants) -> float:
        """Milliseconds of a supported problem, were the constants these."""
        config = self.config(problem, device)
        # Warpgroups that take tiles in turns have the tensor cores for themselves meanwhile.
        shares = 1 if self.row.sharing == _C.sm90.Sharing.ping_pong else 2
        multiply = config.k_iterations * config.taps_per_stage * costs.step(self.precision) * shares
        rounds = math.ceil(config.staged_positions / 128)
        if config.tma:
            transposing = rounds * costs.transpose + config.input_rows * costs.row
        else:
            transposing = rounds * costs.gather
        staging = config.k_iterations * (config.k_blocks_per_stage * transposing + costs.iteration)
        waves = math.ceil(problem.batch * config.tiles / max(1, device.multiprocessors))
        # Epilogues are part of what the constants stand for: a term of their own was fitted to 0.
        milliseconds = waves * max(multiply, staging) * 1e6 / device.clock_hertz
        size = problem.dtype.itemsize
        output = problem.output_elements * size
        # Not what is saved beside the result: estimates of the rows that would be chosen instead,
        # of 128 columns in sm90_boxes, are too low by more.
        moved = output + problem.output_elements * problem.output_dtype.itemsize
        if problem.layout == "strided":
            moved += 2 * problem.input_elements * size
        conv = max(milliseconds, device.copy_milliseconds(problem.input_elements * size + output))
        launches = 4 * -(-problem.batch // self._chunk(problem, config))
        return conv + device.copy_milliseconds(moved) + device.launch_milliseconds * launches

    def _chunk(self, problem: ForwardProblem, config: Any) -> int:
        """Samples per pass over the steps: what fits the scratch limit, one at least."""
        scratch = config.output_bytes_per_sample + config.partial_bytes_per_sample
        return equal_chunk(problem.batch, CHUNK_BYTES // max(1, scratch))

    def compile(self, problem: ForwardProblem, device: Device) -> ProgramPlan:
        config = self.config(problem, device)
        program = ForwardProgram(problem, device, self._chunk(problem, config))
        accumulators = program.scratch(config.output_bytes_per_sample)
        partials = self.convolve(program, config, accumulators)
        norm, statistics = self.statistics(program, config, partials)
        program.compiled.per_chunk(
            _C.sm90.Finalize(
                config,
                problem=norm,
                input=accumulators,
                statistics=statistics,
                weight=program.norm_weight,
                bias=program.norm_bias,
                output=program.output,
                conv_output=program.conv_output,
            )
        )
        return program.plan(self.name)


def kernels() -> list[Kernel]:
    if "sm90" not in FAMILIES:
        return [NotBuiltForward("sm90_conv", "cutlass_sm90")]
    return [CutlassSm90(_C.sm90, index, row) for index, row in enumerate(_C.sm90.rows())]
