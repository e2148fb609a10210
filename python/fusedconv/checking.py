"""What third parties' kernels return, held against what they were asked for.

Built-in kernels are held to it by tests; another's result goes to its caller with an error that
names the kernel rather than as it is.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

from torch import Tensor

from fusedconv.device import Device
from fusedconv.errors import KernelError
from fusedconv.norms import statistics_dtype
from fusedconv.plan import BackwardKernel, BackwardPlan, ForwardKernel, ForwardPlan, Kernel, Outputs
from fusedconv.problem import ForwardProblem, Problem
from fusedconv.support import Support


def is_built_in(kernel: Kernel) -> bool:
    return type(kernel).__module__.startswith("fusedconv.")


def _wrong(kernel: str, what: str, got: object, expected: object) -> Exception:
    return KernelError(f"{kernel}: {what}: got {got}, expected {expected}")


def verdict(kernel: Kernel, problem: Problem, device: Device) -> tuple[Support, float | None]:
    """What a kernel says of a problem, and its cost in milliseconds where it serves it.

    Raises KernelError where it says neither.
    """
    asked: Any = kernel
    support = asked.supports(problem, device)
    if not isinstance(support, Support):
        raise _wrong(kernel.name, "supports()", repr(support), "a fusedconv.Support")
    if not support:
        return support, None
    cost = asked.cost(problem, device)
    if not isinstance(cost, numbers.Real) or math.isnan(cost):
        raise _wrong(kernel.name, "cost()", repr(cost), "milliseconds, a number")
    return support, float(cost)


def compiled(kernel: Kernel, problem: Problem, device: Device) -> Any:
    """A kernel's plan of a problem, a third party's forward one with its results checked.

    Raises KernelError where it makes none.
    """
    if isinstance(problem, ForwardProblem):
        assert isinstance(kernel, ForwardKernel)
        plan = kernel.compile(problem, device)
        if is_built_in(kernel):
            return plan
        if not isinstance(plan, ForwardPlan):
            raise _wrong(kernel.name, "compile()", repr(plan), "a fusedconv.ForwardPlan")
        return CheckedPlan(kernel.name, problem, plan)
    assert isinstance(kernel, BackwardKernel)
    made = kernel.compile(problem, device)
    if not isinstance(made, BackwardPlan):
        raise _wrong(kernel.name, "compile()", repr(made), "a fusedconv.BackwardPlan")
    return made


class CheckedPlan(ForwardPlan):
    """A plan whose outputs are looked over at each call: shape, dtype, device and memory of their
    own, and what the backward pass reads where the problem saves."""

    def __init__(self, kernel: str, problem: ForwardProblem, plan: ForwardPlan) -> None:
        self.kernel = kernel
        self.steps = tuple(plan.steps)
        self.is_reference = plan.is_reference
        self.problem = problem
        self.plan = plan

    def run(
        self,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        residual: Tensor | None = None,
    ) -> Outputs:
        given = (input, weight, bias, norm_weight, norm_bias, residual)
        more = () if residual is None else (residual,)
        outputs = self.plan.run(*given[:5], *more)
        if not isinstance(outputs, Outputs):
            raise _wrong(self.kernel, "result", type(outputs).__name__, "fusedconv.Outputs")
        problem = self.problem
        expected: dict[str, tuple[tuple[int, ...], Any]] = {
            "output": (problem.output_shape, problem.output_dtype)
        }
        if problem.saves_conv_output:
            expected["conv_output"] = problem.output_shape, problem.dtype
        if problem.save and problem.norm_groups:
            statistics = (problem.batch, problem.norm_groups), statistics_dtype(input)
            expected |= {"mean": statistics, "rstd": statistics}
        for name, (shape, dtype) in expected.items():
            self._check(name, getattr(outputs, name), shape, dtype, given)
        return outputs

    def _check(
        self,
        name: str,
        found: object,
        shape: tuple[int, ...],
        dtype: Any,
        given: tuple[Tensor | None, ...],
    ) -> None:
        input = given[0]
        assert input is not None
        if not isinstance(found, Tensor):
            raise _wrong(self.kernel, name, repr(found), "a tensor")
        for what, got, expected in (
            ("shape", tuple(found.shape), tuple(shape)),
            ("dtype", found.dtype, dtype),
            ("device", found.device, input.device),
        ):
            if got != expected:
                raise _wrong(self.kernel, f"{what} of {name}", got, expected)
        if found.numel() == 0:
            return
        own = found.untyped_storage().data_ptr()
        if any(each is not None and each.untyped_storage().data_ptr() == own for each in given):
            raise _wrong(self.kernel, f"memory of {name}", "that of an argument", "its own")
