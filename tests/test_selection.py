"""Who is chosen for a problem and why: forced, tuned or of the lowest cost; parts of a backward
pass divided among kernels; plans cached, errors with reasons, the log."""

from __future__ import annotations

import dataclasses
import logging
import re
import threading

import pytest
import torch
from problems import backward_problem, explained, problem
from toys import HERE, Toy, ToyBackward, filled, names

import fusedconv
from fusedconv import NoKernelError, Registry, functional, selection
from fusedconv import registry as registries
from fusedconv.checking import CheckedBackwardPlan, gradient_shapes
from fusedconv.device import KNOWN, PROCESSOR
from fusedconv.plan import BackwardTensors, JoinedPlan
from fusedconv.selection import choose, plan_for, tune

PROBLEM = problem(batch=2, conv=None)
BACKWARD = backward_problem()
PARTS = ("epilogue", "input", "weight", "bias")


@pytest.fixture
def registered(monkeypatch):
    """registered(*kernels): the process's registry has these alone."""

    def use(*kernels):
        registry = filled(*kernels)
        monkeypatch.setattr(registries, "_registry", registry)
        return registry

    return use


@pytest.fixture
def tuned():
    """tuned(problem, device, names): as ``tune``, forgotten after the test."""
    keys = []

    def record(problem, device, kernels):
        keys.append((problem, device))
        tune(problem, device, kernels)

    yield record
    for key in keys:
        tune(*key, None)


def chosen(problem, *kernels, forced=None):
    """The names of the kernels that these would be chosen from, in the order of the pieces."""
    return names(choose(problem, HERE, forced, filled(*kernels)).chosen)


# ---- a pass of one part --------------------------------------------------------------------------


def test_lowest_cost_of_those_that_serve():
    registry = filled(Toy("slow", 3.0), Toy("cheap", 0.5, refusal="dtype is odd"), Toy("good", 1.0))
    choice = choose(PROBLEM, HERE, None, registry)
    ((piece, candidate),) = choice.chosen
    assert piece is PROBLEM
    assert candidate.kernel.name == "good"
    assert candidate.support
    assert candidate.cost == choice.cost == 1.0
    assert choice.by == "cost"


def test_a_cost_of_zero_is_the_lowest():
    assert chosen(PROBLEM, Toy("one", 1.0), Toy("free", 0.0)) == ["free"]


def test_equal_costs_go_to_the_one_registered_first():
    assert chosen(PROBLEM, Toy("a"), Toy("b")) == ["a"]
    assert chosen(PROBLEM, Toy("b"), Toy("a")) == ["b"]


def test_forcing_a_kernel_or_a_provider():
    kernels = Toy("a1", 2.0, "a"), Toy("a2", 3.0, "a"), Toy("b1", 1.0, "b")
    assert chosen(PROBLEM, *kernels, forced="a2") == ["a2"]
    assert chosen(PROBLEM, *kernels, forced="a") == ["a1"]
    assert chosen(PROBLEM, *kernels, forced=" a2 , b1 ") == ["b1"]
    assert chosen(PROBLEM, *kernels, forced="a2,") == ["a2"]
    assert chosen(PROBLEM, *kernels, forced="") == ["b1"]
    assert choose(PROBLEM, HERE, "a2", filled(*kernels)).by == "a2"


@pytest.mark.parametrize("asked", [PROBLEM, BACKWARD], ids=["forward", "backward"])
def test_forcing_an_unknown_name_lists_the_known_providers(asked):
    kernels = Toy("a1", provider="a"), ToyBackward("b1", PARTS, provider="b")
    with pytest.raises(NoKernelError, match=r"FUSEDCONV_KERNEL: .* nowhere, none; .*: a, b$"):
        chosen(asked, *kernels, forced="a1,nowhere,none")


