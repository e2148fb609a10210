"""``fusedconv.explain``: which kernels serve a call, and why."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fusedconv.arguments import flag, shown
from fusedconv.device import Device, device_record
from fusedconv.plan import Candidate
from fusedconv.problem import BackwardProblem, ForwardProblem, Problem
from fusedconv.recording import Composition, record
from fusedconv.registry import registry
from fusedconv.selection import choose, forced_kernels, plan_of, restricted, winner_of
from fusedconv.training import EVERY_PART, in_torch
from fusedconv.winners import Piece

# ---- a problem -----------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Explanation:
    """Why a plan was chosen; ``str()`` of it is what ``fusedconv.explain`` prints.

    ``kernel`` and ``provider`` join the names where parts of a backward pass have several;
    ``candidates`` are all that compute a part, by part. ``chosen_by`` is "cost", "tuned", the value
    of FUSEDCONV_KERNEL, or "autograd" where both passes of a training step were weighed together
    and autograd follows torch's operators. ``followed`` says why it follows them, "" where
    not. ``times`` are the milliseconds that kernels took where the problem was tuned, by the parts
    computed together and the kernel's name.
    """

    problem: Problem
    device: Device
    kernel: str
    provider: str
    cost: float
    steps: tuple[str, ...]
    chosen: tuple[tuple[tuple[str, ...], Candidate], ...]
    candidates: tuple[tuple[str, tuple[Candidate, ...]], ...]
    chosen_by: str
    times: Mapping[Piece, float] = field(default_factory=dict)
    followed: str = ""

    def __repr__(self) -> str:
        # Short, as shells echo what ``explain`` returns below what it prints.
        return f"<Explanation of {self.problem}, {self.device}: {self.kernel}>"

    def _measured(self, parts: tuple[str, ...], kernel: str) -> str:
        time = self.times.get((parts, kernel))
        return "" if time is None else f", measured {time:.4g} ms"

    def __str__(self) -> str:
        known = {"cost": "", "tuned": ", tuned", "autograd": ", followed by autograd"}
        how = known.get(self.chosen_by, f", forced by {self.chosen_by}")
        lines = [f"{self.problem}, {self.device}"]
        if self.followed:
            lines.append(f"  autograd follows torch's operators: {self.followed}")
        for parts, candidate in self.chosen:
            label = "kernel" if parts == ("forward",) else f"kernel of {', '.join(parts)}"
            lines.append(
                f"  {label}: {candidate.kernel.name} (provider {candidate.kernel.provider}, "
                f"estimated {candidate.cost:.4g} ms{how}"
                f"{self._measured(parts, candidate.kernel.name)})"
            )
        lines += [f"    {number}. {step}" for number, step in enumerate(self.steps, 1)]
        for part, candidates in self.candidates:
            taken = {c.kernel.name for parts, c in self.chosen if part in parts}
            others = [c for c in candidates if c.kernel.name not in taken]
            if others:
                lines.append("  not chosen" + ("" if part == "forward" else f" for {part}") + ":")
            refused: dict[tuple[str, str], list[str]] = {}
            for candidate in others:
                kernel = candidate.kernel
                if candidate.cost is None:
                    alike = refused.setdefault((kernel.provider, candidate.support.reason), [])
                    alike.append(kernel.name)
                    continue
                measured = self._measured((part,), kernel.name)
                lines.append(f"    {kernel.name}: estimated {candidate.cost:.4g} ms{measured}")
            for (provider, reason), names in refused.items():
                more = f" and {len(names) - 1} more of {provider}" if len(names) > 1 else ""
                lines.append(f"    {names[0]}{more}: {reason}")
        return "\n".join(lines)


def explain_problem(problem: Problem, device: Device, followed: str = "") -> Explanation:
    """Which kernel serves a problem, its cost estimate, and why each other one does not.
    ``followed`` says why autograd follows torch's operators for it, "" where it does not."""
    weighed = followed not in ("", EVERY_PART)
    choice = in_torch(problem, device) if weighed else choose(problem, device, forced_kernels())
    kernels = [candidate.kernel for _, candidate in choice.chosen]
    known = registry()
    winner = winner_of(problem, device)
    return Explanation(
        problem=problem,
        device=device,
        kernel=" + ".join(kernel.name for kernel in kernels),
        provider=" + ".join(dict.fromkeys(kernel.provider for kernel in kernels)),
        cost=choice.cost,
        steps=plan_of(choice, device).steps,
        chosen=tuple((piece.parts, candidate) for piece, candidate in choice.chosen),
        candidates=tuple(
            (part, tuple(known.candidates(restricted(problem, (part,)), device)))
            for part in problem.parts
        ),
        chosen_by="autograd" if weighed else choice.by,
        followed=followed,
        times=winner.times if winner is not None and (weighed or choice.by == "tuned") else {},
    )


# ---- a call --------------------------------------------------------------------------------------


def explain(
    target: ForwardProblem | BackwardProblem | Callable[..., Any],
    *args: Any,
    file: TextIO | None = None,
    gradients: bool = False,
    device: Device | None = None,
    **kwargs: Any,
) -> list[Explanation | Composition]:
    """Prints, for each problem of a call, the chosen kernel, its steps, its estimated cost and why
    each other kernel was not chosen; and for each module that calls its children instead, why.
    Returns both, in the order of the calls.

    ``target`` is a problem, or a module or function that is called once with the arguments that
    follow. With ``gradients`` the call is followed by a backward pass from its floating-point
    outputs, which leaves no ``.grad``, and the problems of both are explained; without, gradients
    are off. ``device`` is where a problem would run (``fusedconv.device.KNOWN`` has well-known
    ones), torch's current CUDA device or the processor by default. ``file`` is where to print,
    standard output by default.
    """
    gradients = flag("gradients", gradients)
    if device is not None and not isinstance(device, Device):
        raise TypeError(f"device: got {shown(device)}, expected a fusedconv.Device or None")
    if isinstance(target, ForwardProblem | BackwardProblem):
        if device is None:
            here = "cuda" if torch.cuda.is_available() else "cpu"
            device = device_record(torch.empty(0, device=here).device)
        explanations: list[Explanation | Composition] = [explain_problem(target, device)]
    else:
        if not callable(target):
            raise TypeError(f"target: got {shown(target)}, expected a problem or a callable")
        if device is not None:
            raise ValueError(
                f"device: got {device}, expected None for a call, which runs where its tensors are"
            )
        with torch.set_grad_enabled(gradients), record.recording() as calls:
            result = target(*args, **kwargs)
            if gradients:
                _differentiate(pytree.tree_leaves(result))
        explanations = [
            call if isinstance(call, Composition) else explain_problem(*call)
            for call in dict.fromkeys(calls)
        ]
    for explanation in explanations:
        print(explanation, file=file or sys.stdout)
    return explanations


def _differentiate(results: Iterable[object]) -> None:
    """A backward pass from every result that has one, into no tensor's ``.grad``."""
    outputs = [each for each in results if isinstance(each, Tensor) and each.requires_grad]
    leaves = list(_leaves(outputs))
    if outputs and leaves:
        ones = [torch.ones_like(output) for output in outputs]
        torch.autograd.grad(outputs, leaves, ones, allow_unused=True)


def _leaves(outputs: Iterable[Tensor]) -> Iterator[Tensor]:
    """The tensors that autograd would accumulate gradients in."""
    pending: list[Any] = [output.grad_fn for output in outputs]
    seen = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            yield variable
        pending += [following for following, _ in node.next_functions]
