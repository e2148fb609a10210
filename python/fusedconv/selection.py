"""From a problem to its plan: forced by name, else tuned, else of the lowest cost; and the cache.

A forward pass is one part and has one kernel. The parts of a backward pass are divided among
kernels, each of which may take several, so that the sum of their costs is the least.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby
from typing import Any, overload

from torch import Tensor
from torch.autograd import profiler

from fusedconv import _C, winners
from fusedconv.checking import compiled
from fusedconv.device import Device
from fusedconv.errors import NoKernelError
from fusedconv.noting import did_more
from fusedconv.plan import (
    BackwardPlan,
    BackwardTensors,
    Candidate,
    ForwardPlan,
    Gradients,
    JoinedPlan,
    Outputs,
    Plan,
)
from fusedconv.problem import BackwardProblem, ForwardProblem, Problem
from fusedconv.registry import FORCE_VARIABLE, Registry, registry
from fusedconv.winners import Winner

logger = logging.getLogger("fusedconv")

#: Entries of the plan cache, the least recently used out first. A call takes three: one under its
#: arguments' metadata, one by which it is known again, and one under its problem, which calls with
#: other metadata may share. Entries of 0.6 to 8 KB were measured, so that the cache stays near 30
#: MB at most, whatever shapes come.
CACHE_ENTRIES = 4096
#: Calls that are known sooner, by a tensor of theirs; they may be kept for longer than the cache
#: keeps their plans.
LATEST_CALLS = 512


class Recent:
    """At most ``capacity`` entries, the least recently used out first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._entries: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Any:
        entry = self._entries.get(key)
        if entry is not None:
            try:  # noqa: SIM105 - contextlib.suppress takes longer than the rest of a look-up
                self._entries.move_to_end(key)
            except KeyError:
                pass  # another thread put it out just now; the entry itself is still good
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


_plans = Recent(CACHE_ENTRIES)
_logged = Recent(CACHE_ENTRIES)
_tuned: dict[tuple[Problem, Device], Winner] = {}
_latest: dict[int, Any] = {}

#: The plan of a call seen before, None otherwise.
cached: Callable[[Hashable], Any] = _plans.get

#: Keeps a plan, or what holds one, for ``cached``.
keep: Callable[[Hashable, Any], None] = _plans.put


def latest_calls() -> dict[int, Any]:
    """What was kept last under the identity of a tensor, which another object may have by now. A
    call that looks there keeps into the same one: what is forgotten meanwhile stays forgotten."""
    return _latest


def keep_latest(calls: dict[int, Any], identity: int, entry: Any) -> None:
    """Keeps a plan, or what holds one, in what ``latest_calls`` returned."""
    if len(calls) >= LATEST_CALLS:
        calls.clear()
    calls[identity] = entry


def _forget_plans() -> None:
    global _latest
    _plans.clear()
    _latest = {}


def clear_cache() -> None:
    """Forgets every plan; the next call of each problem selects anew, and reads anew what other
    processes have tuned."""
    _forget_plans()
    _logged.clear()
    winners.forget()


def log_once(key: Hashable, message: str, *arguments: object) -> None:
    """Logs at INFO on the logger ``fusedconv`` unless the same key was logged lately."""
    if _logged.get(key) is None:
        _logged.put(key, True)
        logger.info(message, *arguments)


def forced_kernels() -> str | None:
    """What FUSEDCONV_KERNEL restricts the choice to, None where it is unset or empty."""
    # Asked for at every call: os.environ takes five times as long.
    return _C.environment_variable(FORCE_VARIABLE) or None


def tune(problem: Problem, device: Device, kernels: Sequence[str] | None) -> None:
    """Records which kernel was measured to be the fastest for each of the problem's parts, in their
    order; None forgets it. The choice holds where FUSEDCONV_KERNEL is silent and the kernels serve
    the problem; a log line says where they do not. Raises ValueError where names and parts differ
    in number."""
    if kernels is None:
        _tuned.pop((problem, device), None)
    elif isinstance(kernels, str) or len(kernels) != len(problem.parts):
        raise ValueError(f"kernels: got {kernels!r}, expected a name for each of {problem.parts}")
    else:
        groups = groupby(zip(kernels, problem.parts, strict=True), key=lambda pair: pair[0])
        named = tuple((tuple(part for _, part in group), name) for name, group in groups)
        _tuned[problem, device] = Winner(named)
    _forget_plans()


def keep_winner(problem: Problem, device: Device, winner: Winner) -> None:
    """As ``tune``, with the parts that a kernel computes together and the times of all."""
    _tuned[problem, device] = winner
    _forget_plans()


