"""Every kernel of a problem as records: what they hold, resuming, regret, the command."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from problems import backward_problem, problem
from toys import Toy, ToyPlan, filled

from fusedconv import benchmark, selection, tuning, winners
from fusedconv import registry as registries
from fusedconv.benchmark import kernels
from fusedconv.benchmark.regret import fields, regret_summaries, regrets
from fusedconv.cli import main
from fusedconv.device import PROCESSOR
from fusedconv.winners import Winner

CPU = torch.device("cpu")
SMALL = problem(batch=2, conv=None)
QUICK = {"seconds": 0.0, "least": 3}


@pytest.fixture(autouse=True)
def untuned(monkeypatch, tmp_path):
    monkeypatch.setattr(selection, "_tuned", {})
    monkeypatch.setenv("FUSEDCONV_CACHE_DIR", str(tmp_path / "cache"))


def source(*problems, workload=None):
    return kernels.Source(workload, "a source", lambda: problems)


def measured(*problems, output=None, **options):
    return kernels.run(output, [source(*problems)], CPU, **{**QUICK, **options})


# ---- records -------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [SMALL, backward_problem()], ids=["forward", "backward"])
def test_a_record_has_the_times_of_every_kernel_that_serves(target):
    (record,) = measured(target)
    found = {(tuple(each["parts"]), each["kernel"]): each for each in record["kernels"]}
    candidates = {
        (parts, each.kernel.name): each
        for parts, (_, known) in selection.pieces(target, PROCESSOR).items()
        for each in known
        if each.support
    }
    assert found.keys() == candidates.keys()
    for piece, each in found.items():
        assert each["reps"] == len(each["times_ms"]) == 3
        assert each["median_ms"] == pytest.approx(statistics.median(each["times_ms"]), abs=1e-6)
        assert each["p10_ms"] <= each["median_ms"] <= each["p90_ms"]
        assert each["estimate_ms"] == candidates[piece].cost
        assert each["provider"] == candidates[piece].kernel.provider
    assert record["summary"] == str(target)
    assert record["asked"] == "all"
    assert record["parts"] == list(target.parts)
    assert record["versions"]["torch"] == torch.__version__
    assert len(record["run"].split()) == 2


def test_the_choice_is_that_of_estimates_whatever_was_tuned(monkeypatch):
    monkeypatch.setattr(registries, "_registry", filled(Toy("low", 1.0), Toy("high", 2.0)))
    selection.keep_winner(SMALL, PROCESSOR, Winner(((("forward",), "high"),)))
    assert selection.choose(SMALL, PROCESSOR).chosen[0][1].kernel.name == "high"
    (record,) = measured(SMALL)
    assert record["chosen"] == [{"parts": ["forward"], "kernel": "low"}]


def test_names_leave_other_kernels_out(monkeypatch, tmp_path):
    toys = Toy("one", 1.0), Toy("two", 2.0), Toy("three", 3.0, provider="others")
    monkeypatch.setattr(registries, "_registry", filled(*toys))
    path = tmp_path / "kernels.json"
    measured(SMALL, output=path)
    records = measured(SMALL, output=path, names=("two", "others"))
    # Beside the record of all, whose times were taken in other turns.
    assert [(r["asked"], [k["kernel"] for k in r["kernels"]]) for r in records] == [
        ("all", ["one", "two", "three"]),
        (["others", "two"], ["two", "three"]),
    ]
    assert json.loads(path.read_text())["records"] == records
    assert [each.record["asked"] for each in regrets(records)] == ["all"]


def test_names_that_serve_nothing_give_a_record_without_kernels(monkeypatch):
    toys = Toy("refuses", refusal="it is a test"), Toy("serves", 1.0)
    monkeypatch.setattr(registries, "_registry", filled(*toys))
    (record,) = measured(SMALL, names=("refuses",))
    assert record["kernels"] == []
    assert record["refused"] == "refuses: it is a test"
    assert "error" not in record


def test_kernels_that_all_fail_say_why(monkeypatch):
    monkeypatch.setattr(registries, "_registry", filled(Broken("broken", 1.0)))
    (record,) = measured(SMALL)
    assert [each["error"] for each in record["kernels"]] == ["it broke"]


class Broken(Toy):
    def compile(self, problem, device):
        plan = ToyPlan(self.name, problem)

        def run(*tensors):
            raise RuntimeError("it broke")

        plan.run = run
        return plan


def test_a_kernel_that_fails_says_why(monkeypatch):
    toys = Broken("broken", 1.0), Toy("whole", 2.0)
    monkeypatch.setattr(registries, "_registry", filled(*toys))
    (record,) = measured(SMALL)
    by_name = {each["kernel"]: each for each in record["kernels"]}
    assert by_name["broken"]["error"] == "it broke"
    assert by_name["broken"]["median_ms"] is None
    assert by_name["whole"]["reps"] == 3
    assert regrets([record]) == []  # the chosen one has no time


def test_problems_by_one_name_are_numbered_and_taken_once():
    sources = [source(SMALL, problem(batch=3, conv=None), workload="two"), source(SMALL)]
    found = kernels.questions(sources, CPU, None, benchmark.Observer())
    assert [each.fields()["workload"] for each in found] == ["two", "two (2)"]
    ((alone,),) = [kernels.questions([source(SMALL)], CPU, None, benchmark.Observer())]
    assert alone.fields()["workload"] == str(SMALL).split(", ")[0]


# ---- resuming ------------------------------------------------------------------------------------


class Stops(benchmark.Observer):
    """Ends the run at its second record."""

    def __init__(self):
        self.titles = []

    def measured(self, record, share):
        self.titles.append(record["summary"])
        if len(self.titles) == 2:
            raise KeyboardInterrupt


def test_a_run_that_was_stopped_goes_on_where_it_stood(monkeypatch, tmp_path):
    path = tmp_path / "kernels.json"
    problems = [problem(batch=batch, conv=None) for batch in (1, 2, 3)]
    with pytest.raises(KeyboardInterrupt):
        measured(*problems, output=path, observer=Stops())
    before = json.loads(path.read_text())["records"]
    assert [each["summary"] for each in before] == [str(p) for p in problems[:2]]
    watch = Stops()
    records = measured(*problems, output=path, observer=watch, resume=True)
    assert watch.titles == [str(problems[2])]
    assert records[:2] == before
    assert len(json.loads(path.read_text())["regret"]["problems"]) == 3
    # Without being asked to, everything is measured anew.
    with pytest.raises(KeyboardInterrupt):
        measured(*problems, output=path, observer=Stops())
    # Another build or version of torch has records of its own, beside these.
    monkeypatch.setattr(winners, "_versions", lambda device: {"torch": "another"})
    (other,) = measured(problems[0], output=path, resume=True)
    assert other["versions"] == {"torch": "another"}
    assert len(json.loads(path.read_text())["records"]) == 4


def test_finding_problems_tunes_none(monkeypatch):
    monkeypatch.setenv("FUSEDCONV_AUTOTUNE", "1")
    active = []

    def find():
        active.append(tuning.is_active())
        return [SMALL]

    source = kernels.Source(None, "small", find)
    assert len(kernels.questions([source], CPU, None, benchmark.Observer())) == 1
    assert active == [False]
    assert tuning.is_active()


def test_a_problem_without_memory_is_tried_again(monkeypatch, tmp_path):
    path = tmp_path / "kernels.json"

    def fails(*arguments):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(kernels, "calls", fails)
        (record,) = measured(SMALL, output=path)
    assert (record["error"], record["kernels"]) == ("out of memory", [])
    assert regrets([record]) == []
    (record,) = measured(SMALL, output=path, resume=True)
    assert "error" not in record
    assert record["kernels"]


def test_files_of_contenders_are_not_added_to(tmp_path):
    path = tmp_path / "contenders.json"
    path.write_text('{"header": {}, "records": [{"contender": "eager"}]}')
    with pytest.raises(ValueError, match=r"^output: got .*, expected a file of this"):
        measured(SMALL, output=path)


# ---- regret --------------------------------------------------------------------------------------


def piece(kernel, milliseconds, *parts):
    parts = list(parts or ("forward",))
    return {"parts": parts, "kernel": kernel, "provider": "toys", "median_ms": milliseconds}


def record_of(target, chosen, *timed, asked="all"):
    question = kernels.Question(target, CPU, None, "layer")
    chosen = [{"parts": each["parts"], "kernel": each["kernel"]} for each in chosen]
    return {**question.fields(), "asked": asked, "chosen": chosen, "kernels": list(timed)}


FAST, SLOW = piece("fast", 2.0), piece("slow", 3.0)


def test_the_regret_is_the_chosen_time_over_the_best():
    (found,) = regrets([record_of(SMALL, [SLOW], SLOW, FAST)])
    assert (found.ratio, found.tuned_ratio) == (1.5, None)
    assert (str(found.estimated), str(found.best)) == ("slow", "fast")
    assert found.title == f"layer forward {SMALL.precision} {SMALL.layout}"


def test_the_regret_of_a_backward_pass_is_of_sums():
    target = backward_problem()
    assert target.parts == ("epilogue", "input", "weight", "bias")
    own = [piece(name, 1.0, name) for name in target.parts]
    joined = piece("joined", 2.5, "input", "weight", "bias")
    (found,) = regrets([record_of(target, own, *own, joined)])
    # 1 + 2.5 is the least: epilogue alone, the others together.
    assert found.best.pieces == ((("epilogue",), "epilogue"), (tuple(joined["parts"]), "joined"))
    assert found.ratio == pytest.approx(4.0 / 3.5)


def test_regrets_before_and_after_tuning():
    tuned, untuned = SMALL, problem(batch=3, conv=None)
    kept = winners.entry(tuned, PROCESSOR, Winner(((("forward",), "fast"),)))
    records = [record_of(each, [SLOW], SLOW, FAST) for each in (tuned, untuned)]
    found = regrets(records, {kept.key: kept})
    assert [(each.ratio, each.tuned_ratio) for each in found] == [(1.5, 1.0), (1.5, None)]
    of = regret_summaries(found)
    assert {name: (len(each.ratios), each.mean) for name, each in of.items()} == {
        "estimated": (2, pytest.approx(1.5)),
        "before tuning": (1, pytest.approx(1.5)),
        "after tuning": (1, 1.0),
    }
    assert [each["tuned_regret"] for each in fields(found)["problems"]] == [1.0, None]
    # A winner that was not timed here says nothing.
    kept = winners.entry(tuned, PROCESSOR, Winner(((("forward",), "gone"),)))
    assert regrets(records, {kept.key: kept})[0].tuned is None


def test_summaries_of_regrets():
    records = [
        record_of(problem(batch=batch, conv=None), [piece("a", time)], piece("a", time), FAST)
        for batch, time in ((1, 2.0), (2, 4.0), (3, 16.0), (4, 2.1))
    ]
    total = regret_summaries(regrets(records))["estimated"]
    assert total.mean == pytest.approx((1 * 2 * 8 * 1.05) ** 0.25)
    assert (total.worst, total.slower) == (8.0, 2)
    assert str(total).endswith("worst 8.00, 2 of 4 problems above 1.05")
    assert regret_summaries([]) == {}


# ---- the command ---------------------------------------------------------------------------------

LINES = (
    '{"in-channels": 4, "out-channels": 4, "spatial": [5, 5], "batch": 1, "num-groups": 2, '
    '"gradients": true}\n'
    '{"in-channels": 4, "out-channels": 0, "spatial": [5, 5], "batch": 1, "num-groups": 2}\n'
)
BENCH = ("bench", "--device", "cpu", "--kernels", "all", "--seconds", "0", "--least", "2")


def invoke(*arguments, status=0):
    result = CliRunner().invoke(main, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == status, result.output
    return result.output


@pytest.fixture
def shapes(tmp_path) -> Path:
    path = tmp_path / "shapes.jsonl"
    path.write_text(LINES)
    return path


def test_the_command_takes_a_file_of_shapes(shapes, tmp_path, monkeypatch):
    path = tmp_path / "kernels.json"
    output = invoke(*BENCH, "--suite", shapes, "--output", path, "--commit", "abc")
    content = json.loads(path.read_text())
    assert [r["pass"] for r in content["records"]] == ["forward, saving", "backward", "forward"]
    assert content["header"]["commit"] == "abc"
    assert content["regret"]["summaries"]["estimated"]["problems"] == 3
    assert "regret, estimated: geometric mean" in output
    assert "of 3 problems above 1.05" in output
    assert output.count(", regret ") >= 3
    # After tuning nothing is left to measure; the regret of what was tuned is added.
    monkeypatch.setattr(tuning, "SECONDS", 0.1)
    invoke("tune", "--device", "cpu", shapes)
    kept = invoke("cache", "path").strip()
    arguments = ("--suite", shapes, "--output", path, "--resume", "--winners", kept)
    output = invoke(*BENCH, *arguments)
    assert "kernels, best" not in output
    for name in ("estimated", "before tuning", "after tuning"):
        assert f"regret, {name}: geometric mean" in output
    again = json.loads(path.read_text())
    assert again["records"] == content["records"]
    assert again["regret"]["summaries"].keys() == {"estimated", "before tuning", "after tuning"}


def test_the_command_takes_suites(tmp_path):
    path = tmp_path / "kernels.json"
    arguments = ("--suite", "systems", "--workload", "system3", "--small", "--precision", "fp32")
    output = invoke(*BENCH, *arguments, "--layout", "nchw", "--output", path)
    records = json.loads(path.read_text())["records"]
    assert [(r["workload"], r["pass"], r["precision"], r["layout"]) for r in records] == [
        ("system3", name, "fp32", "nchw") for name in ("forward", "forward, saving", "backward")
    ]
    for name in ("forward", "forward, saving", "backward"):
        assert f"system3 {name} fp32 nchw: " in output


def test_names_are_those_of_kernels_and_providers(shapes):
    arguments = ("bench", "--device", "cpu", "--suite", shapes, "--seconds", "0", "--least", "2")
    output = invoke(*arguments, "--kernels", "torch")
    assert output.count(": 1 kernels") == 2
    assert "regret" not in output
    output = invoke(*arguments, "--kernels", "cpu_direct")
    assert ": 0 kernels: cpu_direct: " in output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--kernels", "nope"), "'--kernels': no kernel or provider is called nope"),
        (("--kernels", ","), "'--kernels': got ',', expected names of kernels"),
        (("--kernels", "all", "--contender", "eager"), "'--contender': expected none with"),
        (("--kernels", "all", "--suite", "gone"), "'--suite': got 'gone', expected systems or"),
        (("--suite", "{shapes}"), "or with --kernels a file"),
        (("--kernels", "all", "--suite", "{shapes}", "--layout", "nchw"), "whose lines say it"),
        (("--kernels", "all", "--resume"), "'--resume': got no --output"),
        (("--kernels", "all", "--output", "{shapes}"), "expected a file of this benchmark's"),
        (("--kernels", "all", "--winners", "{shapes}"), "'--winners'"),
        (("--winners", "{shapes}"), "got a file without --kernels"),
    ],
    ids=" ".join,
)
def test_the_command_refuses_before_it_measures(shapes, monkeypatch, arguments, expected):
    def run(*arguments, **options):
        raise AssertionError("measured")

    monkeypatch.setattr(kernels, "run", run)
    monkeypatch.setattr(benchmark, "run", run)
    arguments = [each.format(shapes=shapes) for each in arguments]
    output = invoke("bench", "--device", "cpu", *arguments, status=2)
    assert expected in " ".join(output.split())


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "shapes.jsonl"
    path.write_text(LINES + '{"stride": 0}\n')
    output = invoke(*BENCH, "--suite", path, status=2)
    assert "'--suite': line 3: " in output


def test_a_forced_kernel_leaves_nothing_to_choose(force, shapes):
    force("torch")
    assert "FUSEDCONV_KERNEL is set" in invoke(*BENCH, "--suite", shapes, status=1)
