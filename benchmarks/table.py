"""Prints the records of a results file as a Markdown table: one row a cell, times in milliseconds.

usage: python benchmarks/table.py [benchmarks/results/h200.json]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

PEERS = ("eager", "eager_cudnn_benchmark", "compile", "compile_max_autotune", "rewrite_compile")


def main(path: Path) -> None:
    cells: dict[tuple[str, ...], dict[str, dict]] = {}
    for record in json.loads(path.read_text())["records"]:
        key = tuple(record[field] for field in ("workload", "pass", "precision", "layout"))
        cells.setdefault(key, {})[record["contender"]] = record
    print("| cell | floor | fusedconv | vs eager | " + " | ".join(PEERS) + " | error / eager's |")
    print("|" + "---|" * (len(PEERS) + 5))
    for key, contenders in sorted(cells.items()):
        ours, eager = contenders["fusedconv"], contenders["eager"]
        times = [contenders.get(peer, {}).get("median_ms") for peer in PEERS]
        row = [
            " ".join(key),
            f"{ours['floor_ms']:.2f}",
            f"{ours['median_ms']:.2f}",
            f"{eager['median_ms'] / ours['median_ms']:.2f}x",
            *("" if time is None else f"{time:.2f}" for time in times),
            f"{ours['error_fp64'] / eager['error_fp64']:.2f}",
        ]
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    default = Path(__file__).parent / "results" / "h200.json"
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else default)