# ---- choosing ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """Which kernel computes which parts of a problem, in the order in which they run.

    ``by`` is what decided: "cost", "tuned", or the value of FUSEDCONV_KERNEL.
    """

    chosen: tuple[tuple[Problem, Candidate], ...]
    by: str

    @property
    def cost(self) -> float:
        return sum(candidate.cost or 0.0 for _, candidate in self.chosen)


def restricted(problem: Problem, parts: Sequence[str]) -> Problem:
    return problem if isinstance(problem, ForwardProblem) else problem.part(parts)


def _admissible(
    found: list[Candidate], parts: Sequence[str], forced: str | None, known: Registry
) -> list[Candidate]:
    """The candidates that FUSEDCONV_KERNEL leaves. Names restrict a part of a pass only where one
    of them computes it: a convolution's name says nothing of gradients that it does not have, nor a
    gradient's of the forward pass."""
    if not forced:
        return found
    names = known.forced_names(forced)

    able = {part for k in known.kernels() if k.is_named(names) for part in k.computes - k.beside}
    if not able & set(parts):
        return found
    return [candidate for candidate in found if candidate.kernel.is_named(names)]


def pieces(
    problem: Problem, device: Device, known: Registry | None = None
) -> dict[tuple[str, ...], tuple[Problem, list[Candidate]]]:
    """The problem restricted to each choice of its parts, and the candidates for that."""
    known = registry() if known is None else known
    result = {}
    for count in range(1, len(problem.parts) + 1):
        for subset in combinations(problem.parts, count):
            piece = restricted(problem, subset)
            result[subset] = piece, known.candidates(piece, device)
    return result


def division(
    parts: tuple[str, ...], costs: Mapping[tuple[str, ...], float]
) -> tuple[tuple[str, ...], ...] | None:
    """The cheapest division of parts into those that have a cost together, in the order of their
    first parts; None where there is none."""
    best: dict[tuple[str, ...], tuple[float, tuple[tuple[str, ...], ...]]] = {(): (0, ())}
    for end in range(1, len(parts) + 1):
        for wanted in combinations(parts, end):
            options = []
            for count in range(1, end + 1):
                # The first part is in some piece; the pieces are in the order of their first parts.
                for more in combinations(wanted[1:], count - 1):
                    subset = (wanted[0], *more)
                    rest = tuple(part for part in wanted if part not in subset)
                    if subset in costs and rest in best:
                        total, after = best[rest]
                        options.append((costs[subset] + total, (subset, *after)))
            if options:
                best[wanted] = min(options, key=lambda option: option[0])
    return best[parts][1] if parts in best else None


def _by_cost(problem: Problem, device: Device, forced: str | None, known: Registry) -> Choice:
    """The cheapest division of the parts among admissible kernels."""
    cheapest: dict[tuple[str, ...], tuple[Problem, Candidate]] = {}
    costs: dict[tuple[str, ...], float] = {}
    refused: list[Candidate] = []
    for subset, (piece, candidates) in pieces(problem, device, known).items():
        found = _admissible(candidates, subset, forced, known)
        if found and found[0].support:
            cheapest[subset] = piece, found[0]
            assert found[0].cost is not None
            costs[subset] = found[0].cost
        elif len(subset) == 1:
            refused += found
    divided = division(problem.parts, costs)
    if divided is None:
        reasons = "\n".join(f"  {c.kernel.name}: {c.support.reason}" for c in refused)
        scope = f" among {forced}" if forced else ""
        raise NoKernelError(f"no kernel{scope} serves {problem} on {device}:\n{reasons}")
    return Choice(tuple(cheapest[subset] for subset in divided), forced or "cost")


def winner_of(problem: Problem, device: Device) -> Winner | None:
    """What was measured in this process, else in another one."""
    return _tuned.get((problem, device)) or winners.kept(problem, device)


def _by_tuning(problem: Problem, device: Device, known: Registry) -> Choice | None:
    """What was measured, None where nothing was or a kernel does not serve the problem."""
    winner = winner_of(problem, device)
    if winner is None:
        return None
    chosen = []
    for parts, name in winner.pieces:
        if not parts or not set(parts) <= set(problem.parts):
            why = "the problem has other parts"
        else:
            piece = restricted(problem, parts)
            found = [c for c in known.candidates(piece, device) if c.kernel.name == name]
            if found and found[0].support:
                chosen.append((piece, found[0]))
                continue
            why = found[0].support.reason if found else "no kernel that computes this has the name"
        message = "tuned kernel %s is passed over for %s of %s on %s: %s"
        key = (name, parts, problem, device)
        log_once(key, message, name, ", ".join(parts), problem, device, why)
        return None
    # In the order that ``division`` has, in which what others read comes first.
    taken = [part for piece, _ in chosen for part in piece.parts]
    if sorted(taken) != sorted(problem.parts):
        log_once(
            (problem, device, "parts"),
            "tuned kernels are passed over for %s: they compute %s",
            problem,
            ", ".join(taken),
        )
        return None
    chosen.sort(key=lambda pair: problem.parts.index(pair[0].parts[0]))
    return Choice(tuple(chosen), "tuned")


