"""Records in few figures: how much faster fusedconv is than a peer, over many cells."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fusedconv.benchmark.cells import PASSES, Cell

#: Below this share of a peer's speed a cell counts as slower.
LEVEL = 0.95
#: What summaries hold fusedconv against.
PEERS = ("eager", "compile")


def times(records: Iterable[dict[str, Any]]) -> dict[Cell, dict[str, float]]:
    """Median milliseconds by cell and contender; what failed is left out."""
    result: dict[Cell, dict[str, float]] = {}
    for record in records:
        if record["median_ms"] is not None:
            result.setdefault(Cell.of(record), {})[record["contender"]] = record["median_ms"]
    return result


def speed_ups(cells: dict[Cell, dict[str, float]], peer: str, pass_: str) -> dict[Cell, float]:
    """The peer's time over fusedconv's, in the cells of a pass that have both."""
    return {
        cell: medians[peer] / medians["fusedconv"]
        for cell, medians in cells.items()
        if cell.pass_ == pass_ and peer in medians and "fusedconv" in medians
    }


@dataclass(frozen=True)
class Summary:
    """The speed-ups over one peer in one pass, of one cell at least."""

    ratios: dict[Cell, float]

    @property
    def mean(self) -> float:
        """The geometric mean."""
        return math.exp(statistics.fmean(math.log(ratio) for ratio in self.ratios.values()))

    @property
    def least(self) -> float:
        return min(self.ratios.values())

    @property
    def slower(self) -> int:
        """How many cells are below ``LEVEL``."""
        return sum(ratio < LEVEL for ratio in self.ratios.values())

    def worst(self, count: int) -> list[tuple[Cell, float]]:
        """The cells below ``LEVEL``, the slowest first, ``count`` at most."""
        below = [item for item in self.ratios.items() if item[1] < LEVEL]
        return sorted(below, key=lambda item: item[1])[:count]


def peer_summaries(cells: dict[Cell, dict[str, float]]) -> dict[tuple[str, str], Summary]:
    """By pass and peer, where there is a cell with both."""
    result = {}
    for pass_ in PASSES:
        for peer in PEERS:
            ratios = speed_ups(cells, peer, pass_)
            if ratios:
                result[pass_, peer] = Summary(ratios)
    return result


def summary_lines(records: Iterable[dict[str, Any]], worst: int = 8) -> list[str]:
    """The summaries as text, each with its ``worst`` cells."""
    result = []
    for (pass_, peer), summary in peer_summaries(times(records)).items():
        result.append(
            f"{pass_} over {peer}: geometric mean {summary.mean:.2f}x, least "
            f"{summary.least:.2f}x, {summary.slower} of {len(summary.ratios)} cells below {LEVEL}x"
        )
        result += [f"  {ratio:.2f}x {cell.title}" for cell, ratio in summary.worst(worst)]
    return result
