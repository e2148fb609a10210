"""What ``fusedconv bench`` shows while it measures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from fusedconv import benchmark

Line = Callable[[dict[str, Any]], str]


class _Lines(benchmark.Observer):
    """A line for each record."""

    def __init__(self, line: Line) -> None:
        self.line = line

    def measured(self, record: dict[str, Any], share: float) -> None:
        click.echo(self.line(record))


class _Bar(benchmark.Observer):
    """The same lines above a bar with what is being measured, the count and the remaining time."""

    def __init__(self, line: Line, progress: Progress) -> None:
        self.line, self.progress = line, progress
        self.task = progress.add_task("rates", total=1.0, done=0, count=0)

    def planned(self, count: int) -> None:
        self.progress.update(self.task, count=count)

    def began(self, title: str) -> None:
        self.progress.update(self.task, description=escape(title))

    def measured(self, record: dict[str, Any], share: float) -> None:
        self.progress.console.print(self.line(record), markup=False, highlight=False)
        done = self.progress.tasks[self.task].fields["done"] + 1
        self.progress.update(self.task, completed=share, done=done)


@contextmanager
def observer(console: Console, line: Line) -> Iterator[benchmark.Observer]:
    """A bar on a terminal, lines anywhere else; ``line`` gives that of a record."""
    if not console.is_terminal:
        yield _Lines(line)
        return
    # What does not fit is cut from the description, not from the times.
    columns = (
        TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True)),
        BarColumn(bar_width=16),
        TextColumn("{task.fields[done]}/{task.fields[count]}", table_column=Column(no_wrap=True)),
        TimeElapsedColumn(table_column=Column(no_wrap=True, min_width=7)),
        TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=7)),
    )
    # What is measured differs: the speed of the last minutes says more than that of the last
    # seconds. The bar is drawn seldom, as drawing takes time of a processor that may be what is
    # measured.
    with Progress(
        *columns, console=console, speed_estimate_period=600, refresh_per_second=1, expand=True
    ) as progress:
        yield _Bar(line, progress)
