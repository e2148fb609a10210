"""``fusedconv.explain``: which kernels serve a call, and why."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TextIO

import torch

from fusedconv.plan import Explanation, explain_problem
from fusedconv.problem import Problem
from fusedconv.recording import record


def explain(
    target: Problem | Callable[..., Any], *args: Any, file: TextIO | None = None, **kwargs: Any
) -> list[Explanation]:
    """Prints, for each problem of a call, the chosen kernel, its steps, its estimated cost and why
    each other kernel was not chosen; returns the explanations.

    ``target`` is a Problem, or a module or function that is called once, without gradients, with
    the arguments that follow. ``file`` is where to print, standard output by default.
    """
    if isinstance(target, Problem):
        problems = [target]
    else:
        with torch.no_grad(), record.recording() as problems:
            target(*args, **kwargs)
    explanations = [explain_problem(problem) for problem in dict.fromkeys(problems)]
    for explanation in explanations:
        print(explanation, file=file or sys.stdout)
    return explanations
