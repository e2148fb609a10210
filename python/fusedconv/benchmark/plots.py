"""Plots of records: against peers, against the device's rates, which kernel wins, regret.

matplotlib, the extra ``fusedconv[plot]``, is imported when one is drawn.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fusedconv.benchmark import kernels, regret, rows
from fusedconv.benchmark import records as files
from fusedconv.benchmark.cells import ALL_PRECISIONS
from fusedconv.benchmark.measuring import conv_flops
from fusedconv.benchmark.timing import matrix_rate, work
from fusedconv.benchmark.workloads import WORKLOADS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

Content = Mapping[str, Any]

OURS, SLOWER, FLOOR = "tab:blue", "tab:red", "black"
_PALETTE = ("#fdae6b", "#e6550d", "#a1d99b", "#31a354", "#bcbddc", "#756bb1")
PEERS = dict(zip(rows.PEERS, _PALETTE, strict=True))
_SMALL = 7.0
#: Characters of a name, and the least regret that has a bar.
_LONGEST = 60
_SHOWN = 0.01


class NothingToPlotError(ValueError):
    """Records without what a kind of plot shows."""


# ---- records -------------------------------------------------------------------------------------


def load(path: Path) -> dict[str, Any]:
    """A file of records of contenders or of kernels. Raises ValueError where it is neither, OSError
    where it cannot be read."""
    try:
        return files.load(path, files.FIELDS)
    except ValueError:
        return files.load(path, kernels.FIELDS)


def _rows(content: Content) -> dict[tuple[str, str], list[rows.Row]]:
    found = rows.rows(r for r in content["records"] if "contender" in r)
    if not found:
        raise NothingToPlotError("got no records of fusedconv next to a peer")
    return found


def _of_kernels(content: Content) -> list[dict[str, Any]]:
    """Those measured on what was measured on last."""
    found = [r for r in content["records"] if "asked" in r and regret.best(r)]
    if not found:
        raise NothingToPlotError("got no records of every kernel of a problem (bench --kernels)")
    latest = max(found, key=lambda record: record["run"])
    return [r for r in found if all(r[name] == latest[name] for name in ("device", "versions"))]


#: Of a panel.
_MOST_BARS = 28
#: A panel's pass, precision, and what else tells it apart.
_Key = tuple[Any, ...]


@functools.cache
def _extents(workload: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """FLOPs of the convolution, and the output's elements."""
    with torch.device("meta"), torch.no_grad():
        model = WORKLOADS[workload].original(*WORKLOADS[workload].init_arguments)
        output = model(torch.empty(shape))
    return conv_flops(model, shape), output.numel()


def _work(record: Mapping[str, Any]) -> tuple[int, int]:
    """FLOPs and bytes that a contender's cell cannot do without."""
    shape = tuple(record["shape"])
    flops, outputs = _extents(record["workload"], shape)
    itemsize = getattr(torch, record["dtype"]).itemsize
    return work(flops, math.prod(shape) * itemsize, outputs * itemsize, record["pass"])


# ---- figures -------------------------------------------------------------------------------------


def _title(content: Content) -> str:
    header = content["header"]
    return ", ".join(
        str(part)
        for part in (header.get("device"), f"torch {header.get('torch')}", header.get("commit"))
        if part is not None
    )


def _figure(content: Content, width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(_title(content))
    return figure


def _panels(
    content: Content, keys: Iterable[_Key], width: float, height: float
) -> tuple[Figure, dict[_Key, Axes]]:
    """A panel for each pass (columns) and precision (rows, by part where there are several), of a
    size in inches."""
    keys = list(keys)
    passes = sorted({key[0] for key in keys})
    places = {precision: place for place, precision in enumerate(ALL_PRECISIONS)}
    below = sorted({key[1:] for key in keys}, key=lambda row: (places[row[0]], *row[1:]))
    figure = _figure(content, width * len(passes), height * len(below))
    axes = figure.subplots(len(below), len(passes), squeeze=False)
    result = {}
    for column, pass_ in enumerate(passes):
        for row, rest in enumerate(below):
            key = (pass_, *rest)
            if key in keys:
                result[key] = axes[row, column]
            else:
                axes[row, column].set_axis_off()
    return figure, result


def _shortened(text: str, longest: int = _LONGEST) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}\u2026"


