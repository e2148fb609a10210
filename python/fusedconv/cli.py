"""The command ``fusedconv``: info, list, explain, demo, bench."""

from __future__ import annotations

import functools
import math
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

import fusedconv
from fusedconv import benchmark, hypothetical
from fusedconv.activations import ACTIVATIONS
from fusedconv.device import KNOWN, PROCESSOR
from fusedconv.errors import KernelError, NoKernelError, PluginError
from fusedconv.models import SYSTEMS
from fusedconv.problem import GRADIENTS, ORDERS, BackwardProblem, ForwardProblem
from fusedconv.registry import FORCE_VARIABLE, registry
from fusedconv.selection import explain_problem, forced_kernels
from fusedconv.testing import sample_error


def _console() -> Console:
    return Console(width=None if Console().is_terminal else 140)


def _one_line(error: Exception) -> str:
    """A message, its further lines joined to the first one."""
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join((lines[0], "; ".join(dict.fromkeys(lines[1:])))).strip() if lines else ""


class _Commands(click.Group):
    """What the machine or its settings refuse ends in a line, not in a traceback."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except (NoKernelError, PluginError, KernelError, benchmark.ContenderError) as error:
            raise click.ClickException(_one_line(error)) from error


def _check_forced() -> None:
    """PluginError where a plugin fails, NoKernelError where FUSEDCONV_KERNEL names what is not
    there."""
    kernels, forced = registry(), forced_kernels()
    if forced is not None:
        kernels.forced_names(forced)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(fusedconv.__version__)
def main() -> None:
    """Transposed convolution, activation and GroupNorm in fused kernels, for PyTorch."""


@main.command()
def info() -> None:
    """Versions, what was compiled, and the devices there are."""
    build = fusedconv.build
    table = Table("what", "value", show_header=False)
    table.add_row("fusedconv", fusedconv.__version__)
    table.add_row("Python", platform.python_version())
    table.add_row("torch", f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})")
    table.add_row("compiler", str(build.get("compiler", "unknown")))
    table.add_row("OpenMP", "yes" if build["openmp"] else "no: the processor's kernel is serial")
    if build["cuda"]:
        table.add_row("CUDA kernels", f"compiled for {build['architectures']}")
        table.add_row("CUDA runtime", str(build["cuda_runtime"]))
        table.add_row("CUTLASS", str(build["cutlass"]))
    else:
        table.add_row(
            "CUDA kernels",
            "not compiled: no nvcc at build time; `make nvcc` or a CUDA toolkit brings one",
        )
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(index)
            table.add_row(
                f"cuda:{index}",
                f"{p.name}, compute capability {p.major}.{p.minor}, "
                f"{p.multi_processor_count} multiprocessors, {p.total_memory >> 30} GiB",
            )
    else:
        table.add_row("CUDA devices", "none")
    if forced_kernels() is not None:
        table.add_row(FORCE_VARIABLE, os.environ[FORCE_VARIABLE])
    try:
        kernels = registry().kernels()
        providers: dict[str, int] = {}
        for kernel in kernels:
            providers[kernel.provider] = providers.get(kernel.provider, 0) + 1
        table.add_row("kernels", ", ".join(f"{name}: {count}" for name, count in providers.items()))
    except PluginError:
        table.add_row("kernels", "none: a plugin fails")
        raise
    finally:
        _console().print(table)
    _check_forced()


@main.command("list")
def list_kernels() -> None:
    """Every registered kernel, plugins' included."""
    table = Table("provider", "kernel", "module")
    for kernel in registry().kernels():
        table.add_row(kernel.provider, kernel.name, type(kernel).__module__)
    _console().print(table)
    _check_forced()


def _integers(
    context: click.Context, parameter: click.Parameter, value: str, least: int
) -> tuple[int, ...]:
    try:
        result = tuple(int(part) for part in value.split(",") if value.strip())
    except ValueError:
        result = None
    if result is None or any(not least <= part <= _LARGEST for part in result):
        raise click.BadParameter(
            f"got {value!r}, expected integers from {least} to {_LARGEST} between commas"
        )
    return result


def _axes(name: str, least: int, default: str) -> Callable[[Any], Any]:
    """An option of integers between commas, of at least ``least`` each."""
    return click.option(
        name,
        default=default,
        show_default=True,
        metavar="INTEGERS",
        callback=functools.partial(_integers, least=least),
    )


