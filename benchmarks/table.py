"""Prints the records of a results file as Markdown tables, times in milliseconds, of layers in us.

Systems have one row a cell; speed-ups are fusedconv's, as torch comes, over the better of the two
eagers and over the best peer. GroupNorm workloads are many and small: their rows are geometric
means of the speed-ups over a peer, the least one, and the share of cells below 0.95. Layers have
a table for each pass and precision, with every contender in its best layout (* is channels last)
and the time until a call returned. Models have a row a cell, before and after conversion.
"""

from __future__ import annotations

import argparse
import collections
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from fusedconv.benchmark import LAYERS, NORMS, Cell, Summary, peer_summaries, summary_lines, times
from fusedconv.benchmark import records as files
from fusedconv.benchmark import rows as gathered
from fusedconv.benchmark.rows import Row
from fusedconv.benchmark.summary import LEVEL
from fusedconv.models import SYSTEMS

EAGERS = ("eager", "eager_cudnn_benchmark")
PEERS = (*EAGERS, "compile", "compile_max_autotune", "rewrite", "rewrite_compile")
COLUMNS = (
    *("cell", "floor", "fusedconv", "vs better eager", "vs best peer"),
    *PEERS,
    "error / eager's",
)


def row(cell: str, records: dict[str, dict]) -> list[str]:
    """The columns of one cell; what was not measured or failed is left empty."""
    medians = {
        name: record["median_ms"]
        for name, record in records.items()
        if record["median_ms"] is not None
    }
    ours = medians.get("fusedconv")

    def shown(time: float | None) -> str:
        return "" if time is None else f"{time:.2f}"

    def over(peers: tuple[str, ...]) -> str:
        known = [medians[peer] for peer in peers if peer in medians]
        return f"{min(known) / ours:.2f}x" if known and ours is not None else ""

    error = ""
    if ours is not None and "eager" in medians:
        error = f"{records['fusedconv']['error_fp64'] / records['eager']['error_fp64']:.2f}"
    floors = [record["floor_ms"] for record in records.values() if record["floor_ms"] is not None]
    return [
        cell,
        shown(floors[0] if floors else None),
        shown(ours),
        over(EAGERS),
        over(PEERS),
        *(shown(medians.get(name)) for name in PEERS),
        error,
    ]


def print_table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    columns = tuple(columns)
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for each in rows:
        print("| " + " | ".join(each) + " |")


def print_systems(records: list[dict]) -> None:
    """One row a cell; columns of what was not measured are left out."""
    cells: dict[str, dict[str, dict]] = {}
    for record in records:
        cells.setdefault(Cell.of(record).title, {})[record["contender"]] = record
    present = {record["contender"] for record in records}
    absent = {"fusedconv", *PEERS} - present
    if all(record["floor_ms"] is None for record in records):
        absent.add("floor")
    shown = [index for index, name in enumerate(COLUMNS) if name not in absent]
    rows = [row(cell, found) for cell, found in sorted(cells.items())]
    print_table(
        (COLUMNS[index] for index in shown),
        ([each[index] for index in shown] for each in rows),
    )


def norm_key(part: str) -> Callable[[Cell], str]:
    """What cells are gathered by."""
    return {
        "all": lambda cell: "all",
        "dtype and layout": lambda cell: f"{cell.precision} {cell.layout}",
        "activation": lambda cell: NORMS[cell.workload].variant,
        "shape": lambda cell: NORMS[cell.workload].plain_name.removeprefix("group_norm_"),
    }[part]


def print_norms(records: list[dict]) -> None:
    """Speed-ups of all cells, and by dtype and layout, activation, and shape."""
    found = peer_summaries(times(records))
    rows: dict[str, dict[tuple[str, str], dict[Cell, float]]] = {}
    for part in ("all", "dtype and layout", "activation", "shape"):
        key = norm_key(part)
        for which, summary in found.items():
            for cell, ratio in summary.ratios.items():
                rows.setdefault(key(cell), {}).setdefault(which, {})[cell] = ratio
    print_table(
        ("cells", *(f"{pass_} over {peer}" for pass_, peer in found)),
        (
            [name, *(in_short(ratios.get(which)) for which in found)]
            for name, ratios in rows.items()
        ),
    )