def _plain(axis: Axis) -> None:
    """A logarithmic axis with numbers as they are written, at 1, 2 and 5."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def _bars(axis: Axes, place: int, row: rows.Row) -> None:
    """A row's contenders, fusedconv first, from 1: the slower ones hang down."""
    contenders = ("fusedconv", *row.peers)
    width = 0.85 / len(contenders)
    left = place - 0.425
    for number, name in enumerate(contenders):
        color = PEERS.get(name, OURS if row.speed_up >= 1 else SLOWER)
        axis.bar(
            left + (number + 0.5) * width,
            row.speed(name) - 1,
            width,
            bottom=1,
            color=color,
            edgecolor=color,  # the best peer's is nothing but this
            linewidth=2 if row.speed(name) == 1 else 0,
        )
    if row.possible is not None:
        axis.hlines(row.possible, left, left + 0.85, FLOOR, linewidth=2)
    axis.annotate(
        f"{row.speed_up:.2f}",
        (left + 0.5 * width, max(row.speed_up, 1)),
        xytext=(0, 2),
        textcoords="offset points",
        ha="center",
        fontsize=_SMALL,
        zorder=5,  # above the mark of the floor
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.9, "pad": 0.3},
    )


def peers(content: Content) -> Figure:
    """Bars of each contender's speed, the best peer's being 1; marks where a kernel on the floor
    would be. A panel for each pass and precision."""
    found = _rows(content)
    parts = {
        (*key, start): group[start : start + _MOST_BARS]
        for key, group in found.items()
        for start in range(0, len(group), _MOST_BARS)
    }
    widest = max(map(len, parts.values()))
    figure, panels = _panels(content, parts, max(6.5, 0.5 * widest + 1), 3.0)
    for key, axis in panels.items():
        pass_, precision, start = key
        group = parts[key]
        for place, row in enumerate(group):
            _bars(axis, place, row)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_yscale("log")
        _plain(axis.yaxis)
        axis.set_xticks(range(len(group)), [row.name for row in group], rotation=30, ha="right")
        axis.tick_params(labelsize="small")
        axis.set_ylabel("times as fast as the best peer", fontsize="small")
        whole = found[pass_, precision]
        mean = rows.best_peer_summary(whole).mean
        if start == 0:
            axis.set_title(f"{pass_} {precision}: geometric mean {mean:.2f}x", fontsize="medium")
        axis.set_xlim(-0.7, min(len(whole), _MOST_BARS) - 0.3)
    names = {name for group in found.values() for row in group for name in row.best}
    _legend(
        figure,
        {"fusedconv": OURS, "fusedconv, slower": SLOWER}
        | {name: color for name, color in PEERS.items() if name in names}
        | {"the floor": FLOOR},
    )
    return figure


def _legend(figure: Figure, colors: Mapping[str, Any]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=color, label=label) for label, color in colors.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize="small")


#: FLOPs, bytes, milliseconds, name, and whether it is the better one of a pair.
_Point = tuple[int, int, float, str, bool]


def _points(content: Content) -> tuple[tuple[str, str], dict[tuple[str, str], list[_Point]]]:
    """What the two colours are, and the points of each panel; those without a convolution have
    no place."""
    result: dict[tuple[str, str], list[_Point]] = {}
    if "contender" in content["records"][0]:
        for key, group in _rows(content).items():
            for row in group:
                for record, ours in ((row.peer, False), (row.ours, True)):
                    point = (*_work(record), record["median_ms"], row.name, ours)
                    result.setdefault(key, []).append(point)
        names = "fusedconv", "the best peer"
    else:
        for found in regret.regrets(_of_kernels(content)):
            problem = found.record
            name = f"{problem['workload']} {problem['layout']}"
            for choice, best in ((found.estimated, False), (found.best, True)):
                if problem["flops"] is not None:
                    point = problem["flops"], problem["bytes"], choice.milliseconds, name, best
                    result.setdefault((problem["pass"], problem["precision"]), []).append(point)
        names = "the best kernel", "the one of the lowest estimate"
    kept = {key: [p for p in points if p[0]] for key, points in result.items()}
    return names, {key: points for key, points in kept.items() if points}


