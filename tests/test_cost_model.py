"""The cost models: what they are fitted to, how, and how well they choose. Needs no GPU."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest
import torch
from problems import explained
from scripts import script

import fusedconv
from fusedconv import hypothetical
from fusedconv.benchmark import DTYPES, LAYOUTS
from fusedconv.device import KNOWN
from fusedconv.kernels import torch as vendor
from fusedconv.kernels.cuda.sm90 import CutlassSm90
from fusedconv.models import SYSTEMS
from fusedconv.problem import BackwardProblem, ForwardProblem
from fusedconv.registry import registry
from fusedconv.selection import choose

model = script("cost_model")
times = script("cost_times")

CPU = torch.device("cpu")
H200 = KNOWN[90]
#: The share of the problems that were not fitted to on which the choice must be good.
SHARE = 0.8

needs_hopper = pytest.mark.skipif(
    "sm90" not in fusedconv.build.get("families", ()),
    reason="fusedconv was built without kernels for compute capability 9.0",
)

# ---- problems ------------------------------------------------------------------------------------


def test_problems_are_the_same_each_time_and_in_no_benchmark():
    shapes = model.shapes()
    assert shapes == model.shapes()
    assert len(set(shapes)) == 160
    benchmarks = {system.input_shape for system in SYSTEMS.values()}
    assert not {(s.batch, s.channels, *s.spatial) for s in shapes} & benchmarks
    for half in model.halves(shapes):
        for precision in ("tf32", "fp32"):
            assert sum(s.precision == precision for s in half) >= 26
        assert {(s.layout, len(s.spatial)) for s in half} == {
            (layout, axes) for layout in ("nchw", "nhwc") for axes in (2, 3)
        }
        assert any(s.batch == 1 and max(s.spatial) < 64 for s in half)
        assert sum(s.layout == "nchw" and s.spatial[-1] % 8 == 0 for s in half) >= 20


def small(**changes):
    """A shape that a processor computes at once."""
    fields = dict(
        precision="fp32", layout="nhwc", batch=2, channels=5, out_channels=6, spatial=(4, 7),
        kernel_size=3, padding=1, bias=True, num_groups=2, activation="silu",
    )  # fmt: skip
    return model.Shape(**(fields | changes))


def test_a_backward_pass_is_measured_part_by_part():
    assert set(small().passes()) == {"forward", "epilogue", "input", "weight", "bias"}
    assert set(small(bias=False).passes()) == {"forward", "epilogue", "input", "weight"}
    for name, problem in small().passes().items():
        assert problem.parts == (name,)


def test_operators_are_of_torch_one_each():
    for name, problem in small().operators().items():
        (kernel,) = (k for k in times.serving(problem, H200) if k.provider == "torch")
        assert len(kernel.compile(problem, H200).steps) == 1, name


@pytest.mark.parametrize(
    "changes",
    [{}, {"layout": "nchw", "bias": False, "spatial": (3, 4, 5)}, {"precision": "bf16"}],
    ids=str,
)
def test_every_kernel_runs_on_random_tensors(changes):
    """On the processor, where no GPU is needed to find a plan that its tensors do not suit."""
    shape, device = small(**changes), fusedconv.device.device_record(CPU)
    for name, problem in (shape.passes() | shape.operators()).items():
        forward = isinstance(problem, ForwardProblem)
        tensors = times.inputs(problem, CPU) if forward else times.saved(problem.forward, CPU)
        kernels = times.serving(problem, device)
        assert "torch" in {kernel.provider for kernel in kernels}
        for kernel in kernels:
            found = times.runner(kernel, problem, CPU, tensors)()
            given = {field for field in found._fields if getattr(found, field) is not None}
            assert given == ({"output"} if forward else problem.gradients), (name, kernel.name)


@needs_hopper
def test_both_families_and_torch_compute_the_problems():
    """But a few of strict fp32, of which the stages of no Hopper row fit."""
    served = [
        {kernel.provider for kernel in times.serving(shape.problem(), H200)}
        for shape in model.shapes()
    ]
    assert all({"cutlass_sm80", "torch"} <= providers for providers in served)
    assert sum("cutlass_sm90" in providers for providers in served) >= len(served) - 3


# ---- the fit -------------------------------------------------------------------------------------


def test_the_search_finds_a_minimum():
    def rosenbrock(point):
        x, y = point
        return (1 - x) ** 2 + 100 * (y - x * x) ** 2

    assert model.nelder_mead(rosenbrock, (-1.2, 1.0), 0.5, 400) == pytest.approx([1, 1], abs=1e-3)


def written(shapes, costs=model.COSTS, torchs=vendor.COSTS, noise=0.0) -> list[dict]:
    """A file's problems, were the device what the models say with these constants."""
    generator = random.Random(0)

    def record(kernel, problem):
        constants = torchs if kernel.provider == "torch" else costs.get(type(kernel))
        if constants is not None:
            time = kernel.estimate(problem, H200, constants)
        else:
            time = kernel.cost(problem, H200)
        time *= 1 + generator.uniform(-noise, noise)
        return {"call_ms": time, "graph_ms": time}

    result = []
    for shape in shapes:
        found = {
            name: {kernel.name: record(kernel, p) for kernel in times.serving(p, H200)}
            for name, p in shape.passes().items()
        }
        for name, p in shape.operators().items():
            torchs_own = [k for k in times.serving(p, H200) if k.provider == "torch"]
            found[name] = {kernel.name: record(kernel, p) for kernel in torchs_own}
        result.append({"shape": dataclasses.asdict(shape), "times": found})
    return json.loads(json.dumps(result))