def in_short(ratios: dict[Cell, float] | None) -> str:
    if ratios is None:
        return ""
    summary = Summary(ratios)
    text = f"{summary.mean:.2f}x, least {summary.least:.2f}x"
    return f"{text}, {summary.slower} of {len(ratios)} slower" if summary.slower else text


def microseconds(record: dict | None) -> str:
    if record is None:
        return ""
    time = record["median_ms"] * 1e3
    return f"{time:.{1 if time < 10 else 0}f}{'*' if record['layout'] == 'nhwc' else ''}"


def layer_row(row: Row, peers: Iterable[str]) -> list[str]:
    floor, share = row.floor_ms, row.share
    return [
        row.name,
        "" if floor is None else f"{floor * 1e3:.1f}",
        microseconds(row.ours),
        "" if share is None else f"{share:.0%}",
        f"{row.speed_up:.2f}x",
        *(microseconds(row.best.get(name)) for name in peers),
        f"{row.ours['host_us']:.0f}, {row.peer['host_us']:.0f}",
        f"{row.ours['error_fp64'] / row.peer['error_fp64']:.2f}",
        # What autograd follows is computed by no kernel, whatever serves the forward pass alone.
        "torch" if row.ours.get("chosen_by") == "autograd" else row.ours["kernel"],
    ]


def print_layers(records: list[dict]) -> None:
    """A table for each pass and precision, the last row of geometric means."""
    for (pass_, precision), found in gathered.rows(records).items():
        peers = tuple(dict.fromkeys(name for row in found for name in row.peers))
        speed_ups = gathered.best_peer_summary(found)
        shares = [row.share for row in found if row.share is not None]
        print(f"{pass_} {precision}\n")
        columns = ("layer", "floor", "fusedconv", "of the floor", "vs best peer", *peers)
        last = [
            "geometric mean",
            *("", ""),
            f"{statistics.geometric_mean(shares):.0%}" if shares else "",
            f"{speed_ups.mean:.2f}x",
            *("" for _ in peers),
            *("", "", f"{speed_ups.slower} of {len(found)} below {LEVEL}x"),
        ]
        print_table(
            (*columns, "host, best peer's", "error / best peer's", "kernel"),
            (*(layer_row(row, peers) for row in found), last),
        )
        print()


def print_models(records: list[dict]) -> None:
    """One row for each model and cell: times before and after conversion and the errors against
    float64, and what was replaced how often."""
    cells: dict[tuple[str, ...], dict[str, dict]] = {}
    for record in records:
        key = (record["workload"], record["pass"], record["precision"], record["layout"])
        cells.setdefault(key, {})[record["contender"]] = record
    named = {record["contender"] for record in records}
    others = [each for each in ("compile", "compile_backend") if each in named]

    def row(key: tuple[str, ...], found: dict[str, dict]) -> list[str]:
        before, after = found["original"], found["converted"]
        counts = collections.Counter(after["replaced"])
        return [
            " ".join(key),
            *(f"{each['median_ms']:.2f}" for each in (before, after)),
            f"{before['median_ms'] / after['median_ms']:.2f}x",
            *(f"{found[each]['median_ms']:.2f}" if each in found else "" for each in others),
            *(f"{each['error_fp64']:.1e}" for each in (before, after)),
            ", ".join(f"{count} {chain}" for chain, count in counts.items()),
        ]

    print_table(
        ("model", "original", "converted", "", *others, "error", "converted's", "replaced"),
        (row(key, found) for key, found in cells.items()),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    default = Path(__file__).parent / "results" / "h200.json"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "file",
        type=Path,
        nargs="?",
        default=default,
        help="as fusedconv bench or published_models.py writes it (default: results/h200.json)",
    )
    path: Path = parser.parse_args(arguments).file
    try:
        records = files.read(path, (*files.KEY, "median_ms"))
    except OSError as error:
        parser.error(f"{path}: {error.strerror}")
    except ValueError as error:
        parser.error(str(error).removeprefix("output: "))
    if records and records[0]["contender"] in ("original", "converted"):
        print_models(records)
        return
    systems = [record for record in records if record["workload"] in SYSTEMS]
    norms = [record for record in records if record["workload"] in NORMS]
    if systems:
        print_systems(systems)
    print_layers([record for record in records if record["workload"] in LAYERS])
    if norms:
        if systems:
            print()
        print_norms(norms)
        print()
        print("\n".join(f"    {line}" for line in summary_lines(norms)))


if __name__ == "__main__":
    main()