def test_no_kernel_lists_each_reason():
    kernels = Toy("first", refusal="channels are odd"), Toy("second", refusal="too wide")
    with pytest.raises(NoKernelError) as raised:
        chosen(PROBLEM, *kernels)
    text = str(raised.value)
    assert f"no kernel serves {PROBLEM} on {HERE}:\n" in text
    assert "first: channels are odd" in text
    assert "second: too wide" in text


def test_no_forced_kernel_lists_the_forced_ones_only():
    with pytest.raises(NoKernelError) as raised:
        chosen(PROBLEM, Toy("first", refusal="channels are odd"), Toy("second"), forced="first")
    assert "among first" in str(raised.value)
    assert "first: channels are odd" in str(raised.value)
    assert "second" not in str(raised.value)


@pytest.mark.parametrize("asked", [PROBLEM, BACKWARD], ids=["forward", "backward"])
def test_an_empty_registry_serves_nothing(asked):
    with pytest.raises(NoKernelError, match="no kernel serves"):
        chosen(asked)


def test_kernels_of_the_other_pass_are_not_asked():
    assert chosen(PROBLEM, ToyBackward("back", PARTS, 0.0), Toy("forth")) == ["forth"]
    assert chosen(BACKWARD, Toy("forth", 0.0), ToyBackward("back", PARTS)) == ["back"]


# ---- parts of a backward pass --------------------------------------------------------------------

SEPARATE = (
    ToyBackward("epilogue", ["epilogue"], 2.0),
    ToyBackward("input", ["input"], 3.0),
    ToyBackward("weight", ["weight"], 4.0),
    ToyBackward("bias", ["bias"], 1.0),
)


def division(*kernels, asked=BACKWARD, forced=None):
    choice = choose(asked, HERE, forced, filled(*kernels))
    return [(candidate.kernel.name, piece.parts) for piece, candidate in choice.chosen], choice.cost


def test_each_part_goes_to_the_cheapest():
    pieces, cost = division(*SEPARATE, ToyBackward("dear", ["weight"], 5.0))
    assert pieces == [(part, (part,)) for part in PARTS]
    assert cost == 10.0


@pytest.mark.parametrize(
    ("joint", "pieces"),
    [
        (6.9, [("epilogue", ("epilogue",)), ("joint", ("input", "weight")), ("bias", ("bias",))]),
        (7.1, [(part, (part,)) for part in PARTS]),
    ],
    ids=["cheaper", "dearer"],
)
def test_a_kernel_of_several_parts_is_taken_where_it_is_cheaper(joint, pieces):
    both = ToyBackward("joint", ["input", "weight"], {("input", "weight"): joint})
    assert division(*SEPARATE, both) == (pieces, pytest.approx(3.0 + min(joint, 7.0)))


@pytest.mark.parametrize("joint", [6.0, 9.5])
@pytest.mark.parametrize("serves", [True, False], ids=["serves", "refuses"])
def test_naming_a_kernel_leaves_others_what_it_computes_beside(joint, serves):
    """A part of that kind is the named kernel's where that is cheaper, and never asked of it."""
    costs = {("weight",): 8.0} | ({("weight", "bias"): joint} if serves else {})
    kernel = ToyBackward("named", ["weight", "bias"], costs, beside=["bias"])
    pieces, _ = division(*SEPARATE, kernel, forced="named")
    joined = serves and joint < 8.0 + 1.0
    assert (("named", ("weight", "bias")) in pieces) == joined
    assert (("bias", ("bias",)) in pieces) == (not joined)


def test_parts_that_are_not_neighbours_are_joined():
    pair = ToyBackward("pair", ["epilogue", "weight"], {("epilogue", "weight"): 1.0})
    pieces, cost = division(*SEPARATE, pair)
    assert pieces == [
        ("pair", ("epilogue", "weight")),
        ("input", ("input",)),
        ("bias", ("bias",)),
    ]
    assert cost == 5.0


