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
        self._calls: list[Problem | Composition] = []

    def note(self, call: Problem | Composition) -> None:
        if self.active:
            self._calls.append(call)

    @contextmanager
    def recording(self) -> Iterator[list[Problem | Composition]]:
        """Gives what is noted inside, in the order of the calls. A recording around this one goes
        on after it."""
        outer = self.active, self._calls
        self.active, self._calls = True, []
        try:
            yield self._calls
        finally:
            self.active, self._calls = outer


record = _Record()
