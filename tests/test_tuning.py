"""Kernels chosen by their times: who is timed, when, and what a process keeps of it."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time

import pytest
import torch
from problems import backward_problem, explained, problem
from toys import Toy, ToyBackward, ToyBackwardPlan, ToyPlan, filled

import fusedconv
from fusedconv import functional, selection, tuning, winners
from fusedconv import registry as registries
from fusedconv.checking import gradient_shapes
from fusedconv.device import PROCESSOR
from fusedconv.problem import Residual
from fusedconv.selection import choose
from fusedconv.winners import Winner

CPU = torch.device("cpu")
PROBLEM = problem(batch=2, conv=None)


class Timed(Toy):
    """Takes so many milliseconds whatever it estimates, and counts its runs."""

    def __init__(self, name, cost, milliseconds, **fields):
        super().__init__(name, cost, **fields)
        self.milliseconds = milliseconds
        self.runs = 0

    def compile(self, problem, device):
        plan = ToyPlan(self.name, problem)
        run = plan.run

        def slowly(*tensors):
            self.runs += 1
            time.sleep(self.milliseconds / 1e3)
            return run(*tensors)

        plan.run = slowly
        return plan


class TimedBackward(ToyBackward):
    """Takes so many milliseconds by the parts that it computes together."""

    def compile(self, problem, device):
        plan = ToyBackwardPlan(self.name, problem, {})
        milliseconds = self.found[problem.parts]

        def slowly(tensors):
            time.sleep(milliseconds / 1e3)
            zeros = {name: torch.zeros(shape) for name, shape in gradient_shapes(problem).items()}
            return fusedconv.Gradients(**zeros)

        plan.run = slowly
        return plan


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """Nothing tuned, in memory or in a folder of the test's own; few rounds."""
    monkeypatch.setattr(selection, "_tuned", {})
    monkeypatch.setattr(tuning, "SECONDS", 0.2)
    monkeypatch.setenv("FUSEDCONV_CACHE_DIR", str(tmp_path / "cache"))
    yield
    assert tuning._open == 0


@pytest.fixture
def toys(monkeypatch):
    """Two kernels, the one of the higher estimate being the faster one."""
    kernels = Timed("estimated", 1.0, 8.0), Timed("measured", 2.0, 1.0)
    monkeypatch.setattr(registries, "_registry", filled(*kernels))
    return kernels


def normalise(batch=2):
    return functional.group_norm(torch.ones(batch, 4, 3), 2)


def used():
    """The kernel that serves ``normalise`` and what decided."""
    (explanation,) = explained(normalise)
    return explanation.kernel, explanation.chosen_by


# ---- calls ---------------------------------------------------------------------------------------


def test_nothing_is_timed_unless_it_is_asked_for(toys):
    normalise()
    assert [toy.runs for toy in toys] == [1, 0]
    assert used() == ("estimated", "cost")


def test_the_first_call_of_a_problem_times_every_kernel(toys):
    normalise()  # its plan was chosen by estimate
    with fusedconv.autotune():
        normalise()
        runs = [toy.runs for toy in toys]
        assert min(runs) >= tuning.LEAST
        assert used() == ("measured", "tuned")
        runs[1] += 1
        normalise()
        # The second call; no more timing.
        assert [toy.runs for toy in toys] == [runs[0], runs[1] + 1]
    assert used() == ("measured", "tuned")
    normalise(batch=3)
    assert explained(normalise, 3)[0].chosen_by == "cost"


def test_the_variable_tunes_a_whole_process(toys, monkeypatch):
    monkeypatch.setenv("FUSEDCONV_AUTOTUNE", "1")
    normalise()
    assert used() == ("measured", "tuned")


def test_other_values_of_the_variable_are_refused(toys, monkeypatch):
    monkeypatch.setenv("FUSEDCONV_AUTOTUNE", "yes")
    with pytest.raises(ValueError, match=r"^FUSEDCONV_AUTOTUNE: got 'yes', expected 0 or 1$"):
        normalise()


def test_a_decorator_and_contexts_within_contexts(toys):
    @fusedconv.autotune()
    def tuned(depth):
        with fusedconv.autotune():
            if depth:
                tuned(depth - 1)
        assert tuning.is_active()
        return normalise()

    tuned(2)
    assert not tuning.is_active()
    assert used() == ("measured", "tuned")