def forward(raw):
    return [measured.compiled() for measured in model.load(raw, "forward", "graph")]


@needs_hopper
def test_the_fit_finds_what_the_times_came_from():
    old = model.COSTS[CutlassSm90]
    new = dataclasses.replace(
        old, step_tf32=3 * old.step_tf32, gather=old.gather / 2, iteration=0.9
    )
    true = {**model.COSTS, CutlassSm90: new}
    problems = forward(written(model.shapes()[:30], true))
    fitted = model.fit(problems, model.COSTS, 900)
    assert model.loss(problems, fitted) < 0.5 * model.loss(problems, model.COSTS)
    assert model.share(problems, true) == 1.0
    assert model.share(problems, fitted) == 1.0 > model.share(problems, model.COSTS)


def numbers(costs: vendor.CostConstants) -> list[float]:
    """Every constant that is fitted."""
    tables = (costs.convolution, costs.norm, costs.norm_backward)
    operators = [cost for table in tables for cost in table.values()]
    operators += [costs.bias, costs.activation]
    return [costs.few_groups, *(n for cost in operators for n in dataclasses.astuple(cost))]


def test_the_fit_of_torchs_operators_finds_what_the_times_came_from():
    """Each constant is another, none of them zero, and each is found again."""
    generator = random.Random(1)

    def other(value):
        if not isinstance(value, vendor.OperatorCost):
            return 2.0 * value
        # What has no products has a zero that is not fitted.
        scaled = [number * generator.uniform(0.6, 1.7) for number in dataclasses.astuple(value)]
        return vendor.OperatorCost(*scaled)

    true = vendor.CostConstants(
        **{
            field.name: {key: other(cost) for key, cost in value.items()}
            if isinstance(value, dict)
            else other(value)
            for field, value in (
                (field, getattr(vendor.COSTS, field.name))
                for field in dataclasses.fields(vendor.CostConstants)
            )
        }
    )
    # Graphs leave the caller's thread out.
    raw = written(model.shapes(), torchs=dataclasses.replace(true, call=0.0))
    fitted = model.fit_torch(raw, vendor.COSTS, 900)
    assert fitted.call == vendor.COSTS.call
    assert numbers(fitted) == pytest.approx(numbers(true), rel=0.02, abs=0.02)


# ---- the choice ----------------------------------------------------------------------------------


@needs_hopper
def test_the_share_counts_choices_by_their_times():
    (measured,) = model.load(written(model.shapes()[:1]), "forward", "call")
    assert model.share([measured], model.COSTS) == 1.0
    _, chosen = measured.choice(model.COSTS)
    slower = [(k, t * 2 if t == chosen else t) for k, t in measured.rows]
    assert model.share([dataclasses.replace(measured, rows=slower)], model.COSTS) == 0.0


