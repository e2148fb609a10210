"""What choosing by estimates costs: the chosen kernels' time over that of the fastest."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fusedconv.tuning import cheapest
from fusedconv.winners import Entry, Piece, Winner

#: Above this a choice counts as slower.
LEVEL = 1.05
#: What records have of a file of winners' entries.
ENTRY_FIELDS = ("problem", "device", "versions", "summary")


@dataclass(frozen=True)
class Choice:
    """Kernels that compute a problem together, and the sum of their medians."""

    pieces: tuple[Piece, ...]
    milliseconds: float

    def __str__(self) -> str:
        return " + ".join(dict.fromkeys(kernel for _, kernel in self.pieces))


@dataclass(frozen=True)
class Regret:
    """A record's kernels: ``estimated`` by the lowest estimates, ``tuned`` by a file of winners,
    None where it has none, and the ``best`` of those timed."""

    record: Mapping[str, Any]
    estimated: Choice
    best: Choice
    tuned: Choice | None = None

    @property
    def ratio(self) -> float:
        """The time of what estimates choose over that of the best."""
        return self.estimated.milliseconds / self.best.milliseconds

    @property
    def tuned_ratio(self) -> float | None:
        """The same of what was tuned."""
        return None if self.tuned is None else self.tuned.milliseconds / self.best.milliseconds

    @property
    def title(self) -> str:
        return title(self.record)


def title(record: Mapping[str, Any]) -> str:
    """A record's problem, in short."""
    return " ".join(record[name] for name in ("workload", "pass", "precision", "layout"))


def piece_of(fields: Mapping[str, Any]) -> Piece:
    """A piece from a record's "chosen" or "kernels"."""
    return tuple(fields["parts"]), fields["kernel"]


def _entry_key(record: Mapping[str, Any]) -> str:
    return Entry(**{name: record[name] for name in ENTRY_FIELDS}, winner=Winner(())).key


def medians(record: Mapping[str, Any]) -> dict[Piece, float]:
    """Milliseconds by the parts that a kernel computes together and its name."""
    return {
        piece_of(fields): fields["median_ms"]
        for fields in record["kernels"]
        if fields["median_ms"] is not None
    }


def best(record: Mapping[str, Any]) -> tuple[Piece, ...]:
    """The kernels that take the least time together; none where those timed do not suffice."""
    return cheapest(tuple(record["parts"]), medians(record))


def _choice(pieces: tuple[Piece, ...], times: Mapping[Piece, float]) -> Choice | None:
    """None without pieces, or where one of them was not timed."""
    if not pieces or not set(pieces) <= times.keys():
        return None
    return Choice(pieces, sum(times[piece] for piece in pieces))


def regrets(
    records: Iterable[Mapping[str, Any]], winners: Mapping[str, Entry] | None = None
) -> list[Regret]:
    """Of the problems of which every kernel was asked for and both the chosen and the fastest were
    timed; ``winners`` as ``fusedconv.winners.read`` gives them."""
    result = []
    for record in records:
        if record["asked"] != "all":
            continue
        times = medians(record)
        estimated = _choice(tuple(map(piece_of, record["chosen"])), times)
        fastest = _choice(best(record), times)
        if estimated is None or fastest is None:
            continue
        kept = (winners or {}).get(_entry_key(record))
        tuned = None if kept is None else _choice(kept.winner.pieces, times)
        result.append(Regret(record, estimated, fastest, tuned))
    return result


@dataclass(frozen=True)
class RegretSummary:
    """Over the problems of one choice; ``ratios`` are of one at least."""

    ratios: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The geometric mean."""
        return math.exp(statistics.fmean(map(math.log, self.ratios)))

    @property
    def worst(self) -> float:
        return max(self.ratios)

    @property
    def slower(self) -> int:
        """How many are above ``LEVEL``."""
        return sum(ratio > LEVEL for ratio in self.ratios)

    def __str__(self) -> str:
        return (
            f"geometric mean {self.mean:.3f}, worst {self.worst:.2f}, {self.slower} of "
            f"{len(self.ratios)} problems above {LEVEL}"
        )

    def fields(self) -> dict[str, float]:
        """As a file has it."""
        return {
            "problems": len(self.ratios),
            "geometric_mean": self.mean,
            "worst": self.worst,
            "above": self.slower,
            "level": LEVEL,
        }


def regret_summaries(found: Iterable[Regret]) -> dict[str, RegretSummary]:
    """Of what estimates choose ("estimated"); where some problems were tuned, of these before and
    after ("before tuning", "after tuning")."""
    found = list(found)
    tuned = [each for each in found if each.tuned_ratio is not None]
    chosen = {
        "estimated": [each.ratio for each in found],
        "before tuning": [each.ratio for each in tuned],
        "after tuning": [each.tuned_ratio for each in tuned if each.tuned_ratio is not None],
    }
    return {name: RegretSummary(tuple(ratios)) for name, ratios in chosen.items() if ratios}


def fields(found: Iterable[Regret]) -> dict[str, Any]:
    """Regrets as a file has them: their summaries, and each problem's."""
    found = list(found)
    return {
        "summaries": {name: summary.fields() for name, summary in regret_summaries(found).items()},
        "problems": [
            {
                "problem": each.title,
                "estimated": str(each.estimated),
                "best": str(each.best),
                "regret": each.ratio,
                "tuned_regret": each.tuned_ratio,
            }
            for each in found
        ],
    }