def _annotate(axis: Axes, labels: Iterable[tuple[tuple[float, float], str]]) -> None:
    """Names beside points, where they cover no other name."""
    points_per_pixel = 72 / axis.figure.dpi
    taken: list[tuple[float, float, float]] = []
    for point, text in labels:
        x, y = axis.transData.transform(point) * points_per_pixel
        width = 0.6 * _SMALL * len(text)
        places = [(dx, dy) for dy in (-2.5, 5, -10, 12, -17, 19, -24) for dx in (5, -5 - width)]

        spans = [(x + dx, x + dx + width, y + dy) for dx, dy in places]
        free = [
            all(
                abs(y - other) > _SMALL or right < start or end < left
                for start, end, other in taken
            )
            for left, right, y in spans
        ]
        number = free.index(True) if True in free else 0
        taken.append(spans[number])
        place = places[number]
        annotation = axis.annotate(
            text, point, xytext=place, textcoords="offset points", fontsize=_SMALL, zorder=4
        )
        annotation.set_in_layout(False)  # else long names leave the panel no room
        annotation.set_clip_on(True)


def roofline(content: Content) -> Figure:
    """Achieved FLOP/s over FLOPs a byte that must move, below what the device's copy and matrix
    rates allow. A panel for each pass and precision."""
    rates = content["header"].get("rates")
    if not content["records"] or not rates:
        raise NothingToPlotError("got no rates of the device, expected those of a GPU")
    names, found = _points(content)
    if not found:
        raise NothingToPlotError("got no forward pass with a convolution")
    figure, panels = _panels(content, found, 7.0, 4.5)
    colors = {True: OURS, False: "0.6"}
    names_of: dict[Axes, list[tuple[tuple[float, float], str]]] = {}
    for (pass_, precision), axis in panels.items():
        points = found[pass_, precision]
        peak = matrix_rate(precision, rates)
        ridge = peak / rates["copy"]
        densities = [flops / moved for flops, moved, *_ in points]
        ends = [min(*densities, ridge) / 2, ridge, max(*densities, ridge) * 2]
        axis.plot(ends, [min(peak, x * rates["copy"]) / 1e12 for x in ends], color=FLOOR)
        names_of[axis] = []
        for flops, moved, milliseconds, name, better in points:
            x, y = flops / moved, flops / milliseconds / 1e9
            axis.scatter(x, y, s=16, color=colors[better], zorder=2 + better)
            if better:
                names_of[axis].append(((x, y), _shortened(name, _LONGEST // 2)))
        axis.set_xscale("log")
        axis.set_yscale("log")
        for each in (axis.xaxis, axis.yaxis):
            _plain(each)
        axis.tick_params(labelsize="small")
        axis.set_xlabel("FLOPs of the convolution per byte of input and output", fontsize="small")
        axis.set_ylabel("TFLOP/s", fontsize="small")
        axis.set_title(
            f"{pass_} {precision}: {peak / 1e12:.0f} TFLOP/s, {rates['copy'] / 1e12:.2f} TB/s",
            fontsize="medium",
        )
    _legend(figure, {names[0]: OURS, names[1]: "0.6", "the device's rates": FLOOR})
    figure.draw_without_rendering()  # gives the panels their sizes
    for axis, labels in names_of.items():
        _annotate(axis, labels)
    return figure


def _winners(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[tuple[str, str, str], Any]]:
    """Kernel and provider by pass (with the part, where it has several) and by workload, precision
    and layout."""
    result: dict[str, dict[tuple[str, str, str], Any]] = {}
    for record in records:
        providers = {each["kernel"]: each["provider"] for each in record["kernels"]}
        for parts, kernel in regret.best(record):
            for part in parts:
                name = record["pass"] if part == "forward" else f"{record['pass']}, {part}"
                where = record["workload"], record["precision"], record["layout"]
                result.setdefault(name, {})[where] = kernel, providers[kernel]
    return result


def kernel_map(content: Content) -> Figure:
    """Which kernel is the fastest of each workload, precision and layout, coloured by provider. A
    panel for each pass, of backward passes for each part."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    found = _winners([r for r in _of_kernels(content) if r["asked"] == "all"])
    if not found:
        raise NothingToPlotError("got no problem of which every kernel was timed")
    providers = sorted({provider for cells in found.values() for _, provider in cells.values()})
    palette = [colormaps["Pastel1"](number % 9) for number in range(len(providers))]
    layouts = sorted({key[2] for cells in found.values() for key in cells})
    columns = [
        (precision, layout)
        for precision in ALL_PRECISIONS
        for layout in layouts
        if any(key[1:] == (precision, layout) for cells in found.values() for key in cells)
    ]
    names = {part: list(dict.fromkeys(key[0] for key in cells)) for part, cells in found.items()}
    heights = [len(each) + 2 for each in names.values()]
    longest = max(len(name) for each in names.values() for name in each)
    figure = _figure(content, 2.1 * len(columns) + 0.08 * longest, 0.3 * sum(heights) + 1)
    axes = figure.subplots(len(found), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, (part, cells) in zip(axes, found.items(), strict=True):
        grid = [[math.nan] * len(columns) for _ in names[part]]
        for (workload, *column), (kernel, provider) in cells.items():
            x, y = columns.index((column[0], column[1])), names[part].index(workload)
            grid[y][x] = providers.index(provider)
            axis.text(x, y, kernel, ha="center", va="center", fontsize=_SMALL - 1)
        axis.imshow(
            grid,
            cmap=ListedColormap(palette),
            vmin=-0.5,
            vmax=len(providers) - 0.5,
            aspect="auto",
            interpolation="nearest",
        )
        titles = [" ".join(each) for each in columns]
        axis.set_xticks(range(len(columns)), titles, fontsize=_SMALL)
        axis.set_yticks(range(len(names[part])), names[part], fontsize=_SMALL)
        axis.set_title(part, fontsize="medium")
    _legend(figure, dict(zip(providers, palette, strict=True)))
    return figure


def regrets(content: Content) -> Figure:
    """Bars of the time of what estimates choose over the fastest, by problem; where they were
    tuned, of what tuning chooses too."""
    stored = content.get("regret")
    if not stored or not stored["problems"]:
        raise NothingToPlotError("got no regret of a problem (bench --kernels all)")
    problems = sorted(stored["problems"], key=lambda each: each["regret"])
    slower = [p for p in problems if max(p["regret"], p["tuned_regret"] or 1) >= 1 + _SHOWN]
    shown = slower or problems[-1:]
    figure = _figure(content, 10.0, 0.25 * len(shown) + 1.7)
    axis = figure.subplots()
    colors = {"estimated": OURS, "tuned": "tab:orange"}
    for name, field, offset in (("estimated", "regret", 0.2), ("tuned", "tuned_regret", -0.2)):
        timed = [(y, p[field]) for y, p in enumerate(shown) if p[field] is not None]
        if not timed:
            del colors[name]
        for y, ratio in timed:
            axis.barh(y + offset, ratio - 1, 0.4, left=1, color=colors[name])
    names = [f"{_shortened(p['problem'])}: {_shortened(p['estimated'])}" for p in shown]
    axis.set_yticks(range(len(shown)), names, fontsize=_SMALL)
    axis.set_ylim(-0.6, len(shown) - 0.4)
    axis.set_xlim(
        1, max(1.1, *(1.02 * (p[k] or 1) for p in shown for k in ("regret", "tuned_regret")))
    )
    axis.set_xlabel("time of the chosen kernels over that of the fastest")
    totals = [
        f"{name}: geometric mean {each['geometric_mean']:.3f}, worst {each['worst']:.2f}"
        for name, each in stored["summaries"].items()
    ]
    totals.append(f"{len(slower)} of {len(problems)} problems above {1 + _SHOWN}")
    axis.set_title("\n".join(totals), fontsize="medium")
    _legend(figure, colors)
    return figure


#: By name.
KINDS: dict[str, Callable[[Content], Figure]] = {
    "peers": peers,
    "roofline": roofline,
    "kernels": kernel_map,
    "regret": regrets,
}


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Writes a figure as PNG and as SVG, the same bytes for the same figure; the files' paths."""
    import matplotlib

    paths = [folder / f"{name}.{kind}" for kind in ("png", "svg")]
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(paths[0], dpi=120)
        figure.savefig(paths[1], metadata={"Date": None})
    return paths
