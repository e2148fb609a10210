"""Records of layers as rows: each contender in its best layout, next to the floor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fusedconv.benchmark import CONTENDERS, LAYERS, Cell, Summary

PEERS = tuple(name for name, contender in CONTENDERS.items() if not contender.ours)


@dataclass(frozen=True)
class Row:
    """A layer in a precision and a pass; ``best`` holds each contender's fastest record."""

    best: dict[str, dict]

    @property
    def ours(self) -> dict:
        return self.best["fusedconv"]

    @property
    def peer(self) -> dict:
        """The fastest peer's record."""
        return min((self.best[name] for name in self.peers), key=lambda each: each["median_ms"])

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(name for name in PEERS if name in self.best)

    @property
    def layer(self) -> str:
        return self.ours["workload"]

    @property
    def floor_ms(self) -> float | None:
        return self.ours["floor_ms"]

    @property
    def speed_up(self) -> float:
        """The best peer's time over fusedconv's."""
        return self.peer["median_ms"] / self.ours["median_ms"]

    @property
    def possible(self) -> float | None:
        """The speed-up that a kernel on the floor would have."""
        return None if self.floor_ms is None else self.peer["median_ms"] / self.floor_ms

    @property
    def share(self) -> float | None:
        """The floor over fusedconv's time."""
        return None if self.floor_ms is None else self.floor_ms / self.ours["median_ms"]


def rows(records: Iterable[dict]) -> dict[tuple[str, str], list[Row]]:
    """By pass and precision, in the order of ``LAYERS``, where fusedconv and a peer were timed."""
    best: dict[tuple[str, str, str], dict[str, dict]] = {}
    for record in records:
        if record["workload"] in LAYERS and record["median_ms"] is not None:
            key = record["pass"], record["precision"], record["workload"]
            found = best.setdefault(key, {})
            other = found.get(record["contender"])
            if other is None or record["median_ms"] < other["median_ms"]:
                found[record["contender"]] = record
    result: dict[tuple[str, str], list[Row]] = {}
    for key in sorted(best, key=lambda key: (key[:2], list(LAYERS).index(key[2]))):
        row = Row(best[key])
        if "fusedconv" in row.best and row.peers:
            result.setdefault(key[:2], []).append(row)
    return result


def summary(rows: Iterable[Row]) -> Summary:
    """Of the speed-ups over the best peer."""
    return Summary({Cell.of(row.ours): row.speed_up for row in rows})
