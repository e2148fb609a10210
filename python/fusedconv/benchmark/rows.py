"""Records of contenders as rows: fusedconv next to its peers and the floor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fusedconv.benchmark.cells import Cell
from fusedconv.benchmark.contenders import CONTENDERS
from fusedconv.benchmark.layers import LAYERS
from fusedconv.benchmark.summary import Summary
from fusedconv.benchmark.workloads import WORKLOADS

PEERS = tuple(name for name, contender in CONTENDERS.items() if not contender.ours)


@dataclass(frozen=True)
class Row:
    """A workload in a precision and a pass; ``best`` holds each contender's fastest record."""

    name: str
    best: Mapping[str, dict[str, Any]]

    @property
    def ours(self) -> dict[str, Any]:
        return self.best["fusedconv"]

    @property
    def peer(self) -> dict[str, Any]:
        """The fastest peer's record."""
        return min((self.best[name] for name in self.peers), key=lambda each: each["median_ms"])

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(name for name in PEERS if name in self.best)

    @property
    def floor_ms(self) -> float | None:
        floor: float | None = self.ours["floor_ms"]
        return floor

    def speed(self, contender: str) -> float:
        """The best peer's time over the contender's."""
        return float(self.peer["median_ms"] / self.best[contender]["median_ms"])

    @property
    def speed_up(self) -> float:
        """The best peer's time over fusedconv's."""
        return self.speed("fusedconv")

    @property
    def possible(self) -> float | None:
        """The speed-up that a kernel on the floor would have."""
        return None if self.floor_ms is None else self.peer["median_ms"] / self.floor_ms

    @property
    def share(self) -> float | None:
        """The floor over fusedconv's time."""
        return None if self.floor_ms is None else self.floor_ms / self.ours["median_ms"]


def rows(records: Iterable[dict[str, Any]]) -> dict[tuple[str, str], list[Row]]:
    """By pass and precision, in the order of ``WORKLOADS``, where fusedconv and a peer were timed.
    Layers have one row with each contender in its best layout, other workloads one a layout."""
    best: dict[tuple[str, str, str, str], dict[str, dict[str, Any]]] = {}
    for record in records:
        if record["median_ms"] is not None and record["workload"] in WORKLOADS:
            layout = "" if record["workload"] in LAYERS else record["layout"]
            key = record["pass"], record["precision"], record["workload"], layout
            found = best.setdefault(key, {})
            other = found.get(record["contender"])
            if other is None or record["median_ms"] < other["median_ms"]:
                found[record["contender"]] = record
    order = {name: index for index, name in enumerate(WORKLOADS)}
    result: dict[tuple[str, str], list[Row]] = {}
    for key in sorted(best, key=lambda key: (key[:2], order[key[2]], key[3])):
        row = Row(" ".join(key[2:]).strip(), best[key])
        if "fusedconv" in row.best and row.peers:
            result.setdefault(key[:2], []).append(row)
    return result


def best_peer_summary(rows: Iterable[Row]) -> Summary:
    """Of the speed-ups over the best peer."""
    return Summary({Cell.of(row.ours): row.speed_up for row in rows})
