"""``fusedconv bench``: the benchmark, with its progress."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fusedconv import benchmark
from fusedconv.cli.options import check_forced, console, integers, naming_options
from fusedconv.models import SYSTEMS


def _choices(values: tuple[str, ...]) -> dict[str, Any]:
    return {"type": click.Choice(values), "multiple": True, "default": values}


def _cell_name(cell: benchmark.Cell, contender: str) -> str:
    return f"{cell.workload} {cell.pass_} {cell.precision} {cell.layout} {contender}"


def _summary(record: dict[str, Any]) -> str:
    name = _cell_name(benchmark.Cell.of(record), record["contender"])
    if record["median_ms"] is None:
        return f"{name}: {record['error']}"
    floor = record["floor_ms"]
    share = f", {floor / record['median_ms']:.0%} of the floor" if floor else ""
    return (
        f"{name}: {record['median_ms']:.4f} ms ({record['p10_ms']:.4f} to "
        f"{record['p90_ms']:.4f}){share}, error {record['error_fp64']:.2e}, {record['kernel']}"
    )


class _Lines(benchmark.Observer):
    """A line for each record."""

    def measured(self, record: dict[str, Any], share: float) -> None:
        click.echo(_summary(record))


class _Bar(benchmark.Observer):
    """The same lines above a bar with the cell, the count and the remaining time."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.task = progress.add_task("rates", total=1.0, done=0, count=0)

    def planned(self, count: int) -> None:
        self.progress.update(self.task, count=count)

    def began(self, cell: benchmark.Cell, contender: str) -> None:
        self.progress.update(self.task, description=_cell_name(cell, contender))

    def measured(self, record: dict[str, Any], share: float) -> None:
        self.progress.console.print(_summary(record), markup=False, highlight=False)
        done = self.progress.tasks[self.task].fields["done"] + 1
        self.progress.update(self.task, completed=share, done=done)


@contextmanager
def _observer(console: Console) -> Iterator[benchmark.Observer]:
    """A bar on a terminal, lines anywhere else."""
    if not console.is_terminal:
        yield _Lines()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[done]}/{task.fields[count]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    # Cells differ: the speed of the last minutes says more than that of the last seconds.
    with Progress(*columns, console=console, speed_estimate_period=600) as progress:
        yield _Bar(progress)


def _writable(
    context: click.Context, parameter: click.Parameter, value: Path | None
) -> Path | None:
    if value is not None:
        try:
            benchmark.check_writable(value)
        except OSError as error:
            raise click.BadParameter(
                f"got {str(value)!r}, expected a file that can be written: {error.strerror}"
            ) from error
        except ValueError as error:
            raise click.BadParameter(str(error).removeprefix("output: ")) from error
    return value


def _number(context: click.Context, parameter: click.Parameter, value: float) -> float:
    # Every comparison of click's range lets NaN through.
    if math.isnan(value):
        raise click.BadParameter(f"got {value}, expected a number")
    return value


def _ordinals(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    if value is None:
        return None
    ordinals = integers(context, parameter, value, 0)
    count = torch.cuda.device_count()
    if not ordinals or len(set(ordinals)) != len(ordinals) or max(ordinals) >= count:
        raise click.BadParameter(
            f"got {value!r}, expected different ordinals below {count}, the number of CUDA devices"
        )
    return ordinals


@click.command()
@click.option("--workload", "workloads", **_choices(tuple(SYSTEMS)))
@click.option("--precision", "precisions", **_choices(benchmark.PRECISIONS))
@click.option("--layout", "layouts", **_choices(benchmark.LAYOUTS))
@click.option("--pass", "passes", **_choices(benchmark.PASSES))
@click.option("--contender", "contenders", **_choices(tuple(benchmark.CONTENDERS)))
@click.option(
    "--devices",
    metavar="INTEGERS",
    callback=_ordinals,
    help="CUDA ordinals between commas, to measure on at the same time; the first by default.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0, 3600),
    callback=_number,
    default=0.5,
    show_default=True,
    help="Of timing per record.",
)
@click.option(
    "--least",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="Repetitions at least.",
)
@click.option("--small", is_flag=True, help="Sizes for a processor.")
@click.option("--commit", help="What the header says; git's HEAD by default.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    callback=_writable,
    help="JSON to write or to add to.",
)
def bench(small: bool, **options: Any) -> None:
    """Times the systems next to eager, torch.compile and a pure rewrite.

    Each contender runs in processes of its own.
    """
    check_forced()
    chosen = (options[name] for name in ("workloads", "precisions", "layouts", "passes"))
    with naming_options():
        benchmark.jobs(
            options["contenders"], benchmark.select_cells(*chosen), 1, options["seconds"]
        )
    with _observer(console()) as observer:
        benchmark.run(small=small or not torch.cuda.is_available(), observer=observer, **options)
