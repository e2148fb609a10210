"""The layers of published models: drop-ins compute what the originals do, records become rows."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from processes import python
from scripts import script
from torch import nn

from fusedconv import benchmark
from fusedconv.benchmark import LAYERS, child, measuring, rows, running
from fusedconv.benchmark.cells import Cell, select_cells
from fusedconv.testing import relative_error

NAMES = [
    "sam1", "sam2", "vitdet", "dpt4", "mrcnn", "keypoint", "vitpose", "centernet", "lama", "dcgan",
    "nnunet", "nnunet_last", "swinunetr", "vista3d", "mednext_dw", "psmnet", "hifigan8", "dac2",
    "hdemucs1d", "dw2d", "l2_60", "small1", "small2",
]  # fmt: skip
CPU = torch.device("cpu")
SUITE = benchmark.SUITES["layers"]["cuda"]


def test_the_table_is_complete():
    assert list(LAYERS) == NAMES
    assert {name: benchmark.WORKLOADS[name] for name in NAMES} == LAYERS
    assert SUITE.workloads == tuple(NAMES)


@pytest.mark.parametrize(
    ("name", "shape", "output", "gigaflops"),
    [
        ("sam1", (64, 256, 64, 64), (64, 64, 128, 128), 34.4),
        ("lama", (4, 256, 64, 64), (4, 128, 128, 128), 9.7),
        ("vista3d", (1, 48, 64, 64, 64), (1, 48, 128, 128, 128), 32.6),
        ("mednext_dw", (2, 128, 32, 32, 32), (2, 128, 63, 63, 63), 0.45),
        ("hifigan8", (8, 256, 4096), (8, 128, 32768), 34.4),
        ("hdemucs1d", (4, 768, 5000), (4, 384, 20000), 94.4),
    ],
)
def test_sizes(name, shape, output, gigaflops):
    layer = LAYERS[name]
    assert layer.shape("full") == shape
    assert layer.shape("processor") == (1, *shape[1:])
    original = layer.original(layer).to("meta")
    assert tuple(original(torch.empty(shape, device="meta")).shape) == output
    assert measuring.conv_flops(original, shape) / 1e9 == pytest.approx(gigaflops, rel=0.02)


@pytest.mark.parametrize("name", LAYERS)
def test_models_are_their_originals(name):
    """With their parameters, by the way in which the benchmark sets up both."""
    (cell,) = select_cells([name], ["fp32"], ["nchw"], ["forward_backward"], "cpu")
    setup = measuring.prepare(cell, CPU, "small")
    model = benchmark.CONTENDERS["fusedconv"].build(setup.workload, setup.original)
    assert list(model.state_dict()) == list(setup.original.state_dict())
    exact = copy.deepcopy(setup.original).double()
    x = setup.inputs[0]
    results = {}
    for key, module in (("ours", model), ("plain", setup.original), ("exact", exact)):
        leaf = x.to(next(module.parameters()).dtype).detach().requires_grad_()
        output = module(leaf)
        output.backward(setup.grad.to(output.dtype))
        parameters = {name: each.grad for name, each in module.named_parameters()}
        results[key] = {"output": output, "input": leaf.grad, **parameters}
    for what, true in results["exact"].items():
        if true.norm() < 1e-9:  # a bias in front of InstanceNorm has no gradient
            continue
        plain = relative_error(results["plain"][what], true)
        assert relative_error(results["ours"][what], true) < 3 * plain + 1e-6, what


@pytest.mark.parametrize("name", LAYERS)
def test_models_leave_to_torch_what_they_do_not_fuse(name):
    layer = LAYERS[name]
    model = layer.model(layer)
    behind = layer.norm == "batch"
    assert (model.norm is not None) == (layer.norm in ("layer", "batch"))
    assert model.activation == (None if behind else layer.activation)
    assert model.activation_behind == (layer.activation if behind else None)
    assert (model.group_norm is not None) == (layer.norm in ("group", "instance"))


def test_statistics_that_run_are_not_trivial():
    """BatchNorm is inference's, in the benchmark's way of copying it too."""
    layer = LAYERS["psmnet"]
    original = layer.original(layer)
    for model in (original, benchmark.CONTENDERS["fusedconv"].build(layer, original)):
        assert not model.norm.training
        assert model.norm.running_mean.std() > 0.1
        assert model.norm.running_var.std() > 0.1
    x = torch.rand(layer.shape("small"))
    assert torch.equal(original(x)[:1], original(x[:1]))


def test_layer_norm_is_over_the_channels_of_a_pixel():
    norm = benchmark.layers.LayerNorm2d(6)
    with torch.no_grad():
        norm.weight.uniform_(-1, 1)
        norm.bias.uniform_(-1, 1)
    x = torch.randn(2, 6, 3, 4)
    expected = nn.functional.layer_norm(
        x.movedim(1, -1), (6,), norm.weight, norm.bias, norm.eps
    ).movedim(-1, 1)
    torch.testing.assert_close(norm(x), expected)


def test_one_axis_has_one_layout():
    cells = select_cells(SUITE.workloads, SUITE.precisions, passes=SUITE.passes)
    assert len(cells) == (20 * 2 + 3) * 2
    single = {cell.workload for cell in cells if not cell.has_layouts}
    assert single == {"hifigan8", "dac2", "hdemucs1d"}
    assert {cell.layout for cell in cells if cell.workload in single} == {"nchw"}


def test_who_takes_part():
    cells = select_cells(SUITE.workloads, SUITE.precisions, passes=SUITE.passes)
    jobs = running.jobs(SUITE.contenders, cells, 1, SUITE.seconds, together=SUITE.together)
    assert [(job.title, len(job.cells)) for job in jobs] == [
        ("fusedconv, eager_cudnn_benchmark, compile", 86),
        ("eager", 86),
    ]
    cell = Cell("sam1", "bf16", "nchw", "forward")
    part = {name for name, each in benchmark.CONTENDERS.items() if each.takes_part(cell)}
    assert part == {*SUITE.contenders, "fusedconv_cudnn_benchmark", "compile_max_autotune"}


# ---- Compiling ahead -----------------------------------------------------------------------------

DEVICE = """
import json, os, sys
job = json.loads(sys.stdin.readline())
with open(os.environ["LOG"], "a") as log:
    threads = os.environ.get("TORCHINDUCTOR_COMPILE_THREADS")
    log.write(json.dumps({**job, "threads": threads}) + "\\n")