@needs_hopper
def test_the_commands_report(tmp_path, capsys):
    path = tmp_path / "figures.json"
    path.write_text(json.dumps({"problems": written(model.shapes()[:12], noise=0.1)}))
    model.main(["check", str(path), "--time", "graph"])
    output = capsys.readouterr().out
    assert "other half, compiled rows: the choice is within 5% of the best on" in output
    for time in ("graph", "call"):
        for key in ("forward", "epilogue"):
            assert f"{key}, all candidates, {time} times, other half: the choice is" in output
    assert "torch norm_backward nhwc: root mean square" in output
    assert "strict fp32 takes no longer than TF32 on" in output
    model.main(["fit", str(path), "--evaluations", "60"])
    output = capsys.readouterr().out
    assert "    step_tf32=" in output
    assert '        ("forward", False, 2): OperatorCost(' in output


def committed() -> list[dict]:
    """The times that are in the repository; none where they are of other kernels than there are."""
    if not model.RESULTS.exists():
        return []
    raw = json.loads(model.RESULTS.read_text())["problems"]
    rows = {kernel.name for kernel in registry().kernels()}
    named = {name for each in raw for kernels in each.get("times", {}).values() for name in kernels}
    return raw if named and named <= rows else []


@pytest.mark.skipif(not committed(), reason="no measured times of these kernels are committed")
@pytest.mark.parametrize(
    ("key", "time", "among"),
    [
        ("forward", "graph", "rows"),
        # What a call of torch's operators takes of the caller's thread counts against them.
        ("forward", "call", "all"),
        ("epilogue", "call", "all"),
    ],
)
def test_the_choice_is_good_on_measured_times(key, time, among):
    raw = committed()
    assert [model.Shape.of(record["shape"]) for record in raw] == model.shapes()
    _, other = model.halves(model.load(raw, key, time))
    measured = [each.compiled() for each in other] if among == "rows" else other
    assert model.share(measured, model.COSTS) >= SHARE


def chosen_precision(shape) -> str:
    """Of the row that is taken among ours."""
    ((_, candidate),) = choose(shape.problem(), H200, "cutlass_sm80,cutlass_sm90").chosen
    return candidate.kernel.precision


@needs_hopper
def test_strict_fp32_serves_tf32_where_it_takes_no_longer():
    """Long sums of small problems, which strict fp32 cuts into parts that more blocks take."""
    problem = small(
        precision="tf32", batch=1, channels=256, out_channels=24, spatial=(8, 18, 18), padding=0,
        bias=False, num_groups=8, activation="relu",
    )  # fmt: skip
    assert chosen_precision(problem) == "fp32"
    for larger in ({"batch": 64}, {"channels": 16, "spatial": (32, 64, 64)}):
        assert chosen_precision(dataclasses.replace(problem, **larger)) == "tf32"


@needs_hopper
def test_tf32_is_never_taken_for_strict_fp32():
    for shape in model.shapes():
        if shape.precision == "fp32":
            kernels = times.serving(shape.problem(), H200)
            assert {k.precision for k in kernels if k.provider != "torch"} == {"fp32"}


def system_problem(name: str, precision: str, layout: str) -> ForwardProblem:
    """A system's forward pass at its full size."""
    system = SYSTEMS[name]
    with torch.device("meta"):
        module = system.original(*system.init_arguments)
    batch, channels, *spatial = system.input_shape
    fields = dict(batch=batch, channels=channels, spatial=spatial)
    if name == "system3":
        fields |= dict(out_channels=None, num_groups=module.gn.num_groups)
    else:
        conv = module.conv_transpose
        fields |= dict(
            out_channels=conv.out_channels,
            kernel_size=conv.kernel_size,
            bias=conv.bias is not None,
            num_groups=module.group_norm.num_groups,
            activation={"system1": "gelu", "system2": "relu"}[name],
        )
    return hypothetical.problem(
        device="cuda", dtype=DTYPES[precision], precision=precision, layout=layout, **fields
    )