def _architecture(context: click.Context, parameter: click.Parameter, value: int) -> int:
    known = KNOWN
    if value not in known:
        raise click.BadParameter(f"got {value}, expected one of {', '.join(map(str, known))}")
    return value


#: What extents and channels are counted to.
_LARGEST = 2**31 - 1

#: The options behind the arguments that messages name.
_OPTIONS = {
    "input": "spatial",
    "weight": "kernel-size",
    "contenders": "contender",
}


@contextmanager
def _naming_options() -> Iterator[None]:
    """Errors of arguments as errors of the options that gave them."""
    try:
        yield
    except (ValueError, TypeError) as error:
        name, _, message = str(error).partition(": ")
        option = _OPTIONS.get(name, name.replace("_", "-"))
        raise click.BadParameter(message, param_hint=f"'--{option}'") from error


def _system_sizes(name: str) -> dict[str, Any]:
    """A system's problem, as options of ``explain``."""
    system = SYSTEMS[name]
    with torch.device("meta"):
        model: Any = system.original(*system.init_arguments)
    batch, channels, *spatial = system.input_shape
    sizes = {"batch": batch, "in_channels": channels, "spatial": tuple(spatial)}
    if name == "system3":
        return sizes | dict(out_channels=0, num_groups=model.gn.num_groups, activation="identity")
    conv = model.conv_transpose
    return sizes | dict(
        out_channels=conv.out_channels,
        kernel_size=conv.kernel_size,
        stride=conv.stride,
        bias=conv.bias is not None,
        num_groups=model.group_norm.num_groups,
        activation={"system1": "gelu", "system2": "relu"}[name],
    )


_COUNT = click.IntRange(0, _LARGEST)
_SOME = click.IntRange(1, _LARGEST)


@main.command()
@click.option("--system", type=click.Choice(list(SYSTEMS)), help="Sizes not given are its own.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option(
    "--arch",
    default=90,
    show_default=True,
    callback=_architecture,
    help="Compute capability times ten.",
)
@click.option(
    "--precision",
    type=click.Choice(benchmark.PRECISIONS),
    help="[default: tf32, on a processor fp32]",
)
@click.option("--layout", type=click.Choice(benchmark.LAYOUTS), default="nchw", show_default=True)
@click.option("--batch", type=_COUNT, default=16, show_default=True)
@click.option("--in-channels", type=_SOME, default=64, show_default=True)
@click.option(
    "--out-channels", type=_COUNT, default=64, help="0 for GroupNorm alone.", show_default=True
)
@_axes("--spatial", 1, "64,64")
@_axes("--kernel-size", 1, "3")
@_axes("--stride", 1, "1")
@_axes("--padding", 0, "0")
@_axes("--output-padding", 0, "0")
@_axes("--dilation", 1, "1")
@click.option("--groups", type=_SOME, default=1, show_default=True, help="Of the convolution.")
@click.option("--bias/--no-bias", default=True, show_default=True, help="Of the convolution.")
@click.option("--num-groups", type=_COUNT, default=8, show_default=True, help="0 for no GroupNorm.")
@click.option("--activation", type=click.Choice(ACTIVATIONS), default="gelu", show_default=True)
@click.option("--order", type=click.Choice(ORDERS), default="act_norm", show_default=True)
@click.option("--gradients", is_flag=True, help="Of training: the backward pass too.")
@click.pass_context
def explain(context: click.Context, /, system: str | None, **options: Any) -> None:
    """Which kernel would serve a problem, and why no other. Needs no GPU.

    Options with a value for each axis take one for all axes too.
    """
    if system is not None:
        given = click.core.ParameterSource.COMMANDLINE
        for name, value in _system_sizes(system).items():
            if context.get_parameter_source(name) != given:
                options[name] = value
    convolves = options["out_channels"] > 0
    if not convolves and not options["num_groups"]:
        raise click.BadParameter(
            "got 0, expected at least 1 where --out-channels is 0", param_hint="'--num-groups'"
        )
    if convolves and len(options["spatial"]) not in (1, 2, 3):
        raise click.BadParameter(
            f"got {len(options['spatial'])} axes, expected one, two or three for a convolution",
            param_hint="'--spatial'",
        )
    precision = options.pop("precision") or ("tf32" if options["device"] == "cuda" else "fp32")
    architecture, gradients = options.pop("arch"), options.pop("gradients")
    device = KNOWN[architecture] if options["device"] == "cuda" else PROCESSOR
    with _naming_options():
        problem = hypothetical.problem(
            dtype=benchmark.DTYPES[precision],
            precision=precision,
            channels=options.pop("in_channels"),
            out_channels=options.pop("out_channels") or None,
            num_groups=options.pop("num_groups") or None,
            save=gradients,
            **options,
        )
    click.echo(str(explain_problem(problem, device)))
    if gradients:
        click.echo(str(explain_problem(_backward(problem), device)))