def test_one_kernel_may_take_everything_or_a_part_alone():
    whole = ToyBackward("whole", PARTS, {PARTS: 9.0, ("bias",): 0.5})
    assert division(*SEPARATE, whole) == ([("whole", PARTS)], 9.0)
    whole = ToyBackward("whole", PARTS, {PARTS: 9.9, ("bias",): 0.5})
    pieces, cost = division(*SEPARATE, whole)
    assert pieces[-1] == ("whole", ("bias",))
    assert cost == 9.5


def test_pieces_that_only_a_joint_kernel_serves():
    """No kernel takes the weight alone."""
    joint = ToyBackward("joint", ["input", "weight"], {("input", "weight"): 100.0})
    pieces, cost = division(SEPARATE[0], SEPARATE[1], joint, SEPARATE[3])
    assert ("joint", ("input", "weight")) in pieces
    assert cost == 103.0


def test_only_what_is_asked_for_is_divided():
    forward = problem(save=True)
    pieces, _ = division(*SEPARATE, asked=backward_problem(forward, "bias"))
    assert pieces == [("epilogue", ("epilogue",)), ("bias", ("bias",))]
    alone = backward_problem(problem(conv=None, save=True))
    assert division(*SEPARATE, asked=alone)[0] == [("epilogue", ("epilogue",))]


def test_a_part_that_nobody_serves_is_named_with_reasons():
    refusing = ToyBackward("weight", ["weight"], refusal="kernel is too large")
    with pytest.raises(NoKernelError, match="weight: kernel is too large") as raised:
        division(SEPARATE[0], SEPARATE[1], refusing, SEPARATE[3])
    assert str(BACKWARD) in str(raised.value)


def test_forcing_restricts_the_parts_that_a_named_kernel_computes():
    """A name says nothing of what the kernel does not compute."""
    dear = ToyBackward("dear", ["weight"], 50.0, provider="theirs")
    for name in ("dear", "theirs"):
        pieces, _ = division(*SEPARATE, dear, forced=name)
        assert pieces == [
            ("epilogue", ("epilogue",)),
            ("input", ("input",)),
            ("dear", ("weight",)),
            ("bias", ("bias",)),
        ]
    pieces, _ = division(*SEPARATE, dear, Toy("forth", provider="forward"), forced="forward")
    assert pieces == [(part, (part,)) for part in PARTS]


def test_forcing_a_kernel_that_refuses_a_part_raises():
    refusing = ToyBackward("theirs", ["weight"], refusal="kernel is too large")
    with pytest.raises(NoKernelError, match="among theirs") as raised:
        division(*SEPARATE, refusing, forced="theirs")
    assert "theirs: kernel is too large" in str(raised.value)
    assert "bias" not in str(raised.value).partition("\n")[2]


def test_a_joint_kernel_that_is_not_named_takes_no_named_part():
    joint = ToyBackward("joint", ["input", "weight"], {("input", "weight"): 0.1})
    dear = ToyBackward("dear", ["weight"], 50.0)
    pieces, _ = division(*SEPARATE, joint, dear, forced="dear")
    assert ("dear", ("weight",)) in pieces
    assert ("input", ("input",)) in pieces


# ---- plans of several kernels --------------------------------------------------------------------


def tensors(**changes):
    fields = dict.fromkeys(BackwardTensors._fields)
    return BackwardTensors(**{**fields, "grad_output": torch.ones(1), **changes})


def test_plans_are_exact_together_only():
    """Else what one of them returns is looked over."""
    loose = ToyBackward("loose", ["input"]).compile(BACKWARD.part(("input",)), HERE)
    exact = ToyBackward("exact", ["weight"]).compile(BACKWARD.part(("weight",)), HERE)
    exact.is_exact = True
    assert not loose.is_exact
    assert not JoinedPlan([exact, loose]).is_exact
    assert JoinedPlan([exact, exact]).is_exact


