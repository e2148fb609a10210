"""Which problems a call consists of, for ``fusedconv.explain``."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fusedconv.problem import Problem


class _Record(threading.local):
    """Problems noted by the current thread while it records."""

    def __init__(self) -> None:
        self.active = False
        self.problems: list[Problem] = []

    def note(self, problem: Problem) -> None:
        if self.active:
            self.problems.append(problem)

    @contextmanager
    def recording(self) -> Iterator[list[Problem]]:
        self.active, self.problems = True, []
        try:
            yield self.problems
        finally:
            self.active = False


record = _Record()
