"""Plans: the steps that serve one problem, ready to run, and the cache of them."""

from __future__ import annotations

import contextlib
import logging
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd import profiler

if TYPE_CHECKING:
    from fusedconv.problem import Problem
    from fusedconv.registry import Candidate

logger = logging.getLogger("fusedconv")


class Outputs(NamedTuple):
    """What a plan returns. The last three are None unless the problem asks to save them.

    ``conv_output`` is the convolution with bias, before any activation. ``mean`` and ``rstd`` are
    [N, num_groups] in float32 (float64 for float64 input).
    """

    output: torch.Tensor
    conv_output: torch.Tensor | None
    mean: torch.Tensor | None
    rstd: torch.Tensor | None


class Plan(ABC):
    """How one problem is computed: a short list of steps behind one call."""

    #: The kernel's name.
    kernel: str
    #: One line a step, in order.
    steps: tuple[str, ...]
    #: True where torch's own operators do the work; a log line then says why, once a problem.
    is_reference: bool = False

    @abstractmethod
    def run(
        self,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        norm_weight: torch.Tensor | None,
        norm_bias: torch.Tensor | None,
    ) -> Outputs:
        """Computes the problem on tensors that have its shapes, strides and dtypes."""


@dataclass(frozen=True)
class Explanation:
    """Why a plan was chosen; ``str()`` of it is what ``fusedconv.explain`` prints."""

    problem: Problem
    kernel: str
    provider: str
    cost: float
    steps: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    forced: str | None = None

    def __str__(self) -> str:
        lines = [
            str(self.problem),
            f"  kernel: {self.kernel} (provider {self.provider}, estimated {self.cost:.4g} ms)"
            + (f", forced by {self.forced}" if self.forced else ""),
        ]
        lines += [f"    {number}. {step}" for number, step in enumerate(self.steps, 1)]
        others = [c for c in self.candidates if c.kernel.name != self.kernel]
        if others:
            lines.append("  not chosen:")
        for candidate in others:
            if candidate.cost is None:
                lines.append(f"    {candidate.kernel.name}: {candidate.support.reason}")
            else:
                lines.append(f"    {candidate.kernel.name}: estimated {candidate.cost:.4g} ms")
        return "\n".join(lines)


#: Entries of the plan cache, the least recently used out first. A call takes two: one under its
#: arguments' metadata, one under its problem, which calls with other metadata may share. Entries
#: of 0.6 to 8 KB were measured, so that the cache stays near 30 MB at most, whatever shapes come.
CACHE_ENTRIES = 4096


class _Recent:
    """At most ``capacity`` entries, the least recently used out first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._entries: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Any:
        entry = self._entries.get(key)
        if entry is not None:
            # Another thread may have put it out just now; the entry itself is still good.
            with contextlib.suppress(KeyError):
                self._entries.move_to_end(key)
        return entry

    def put(self, key: Hashable, entry: Any) -> None:
        with self._lock:
            self._entries[key] = entry
            self._entries.move_to_end(key)
            while len(self._entries) > self.capacity:
                self._entries.popitem(last=False)

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()


_plans = _Recent(CACHE_ENTRIES)
_logged = _Recent(CACHE_ENTRIES)

#: The plan of a call seen before, None otherwise.
cached: Callable[[Hashable], Plan | None] = _plans.get


def clear_cache() -> None:
    """Forgets every plan; the next call of each problem selects anew."""
    _plans.clear()
    _logged.clear()


def log_once(key: Hashable, message: str, *arguments: object) -> None:
    """Logs at INFO on the logger ``fusedconv`` unless the same key was logged lately."""
    if _logged.get(key) is None:
        _logged.put(key, True)
        logger.info(message, *arguments)


def run(
    plan: Plan,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
) -> Outputs:
    """``plan.run`` under a range named after the kernel, where a profiler records."""
    if profiler._is_profiler_enabled:
        with profiler.record_function(f"fusedconv::{plan.kernel}"):
            return plan.run(input, weight, bias, norm_weight, norm_bias)
    return plan.run(input, weight, bias, norm_weight, norm_bias)


def plan_for(problem: Problem, key: Hashable | None = None) -> Plan:
    """The plan of a problem, from the cache or from the registry; cached under ``key`` too.

    Raises NoKernelError where nothing admissible serves it. Logs once per problem, at INFO, where
    the reference provider serves what a kernel of ours was asked for on CUDA.
    """
    from fusedconv.registry import forced_kernels, registry

    forced = forced_kernels()
    own_key = (problem, forced)
    plan = _plans.get(own_key)
    if plan is None:
        candidate = registry().select(problem, forced)
        plan = candidate.kernel.compile(problem)
        _plans.put(own_key, plan)
        if plan.is_reference:
            log_once(own_key, "%s serves %s: %s", plan.kernel, problem, _why_reference(problem))
    if key is not None:
        _plans.put(key, plan)
    return plan


def _why_reference(problem: Problem) -> str:
    from fusedconv.registry import registry

    reasons: dict[str, str] = {}
    for candidate in registry().candidates(problem):
        if not candidate.support:
            reasons.setdefault(candidate.kernel.provider, candidate.support.reason)
    return "; ".join(f"{provider}: {reason}" for provider, reason in reasons.items()) or "cheapest"


def explain_problem(problem: Problem) -> Explanation:
    """Which kernel serves a problem, its cost estimate, and why each other one does not."""
    from fusedconv.registry import forced_kernels, registry

    forced = forced_kernels()
    chosen = registry().select(problem, forced)
    assert chosen.cost is not None
    return Explanation(
        problem=problem,
        kernel=chosen.kernel.name,
        provider=chosen.kernel.provider,
        cost=chosen.cost,
        steps=chosen.kernel.compile(problem).steps,
        candidates=tuple(registry().candidates(problem)),
        forced=forced,
    )
