"""What is installed: versions, devices, kernels."""

from __future__ import annotations

import os
import platform

import click
import torch
from rich.table import Table

import fusedconv
from fusedconv.cli.options import check_forced, console
from fusedconv.errors import PluginError
from fusedconv.registry import FORCE_VARIABLE, registry
from fusedconv.selection import forced_kernels


@click.command()
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
        families = ", ".join(build["families"]) or "none"
        table.add_row(
            "CUDA kernels",
            f"compiled for {build['architectures']}; families of convolutions: {families}",
        )
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
        console().print(table)
    check_forced()


@click.command("list")
def list_kernels() -> None:
    """Every registered kernel, plugins' included."""
    table = Table("provider", "kernel", "module")
    for kernel in registry().kernels():
        table.add_row(kernel.provider, kernel.name, type(kernel).__module__)
    console().print(table)
    check_forced()