@needs_hopper
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("name", SYSTEMS)
def test_systems_are_ours_by_a_clear_margin(name, precision, layout):
    """Measured, eager takes 1.6 times as long at least."""
    found = {
        candidate.kernel.provider: candidate.cost
        for candidate in reversed(
            registry().candidates(system_problem(name, precision, layout), H200)
        )
        if candidate.support
    }
    torchs = found.pop("torch")
    assert torchs > 1.3 * min(found.values())


def eager_records() -> list[dict]:
    records = json.loads((model.RESULTS.parent / "h200.json").read_text())["records"]
    return [r for r in records if r["contender"] == "eager" and r["pass"] == "forward"]


@pytest.mark.parametrize(
    "record", eager_records(), ids=lambda r: f"{r['workload']}-{r['precision']}-{r['layout']}"
)
def test_torchs_estimate_is_near_what_eager_took(record):
    """The systems are far larger than what the constants are fitted to."""
    name = record["workload"]
    problem = system_problem(name, record["precision"], record["layout"])
    estimate = vendor.TorchForward().cost(problem, H200)
    within = 1.25 if name == "system3" else 3.0  # a vendor's library has many convolutions
    assert 1 / within < estimate / record["median_ms"] < within


def one_sample(precision: str, channels: int, spatial: int, out_channels: int, kernel_size: int):
    return hypothetical.problem(
        device="cuda", dtype=DTYPES[precision], precision=precision, layout="nchw", batch=1,
        channels=channels, spatial=(spatial, spatial), out_channels=out_channels,
        kernel_size=kernel_size, bias=True,
    )  # fmt: skip


@needs_hopper
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_torch_serves_what_it_is_estimated_to_be_faster_at(precision):
    """A matrix times a few vectors."""
    ((_, candidate),) = choose(one_sample(precision, 4096, 2, 4096, 1), H200).chosen
    assert candidate.kernel.provider == "torch"


@needs_hopper
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_long_sums_of_few_pixels_are_divided_among_multiprocessors(precision):
    """50 us were measured of torch, and as much of taps_sm90."""
    problem = one_sample(precision, 512, 14, 256, 3)
    ((_, candidate),) = choose(problem, H200).chosen
    assert candidate.kernel.provider == "clusters_sm90"
    assert candidate.kernel.config(problem, H200).shares > 1
    served = [each for each in registry().candidates(problem, H200) if each.support]
    taps = next(each.kernel for each in served if each.kernel.provider == "taps_sm90")
    assert taps.config(problem, H200).splits > 1


@needs_hopper
@pytest.mark.parametrize("architecture", [75, 80])
def test_rows_of_hopper_ask_for_its_compute_capability(architecture):
    forward = dataclasses.replace(system_problem("system1", "fp16", "nchw"), save=True)
    backward = BackwardProblem.of(
        forward, grad_dtype=forward.dtype, grad_layout="nchw", aligned=True, gradients=("input",)
    )
    for one in (forward, backward):
        (explanation,) = explained(one, device=KNOWN[architecture])
        reasons = {
            each.support.reason
            for each in dict(explanation.candidates)[one.parts[-1]]
            if each.kernel.provider.endswith("_sm90")
        }
        capability = f"{architecture // 10}.{architecture % 10}"
        assert reasons == {f"runs on compute capability 9.0, the device has {capability}"}


def test_a_device_before_8_0_gets_torchs_operators_with_the_reason():
    problem = system_problem("system1", "fp16", "nchw")
    (explanation,) = explained(problem, device=KNOWN[75])
    assert explanation.provider == "torch"
    if fusedconv.build["cuda"]:
        assert "needs compute capability 8.0, the device has 7.5" in str(explanation)
    gradients = BackwardProblem.of(
        dataclasses.replace(problem, save=True), grad_dtype=problem.dtype, grad_layout="nchw",
        aligned=True, gradients=("input", "weight", "norm_weight"),
    )  # fmt: skip
    (explanation,) = explained(gradients, device=KNOWN[75])
    assert explanation.provider == "torch"
