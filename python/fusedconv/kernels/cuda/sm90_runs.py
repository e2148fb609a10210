"""Transposed convolution on Hopper with positions from registers, built from CuTe (sm_90a).

NCHW in, NCHW out: lines land in shared memory as they lie, a filter tap is a shift among registers,
and the epilogue adds the bias, activates, stores in the tensor's own order and reduces the moments
of GroupNorm, unless one pass behind does all of that but the bias in less time. What normalises
goes over the output in place, unless a saved convolution output or another dtype asks for a second
tensor. A row is a filter's reach to either side of a column.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fusedconv import _C
from fusedconv.device import Device
from fusedconv.kernels.compiled import by_axis
from fusedconv.kernels.cuda.conditions import FAMILIES, NotBuiltForward
from fusedconv.kernels.cuda.convolution import InPlaceRow, goes_through_scratch
from fusedconv.kernels.cuda.group_norm import compiled_problem, normalise_in_one_pass
from fusedconv.kernels.cuda.program import ForwardProgram, ProgramPlan
from fusedconv.kernels.cuda.sm90 import Sm90Row
from fusedconv.layout import line_pitch
from fusedconv.lowering import AxisPhase, Phase, lower
from fusedconv.norms import KINDS
from fusedconv.plan import Kernel
from fusedconv.problem import ActNormAct, ForwardProblem, act_norm_act
from fusedconv.support import Support

#: Tiles of a launch, which are counted in 32 bits.
MOST_TILES = 1 << 30

#: Cycles of the tensor cores for a tile of 128 positions and 64 channels: a k-block of one tap.
_TAP_CYCLES = 64.0
#: What a main loop in strict fp32 takes for the same: three products, and the additions that join
#: filter rows' sums. Measured on an H200 as a whole, so nothing multiplies it.
_STRICT_TAP_CYCLES = 270.0
#: Output channels that leave half of a block's 64 empty, for which an epilogue takes as long as for
#: the others and a pass behind none; and products of an output from which on that was measured:
#: with fewer, memory takes as long.
_HALF_BLOCK = 32
_MEASURED_PRODUCTS = 32 * 9
#: Cycles of a tile's epilogue that a pass behind saves there, and of an activation and moments
#: where quads are staggered; of those elsewhere in TF32, where the output is saved as it is before
#: the activation, which a pass then has to compute anyway. Launches' time that it takes more. From
#: the times of seven problems on an H200.
_STREAMED_TILE = 1000.0
_STREAMED_STAGGERED_TILE = 500.0
_STREAMED_SAVING_TILE = 200.0
_STREAMED_LAUNCHES = 3.0


@dataclass(frozen=True)
class CostConstants:
    """What ``RunsSm90.estimate`` multiplies, in cycles of a multiprocessor. Terms for the epilogue
    and for a launch were fitted to 0."""

    #: The main loop over what the tensor cores alone would take; not in strict fp32.
    main_loop: float
    #: A byte that lands in shared memory, where the others wait for nothing.
    staged_byte: float
    #: The same where all multiprocessors' bytes come from the L2 cache at once.
    crowded_byte: float


#: Fitted by ``benchmarks/cost_model.py`` to the times of every row, measured on an H200. The last
#: is from system 2, which keeps all multiprocessors busy.
COSTS = CostConstants(main_loop=0.7946, staged_byte=0.04124, crowded_byte=0.07)


class RunsSm90(InPlaceRow, Sm90Row):
    """A row of ``_C.sm90.runs.rows()``."""

    #: Whether it packs a strided weight by phases, for convolutions of their planes.
    packs_phases = True

    def cost(self, problem: ForwardProblem, device: Device) -> float:
        return self.estimate(problem, device, COSTS)

    def estimate(self, problem: ForwardProblem, device: Device, costs: CostConstants) -> float:
        """Milliseconds of a supported problem, were the constants these."""
        assert problem.conv is not None
        config = self.config(problem, device)
        chunk = self.chunk(problem, config)
        taps = config.k_iterations * math.prod(problem.conv.kernel_size[-2:])
        strict = self.precision == "fp32"
        tap = _STRICT_TAP_CYCLES if strict else _TAP_CYCLES * costs.main_loop
        sizes = [(t.strips * t.tiles, t.bytes) for t in config.tilings]
        staged = sum(n * size for n, size in sizes) / sum(n for n, _ in sizes)
        if config.streams_filter:
            staged += config.filter_stage_bytes / config.consumers
        staged *= config.k_iterations
        tile = max(taps * tap, staged * costs.staged_byte)
        sets = max(1, device.multiprocessors // config.blocks_n)
        # Tiles of a multiprocessor; where consumers share a ring, by as many as they are.
        together = config.consumers if config.streams_filter else 1
        tiles = math.ceil(math.ceil(chunk * config.tiles / together) / sets) * together
        rounds = math.ceil(config.blocks_n / max(1, device.multiprocessors))
        share = chunk * config.tiles * config.blocks_n / max(1, device.multiprocessors)
        cycles = max(tiles * tile * rounds, share * staged * costs.crowded_byte)
        chunks = -(-problem.batch // chunk)
        size = problem.dtype.itemsize
        output = problem.output_elements * size
        read = problem.input_elements * size * config.blocks_n
        conv = max(
            chunks * cycles * 1e3 / device.clock_hertz, device.copy_milliseconds(read + output)
        )
        total = conv + self.milliseconds_beside(problem, device, chunks)
        if not self.streams_norm(problem, device):
            return total
        # An estimate may be less than what its bytes take.
        least = min(total, device.copy_milliseconds(read + 3 * output))
        return max(total - self._streaming_gain(problem, device), least)

    def most_samples(self, problem: ForwardProblem, config: Any) -> int:
        return (MOST_TILES - 1) // int(config.tiles)

    def streams_norm(self, problem: ForwardProblem, device: Device) -> bool:
        """Whether one pass behind the convolution activates, takes the moments and normalises, in
        place of the convolution's epilogue and a pass that normalises. A sample's bits then depend
        on its batch, in whose order the pass merges moments."""
        return self._streaming_gain(problem, device) > 0.0 and self.can_stream_norm(problem, device)

    def _streaming_gain(self, problem: ForwardProblem, device: Device) -> float:
        """Milliseconds that it saves."""
        config = self.config(problem, device)
        cycles = self._streamed_cycles(problem, config, device)
        if cycles == 0.0:
            return 0.0
        tiles = problem.batch * config.tiles * config.blocks_n
        seconds = tiles / max(1, device.multiprocessors) * cycles / device.clock_hertz
        return seconds * 1e3 - _STREAMED_LAUNCHES * device.launch_milliseconds

    def _streamed_cycles(self, problem: ForwardProblem, config: Any, device: Device) -> float:
        """What such a pass saves of a tile."""
        assert problem.conv is not None
        form = act_norm_act(problem.epilogue, frozenset(KINDS))
        assert isinstance(form, ActNormAct)
        saves = problem.saves_conv_output
        products = problem.channels * math.prod(problem.conv.kernel_size)
        is_long = products >= _MEASURED_PRODUCTS
        is_half = problem.output_channels <= _HALF_BLOCK
        if is_half and is_long:
            return _STREAMED_TILE
        if form.before == "identity":
            return 0.0
        # In 16 bits, where nothing is saved, it takes as long as what it saves, unless it computes
        # the activation in half precision.
        gains = saves or problem.dtype == torch.float32 or _is_in_halves(problem, device)
        if config.is_staggered and is_long and not is_half and gains:
            return _STREAMED_STAGGERED_TILE
        return _STREAMED_SAVING_TILE if saves and self.precision == "tf32" else 0.0

    def can_stream_norm(self, problem: ForwardProblem, device: Device) -> bool:
        """Whether such a pass could, at whatever cost."""
        if not problem.norm_groups or goes_through_scratch(problem):
            return False
        if problem.batch > self.most_samples(problem, self.config(problem, device)):
            return False
        return bool(_streamed(problem, device)[1].support)

    def compile(self, problem: ForwardProblem, device: Device) -> ProgramPlan:
        if not self.streams_norm(problem, device):
            return super().compile(problem, device)
        program = ForwardProgram(problem, device)
        config = self.config(problem, device)
        output = program.conv_output if problem.saves_conv_output else program.output
        filter = self.pack_filter(program, config)
        self.convolve_plainly(program, config, filter, output, program.absent)
        norm, streamed = _streamed(problem, device)
        normalise_in_one_pass(program, "NormalizeStreamed", streamed, norm, output)
        return program.plan(self.name)

    def finish(self, program: ForwardProgram, config: Any, input: Any, partials: Any) -> None:
        problem = program.problem
        chunk = self.chunk(problem, config)
        if not problem.norm_groups or not self.room.merges_in_passing(
            config, self.behind(program, batch=chunk)
        ):
            super().finish(program, config, input, partials)
            return
        program.compiled.per_chunk(
            self.room.NormalizeMerging(
                config,
                problem=self.behind(program),
                input=input,
                partials=partials,
                mean=program.mean,
                rstd=program.rstd,
                weight=program.norm_weight,
                bias=program.norm_bias,
                output=program.output,
            )
        )


def _streamed(problem: ForwardProblem, device: Device) -> tuple[Any, Any]:
    """What is behind the convolution as one pass over its output, and that pass's config."""
    norm = compiled_problem(problem)
    return norm, _C.group_norm.streamed_config(
        norm, aligned=True, device=device.compiled, saves=problem.save
    )