def _backward(forward: ForwardProblem) -> BackwardProblem:
    """Every gradient of a problem, of an output gradient that lies as the output does."""
    absent = {"conv_output", "residual"}
    if forward.conv is None:
        absent |= {"weight", "bias"}
    if not forward.bias:
        absent |= {"bias"}
    if forward.norm is None:
        absent |= {"norm_weight", "norm_bias"}
    return BackwardProblem.of(
        forward,
        grad_dtype=forward.output_dtype,
        grad_layout=forward.output_layout,
        aligned=True,
        gradients=set(GRADIENTS) - absent,
    )


def _demo_input(
    shape: tuple[int, ...], small: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    """The full size where the device holds it about six times over; else fewer samples of it."""
    if device.type != "cuda":
        return torch.rand(small)
    elements = 1
    for extent in shape:
        elements *= extent
    free, _ = torch.cuda.mem_get_info(device)
    share = min(1.0, free / (4 * elements * 6))
    return torch.rand((max(1, int(shape[0] * share)), *shape[1:]), device=device)


@main.command()
@click.option("--quick", is_flag=True, help="The small sizes, whatever the device.")
def demo(quick: bool) -> None:
    """Runs the three systems, compares them with eager and float64, and times both.

    Fails where an error is beyond 1.1 times eager's.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    clock = benchmark.Clock(device, 0.5, 5)
    table = Table(
        "system",
        "input",
        "kernel",
        "error",
        "eager's error",
        "ms",
        "eager's ms",
        "speed-up",
        title=f"fusedconv {fusedconv.__version__} on "
        + (torch.cuda.get_device_name(device) if device.type == "cuda" else "the processor"),
    )
    failures = []
    for system in SYSTEMS.values():
        torch.manual_seed(0)
        original = system.original(*system.init_arguments).to(device)
        torch.manual_seed(0)
        model = system.model(*system.init_arguments).to(device)
        shape = system.small_input_shape if quick else system.input_shape
        x = _demo_input(shape, system.small_input_shape, device)
        with torch.no_grad():
            error = sample_error(original, x, model(x))
            eager_error = sample_error(original, x, original(x))
            times, _ = clock.measure([lambda model=model, x=x: model(x)])  # type: ignore[misc]
            eager_times, _ = clock.measure(
                [lambda original=original, x=x: original(x)]  # type: ignore[misc]
            )
        kernel = benchmark.kernel_name(model, x)
        ours, eager = sorted(times)[len(times) // 2], sorted(eager_times)[len(eager_times) // 2]
        table.add_row(
            system.title,
            "x".join(map(str, x.shape)),
            kernel,
            f"{error:.2e}",
            f"{eager_error:.2e}",
            f"{ours:.3f}",
            f"{eager:.3f}",
            f"{eager / ours:.2f}",
        )
        if not error <= 1.1 * eager_error + 5e-8:
            failures.append(f"{system.name}: error {error:.3e}, eager's {eager_error:.3e}")
        del x
    _console().print(table)
    if failures:
        raise click.ClickException("error beyond 1.1 times eager's: " + "; ".join(failures))


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
    ordinals = _integers(context, parameter, value, 0)
    count = torch.cuda.device_count()
    if not ordinals or len(set(ordinals)) != len(ordinals) or max(ordinals) >= count:
        raise click.BadParameter(
            f"got {value!r}, expected different ordinals below {count}, the number of CUDA devices"
        )
    return ordinals


@main.command()
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
    _check_forced()
    chosen = (options[name] for name in ("workloads", "precisions", "layouts", "passes"))
    with _naming_options():
        benchmark.jobs(
            options["contenders"], benchmark.select_cells(*chosen), 1, options["seconds"]
        )
    with _observer(_console()) as observer:
        benchmark.run(small=small or not torch.cuda.is_available(), observer=observer, **options)


if __name__ == "__main__":
    main()