def test_a_plan_of_several_kernels_joins_what_they_find(registered):
    given = {name: torch.randn(shape) for name, shape in gradient_shapes(BACKWARD).items()}

    def found(*parts):
        return {name: given[name] for name in BACKWARD.part(parts).gradients}

    first = ToyBackward("first", ["epilogue"], found=found("epilogue"))
    second = ToyBackward("second", ["input"], found=found("input"))
    third = ToyBackward("third", ["weight", "bias"], found=found("weight", "bias"))
    registered(first, second, third)
    plan = plan_for(BACKWARD, HERE)
    assert isinstance(plan, JoinedPlan)
    assert plan.kernel == "first + second + third"
    assert plan.steps == (
        "first of epilogue", "second of input", "third of weight, bias"
    )  # fmt: skip
    assert not plan.is_reference
    joined = plan.run(tensors())
    for name, value in given.items():
        assert getattr(joined, name) is value
    assert joined.residual is None
    # What the first found is what the others begin with.
    (seen,) = first.plans[0].seen
    assert seen.grad_conv_output is None
    assert seen.of_convolution is seen.grad_output
    for kernel in (second, third):
        (seen,) = kernel.plans[0].seen
        assert seen.of_convolution is given["conv_output"]


def test_a_pass_of_one_kernel_has_that_kernels_plan(registered):
    whole = ToyBackward("whole", PARTS)
    registered(whole)
    plan = plan_for(BACKWARD, HERE)
    assert isinstance(plan, CheckedBackwardPlan)
    assert plan.plan is whole.plans[0]


# ---- tuning --------------------------------------------------------------------------------------


def test_what_was_measured_goes_before_what_is_estimated(registered, tuned):
    registered(Toy("estimated", 1.0), Toy("measured", 2.0))
    assert plan_for(PROBLEM, HERE).kernel == "estimated"
    tuned(PROBLEM, HERE, ("measured",))
    assert plan_for(PROBLEM, HERE).kernel == "measured"
    assert choose(PROBLEM, HERE).by == "tuned"
    assert plan_for(dataclasses.replace(PROBLEM, batch=5), HERE).kernel == "estimated"
    assert plan_for(PROBLEM, dataclasses.replace(HERE, index=1)).kernel == "estimated"
    tune(PROBLEM, HERE, None)
    assert plan_for(PROBLEM, HERE).kernel == "estimated"


def test_forcing_goes_before_what_was_measured(registered, tuned, force):
    registered(Toy("named", 3.0), Toy("measured", 2.0))
    tuned(PROBLEM, HERE, ("measured",))
    force("named")
    assert plan_for(PROBLEM, HERE).kernel == "named"


@pytest.mark.parametrize("kernel", ["refusing", "unknown"])
def test_what_was_measured_is_passed_over_where_it_does_not_serve(registered, tuned, kernel):
    registered(Toy("estimated", 1.0), Toy("refusing", 0.0, refusal="not today"))
    tuned(PROBLEM, HERE, (kernel,))
    assert plan_for(PROBLEM, HERE).kernel == "estimated"
    assert choose(PROBLEM, HERE).by == "cost"


def test_parts_are_tuned_each(registered, tuned):
    other = ToyBackward("other", PARTS, {("input", "weight"): 100.0, ("input",): 100.0})
    registered(*SEPARATE, other)
    tuned(BACKWARD, HERE, ("epilogue", "other", "weight", "bias"))
    choice = choose(BACKWARD, HERE)
    assert names(choice.chosen) == ["epilogue", "other", "weight", "bias"]
    assert choice.by == "tuned"
    # Neighbouring parts of one kernel are one piece of it.
    tuned(BACKWARD, HERE, ("epilogue", "other", "other", "bias"))
    choice = choose(BACKWARD, HERE)
    assert [piece.parts for piece, _ in choice.chosen] == [
        ("epilogue",), ("input", "weight"), ("bias",)
    ]  # fmt: skip
    # One that does not serve its piece leaves all to the estimates.
    tuned(BACKWARD, HERE, ("epilogue", "input", "other", "bias"))
    assert choose(BACKWARD, HERE).by == "cost"


