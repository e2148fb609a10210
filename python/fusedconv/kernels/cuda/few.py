"""Transposed convolution of one to four input channels, channels first, on tensor cores.

Filters of three taps with stride two: a product has four channels of two neighbouring inputs, and
little else than what follows the products takes time. So a pass over the output is not stored and
read again where a normalisation follows, it is computed twice: the first time for the moments, the
second time normalised. What a training step saves is stored the first time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fusedconv import _C
from fusedconv.activations import COMPILED
from fusedconv.device import Device
from fusedconv.kernels.compiled import group_norm_problem
from fusedconv.kernels.cuda.conditions import FAMILIES, NotBuiltForward
from fusedconv.kernels.cuda.convolution import (
    CHUNK_BYTES,
    ConvolutionRow,
    reading_config,
    supports_partials,
    supports_transposed,
)
from fusedconv.kernels.cuda.program import ForwardProgram, ProgramPlan, equal_chunk
from fusedconv.plan import Kernel
from fusedconv.precision import dtype_name
from fusedconv.problem import Activation, ActNormAct, ForwardProblem
from fusedconv.support import Support

#: Blocks of a launch.
MOST_BLOCKS = (1 << 31) - 1


@dataclass(frozen=True)
class CostConstants:
    """What ``Few.estimate`` multiplies, in cycles of a multiprocessor."""

    #: An output of a pass, one of zeros' among them: for moments alone, and stored.
    moments: float
    stored: float
    #: Its activation.
    activation: float
    #: A launch from its first block to its last, however small.
    shortest: float
    #: The share of memory's copy rate that is reached.
    copy_share: float


#: From the times of KernelBench's level 2, problem 60, in bf16 on an H200.
COSTS = CostConstants(moments=0.13, stored=0.17, activation=0.07, shortest=12000.0, copy_share=0.8)


class Few(ConvolutionRow):
    """A row of ``_C.few.rows()``."""

    provider = "few"
    computes = frozenset({"forward"})

    def config(self, problem: ForwardProblem, device: Device) -> Any:
        return reading_config(self.room, self.index, problem, device)

    # ---- what it serves ----

    def supports(self, problem: ForwardProblem, device: Device) -> Support:
        common = supports_transposed(problem, device, self.precision, self.ungrouped, None)
        if not common:
            return common
        if problem.output_dtype != problem.dtype:
            return Support.no(f"output dtype is {dtype_name(problem.output_dtype)}")
        config = self.config(problem, device)
        support = Support.of(config.support)
        if not support:
            return support
        blocks = _sample_blocks(config)
        if blocks > MOST_BLOCKS:
            return Support.no(f"a sample makes {blocks} blocks, at most {MOST_BLOCKS} are served")
        return supports_partials(problem, config)

    def chunk(self, problem: ForwardProblem, config: Any) -> int:
        """Samples per pass over the steps."""
        scratch = int(config.partial_bytes_per_sample) if problem.norm_groups else 0
        most = min(CHUNK_BYTES // max(1, scratch), MOST_BLOCKS // _sample_blocks(config))
        return equal_chunk(problem.batch, most)

    # ---- what it costs ----

    def cost(self, problem: ForwardProblem, device: Device) -> float:
        return self.estimate(problem, device, COSTS)

    def estimate(self, problem: ForwardProblem, device: Device, costs: CostConstants) -> float:
        """Milliseconds of a supported problem, were the constants these."""
        config = self.config(problem, device)
        planes = (1, *problem.output_spatial)[-3]
        lines = config.tiles[1] * config.lines * 2
        outputs = problem.batch * planes * lines * config.width_tiles * _C.few.tile_outputs
        outputs *= config.channel_blocks * _C.few.block_channels
        written = device.copy_milliseconds(problem.output_elements * problem.dtype.itemsize)
        activates = any(isinstance(stage, Activation) for stage in problem.epilogue)

        def milliseconds(cycles: float, stores: bool) -> float:
            if activates:
                cycles += costs.activation
            cycles = max(costs.shortest, outputs * cycles / max(1, device.multiprocessors))
            computed = cycles / device.clock_hertz * 1e3
            return max(computed, written / costs.copy_share if stores else 0.0)

        total = milliseconds(costs.stored, True)
        if problem.norm_groups or problem.saves_conv_output:
            saves = problem.saves_conv_output
            total += milliseconds(costs.stored if saves else costs.moments, saves)
        chunks = -(-problem.batch // self.chunk(problem, config))
        launches = chunks * (3 if problem.norm_groups else 1 + problem.saves_conv_output)
        if problem.layout == "strided":
            moved = 2 * problem.input_elements * problem.dtype.itemsize
            total += device.copy_milliseconds(moved)
            launches += 1
        return total + device.launch_milliseconds * launches

    # ---- how it runs ----

    def behind(self, program: ForwardProgram, batch: int = 0) -> Any:
        problem, form = program.problem, program.form
        return group_norm_problem(
            problem,
            ActNormAct(False, "identity", form.norm, form.after),
            input_layout=problem.output_layout,
            output_layout=problem.output_layout,
            batch=batch,
        )

    def compile(self, problem: ForwardProblem, device: Device) -> ProgramPlan:
        config = self.config(problem, device)
        program = ForwardProgram(problem, device, self.chunk(problem, config))
        form = program.form

        def convolve(activation: str, output: Any, **others: Any) -> None:
            program.compiled.per_chunk(
                _C.few.Convolve(
                    config,
                    activation=COMPILED[activation],
                    # The backward pass reads the same values, saved or computed anew.
                    rounds=problem.save,
                    input=program.input,
                    weight=program.weight,
                    bias=program.bias,
                    output=output,
                    **others,
                )
            )

        behind: dict[str, Any] = {}
        if program.groups:
            partials = program.scratch(config.partial_bytes_per_sample)
            convolve(form.before, program.conv_output, partials=partials)
            norm, statistics = self.statistics(program, config, partials)
            behind = {
                "norm": norm,
                "statistics": statistics,
                "norm_weight": program.norm_weight,
                "norm_bias": program.norm_bias,
            }
        elif problem.saves_conv_output:
            convolve("identity", program.conv_output)
        convolve(form.before, program.output, **behind)
        return program.plan(self.name)


def _sample_blocks(config: Any) -> int:
    depth, height = config.tiles
    return int(depth * height * config.channel_blocks)


def kernels() -> list[Kernel]:
    if "few" not in FAMILIES:
        return [NotBuiltForward("few_conv", "few")]
    return [Few(_C.few, index, row) for index, row in enumerate(_C.few.rows())]
