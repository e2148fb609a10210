"""Prints the records of a results file as a Markdown table: one row a cell, times in milliseconds.

usage: python benchmarks/table.py [benchmarks/results/h200.json]

Speed-ups are fusedconv's, as torch comes, over the better of the two eagers and over the best peer.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

EAGERS = ("eager", "eager_cudnn_benchmark")
PEERS = (*EAGERS, "compile", "compile_max_autotune", "rewrite", "rewrite_compile")
OURS = ("fusedconv", "fusedconv_cudnn_benchmark")
COLUMNS = ("cell", "floor", *OURS, "vs better eager", "vs best peer", *PEERS, "error / eager's")


def row(cell: str, records: dict[str, dict]) -> list[str]:
    """The columns of one cell; what was not measured or failed is left empty."""
    times = {
        name: record["median_ms"]
        for name, record in records.items()
        if record["median_ms"] is not None
    }
    ours = times.get("fusedconv")

    def shown(time: float | None) -> str:
        return "" if time is None else f"{time:.2f}"

    def over(peers: tuple[str, ...]) -> str:
        known = [times[peer] for peer in peers if peer in times]
        return f"{min(known) / ours:.2f}x" if known and ours is not None else ""

    error = ""
    if ours is not None and "eager" in times:
        error = f"{records['fusedconv']['error_fp64'] / records['eager']['error_fp64']:.2f}"
    floors = [record["floor_ms"] for record in records.values() if record["floor_ms"] is not None]
    return [
        cell,
        shown(floors[0] if floors else None),
        *(shown(times.get(name)) for name in OURS),
        over(EAGERS),
        over(PEERS),
        *(shown(times.get(name)) for name in PEERS),
        error,
    ]


def main(path: Path) -> None:
    cells: dict[str, dict[str, dict]] = {}
    for record in json.loads(path.read_text())["records"]:
        cell = " ".join(record[field] for field in ("workload", "pass", "precision", "layout"))
        cells.setdefault(cell, {})[record["contender"]] = record
    print("| " + " | ".join(COLUMNS) + " |")
    print("|" + "---|" * len(COLUMNS))
    for cell, records in sorted(cells.items()):
        print("| " + " | ".join(row(cell, records)) + " |")


if __name__ == "__main__":
    default = Path(__file__).parent / "results" / "h200.json"
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else default)
