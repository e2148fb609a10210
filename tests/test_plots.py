"""Plots of records show what the records say."""

from __future__ import annotations

import copy
import importlib.util
import json

import pytest
import torch
from click.testing import CliRunner
from problems import backward_problem, problem

from fusedconv.benchmark import WORKLOADS, Cell, kernels
from fusedconv.benchmark.regret import fields, regrets
from fusedconv.cli import main

pytest.importorskip("matplotlib", reason="plots need matplotlib", exc_type=ImportError)
from fusedconv.benchmark import plots

RATES = {"copy": 4e12, "tf32": 3e14, "fp16": 6e14, "bf16": 6e14}
HEADER = {"device": "a device", "torch": "2", "commit": "abc", "rates": RATES}


def contender(workload, name, milliseconds, layout="nchw"):
    cell = Cell(workload, "bf16", layout, "forward")
    fields = {"contender": name, "median_ms": milliseconds, "floor_ms": 0.5}
    shape = list(WORKLOADS[workload].shape("small"))
    return {**cell.fields(), **fields, "shape": shape, "kernel": "k", "run": "now abc"}


CONTENDERS = {
    "header": HEADER,
    "records": [
        contender("sam2", "fusedconv", 1.0),
        contender("sam2", "eager", 4.0),
        contender("sam2", "compile", 2.0, "nhwc"),
        contender("system3", "fusedconv", 4.0),
        contender("system3", "eager", 2.0),
        contender("system3", "fusedconv", 3.0, "nhwc"),  # without a peer
    ],
}


def kernel(name, provider, milliseconds, *parts):
    parts = list(parts or ("forward",))
    return {"parts": parts, "kernel": name, "provider": provider, "median_ms": milliseconds}


def of_kernels(workload, target, chosen, *timed):
    question = kernels.Question(target, torch.device("cpu"), None, workload)
    chosen = [{"parts": each["parts"], "kernel": each["kernel"]} for each in chosen]
    return {**question.fields(), "chosen": chosen, "kernels": list(timed), "run": "now abc"}


def kernel_records():
    slow, fast = kernel("slow", "ours", 4.0), kernel("fast", "torch", 2.0)
    backward = backward_problem()
    whole = kernel("whole", "ours", 1.0, *backward.parts)
    records = [
        of_kernels("layer", problem(), [slow], slow, fast),
        of_kernels("layer", backward, [whole], whole),
    ]
    return {"header": HEADER, "records": records, "regret": fields(regrets(records))}


def panels(figure):
    return {axis.get_title().split(":")[0]: axis for axis in figure.axes if axis.axison}


def texts(axis):
    return [text.get_text() for text in axis.texts]


# ---- figures -------------------------------------------------------------------------------------


def test_bars_are_speeds_over_the_best_peer():
    (axis,) = plots.peers(CONTENDERS).axes
    assert axis.get_title() == "forward bf16: geometric mean 1.00x"
    names = [label.get_text() for label in axis.get_xticklabels()]
    # A layer in each contender's best layout, other workloads in each layout.
    assert names == ["system3 nchw", "sam2"]
    tops = [bar.get_y() + bar.get_height() for bar in axis.patches]
    assert tops == pytest.approx([0.5, 1.0, 2.0, 0.5, 1.0])
    assert texts(axis) == ["0.50", "2.00"]
    colors = [bar.get_facecolor() for bar in axis.patches]
    assert colors[0] != colors[2]  # the slower one's
    floors = [lines.get_segments()[0][:, 1] for lines in axis.collections]
    assert [list(floor) for floor in floors] == [[4.0, 4.0], [4.0, 4.0]]


def test_points_lie_where_times_put_them():
    (axis,) = plots.roofline(CONTENDERS).axes
    assert axis.get_title() == "forward bf16: 600 TFLOP/s, 4.00 TB/s"
    flops = 2 * 2 * 9 * 64 * 32 * 4
    moved = 2 * (2 * 64 * 9 + 2 * 32 * 36)
    points = sorted(tuple(spot.get_offsets()[0]) for spot in axis.collections)
    # system3 has no convolution, and no place.
    assert points == [
        pytest.approx((flops / moved, flops / 2e-3 / 1e12)),
        pytest.approx((flops / moved, flops / 1e-3 / 1e12)),
    ]
    assert texts(axis) == ["sam2"]
    (roof,) = axis.lines
    assert max(roof.get_ydata()) == pytest.approx(600.0)
    assert roof.get_xdata()[1] == pytest.approx(150.0)


def test_strict_fp32_has_a_third_of_the_rate_of_tf32():
    content = copy.deepcopy(CONTENDERS)
    for record in content["records"]:
        record |= {"precision": "fp32", "dtype": "float32"}
    (axis,) = plots.roofline(content).axes
    assert max(axis.lines[0].get_ydata()) == pytest.approx(100.0)


def test_rooflines_of_kernels_have_the_chosen_and_the_best():
    content = kernel_records()
    (axis,) = plots.roofline(content).axes
    record = content["records"][0]
    assert sorted(spot.get_offsets()[0][1] for spot in axis.collections) == pytest.approx(
        [record["flops"] / 4e-3 / 1e12, record["flops"] / 2e-3 / 1e12]
    )


def test_the_map_names_the_fastest_kernels():
    found = panels(plots.kernel_map(kernel_records()))
    parts = [f"backward, {part}" for part in ("epilogue", "input", "weight", "bias")]
    assert list(found) == ["forward", *parts]
    assert texts(found["forward"]) == ["fast"]
    assert {name for part in parts for name in texts(found[part])} == {"whole"}
    (image,) = found["forward"].images
    (other,) = found[parts[0]].images
    assert image.get_array().item() != other.get_array().item()  # of another provider


