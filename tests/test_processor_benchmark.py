"""The benchmark on processors: its workloads, contenders that take turns, runs that go on."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from torch.nn import functional as F

from fusedconv import benchmark, timing
from fusedconv.benchmark import measuring, running
from fusedconv.benchmark.cells import select_cells
from fusedconv.benchmark.measuring import measure, prepare
from fusedconv.models import SIZES
from fusedconv.testing import relative_error

CPU = torch.device("cpu")
SUITE = benchmark.SUITES["systems"]["cpu"]
NORM = "group_norm_4x12x96x96_g3_gelu_norm"


def small_run(path, **changes):
    settings = dict(
        workloads=[NORM], precisions=["fp32"], layouts=["nhwc"], passes=["forward"],
        contenders=["fusedconv", "eager"], device=CPU, seconds=0.0, least=3, small=True,
    )  # fmt: skip
    return benchmark.run(path, **{**settings, **changes})


def test_workloads_are_named_by_shape_and_activation():
    assert len(benchmark.NORMS) == 12 * 4
    for name, workload in benchmark.WORKLOADS.items():
        assert workload.name == name
    assert "group_norm_4x256x28x28_g32" in benchmark.NORMS
    workload = benchmark.NORMS["group_norm_4x256x28x28_g32_norm_silu"]
    assert workload.shape("full") == workload.shape("processor") == (4, 256, 28, 28)
    assert workload.init_arguments == (32, 256, "silu", "norm_act")


def test_shapes_are_of_every_kind():
    shapes = {workload.shape("processor") for workload in benchmark.NORMS.values()}
    numbers = [4 * torch.Size(shape).numel() for shape in shapes]
    assert min(numbers) == 64 << 10
    assert 50e6 < max(numbers) < 60e6
    assert {len(shape) for shape in shapes} == {4, 5}
    assert any(shape[1] % 16 for shape in shapes)
    assert any(shape[2] % 2 for shape in shapes)


@pytest.mark.parametrize("name", [*itertools.islice(benchmark.NORMS, 4), "system1", "system3"])
def test_both_modules_of_a_workload_are_the_same_function(name):
    workload = benchmark.WORKLOADS[name]
    original = workload.original(*workload.init_arguments)
    model = workload.model(*workload.init_arguments)
    model.load_state_dict(original.state_dict())
    x = torch.randn(workload.shape("small"))
    assert relative_error(model(x), original(x)) < 1e-6


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gelu_norm", lambda x: F.group_norm(F.gelu(x), 3)),
        ("relu_norm", lambda x: F.group_norm(F.relu(x), 3)),
        ("norm_silu", lambda x: F.silu(F.group_norm(x, 3))),
    ],
)
def test_the_activation_is_where_the_name_says(name, expected):
    workload = benchmark.NORMS[f"group_norm_4x12x96x96_g3_{name}"]
    x = torch.randn(workload.shape("small"))
    actual = workload.original(*workload.init_arguments)(x)
    assert relative_error(actual, expected(x)) < 1e-6


def test_systems_have_fewer_samples_of_the_same_extents():
    for name in ("system1", "system2", "system3"):
        system = benchmark.WORKLOADS[name]
        full, processor = (system.shape(size) for size in SIZES[:2])
        assert processor[0] < full[0]
        assert processor[1:] == full[1:]


def test_the_suite_is_what_is_measured():
    cells = select_cells(SUITE.workloads, SUITE.precisions, device="cpu")
    assert len(cells) == (3 + 12 * 4) * 2 * 2 * 2
    (job,) = running.jobs(SUITE.contenders, cells, 1, SUITE.seconds, "cpu")
    assert job.title == "fusedconv, eager, compile"
    assert job.count == 3 * len(cells)


def test_what_is_cudnns_takes_no_part():
    cells = select_cells(precisions=benchmark.PRECISIONS, device="cpu")
    assert "tf32" not in {cell.precision for cell in cells}
    jobs = running.jobs(benchmark.CONTENDERS, cells, 1, 0.0, "cpu")
    without = "fusedconv, eager, compile, compile_max_autotune"
    assert {job.title for job in jobs} == {without, f"{without}, rewrite, rewrite_compile"}
    assert {cell.workload for job in jobs for cell in job.cells if job.title == without} == {
        "system3"
    }


def test_contenders_take_turns_on_different_inputs():
    made = []
    calls = [
        [lambda who=who, place=place: made.append((who, place)) for place in range(4)]
        for who in "abc"
    ]
    timings = benchmark.Clock(CPU, seconds=0.0, least=6).interleave(calls)
    assert [len(each.milliseconds) for each in timings] == [6, 6, 6]
    rounds = [made[start : start + 3] for start in range(3, len(made), 3)]  # after one to warm up
    orders = ["".join(who for who, _ in each) for each in rounds]
    assert orders == ["abc", "cba", "bca", "acb", "cab", "bac"]
    for each in rounds:
        assert len({place for _, place in each}) == 3
    assert {place for who, place in made if who == "a"} == {0, 1, 2, 3}


def test_the_first_quarter_of_calls_in_a_row_does_not_count(monkeypatch):
    now, made = [0.0], []

    def call(who, place):
        made.append((who, place))
        first = len(made) == 1 or made[-2][0] != who
        now[0] += 1.0 if first else 0.0625 if who == "a" else 0.125

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    calls = [[lambda who=who, n=n: call(who, n) for n in range(3)] for who in "ab"]
    clock = benchmark.Clock(CPU, seconds=0.0, least=6, most=6, in_a_row=4)
    timings = clock.interleave(calls)
    assert [each.milliseconds for each in timings] == [[62.5] * 6, [125.0] * 6]
    rounds = [made[start : start + 8] for start in range(8, len(made), 8)]  # after one to warm up
    assert ["".join(who for who, _ in each) for each in rounds] == ["aaaabbbb", "bbbbaaaa"]
    assert rounds[0] == [(who, (first + n) % 3) for first, who in enumerate("ab") for n in range(4)]
    assert timings[0].fields()["reps"] == 6


def test_the_time_is_the_contenders_together(monkeypatch):
    now = [0.0]

    def call():
        now[0] += 0.0625

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    for seconds, least, rounds in ((0.5, 2, 8), (0.5, 9, 9), (2.0, 2, 20)):
        clock = benchmark.Clock(CPU, seconds, least, most=20)
        timings = clock.interleave([[call], [call]])
        assert [each.milliseconds for each in timings] == [[62.5] * rounds] * 2


@pytest.mark.parametrize("pass_", benchmark.PASSES)
def test_a_passs_gradients_are_those_of_its_name(monkeypatch, pass_):
    """Forward passes record none; the others give the input's, weight's and bias's."""
    (cell,) = select_cells([NORM], ["fp32"], ["nhwc"], [pass_], "cpu")
    setup = prepare(cell, CPU, "small")
    seen = []
    run = measuring._Runner.run

    def watched(runner, x):
        parameters = [*runner.model.parameters()]
        assert all(each.grad is None for each in (x, *parameters))
        assert x.is_leaf
        output = run(runner, x)
        grads = [each.grad is not None for each in (x, *parameters)]
        seen.append((torch.is_grad_enabled(), output.requires_grad, *grads))
        return output

    monkeypatch.setattr(measuring._Runner, "run", watched)
    contenders = [benchmark.CONTENDERS[name] for name in ("fusedconv", "eager")]
    results = measure(setup, contenders, benchmark.Clock(CPU, 0.0, 3))
    assert set(seen) == {(pass_ == "forward_backward",) * 5}
    # At first, to warm up, timed and, with other weights, behind.
    assert len(seen) == len(contenders) * (2 + 1 + 3 + 1)
    assert [result["kernel"] for result in results.values()] == ["cpu_group_norm", "torch"]
    if setup.grad is not None:
        assert setup.grad.is_contiguous(memory_format=torch.channels_last)


