"""The benchmark measures what it says."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from scripts import script
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from fusedconv import benchmark, selection, timing, tuning
from fusedconv.benchmark import child, contenders, measuring, running
from fusedconv.benchmark import records as files
from fusedconv.benchmark.cells import Cell, select_cells
from fusedconv.benchmark.timing import matrix_rate
from fusedconv.models import SYSTEMS
from fusedconv.testing import relative_error, sample_error

FIELDS = {
    "workload",
    "pass",
    "dtype",
    "precision",
    "layout",
    "contender",
    "kernel",
    "median_ms",
    "p10_ms",
    "p90_ms",
    "floor_ms",
    "peak_extra_bytes",
    "error_fp64",
}


@pytest.mark.parametrize("name", ["system1", "system2"])
def test_rewrite_is_the_same_function(name):
    system = SYSTEMS[name]
    original = system.original(*system.init_arguments).double()
    rewrite = benchmark.Rewrite(original, F.gelu if name == "system1" else F.relu)
    x = torch.rand((1, 64, *(5, 6, 7)[: len(system.input_shape) - 2]), dtype=torch.float64)
    assert relative_error(rewrite(x), original(x)) < 1e-13


SMALL = dict(
    workloads=["system3"],
    precisions=["fp32"],
    layouts=["nchw"],
    device=torch.device("cpu"),
    seconds=0.0,
    least=2,
    small=True,
)


class Events(benchmark.Observer):
    def __init__(self) -> None:
        self.count, self.titles, self.shares = 0, [], []

    def planned(self, count):
        self.count = count

    def began(self, title):
        self.titles.append(title)

    def measured(self, record, share):
        self.shares.append(share)


def test_records_have_every_field_and_weights_may_change():
    events = Events()
    records = benchmark.run(None, contenders=["fusedconv", "eager"], observer=events, **SMALL)
    assert events.titles == [
        f"system3 {name} fp32 nchw fusedconv, eager" for name in benchmark.PASSES
    ]
    assert [(r["contender"], r["pass"]) for r in records] == [
        (contender, name) for name in benchmark.PASSES for contender in ("fusedconv", "eager")
    ]
    assert events.count == len(records) == len(events.shares) == 4
    assert events.shares == sorted(events.shares)
    assert events.shares[-1] == pytest.approx(1.0)
    for record in records:
        assert record.keys() >= FIELDS
        assert record["p10_ms"] <= record["median_ms"] <= record["p90_ms"]
        assert record["error_fp64"] < 1e-6
        assert record["error_fp64_after"] < 1e-6
        assert record["reps"] == 2


def served(**changes) -> list[dict]:
    """What a child answers to a small job, computed in this process."""
    job = {
        **dict(device="cpu", index=None, rates={}, seconds=0.0, least=1, most=1, size="small"),
        "flushes": False,
        "in_a_row": 1,
        "contenders": ["eager"],
        "cells": [
            cell.fields() for cell in select_cells(["system1"], ["fp32"], ["nchw"], ["forward"])
        ],
        **changes,
    }
    lines: list[dict] = []
    child.serve(json.loads(json.dumps(job)), lines.append)
    return json.loads(json.dumps(lines))


def test_a_failing_peer_is_recorded_and_ours_ends_the_job(monkeypatch):
    def fail(contender, workload, original):
        raise RuntimeError(f"{contender.name} broke")

    monkeypatch.setattr(contenders.Contender, "build", fail)
    began, line = served()
    assert began == {"began": 0}
    (record,) = line["records"]
    assert record["error"] == "RuntimeError: eager broke"
    assert record["median_ms"] is None
    assert record.keys() >= FIELDS
    began, line = served(contenders=["eager", "fusedconv"])
    assert line["failed"] == "RuntimeError: fusedconv broke"
    assert "in fail" in line["traceback"]


@pytest.mark.parametrize(
    ("autotune", "forced", "expected"),
    [("0", "", "cost"), ("1", "", "tuned"), ("1", "torch", "torch")],
)
def test_tuning_is_no_part_of_the_timing_and_is_recorded(
    monkeypatch, tmp_path, autotune, forced, expected
):
    monkeypatch.setattr(selection, "_tuned", {})
    monkeypatch.setenv("FUSEDCONV_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FUSEDCONV_AUTOTUNE", autotune)
    monkeypatch.setenv("FUSEDCONV_KERNEL", forced)
    happened = []
    tune, interleave = tuning.measure, benchmark.Clock.interleave

    def tuned(*arguments):
        happened.append("tuned")
        return tune(*arguments)

    def timed(*arguments):
        happened.append("timed")
        return interleave(*arguments)

    monkeypatch.setattr(tuning, "measure", tuned)
    monkeypatch.setattr(benchmark.Clock, "interleave", timed)
    cells = select_cells(["system3"], ["fp32"], ["nchw"], ["forward_backward"])
    _, line = served(contenders=["fusedconv", "eager"], cells=[cell.fields() for cell in cells])
    ours, peer = line["records"]
    # Forward without gradients, for the kernel's name; saving; backward.
    assert happened == ["tuned"] * (3 if expected == "tuned" else 0) + ["timed"]
    assert ours["chosen_by"] == expected
    assert "chosen_by" not in peer


def test_a_changed_weight_that_is_not_seen_shows(monkeypatch):
    build = contenders.Contender.build

    def frozen(contender, workload, original):
        model = build(contender, workload, original)
        values = [parameter.detach().clone() for parameter in model.parameters()]

        def restore(module, arguments):
            with torch.no_grad():
                for parameter, value in zip(module.parameters(), values, strict=True):
                    parameter.copy_(value)

        model.register_forward_pre_hook(restore)
        return model

    monkeypatch.setattr(contenders.Contender, "build", frozen)
    _, line = served()
    (record,) = line["records"]
    assert record["error_fp64"] < 1e-6
    assert record["error_fp64_after"] > 1e-2


@pytest.mark.parametrize("name", benchmark.CONTENDERS)
def test_the_switch_is_set_before_anything_runs(monkeypatch, name):
    """A plan that was made before stays: no convolution may come first, not even for its shape."""
    seen = []
    for function in ("conv_transpose2d", "conv2d"):
        original = getattr(torch, function)

        def spy(x, *arguments, original=original, **settings):
            if x.device.type != "meta" and x.dtype == torch.float32:
                seen.append(torch.backends.cudnn.benchmark)
            return original(x, *arguments, **settings)

        for module in (torch, F):
            monkeypatch.setattr(module, function, spy)
    monkeypatch.setattr(torch, "compile", lambda model, mode: model)
    build = contenders.Contender.build

    def watched(contender, workload, original):
        model = build(contender, workload, original)
        model.register_forward_pre_hook(lambda *_: seen.append(torch.backends.cudnn.benchmark))
        return model

    monkeypatch.setattr(contenders.Contender, "build", watched)
    before = torch.backends.cudnn.benchmark
    (fields,) = (c.fields() for c in select_cells(["system1"], ["fp32"], ["nchw"], ["forward"]))
    served(contenders=[name], cells=[fields])
    assert torch.backends.cudnn.benchmark == before
    expected = name not in ("fusedconv", "eager")
    assert len(seen) >= 3
    assert set(seen) == {expected}


DIES = "import sys; print('it is over', file=sys.stderr); sys.exit(3)"
ANSWERS_ONCE = """
import json, sys
job = json.loads(sys.stdin.readline())
print(json.dumps({"began": 0}))
record = {**job["cells"][0], "contender": job["contenders"][0], "median_ms": 1.0}
print(json.dumps({"records": [record]}))
sys.stdout.flush()
sys.exit(3)
"""


def test_a_crash_is_the_result_of_the_cells_that_are_left(monkeypatch):
    monkeypatch.setattr(running, "_command", lambda: [sys.executable, "-c", ANSWERS_ONCE])
    first, second = benchmark.run(None, contenders=["eager"], **SMALL)
    assert first["median_ms"] == 1.0
    assert second["pass"] == "forward_backward"
    assert second["median_ms"] is None
    assert second["error"] == "its process ended with status 3: "


def test_a_crash_of_ours_is_raised(monkeypatch):
    monkeypatch.setattr(running, "_command", lambda: [sys.executable, "-c", DIES])
    with pytest.raises(
        benchmark.ContenderError, match=r"fusedconv, eager: .* status 3: it is over"
    ):
        benchmark.run(None, contenders=["fusedconv", "eager"], **SMALL)


def test_an_unwritable_output_is_refused_before_anything_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(running, "_command", lambda: pytest.fail("a process was started"))
    with pytest.raises(IsADirectoryError):
        benchmark.run(tmp_path, contenders=["eager"], **SMALL)


TWO_DEVICES = """
import json, os, sys
job = json.loads(sys.stdin.readline())
visible = os.environ["CUDA_VISIBLE_DEVICES"]
device = {"index": job["index"], "name": f"device {visible}", "uuid": None}
rates = {"copy": 1.0}
if job.get("measure") == "rates":
    print(json.dumps({"device": device, "rates": rates}))
    sys.exit()