def test_the_map_is_of_what_was_measured_last():
    content = kernel_records()
    older = copy.deepcopy(content["records"])
    for record in older:
        record |= {"device": "an older one", "run": "before abc"}
        record["kernels"][0]["kernel"] = "old"
    content["records"] += older
    found = panels(plots.kernel_map(content))
    assert "old" not in {name for axis in found.values() for name in texts(axis)}


def test_bars_of_regret():
    content = kernel_records()
    content["regret"]["problems"][0]["tuned_regret"] = 1.5
    (axis,) = plots.regrets(content).axes
    ends = [bar.get_x() + bar.get_width() for bar in axis.patches]
    assert ends == pytest.approx([2.0, 1.5])
    (label,) = (label.get_text() for label in axis.get_yticklabels())
    assert label.startswith("layer forward ")
    assert label.endswith(": slow")
    assert "geometric mean 1.414, worst 2.00" in axis.get_title()
    assert axis.get_title().endswith("1 of 2 problems above 1.01")


def test_nothing_but_the_fastest_is_shown_too():
    content = kernel_records()
    content["regret"]["problems"] = [{**content["regret"]["problems"][1], "regret": 1.0}]
    (axis,) = plots.regrets(content).axes
    assert axis.get_xlim()[1] > 1


def test_names_cover_no_other():
    content = copy.deepcopy(CONTENDERS)
    for name in ("vitpose", "centernet", "dcgan", "lama"):  # two of them at the same point
        content["records"] += [contender(name, "fusedconv", 1.0), contender(name, "eager", 2.0)]
    figure = plots.roofline(content)
    figure.draw_without_rendering()
    (axis,) = figure.axes
    boxes = [text.get_window_extent() for text in axis.texts]
    assert len(boxes) == 5
    assert not any(
        one.shrunk(0.9, 0.8).overlaps(other.shrunk(0.9, 0.8))
        for index, one in enumerate(boxes)
        for other in boxes[:index]
    )


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("peers", kernel_records()),
        ("peers", {"header": HEADER, "records": CONTENDERS["records"][:1]}),
        ("roofline", {**CONTENDERS, "header": {**HEADER, "rates": {}}}),
        ("roofline", {"header": HEADER, "records": CONTENDERS["records"][3:5]}),
        ("roofline", {"header": HEADER, "records": []}),
        ("kernels", CONTENDERS),
        ("regret", CONTENDERS),
    ],
)
def test_records_without_what_a_figure_shows_are_refused(kind, content):
    with pytest.raises(plots.NothingToPlotError, match=r"^got n"):
        plots.KINDS[kind](content)


# ---- the command ---------------------------------------------------------------------------------


def invoke(*arguments, status=0):
    result = CliRunner().invoke(main, ["plot", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == status, result.output
    return result.output


@pytest.fixture
def files(tmp_path):
    result = {}
    for name, content in (("contenders", CONTENDERS), ("kernels", kernel_records())):
        result[name] = tmp_path / f"{name}.json"
        result[name].write_text(json.dumps(content))
    return result


def test_the_command_writes_every_figure_that_there_is(files, tmp_path):
    folder = tmp_path / "new" / "figures"
    output = invoke(*files.values(), "-o", folder)
    names = [f"contenders-{kind}" for kind in ("peers", "roofline")]
    names += [f"kernels-{kind}" for kind in ("roofline", "kernels", "regret")]
    expected = [str(folder / f"{name}.{kind}") for name in names for kind in ("png", "svg")]
    assert output.splitlines() == expected
    assert sorted(map(str, folder.iterdir())) == sorted(expected)
    for path in folder.iterdir():
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG") if path.suffix == ".png" else b"<svg" in content


def test_figures_of_the_same_records_are_the_same(files, tmp_path):
    written = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        invoke(files["contenders"], "--kind", "peers", "-o", folder)
        written.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert written[0] == written[1]


def test_the_command_refuses_what_it_cannot_draw(files, tmp_path):
    folder = ("-o", tmp_path / "figures")
    output = invoke(files["contenders"], "--kind", "regret", *folder, status=2)
    assert "got no regret of a problem" in " ".join(output.split())
    other = tmp_path / "other.json"
    for text in ("{}", "[]", '{"header": {}, "records": [{"workload": 1}]}', "no JSON"):
        other.write_text(text)
        output = invoke(other, *folder, status=2)
        assert "expected a file of this benchmark's records" in " ".join(output.split())
    for content, field in ((CONTENDERS, "median_ms"), (kernel_records(), "parts")):
        content = copy.deepcopy(content)
        del content["records"][0][field]
        other.write_text(json.dumps(content))
        output = invoke(other, *folder, status=2)
        assert "expected a file of this benchmark's records" in " ".join(output.split())
    other.write_text(json.dumps({"header": HEADER, "records": []}))
    assert "got nothing to plot" in " ".join(invoke(other, *folder, status=2).split())
    (tmp_path / "again").mkdir()
    twin = tmp_path / "again" / "kernels.json"
    twin.write_text(files["kernels"].read_text())
    output = invoke(files["kernels"], twin, *folder, status=2)
    assert "expected different names" in " ".join(output.split())
    output = invoke(files["kernels"], "-o", files["kernels"] / "below", status=1)
    assert output.startswith("Error: ")


def test_a_missing_matplotlib_ends_in_one_line(files, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    output = invoke(files["kernels"], status=1)
    assert output == 'Error: matplotlib is missing: pip install "fusedconv[plot]"\n'
