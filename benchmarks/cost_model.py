"""The Hopper convolution's cost model: measures what it is fitted to, fits it, and checks it.

usage: python benchmarks/cost_model.py measure [--output FILE]   times every row (needs a GPU)
       python benchmarks/cost_model.py fit [FILE] [--time graph] fits the constants, needs no GPU
       python benchmarks/cost_model.py check [FILE]              the present constants, needs no GPU

120 problems are drawn from a fixed seed: TF32, strict fp32 and 16 bits by turns, both layouts, two
and three axes, 16 to 256 channels, half of them and more of one sample and few pixels; none is a
benchmark's. Each is computed by every convolution row that supports it, and each TF32 problem by
the rows of strict fp32 too, which are kept apart.

``call_ms`` is the median of CUDA events around one call each, the processor's part included, as the
benchmark times; ``graph_ms`` is the time per call inside a CUDA graph. One input, so that a small
one stays in L2; at least five repetitions, until the middle half lies within two percent.

The fit takes the first 60 problems: the constants of ``fusedconv.kernels.cutlass_sm90`` that
minimise the mean square of log(estimate / measured) over that family's rows. The check is about
what matters, the choice among the rows of both families: how often it is within five percent of
the best, on the 60 problems that were not fitted to.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import os
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusedconv import hypothetical
from fusedconv.benchmark import DTYPES, LAYOUTS, device_facts, header, memory_format
from fusedconv.functional import conv_transpose_act_norm
from fusedconv.kernels.cutlass_sm90 import COSTS, CostConstants, CutlassSm90
from fusedconv.plan import clear_cache
from fusedconv.problem import Problem
from fusedconv.registry import FORCE_VARIABLE, Kernel, registry

RESULTS = Path(__file__).parent / "results" / "h200-cost-model.json"
COUNT = 120
CHANNELS = (16, 20, 24, 32, 36, 48, 64, 80, 96, 100, 128, 160, 192, 256)
NEAR = 1.05  # a choice is good where it takes at most this much of the best row's time
SOFTNESS = 0.05  # estimates that differ by this share weigh about alike


# ---- problems ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Shape:
    """One problem; stride and dilation are 1, padding and kernel the same along every axis."""

    precision: str
    layout: str
    batch: int
    channels: int
    out_channels: int
    spatial: tuple[int, ...]
    kernel_size: int
    padding: int
    bias: bool
    num_groups: int
    activation: str

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Shape:
        return cls(**{**fields, "spatial": tuple(fields["spatial"])})

    @property
    def flops(self) -> int:
        taps = self.kernel_size ** len(self.spatial)
        return 2 * self.batch * self.channels * self.out_channels * taps * math.prod(self.spatial)

    def problem(self) -> Problem:
        """Of the shape on an H200."""
        fields = dataclasses.asdict(self) | {"dtype": DTYPES[self.precision]}
        return hypothetical.problem(device="cuda", architecture=90, **fields)


def _draw(generator: random.Random, precision: str, layout: str, axes: int) -> Shape:
    small = generator.random() < 0.5
    if small:
        low, high = ((14, 64), (6, 20))[axes - 2]
    else:
        low, high = ((32, 192), (12, 40))[axes - 2]
    kernel = generator.choice((2, 3, 3, 3, 4, 5) if axes == 2 else (2, 3, 3))
    out_channels = generator.choice(CHANNELS)
    return Shape(
        precision=precision,
        layout=layout,
        batch=1 if small else generator.randint(2, 32),
        channels=generator.choice(CHANNELS),
        out_channels=out_channels,
        spatial=tuple(generator.randint(low, high) for _ in range(axes)),
        kernel_size=kernel,
        padding=generator.randint(0, kernel - 1),
        bias=generator.random() < 0.5,
        num_groups=generator.choice([g for g in (1, 2, 4, 8, 16) if out_channels % g == 0]),
        activation=generator.choice(("relu", "gelu", "silu")),
    )


def shapes() -> list[Shape]:
    """The same ones each time; large ones at most about a millisecond long."""
    generator = random.Random(20261121)
    result: list[Shape] = []
    while len(result) < COUNT:
        index = len(result)
        precision = ("tf32", "fp32", generator.choice(("fp16", "bf16")))[index % 3]
        shape = _draw(generator, precision, LAYOUTS[index // 3 % 2], 2 + index // 6 % 2)
        if shape.flops <= (3e10 if precision == "fp32" else 1e11) and shape not in result:
            result.append(shape)
    return result


# ---- measuring -----------------------------------------------------------------------------------


def _milliseconds(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    call()
    last.record()
    last.synchronize()
    return first.elapsed_time(last)


def _median(call: Callable[[], object], most: int = 20) -> float:
    """Stops once the middle half lies within two percent."""
    times: list[float] = []
    while len(times) < most:
        times.append(_milliseconds(call))
        if len(times) >= 5:
            quarters = statistics.quantiles(times, n=4)
            if quarters[2] - quarters[0] < 0.02 * quarters[1]:
                break
    return statistics.median(times)


def _in_graph(call: Callable[[], object], milliseconds: float) -> float:
    """Time per call of a graph of about a fifth of a millisecond."""
    repeats = max(1, min(20, round(0.2 / milliseconds)))
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    # torch.cuda.graph() would collect garbage each time, which takes longer than all the rest.
    with torch.cuda.stream(stream):
        graph.capture_begin()
        for _ in range(repeats):
            call()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    graph.replay()
    return _median(graph.replay) / repeats


def _convolutions(problem: Problem) -> list[Kernel]:
    return [
        kernel
        for kernel in registry().kernels()
        if kernel.provider.startswith("cutlass_") and kernel.supports(problem)
    ]


def _call(shape: Shape) -> Callable[[], Tensor]:
    dtype = DTYPES[shape.precision]
    axes = len(shape.spatial)

    def random_tensor(*extents: int) -> Tensor:
        return torch.randn(extents, device="cuda").to(dtype)

    x = random_tensor(shape.batch, shape.channels, *shape.spatial)
    x = x.contiguous(memory_format=memory_format(x.dim(), shape.layout))
    weight = random_tensor(shape.channels, shape.out_channels, *(shape.kernel_size,) * axes)
    bias = random_tensor(shape.out_channels) if shape.bias else None
    norm_weight, norm_bias = random_tensor(shape.out_channels), random_tensor(shape.out_channels)

    def call() -> Tensor:
        return conv_transpose_act_norm(
            x,
            weight,
            bias,
            padding=shape.padding,
            activation=shape.activation,
            num_groups=shape.num_groups,
            norm_weight=norm_weight,
            norm_bias=norm_bias,
            precision=shape.precision if dtype == torch.float32 else None,
        )

    return call


def _rows(shape: Shape) -> dict[str, dict[str, float]]:
    """Times by row of a shape; rows of strict fp32 serve TF32 too."""
    call = _call(shape)
    result = {}
    for kernel in _convolutions(shape.problem()):
        os.environ[FORCE_VARIABLE] = kernel.name
        clear_cache()
        try:
            call()
            call()
            milliseconds = _median(call)
            graph = _in_graph(call, milliseconds)
        finally:
            del os.environ[FORCE_VARIABLE]
            clear_cache()
        result[kernel.name] = {"call_ms": milliseconds, "graph_ms": graph}
    return result


def measure(output: Path, commit: str | None) -> None:
    torch.manual_seed(0)
    problems = []
    with torch.no_grad():
        for index, shape in enumerate(shapes()):
            record = {"shape": dataclasses.asdict(shape), "rows": _rows(shape)}
            problems.append(record)
            torch.cuda.empty_cache()  # what the graphs held
            best = min(record["rows"].items(), key=lambda row: row[1]["call_ms"])
            print(
                f"{index:3} {shape.problem()}: {len(record['rows'])} rows, best "
                f"{best[1]['call_ms']:.4f} ms ({best[1]['graph_ms']:.4f} in a graph), {best[0]}",
                flush=True,
            )
    head = header(device_facts(torch.device("cuda"), 0), commit, {}, __doc__)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({"header": head, "problems": problems}, indent=1) + "\n")


# ---- fitting and checking ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Measured:
    """A problem and its rows' times in milliseconds."""

    problem: Problem
    rows: list[tuple[Kernel, float]]

    @functools.cached_property
    def best(self) -> float:
        return min(time for _, time in self.rows)

    @functools.cached_property
    def _fixed(self) -> list[float | None]:
        """The rows' costs, None for those that depend on the constants."""
        return [
            None if isinstance(kernel, CutlassSm90) else kernel.cost(self.problem)
            for kernel, _ in self.rows
        ]

    def estimates(self, costs: CostConstants) -> list[float]:
        """The model's cost of each row in milliseconds."""
        return [
            kernel.estimate(self.problem, costs)  # type: ignore[attr-defined]
            if fixed is None
            else fixed
            for (kernel, _), fixed in zip(self.rows, self._fixed, strict=True)
        ]

    def choice(self, costs: CostConstants) -> Any:
        """The row that the model takes for the fastest."""
        return self._chosen(costs)[0]

    def chosen(self, costs: CostConstants) -> float:
        """Its time."""
        return self._chosen(costs)[1]

    def _chosen(self, costs: CostConstants) -> tuple[Kernel, float]:
        estimates = self.estimates(costs)
        return self.rows[estimates.index(min(estimates))]

    def regret(self, costs: CostConstants) -> float:
        """log(time / best) of the choice, softened: rows weigh by their estimates' inverse to the
        power 1 / SOFTNESS, so that the search sees where near ties would turn."""
        estimates = self.estimates(costs)
        least = min(estimates)
        weights = [(least / estimate) ** (1 / SOFTNESS) for estimate in estimates]
        regrets = (
            weight * math.log(time / self.best)
            for weight, (_, time) in zip(weights, self.rows, strict=True)
        )
        return sum(regrets) / sum(weights)


