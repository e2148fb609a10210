"""The Hopper cost model: what it is fitted to, how, and how well it chooses. Needs no GPU."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest
from problems import explained
from scripts import script

import fusedconv
from fusedconv.kernels.cutlass_sm90 import COSTS, CutlassSm90
from fusedconv.models import SYSTEMS

pytestmark = pytest.mark.skipif(
    not fusedconv.build["cuda"], reason="fusedconv was built without CUDA"
)

model = script("cost_model")

#: The share of the problems that were not fitted to on which the choice must be good.
SHARE = 0.8


def test_problems_are_the_same_each_time_and_in_no_benchmark():
    shapes = model.shapes()
    assert shapes == model.shapes()
    assert len(set(shapes)) == 120
    benchmarks = {system.input_shape for system in SYSTEMS.values()}
    assert not {(s.batch, s.channels, *s.spatial) for s in shapes} & benchmarks
    for half in (shapes[:60], shapes[60:]):
        for precision in ("tf32", "fp32"):
            assert sum(s.precision == precision for s in half) == 20
        assert {(s.layout, len(s.spatial)) for s in half} == {
            (layout, axes) for layout in ("nchw", "nhwc") for axes in (2, 3)
        }
        assert any(s.batch == 1 and max(s.spatial) < 64 for s in half)


def test_both_families_compute_every_problem():
    for shape in model.shapes():
        providers = {kernel.provider for kernel in model._convolutions(shape.problem())}
        assert providers == {"cutlass_sm80", "cutlass_sm90"}


def test_the_search_finds_a_minimum():
    def rosenbrock(point):
        x, y = point
        return (1 - x) ** 2 + 100 * (y - x * x) ** 2

    assert model.nelder_mead(rosenbrock, (-1.2, 1.0), 0.5, 400) == pytest.approx([1, 1], abs=1e-3)


def written(problems, costs, noise=0.0) -> list[dict]:
    """A file's problems, were the device what the model says with these constants."""
    generator = random.Random(0)
    result = []
    for shape in problems:
        problem = shape.problem()
        rows = {}
        for kernel in model._convolutions(problem):
            hopper = isinstance(kernel, CutlassSm90)
            time = kernel.estimate(problem, costs) if hopper else kernel.cost(problem)
            time *= 1 + generator.uniform(-noise, noise)
            rows[kernel.name] = {"call_ms": time, "graph_ms": time}
        result.append({"shape": dataclasses.asdict(shape), "rows": rows})
    return json.loads(json.dumps(result))


def test_the_fit_finds_what_the_times_came_from():
    true = dataclasses.replace(COSTS, step_tf32=20.0, turn=1000.0, stage=2000.0)
    problems = model.load(written(model.shapes()[:30], true), "call")
    fitted = model.fit(problems, COSTS, 900)
    assert model.loss(problems, fitted) < 0.5 * model.loss(problems, COSTS)
    assert model.share(problems, true) == 1.0
    assert model.share(problems, fitted) == 1.0 > model.share(problems, COSTS)


def test_the_share_counts_choices_by_their_times():
    (measured,) = model.load(written(model.shapes()[:1], COSTS), "call")
    assert model.share([measured], COSTS) == 1.0
    chosen = measured.chosen(COSTS)
    slower = [(k, t * 2 if t == chosen else t) for k, t in measured.rows]
    assert model.share([dataclasses.replace(measured, rows=slower)], COSTS) == 0.0


def test_the_commands_report(tmp_path, capsys):
    path = tmp_path / "figures.json"
    problems = written(model.shapes()[:12], COSTS, noise=0.1)
    path.write_text(json.dumps({"problems": problems}))
    model.main(["check", str(path), "--time", "graph"])
    output = capsys.readouterr().out
    assert "other half: the choice is within 5% of the best row on" in output
    assert "strict fp32 takes no longer than TF32 on" in output
    model.main(["fit", str(path), "--evaluations", "60"])
    assert "    step_tf32=" in capsys.readouterr().out


@pytest.mark.skipif(not model.RESULTS.exists(), reason="no measured times are committed")
def test_the_choice_is_good_on_measured_times():
    raw = json.loads(model.RESULTS.read_text())["problems"]
    assert [model.Shape.of(record["shape"]) for record in raw] == model.shapes()
    _, other = model.halves(model.load(raw, "graph"))
    assert model.share(other, COSTS) >= SHARE


def chosen_precision(shape) -> str:
    kernel = explained(shape.problem())[0].kernel
    return "fp32" if "tf32x3" in kernel else "tf32"


def test_strict_fp32_serves_tf32_where_it_takes_no_longer():
    """Long sums of small problems, which strict fp32 cuts into parts that more blocks take."""
    small = model.Shape(
        precision="tf32", layout="nhwc", batch=1, channels=256, out_channels=24,
        spatial=(8, 18, 18), kernel_size=3, padding=0, bias=False, num_groups=8, activation="relu",
    )  # fmt: skip
    assert chosen_precision(small) == "fp32"
    for larger in ({"batch": 64}, {"channels": 16, "spatial": (32, 64, 64)}):
        assert chosen_precision(dataclasses.replace(small, **larger)) == "tf32"


def test_tf32_is_never_taken_for_strict_fp32():
    for shape in model.shapes():
        if shape.precision == "fp32":
            kernels = model._convolutions(shape.problem())
            assert {kernel.precision for kernel in kernels} == {"fp32"}