def is_tuned(problem: Problem, device: Device) -> bool:
    """Whether kernels that were measured serve a problem."""
    return _by_tuning(problem, device, registry()) is not None


def choose(
    problem: Problem,
    device: Device,
    forced: str | None = None,
    known: Registry | None = None,
    tuned: bool = True,
) -> Choice:
    """Which kernels compute a problem: forced, else tuned, else of the lowest cost.

    ``forced`` restricts the choice to the named kernels or providers, as FUSEDCONV_KERNEL does.
    ``tuned`` False passes over what was tuned.
    Raises NoKernelError with each candidate's reason where none is left.
    """
    known = registry() if known is None else known
    if tuned and not forced:
        choice = _by_tuning(problem, device, known)
        if choice is not None:
            return choice
    return _by_cost(problem, device, forced, known)


def _compiled(choice: Choice, device: Device) -> list[Plan]:
    """The plans of a choice's pieces."""
    return [compiled(candidate.kernel, piece, device) for piece, candidate in choice.chosen]


def _joined(plans: Sequence[Plan]) -> Plan:
    if len(plans) == 1:
        return plans[0]
    return JoinedPlan([plan for plan in plans if isinstance(plan, BackwardPlan)])


def plan_of(choice: Choice, device: Device) -> Plan:
    """The plan of a choice, in no cache."""
    return _joined(_compiled(choice, device))


@overload
def plan_for(
    problem: ForwardProblem, device: Device, key: Hashable | None = None
) -> ForwardPlan: ...


@overload
def plan_for(
    problem: BackwardProblem, device: Device, key: Hashable | None = None
) -> BackwardPlan: ...


def plan_for(problem: Problem, device: Device, key: Hashable | None = None) -> Any:
    """The plan of a problem, from the cache or chosen; cached under ``key`` too.

    Raises NoKernelError where nothing admissible serves it. Logs once per problem, at INFO, where
    the reference provider serves what a kernel of ours was asked for.
    """
    forced = forced_kernels()
    own_key = (problem, device, forced)
    plan = _plans.get(own_key)
    if plan is None:
        choice = choose(problem, device, forced)
        plans = _compiled(choice, device)
        plan = _joined(plans)
        _plans.put(own_key, plan)
        for (piece, _), part in zip(choice.chosen, plans, strict=True):
            if part.is_reference:
                why = _why_reference(piece, device, part.kernel, choice.by)
                log_once(
                    (piece, device, forced),
                    "%s serves %s on %s: %s",
                    part.kernel,
                    piece,
                    device,
                    why,
                )
    if key is not None:
        _plans.put(key, plan)
    return plan


def _why_reference(problem: Problem, device: Device, reference: str, by: str) -> str:
    """Why the kernel called ``reference`` serves a problem; ``by`` as in ``Choice``."""
    candidates = registry().candidates(problem, device)
    others = [candidate for candidate in candidates if candidate.kernel.name != reference]
    if not others:
        return "no other kernel computes that"
    parts = []
    if others[0].support:  # those come first, by cost
        name = others[0].kernel.name
        known = {"cost": f"is estimated to take less time than {name}", "tuned": "was tuned"}
        parts.append(known.get(by, f"{FORCE_VARIABLE}={by}"))
    # A provider that serves it by one kernel does not refuse it by others.
    serving = {each.kernel.provider for each in others if each.support}
    reasons: dict[str, str] = {}
    for each in others:
        if each.kernel.provider not in serving:
            reasons.setdefault(each.kernel.provider, each.support.reason)
    return "; ".join([*parts, *(f"{name}: {reason}" for name, reason in reasons.items())])


# ---- running -------------------------------------------------------------------------------------


def run(
    plan: ForwardPlan,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
) -> Outputs:
    """``plan.run`` under a range named after the kernel, where a profiler records."""
    if not plan.only_launches:
        did_more()
    if profiler._is_profiler_enabled:
        with profiler.record_function(f"fusedconv::{plan.kernel}"):
            return plan.run(input, weight, bias, norm_weight, norm_bias)
    return plan.run(input, weight, bias, norm_weight, norm_bias)


def run_backward(plan: BackwardPlan, tensors: BackwardTensors) -> Gradients:
    """The same for a backward plan."""
    if not plan.only_launches:
        did_more()
    if profiler._is_profiler_enabled:
        with profiler.record_function(f"fusedconv::{plan.kernel}"):
            return plan.run(tensors)
    return plan.run(tensors)
