"""The registry: who is chosen and why, forcing, errors with reasons; and the order of imports."""

from __future__ import annotations

import dataclasses
import io
import logging
import threading

import pytest
import torch
from problems import explained, problem

import fusedconv
from fusedconv import (
    Kernel,
    NoKernelError,
    Outputs,
    Plan,
    PluginError,
    Registry,
    Support,
    functional,
)
from fusedconv import plan as plans
from fusedconv import registry as registries

PROBLEM = problem(batch=2, conv=None)


class ToyPlan(Plan):
    kernel = "toy"
    steps = ("nothing",)

    def run(self, input, weight, bias, norm_weight, norm_bias):
        return Outputs(input, None, None, None)


class Toy(Kernel):
    """Serves everything, or nothing and says why."""

    def __init__(self, name, cost=1.0, provider="toys", refusal=None):
        self.name = name
        self.provider = provider
        self.estimate = cost
        self.refusal = refusal

    def supports(self, problem):
        return Support.no(self.refusal) if self.refusal else Support.yes()

    def cost(self, problem):
        assert not self.refusal, "cost is asked of kernels that serve the problem only"
        return self.estimate

    def compile(self, problem):
        return ToyPlan()


def filled(*kernels: Kernel) -> Registry:
    registry = Registry()
    for kernel in kernels:
        registry.register(kernel)
    return registry


# ---- selection -----------------------------------------------------------------------------------


def test_lowest_cost_of_those_that_serve():
    registry = filled(Toy("slow", 3.0), Toy("cheap", 0.5, refusal="dtype is odd"), Toy("good", 1.0))
    chosen = registry.select(PROBLEM)
    assert chosen.kernel.name == "good"
    assert chosen.cost == 1.0
    assert chosen.support


def test_a_cost_of_zero_is_the_lowest():
    assert filled(Toy("one", 1.0), Toy("free", 0.0)).select(PROBLEM).kernel.name == "free"


def test_equal_costs_go_to_the_one_registered_first():
    assert filled(Toy("a"), Toy("b")).select(PROBLEM).kernel.name == "a"
    assert filled(Toy("b"), Toy("a")).select(PROBLEM).kernel.name == "b"


def test_candidates_hold_every_kernel_with_cost_or_reason():
    registry = filled(Toy("no", refusal="too wide"), Toy("slow", 3.0), Toy("good", 1.0))
    candidates = registry.candidates(PROBLEM)
    assert [c.kernel.name for c in candidates] == ["good", "slow", "no"]
    assert [c.cost for c in candidates] == [1.0, 3.0, None]
    assert [bool(c.support) for c in candidates] == [True, True, False]
    assert candidates[-1].support.reason == "too wide"
    assert [kernel.name for kernel in registry.kernels()] == ["no", "slow", "good"]


def test_support_is_truthy_and_frozen():
    assert Support.yes()
    assert not Support.no("reason")
    assert Support.no("reason").reason == "reason"
    with pytest.raises(dataclasses.FrozenInstanceError):
        Support.yes().ok = False


def test_forcing_a_kernel_or_a_provider():
    registry = filled(Toy("a1", 2.0, "a"), Toy("a2", 3.0, "a"), Toy("b1", 1.0, "b"))
    assert registry.select(PROBLEM, "a2").kernel.name == "a2"
    assert registry.select(PROBLEM, "a").kernel.name == "a1"
    assert registry.select(PROBLEM, " a2 , b1 ").kernel.name == "b1"
    assert registry.select(PROBLEM, "a2,").kernel.name == "a2"
    assert registry.select(PROBLEM, "").kernel.name == "b1"


def test_forcing_an_unknown_name_lists_the_known_providers():
    registry = filled(Toy("a1", provider="a"), Toy("b1", provider="b"))
    with pytest.raises(NoKernelError, match=r"FUSEDCONV_KERNEL: .* nowhere, none; .*: a, b$"):
        registry.select(PROBLEM, "a1,nowhere,none")


