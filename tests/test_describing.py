"""Problems as JSON: described and read back, recorded from calls, tuned from a file."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from click.testing import CliRunner
from problems import backward_problem, conv_geometry, explained, group_norm_stage, problem
from torch import nn

import fusedconv
from fusedconv import selection
from fusedconv.cli import main
from fusedconv.cli.shapes import problems_of_file
from fusedconv.describing import described, problem_of
from fusedconv.hypothetical import checked
from fusedconv.problem import Activation, Bias, Residual

CPU = torch.device("cpu")
FORWARD = problem(
    epilogue=(Bias(), Activation("leaky_relu", 0.2), group_norm_stage(), Residual()), save=True
)
BACKWARD = backward_problem(problem(save=True), grad_layout="strided", aligned=False)
PROBLEMS = {
    "everything": FORWARD,
    "backward": BACKWARD,
    "norm alone": problem(conv=None, norm=group_norm_stage(affine_dtype=None, weight=False,
                                                           bias=False), layout="nhwc"),
    "layer norm": problem(norm=group_norm_stage(0, kind="layer"), order="norm_act"),
    "empty batch": problem(batch=0, layout="strided"),
    "16 bits": problem(dtype=torch.bfloat16, precision="bf16", output_dtype=torch.float32),
    "bare": problem(activation="identity", norm=None, bias=False),
}  # fmt: skip


@pytest.mark.parametrize("name", PROBLEMS)
def test_problems_come_back_as_they_were(name):
    text = json.dumps(described(PROBLEMS[name]))
    found = problem_of(json.loads(text))
    assert found == PROBLEMS[name]
    assert hash(found) == hash(PROBLEMS[name])
    assert checked(found, "cpu") is found


def changed(path: str, value: object) -> dict:
    """A description of BACKWARD with another value at a place, or without it."""
    description = copy.deepcopy(described(BACKWARD))
    *outer, last = path.split(".")
    place = description
    for name in outer:
        place = place[int(name) if name.isdigit() else name]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return description


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("type", "Problem", "problem: got .*, expected an object of type ForwardProblem or Back"),
        ("type", ["ForwardProblem"], "problem: got .*, expected an object of type"),
        ("type", "Norm", "problem: got .*, expected an object of type ForwardProblem or Back"),
        ("more", 1, "problem: got .*'more'.*, expected the fields type, forward, grad_dtype"),
        ("aligned", None, "problem: got .*, expected the fields type, forward, grad_dtype"),
        ("aligned", 1, "problem.aligned: got 1, expected true or false"),
        ("grad_dtype", "int32", "problem.grad_dtype: got 'int32', expected 'float32' or"),
        ("grad_dtype", {}, "problem.grad_dtype: got {}, expected 'float32' or"),
        ("grad_layout", "nhcw", "problem.grad_layout: got 'nhcw', expected 'nchw' or 'nhwc' or"),
        ("gradients", ["inputs"], "problem.gradients: got .*'inputs'.*, expected some of"),
        ("gradients", [[]], r"problem.gradients\[0\]: got \[\], expected a text"),
        ("gradients", "input", "problem.gradients: got 'input', expected a list of at most 64"),
        ("forward", 5, "problem.forward: got 5, expected an object of type ForwardProblem"),
        ("forward.batch", -1, "problem.forward.batch: got -1, expected an integer from 0 to"),
        ("forward.batch", 2**63, "problem.forward.batch: got 9223372036854775808, expected an"),
        ("forward.batch", True, "problem.forward.batch: got True, expected an integer"),
        ("forward.spatial", [1] * 65, r"problem.forward.spatial: got \[1, .*\.\.\., expected a li"),
        ("forward.epilogue.0.type", "Convolution", r"epilogue\[0\]: got .*, expected an object of"),
        ("forward.epilogue.1.name", "print()", r"epilogue\[1\].name: got 'print\(\)', expected"),
        ("forward.epilogue.1.parameter", 1, "parameter: got 1.0 for gelu, expected None"),
        ("forward.epilogue.2.eps", float("nan"), r"epilogue\[2\].eps: got nan, expected a finite"),
        ("forward.epilogue.2.eps", 10**400, r"epilogue\[2\].eps: got 1000.*, expected a finite"),
        ("forward.epilogue.2.kind", "cube", r"epilogue\[2\].kind: got 'cube', expected one of"),
    ],
)  # fmt: skip
def test_what_does_not_hold_is_named(path, value, message):
    with pytest.raises(ValueError, match=message):
        problem_of(changed(path, value))


@pytest.mark.parametrize("description", [None, 3, "ForwardProblem", [], {}, {"type": None}])
def test_what_is_no_problem_is_refused(description):
    with pytest.raises(ValueError, match=r"problem: got .*, expected an object of type Forward"):
        problem_of(description)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (problem(precision="tf32"), "precision: got 'tf32' on cpu, expected 'fp32'"),
        (problem(precision="bf16"), "precision: got 'bf16' for input of float32"),
        (problem(output_dtype=torch.bfloat16), "output_dtype: got torch.bfloat16, expected"),
        (problem(channels=5), "input: got 5 channels, expected 4"),
        (problem(conv=conv_geometry(groups=3, weight_strides=(12, 6, 2, 1))), "groups: got 3"),
        (problem(conv=conv_geometry(groups=0)), "groups: got 0, expected a positive divisor of 6"),
        (problem(conv=conv_geometry(out_channels=7)), "groups: got 2, expected a positive divisor"),
        (problem(conv=conv_geometry(weight_strides=(18, 6))), "weight_strides: got .*, expected"),
        (problem(conv=conv_geometry(weight_strides=(2**62,) * 4)), "weight_strides: got .*, exp"),
        (problem(conv=conv_geometry(stride=(0, 1))), "stride: got"),
        (problem(conv=conv_geometry(stride=(2,))), "conv: got .*, expected 4 input channels and"),
        (problem(conv=conv_geometry(in_channels=2, weight_strides=(18, 6, 2, 1))), "input: got 4"),
        (problem(conv=conv_geometry(output_padding=(9, 0))), "output_padding: got"),
        (problem(spatial=(5, 7, 9)), "input: got shape"),
        (problem(spatial=(2**40, 2**40)), "input: got shape .*, expected a size that torch counts"),
        (problem(norm=group_norm_stage(4)), "num_groups: got 4, expected a positive divisor of 6"),
        (problem(norm=group_norm_stage(affine_dtype=torch.float64)), "norm_weight: got dtype"),
        (problem(norm=group_norm_stage(weight=False, bias=False)), "affine_dtype: got torch.float"),
        (problem(layout="nhwc", spatial=(1, 1), conv=None), "layout: got 'nhwc', expected 'nchw'"),
        (backward_problem(problem(save=False)), "save: got False for a backward pass that reads"),
        (
            fusedconv.BackwardProblem(
                problem(save=True), torch.float32, "nchw", True, frozenset({"weight"})
            ),
            "gradients: got none of the convolution's output, which others need",
        ),
    ],
)  # fmt: skip
def test_problems_that_no_call_has_are_refused(wrong, message):
    with pytest.raises((ValueError, TypeError), match=message):
        checked(wrong, "cpu")


# ---- recorded from calls -------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """A cache of the test's own, and nothing tuned in memory."""
    monkeypatch.setattr(selection, "_tuned", {})
    monkeypatch.setenv("FUSEDCONV_CACHE_DIR", str(tmp_path / "cache"))


