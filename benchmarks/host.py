"""What the host takes for a repeated call on a small input, while the GPU works.

usage: python benchmarks/host.py [--output FILE] [--calls N] [--rounds N]

System 1's drop-in and its original, [1, 64, n, n] without gradients: microseconds of the host for
each of ``calls`` calls in a row that nothing waits for, after a round that is not counted; the
least and the median of ``rounds`` rounds, which the contenders take in turn. On a processor a call
is all of its work.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fusedconv.benchmark import DTYPES, device_facts, header, precision_mode
from fusedconv.models import SYSTEMS

EXTENTS = (8, 16, 32, 64)
COMPARED = ("tf32", "bf16")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def microseconds(call: Callable[[], object], calls: int, device: torch.device) -> float:
    """Of the host for a call."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    taken = time.perf_counter() - start
    synchronize(device)
    return taken / calls * 1e6


def records(
    precision: str, extent: int, device: torch.device, calls: int, rounds: int
) -> list[dict[str, Any]]:
    system = SYSTEMS["system1"]
    dtype = DTYPES[precision]
    shape = (1, system.shape("full")[1], extent, extent)
    x = torch.rand(shape, device=device).to(dtype)
    models: dict[str, nn.Module] = {
        "fusedconv": system.model(*system.init_arguments).to(device, dtype),
        "eager": system.original(*system.init_arguments).to(device, dtype),
    }

    def call_of(model: nn.Module) -> Callable[[], Tensor]:
        return lambda: model(x)

    taken: dict[str, list[float]] = {name: [] for name in models}
    with torch.no_grad(), precision_mode(precision):
        for number in range(rounds + 1):
            for name, model in models.items():
                value = microseconds(call_of(model), calls, device)
                if number > 0:
                    taken[name].append(value)
    return [
        {
            "workload": "system1",
            "precision": precision,
            "contender": name,
            "shape": list(shape),
            "least_us": min(values),
            "median_us": statistics.median(values),
        }
        for name, values in taken.items()
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = Path(__file__).parent / "results" / "h200-host.json"
    parser.add_argument("--output", type=Path, default=default)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--commit")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    every: list[dict[str, Any]] = []
    print("| precision | shape | contender | least, us | median, us |")
    print("|---|---|---|---|---|")
    for precision in COMPARED:
        for extent in EXTENTS:
            for record in records(precision, extent, device, options.calls, options.rounds):
                every.append(record)
                print(
                    f"| {precision} | {record['shape']} | {record['contender']} | "
                    f"{record['least_us']:.1f} | {record['median_us']:.1f} |",
                    flush=True,
                )
    head = header(device_facts(device, 0), options.commit, {}, __doc__)
    head["processor"] = platform.processor() or platform.machine()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps({"header": head, "records": every}, indent=1) + "\n")


if __name__ == "__main__":
    main()
