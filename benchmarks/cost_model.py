"""The cost models of Hopper's convolution and of torch's operators: measures, fits and checks them.

usage: python benchmarks/cost_model.py measure [--output FILE]   times every kernel (needs a GPU)
       python benchmarks/cost_model.py fit [FILE] [--time graph] fits the constants, needs no GPU
       python benchmarks/cost_model.py check [FILE]              the present constants, needs no GPU

``cost_problems.py`` has the problems, ``cost_times.py`` how they are timed: the forward pass and
each part of the backward pass on every kernel that serves it, ours and torch's (each TF32 problem
on rows of strict fp32 too), and torch's operators one by one.

The constants of ``fusedconv.kernels.cuda.sm90`` and ``sm90_runs`` are fitted to the first 80
problems: they minimise what the choice among compiled rows loses, and a little of
log(estimate / measured). Those of
``fusedconv.kernels.torch`` minimise the softened square of log(estimate / time in a graph),
operator by operator, on all problems, as there are 20 of some kinds; ``call``, which is the
caller's thread's, stays.

The check is about what matters, the choice: how often it is within five percent of the best, on the
80 problems that were not fitted to, among rows of both families and among all candidates, torch's
operators included.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from cost_problems import Shape, shapes
from cost_times import times_by_kernel

from fusedconv.benchmark import device_facts, header
from fusedconv.device import KNOWN
from fusedconv.kernels import torch as vendor
from fusedconv.kernels.cuda import sm90, sm90_runs
from fusedconv.plan import Kernel
from fusedconv.problem import Problem
from fusedconv.registry import registry

RESULTS = Path(__file__).parent / "results" / "h200-cost-model.json"
DEVICE = KNOWN[90]
#: The constants that are fitted, by the kernels whose estimates they make.
Costs = Mapping[type[Kernel], Any]
COSTS: Costs = {sm90.CutlassSm90: sm90.COSTS, sm90_runs.RunsSm90: sm90_runs.COSTS}
NEAR = 1.05  # a choice is good where it takes at most this much of the best candidate's time
SOFTNESS = 0.05  # estimates that differ by this share weigh about alike


def measure(output: Path, commit: str | None) -> None:
    torch.manual_seed(0)
    device = torch.device("cuda", torch.cuda.current_device())
    problems = []
    with torch.no_grad():
        for index, shape in enumerate(shapes()):
            times = times_by_kernel(shape, device)
            problems.append({"shape": dataclasses.asdict(shape), "times": times})
            torch.cuda.empty_cache()  # what the graphs held
            forward = times["forward"]
            best, of_best = min(forward.items(), key=lambda row: row[1]["call_ms"])
            print(
                f"{index:3} {shape.problem()}: {len(forward)} candidates, best "
                f"{of_best['call_ms']:.4f} ms ({of_best['graph_ms']:.4f} in a graph), {best}",
                flush=True,
            )
    head = header(device_facts(device, 0), commit, {}, __doc__)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({"header": head, "problems": problems}, indent=1) + "\n")


# ---- what was measured ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Measured:
    """A problem and its candidates' times in milliseconds."""

    problem: Problem
    rows: list[tuple[Any, float]]

    @property
    def best(self) -> float:
        return min(time for _, time in self.rows)

    @functools.cached_property
    def _fixed(self) -> list[float | None]:
        """The candidates' costs, None for those that depend on the fitted constants."""
        return [
            None if type(kernel) in COSTS else kernel.cost(self.problem, DEVICE)
            for kernel, _ in self.rows
        ]

    def estimates(self, costs: Costs) -> list[float]:
        """The models' cost of each candidate in milliseconds."""
        return [
            kernel.estimate(self.problem, DEVICE, costs[type(kernel)]) if fixed is None else fixed
            for (kernel, _), fixed in zip(self.rows, self._fixed, strict=True)
        ]

    def choice(self, costs: Costs) -> tuple[Any, float]:
        """What the models take for the fastest, and its time."""
        estimates = self.estimates(costs)
        return self.rows[estimates.index(min(estimates))]

    def ratio(self, costs: Costs) -> float:
        """The choice's time over the best."""
        return self.choice(costs)[1] / self.best

    def regret(self, costs: Costs) -> float:
        """log(time / best) of the choice, softened: candidates weigh by their estimates' inverse to
        the power 1 / SOFTNESS, so that the search sees where near ties would turn."""
        estimates = self.estimates(costs)
        least = min(estimates)
        weights = [(least / estimate) ** (1 / SOFTNESS) for estimate in estimates]
        regrets = (
            weight * math.log(time / self.best)
            for weight, (_, time) in zip(weights, self.rows, strict=True)
        )
        return sum(regrets) / sum(weights)

    def compiled(self) -> Measured:
        """Of the compiled rows alone."""
        rows = [(kernel, time) for kernel, time in self.rows if kernel.provider != "torch"]
        return Measured(self.problem, rows)


