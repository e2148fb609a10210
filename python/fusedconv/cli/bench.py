"""``fusedconv bench``: the benchmark, with its progress."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import torch

from fusedconv import benchmark
from fusedconv.benchmark import kernels, records
from fusedconv.cli.kernels import ALL, bench_kernels
from fusedconv.cli.options import check_settings, console, integers, naming_options
from fusedconv.cli.progress import observer
from fusedconv.errors import NoKernelError
from fusedconv.registry import registry


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


def record_line(record: dict[str, Any]) -> str:
    """A record in a line."""
    name = f"{benchmark.Cell.of(record).title} {record['contender']}"
    if record["median_ms"] is None:
        return f"{name}: {record['error']}"
    floor = record["floor_ms"]
    share = f", {floor / record['median_ms']:.0%} of the floor" if floor else ""
    by = record.get("chosen_by", "cost")
    how = "" if by in ("", "cost") else f" (chosen by: {by})"
    return (
        f"{name}: {record['median_ms']:.4f} ms ({record['p10_ms']:.4f} to "
        f"{record['p90_ms']:.4f}){share}, error {record['error_fp64']:.2e}, {record['kernel']}{how}"
    )


def _writable(
    context: click.Context, parameter: click.Parameter, value: Path | None
) -> Path | None:
    if value is not None:
        fields = records.FIELDS if context.params.get("kernels") is None else kernels.FIELDS
        try:
            benchmark.check_writable(value, fields)
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


def _suite(context: click.Context, parameter: click.Parameter, value: str) -> str | Path:
    if value in benchmark.SUITES:
        return value
    names = " or ".join(benchmark.SUITES)
    if context.params.get("kernels") is None:
        raise click.BadParameter(f"got {value!r}, expected {names}, or with --kernels a file")
    if not Path(value).is_file():
        raise click.BadParameter(f"got {value!r}, expected {names}, or a file of shapes")
    return Path(value)


def _kernels(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> tuple[str, ...] | None:
    if value is None or value == ALL:
        return None if value is None else ()
    try:
        return tuple(registry().forced_names(value, "kernels"))
    except NoKernelError as error:
        raise click.BadParameter(str(error).removeprefix("kernels: ")) from error


@click.command()
@click.option(
    "--suite",
    metavar="|".join((*benchmark.SUITES, "FILE")),
    callback=_suite,
    default=benchmark.DEFAULT_SUITE,
    show_default=True,
    help="What is measured by default: the systems (and on a processor GroupNorm), or layers of "
    "published models. With --kernels also a file of shapes, as `fusedconv tune` reads it.",
)
@click.option(
    "--kernels",
    metavar=f"{ALL}|NAME,...",
    is_eager=True,  # other options depend on it
    callback=_kernels,
    help="In place of contenders, time each kernel that serves the problems: all, which gives the "
    "regret of choosing by estimates too, or kernels and providers of these names.",
)
@click.option(
    "--winners",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="With --kernels: a file of tuned kernels, whose regret is given too (`fusedconv cache "
    "path` says where the user's is).",
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
    **_choices(benchmark.ALL_PRECISIONS),
    help="By default the suite's, which has none under autocast.",
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
@click.option(
    "--commit",
    help="What the header says; by default HEAD of the checkout that fusedconv is imported from, "
    "or its version.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    callback=_writable,
    help="JSON to write or to add to.",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Leave out the cells that the output holds of this commit, build and size, with "
    "--kernels the problems that it holds of this device, build and versions.",
)
@click.pass_context
def bench(context: click.Context, /, **options: Any) -> None:
    """Times systems, layers or GroupNorm with activations next to eager and others.

    On a GPU each contender runs in processes of its own, but for layers all with cudnn.benchmark on
    take turns in one, as on a processor all do.
    With --kernels each problem's kernels are timed instead, in turns.
    """
    check_settings()
    if options["resume"] and options["output"] is None:
        raise click.BadParameter(
            "got no --output, expected the file to resume", param_hint="'--resume'"
        )
    if options["kernels"] is not None:
        bench_kernels(context, options)
        return
    del options["kernels"]
    if options.pop("winners") is not None:
        raise click.BadParameter("got a file without --kernels", param_hint="'--winners'")
    device: torch.device = options["device"]
    suite = benchmark.SUITES[options["suite"]][device.type]
    if options["devices"] is not None and device.type != "cuda":
        raise click.BadParameter(
            "got ordinals, expected none for a processor", param_hint="'--devices'"
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
    try:
        with observer(console(), record_line) as watch:
            measured = benchmark.run(observer=watch, **options)
    except benchmark.OtherMachineError as error:
        message = str(error).removeprefix("output: ")
        raise click.BadParameter(message, param_hint="'--output'") from error
    if output is not None and output.exists():
        measured = benchmark.read(output)
    for line in benchmark.summary_lines(measured):
        click.echo(line)