@pytest.mark.parametrize("kernels", [(), ("a", "b"), ("a",) * 4, "a", "torch"])
def test_a_name_for_each_part(kernels):
    message = f"kernels: got {kernels!r}, expected a name for each of"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        tune(PROBLEM, HERE, kernels)


# ---- the process's kernels -----------------------------------------------------------------------


def test_the_compiled_kernel_is_chosen_on_the_processor(random):
    explanation = explained(functional.group_norm, random(2, 4, 5, 5), 2)
    assert [(one.kernel, one.provider) for one in explanation] == [("cpu_group_norm", "cpu")]


@pytest.mark.parametrize("name", ["torch", "cpu", "cpu_group_norm", "torch,cpu"])
def test_the_variable_forces(name, force, random):
    force(name)
    x = random(2, 4, 5, 5)
    (explanation,) = explained(functional.group_norm, x, 2)
    expected = {"torch": "torch"}.get(name, "cpu_group_norm")
    assert explanation.kernel == expected
    assert explanation.chosen_by == name
    assert f"forced by {name}" in str(explanation)


def test_the_variable_takes_effect_at_the_next_call(force, random, monkeypatch):
    x = random(2, 4, 5, 5)
    functional.group_norm(x, 2)
    force("groupnorm_cuda")
    with pytest.raises(NoKernelError, match="among groupnorm_cuda serves group_norm 2"):
        functional.group_norm(x, 2)
    monkeypatch.delenv("FUSEDCONV_KERNEL")
    functional.group_norm(x, 2)


def test_forcing_what_cannot_serve_raises_with_the_reason(force, random):
    force("cpu")
    x = random(2, 4, 5, 5, dtype=torch.float64)
    with pytest.raises(NoKernelError, match="cpu_group_norm: dtype is float64"):
        functional.group_norm(x, 2)
    force("no_such_kernel")
    with pytest.raises(NoKernelError, match=r"FUSEDCONV_KERNEL: no kernel .* no_such_kernel"):
        functional.group_norm(x, 2)


def test_plans_are_cached_until_cleared_and_by_device():
    first = plan_for(PROBLEM, PROCESSOR)
    assert plan_for(dataclasses.replace(PROBLEM), dataclasses.replace(PROCESSOR)) is first
    assert plan_for(dataclasses.replace(PROBLEM, batch=3), PROCESSOR) is not first
    assert plan_for(PROBLEM, dataclasses.replace(PROCESSOR, index=1)) is not first
    fusedconv.clear_cache()
    assert plan_for(PROBLEM, PROCESSOR) is not first


def test_a_cached_call_selects_nothing(random, monkeypatch):
    x = random(2, 4, 5, 5).requires_grad_()
    expected = functional.group_norm(x, 2)
    expected.sum().backward()

    def refuse(*_):
        raise AssertionError("the plan was cached")

    monkeypatch.setattr(Registry, "candidates", refuse)
    actual = functional.group_norm(x, 2)
    assert torch.equal(actual, expected)
    actual.sum().backward()
    with pytest.raises(AssertionError, match="was cached"):
        functional.group_norm(x, 4)