def load(problems: Sequence[dict[str, Any]], time: str) -> list[Measured]:
    """``time`` is "call" or "graph". Raises KeyError where a row is not compiled."""
    kernels = {kernel.name: kernel for kernel in registry().kernels()}
    return [
        Measured(
            Shape.of(record["shape"]).problem(),
            [(kernels[name], times[f"{time}_ms"]) for name, times in record["rows"].items()],
        )
        for record in problems
    ]


def loss(problems: Sequence[Measured], costs: CostConstants) -> float:
    """What the choices lose, and a little of what the estimates are off, which ties would hide."""
    regret = statistics.fmean(measured.regret(costs) for measured in problems)
    return regret + 0.1 * estimation_error(problems, costs)


def estimation_error(problems: Sequence[Measured], costs: CostConstants) -> float:
    """Mean square of log(estimate / measured) over the rows of the Hopper family."""
    errors = [
        math.log(kernel.estimate(measured.problem, costs) / time)
        for measured in problems
        for kernel, time in measured.rows
        if isinstance(kernel, CutlassSm90)
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


def fit(problems: Sequence[Measured], start: CostConstants, evaluations: int) -> CostConstants:
    """The constants of least loss; the search moves their logarithms and begins anew twice."""
    names = [field.name for field in dataclasses.fields(CostConstants)]

    def constants(point: Sequence[float]) -> CostConstants:
        return CostConstants(**dict(zip(names, map(math.exp, point), strict=True)))

    point = [math.log(getattr(start, name)) for name in names]
    for step in (0.5, 0.2, 0.1):
        point = nelder_mead(lambda p: loss(problems, constants(p)), point, step, evaluations // 3)
    return constants(point)


def share(problems: Sequence[Measured], costs: CostConstants) -> float:
    """The share of problems whose choice takes at most NEAR times the best row's time."""
    return statistics.fmean(p.chosen(costs) <= NEAR * p.best for p in problems)


def report(title: str, problems: Sequence[Measured], costs: CostConstants) -> None:
    ratios = [measured.chosen(costs) / measured.best for measured in problems]
    near = sum(ratio <= NEAR for ratio in ratios)
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    error = math.sqrt(estimation_error(problems, costs))
    print(
        f"{title}: the choice is within {NEAR - 1:.0%} of the best row on {near} of {len(ratios)} "
        f"problems, geometric mean {mean:.3f}, worst {max(ratios):.2f}; "
        f"root mean square of log(estimate / measured) {error:.3f}"
    )


def halves(problems: Sequence[Measured]) -> tuple[Sequence[Measured], Sequence[Measured]]:
    """(fitted to, checked on)."""
    return problems[: len(problems) // 2], problems[len(problems) // 2 :]


def report_strict(problems: Sequence[Measured]) -> None:
    """Where TF32 is asked for: how the best strict row compares with the best TF32 row."""
    ratios = []
    for measured in problems:
        if measured.problem.precision != "tf32":
            continue
        best = {
            precision: min(t for kernel, t in measured.rows if kernel.precision == precision)
            for precision in ("tf32", "fp32")
        }
        ratios.append((best["fp32"] / best["tf32"], measured))
    free = sum(ratio <= 1.0 for ratio, _ in ratios)
    print(f"strict fp32 takes no longer than TF32 on {free} of {len(ratios)} problems:")
    for ratio, measured in sorted(ratios, key=lambda pair: pair[0]):
        chosen = measured.choice(COSTS).precision
        gflop = measured.problem.conv_flops / 1e9
        print(f"  {ratio:5.2f}  {gflop:8.2f} GFLOP, {chosen} chosen  {measured.problem}")


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
    first, second = halves(load(raw, options.time))
    report("present constants, fitted half", first, COSTS)
    report("present constants, other half", second, COSTS)
    if options.command == "check":
        report_strict([*first, *second])
        return
    fitted = fit(first, COSTS, options.evaluations)
    report("fitted constants, fitted half", first, fitted)
    report("fitted constants, other half", second, fitted)
    for name, value in dataclasses.asdict(fitted).items():
        print(f"    {name}={value:.4g},")


if __name__ == "__main__":
    main()