def test_a_peer_that_does_not_start_leaves_the_others(monkeypatch):
    def broken(model, mode):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", broken)
    (cell,) = select_cells([NORM], ["bf16"], ["nchw"], ["forward"], "cpu")
    contenders = [benchmark.CONTENDERS[name] for name in SUITE.contenders]
    results = measure(prepare(cell, CPU, "small"), contenders, benchmark.Clock(CPU, 0.0, 3))
    assert results["compile"]["error"] == "RuntimeError: no compiler"
    assert results["compile"]["median_ms"] is None
    for name in ("fusedconv", "eager"):
        assert results[name]["reps"] == 3
        assert 0 < results[name]["error_fp64"] < 0.01


def test_records_say_what_they_were_made_with(tmp_path):
    path = tmp_path / "figures.json"
    small_run(path, commit="abc")
    written = json.loads(path.read_text())
    header = written["header"]
    assert header["threads"] == torch.get_num_threads()
    assert header["instruction_set"] == torch.backends.cpu.get_cpu_capability()
    assert "take turns" in header["method"]
    assert header["device"]
    for record in written["records"]:
        assert record["device"]["name"] == header["device"]
        assert record["workload"] == NORM
        assert record["shape"] == [2, 12, 5, 5]


def test_a_run_goes_on_where_it_ended(tmp_path):
    path = tmp_path / "figures.json"
    assert len(small_run(path, commit="abc")) == 2
    assert small_run(path, commit="abc", resume=True) == []
    # What is there of one contender, one pass or another commit does not count for the rest.
    both = small_run(path, commit="abc", resume=True, passes=benchmark.PASSES)
    assert {record["pass"] for record in both} == {"forward_backward"}
    more = small_run(path, commit="abc", resume=True, contenders=["fusedconv", "rewrite"])
    assert more == []
    again = small_run(path, commit="def", resume=True)
    assert [record["run"].split()[-1] for record in again] == ["def", "def"]
    assert len(small_run(path, commit="abc")) == 2
    assert len(json.loads(path.read_text())["records"]) == 4


def test_small_records_are_no_part_of_a_run_at_full_size(tmp_path):
    path = tmp_path / "figures.json"
    small_run(path, commit="abc")
    full = small_run(path, commit="abc", resume=True, small=False)
    assert [record["shape"] for record in full] == [[4, 12, 96, 96]] * 2
    assert small_run(path, commit="abc", resume=True, small=False) == []
