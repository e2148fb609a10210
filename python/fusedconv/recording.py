"""What calls consist of, for ``fusedconv.explain`` and ``fusedconv.record_problems``: problems, and
modules that compose."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fusedconv.describing import described
from fusedconv.device import Device
from fusedconv.problem import BackwardProblem, ForwardProblem, Problem
from fusedconv.replacing import check_replaceable, replacing


class Call(NamedTuple):
    """A problem that was asked for. ``followed`` says why autograd follows torch's operators, which
    then serve it; "" where a plan does."""

    problem: Problem
    device: Device
    followed: str = ""


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
        self._calls: list[Call | Composition] = []

    def note(self, problem: Problem, device: Device) -> None:
        if self.active:
            self._calls.append(Call(problem, device))

    def note_followed(
        self, forward: ForwardProblem, backward: BackwardProblem, device: Device, reason: str
    ) -> None:
        """Says of the problem noted last that autograd follows torch's operators for it, which
        serve its backward pass too."""
        if self.active:
            self._calls.pop()
            self._calls += [Call(each, device, reason) for each in (forward, backward)]

    def note_composition(self, composition: Composition) -> None:
        if self.active:
            self._calls.append(composition)

    def current(self) -> list[Call | Composition] | None:
        """What this thread records into, None where it does not; for ``attached``."""
        return self._calls if self.active else None

    @contextmanager
    def attached(self, calls: list[Call | Composition] | None) -> Iterator[None]:
        """Notes into another thread's recording: autograd's backward passes run in its own."""
        outer = self.active, self._calls
        self.active, self._calls = calls is not None, [] if calls is None else calls
        try:
            yield
        finally:
            self.active, self._calls = outer

    @contextmanager
    def recording(self) -> Iterator[list[Call | Composition]]:
        """Gives what is noted inside, in the order of the calls. A recording around this one goes
        on after it."""
        calls: list[Call | Composition] = []
        with self.attached(calls):
            yield calls


record = _Record()


@contextmanager
def record_problems(file: str | os.PathLike[str] | None = None) -> Iterator[list[Problem]]:
    """Notes the problems of the calls within it, forward and backward: what ``fusedconv tune`` can
    tune before a model is used, and ``fusedconv bench --kernels all`` can time.

    Gives a list that holds them, each once in the order of the calls, when the context ends;
    ``file`` then is replaced by one of them, a JSON object a line, for those commands. It holds for
    calls of this thread and their backward passes. Raises OSError where the file cannot be written,
    before anything is called.
    """
    path = None if file is None else Path(file)
    if path is not None:
        check_replaceable(path)
    found: list[Problem] = []
    with record.recording() as calls:
        yield found
    noted = dict.fromkeys(
        (call.problem, call.device.type) for call in calls if isinstance(call, Call)
    )
    found += dict.fromkeys(problem for problem, _ in noted)
    if path is not None:
        with replacing(path) as lines:
            for problem, device in noted:
                line = {"summary": str(problem), "device": device, "problem": described(problem)}
                lines.write(json.dumps(line) + "\n")
