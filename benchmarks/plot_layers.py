"""Plots how much faster than the best peer fusedconv is on each layer, as a PNG.

usage: python benchmarks/plot_layers.py [benchmarks/results/h200-shapes.json [layers.png]]

A panel for each pass and precision: bars are speed-ups over the fastest peer in its best layout,
marks the speed-up of a kernel that takes the floor's time. Needs matplotlib.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from layer_rows import Row, rows, summary

FASTER, SLOWER = "tab:blue", "tab:red"


def plot(panels: dict[tuple[str, str], list[Row]], title: str, output: Path) -> None:
    """Writes the figure; raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), squeeze=False)[:, 0]
    for axis, ((pass_, precision), found) in zip(axes, panels.items(), strict=True):
        places = range(len(found))
        ratios = [row.speed_up for row in found]
        colors = [FASTER if ratio >= 1 else SLOWER for ratio in ratios]
        # From 1, so that bars of slower layers hang down.
        axis.bar(places, [ratio - 1 for ratio in ratios], bottom=1, color=colors)
        floors = [(place, row.possible) for place, row in enumerate(found) if row.possible]
        if floors:
            axis.scatter(*zip(*floors, strict=True), marker="_", s=250, color="black")
        for place, ratio in zip(places, ratios, strict=True):
            axis.annotate(
                f"{ratio:.2f}",
                (place, max(ratio, 1)),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                fontsize="small",
            )
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_yscale("log")
        axis.set_xticks(places, [row.layer for row in found], rotation=45, ha="right")
        axis.set_ylabel("times as fast as the best peer")
        axis.set_title(
            f"{pass_} {precision}: geometric mean {summary(found).mean:.2f}x (marks: on the floor)"
        )
    figure.suptitle(title)
    figure.savefig(output, dpi=120)


def main(path: Path, output: Path) -> None:
    results = json.loads(path.read_text())
    panels = rows(results["records"])
    if not panels:
        raise SystemExit(f"{path}: got no records of layers, expected fusedconv's and a peer's")
    header = results["header"]
    plot(panels, f"{header['device']}, torch {header['torch']}, {header['commit']}", output)


if __name__ == "__main__":
    default = Path(__file__).parent / "results" / "h200-shapes.json"
    arguments = [Path(argument) for argument in sys.argv[1:]]
    main(*arguments, *(default, Path("layers.png"))[len(arguments) :])