assert job["rates"] == rates and job["device"] == "cuda"
for number, cell in enumerate(job["cells"]):
    print(json.dumps({"began": number}))
    (name,) = job["contenders"]
    record = {**cell, "contender": name, "device": device, "median_ms": 1.0}
    print(json.dumps({"records": [record]}))
"""


def test_devices_share_the_work_and_the_parent_touches_none(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(running, "_command", lambda: [sys.executable, "-c", TWO_DEVICES])
    initialized = torch.cuda.is_initialized()
    path = tmp_path / "figures.json"
    records = benchmark.run(path, device=torch.device("cuda"), devices=(1, 3), commit="abc")
    assert torch.cuda.is_initialized() == initialized
    assert {(r["device"]["index"], r["device"]["name"]) for r in records} == {
        (1, "device 1"),
        (3, "device 3"),
    }
    keys = {(r["contender"], *Cell.of(r).fields().values()) for r in records}
    assert len(keys) == len(records) == 44 * 4 + 16 + 32 * 3
    written = json.loads(path.read_text())
    assert written["header"]["device"] == "device 1"
    assert written["header"]["rates"] == {"copy": 1.0}
    assert len(written["records"]) == len(records)


def names(jobs):
    return [(job.title, len(job.cells)) for job in jobs]


def test_one_device_gets_one_job_a_contender():
    jobs = running.jobs(benchmark.CONTENDERS, select_cells(), 1, 0.5)
    assert names(jobs) == [
        ("fusedconv", 44),
        ("fusedconv_cudnn_benchmark", 16),
        ("eager", 44),
        ("eager_cudnn_benchmark", 32),
        ("compile", 44),
        ("compile_max_autotune", 44),
        ("rewrite", 32),
        ("rewrite_compile", 32),
    ]


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (("fusedconv", "eager"), ["fusedconv", "eager"]),  # the switch would be on for neither
        (("eager", "compile", "fusedconv"), ["compile, fusedconv", "eager"]),
        (("eager_cudnn_benchmark", "compile"), ["eager_cudnn_benchmark, compile"]),
        (("fusedconv", "fusedconv_cudnn_benchmark"), ["fusedconv", "fusedconv_cudnn_benchmark"]),
    ],
)
def test_who_shares_a_process_together(chosen, expected):
    """cudnn.benchmark is on for all of it, or off."""
    cells = select_cells(["system1"], ["bf16"], ["nchw"], ["forward_backward"])
    jobs = running.jobs(chosen, cells, 1, 0.5, together=True)
    assert [job.title for job in jobs] == expected


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_several_devices_share_every_cell_once(devices):
    jobs = running.jobs(benchmark.CONTENDERS, select_cells(), devices, 0.5)
    work = [(job.title, cell) for job in jobs for cell in job.cells]
    once = running.jobs(benchmark.CONTENDERS, select_cells(), 1, 0.5)
    assert sorted(work, key=str) == sorted(
        ((job.title, cell) for job in once for cell in job.cells), key=str
    )
    for job in jobs:
        assert len({cell.workload for cell in job.cells}) == 1
    loads = [0.0] * devices
    for job in jobs:
        loads[loads.index(min(loads))] += job.expected(0.5)
    assert max(loads) < 1.25 * sum(loads) / devices


def test_a_child_sees_its_device_alone(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert running._environment(2)["CUDA_VISIBLE_DEVICES"] == "2"
    assert "CUDA_VISIBLE_DEVICES" not in running._environment(None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert running._environment(1)["CUDA_VISIBLE_DEVICES"] == "7"


def test_cells_leave_out_what_is_the_same():
    assert len(select_cells()) == 2 * 4 * 2 * 2 + 3 * 2 * 2
    assert Cell("system3", "tf32", "nchw", "forward") not in select_cells()
    cell = select_cells(["system2"], ["bf16"], ["nhwc"], ["forward"])[0]
    assert Cell.of(cell.fields()) == cell


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"workloads": ["nope"]}, r"^workloads: got 'nope', expected one of system1, "),
        ({"precisions": ["nope"]}, r"^precisions: got 'nope', expected one of tf32, "),
        ({"layouts": ["nope"]}, r"^layouts: got 'nope', expected one of nchw, nhwc$"),
        ({"passes": ["nope"]}, r"^passes: got 'nope', expected one of forward, "),
    ],
)
def test_unknown_names_of_cells_are_refused(chosen, message):
    with pytest.raises(ValueError, match=message):
        select_cells(**chosen)


def test_unknown_contenders_are_refused():
    with pytest.raises(ValueError, match=r"^contenders: got 'nope', expected one of fusedconv, "):
        benchmark.run(None, **{**SMALL, "contenders": ["nope"]})


def test_floors():
    rates = {"copy": 4e12, "tf32": 3e14, "fp32": 5e13, "fp16": 6e14, "bf16": 6e14}
    gigabyte = 10**9
    assert benchmark.floor_ms(0, gigabyte, gigabyte, "fp32", "forward", rates) == pytest.approx(0.5)
    both = benchmark.floor_ms(0, gigabyte, gigabyte, "fp32", "forward_backward", rates)
    assert both == pytest.approx(1.25)
    flops = 3 * 10**11
    assert benchmark.floor_ms(flops, 8, 8, "tf32", "forward", rates) == pytest.approx(1.0)
    assert benchmark.floor_ms(flops, 8, 8, "fp32", "forward", rates) == pytest.approx(3.0)
    assert benchmark.floor_ms(flops, 8, 8, "bf16", "forward_backward", rates) == pytest.approx(1.5)


def test_a_file_keeps_what_is_not_measured_anew(tmp_path):
    path = tmp_path / "figures.json"
    cells = [cell.fields() for cell in select_cells(["system1"], ["fp32"], ["nchw"])]

    def write(*medians):
        new = [
            {**cell, "contender": "eager", "median_ms": median}
            for cell, median in zip(cells, medians, strict=False)
        ]
        files.write(path, {"commit": str(medians)}, new)
        return json.loads(path.read_text())

    write(1.0, 2.0)
    written = write(3.0)
    assert written["header"] == {"commit": "(3.0,)"}
    assert [record["median_ms"] for record in written["records"]] == [3.0, 2.0]
    files.check_writable(path)
    assert json.loads(path.read_text()) == written
    path.write_text('{"other": "things"}')
    with pytest.raises(ValueError, match=r"^output: got .*figures.json, expected a file of this"):
        files.check_writable(path)


def test_short_calls_end_before_their_time():
    clock = benchmark.Clock(torch.device("cpu"), seconds=3600.0, least=1, most=200)
    assert clock.measure([int]).fields()["reps"] == 200


def test_what_a_call_begins_with_is_made_before_its_time(monkeypatch):
    made, taken, now = [], [], [0.0]

    def prepare():
        now[0] += 1.0
        made.append(len(made))
        return made[-1]

    def run(which):
        now[0] += 0.0625
        taken.append(which)

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    clock = benchmark.Clock(torch.device("cpu"), seconds=0.0, least=3, most=3)
    assert clock.measure([timing.Prepared(prepare, run)]).milliseconds == [62.5] * 3
    assert taken == made == [0, 1, 2, 3]  # one of them warms up


@pytest.mark.parametrize("name", SYSTEMS)
def test_flops_are_what_torch_counts(name):
    system = SYSTEMS[name]
    original = system.original(*system.init_arguments).to("meta")
    with FlopCounterMode(display=False) as counter:
        original(torch.empty(system.input_shape, device="meta"))
    assert measuring.conv_flops(original, system.input_shape) == counter.get_total_flops()


@pytest.mark.parametrize("precision", benchmark.PRECISIONS)
def test_a_cells_precision_sets_the_switch(precision):
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.benchmark
    for cudnn_benchmark in (False, True):
        with measuring.precision_mode(precision, cudnn_benchmark):
            assert (cudnn.allow_tf32, cudnn.benchmark) == (precision == "tf32", cudnn_benchmark)
        assert (cudnn.allow_tf32, cudnn.benchmark) == before


def test_error_of_a_sample_shows():
    system = SYSTEMS["system3"]
    original = system.original(*system.init_arguments)
    x = torch.rand(5, 64, 6, 6)
    actual = original(x).detach()
    assert sample_error(original, x, actual) < 1e-6
    actual[-1, 3] += 0.5
    assert sample_error(original, x, actual) > 1e-2
    assert sample_error(original, x, actual, samples=[0, 1]) < 1e-6


def test_differences_are_counted_in_pieces(monkeypatch):
    agreement = script("agreement")
    monkeypatch.setattr(agreement, "_PIECE", 20)
    expected = torch.full((5, 2, 4), 100.0)
    actual = expected.clone()
    assert agreement.compare(actual, expected)["allclose"]
    actual[0, 0, 0] += 5e-4  # within 1e-5 + 1e-5 * 100
    actual[2, 1, 3] += 0.25
    actual[4, 0, 0] -= 0.5
    found = agreement.compare(actual, expected)
    assert found == {
        "allclose": False,
        "largest_difference": 0.5,
        "beyond": 2,
        "share_beyond": 2 / 40,
    }
    assert torch.allclose(actual, expected, 1e-5, 1e-5) == found["allclose"]
    actual[1, 0, 0] = torch.nan
    found = agreement.compare(actual, expected)
    assert found["beyond"] == 3
    assert found["largest_difference"] == float("inf")


def test_host_times_of_both(tmp_path, capsys):
    path = tmp_path / "new" / "host.json"
    script("host").main(["--calls", "1", "--rounds", "2", "--output", str(path)])
    found = json.loads(path.read_text())
    cells = {(r["precision"], r["shape"][-1], r["contender"]) for r in found["records"]}
    assert len(cells) == len(found["records"]) == 2 * 4 * 2
    assert all(0.0 < r["least_us"] <= r["median_us"] for r in found["records"])
    assert found["header"]["processor"]
    assert capsys.readouterr().out.count("\n") == 2 + len(cells)


def test_agreement_of_the_small_sizes(tmp_path, capsys):
    path = tmp_path / "new" / "agreement.json"
    script("agreement").main(["--small", "--contender", "fusedconv", "--output", str(path)])
    records = json.loads(path.read_text())["records"]
    assert [(r["workload"], r["precision"]) for r in records] == [
        ("system1", "tf32"),
        ("system1", "fp32"),
        ("system2", "tf32"),
        ("system2", "fp32"),
        ("system3", "fp32"),
    ]
    assert all(record["allclose"] for record in records)
    assert capsys.readouterr().out.count("| True |") == 5


def table_of(tmp_path, capsys, records) -> list[str]:
    """The lines that the table prints of a file with these records."""
    path = tmp_path / "figures.json"
    path.write_text(json.dumps({"header": {}, "records": records}))
    script("table").main([str(path)])
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "figures.json: No such file or directory"),
        ("nonsense", "figures.json, expected a file of this benchmark's records"),
        ('{"header": {}, "records": [{}]}', "expected a file of this benchmark's records"),
    ],
)
def test_what_has_no_table_is_refused(tmp_path, capsys, content, message):
    path = tmp_path / "figures.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit, match="2"):
        script("table").main([str(path)])
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_the_table_says_what_it_prints(capsys):
    with pytest.raises(SystemExit, match="0"):
        script("table").main(["--help"])
    assert "Layers have\na table for each pass and precision" in capsys.readouterr().out


def cells_of(line: str) -> list[str]:
    return [part.strip() for part in line.strip("|").split("|")]


def test_the_table_takes_the_better_eager(tmp_path, capsys):
    cell = Cell("system1", "tf32", "nchw", "forward").fields()

    def record(contender, median):
        return {**cell, "contender": contender, "median_ms": median} | dict(
            floor_ms=0.5, error_fp64=1e-4
        )

    times = {"fusedconv": 1.0, "eager": 4.0, "eager_cudnn_benchmark": 3.0}
    times |= {"compile": None, "rewrite": 2.0}
    head, _, line = table_of(tmp_path, capsys, [record(*item) for item in times.items()])
    row = dict(zip(cells_of(head), cells_of(line), strict=True))
    assert row["cell"] == "system1 forward tf32 nchw"
    assert (row["vs better eager"], row["vs best peer"]) == ("3.00x", "2.00x")
    assert (row["compile"], row["eager"], row["error / eager's"]) == ("", "4.00", "1.00")
    assert "compile_max_autotune" not in row


def norm_records(ratios: dict[str, float], contender: str = "eager") -> list[dict]:
    """Records of forward passes in which fusedconv takes 2 ms and the peer so many times that."""
    return [
        {**Cell(name, "fp32", "nchw", "forward").fields(), "contender": who, "median_ms": median}
        for name, ratio in ratios.items()
        for who, median in (("fusedconv", 2.0), (contender, 2.0 * ratio))
    ]


SLOW, FAST, FASTEST = list(benchmark.NORMS)[:3]


def test_summaries_count_what_is_slower():
    records = norm_records({SLOW: 0.5, FAST: 2.0, FASTEST: 8.0})
    records += norm_records({FAST: 0.96}, "compile")[1:]
    records.append({**records[0], "contender": "compile", "median_ms": None})
    found = benchmark.peer_summaries(benchmark.times(records))
    assert list(found) == [("forward", "eager"), ("forward", "compile")]
    eager, compiled = found.values()
    assert (eager.mean, eager.least, eager.slower) == (pytest.approx(2.0), 0.5, 1)
    assert eager.worst(3) == [(Cell(SLOW, "fp32", "nchw", "forward"), 0.5)]
    assert (compiled.slower, compiled.worst(3)) == (0, [])
    assert benchmark.summary_lines(records) == [
        "forward over eager: geometric mean 2.00x, least 0.50x, 1 of 3 cells below 0.95x",
        f"  0.50x {SLOW} forward fp32 nchw",
        "forward over compile: geometric mean 0.96x, least 0.96x, 0 of 1 cells below 0.95x",
    ]


def test_the_table_gathers_norms(tmp_path, capsys):
    lines = table_of(tmp_path, capsys, norm_records({SLOW: 0.5, FAST: 2.0, FASTEST: 8.0}))
    assert cells_of(lines[0]) == ["cells", "forward over eager"]
    rows = dict(cells_of(line) for line in lines[2:] if line.startswith("|"))
    plain = benchmark.NORMS[SLOW].plain_name.removeprefix("group_norm_")
    assert rows == {
        "all": "2.00x, least 0.50x, 1 of 3 slower",
        "fp32 nchw": "2.00x, least 0.50x, 1 of 3 slower",
        "norm": "0.50x, least 0.50x, 1 of 1 slower",
        "gelu_norm": "2.00x, least 2.00x",
        "relu_norm": "8.00x, least 8.00x",
        plain: "2.00x, least 0.50x, 1 of 3 slower",
    }
    assert lines[-1].strip() == f"0.50x {SLOW} forward fp32 nchw"


@pytest.mark.parametrize("pass_", benchmark.PASSES)
def test_cells_under_autocast(pass_):
    """Tensors are float32, what the forward pass computes is lower."""
    (cell,) = select_cells(["system3"], ["autocast_bf16"], ["nchw"], [pass_])
    assert cell.fields()["dtype"] == "float32"
    contenders = ["fusedconv", "eager"]
    (*_, line) = served(contenders=contenders, cells=[cell.fields()])
    for record, contender in zip(line["records"], contenders, strict=True):
        assert (record["contender"], record["precision"]) == (contender, "autocast_bf16")
        assert record["error_fp64"] < 1e-6  # torch normalises in float32
    (cell,) = select_cells(["system1"], ["autocast_bf16"], ["nchw"], [pass_])
    (*_, line) = served(contenders=contenders, cells=[cell.fields()])
    for record in line["records"]:
        assert 1e-4 < record["error_fp64"] < 2e-2


def test_the_output_under_autocast_is_torchs():
    (cell,) = select_cells(["system1"], ["autocast_fp16"], ["nchw"], ["forward_backward"])
    setup = measuring.prepare(cell, torch.device("cpu"), "small")
    with torch.autocast("cpu", torch.float16), torch.no_grad():
        output = setup.original(setup.inputs[0])
    assert output.dtype == setup.output_dtype == setup.grad.dtype
    assert output.shape == setup.grad.shape == setup.output_shape
    assert setup.output_bytes == output.nbytes
    assert {parameter.dtype for parameter in setup.original.parameters()} == {torch.float32}


def test_floors_under_autocast_are_those_of_what_it_lowers_to():
    rates = {"bf16": 4.0, "fp16": 2.0, "tf32": 1.0}
    assert matrix_rate("autocast_bf16", rates) == 4.0
    assert matrix_rate("autocast_fp16", rates) == 2.0
