"""What a call consists of, for ``fusedconv.explain``: problems, and modules that compose."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fusedconv.problem import Problem


@dataclass(frozen=True)
class Composition:
    """A module that called its children, and why; ``str()`` of it is what ``fusedconv.explain``
    prints. ``steps`` are the children and functions that it called, in order."""

    module: str
    reason: str
    steps: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.module} composes its children: {self.reason}"]
        lines += [f"    {number}. {step}" for number, step in enumerate(self.steps, 1)]
        return "\n".join(lines)


class _Record(threading.local):
    """What the current thread notes while it records."""

    def __init__(self) -> None:
        self.active = False
        #: In the order of the calls.
        self.calls: list[Problem | Composition] = []
        #: The problems among them.
        self.problems: list[Problem] = []

    def note(self, call: Problem | Composition) -> None:
        if self.active:
            self.calls.append(call)
            if isinstance(call, Problem):
                self.problems.append(call)

    @contextmanager
    def recording(self) -> Iterator[list[Problem]]:
        self.active, self.calls, self.problems = True, [], []
        try:
            yield self.problems
        finally:
            self.active = False


record = _Record()
