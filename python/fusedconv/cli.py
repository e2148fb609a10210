"""The command ``fusedconv``: info, list, explain, demo, bench."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

import fusedconv
from fusedconv import benchmark
from fusedconv.models import SYSTEMS
from fusedconv.plan import explain_problem
from fusedconv.problem import (
    ACTIVATIONS,
    ORDERS,
    ConvTransposeGeometry,
    NormGeometry,
    Order,
    Precision,
    Problem,
)
from fusedconv.registry import registry
from fusedconv.testing import sample_error

_MULTIPROCESSORS = {80: 108, 86: 84, 89: 128, 90: 132}


def _console() -> Console:
    return Console(width=None if Console().is_terminal else 140)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
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
    providers: dict[str, int] = {}
    for kernel in registry().kernels():
        providers[kernel.provider] = providers.get(kernel.provider, 0) + 1
    table.add_row("kernels", ", ".join(f"{name}: {count}" for name, count in providers.items()))
    _console().print(table)


@main.command("list")
def list_kernels() -> None:
    """Every registered kernel, plugins' included."""
    table = Table("provider", "kernel", "module")
    for kernel in registry().kernels():
        table.add_row(kernel.provider, kernel.name, type(kernel).__module__)
    _console().print(table)


def _extents(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in value.split(",") if part)
    except ValueError:
        raise click.BadParameter(f"got {value!r}, expected integers between commas") from None


@main.command()
@click.option("--system", type=click.Choice(list(SYSTEMS)), help="Take sizes from a system.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--arch", default=90, show_default=True, help="Compute capability times ten.")
@click.option("--precision", type=click.Choice(benchmark.PRECISIONS), default="tf32")
@click.option("--layout", type=click.Choice(benchmark.LAYOUTS), default="nchw", show_default=True)
@click.option("--batch", default=16, show_default=True)
@click.option("--in-channels", default=64, show_default=True)
@click.option("--out-channels", default=64, help="0 for GroupNorm alone.", show_default=True)
@click.option("--spatial", default="64,64", callback=_extents, show_default=True)
@click.option("--kernel-size", default=3, show_default=True)
@click.option("--stride", default=1, show_default=True)
@click.option("--padding", default=0, show_default=True)
@click.option("--groups", default=1, show_default=True, help="Of the convolution.")
@click.option("--num-groups", default=8, show_default=True, help="0 for no GroupNorm.")
@click.option("--activation", type=click.Choice(ACTIVATIONS), default="gelu", show_default=True)
@click.option("--order", type=click.Choice(ORDERS), default="act_norm", show_default=True)
def explain(
    system: str | None,
    device: str,
    arch: int,
    precision: Precision,
    layout: str,
    batch: int,
    in_channels: int,
    out_channels: int,
    spatial: tuple[int, ...],
    kernel_size: int,
    stride: int,
    padding: int,
    groups: int,
    num_groups: int,
    activation: str,
    order: Order,
) -> None:
    """Which kernel would serve a problem, and why no other. Needs no GPU."""
    bias = True
    if system is not None:
        chosen = SYSTEMS[system]
        batch, in_channels, *rest = chosen.input_shape
        spatial = tuple(rest)
        if system == "system3":
            out_channels, num_groups, activation = 0, chosen.init_arguments[1], "identity"
        elif system == "system2":
            _, out_channels, kernel_size, num_groups, bias = chosen.init_arguments
            activation = "relu"
        else:
            _, out_channels, kernel_size, stride, _, num_groups = chosen.init_arguments
    axes = len(spatial)
    dtype = benchmark.DTYPES[precision]
    conv = None
    if out_channels:
        strides = [1]
        for extent in (*(kernel_size,) * axes, out_channels // groups)[: axes + 1]:
            strides.insert(0, strides[0] * extent)
        conv = ConvTransposeGeometry(
            in_channels,
            out_channels,
            (kernel_size,) * axes,
            (stride,) * axes,
            (padding,) * axes,
            (0,) * axes,
            (1,) * axes,
            groups,
            bias,
            tuple(strides),
        )
    cuda = device == "cuda"
    problem = Problem(
        device=device,
        device_index=0,
        architecture=arch if cuda else 0,
        multiprocessors=_MULTIPROCESSORS.get(arch, 132) if cuda else 0,
        dtype=dtype,
        output_dtype=dtype,
        precision=precision if cuda or dtype != torch.float32 else "fp32",
        layout="nhwc" if layout == "nhwc" else "nchw",
        aligned=True,
        batch=batch,
        channels=in_channels,
        spatial=spatial,
        activation=activation,
        order=order,
        conv=conv,
        norm=NormGeometry(num_groups, 1e-5, True, True, dtype) if num_groups else None,
    )
    click.echo(str(explain_problem(problem)))


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
        kernel = benchmark._kernel_name("fusedconv", model, x)
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


@main.command()
@click.option("--workload", "workloads", **_choices(tuple(SYSTEMS)))
@click.option("--precision", "precisions", **_choices(benchmark.PRECISIONS))
@click.option("--layout", "layouts", **_choices(benchmark.LAYOUTS))
@click.option("--pass", "passes", **_choices(benchmark.PASSES))
@click.option("--contender", "contenders", **_choices(benchmark.CONTENDERS))
@click.option("--seconds", default=0.5, show_default=True, help="Of timing per contender.")
@click.option("--least", default=10, show_default=True, help="Repetitions at least.")
@click.option("--small", is_flag=True, help="Sizes for a processor.")
@click.option("--commit", help="What the header says; git's HEAD by default.")
@click.option("--output", type=click.Path(path_type=Path), help="JSON to write or to add to.")
def bench(
    workloads: tuple[str, ...],
    precisions: tuple[str, ...],
    layouts: tuple[str, ...],
    passes: tuple[str, ...],
    contenders: tuple[str, ...],
    seconds: float,
    least: int,
    small: bool,
    commit: str | None,
    output: Path | None,
) -> None:
    """Times the systems next to eager, torch.compile and a pure rewrite, in one process."""

    def report(record: dict[str, Any]) -> None:
        cell = " ".join(
            str(record[field]) for field in ("workload", "pass", "precision", "layout", "contender")
        )
        if record["median_ms"] is None:
            click.echo(f"{cell}: {record['error']}")
            return
        floor = record["floor_ms"]
        share = f", {floor / record['median_ms']:.0%} of the floor" if floor else ""
        click.echo(
            f"{cell}: {record['median_ms']:.4f} ms ({record['p10_ms']:.4f} to "
            f"{record['p90_ms']:.4f}){share}, error {record['error_fp64']:.2e}, {record['kernel']}"
        )

    benchmark.run(
        output,
        workloads=workloads,
        precisions=precisions,
        layouts=layouts,
        passes=passes,
        contenders=contenders,
        seconds=seconds,
        least=least,
        small=small or not torch.cuda.is_available(),
        commit=commit,
        report=report,
    )


if __name__ == "__main__":
    main()
