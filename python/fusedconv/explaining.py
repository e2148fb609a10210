"""``fusedconv.explain``: which kernels serve a call, and why."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fusedconv.arguments import flag, shown
from fusedconv.device import Device, device_record
from fusedconv.problem import BackwardProblem, ForwardProblem
from fusedconv.recording import Composition, record
from fusedconv.selection import Explanation, explain_problem


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
    outputs, which leaves no ``.grad``, and the problems of both are explained (torch's operators,
    where they serve the forward pass, autograd differentiates by itself); without, gradients
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
