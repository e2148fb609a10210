"""What a call allocates and runs, noted meanwhile, so that later ones need not find it out."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor


class Run(NamedTuple):
    """One run of a compiled program on tensors in the order of its slots."""

    program: Any
    tensors: tuple[Tensor | None, ...]
    workspace_bytes: int


class Notes:
    """Of one call. What is allocated is held, so that no two have one address."""

    def __init__(self) -> None:
        self.allocated: list[Tensor] = []
        self.runs: list[Run] = []
        #: Whether the call did nothing else.
        self.complete = True


class _Current(threading.local):
    notes: Notes | None = None


#: The notes that are taken in this thread.
current = _Current()


@contextmanager
def noting() -> Iterator[Notes]:
    notes = Notes()
    before, current.notes = current.notes, notes
    try:
        yield notes
    finally:
        current.notes = before


def did_more() -> None:
    """Says that a call does what a note cannot tell."""
    if current.notes is not None:
        current.notes.complete = False


def note_run(program: Any, tensors: Sequence[Tensor | None], workspace_bytes: int) -> None:
    if current.notes is not None:
        current.notes.runs.append(Run(program, tuple(tensors), workspace_bytes))
