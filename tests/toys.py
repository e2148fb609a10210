"""Kernels that compute nothing: what they serve and cost is what a test says."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from fusedconv import (
    BackwardKernel,
    BackwardPlan,
    Device,
    ForwardKernel,
    ForwardPlan,
    Gradients,
    Outputs,
    Registry,
    Support,
)
from fusedconv.plan import Kernel
from fusedconv.problem import Problem


class ToyPlan(ForwardPlan):
    """Returns a copy of its input, and of a problem that saves statistics some."""

    steps = ("nothing",)

    def __init__(self, kernel: str, problem: Problem | None = None) -> None:
        self.kernel = kernel
        self.problem = problem

    def run(self, input, weight, bias, norm_weight, norm_bias, residual=None):
        mean = rstd = None
        if self.problem is not None and self.problem.save and self.problem.norm_groups:
            mean, rstd = input.new_zeros((2, len(input), self.problem.norm_groups))
        return Outputs(input.clone(), None, mean, rstd)


class Toy(ForwardKernel):
    """Serves every forward pass, or none and says why."""

    def __init__(self, name, cost=1.0, provider="toys", refusal=None):
        self.name = name
        self.provider = provider
        self.estimate = cost
        self.refusal = refusal

    def supports(self, problem, device):
        return Support.no(self.refusal) if self.refusal else Support.yes()

    def cost(self, problem, device):
        assert not self.refusal, "cost is asked of kernels that serve the problem only"
        return self.estimate

    def compile(self, problem, device):
        return ToyPlan(self.name, problem)


class ToyBackwardPlan(BackwardPlan):
    """Notes the tensors that it was given and returns what the test says."""

    def __init__(self, kernel: str, problem, found: dict[str, Tensor]) -> None:
        self.kernel = kernel
        self.problem = problem
        self.steps = (f"{kernel} of {', '.join(problem.parts)}",)
        self.found = found
        self.seen = []

    def run(self, tensors):
        self.seen.append(tensors)
        return Gradients(**self.found)


class ToyBackward(BackwardKernel):
    """Serves these parts at this cost, once for a problem of some of them or of all; where ``cost``
    is a dict, by parts, and no others."""

    def __init__(self, name, parts, cost=1.0, provider="toys", refusal=None, found=None, beside=()):
        self.name = name
        self.provider = provider
        self.computes = frozenset(parts)
        self.beside = frozenset(beside)
        self.estimate = cost
        self.refusal = refusal
        self.found = found or {}
        self.plans = []

    def supports(self, problem, device):
        assert set(problem.parts) <= self.computes
        if isinstance(self.estimate, dict) and problem.parts not in self.estimate:
            return Support.no(f"does not take {', '.join(problem.parts)} together")
        return Support.no(self.refusal) if self.refusal else Support.yes()

    def cost(self, problem, device):
        assert not self.refusal, "cost is asked of kernels that serve the problem only"
        if isinstance(self.estimate, dict):
            return self.estimate[problem.parts]
        return self.estimate

    def compile(self, problem, device):
        self.plans.append(ToyBackwardPlan(self.name, problem, self.found))
        return self.plans[-1]


def filled(*kernels: Kernel) -> Registry:
    registry = Registry()
    for kernel in kernels:
        registry.register(kernel)
    return registry


def names(chosen: Iterable) -> list[str]:
    """The kernels of candidates, or of a choice's pieces."""
    candidates = [each[1] if isinstance(each, tuple) else each for each in chosen]
    return [candidate.kernel.name for candidate in candidates]


HERE = Device(type="cpu", name="toy device", fp32_flops=1.0, copy_bytes=1.0)
