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
from fusedconv.kernels.cuda_program import (
    BIAS,
    CONTIGUOUS_STEP,
    CONV_OUTPUT,
    HAS_CUDA,
    INPUT,
    LAUNCH_MILLISECONDS,
    NORM_BIAS,
    NORM_WEIGHT,
    OUTPUT,
    WEIGHT,
    NotCompiled,
    ProgramPlan,
    copy_milliseconds,
    five_strides,
    group_norm_passes,
    statistics_operands,
    supports_cuda,
    supports_precision,
)
from fusedconv.lowering import ForwardConv, lower_unit_stride
from fusedconv.plan import Plan
from fusedconv.problem import ACTIVATION_CODES, LAYOUT_CODES, Problem
from fusedconv.registry import Kernel, Registry, Support

# The codes of fusedconv::conv::Math and fusedconv::conv::sm90::Sharing.
_PRECISION_OF_MATH = {0: "tf32", 2: "fp32", 3: "fp16", 4: "bf16"}
_TURNS, _CHANNELS, _POSITIONS = range(3)

#: Scratch that one chunk of samples may take.
CHUNK_BYTES = 2 << 30


@dataclass(frozen=True)
class CostConstants:
    """What ``CutlassSm90.estimate`` multiplies, in nanoseconds on an H200."""

    #: A step (64 channels, 256 positions, 32 bytes of input channels) on the tensor cores.
    step_tf32: float
    step_fp32: float
    step_16_bits: float
    #: For each chunk of a stage: turning 128 positions; a line's tensor copy; turning 128 positions
    #: that come element by element, each with its memory's latency.
    turn: float
    line: float
    gather: float
    #: A stage, beside its chunks.
    stage: float

    def step(self, precision: str) -> float:
        return {"tf32": self.step_tf32, "fp32": self.step_fp32}.get(precision, self.step_16_bits)


#: Fitted by ``benchmarks/cost_model.py`` to the measured times of every row.
COSTS = CostConstants(
    step_tf32=77.1,
    step_fp32=258.3,
    step_16_bits=114.9,
    turn=144.2,
    line=26.77,
    gather=565.2,
    stage=172.6,
)


@dataclass(frozen=True)
class _Row:
    """A compiled kernel's metadata, as ``_C.sm90_rows()`` gives it."""

    index: int
    name: str
    math: int
    dtype: int
    sharing: int
    tile: tuple[int, int, int]


@functools.lru_cache(maxsize=4096)
def _plan(
    row: int,
    channels: int,
    output_channels: int,
    lowered: ForwardConv,
    layout: str,
    aligned: bool,
    multiprocessors: int,
) -> _C.Sm90Plan:
    return _C.Sm90Plan(
        row=row,
        c=channels,
        k=output_channels,
        input_extent=lowered.input,
        output_extent=lowered.output,
        taps=lowered.taps,
        lower_padding=lowered.lower_padding,
        dilation=lowered.dilation,
        layout=LAYOUT_CODES[layout],
        aligned=aligned,
        multiprocessors=max(1, multiprocessors),
    )


