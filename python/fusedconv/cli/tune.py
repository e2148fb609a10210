"""``fusedconv tune`` and ``fusedconv cache``: kernels chosen by their times, and what is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import click
import torch
from rich.markup import escape
from rich.table import Column, Table

from fusedconv import benchmark, winners
from fusedconv.cli.options import check_settings, console, one_line
from fusedconv.cli.shapes import problems_of_file
from fusedconv.device import device_record
from fusedconv.explaining import explain_problem
from fusedconv.models import SIZES
from fusedconv.problem import Problem
from fusedconv.selection import forced_kernels
from fusedconv.tuning import tune_problem


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
    "spatial": [16, 16], "gradients": true}, or one that fusedconv.record_problems has written of a
    model's calls. Fails where a problem could not be timed or kept.
    """
    check_settings()
    if forced_kernels() is not None:
        raise click.ClickException("FUSEDCONV_KERNEL is set, which leaves nothing to tune")
    if file is not None and suite is not None:
        raise click.BadParameter("got FILE too, expected one of both", param_hint="'--suite'")
    if file is not None and size is not None:
        raise click.BadParameter(
            "expected none with FILE, whose lines say it", param_hint="'--size'"
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise click.BadParameter("torch sees no CUDA device", param_hint="'--device'")
    where = benchmark.default_device() if device is None else torch.device(device)
    record = device_record(where)
    if file is not None:
        asked: Iterable[Problem] = problems_of_file(file, where, "'FILE'")
    else:
        asked = _of_suite(suite or benchmark.DEFAULT_SUITE, where, size)
    tuned: dict[Problem, bool] = {}
    for problem in asked:
        if problem in tuned:
            continue
        timed = tune_problem(problem, where)
        tuned[problem] = bool(timed) and winners.kept(problem, record) is not None
        explanation = explain_problem(problem, record)
        line = f"{problem}: {explanation.kernel} ({explanation.chosen_by})"
        if not tuned[problem]:
            line += ", not kept" if timed else f", not tuned: {one_line(timed.reason)}"
        click.echo(line)
    lost = sum(not each for each in tuned.values())
    if lost:
        raise click.ClickException(
            f"{lost} of {len(tuned)} problems could not be timed or kept in {winners.path()}"
        )


def _of_suite(suite: str, device: torch.device, size: str | None) -> Iterator[Problem]:
    """Problems of a suite's workloads; those that can be are tuned by the calls that ask them, as
    what a call asks next may depend on that."""
    chosen = benchmark.SUITES[suite][device.type]
    cells = benchmark.select_cells(
        chosen.workloads, chosen.precisions, passes=chosen.passes, device=device.type
    )
    for cell in cells:
        yield from benchmark.cell_problems(cell, device, size or chosen.size, tuned=True)


@click.group()
def cache() -> None:
    """What was tuned and is kept for later processes."""


def _of_file(file: Path, error: Exception) -> click.ClickException:
    """An error of reading or writing a file, as a command's."""
    why = error.strerror if isinstance(error, OSError) else None
    return click.ClickException(f"{file}: {why or error}")


def _change(changed: Callable[[dict[str, winners.Entry]], dict[str, winners.Entry]]) -> None:
    """``winners.change``, as a command does it."""
    try:
        winners.change(changed)
    except OSError as error:
        raise _of_file(winners.path(), error) from error


def _kept() -> dict[str, winners.Entry]:
    """What is kept; a file that is damaged or cannot be read is an error."""
    file = winners.path()
    try:
        return winners.read(file)
    except FileNotFoundError:
        return {}
    except (winners.DamagedFileError, OSError) as error:
        raise _of_file(file, error) from error


@cache.command("path")
def path() -> None:
    """Where it is kept; FUSEDCONV_CACHE_DIR names another folder."""
    click.echo(str(winners.path()))


def _piece(parts: tuple[str, ...], kernel: str) -> str:
    """A kernel with the parts of a backward pass that it computes together."""
    return kernel if parts == ("forward",) else f"{kernel} ({', '.join(parts)})"


@cache.command()
def show() -> None:
    """The problems and their kernels, with their times."""
    wraps = [Column(name, overflow="fold") for name in ("problem", "device", "versions", "kernel")]
    table = Table(*wraps, "milliseconds", Column("others", overflow="fold"))
    for entry in _kept().values():
        winner = entry.winner
        times = [winner.times[piece] for piece in winner.pieces if piece in winner.times]
        rivals = [
            f"{_piece(parts, name)} {time:.4g}"
            for (parts, name), time in winner.times.items()
            if (parts, name) not in winner.pieces
        ]
        row = (
            entry.summary,
            entry.device,
            ", ".join(f"{name} {version}" for name, version in entry.versions.items() if version),
            " + ".join(_piece(*piece) for piece in winner.pieces),
            f"{sum(times):.4g}",
            ", ".join(rivals),
        )
        table.add_row(*map(escape, row))
    console().print(table)


@cache.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def export(file: Path) -> None:
    """Writes what is kept to FILE, for `fusedconv cache import` elsewhere."""
    entries = _kept()
    try:
        winners.write(file, entries)
    except OSError as error:
        raise _of_file(file, error) from error
    click.echo(f"{len(entries)} problems")


@cache.command("import")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def import_(file: Path) -> None:
    """Adds what FILE holds, in place of what is kept of the same problems."""
    try:
        added = winners.read(file)
    except (winners.DamagedFileError, OSError) as error:
        raise _of_file(file, error) from error
    _change(lambda known: {**known, **added})
    click.echo(f"{len(added)} problems")


@cache.command()
def clear() -> None:
    """Forgets everything."""
    count = len(winners.entries())
    _change(lambda known: {})
    click.echo(f"{count} problems forgotten")
