"""``fusedconv.explain``: problems, the calls of one thread, backward passes, what is printed."""

from __future__ import annotations

import io
import threading

import pytest
import torch
from problems import backward_problem, explained, problem
from torch import nn

import fusedconv
from fusedconv import BackwardProblem, ConvTransposeActNorm2d, ForwardProblem, GroupNorm, functional
from fusedconv.device import KNOWN, PROCESSOR
from fusedconv.recording import record
from fusedconv.registry import registry
from fusedconv.training import EVERY_PART

PROBLEM = problem(batch=2, conv=None)


# ---- text ----------------------------------------------------------------------------------------


def test_it_prints_and_returns(random, capsys):
    module = ConvTransposeActNorm2d(4, 6, 3, num_groups=2, activation="gelu", order="norm_act")
    explanations = fusedconv.explain(module, random(2, 4, 5, 5))
    assert len(explanations) == 1
    text = capsys.readouterr().out
    assert text == f"{explanations[0]}\n"
    assert "conv_transpose2d 4->6 k3x3" in text
    assert "nchw, processor\n" in text
    assert "kernel: cpu_conv_transpose (provider cpu, estimated " in text
    assert "1. torch.conv_transpose2d" in text
    assert ". fused group_norm + gelu" in text
    ((part, candidates),) = explanations[0].candidates
    assert part == "forward"
    assert {c.kernel.name for c in candidates} == {
        kernel.name for kernel in registry().kernels() if "forward" in kernel.computes
    }
    refused = {}
    for candidate in candidates:
        kernel = candidate.kernel
        if candidate.support:
            assert kernel.name in text
        else:
            refused.setdefault((kernel.provider, candidate.support.reason), []).append(kernel.name)
    assert refused
    for (provider, reason), names in refused.items():
        more = f" and {len(names) - 1} more of {provider}" if len(names) > 1 else ""
        assert f"    {names[0]}{more}: {reason}" in text


def test_what_shells_echo_is_short():
    (explanation,) = fusedconv.explain(PROBLEM, device=PROCESSOR, file=io.StringIO())
    text = repr(explanation)
    assert text == f"<Explanation of {PROBLEM}, processor: {explanation.kernel}>"


def test_text_of_a_backward_pass(force):
    force("torch_epilogue_backward")
    one = backward_problem(problem(save=True), "input", "norm_bias")
    (explanation,) = explained(one, device=PROCESSOR)
    text = str(explanation)
    head, epilogue, convolution, *rest = text.splitlines()
    assert head == f"{one}, processor"
    how = "forced by torch_epilogue_backward"
    assert epilogue.startswith(
        "  kernel of epilogue: torch_epilogue_backward (provider torch, estimated "
    )
    assert epilogue.endswith(f" ms, {how})")
    assert convolution.startswith("  kernel of input: torch_convolution_backward (provider torch,")
    assert rest[:3] == [
        "    1. gradient of torch.group_norm",
        "    2. gradient of torch gelu",
        "    3. torch.ops.aten.convolution_backward for input (vendor library)",
    ]
    assert rest[3] == "  not chosen for epilogue:"
    assert any(line.startswith("    groupnorm_backward_two_pass") for line in rest[4:])
    assert "sm80" not in text
    assert explanation.kernel == "torch_epilogue_backward + torch_convolution_backward"
    assert explanation.provider == "torch"
    assert explanation.cost == pytest.approx(sum(c.cost for _, c in explanation.chosen))
    assert [parts for parts, _ in explanation.chosen] == [("epilogue",), ("input",)]
    assert [part for part, _ in explanation.candidates] == ["epilogue", "input"]


# ---- problems ------------------------------------------------------------------------------------


@pytest.mark.parametrize("one", [PROBLEM, backward_problem()], ids=["forward", "backward"])
def test_a_problem_is_explained_for_any_device(one):
    out = io.StringIO()
    (explanation,) = fusedconv.explain(one, file=out, device=KNOWN[90])
    assert explanation.problem == one
    assert explanation.device is KNOWN[90]
    assert out.getvalue() == f"{explanation}\n"
    assert out.getvalue().startswith(f"{one}, H200 (sm_90)\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch's device is another")
def test_a_problem_is_explained_for_torchs_device():
    (explanation,) = explained(PROBLEM)
    assert explanation.device is PROCESSOR
    assert explanation.kernel == "cpu_group_norm"


def test_a_device_is_a_record_and_a_problems():
    with pytest.raises(TypeError, match=r"^device: got 'cuda', expected a fusedconv\.Device"):
        explained(PROBLEM, device="cuda")
    with pytest.raises(ValueError, match=r"^device: got H200 \(sm_90\), expected None for a call"):
        explained(functional.group_norm, torch.ones(2, 4), 2, device=KNOWN[90])


# ---- calls ---------------------------------------------------------------------------------------


def test_every_call_of_a_function_is_explained(random):
    def two_calls(x):
        return functional.group_norm(functional.group_norm(x, 2), 4)

    x = random(2, 4, 5, 5)
    for _ in range(2):  # cached plans are explained too
        explanations = explained(two_calls, x)
        assert [one.problem.norm.num_groups for one in explanations] == [2, 4]


def test_equal_calls_are_explained_once_in_their_order():
    x, y = torch.randn(2, 4, 5), torch.randn(2, 4, 6)

    def calls():
        for each in (x, y, x):
            functional.group_norm(each, 2)

    assert [one.problem.spatial for one in explained(calls)] == [(5,), (6,)]