def load(problems: Sequence[dict[str, Any]], key: str, time: str) -> list[Measured]:
    """A pass's or operator's times; problems without it are left out. ``time`` is "call" or
    "graph". Raises KeyError where a kernel is not compiled."""
    kernels: dict[str, Kernel] = {kernel.name: kernel for kernel in registry().kernels()}
    result = []
    for record in problems:
        shape = Shape.of(record["shape"])
        if key in record["times"]:
            rows = record["times"][key].items()
            result.append(
                Measured(
                    (shape.passes() | shape.operators())[key],
                    [(kernels[name], times[f"{time}_ms"]) for name, times in rows],
                )
            )
    return result


def halves(problems: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """(fitted to, checked on)."""
    return problems[: len(problems) // 2], problems[len(problems) // 2 :]


# ---- fitting -------------------------------------------------------------------------------------


def loss(problems: Sequence[Measured], costs: Costs) -> float:
    """What the choices lose, and a little of what the estimates are off, which ties would hide."""
    regret = statistics.fmean(measured.regret(costs) for measured in problems)
    return regret + 0.1 * estimation_error(problems, costs)


def estimation_error(problems: Sequence[Measured], costs: Costs) -> float:
    """Mean square of log(estimate / measured) over the rows of the Hopper family."""
    errors = [
        math.log(kernel.estimate(measured.problem, DEVICE, costs[type(kernel)]) / time)
        for measured in problems
        for kernel, time in measured.rows
        if type(kernel) in costs
    ]
    return statistics.fmean(error * error for error in errors)


def nelder_mead(
    function: Callable[[list[float]], float], start: Sequence[float], step: float, evaluations: int
) -> list[float]:
    """The best point found (Nelder and Mead, 1965), from a simplex of ``step`` along each axis."""
    points = [list(start)]
    for axis in range(len(start)):
        points.append([v + step * (i == axis) for i, v in enumerate(start)])
    simplex = sorted((function(point), point) for point in points)
    used = len(simplex)
    while used < evaluations:
        centre = [
            statistics.fmean(axis) for axis in zip(*(p for _, p in simplex[:-1]), strict=True)
        ]

        def along(factor: float, centre: list[float] = centre) -> tuple[float, list[float]]:
            worst = simplex[-1][1]
            point = [c + factor * (w - c) for c, w in zip(centre, worst, strict=True)]
            return function(point), point

        tried = along(-1.0)
        used += 1
        if tried[0] < simplex[0][0]:
            tried = min(tried, along(-2.0))
            used += 1
        elif tried[0] >= simplex[-2][0]:
            tried = min(tried, along(0.5 if tried[0] >= simplex[-1][0] else -0.5))
            used += 1
        if tried[0] < simplex[-1][0]:
            simplex[-1] = tried
        else:
            best = simplex[0][1]
            halves = [[(a + b) / 2 for a, b in zip(best, p, strict=True)] for _, p in simplex[1:]]
            simplex[1:] = [(function(point), point) for point in halves]
            used += len(halves)
        simplex.sort()
    return simplex[0][1]


def search(
    function: Callable[[list[float]], float], start: Sequence[float], evaluations: int
) -> list[float]:
    """The best point of three searches, each from where the last one ended."""
    point = list(start)
    for step in (0.5, 0.2, 0.1):
        point = nelder_mead(function, point, step, evaluations // 3)
    return point


def fit(problems: Sequence[Measured], start: Costs, evaluations: int) -> Costs:
    """The Hopper rows' constants of least loss; the search moves their logarithms."""
    names = [(kind, field.name) for kind in start for field in dataclasses.fields(start[kind])]

    def constants(point: Sequence[float]) -> Costs:
        values = dict(zip(names, map(math.exp, point), strict=True))
        return {
            kind: dataclasses.replace(
                old, **{name: value for (of, name), value in values.items() if of is kind}
            )
            for kind, old in start.items()
        }

    point = [math.log(getattr(start[kind], name)) for kind, name in names]
    return constants(search(lambda p: loss(problems, constants(p)), point, evaluations))


# ---- torch's operators ---------------------------------------------------------------------------

#: What is fitted of an operator's cost, with and without products.
EVERY = ("start", "flops", "passes")
NO_FLOPS = ("start", "passes")


@dataclasses.dataclass(frozen=True)
class Unknowns:
    """Some of the constants of torch's operators, as a point of a search that may reach zero: the
    roots of ``values``. ``placed`` puts values into constants."""

    values: Sequence[float]
    placed: Callable[[vendor.CostConstants, Sequence[float]], vendor.CostConstants]

    def of(self, costs: vendor.CostConstants, point: Sequence[float]) -> vendor.CostConstants:
        return self.placed(costs, [root * root for root in point])


def _one(name: str, key: Any, value: vendor.OperatorCost, fields: Sequence[str]) -> Unknowns:
    """Fields of an operator's cost; ``key`` is None where the constant ``name`` is no table."""

    def placed(costs: vendor.CostConstants, values: Sequence[float]) -> vendor.CostConstants:
        cost: Any = dataclasses.replace(value, **dict(zip(fields, values, strict=True)))
        if key is not None:
            cost = {**getattr(costs, name), key: cost}
        return dataclasses.replace(costs, **{name: cost})

    return Unknowns([getattr(value, field) for field in fields], placed)


def _norms(costs: vendor.CostConstants) -> Unknowns:
    """Of both layouts, which share what few groups cost."""
    layouts = list(costs.norm)

    def placed(costs: vendor.CostConstants, values: Sequence[float]) -> vendor.CostConstants:
        few_groups, *others = values
        starts, passes = others[::2], others[1::2]
        norm = {
            layout: vendor.OperatorCost(start, 0.0, each)
            for layout, start, each in zip(layouts, starts, passes, strict=True)
        }
        return dataclasses.replace(costs, norm=norm, few_groups=few_groups)

    pairs = [(cost.start, cost.passes) for cost in costs.norm.values()]
    return Unknowns([costs.few_groups, *(value for pair in pairs for value in pair)], placed)


def operators(
    costs: vendor.CostConstants, problems: Sequence[dict[str, Any]]
) -> Iterator[tuple[str, Unknowns, list[Measured]]]:
    """(name, constants, what they are fitted to) of each of torch's operators."""
    for key, cost in costs.convolution.items():
        what, strict, axes = key
        chosen = [
            record
            for record in problems
            if (record["shape"]["precision"] == "fp32") == strict
            and len(record["shape"]["spatial"]) == axes
        ]
        timed = load(chosen, "convolution" if what == "forward" else what, "graph")
        name = f"{what} {'fp32' if strict else 'tensor cores'} {axes}d"
        yield name, _one("convolution", key, cost, EVERY), timed
    for name in ("bias", "activation"):
        yield name, _one(name, None, getattr(costs, name), NO_FLOPS), load(problems, name, "graph")
    yield "norm", _norms(costs), load(problems, "norm", "graph")
    for layout, cost in costs.norm_backward.items():
        chosen = [record for record in problems if record["shape"]["layout"] == layout]
        unknowns = _one("norm_backward", layout, cost, NO_FLOPS)
        yield f"norm_backward {layout}", unknowns, load(chosen, "norm_backward", "graph")


def _logarithms(problems: Sequence[Measured], costs: vendor.CostConstants) -> list[float]:
    """log(estimate / time) of torch's candidate, without the caller's thread."""
    alone = dataclasses.replace(costs, call=0.0)
    return [
        math.log(max(kernel.estimate(measured.problem, DEVICE, alone), 1e-9) / time)
        for measured in problems
        for kernel, time in measured.rows
        if kernel.provider == "torch"
    ]


def _softened(errors: Sequence[float]) -> float:
    """Near zero the mean square, far from it linear: a library's odd choice is no operator's."""
    return statistics.fmean(2 * (math.sqrt(1 + error * error) - 1) for error in errors)


def fit_torch(
    problems: Sequence[dict[str, Any]], start: vendor.CostConstants, evaluations: int
) -> vendor.CostConstants:
    """The constants of torch's operators, each fitted alone."""
    costs = start
    for _, unknowns, chosen in operators(start, problems):
        if chosen:
            # A root of zero would not be left: its slope is zero.
            roots = [max(math.sqrt(value), 0.1) for value in unknowns.values]

            def error(
                point: Sequence[float],
                unknowns: Unknowns = unknowns,
                chosen: list[Measured] = chosen,
            ) -> float:
                return _softened(_logarithms(chosen, unknowns.of(start, point)))

            costs = unknowns.of(costs, search(error, roots, evaluations))
    return costs


# ---- reporting -----------------------------------------------------------------------------------


def share(problems: Sequence[Measured], costs: Costs) -> float:
    """The share of problems whose choice takes at most NEAR times the best candidate's time."""
    return statistics.fmean(measured.ratio(costs) <= NEAR for measured in problems)


def report(title: str, problems: Sequence[Measured], costs: Costs) -> None:
    ratios = [measured.ratio(costs) for measured in problems]
    near = sum(ratio <= NEAR for ratio in ratios)
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    print(
        f"{title}: the choice is within {NEAR - 1:.0%} of the best on {near} of {len(ratios)} "
        f"problems, geometric mean {mean:.3f}, worst {max(ratios):.2f}"
    )


def report_rows(title: str, problems: Sequence[Measured], costs: Costs) -> None:
    rows = [measured.compiled() for measured in problems]
    report(f"{title}, compiled rows", rows, costs)
    error = math.sqrt(estimation_error(rows, costs))
    print(f"  root mean square of log(estimate / measured) {error:.3f}")


def report_choices(problems: Sequence[dict[str, Any]]) -> None:
    """Among all candidates, of each pass that has several."""
    for time in ("graph", "call"):
        for key in ("forward", "epilogue"):
            for half, records in zip(("fitted", "other"), halves(problems), strict=True):
                if found := load(records, key, time):
                    report(f"{key}, all candidates, {time} times, {half} half", found, COSTS)


def report_torch(problems: Sequence[dict[str, Any]], costs: vendor.CostConstants) -> None:
    for name, _, chosen in operators(costs, problems):
        if chosen:
            errors = _logarithms(chosen, costs)
            square = math.sqrt(statistics.fmean(error * error for error in errors))
            print(
                f"  torch {name}: root mean square of log(estimate / measured) {square:.3f}, mean "
                f"{statistics.fmean(errors):+.3f}, {len(errors)} problems"
            )


def report_strict(problems: Sequence[Measured]) -> None:
    """Where TF32 is asked for: how the best strict row compares with the best TF32 row."""
    ratios = []
    for measured in (each.compiled() for each in problems if each.problem.precision == "tf32"):
        best = {
            precision: min(t for kernel, t in measured.rows if kernel.precision == precision)
            for precision in ("tf32", "fp32")
        }
        ratios.append((best["fp32"] / best["tf32"], measured))
    free = sum(ratio <= 1.0 for ratio, _ in ratios)
    print(f"strict fp32 takes no longer than TF32 on {free} of {len(ratios)} problems:")
    for ratio, measured in sorted(ratios, key=lambda pair: pair[0]):
        chosen = measured.choice(COSTS)[0].precision
        gflop = measured.problem.conv_flops / 1e9
        print(f"  {ratio:5.2f}  {gflop:8.2f} GFLOP, {chosen} chosen  {measured.problem}")


def print_constants(costs: Any) -> None:
    """As they stand in the sources."""
    for field in dataclasses.fields(costs):
        value = getattr(costs, field.name)
        if not isinstance(value, dict):
            print(f"    {field.name}={_shown(value)},")
            continue
        print(f"    {field.name}={{")
        for key, cost in value.items():
            print(f"        {key!r}: {_shown(cost)},".replace("'", '"'))
        print("    },")


def _shown(value: Any) -> str:
    if isinstance(value, vendor.OperatorCost):
        # Three digits, and zero for what a search only comes near to.
        numbers = (f"{0.0 if n < 1e-3 else n:.3g}" for n in dataclasses.astuple(value))
        return f"OperatorCost({', '.join(numbers)})"
    return f"{value:.4g}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--output", type=Path, default=RESULTS)
    measuring.add_argument("--commit")
    for name in ("fit", "check"):
        command = commands.add_parser(name)
        command.add_argument("file", type=Path, nargs="?", default=RESULTS)
        command.add_argument("--time", choices=("call", "graph"), default="graph")
        if name == "fit":
            command.add_argument("--evaluations", type=int, default=6000)
    options = parser.parse_args(arguments)
    if options.command == "measure":
        measure(options.output, options.commit)
        return
    raw = json.loads(options.file.read_text())["problems"]
    first, second = halves(load(raw, "forward", options.time))
    report_rows("present constants, fitted half", first, COSTS)
    report_rows("present constants, other half", second, COSTS)
    if options.command == "check":
        report_choices(raw)
        report_torch(raw, vendor.COSTS)
        report_strict([*first, *second])
        return
    fitted = fit([measured.compiled() for measured in first], COSTS, options.evaluations)
    report_rows("fitted constants, fitted half", first, fitted)
    report_rows("fitted constants, other half", second, fitted)
    for constants in fitted.values():
        print_constants(constants)
    of_torch = fit_torch(raw, vendor.COSTS, options.evaluations // 10)
    report_torch(raw, of_torch)
    print_constants(of_torch)


if __name__ == "__main__":
    main()
