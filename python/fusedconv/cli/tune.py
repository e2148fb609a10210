"""``fusedconv tune`` and ``fusedconv cache``: kernels chosen by their times, and what is kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import torch
from rich.markup import escape
from rich.table import Table

from fusedconv import benchmark, winners
from fusedconv.benchmark.cells import Cell
from fusedconv.benchmark.measuring import prepare
from fusedconv.cli.explain import explain, problems
from fusedconv.cli.options import check_forced, console
from fusedconv.device import device_record
from fusedconv.models import SIZES
from fusedconv.problem import Problem
from fusedconv.recording import Composition, record
from fusedconv.selection import explain_problem, forced_kernels
from fusedconv.tuning import autotune, tune_problem


def _options(fields: dict[str, Any]) -> list[str]:
    """A line of a file of shapes, as arguments of ``explain``."""
    arguments = []
    for name, value in fields.items():
        if value is True:
            arguments.append(f"--{name}")
        elif value is False:
            arguments.append(f"--no-{name}")
        else:
            values = value if isinstance(value, list) else [value]
            arguments += [f"--{name}", ",".join(map(str, values))]
    return arguments


def _of_file(path: Path, device: torch.device) -> Iterator[Problem]:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            if not isinstance(fields, dict):
                raise ValueError(f"got {fields!r}, expected an object")
            arguments = [*_options(fields), "--device", device.type]
            with explain.make_context("explain", arguments) as context:
                yield from problems(context, **context.params)
        except (ValueError, click.UsageError) as error:
            message = error.format_message() if isinstance(error, click.UsageError) else error
            raise click.BadParameter(f"line {number}: {message}", param_hint="'FILE'") from error


def _of_cell(cell: Cell, device: torch.device, size: str) -> Iterator[Problem]:
    """The problems of a cell, tuned by running it."""
    setup = prepare(cell, device, size)
    model = benchmark.CONTENDERS["fusedconv"].build(setup.workload, setup.original)
    x = setup.inputs[0].requires_grad_(setup.grad is not None)
    with benchmark.precision_mode(cell.precision), autotune(), record.recording() as calls:
        with torch.set_grad_enabled(setup.grad is not None):
            output = model(x)
        if setup.grad is not None:
            output.backward(setup.grad)
    for call in dict.fromkeys(calls):
        if not isinstance(call, Composition):
            yield call[0]


@click.command()
@click.argument(
    "file", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option(
    "--suite",
    type=click.Choice(tuple(benchmark.SUITES)),
    help=f"Problems of a benchmark's workloads; {benchmark.DEFAULT_SUITE} without FILE.",
)
@click.option(
    "--device",
    type=click.Choice(("cuda", "cpu")),
    help="CUDA where there is a GPU by default.",
)
@click.option("--size", type=click.Choice(SIZES), help="Of the workloads; the suite's by default.")
def tune(file: Path | None, suite: str | None, device: str | None, size: str | None) -> None:
    """Times every kernel of each problem and keeps the fastest for later processes.

    Each line of FILE is a JSON object of `fusedconv explain`'s options, as {"in-channels": 32,
    "spatial": [16, 16], "gradients": true}.
    """
    check_forced()
    if forced_kernels() is not None:
        raise click.ClickException("FUSEDCONV_KERNEL is set, which leaves nothing to tune")
    if file is not None and suite is not None:
        raise click.BadParameter("got FILE too, expected one of both", param_hint="'--suite'")
    if device == "cuda" and not torch.cuda.is_available():
        raise click.BadParameter("torch sees no CUDA device", param_hint="'--device'")
    where = benchmark.default_device() if device is None else torch.device(device)
    for problem in _tuned(file, suite or benchmark.DEFAULT_SUITE, where, size):
        explanation = explain_problem(problem, device_record(where))
        click.echo(f"{problem}: {explanation.kernel} ({explanation.chosen_by})")


def _tuned(
    file: Path | None, suite: str, device: torch.device, size: str | None
) -> Iterator[Problem]:
    """Problems, each tuned before it is given."""
    if file is not None:
        for problem in _of_file(file, device):
            tune_problem(problem, device)
            yield problem
        return
    chosen = benchmark.SUITES[suite][device.type]
    cells = benchmark.select_cells(
        chosen.workloads, chosen.precisions, passes=chosen.passes, device=device.type
    )
    for cell in cells:
        yield from _of_cell(cell, device, size or chosen.size)


@click.group()
def cache() -> None:
    """What was tuned and is kept for later processes."""


@cache.command("path")
def path() -> None:
    """Where it is kept; FUSEDCONV_CACHE_DIR names another folder."""
    click.echo(str(winners.path()))


@cache.command()
def show() -> None:
    """The problems and their kernels, with their times."""
    table = Table("problem", "device", "versions", "kernel", "milliseconds", "others")
    for entry in winners.entries().values():
        winner = entry.winner
        times = [winner.times[piece] for piece in winner.pieces if piece in winner.times]
        rivals = [
            f"{name} {time:.4g}"
            for (parts, name), time in winner.times.items()
            if (parts, name) not in winner.pieces
        ]
        row = (
            entry.summary,
            entry.device,
            ", ".join(f"{name} {version}" for name, version in entry.versions.items() if version),
            " + ".join(name for _, name in winner.pieces),
            f"{sum(times):.4g}",
            ", ".join(rivals),
        )
        table.add_row(*map(escape, row))
    console().print(table)


@cache.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def export(file: Path) -> None:
    """Writes what is kept to FILE, for `fusedconv cache import` elsewhere."""
    entries = winners.entries()
    try:
        winners.write(file, entries)
    except OSError as error:
        raise click.ClickException(f"{file}: {error}") from error
    click.echo(f"{len(entries)} problems")


@cache.command("import")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def import_(file: Path) -> None:
    """Adds what FILE holds, in place of what is kept of the same problems."""
    try:
        added = winners.read(file)
        winners.change(lambda known: {**known, **added})
    except (winners.DamagedFileError, OSError) as error:
        raise click.ClickException(f"{file}: {error}") from error
    click.echo(f"{len(added)} problems")


@cache.command()
def clear() -> None:
    """Forgets everything."""
    try:
        winners.change(lambda known: {})
    except OSError as error:
        raise click.ClickException(str(error)) from error