class CutlassSm90(Kernel):
    provider = "cutlass_sm90"

    def __init__(self, row: _Row) -> None:
        self.row = row
        self.name = row.name
        self.precision = _PRECISION_OF_MATH[row.math]

    def _plan(self, problem: Problem, lowered: ForwardConv) -> _C.Sm90Plan:
        strided = problem.layout == "strided"  # copied to contiguous NCHW first
        return _plan(
            self.row.index,
            problem.channels,
            problem.output_channels,
            lowered,
            "nhwc" if problem.layout == "nhwc" else "nchw",
            strided or problem.aligned,
            problem.multiprocessors,
        )

    def supports(self, problem: Problem) -> Support:
        conv = problem.conv
        if conv is None:
            return Support.no("computes convolutions; the problem has none")
        common = supports_cuda(problem)
        if not common:
            return common
        if problem.architecture != 90:
            return Support.no(
                f"runs on compute capability 9.0, the device has {problem.architecture}"
            )
        precise = supports_precision(problem, self.precision)
        if not precise:
            return precise
        if conv.groups != 1:
            return Support.no(f"groups is {conv.groups}, only 1 is served")
        lowered = lower_unit_stride(conv, problem.spatial)
        if isinstance(lowered, str):
            return Support.no(lowered)
        largest = max(math.prod(problem.spatial), math.prod(problem.output_spatial))
        if largest >= 1 << 30:
            return Support.no(f"a sample has {largest} pixels, positions are counted to 2**30")
        plan = self._plan(problem, lowered)
        if plan.obstacle:
            return Support.no(plan.obstacle)
        return Support.yes()

    def cost(self, problem: Problem) -> float:
        return self.estimate(problem, COSTS)

    def estimate(self, problem: Problem, costs: CostConstants) -> float:
        """Milliseconds of a supported problem, were the constants these."""
        assert problem.conv is not None
        lowered = lower_unit_stride(problem.conv, problem.spatial)
        assert isinstance(lowered, ForwardConv)
        plan = self._plan(problem, lowered)
        turns = self.row.sharing == _TURNS
        multiply = plan.stages * plan.stage_taps * costs.step(self.precision) * (1 if turns else 2)
        rounds = math.ceil(plan.stage_rows / 128)
        if plan.tensor_copies:
            turning = rounds * costs.turn + plan.lines * costs.line
        else:
            turning = rounds * costs.gather
        stages = plan.stages * (plan.chunks_per_stage * turning + costs.stage)
        waves = math.ceil(problem.batch * plan.tiles / max(1, problem.multiprocessors))
        # Epilogues are part of what the constants stand for: a term of their own was fitted to 0.
        nanoseconds = waves * max(multiply, stages)
        size = problem.dtype.itemsize
        output = problem.output_elements * size
        moved = 2 * output
        if problem.layout == "strided":
            moved += 2 * problem.input_elements * size
        conv = max(
            nanoseconds * 1e-6,
            copy_milliseconds(problem.input_elements * size + output, problem.architecture),
        )
        launches = 4 * -(-problem.batch // self._chunk(problem, plan))
        return (
            conv + copy_milliseconds(moved, problem.architecture) + LAUNCH_MILLISECONDS * launches
        )

    def _chunk(self, problem: Problem, plan: _C.Sm90Plan) -> int:
        """Samples per pass over the steps: what fits the scratch limit, one at least."""
        largest = max(1, min(problem.batch, CHUNK_BYTES // max(1, plan.scratch_bytes_per_sample)))
        # Chunks of equal size: a short last one would leave the device half empty.
        return -(-problem.batch // -(-problem.batch // largest))

    def compile(self, problem: Problem) -> Plan:
        conv = problem.conv
        assert conv is not None
        lowered = lower_unit_stride(conv, problem.spatial)
        assert isinstance(lowered, ForwardConv)
        plan = self._plan(problem, lowered)
        size = problem.dtype.itemsize
        norm = problem.norm
        program = _C.Program(problem.device_index, problem.batch, self._chunk(problem, plan))
        absent = _C.Operand()
        # A saved convolution output is kept as it is before the activation, which then is applied
        # once for the moments and once more behind them.
        before = problem.activation_before
        behind = before if problem.save else "identity"
        output_sample = problem.output_channels * math.prod(problem.output_spatial)
        program.sm90_convolution(
            plan,
            group_norm_passes(
                problem,
                layout="nchw",
                row_channels=problem.output_channels,
                activation_before=behind,
            ),
            strides=five_strides(conv.weight_strides),
            activation=ACTIVATION_CODES[before],
            activates_output=not problem.save,
            input=program.tensor(INPUT, problem.channels * math.prod(problem.spatial) * size),
            weight=program.tensor(WEIGHT, 0),
            bias=program.tensor(BIAS, 0) if conv.bias else absent,
            **statistics_operands(program, problem),
            norm_weight=program.tensor(NORM_WEIGHT, 0),
            norm_bias=program.tensor(NORM_BIAS, 0),
            output=program.tensor(OUTPUT, output_sample * problem.output_dtype.itemsize),
            conv_output=program.tensor(CONV_OUTPUT, output_sample * size)
            if problem.save
            else absent,
        )

        rounding = {"tf32": " (rounded to TF32)", "fp32": " (split in two TF32 parts)"}
        steps = [CONTIGUOUS_STEP] if problem.layout == "strided" else []
        steps.append("pack filter" + rounding.get(self.precision, ""))
        epilogue = [
            part
            for part in ("bias" * conv.bias, before, "moments" * (norm is not None))
            if part not in ("", "identity")
        ]
        copies = "tensor copies" if plan.tensor_copies else "loads by element"
        strips = f", {plan.strips} strips" if plan.strips > 1 else ""
        source = "nhwc" if problem.layout == "nhwc" else "nchw"
        steps.append(" + ".join([f"{self.name} ({source}, {copies}{strips})", *epilogue]))
        if norm is not None:
            steps.append("merge moments")
        parts = [behind, "normalize" if norm else "identity", problem.activation_after]
        name = " + ".join(part for part in parts if part != "identity") or "copy"
        steps.append(f"{name} (accumulator order -> {problem.output_layout})")
        if problem.save:
            steps.append(f"save the convolution's output ({problem.output_layout}, same pass)")
        if program.chunk < problem.batch:
            steps.append(f"steps after the first repeat for chunks of {program.chunk} samples")
        return ProgramPlan(self.name, tuple(steps), problem, program, problem.device_index)


def register(registry: Registry) -> None:
    if not HAS_CUDA:
        registry.register(NotCompiled("sm90_conv", "cutlass_sm90"))
        return
    rows: list[dict[str, Any]] = _C.sm90_rows()
    for fields in rows:
        registry.register(CutlassSm90(_Row(**fields)))
