"""What is installed: versions, devices, kernels."""

from __future__ import annotations

import json
import os
import platform
from typing import Any

import click
import torch
from rich.table import Table

import fusedconv
from fusedconv import winners
from fusedconv.cli.options import check_settings, console
from fusedconv.registry import FORCE_VARIABLE, registry
from fusedconv.selection import forced_kernels


def _devices() -> list[dict[str, Any]]:
    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        p = torch.cuda.get_device_properties(index)
        found.append(
            {
                "device": f"cuda:{index}",
                "name": p.name,
                "capability": f"{p.major}.{p.minor}",
                "multiprocessors": p.multi_processor_count,
                "memory_gib": p.total_memory >> 30,
            }
        )
    return found


def _facts() -> dict[str, Any]:
    """All but the kernels."""
    return {
        "fusedconv": fusedconv.__version__,
        # As records and what was tuned name it.
        "fusedconv_build": winners.build(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "build": dict(fusedconv.build),
        "devices": _devices(),
        "environment": {
            name: value for name, value in os.environ.items() if name.startswith("FUSEDCONV_")
        },
    }


def _table(facts: dict[str, Any]) -> Table:
    build = facts["build"]
    table = Table("what", "value", show_header=False)
    table.add_row("fusedconv", facts["fusedconv_build"])
    table.add_row("Python", facts["python"])
    table.add_row("torch", f"{facts['torch']} (CUDA {facts['torch_cuda'] or 'none'})")
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
    for p in facts["devices"]:
        table.add_row(
            p["device"],
            f"{p['name']}, compute capability {p['capability']}, {p['multiprocessors']} "
            f"multiprocessors, {p['memory_gib']} GiB",
        )
    if not facts["devices"]:
        table.add_row("CUDA devices", "none")
    if forced_kernels() is not None:
        table.add_row(FORCE_VARIABLE, os.environ[FORCE_VARIABLE])
    return table


@click.command()
@click.option("--json", "as_json", is_flag=True, help="For bug reports and programs.")
def info(as_json: bool) -> None:
    """Versions, what was compiled, and the devices there are."""
    facts = _facts()
    providers: dict[str, int] | None = None
    try:
        kernels = registry().kernels()
        providers = {}
        for kernel in kernels:
            providers[kernel.provider] = providers.get(kernel.provider, 0) + 1
    finally:
        if as_json:
            print(json.dumps({**facts, "kernels": providers}, indent=1, default=str))
        else:
            table = _table(facts)
            counts = "none: a plugin fails"
            if providers is not None:
                counts = ", ".join(f"{name}: {count}" for name, count in providers.items())
            table.add_row("kernels", counts)
            console().print(table)
    check_settings()


@click.command("list")
def list_kernels() -> None:
    """Every registered kernel, plugins' included."""
    table = Table("provider", "kernel", "module")
    for kernel in registry().kernels():
        table.add_row(kernel.provider, kernel.name, type(kernel).__module__)
    console().print(table)
    check_settings()
