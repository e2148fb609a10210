"""GroupNorm alone on CUDA: a moments pass and a normalising pass, activations fused in both."""

from __future__ import annotations

import math

from fusedconv import _C
from fusedconv.kernels.cuda_program import (
    CONTIGUOUS_STEP,
    INPUT,
    ProgramPlan,
    add_group_norm,
    copy_milliseconds,
    supports_cuda,
)
from fusedconv.plan import Plan
from fusedconv.problem import Problem
from fusedconv.registry import Kernel, Registry, Support

def input_layout(problem: Problem) -> str:
    """The layout the kernels read; a strided input is copied to channels first."""
    return "nhwc" if problem.layout == "nhwc" else "nchw"


class GroupNormTwoPass(Kernel):
    name = "groupnorm_two_pass"
    provider = "groupnorm_cuda"

    def supports(self, problem: Problem) -> Support:
        if problem.conv is not None:
            return Support.no("normalises only; the problem has a convolution")
        if problem.norm is None:
            return Support.no("the problem has no GroupNorm")
        return supports_cuda(problem)

    def cost(self, problem: Problem) -> float:
        passes = 3 if problem.layout != "strided" else 5
        half_trip = problem.input_elements * problem.dtype.itemsize
        return 0.004 + copy_milliseconds(passes * half_trip, problem.architecture)

    def compile(self, problem: Problem) -> Plan:
        layout = input_layout(problem)
        sample = problem.channels * math.prod(problem.spatial)
        program = _C.Program(problem.device_index, problem.batch, 0)
        steps = []
        if problem.layout == "strided":
            steps.append(CONTIGUOUS_STEP)
        steps += add_group_norm(
            program,
            problem,
            program.tensor(INPUT, sample * problem.dtype.itemsize),
            layout=layout,
            row_channels=problem.channels,
            activation_before=problem.activation_before,
        )
        return ProgramPlan(self.name, tuple(steps), problem, program, problem.device_index)


def register(registry: Registry) -> None:
    registry.register(GroupNormTwoPass())
