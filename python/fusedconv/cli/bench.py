"""``fusedconv bench``: the benchmark, with its progress."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fusedconv import benchmark
from fusedconv.cli.options import check_forced, console, integers, naming_options


def _choices(values: Iterable[str]) -> dict[str, Any]:
    return {"type": click.Choice(tuple(values)), "multiple": True}


def _workloads(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> tuple[str, ...]:
    chosen: dict[str, None] = {}
    for value in values:
        fitting = fnmatch.filter(benchmark.WORKLOADS, value)
        if not fitting:
            raise click.BadParameter(
                f"got {value!r}, expected a workload or a pattern that fits one: "
                + ", ".join(benchmark.WORKLOADS)
            )
        chosen |= dict.fromkeys(fitting)
    return tuple(chosen)


def _device(context: click.Context, parameter: click.Parameter, value: str | None) -> torch.device:
    if value == "cuda" and not torch.cuda.is_available():
        raise click.BadParameter("got 'cuda', expected 'cpu' as torch finds no GPU")
    return torch.device(value) if value else benchmark.default_device()


def _summary(record: dict[str, Any]) -> str:
    name = f"{benchmark.Cell.of(record).title} {record['contender']}"
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

    def began(self, cell: benchmark.Cell, contenders: str) -> None:
        self.progress.update(self.task, description=f"{cell.title} {contenders}")

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
    # Cells differ: the speed of the last minutes says more than that of the last seconds. The bar
    # is drawn seldom, as drawing takes time of a processor that may be what is measured.
    with Progress(
        *columns, console=console, speed_estimate_period=600, refresh_per_second=1
    ) as progress:
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


def _by_suite(field: str, text: str) -> str:
    """The help of an option whose default is a field of the suite."""
    defaults = (
        f"{getattr(suite, field)} of {name} on {kind}"
        for name, suites in benchmark.SUITES.items()
        for kind, suite in suites.items()
    )
    return f"{text}; by default {', '.join(defaults)}."


def _number(
    context: click.Context, parameter: click.Parameter, value: float | None
) -> float | None:
    # Every comparison of click's range lets NaN through.
    if value is not None and math.isnan(value):
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
@click.option(
    "--suite",
    type=click.Choice(tuple(benchmark.SUITES)),
    default=benchmark.DEFAULT_SUITE,
    show_default=True,
    help="What is measured by default: the systems (and on a processor GroupNorm), or layers of "
    "published models.",
)
@click.option(
    "--device",
    type=click.Choice(tuple(benchmark.SUITES[benchmark.DEFAULT_SUITE])),
    callback=_device,
    help="CUDA where there is a GPU by default.",
)
@click.option(
    "--workload",
    "workloads",
    metavar="NAME",
    multiple=True,
    callback=_workloads,
    help="Or a pattern, as group_norm_*; by default the suite's.",
)
@click.option(
    "--precision",
    "precisions",
    **_choices(benchmark.PRECISIONS),
    help="By default the suite's.",
)
@click.option("--layout", "layouts", **_choices(benchmark.LAYOUTS), default=benchmark.LAYOUTS)
@click.option("--pass", "passes", **_choices(benchmark.PASSES), help="By default the suite's.")
@click.option(
    "--contender",
    "contenders",
    **_choices(benchmark.CONTENDERS),
    help="By default the suite's.",
)
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
    help=_by_suite("seconds", "Of timing per record"),
)
@click.option(
    "--least", type=click.IntRange(min=1), help=_by_suite("least", "Repetitions at least")
)
@click.option("--small", is_flag=True, help="Sizes that run in moments.")
@click.option("--commit", help="What the header says; git's HEAD by default.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    callback=_writable,
    help="JSON to write or to add to.",
)
@click.option(
    "--resume", is_flag=True, help="Leave out the cells that the output holds of this commit."
)
def bench(**options: Any) -> None:
    """Times systems, layers or GroupNorm with activations next to eager and others.

    On a GPU each contender runs in processes of its own, on a processor they take turns in one.
    """
    check_forced()
    device: torch.device = options["device"]
    suite = benchmark.SUITES[options["suite"]][device.type]
    if options["devices"] is not None and device.type != "cuda":
        raise click.BadParameter(
            "got ordinals, expected none for a processor", param_hint="'--devices'"
        )
    if options["resume"] and options["output"] is None:
        raise click.BadParameter(
            "got no --output, expected the file to resume", param_hint="'--resume'"
        )
    for name in ("workloads", "precisions", "passes", "contenders"):
        options[name] = options[name] or getattr(suite, name)
    with naming_options():
        cells = benchmark.select_cells(
            options["workloads"],
            options["precisions"],
            options["layouts"],
            options["passes"],
            device.type,
        )
        benchmark.jobs(options["contenders"], cells, 1, suite.seconds, device.type)
    output: Path | None = options["output"]
    with _observer(console()) as observer:
        records = benchmark.run(observer=observer, **options)
    if output is not None and output.exists():
        records = benchmark.read(output)
    for line in benchmark.lines(records):
        click.echo(line)