def test_without_gradients_the_call_saves_nothing():
    x = torch.randn(2, 4, 5, requires_grad=True)
    (explanation,) = explained(lambda: functional.group_norm(x, 2))
    assert not explanation.problem.save
    assert torch.is_grad_enabled()


def test_calls_of_other_threads_are_their_own():
    def call(channels):
        functional.group_norm(torch.randn(1, channels, 3), 1)

    def calls():
        other = threading.Thread(target=call, args=(5,))
        other.start()
        other.join()
        call(4)

    assert [one.problem.channels for one in explained(calls)] == [4]


def test_nothing_is_recorded_afterwards(random):
    explained(functional.group_norm, random(2, 4, 5, 5), 2)
    for gradients in (False, True):
        with pytest.raises(ZeroDivisionError):
            fusedconv.explain(lambda: 1 // 0, gradients=gradients)
        assert not record.active


def test_explain_inside_an_explained_function_leaves_the_outer_ones_list():
    x = torch.randn(2, 4, 3)

    def target():
        functional.group_norm(x, 1)
        inner = explained(functional.group_norm, x, 2)
        assert [each.problem.norm.num_groups for each in inner] == [2]
        functional.group_norm(x, 4)

    outer = explained(target)
    assert [each.problem.norm.num_groups for each in outer] == [1, 4]


def test_what_cannot_be_called_is_refused():
    with pytest.raises(TypeError, match=r"^target: got 3, expected a problem or a callable"):
        fusedconv.explain(3)
    with pytest.raises(TypeError, match=r"^gradients: got 'yes', expected a bool"):
        fusedconv.explain(PROBLEM, gradients="yes")


# ---- backward passes -----------------------------------------------------------------------------


def forward_and_gradients(explanations):
    """The forward problems and the gradients of the backward ones, in order."""
    return [
        one.problem if isinstance(one.problem, ForwardProblem) else set(one.problem.gradients)
        for one in explanations
    ]


def test_both_passes_of_a_module_are_explained():
    module = ConvTransposeActNorm2d(4, 6, 3, num_groups=2, activation="gelu")
    x = torch.randn(2, 4, 5, 5)
    for _ in range(2):  # from the cache too
        forward, backward = explained(module, x, gradients=True)
        assert forward.problem.save
        assert isinstance(backward.problem, BackwardProblem)
        assert backward.problem.forward == forward.problem
        # The input asks for no gradient.
        assert backward.problem.gradients == {
            "conv_output", "weight", "bias", "norm_weight", "norm_bias"
        }  # fmt: skip
        assert all(parameter.grad is None for parameter in module.parameters())
    x.requires_grad_()
    *_, backward = explained(module, x, gradients=True)
    assert "input" in backward.problem.gradients
    assert x.grad is None
    assert torch.is_grad_enabled()


def test_gradients_already_there_are_left_alone():
    norm = GroupNorm(2, 4)
    norm(torch.randn(2, 4, 5)).sum().backward()
    before = [parameter.grad.clone() for parameter in norm.parameters()]
    explained(norm, torch.randn(2, 4, 5), gradients=True)
    for parameter, grad in zip(norm.parameters(), before, strict=True):
        assert torch.equal(parameter.grad, grad)


def test_leaves_of_a_closure_are_found():
    x, weight = torch.randn(2, 4, 5), torch.randn(4, requires_grad=True)
    forward, backward = explained(lambda: functional.group_norm(x, 2, weight), gradients=True)
    assert forward.problem.save
    assert backward.problem.gradients == {"norm_weight"}
    assert weight.grad is None


def test_backward_passes_are_explained_in_their_order():
    first, second = GroupNorm(2, 4), GroupNorm(4, 4)

    def call(x):
        return {"deep": [nn.Sequential(first, nn.ReLU(), second)(x), 3], "text": "none"}

    explanations = explained(call, torch.randn(2, 4, 5), gradients=True)
    numbers = [
        (one.problem if isinstance(one.problem, ForwardProblem) else one.problem.forward)
        .norm.num_groups
        for one in explanations
    ]  # fmt: skip
    assert numbers == [2, 4, 4, 2]
    assert [isinstance(one.problem, BackwardProblem) for one in explanations] == [
        False, False, True, True
    ]  # fmt: skip


def test_a_call_without_results_or_gradients_has_no_backward_pass():
    x = torch.randn(2, 4, 5)
    assert len(explained(lambda: functional.group_norm(x, 2), gradients=True)) == 1

    def returns_nothing():
        functional.group_norm(x.clone().requires_grad_(), 2)

    assert len(explained(returns_nothing, gradients=True)) == 1


def test_a_backward_pass_in_another_thread_is_the_forward_passes():
    """As autograd runs those of a GPU."""
    x = torch.randn(2, 4, 5, requires_grad=True)

    def target():
        output = functional.group_norm(x, 2).sum()
        worker = threading.Thread(target=lambda: torch.autograd.grad(output, x))
        worker.start()
        worker.join()

    forward, backward = explained(target, gradients=True)
    assert isinstance(forward.problem, ForwardProblem)
    assert backward.problem.gradients == {"input"}


def test_of_what_autograd_follows_by_itself_it_says_so():
    """Where torch's operators are both passes of a call."""
    module = GroupNorm(2, 4, dtype=torch.float64)
    x = torch.randn(2, 4, 5, dtype=torch.float64)
    for explanation in explained(module, x, gradients=True):
        assert (explanation.provider, explanation.chosen_by) == ("torch", "cost")
        assert f"autograd follows torch's operators: {EVERY_PART}" in str(explanation)
