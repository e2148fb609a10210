"""What third parties' kernels say and return, held against what they were asked for.

Built-in kernels are held to it by tests. Another's result that is not what was asked for would be
read by addresses, or give gradients that are silently wrong: it raises an error that names the
kernel.
"""

from __future__ import annotations

import logging
import math
import numbers
from typing import Any

from torch import Tensor

from fusedconv.device import Device
from fusedconv.errors import KernelError
from fusedconv.norms import statistics_dtype
from fusedconv.plan import (
    BackwardPlan,
    BackwardTensors,
    ForwardPlan,
    Gradients,
    Kernel,
    Outputs,
    Plan,
)
from fusedconv.problem import BackwardProblem, ForwardProblem, Problem
from fusedconv.support import Support

logger = logging.getLogger("fusedconv")
_warned: set[tuple[str, str]] = set()


def is_built_in(kernel: Kernel) -> bool:
    return type(kernel).__module__.startswith("fusedconv.")


def _wrong(kernel: str, what: str, got: object, expected: object) -> Exception:
    return KernelError(f"{kernel}: {what}: got {got}, expected {expected}")


def verdict(kernel: Kernel, problem: Problem, device: Device) -> tuple[Support, float | None]:
    """What a kernel says of a problem, and its cost in milliseconds where it serves it.

    One that says neither serves nothing, for that reason, and a warning is logged once: another
    kernel's fault is no reason for a call to fail.
    """
    asked: Any = kernel
    support = asked.supports(problem, device)
    if not isinstance(support, Support):
        return _refused(kernel, f"supports(): got {support!r}, expected a fusedconv.Support")
    if not support:
        return support, None
    cost = asked.cost(problem, device)
    if not isinstance(cost, numbers.Real) or math.isnan(cost):
        return _refused(kernel, f"cost(): got {cost!r}, expected milliseconds, a number")
    return support, float(cost)


def _refused(kernel: Kernel, reason: str) -> tuple[Support, None]:
    if (kernel.name, reason) not in _warned:
        _warned.add((kernel.name, reason))
        logger.warning("%s is passed over: %s", kernel.name, reason)
    return Support.no(reason), None


def compiled(kernel: Kernel, problem: Problem, device: Device) -> Any:
    """A kernel's plan of a problem, a third party's with its results checked.

    Raises KernelError where it makes none.
    """
    asked: Any = kernel
    plan = asked.compile(problem, device)
    if is_built_in(kernel):
        return plan
    if isinstance(problem, ForwardProblem) and isinstance(plan, ForwardPlan):
        return CheckedPlan(kernel.name, problem, plan)
    if isinstance(problem, BackwardProblem) and isinstance(plan, BackwardPlan):
        return CheckedBackwardPlan(kernel.name, problem, plan)
    expected = "ForwardPlan" if isinstance(problem, ForwardProblem) else "BackwardPlan"
    raise _wrong(kernel.name, "compile()", repr(plan), f"a fusedconv.{expected}")


def _steps(kernel: str, plan: Plan) -> tuple[str, ...]:
    steps = getattr(plan, "steps", None)
    if not isinstance(steps, tuple | list) or not all(isinstance(step, str) for step in steps):
        raise _wrong(kernel, "steps of the plan", repr(steps), "a tuple of str")
    return tuple(steps)


def _check(
    kernel: str, name: str, found: object, shape: tuple[int, ...], dtype: Any, like: Tensor
) -> Tensor:
    """A tensor of a shape, of ``dtype`` unless that is None, on the device of another."""
    if not isinstance(found, Tensor):
        raise _wrong(kernel, name, repr(found), "a tensor")
    for what, got, expected in (
        ("shape", tuple(found.shape), tuple(shape)),
        ("dtype", found.dtype, found.dtype if dtype is None else dtype),
        ("device", found.device, like.device),
    ):
        if got != expected:
            raise _wrong(kernel, f"{what} of {name}", got, expected)
    return found


def _memory(tensor: Tensor) -> tuple[int, int]:
    """From which address to which a tensor lies; the same twice of one without elements."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return start, start + (last + 1) * tensor.element_size()


class CheckedPlan(ForwardPlan):
    """A plan whose outputs are looked over at each call: shape, dtype, device and memory of their
    own, and what the backward pass reads where the problem saves."""

    def __init__(self, kernel: str, problem: ForwardProblem, plan: ForwardPlan) -> None:
        self.kernel = kernel
        self.steps = _steps(kernel, plan)
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
        outputs = self.plan.run(*given[:5], *(() if residual is None else (residual,)))
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
        memory = [_memory(each) for each in given if each is not None]
        for name, (shape, dtype) in expected.items():
            found = _check(self.kernel, name, getattr(outputs, name), shape, dtype, input)
            own = _memory(found)
            if any(start < own[1] and own[0] < end for start, end in memory):
                raise _wrong(self.kernel, f"memory of {name}", "that of an argument", "its own")
        return outputs


def gradient_shapes(problem: BackwardProblem) -> dict[str, tuple[int, ...]]:
    """Of the gradients that a problem asks for, by their names."""
    forward = problem.forward
    channels = (forward.output_channels,)
    shapes: dict[str, tuple[int, ...]] = {
        "conv_output": forward.output_shape,
        "input": forward.input_shape,
        "weight": () if forward.conv is None else forward.conv.weight_shape,
        "bias": channels,
        "norm_weight": channels,
        "norm_bias": channels,
        "residual": forward.output_shape,
    }
    return {name: shapes[name] for name in problem.gradients}


class CheckedBackwardPlan(BackwardPlan):
    """A plan each of whose gradients is looked over at each call: that it is there where it was
    asked for, its shape and device. Its dtype may be wider than its tensor's."""

    def __init__(self, kernel: str, problem: BackwardProblem, plan: BackwardPlan) -> None:
        self.kernel = kernel
        self.steps = _steps(kernel, plan)
        self.is_reference = plan.is_reference
        self.pads_lines = plan.pads_lines
        self.reads_dense = plan.reads_dense
        self.plan = plan
        self.shapes = gradient_shapes(problem)

    def give_padded_lines(self) -> bool:
        return self.plan.give_padded_lines()

    def take_padded_lines(self) -> None:
        self.plan.take_padded_lines()

    def run(self, tensors: BackwardTensors) -> Gradients:
        found = self.plan.run(tensors)
        if not isinstance(found, Gradients):
            raise _wrong(self.kernel, "result", type(found).__name__, "fusedconv.Gradients")
        for name, shape in self.shapes.items():
            gradient = getattr(found, name)
            _check(self.kernel, f"gradient of {name}", gradient, shape, None, tensors.grad_output)
        return found
