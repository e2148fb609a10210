"""``fusedconv demo``: the three systems next to eager."""

from __future__ import annotations

import click
import torch
from rich.table import Table

import fusedconv
from fusedconv import benchmark
from fusedconv.cli.options import console
from fusedconv.models import SYSTEMS
from fusedconv.testing import sample_error


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


@click.command()
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
    console().print(table)
    if failures:
        raise click.ClickException("error beyond 1.1 times eager's: " + "; ".join(failures))
