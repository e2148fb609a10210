"""Depthwise transposed convolution of volumes, channels first, and a normalisation of each channel
in one launch, on compute capability 9.0.

Filters of three taps with stride two: the input is an eighth of the output, so that a pass over the
output is not stored and read again, it is computed twice: the first time for the moments, the
second time normalised. Products are multiply-adds in float32; the row of float32 serves TF32 as
well. A cluster of blocks has a channel of a sample where there are fewer of these than
multiprocessors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fusedconv import _C
from fusedconv.device import Device
from fusedconv.kernels.compiled import group_norm_problem
from fusedconv.kernels.cuda.conditions import FAMILIES, NotBuiltForward
from fusedconv.kernels.cuda.convolution import (
    ConvolutionRow,
    reading_config,
    supports_multiply_adds,
)
from fusedconv.kernels.cuda.program import ForwardProgram, ProgramPlan, equal_chunk
from fusedconv.plan import Kernel
from fusedconv.precision import dtype_name
from fusedconv.problem import ActNormAct, ForwardProblem, act_norm_act
from fusedconv.support import Support

#: Blocks of a launch.
MOST_BLOCKS = (1 << 31) - 1


@dataclass(frozen=True)
class CostConstants:
    """What ``Depthwise.estimate`` multiplies, in cycles of a multiprocessor. A step is what a block
    computes of one plane of the input in both walks: as many runs as it has threads."""

    #: A step of two blocks that share a multiprocessor, of a block that has it alone.
    shared: float
    alone: float
    #: What an activation adds to a block's step, in front, which both walks have, or behind.
    activation: float
    #: The share of memory's copy rate that is reached.
    copy_share: float


#: By the bytes of an element: from times of two problems in either precision on an H200.
#: Activations are counted from their instructions.
COSTS = {
    2: CostConstants(shared=4520.0, alone=4260.0, activation=640.0, copy_share=0.9),
    4: CostConstants(shared=6350.0, alone=4890.0, activation=640.0, copy_share=0.9),
}


class Depthwise(ConvolutionRow):
    """A row of ``_C.depthwise.rows()``."""

    provider = "depthwise"
    architecture = 90

    def config(self, problem: ForwardProblem, device: Device) -> Any:
        return reading_config(self.room, self.index, problem, device)

    # ---- what it serves ----

    def supports(self, problem: ForwardProblem, device: Device) -> Support:
        common = supports_multiply_adds(self, problem, device, self.architecture)
        if not common:
            return common
        if problem.output_dtype != problem.dtype:
            return Support.no(f"output dtype is {dtype_name(problem.output_dtype)}")
        if problem.save:
            return Support.no("a backward pass reads what is saved, it saves nothing")
        if problem.norm_groups != problem.output_channels:
            return Support.no(
                f"{problem.norm_groups} groups of {problem.output_channels} channels are "
                "normalised; groups of one channel are served"
            )
        blocks = problem.channels * _C.depthwise.most_parts
        if blocks > MOST_BLOCKS:
            return Support.no(f"a sample makes {blocks} blocks, at most {MOST_BLOCKS} are served")
        return Support.yes()

    def chunk(self, problem: ForwardProblem) -> int:
        """Samples per launch."""
        return equal_chunk(
            problem.batch, MOST_BLOCKS // (problem.channels * _C.depthwise.most_parts)
        )

    # ---- what it costs ----

    def cost(self, problem: ForwardProblem, device: Device) -> float:
        return self.estimate(problem, device, COSTS[problem.dtype.itemsize])

    def estimate(self, problem: ForwardProblem, device: Device, costs: CostConstants) -> float:
        """Milliseconds of a supported problem, were the constants these."""
        config = self.config(problem, device)
        chunk = self.chunk(problem)
        cluster = config.cluster(chunk)
        steps = config.tiles * -(-problem.spatial[0] // cluster)
        # Of the multiprocessor that has most.
        blocks = -(-problem.batch * problem.channels * cluster // max(1, device.multiprocessors))
        shared, alone = divmod(blocks, _C.depthwise.resident)
        cycles = shared * costs.shared + alone * costs.alone
        cycles += blocks * _activations(problem) * costs.activation
        computed = steps * cycles / device.clock_hertz * 1e3
        written = device.copy_milliseconds(problem.output_elements * problem.dtype.itemsize)
        total = max(computed, written / costs.copy_share)
        launches = -(-problem.batch // chunk)
        if problem.layout == "strided":
            moved = 2 * problem.input_elements * problem.dtype.itemsize
            total += device.copy_milliseconds(moved)
            launches += 1
        return total + device.launch_milliseconds * launches

    # ---- how it runs ----

    def compile(self, problem: ForwardProblem, device: Device) -> ProgramPlan:
        program = ForwardProgram(problem, device, self.chunk(problem))
        layout = problem.output_layout
        program.compiled.per_chunk(
            _C.depthwise.Forward(
                self.config(problem, device),
                norm=group_norm_problem(
                    problem, program.form, input_layout=layout, output_layout=layout
                ),
                input=program.input,
                weight=program.weight,
                bias=program.bias,
                norm_weight=program.norm_weight,
                norm_bias=program.norm_bias,
                output=program.output,
            )
        )
        return program.plan(self.name)


def _activations(problem: ForwardProblem) -> int:
    """Of an output: one in front of the normalisation is in both walks, one behind in the last."""
    form = act_norm_act(problem.epilogue)
    assert isinstance(form, ActNormAct)
    return 2 * (form.before != "identity") + (form.after != "identity")


def kernels() -> list[Kernel]:
    if "depthwise" not in FAMILIES:
        return [NotBuiltForward("depthwise_conv", "depthwise")]
    return [Depthwise(_C.depthwise, index, row) for index, row in enumerate(_C.depthwise.rows())]
