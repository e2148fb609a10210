"""GroupNorm alone on CUDA, activations fused: one pass where groups fit on chip, else two."""

from __future__ import annotations

import math
from typing import Any

from fusedconv import _C
from fusedconv.kernels.cuda_program import (
    CONTIGUOUS_STEP,
    INPUT,
    MEAN,
    NORM_BIAS,
    NORM_WEIGHT,
    OUTPUT,
    RSTD,
    ProgramPlan,
    add_group_norm,
    copy_milliseconds,
    group_norm_passes,
    supports_cuda,
)
from fusedconv.plan import Plan
from fusedconv.problem import Problem
from fusedconv.registry import Kernel, Registry, Support


def input_layout(problem: Problem) -> str:
    """The layout the kernels read; a strided input is copied to channels first."""
    return "nhwc" if problem.layout == "nhwc" else "nchw"


def supports_norm_alone(problem: Problem) -> Support:
    """The conditions that both kernels share."""
    if problem.conv is not None:
        return Support.no("normalises only; the problem has a convolution")
    if problem.norm is None:
        return Support.no("the problem has no GroupNorm")
    return supports_cuda(problem)


class GroupNormOnePass(Kernel):
    """What the kernels that read each element once have in common."""

    provider = "groupnorm_cuda"

    def _plan(self, problem: Problem) -> Any:
        raise NotImplementedError

    def _add_step(self, program: _C.Program, plan: Any, *arguments: Any, **operands: Any) -> str:
        """Appends the step; returns where a group stays meanwhile."""
        raise NotImplementedError

    def _passes(self, problem: Problem) -> _C.GroupNormPasses:
        return group_norm_passes(
            problem,
            layout=input_layout(problem),
            row_channels=problem.channels,
            activation_before=problem.activation_before,
        )

    def supports(self, problem: Problem) -> Support:
        common = supports_norm_alone(problem)
        if not common:
            return common
        plan = self._plan(problem)
        return Support.no(plan.obstacle) if plan.obstacle else Support.yes()

    def compile(self, problem: Problem) -> Plan:
        assert problem.norm is not None
        sample = problem.channels * math.prod(problem.spatial)
        program = _C.Program(problem.device_index, problem.batch, 0)
        statistics = 4 * problem.norm.num_groups
        absent = _C.Operand()
        place = self._add_step(
            program,
            self._plan(problem),
            self._passes(problem),
            input=program.tensor(INPUT, sample * problem.dtype.itemsize),
            mean=program.tensor(MEAN, statistics) if problem.save else absent,
            rstd=program.tensor(RSTD, statistics) if problem.save else absent,
            weight=program.tensor(NORM_WEIGHT, 0),
            bias=program.tensor(NORM_BIAS, 0),
            output=program.tensor(OUTPUT, sample * problem.output_dtype.itemsize),
        )
        steps = [CONTIGUOUS_STEP] if problem.layout == "strided" else []
        parts = [problem.activation_before, "moments + normalize", problem.activation_after]
        what = " + ".join(part for part in parts if part != "identity")
        steps.append(f"{what} in one pass ({place})")
        return ProgramPlan(self.name, tuple(steps), problem, program, problem.device_index)


def readable_aligned(problem: Problem) -> bool:
    """Whether kernels see 16-byte alignment: a copy of a strided input is a fresh tensor."""
    return problem.aligned or problem.layout == "strided"


class GroupNormResident(GroupNormOnePass):
    """A group stays in the registers of one block, or of one warp."""

    name = "groupnorm_resident"

    def _plan(self, problem: Problem) -> _C.GroupNormResidentPlan:
        return _C.plan_resident(
            self._passes(problem), batch=problem.batch, aligned=readable_aligned(problem)
        )

    def _add_step(
        self,
        program: _C.Program,
        plan: _C.GroupNormResidentPlan,
        *arguments: Any,
        **operands: Any,
    ) -> str:
        program.normalize_resident(plan, *arguments, **operands)
        return f"{plan.threads} threads a group"

    def cost(self, problem: Problem) -> float:
        assert problem.norm is not None
        passes = 2.0 if problem.layout != "strided" else 4.0
        row = problem.channels // problem.norm.num_groups * problem.dtype.itemsize
        if problem.layout == "nhwc" and row < 32:
            passes = 3.3  # DRAM moves more than the group's part of a pixel
        trip = problem.input_elements * problem.dtype.itemsize
        return 0.003 + copy_milliseconds(passes * trip, problem.architecture)


class GroupNormStreamed(GroupNormOnePass):
    """The shared memory of all multiprocessors together holds the groups at work."""

    name = "groupnorm_streamed"

    def supports(self, problem: Problem) -> Support:
        support = super().supports(problem)
        if support and problem.architecture < 90:
            return Support.no(
                f"needs compute capability 9.0, the device has {problem.architecture}"
            )
        return support

    def _plan(self, problem: Problem) -> _C.GroupNormStreamPlan:
        return _C.plan_streamed(
            self._passes(problem),
            batch=problem.batch,
            aligned=readable_aligned(problem),
            device=problem.device_index,
        )

    def _add_step(
        self, program: _C.Program, plan: _C.GroupNormStreamPlan, *arguments: Any, **operands: Any
    ) -> str:
        program.normalize_streamed(plan, *arguments, **operands)
        return f"groups in the shared memory of {plan.blocks} multiprocessors"

    def cost(self, problem: Problem) -> float:
        passes = 2.1 if problem.layout != "strided" else 4.1
        trip = problem.input_elements * problem.dtype.itemsize
        # More than the launch: the first groups arrive, and the last ones leave, without overlap.
        return 0.022 + copy_milliseconds(passes * trip, problem.architecture)


class GroupNormTwoPass(Kernel):
    name = "groupnorm_two_pass"
    provider = "groupnorm_cuda"

    def supports(self, problem: Problem) -> Support:
        return supports_norm_alone(problem)

    def cost(self, problem: Problem) -> float:
        passes = 3 if problem.layout != "strided" else 5
        half_trip = problem.input_elements * problem.dtype.itemsize
        return 0.009 + copy_milliseconds(passes * half_trip, problem.architecture)

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
    registry.register(GroupNormResident())
    registry.register(GroupNormStreamed())
    registry.register(GroupNormTwoPass())