def _is_in_halves(problem: ForwardProblem, device: Device) -> bool:
    if not problem.norm_groups:
        return False
    in_halves: bool = _streamed(problem, device)[1].in_halves
    return in_halves


@dataclass(frozen=True)
class InterleavingCosts:
    """What ``InterleavingRunsSm90.cost`` multiplies, in cycles of a multiprocessor but for the last
    two."""

    #: A k-block of a tile, by precision, and not less than each line of its box.
    step: Mapping[str, float]
    line: float
    #: A tile beside these, by bytes of an element.
    tile: Mapping[int, float]
    #: All of these over their sum where more than two phases are side by side.
    wide: float
    #: Seconds of an element of the packed filter.
    pack: float
    #: What padding the input takes, over a copy.
    padding: float


#: From the times of 8 layers of real models in TF32 and bf16 on an H200, one of them of stride 4.
#: Strict fp32 was not timed at other strides, and ``wide`` is not for it.
INTERLEAVING_COSTS = InterleavingCosts(
    step={"tf32": 530.0, "fp32": 1100.0, "fp16": 380.0, "bf16": 380.0},
    line=94.0,
    tile={2: 5000.0, 4: 5800.0},
    wide=1.7,
    pack=8e-12,
    padding=4.0,
)


class InterleavingRunsSm90(RunsSm90):
    """A row for strided problems: a convolution of stride 1 whose output channels are the sub-pixel
    phases of each channel, which the epilogue stores side by side. Where the filter is as large as
    its stride along width, phases share their taps, which are those that any of them has; else a
    block of columns has phases whose taps are the same, but for halves along width.
    """

    def takes_moments(self, problem: ForwardProblem, config: Any) -> bool:
        return self.own_taps

    def can_stream_norm(self, problem: ForwardProblem, device: Device) -> bool:
        return False  # was not measured

    def finish(self, program: ForwardProgram, config: Any, input: Any, partials: Any) -> None:
        InPlaceRow.finish(self, program, config, input, partials)

    def lowered(self, problem: ForwardProblem) -> Phase | Support:
        conv = problem.conv
        assert conv is not None
        if math.prod(conv.stride) == 1:
            return Support.no("its stride is 1, which has no phases to interleave")
        if set(conv.dilation) != {1}:
            return Support.no(f"dilation is {conv.dilation}, only 1 is served")
        outputs = tuple(map(operator.mul, problem.spatial, conv.stride))
        if problem.output_spatial != outputs:
            return Support.no(
                f"its output is {problem.output_spatial}, not {outputs}: as many pixels of each "
                "phase as the input has are served"
            )
        axes = lower(conv, problem.spatial).axes
        before, after = zip(*map(_reach, axes), strict=True)
        taps = [low + 1 + high for low, high in zip(before, after, strict=True)]
        if self.own_taps:
            taps[:2] = [max(1, *(phase.taps for phase in phases)) for phases in axes[:2]]
        elif any(
            phase.taps < most for most, phases in zip(taps, axes, strict=True) for phase in phases
        ):
            # A product with a tap that is not there would make NaN of what is infinite.
            return Support.no(
                f"the filter is {conv.kernel_size}, the stride {conv.stride}: phases do not all "
                "have the same taps"
            )
        depth, height, width = taps
        extents, strides = by_axis(problem.spatial), by_axis(conv.stride)
        return Phase(
            input=extents,
            output=extents,
            taps=(depth, height, width),
            first_tap=(0, 0, 0),  # each phase has its own: the config is told what makes them
            tap_step=(-strides[0], -strides[1], -strides[2]),
            lower_padding=before,
            dilation=(1, 1, 1),
            output_offset=(0, 0, 0),
            output_step=strides,
        )

    @property
    def own_taps(self) -> bool:
        """Whether phases have taps of their own, where the filter reaches beyond a column."""
        return sum(self.row.window) > 0

    def config(self, problem: ForwardProblem, device: Device) -> Any:
        lowered, conv = self.lowered(problem), problem.conv
        assert isinstance(lowered, Phase) and conv is not None
        pads = _pads(problem)
        axes = by_axis(conv.stride), by_axis(conv.kernel_size), by_axis(conv.padding, 0)
        return self.config_of(
            problem,
            lowered,
            problem.output_channels * math.prod(conv.stride),
            device,
            copied=pads,
            padded_lines=pads,
            phases=tuple(zip(*axes, strict=True)),
        )

    def convolve(
        self,
        program: ForwardProgram,
        config: Any,
        output: Any,
        filter: Any | None = None,
        saved: Any | None = None,
    ) -> Any:
        problem = program.problem
        if _pads(problem):
            program.input = program.padded_input(program.input, problem.channels, problem.spatial)
        return super().convolve(program, config, output, filter, saved)

    def cost(self, problem: ForwardProblem, device: Device) -> float:
        """Milliseconds of a supported problem."""
        costs = INTERLEAVING_COSTS
        config = self.config(problem, device)
        chunk = self.chunk(problem, config)
        size = problem.dtype.itemsize
        lines = max(tiling.lines for tiling in config.tilings if tiling.strips)
        assert problem.conv is not None
        if self.own_taps:
            cycles = self._own_cycles(problem, device, config, chunk, lines)
        else:
            step = max(costs.step[self.precision], lines * costs.line)
            tile = config.k_iterations * step + costs.tile[size]
            # Tiles of a consumer; three work side by side.
            consumers = max(1, device.multiprocessors // config.blocks_n) * config.consumers
            rounds = math.ceil(config.blocks_n / max(1, device.multiprocessors))
            cycles = math.ceil(chunk * config.tiles / consumers) * tile * rounds
            if problem.conv.stride[-1] > 2 and self.precision != "fp32":
                cycles *= costs.wide
        chunks = -(-problem.batch // chunk)
        moved = (problem.input_elements + problem.output_elements) * size
        conv = max(chunks * cycles * 1e3 / device.clock_hertz, device.copy_milliseconds(moved))
        if _pads(problem):
            conv += costs.padding * device.copy_milliseconds(2 * problem.input_elements * size)
            conv += chunks * device.launch_milliseconds
        conv += config.filter_bytes / size * costs.pack * 1e3
        if problem.norm_groups and not self.own_taps:
            conv += device.copy_milliseconds(problem.output_elements * size)
        return conv + self.milliseconds_beside(problem, device, chunks)

    def _own_cycles(
        self, problem: ForwardProblem, device: Device, config: Any, chunk: int, lines: int
    ) -> float:
        """Of a multiprocessor, where phases have taps of their own: blocks of columns share the
        multiprocessors by what they take, a tile of each consumer at a time. ``lines``: of a
        box."""
        costs = OWN_TAPS_COSTS[problem.dtype.itemsize]
        # Taps beside a position's own multiply half of the columns.
        columns = (1 + sum(self.row.window)) / 2 + 0.5
        tap = columns * (costs.streamed_tap if config.streams_filter else costs.tap)
        stage = costs.stage + lines * costs.line
        tile = costs.tile + (costs.moments if problem.norm_groups else 0.0)
        steps = config.block_steps
        blocks = config.blocks_n // len(steps)
        each = sum(blocks * (n * (rows * tap + stage) + tile) for n, rows in steps)
        sets = max(1, device.multiprocessors // config.blocks_n)
        rounds = math.ceil(chunk * config.tiles / (sets * config.consumers))
        tiles = max(chunk * config.tiles, rounds * sets * config.consumers)
        cycles = costs.launch + tiles * each / max(1, device.multiprocessors)
        assert problem.conv is not None
        if problem.conv.stride[-1] == 8:
            cycles *= costs.widest
        return float(cycles * (costs.few_stages if config.stages < 4 else 1.0))


@dataclass(frozen=True)
class OwnTapsCosts:
    """What the same multiplies where phases have taps of their own, in cycles of a
    multiprocessor."""

    #: A filter row's tap of all columns, and that where the filter passes through the ring.
    tap: float
    streamed_tap: float
    #: A stage, and each line of its box.
    stage: float
    line: float
    #: A tile beside these, what its moments take, and a launch.
    tile: float
    moments: float
    launch: float
    #: All of these over their sum: with 8 phases along width, and with fewer stages than 4.
    widest: float = 1.25
    few_stages: float = 1.4


#: By bytes of an element; from the times of 17 layers in TF32 and bf16 on an H200.
OWN_TAPS_COSTS = {
    2: OwnTapsCosts(
        tap=74.0, streamed_tap=114.0, stage=96.0, line=23.0, tile=760.0, moments=300.0,
        launch=9500.0,
    ),
    4: OwnTapsCosts(
        tap=40.0, streamed_tap=78.0, stage=115.0, line=20.0, tile=2350.0, moments=300.0,
        launch=3000.0,
    ),
}  # fmt: skip


def _reach(phases: tuple[AxisPhase, ...]) -> tuple[int, int]:
    """Inputs before and after a position that any phase along an axis reads."""
    read = [phase for phase in phases if phase.taps]
    before = max(phase.lower_padding for phase in read)
    after = max(phase.taps - 1 - phase.lower_padding for phase in read)
    return max(0, before), max(0, after)


def _pads(problem: ForwardProblem) -> bool:
    """Whether the input's lines, as tensor copies read them, must be padded first."""
    whole = line_pitch(problem.spatial[-1], problem.dtype) == problem.spatial[-1]
    return not whole or (problem.layout != "strided" and not problem.aligned)


def kernels() -> list[Kernel]:
    if "sm90" not in FAMILIES:
        return [NotBuiltForward("sm90_runs", "cutlass_sm90")]
    room = _C.sm90.runs
    return [
        (InterleavingRunsSm90 if row.interleaves else RunsSm90)(room, index, row)
        for index, row in enumerate(room.rows())
    ]