def test_plans_of_many_threads(registered):
    registered(Toy("toy"))
    found = []
    workers = [
        threading.Thread(target=lambda: found.append(plan_for(PROBLEM, HERE))) for _ in range(8)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [plan.kernel for plan in found] == ["toy"] * 8


def test_the_cache_of_plans_is_bounded(monkeypatch, registered):
    registered(*SEPARATE, Toy("toy"))
    monkeypatch.setattr(selection._plans, "capacity", 10)
    for batch in range(1, 40):
        forward = problem(batch=batch, save=True)
        plan_for(forward, HERE, ("forward", batch))
        plan_for(backward_problem(forward), HERE, ("backward", batch))
        assert len(selection._plans) <= 10


# ---- the log -------------------------------------------------------------------------------------


def log_lines(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "fusedconv"]


def test_the_reference_is_logged_once_per_problem(random, caplog):
    caplog.set_level(logging.INFO, logger="fusedconv")
    x = random(2, 4, 5, 5, dtype=torch.float64)
    for _ in range(3):
        functional.group_norm(x, 2)
    (line,) = log_lines(caplog)
    assert line.startswith("torch serves group_norm 2 on 2x4x5x5, float64")
    assert "cpu: dtype is float64, not float32/float16/bfloat16" in line
    functional.group_norm(x, 4)
    assert len(log_lines(caplog)) == 2


def test_kernels_of_ours_are_not_logged(random, caplog):
    caplog.set_level(logging.INFO, logger="fusedconv")
    functional.group_norm(random(2, 4, 5, 5), 2)
    assert log_lines(caplog) == []


def test_parts_that_the_reference_serves_are_logged_with_reasons(random, caplog):
    caplog.set_level(logging.INFO, logger="fusedconv")
    x, weight = random(2, 4, 5, 5), random(4, 6, 3, 3).requires_grad_()
    for _ in range(2):
        functional.conv_transpose_act_norm(x, weight, num_groups=2).sum().backward()
    (convolution,) = log_lines(caplog)
    assert convolution.startswith("torch_convolution_backward serves gradients of weight through")
    assert "is estimated to take less time than cpu_direct_backward" in convolution
    assert "cpu: " not in convolution
    caplog.clear()
    functional.conv_transpose_act_norm(x, weight, activation="gelu").sum().backward()
    epilogue = log_lines(caplog)[0]
    assert epilogue.startswith("torch_epilogue_backward serves gradients of conv_output through ")
    assert "is estimated to take less time than cpu_ungrouped_backward" in epilogue


@pytest.mark.parametrize(
    ("others", "by", "why"),
    [
        (
            [
                Toy("dear", 3.0),
                Toy("ours", 2.0),
                Toy("one", 0.5, refusal="is not told"),
                Toy("no", 0.5, "bad", refusal="cannot"),
            ],
            "cost",
            "is estimated to take less time than ours; bad: cannot",
        ),
        ([Toy("ours", 0.5), Toy("no", 0.5, refusal="cannot")], "tuned", "was tuned"),
        ([Toy("ours", 0.5)], "reference", "FUSEDCONV_KERNEL=reference"),
        ([Toy("no", 0.5, "bad", refusal="cannot")], "cost", "bad: cannot"),
        ([], "cost", "no other kernel computes that"),
    ],
    ids=["cheaper", "tuned", "forced", "others refuse", "alone"],
)
def test_why_the_reference_serves_is_said(registered, caplog, monkeypatch, others, by, why):
    caplog.set_level(logging.INFO, logger="fusedconv")
    reference = Toy("reference", 1.0)
    registered(reference, *others)
    if by == "tuned":
        tune(PROBLEM, KNOWN[90], ["reference"])
    elif by != "cost":
        monkeypatch.setenv("FUSEDCONV_KERNEL", by)
    compile_plan = reference.compile

    def compiled(problem, device):
        plan = compile_plan(problem, device)
        plan.is_reference = True
        return plan

    monkeypatch.setattr(reference, "compile", compiled)
    try:
        plan_for(PROBLEM, KNOWN[90])
    finally:
        tune(PROBLEM, KNOWN[90], None)
    (line,) = log_lines(caplog)
    assert line == f"reference serves {PROBLEM} on H200 (sm_90): {why}"


def test_a_tuned_kernel_that_is_passed_over_is_logged(caplog):
    tune(PROBLEM, HERE, ["nowhere"])
    try:
        with caplog.at_level(logging.INFO, logger="fusedconv"):
            assert choose(PROBLEM, HERE).by == "cost"
    finally:
        tune(PROBLEM, HERE, None)
    assert "tuned kernel nowhere is passed over" in caplog.text
    assert "no kernel that computes this has the name" in caplog.text
