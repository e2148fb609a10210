"""``fusedconv demo``: the three systems next to eager."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import click
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import fusedconv
from fusedconv import benchmark
from fusedconv.benchmark import Clock
from fusedconv.cli.options import check_settings, console
from fusedconv.models import SYSTEMS, System
from fusedconv.precision import dtype_name
from fusedconv.testing import sample_errors

COLUMNS = ("system", "input", "kernel", "error", "eager's error", "ms", "eager's ms", "speed-up")
#: Systems that processors also show in another dtype than float32.
ON_PROCESSORS = (("system1", torch.bfloat16),)


def _rows(device: torch.device, quick: bool) -> list[tuple[System, torch.dtype]]:
    """The systems and dtypes to show."""
    rows = [(system, torch.float32) for system in SYSTEMS.values()]
    if device.type == "cpu" and not quick:
        rows += [(SYSTEMS[name], dtype) for name, dtype in ON_PROCESSORS]
    return sorted(rows, key=lambda row: row[0].name)


def _shape(system: System, device: torch.device, quick: bool) -> tuple[int, ...]:
    """The size for the device; on a GPU of fewer samples where it does not hold the input about
    six times over."""
    if quick or device.type != "cuda":
        return system.shape("small" if quick else "processor")
    shape = system.shape("full")
    free, _ = torch.cuda.mem_get_info(device)
    share = min(1.0, free / (4 * torch.Size(shape).numel() * 6))
    return max(1, int(shape[0] * share)), *shape[1:]


@dataclass(frozen=True)
class _Shown:
    """What a row shows: errors against float64 and median milliseconds, ours and eager's."""

    title: str
    input: str
    kernel: str
    errors: tuple[float, float]
    milliseconds: tuple[float, float]

    def cells(self) -> tuple[str, ...]:
        ours, eager = self.milliseconds
        return (
            self.title,
            self.input,
            self.kernel,
            *(f"{error:.2e}" for error in self.errors),
            f"{ours:.3f}",
            f"{eager:.3f}",
            f"{eager / ours:.2f}",
        )

    @property
    def failure(self) -> str | None:
        """What is wrong with our error, if anything is."""
        error, eager = self.errors
        if error <= 1.1 * eager + 5e-8:
            return None
        return f"{self.title}, {self.input}: error {error:.3e}, eager's {eager:.3e}"


def _show(system: System, dtype: torch.dtype, shape: tuple[int, ...], clock: Clock) -> _Shown:
    """Measures a row; both take turns."""
    device = torch.device("cuda" if clock.cuda else "cpu")
    torch.manual_seed(0)
    original = system.original(*system.init_arguments).to(device, dtype)
    torch.manual_seed(0)
    model = system.model(*system.init_arguments).to(device, dtype)
    x = torch.rand(shape, device=device).to(dtype)
    with torch.no_grad():
        # One output at a time, as a GPU may hold no more.
        error, eager_error = (
            sample_errors(original, x, [each(x)])[0] for each in (model, original)
        )
        ours, eager = clock.interleave([[lambda: model(x)], [lambda: original(x)]])
    return _Shown(
        system.title,
        f"{'x'.join(map(str, shape))} {dtype_name(dtype)}",
        benchmark.kernel_name(model, x),
        (error, eager_error),
        (statistics.median(ours.milliseconds), statistics.median(eager.milliseconds)),
    )


@click.command()
@click.option("--quick", is_flag=True, help="The small sizes, whatever the device.")
def demo(quick: bool) -> None:
    """Runs the three systems, compares them with eager and float64, and times both.

    Fails where an error is beyond 1.1 times eager's.
    """
    check_settings()
    device = benchmark.default_device()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the processor"
    table = Table(*COLUMNS, title=f"fusedconv {fusedconv.__version__} on {name}")
    clock = Clock(device, 0.5 if quick or device.type == "cuda" else 1.0, 5)
    rows = _rows(device, quick)
    shown = []
    screen = console()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    # Drawn between the rows alone: on a processor drawing takes time of what is measured.
    with Progress(
        *columns, console=screen, auto_refresh=False, transient=True, disable=not screen.is_terminal
    ) as progress:
        task = progress.add_task("", total=len(rows))
        for system, dtype in rows:
            progress.update(task, description=f"{system.title}, {dtype_name(dtype)}", refresh=True)
            shown.append(_show(system, dtype, _shape(system, device, quick), clock))
            table.add_row(*shown[-1].cells())
            progress.update(task, advance=1, refresh=True)
    screen.print(table)
    failures = [row.failure for row in shown if row.failure is not None]
    if failures:
        raise click.ClickException("error beyond 1.1 times eager's: " + "; ".join(failures))