device = {"index": 0, "name": "a device", "uuid": None}
if job.get("measure") == "rates":
    print(json.dumps({"device": device, "rates": {"copy": 1.0}}))
elif job.get("measure") == "nothing":
    sys.exit(3)  # which is no result
else:
    for number, cell in enumerate(job["cells"]):
        print(json.dumps({"began": number}))
        records = [{**cell, "contender": name, "median_ms": 1.0} for name in job["contenders"]]
        print(json.dumps({"records": records}))
"""


@pytest.mark.parametrize(("suite", "ahead"), [("layers", True), ("systems", False)])
def test_compiling_comes_first_in_processes_of_its_own(monkeypatch, tmp_path, suite, ahead):
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    monkeypatch.setattr(running, "_command", lambda: [running.sys.executable, "-c", DEVICE])
    monkeypatch.setattr(running, "_COMPILERS", 2)
    records = benchmark.run(
        None,
        suite=suite,
        device=torch.device("cuda"),
        contenders=["eager", "compile", "compile_max_autotune"],
        workloads=["small1", "dac2"],
        precisions=["bf16"],
        passes=["forward"],
    )
    assert len(records) == 3 * 3
    requests = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    purposes = [request.get("measure") for request in requests]
    count = sum(purpose == "nothing" for purpose in purposes)
    measuring = [each["contenders"] for each in requests if each.get("measure") is None]
    assert purposes == ["rates", *["nothing"] * count, *[None] * len(measuring)]
    together = [["compile", "compile_max_autotune"], ["eager"]]
    alone = [["eager"], ["compile"], ["compile_max_autotune"]]
    assert measuring == (together if suite == "layers" else alone)
    compiled = [request for request in requests if request.get("measure") == "nothing"]
    assert (count > 0) == ahead
    if ahead:
        assert {name for request in compiled for name in request["contenders"]} == {"compile"}
        assert sorted(map(str, (c for request in compiled for c in request["cells"]))) == sorted(
            str(cell.fields())
            for cell in select_cells(["small1", "dac2"], ["bf16"], passes=["forward"])
        )
    assert {request["threads"] for request in compiled} <= {"1"}
    assert all(request["threads"] is None for request in requests if request not in compiled)
    assert {request["flushes"] for request in requests} == {ahead}
    assert {request["in_a_row"] for request in requests} == {12 if suite == "layers" else 1}


def test_a_process_that_compiles_calls_each_model_once(monkeypatch):
    calls = []

    def compiled(model, mode):
        model.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
        return model

    monkeypatch.setattr(torch, "compile", compiled)
    cells = select_cells(["small1", "dw2d"], ["fp32"], ["nchw"], ["forward"], "cpu")
    job = dict(measure="nothing", device="cpu", index=None, size="small", contenders=["compile"])
    child.serve({**job, "cells": [cell.fields() for cell in cells]}, pytest.fail)
    assert calls == [False, False]

    def broken(model, mode):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", broken)
    child.serve({**job, "cells": [cell.fields() for cell in cells]}, pytest.fail)


# ---- Rows and the table --------------------------------------------------------------------------


def record(workload, contender, milliseconds, layout="nchw", **changes):
    cell = Cell(workload, "bf16", layout, "forward")
    fields = {"floor_ms": 0.5, "error_fp64": 1e-3, "kernel": "torch", "host_us": 20.0}
    fields |= {"contender": contender, "median_ms": milliseconds}
    return {**cell.fields(), **fields, **changes}


RECORDS = [
    record("small2", "fusedconv", 4.0),
    record("small2", "eager", 2.0),
    record("sam1", "fusedconv", 1.0, kernel="ours"),
    record("sam1", "fusedconv", 2.0, "nhwc"),
    record("sam1", "eager", 3.0),
    record("sam1", "eager", 2.0, "nhwc", host_us=30.0),
    record("sam1", "compile", 8.0),
    record("sam1", "compile", None, "nhwc"),
    record("dac2", "eager", 1.0),  # without fusedconv
    record("system1", "fusedconv", 1.0),
]


def test_rows_have_contenders_in_their_best_layouts():
    ((key, found),) = rows.rows(RECORDS).items()
    assert key == ("forward", "bf16")
    assert [row.name for row in found] == ["sam1", "small2"]
    first = found[0]
    assert (first.ours["median_ms"], first.peer["contender"], first.peer["layout"]) == (
        1.0,
        "eager",
        "nhwc",
    )
    assert (first.speed_up, first.possible, first.share) == (2.0, 4.0, 0.5)
    assert rows.best_peer_summary(found).mean == pytest.approx(1.0)
    assert rows.best_peer_summary(found).slower == 1


@pytest.fixture
def results(tmp_path):
    path = tmp_path / "layers.json"
    header = {"device": "a device", "torch": "2", "commit": "abc"}
    path.write_text(json.dumps({"header": header, "records": RECORDS[:-1]}))
    return path


def test_the_table(results, capsys):
    script("table").main([str(results)])
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert lines == [
        "forward bf16",
        "| layer | floor | fusedconv | of the floor | vs best peer | eager | compile | "
        "host, best peer's | error / best peer's | kernel |",
        "|---|---|---|---|---|---|---|---|---|---|",
        "| sam1 | 500.0 | 1000 | 50% | 2.00x | 2000* | 8000 | 20, 30 | 1.00 | ours |",
        "| small2 | 500.0 | 4000 | 12% | 0.50x | 2000 |  | 20, 20 | 1.00 | torch |",
        "| geometric mean |  |  | 25% | 1.00x |  |  |  |  | 1 of 2 below 0.95x |",
    ]


def test_the_command_measures_layers(tmp_path):
    path = tmp_path / "layers.json"
    done = python(
        *("-m", "fusedconv", "bench", "--suite", "layers", "--small", "--device", "cpu"),
        *("--workload", "small1", "--workload", "dac2", "--seconds", "0", "--least", "1"),
        *("--contender", "fusedconv", "--contender", "eager", "--output", str(path)),
    )
    assert done.returncode == 0, done.stderr
    records = json.loads(path.read_text())["records"]
    assert [(r["workload"], r["precision"], r["layout"], r["contender"]) for r in records] == [
        (name, precision, layout, contender)
        for name, layouts in (("small1", ("nchw", "nhwc")), ("dac2", ("nchw",)))
        for precision in ("fp32", "bf16")
        for layout in layouts
        for contender in ("fusedconv", "eager")
    ]
    for each in records:
        assert each["pass"] == "forward"
        assert each["error_fp64"] < 0.02
        assert each["error_fp64_after"] < 0.02


def test_the_command_measures_gradients_of_layers(tmp_path):
    path = tmp_path / "layers.json"
    done = python(
        *("-m", "fusedconv", "bench", "--suite", "layers", "--small", "--device", "cpu"),
        *("--workload", "lama", "--precision", "fp32", "--pass", "forward_backward"),
        *("--seconds", "0", "--least", "1", "--layout", "nchw"),
        *("--contender", "fusedconv", "--contender", "eager", "--output", str(path)),
    )
    assert done.returncode == 0, done.stderr
    records = json.loads(path.read_text())["records"]
    assert [(r["pass"], r["contender"]) for r in records] == [
        ("forward_backward", "fusedconv"),
        ("forward_backward", "eager"),
    ]
    for each in records:
        assert each["error_fp64"] < 1e-5
        assert each["median_ms"] > 0
