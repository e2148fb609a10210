"""Transposed convolution on Hopper with positions from registers, built from CuTe (sm_90a).

NCHW in, NCHW out: lines land in shared memory as they lie, a filter tap is a shift among registers,
and the epilogue adds the bias, activates, stores in the tensor's own order and reduces the moments
of GroupNorm. What normalises goes over the output in place, unless a saved convolution output or
another dtype asks for a second tensor. A row is a filter's reach to either side of a column.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fusedconv import _C
from fusedconv.device import Device
from fusedconv.kernels.cuda.program import (
    FAMILIES,
    ForwardProgram,
    NotBuiltForward,
    ProgramPlan,
    equal_chunk,
)
from fusedconv.kernels.cuda.sm90 import Sm90Kernel
from fusedconv.plan import Kernel
from fusedconv.problem import ActNormAct, ForwardProblem, act_norm_act

#: Scratch that one chunk of samples may take.
CHUNK_BYTES = 2 << 30
#: Tiles of a launch, which are counted in 32 bits.
MOST_TILES = 1 << 30

#: Cycles of the tensor cores for a tile of 128 positions and 64 channels: a k-block of one tap.
_TAP_CYCLES = 64.0
#: What a main loop in strict fp32 takes for the same: three products, and the additions that join
#: filter rows' sums. Measured on an H200 as a whole, so nothing multiplies it.
_STRICT_TAP_CYCLES = 270.0


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


class RunsSm90(Sm90Kernel):
    """A row of ``_C.sm90.runs.rows()``."""

    def cost(self, problem: ForwardProblem, device: Device) -> float:
        return self.estimate(problem, device, COSTS)

    def estimate(self, problem: ForwardProblem, device: Device, costs: CostConstants) -> float:
        """Milliseconds of a supported problem, were the constants these."""
        assert problem.conv is not None
        config = self.config(problem, device)
        chunk = self._chunk(problem, config)
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
        passes = _passes(problem)
        moved = passes * (output + problem.output_elements * problem.output_dtype.itemsize)
        if problem.layout == "strided":
            moved += 2 * problem.input_elements * size
        launches = (1 + chunks * (1 + passes + (problem.norm is not None))) if chunks else 0
        return conv + device.copy_milliseconds(moved) + device.launch_milliseconds * launches

    def _chunk(self, problem: ForwardProblem, config: Any) -> int:
        """Samples per pass over the steps: what fits the scratch limit, one at least."""
        scratch = config.partial_bytes_per_sample if problem.norm is not None else 0
        if _goes_through_scratch(problem):
            scratch += problem.output_elements // problem.batch * problem.dtype.itemsize
        most = min(CHUNK_BYTES // max(1, scratch), (MOST_TILES - 1) // config.tiles)
        return equal_chunk(problem.batch, most)

    def compile(self, problem: ForwardProblem, device: Device) -> ProgramPlan:
        config = self.config(problem, device)
        chunk = self._chunk(problem, config)
        program = ForwardProgram(problem, device, chunk)
        if problem.save:
            output = program.conv_output
        elif _goes_through_scratch(problem):
            size = problem.output_elements // problem.batch * problem.dtype.itemsize
            output = program.scratch(size)
        else:
            output = program.output
        partials = self.convolve(program, config, output)
        if problem.norm is not None and self.room.merges_in_passing(
            config, self.behind(program, batch=chunk)
        ):
            program.compiled.per_chunk(
                self.room.NormalizeMerging(
                    config,
                    problem=self.behind(program),
                    input=output,
                    partials=partials,
                    mean=program.mean,
                    rstd=program.rstd,
                    weight=program.norm_weight,
                    bias=program.norm_bias,
                    output=program.output,
                )
            )
        elif _passes(problem):
            norm, statistics = self.statistics(program, config, partials)
            program.compiled.per_chunk(
                _C.group_norm.Normalize(
                    problem=norm,
                    input=output,
                    statistics=statistics,
                    weight=program.norm_weight,
                    bias=program.norm_bias,
                    output=program.output,
                )
            )
        return program.plan(self.name)


def _goes_through_scratch(problem: ForwardProblem) -> bool:
    """Whether the convolution's output is of another dtype than the result."""
    return not problem.save and problem.output_dtype != problem.dtype


def _passes(problem: ForwardProblem) -> int:
    """Passes over the convolution's output: one, unless that is the result."""
    form = act_norm_act(problem.epilogue)
    assert isinstance(form, ActNormAct)
    done = form.norm is None and form.after == "identity" and not problem.save
    return 0 if done and problem.output_dtype == problem.dtype else 1


def kernels() -> list[Kernel]:
    if "sm90" not in FAMILIES:
        return [NotBuiltForward("sm90_runs", "cutlass_sm90")]
    room = _C.sm90.runs
    return [RunsSm90(room, index, row) for index, row in enumerate(room.rows())]