def model() -> nn.Module:
    whole = nn.Sequential(
        nn.ConvTranspose2d(4, 6, 2, 2), nn.GroupNorm(2, 6), nn.GELU(),
        nn.ConvTranspose2d(6, 4, 3, padding=1), nn.ReLU(),
    )  # fmt: skip
    fusedconv.convert(whole)
    return whole


def step(whole: nn.Module, layout: torch.memory_format = torch.contiguous_format) -> None:
    x = torch.randn(2, 4, 5, 6).to(memory_format=layout).requires_grad_()
    whole(x).square().mean().backward()


def test_problems_of_calls_are_recorded_once_each(tmp_path):
    path, whole = tmp_path / "new" / "problems.jsonl", model()
    with fusedconv.record_problems(path) as found:
        step(whole)
        step(whole)
        step(whole, torch.channels_last)
        assert not found
    explanations = explained(whole, torch.randn(2, 4, 5, 6, requires_grad=True), gradients=True)
    asked = [each.problem for each in explanations]
    assert found[: len(asked)] == asked and len(asked) == 4
    assert [each.layout for each in found[4:6]] == ["nhwc", "nhwc"]
    assert len(found) == 8
    lines = path.read_text().splitlines()
    assert [json.loads(line)["summary"] for line in lines] == list(map(str, found))
    assert problems_of_file(path, CPU, "'FILE'") == found