def test_no_kernel_lists_each_reason():
    registry = filled(Toy("first", refusal="channels are odd"), Toy("second", refusal="too wide"))
    with pytest.raises(NoKernelError) as raised:
        registry.select(PROBLEM)
    text = str(raised.value)
    assert str(PROBLEM) in text
    assert "first: channels are odd" in text
    assert "second: too wide" in text


def test_no_forced_kernel_lists_the_forced_ones_only():
    registry = filled(Toy("first", refusal="channels are odd"), Toy("second"))
    with pytest.raises(NoKernelError) as raised:
        registry.select(PROBLEM, "first")
    assert "among first" in str(raised.value)
    assert "first: channels are odd" in str(raised.value)
    assert "second" not in str(raised.value)


def test_an_empty_registry_serves_nothing():
    with pytest.raises(NoKernelError, match="no kernel serves"):
        Registry().select(PROBLEM)


# ---- registration --------------------------------------------------------------------------------


def test_names_are_unique():
    registry = filled(Toy("one"))
    with pytest.raises(ValueError, match="name: 'one' is registered already"):
        registry.register(Toy("one", provider="others"))
    assert len(registry.kernels()) == 1


@pytest.mark.parametrize("value", ["kernel", None, Toy], ids=["str", "none", "class"])
def test_only_kernels_register(value):
    with pytest.raises(TypeError, match=r"kernel: got .*, expected an instance of"):
        Registry().register(value)


@pytest.mark.parametrize("field", ["name", "provider"])
@pytest.mark.parametrize("value", ["", None, 3, "a,b"])
def test_names_are_checked(field, value):
    kernel = Toy("good")
    setattr(kernel, field, value)
    with pytest.raises(ValueError, match=rf"{field}: got {value!r} on Toy, expected"):
        Registry().register(kernel)


def test_a_kernel_without_a_name_is_refused():
    class Nameless(Toy):
        def __init__(self):
            pass

    with pytest.raises(ValueError, match="name: got None on Nameless"):
        Registry().register(Nameless())


def test_a_kernel_must_implement_the_three_methods():
    for missing in ("supports", "cost", "compile"):
        methods = {
            name: getattr(Toy, name) for name in ("supports", "cost", "compile") if name != missing
        }
        with pytest.raises(TypeError, match=missing):
            type("Partial", (Kernel,), methods)()


# ---- the process's registry ----------------------------------------------------------------------


def test_built_in_providers_are_there():
    providers = {kernel.provider for kernel in registries.registry().kernels()}
    assert {"torch", "cpu", "cutlass_sm80", "groupnorm_cuda"} <= providers


def test_every_built_in_answers_every_problem_with_a_reason():
    """supports() touches no device: problems of devices that are not here are judged too."""
    for device, architecture in (("cpu", 0), ("cuda", 75), ("cuda", 90)):
        problem = dataclasses.replace(PROBLEM, device=device, architecture=architecture)
        for kernel in registries.registry().kernels():
            support = kernel.supports(problem)
            assert support or len(support.reason) > 10, kernel.name
            if support:
                assert kernel.cost(problem) >= 0, kernel.name


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
    assert explanation.forced == name
    assert f"forced by {name}" in str(explanation)


def test_the_variable_takes_effect_at_the_next_call(force, random, monkeypatch):
    x = random(2, 4, 5, 5)
    functional.group_norm(x, 2)
    force("cutlass_sm80")
    with pytest.raises(NoKernelError, match="among cutlass_sm80 serves group_norm 2"):
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


def test_plans_are_cached_until_cleared(random):
    x = random(2, 4, 5, 5)
    functional.group_norm(x, 2)
    first = plans.plan_for(PROBLEM)
    assert plans.plan_for(dataclasses.replace(PROBLEM)) is first
    assert plans.plan_for(dataclasses.replace(PROBLEM, batch=3)) is not first
    fusedconv.clear_cache()
    assert plans.plan_for(PROBLEM) is not first


def test_a_cached_call_selects_nothing(random, monkeypatch):
    x = random(2, 4, 5, 5)
    expected = functional.group_norm(x, 2)

    def refuse(*_):
        raise AssertionError("the plan was cached")

    monkeypatch.setattr(Registry, "candidates", refuse)
    assert torch.equal(functional.group_norm(x, 2), expected)


