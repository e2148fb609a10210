"""``fusedconv bench --kernels``: every kernel of a problem, and the regret of estimates."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import torch
from rich.markup import escape
from rich.table import Column, Table

from fusedconv import benchmark, winners
from fusedconv.benchmark import kernels
from fusedconv.benchmark.regret import Regret, regret_summaries, regrets, title
from fusedconv.cli.options import console, is_given, naming_options
from fusedconv.cli.progress import observer
from fusedconv.cli.shapes import problems_of_file
from fusedconv.selection import forced_kernels

#: What --kernels calls every kernel.
ALL = "all"
#: Parameters that say nothing here, and nothing of a file of shapes.
_OF_CONTENDERS = {"contenders": "--contender", "devices": "--devices"}
_OF_SUITES = {
    "workloads": "--workload",
    "precisions": "--precision",
    "layouts": "--layout",
    "passes": "--pass",
    "small": "--small",
}


def record_line(record: dict[str, Any]) -> str:
    """A record in a line."""
    if "error" in record:
        return f"{title(record)}: {record['error']}"
    timed = [each for each in record["kernels"] if each["median_ms"] is not None]
    text = f"{title(record)}: {len(timed)} kernels"
    if "refused" in record:
        return f"{text}: {record['refused']}"
    if len(timed) < len(record["kernels"]):
        text += f", {len(record['kernels']) - len(timed)} failed"
    for each in regrets([record]):
        text += f", best {each.best} {each.best.milliseconds:.4f} ms"
        text += f", chosen {each.estimated}, regret {each.ratio:.2f}"
    return text


def _refuse(context: click.Context, options: dict[str, str], why: str) -> None:
    for name, option in options.items():
        if is_given(context, name):
            raise click.BadParameter(f"expected none {why}", param_hint=f"'{option}'")


def _of_file(path: Path, device: torch.device) -> list[kernels.Source]:
    found = problems_of_file(path, device, "'--suite'")
    return [kernels.Source(None, str(path), lambda: found)]


def _of_suite(options: dict[str, Any], device: torch.device) -> Iterator[kernels.Source]:
    suite = benchmark.SUITES[options["suite"]][device.type]
    with naming_options():
        cells = benchmark.select_cells(
            options["workloads"] or suite.workloads,
            options["precisions"] or suite.precisions,
            options["layouts"],
            options["passes"] or suite.passes,
            device.type,
        )
    size = "small" if options["small"] else suite.size
    for cell in cells:
        find = functools.partial(benchmark.cell_problems, cell, device, size)
        yield kernels.Source(cell.workload, cell.title, find)


def bench_kernels(context: click.Context, options: dict[str, Any]) -> None:
    """``fusedconv bench`` with its option ``--kernels``."""
    device: torch.device = options["device"]
    suite: str | Path = options["suite"]
    _refuse(context, _OF_CONTENDERS, "with --kernels")
    if isinstance(suite, Path):
        _refuse(context, _OF_SUITES, "with a file of shapes, whose lines say it")
    if forced_kernels() is not None:
        raise click.ClickException(
            "FUSEDCONV_KERNEL is set, which leaves nothing to choose; --kernels takes names"
        )
    tuned = None
    if options["winners"] is not None:
        try:
            tuned = winners.read(options["winners"])
        except (winners.DamagedFileError, OSError) as error:
            raise click.BadParameter(
                f"{options['winners']}: {error}", param_hint="'--winners'"
            ) from error
    sources = _of_file(suite, device) if isinstance(suite, Path) else _of_suite(options, device)
    with observer(console(), record_line) as watch:
        records = kernels.run(
            options["output"],
            list(sources),
            device,
            names=options["kernels"] or None,
            seconds=options["seconds"],
            least=options["least"],
            commit=options["commit"],
            resume=options["resume"],
            observer=watch,
            tuned=tuned,
        )
    found = regrets(records, tuned)
    if found:
        _print_regrets(found)


def _print_regrets(found: Iterable[Regret]) -> None:
    found = sorted(found, key=lambda each: each.ratio, reverse=True)
    tuned = any(each.tuned is not None for each in found)
    titles = ["problem", "chosen by estimate", "ms", "best", "ms", "regret"]
    titles += ["tuned", "regret of tuned"] if tuned else []
    table = Table(*(Column(title, overflow="fold") for title in titles))
    for each in found:
        row = [
            each.title,
            str(each.estimated),
            f"{each.estimated.milliseconds:.4f}",
            str(each.best),
            f"{each.best.milliseconds:.4f}",
            f"{each.ratio:.2f}",
        ]
        if tuned and each.tuned is not None and each.tuned_ratio is not None:
            row += [str(each.tuned), f"{each.tuned_ratio:.2f}"]
        table.add_row(*map(escape, row))
    console().print(table)
    for name, total in regret_summaries(found).items():
        click.echo(f"regret, {name}: {total}")