def test_recordings_within_one_another_are_apart(tmp_path):
    whole = model()
    with fusedconv.record_problems() as outer:
        step(whole)
        with fusedconv.record_problems() as inner:
            whole(torch.randn(1, 4, 3, 3))
    assert [each.batch for each in inner] == [1, 1, 1, 1][: len(inner)] and inner
    assert {each.batch for each in outer if not hasattr(each, "forward")} == {2}


def test_an_error_leaves_the_former_file(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text("former")
    with pytest.raises(ValueError, match="channels"), fusedconv.record_problems(path):
        model()(torch.randn(2, 5, 5, 6))
    assert path.read_text() == "former"
    with pytest.raises(IsADirectoryError), fusedconv.record_problems(tmp_path):
        pytest.fail("nothing is called where the file cannot be written")


def test_a_models_problems_are_tuned_before_it_is_used(tmp_path):
    path, whole = tmp_path / "problems.jsonl", model()
    with fusedconv.record_problems(path) as found:
        step(whole)
    result = CliRunner().invoke(main, ["tune", "--device", "cpu", str(path)])
    assert result.exit_code == 0, result.output
    assert len(result.output.splitlines()) == len(found)
    selection.clear_cache()
    given = torch.randn(2, 4, 5, 6, requires_grad=True)
    assert {each.chosen_by for each in explained(whole, given, gradients=True)} == {"tuned"}


def test_lines_of_both_kinds_stand_in_one_file(tmp_path):
    path = tmp_path / "problems.jsonl"
    recorded = {"summary": "", "device": "cpu", "problem": described(PROBLEMS["bare"])}
    path.write_text(json.dumps(recorded) + '\n{"batch": 2, "spatial": [6, 6]}\n')
    first, second = problems_of_file(path, CPU, "'FILE'")
    assert first == PROBLEMS["bare"] and second.batch == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "cuda"}, "device: got 'cuda', where it was recorded, expected 'cpu'"),
        ({"problem": 5}, "problem: got 5, expected an object of type ForwardProblem or"),
        ({"problem": described(problem(channels=5))}, "input: got 5 channels, expected 4"),
        (
            {"batch": 2},
            "got the fields 'summary', 'device', 'problem', 'batch', expected device, pro",
        ),
    ],
)
def test_lines_that_do_not_hold_are_named(tmp_path, changes, message):
    path = tmp_path / "problems.jsonl"
    line = {"summary": "", "device": "cpu", "problem": described(FORWARD)}
    path.write_text(json.dumps({**line, **changes}))
    result = CliRunner().invoke(main, ["tune", "--device", "cpu", str(path)])
    assert result.exit_code == 2
    text = " ".join(result.output.split())
    assert f"line 1: {message}" in text


def test_brackets_within_brackets_are_no_traceback(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text('{"problem": ' + "[" * 100_000)
    result = CliRunner().invoke(main, ["tune", "--device", "cpu", str(path)])
    assert result.exit_code == 2 and "line 1: got" in result.output