def test_the_registry_is_made_once_by_many_threads(monkeypatch):
    monkeypatch.setattr(registries, "_registry", None)
    found = []
    workers = [
        threading.Thread(target=lambda: found.append(registries.registry())) for _ in range(8)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == 8
    assert len({id(one) for one in found}) == 1


class FakeEntryPoint:
    name = "theirs"
    value = "theirs.module:register"

    def __init__(self, register):
        self.register = register

    def load(self):
        if isinstance(self.register, Exception):
            raise self.register
        return self.register


@pytest.fixture
def plugin(monkeypatch):
    """plugin(register): the process has this entry point alone, and an empty registry."""

    def install(register):
        def entry_points(*, group):
            assert group == "fusedconv.kernels"
            return [FakeEntryPoint(register)]

        monkeypatch.setattr(registries, "entry_points", entry_points)
        monkeypatch.setattr(registries, "_registry", None)

    return install


def test_plugins_register_as_built_ins_do(plugin, random):
    plugin(lambda registry: registry.register(Toy("theirs", 0.0)))
    x = random(2, 4, 5, 5)
    (explanation,) = explained(functional.group_norm, x, 2)
    assert explanation.kernel == "theirs"
    assert functional.group_norm(x, 2) is x


@pytest.mark.parametrize(
    ("register", "text"),
    [
        (ImportError("no module"), "ImportError: no module"),
        (lambda registry: registry.register(object()), "TypeError: kernel: got"),
        (lambda registry: registry.register(Toy("torch")), "ValueError: name: 'torch' is"),
        (lambda: None, "TypeError"),
        (None, "TypeError"),
    ],
    ids=["import", "no kernel", "name taken", "wrong signature", "not callable"],
)
def test_a_broken_plugin_is_named_at_each_use(plugin, register, text):
    plugin(register)
    for _ in range(2):
        with pytest.raises(PluginError, match=r"entry point 'theirs' \(theirs\.module:") as raised:
            registries.registry()
        assert text in str(raised.value)
        assert raised.value.__cause__ is not None


# ---- what explain and the log say ----------------------------------------------------------------


def test_explain_prints_and_returns(random, capsys):
    module = fusedconv.ConvTransposeActNorm2d(
        4, 6, 3, num_groups=2, activation="gelu", order="norm_act"
    )
    explanations = fusedconv.explain(module, random(2, 4, 5, 5))
    assert len(explanations) == 1
    text = capsys.readouterr().out
    assert text == f"{explanations[0]}\n"
    assert "conv_transpose2d 4->6 k3x3" in text
    assert "kernel: cpu_group_norm (provider cpu, estimated " in text
    assert "1. torch.conv_transpose2d" in text
    assert "2. fused group_norm + gelu" in text
    for kernel in registries.registry().kernels():
        assert kernel.name in text
    for candidate in explanations[0].candidates:
        if not candidate.support:
            assert f"{candidate.kernel.name}: {candidate.support.reason}" in text


def test_explain_takes_a_problem_and_every_call_of_a_function(random):
    out = io.StringIO()
    (explanation,) = fusedconv.explain(PROBLEM, file=out)
    assert explanation.problem == PROBLEM
    assert out.getvalue() == f"{explanation}\n"

    def two_calls(x):
        return functional.group_norm(functional.group_norm(x, 2), 4)

    x = random(2, 4, 5, 5)
    for _ in range(2):  # cached plans are explained too
        explanations = explained(two_calls, x)
        assert [one.problem.norm.num_groups for one in explanations] == [2, 4]


def test_explain_records_nothing_afterwards(random):
    x = random(2, 4, 5, 5)
    explained(functional.group_norm, x, 2)
    with pytest.raises(ZeroDivisionError):
        fusedconv.explain(lambda: 1 // 0)
    from fusedconv.recording import record

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


def test_explain_refuses_what_cannot_be_called():
    with pytest.raises(TypeError, match=r"^target: got 3, expected a Problem or a callable"):
        fusedconv.explain(3)


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
