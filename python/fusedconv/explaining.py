"""``fusedconv.explain``: which kernels serve a call, and why."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TextIO

import torch

from fusedconv.arguments import shown
from fusedconv.plan import Explanation, explain_problem
from fusedconv.problem import Problem
from fusedconv.recording import Composition, record


def explain(
    target: Problem | Callable[..., Any], *args: Any, file: TextIO | None = None, **kwargs: Any
) -> list[Explanation | Composition]:
    """Prints, for each problem of a call, the chosen kernel, its steps, its estimated cost and why
    each other kernel was not chosen; and for each module that calls its children instead, why.
    Returns both, in the order of the calls.

    ``target`` is a Problem, or a module or function that is called once, without gradients, with
    the arguments that follow. ``file`` is where to print, standard output by default.
    """
    calls: list[Problem | Composition]
    if isinstance(target, Problem):
        calls = [target]
    else:
        if not callable(target):
            raise TypeError(f"target: got {shown(target)}, expected a Problem or a callable")
        with torch.no_grad(), record.recording() as calls:
            target(*args, **kwargs)
    explanations = [
        explain_problem(call) if isinstance(call, Problem) else call
        for call in dict.fromkeys(calls)
    ]
    for explanation in explanations:
        print(explanation, file=file or sys.stdout)
    return explanations