def test_a_context_ends_where_an_error_leaves_it(toys):
    with pytest.raises(KeyError), fusedconv.autotune():
        raise KeyError
    assert not tuning.is_active()


def test_what_is_forced_is_not_timed(toys, force):
    force("estimated")
    with fusedconv.autotune():
        normalise()
    assert toys[1].runs == 0
    assert used() == ("estimated", "estimated")


def test_forced_goes_before_tuned_and_that_before_cost(toys, force):
    with fusedconv.autotune():
        normalise()
    assert used() == ("measured", "tuned")
    force("estimated")
    assert used() == ("estimated", "estimated")


def test_explain_says_what_the_others_took(toys):
    with fusedconv.autotune():
        normalise()
    (explanation,) = explained(normalise)
    times = {name: time for (_, name), time in explanation.times.items()}
    assert times["estimated"] > 7.0 > times["measured"] >= 1.0
    text = str(explanation)
    assert "estimated 2 ms, tuned, measured " in text
    assert f"estimated: estimated 1 ms, measured {times['estimated']:.4g} ms" in text


def test_the_users_random_numbers_are_left_alone(toys):
    torch.manual_seed(0)
    with fusedconv.autotune():
        normalise()
    after = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(after, torch.rand(3))


def test_threads_time_a_problem_once(toys, monkeypatch):
    measured = []
    measure = tuning.measure
    monkeypatch.setattr(
        tuning, "measure", lambda *arguments: measured.append(arguments) or measure(*arguments)
    )
    with fusedconv.autotune():
        threads = [threading.Thread(target=normalise) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(measured) == 1
    assert used() == ("measured", "tuned")


def test_a_kernel_that_fails_is_not_chosen(toys, monkeypatch, caplog):
    def fail(problem, device):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(toys[1], "compile", fail)
    caplog.set_level(logging.INFO, "fusedconv")
    with fusedconv.autotune():
        normalise()
    assert used() == ("estimated", "tuned")
    assert "measured is not timed" in caplog.text
    assert "out of luck" in caplog.text


def test_empty_tensors_are_not_timed(toys):
    with fusedconv.autotune():
        normalise(batch=0)
    assert toys[1].runs == 0
    refusal = tuning.tune_problem(problem(batch=0, conv=None), CPU)
    assert not refusal
    assert refusal.reason == "its tensors are empty"


# ---- who looks on --------------------------------------------------------------------------------


def test_nothing_is_timed_while_torch_compile_looks_on(toys, compiled, monkeypatch):
    timed = []
    monkeypatch.setattr(tuning, "tune_problem", lambda problem, device: timed.append(problem))
    asked = []
    is_active = tuning.is_active
    monkeypatch.setattr(
        tuning, "is_active", lambda: asked.append(torch.compiler.is_compiling()) or is_active()
    )
    with fusedconv.autotune():
        compiled(normalise, backend="eager")()
    assert not any(asked)
    # The operator of the compiled code runs on tensors like any other call.
    assert len(timed) == 1


def test_nothing_is_timed_while_a_trace_is_made(toys, monkeypatch):
    monkeypatch.setattr("fusedconv.ops.watching._is_tracing", lambda: True)
    monkeypatch.setattr(tuning, "measure", lambda *arguments: pytest.fail("timed"))
    with fusedconv.autotune():
        fusedconv.ops.group_norm_plan(
            fusedconv.ops.NormCall(
                torch.ones(2, 4, 3), 2, None, None, 1e-5, "identity", "act_norm", None
            ),
            False,
        )


def test_nothing_is_timed_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not tuning._can_be_timed(PROBLEM, torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert tuning._can_be_timed(PROBLEM, torch.device("cuda"))


# ---- times ---------------------------------------------------------------------------------------


def test_the_parts_of_a_backward_pass_are_divided_by_their_times(monkeypatch):
    parts = ("epilogue", "input", "weight", "bias")
    alone = {(part,): 2.0 for part in parts}
    both = {("epilogue", "bias"): 1.0}
    monkeypatch.setattr(
        registries,
        "_registry",
        filled(
            TimedBackward("alone", parts, dict.fromkeys(alone, 1.0), found=alone),
            TimedBackward("both", ("epilogue", "bias"), dict.fromkeys(both, 50.0), found=both),
        ),
    )
    backward = backward_problem()
    assert choose(backward, PROCESSOR).by == "cost"
    assert tuning.tune_problem(backward, CPU)
    choice = choose(backward, PROCESSOR)
    assert choice.by == "tuned"
    assert [(piece.parts, candidate.kernel.name) for piece, candidate in choice.chosen] == [
        (("epilogue", "bias"), "both"),
        (("input",), "alone"),
        (("weight",), "alone"),
    ]


@pytest.mark.parametrize(
    "target",
    [
        problem(),
        problem(batch=2, aligned=False, layout="nhwc", save=True),
        problem(conv=None, layout="strided"),
        problem(epilogue=(Residual(),)),
        problem(dtype=torch.bfloat16, output_dtype=torch.bfloat16, precision="bf16"),
        backward_problem(),
        backward_problem(grad_layout="strided", aligned=False),
        backward_problem(problem(conv=None, save=True)),
    ],
    ids=str,
)
def test_every_kernel_of_the_processor_is_timed(target):
    """On tensors of the problem's description."""
    winner = tuning.measure(target, CPU)
    served = {
        (parts, candidate.kernel.name)
        for parts, (_, candidates) in selection.pieces(target, PROCESSOR).items()
        for candidate in candidates
        if candidate.support
    }
    assert set(winner.times) == served
    assert sorted(part for parts, _ in winner.pieces for part in parts) == sorted(target.parts)
    selection.keep_winner(target, PROCESSOR, winner)
    assert choose(target, PROCESSOR).by == "tuned"


def test_forward_and_backward_of_a_call_are_tuned():
    x = torch.randn(2, 4, 6, 6, requires_grad=True)
    weight = torch.randn(4, 4, 2, 2, requires_grad=True)

    def call():
        return functional.conv_transpose_act_norm(x, weight, stride=2, num_groups=2)

    expected = torch.autograd.grad(call().square().sum(), (x, weight))
    with fusedconv.autotune():
        found = torch.autograd.grad(call().square().sum(), (x, weight))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert [e.chosen_by for e in explained(lambda: call().square(), gradients=True)] == [
        "tuned", "tuned"
    ]  # fmt: skip


# ---- what other processes kept -------------------------------------------------------------------


def test_a_winner_outlives_its_process(toys, monkeypatch):
    with fusedconv.autotune():
        normalise()
    monkeypatch.setattr(selection, "_tuned", {})
    fusedconv.clear_cache()
    assert used() == ("measured", "tuned")
    runs = toys[1].runs
    with fusedconv.autotune():
        normalise()
    assert toys[1].runs == runs + 1


@pytest.mark.parametrize(
    "pieces",
    [
        ((("forward",), "gone"),),
        ((("backward",), "measured"),),
        ((("forward",), "measured"),) * 2,
    ],
    ids=str,
)
def test_a_kept_winner_that_does_not_serve_is_passed_over(toys, pieces, caplog):
    winners.store(PROBLEM, PROCESSOR, Winner(pieces))
    caplog.set_level(logging.INFO, "fusedconv")
    assert choose(PROBLEM, PROCESSOR).by == "cost"
    assert "passed over" in caplog.text
    assert tuning.tune_problem(PROBLEM, CPU)
    assert choose(PROBLEM, PROCESSOR).by == "tuned"


def test_a_folder_that_cannot_be_written_costs_a_warning(toys, monkeypatch, tmp_path):
    @fusedconv.autotune()
    def tune_two():
        normalise()
        normalise(batch=3)

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FUSEDCONV_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning) as warned:
        tune_two()
    assert len(warned) == 1
    assert "tuned kernels are" in str(warned[0].message)
    assert used() == ("measured", "tuned")


def test_devices_of_other_names_have_winners_of_their_own(toys):
    winners.store(PROBLEM, PROCESSOR, Winner(((("forward",), "measured"),)))
    assert choose(PROBLEM, PROCESSOR).by == "tuned"
    other = dataclasses.replace(PROCESSOR, name="another")
    assert choose(PROBLEM, other).by == "cost"
