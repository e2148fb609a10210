"""How closely the three systems' outputs agree with eager's, element by element.

usage: python benchmarks/agreement.py [--output FILE] [--small] [--contender NAME ...]

For each system, in TF32 and in strict fp32 (system 3, which has no convolution, in fp32): whether
``torch.allclose(model_new(x), model(x), atol=1e-5, rtol=1e-5)`` holds, the largest difference, and
the share of elements beyond that tolerance, for fusedconv and for torch.compile. Eager runs first,
in the same process, with torch's default cudnn.benchmark: torch.compile's convolution then runs by
the plan that eager picked, as where somebody holds the two against each other in one script.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fusedconv.benchmark import CONTENDERS, Cell, device_facts, header, precision_mode
from fusedconv.benchmark.measuring import prepare
from fusedconv.models import SYSTEMS

TOLERANCE = 1e-5  # atol and rtol
COMPARED = ("fusedconv", "compile")
_PIECE = 1 << 28  # elements compared at a time


def compare(actual: Tensor, expected: Tensor) -> dict[str, Any]:
    """allclose, the largest difference and the share of elements beyond; NaN is beyond."""
    samples = max(1, _PIECE // max(1, expected[0].numel()))
    largest, beyond = 0.0, 0
    for mine, theirs in zip(actual.split(samples), expected.split(samples), strict=True):
        difference = (mine - theirs).abs_()
        largest = max(largest, float(difference.nan_to_num(torch.inf).max()))
        beyond += int((difference <= TOLERANCE + TOLERANCE * theirs.abs()).logical_not_().sum())
    return {
        "allclose": beyond == 0,
        "largest_difference": largest,
        "beyond": beyond,
        "share_beyond": beyond / expected.numel(),
    }


def records(
    system: str, precision: str, contenders: list[str], device: torch.device, size: str
) -> list[dict[str, Any]]:
    setup = prepare(Cell(system, precision, "nchw", "forward"), device, size)
    x = setup.inputs[0]
    result = []
    with torch.no_grad(), precision_mode(precision):
        expected = setup.original(x)
        for name in contenders:
            model: nn.Module = CONTENDERS[name].build(setup.workload, setup.original)
            found = compare(model(x), expected)
            result.append(
                {
                    "workload": system,
                    "precision": precision,
                    "contender": name,
                    "shape": list(setup.shape),
                    **found,
                }
            )
            torch.compiler.reset()
    return result


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = Path(__file__).parent / "results" / "h200-agreement.json"
    parser.add_argument("--output", type=Path, default=default)
    parser.add_argument("--small", action="store_true", help="sizes that run in moments")
    parser.add_argument("--contender", action="append", choices=COMPARED)
    parser.add_argument("--commit")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = "small" if options.small else "full"
    chosen = options.contender or list(COMPARED)
    every: list[dict[str, Any]] = []
    print("| system | precision | contender | allclose | largest difference | share beyond |")
    print("|---|---|---|---|---|---|")
    for system in SYSTEMS:
        for precision in ("fp32",) if system == "system3" else ("tf32", "fp32"):
            for record in records(system, precision, chosen, device, size):
                every.append(record)
                print(
                    f"| {system} | {precision} | {record['contender']} | {record['allclose']} | "
                    f"{record['largest_difference']:.2e} | {record['share_beyond']:.2e} |",
                    flush=True,
                )
    head = header(device_facts(device, 0), options.commit, {}, __doc__)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps({"header": head, "records": every}, indent=1) + "\n")


if __name__ == "__main__":
    main()
