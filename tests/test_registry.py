"""The registry: what registers and what is refused, candidates, built-ins and plugins."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch
from problems import backward_problem, explained, problem
from toys import HERE, Toy, ToyBackward, filled

from fusedconv import (
    BackwardKernel,
    ForwardKernel,
    PluginError,
    Registry,
    Support,
    functional,
)
from fusedconv import registry as registries

PROBLEM = problem(batch=2, conv=None)
BACKWARD = backward_problem()

# ---- candidates ----------------------------------------------------------------------------------


def test_candidates_hold_every_kernel_with_cost_or_reason():
    registry = filled(Toy("no", refusal="too wide"), Toy("slow", 3.0), Toy("good", 1.0))
    candidates = registry.candidates(PROBLEM, HERE)
    assert [c.kernel.name for c in candidates] == ["good", "slow", "no"]
    assert [c.cost for c in candidates] == [1.0, 3.0, None]
    assert [bool(c.support) for c in candidates] == [True, True, False]
    assert candidates[-1].support.reason == "too wide"
    assert [kernel.name for kernel in registry.kernels()] == ["no", "slow", "good"]


def test_candidates_of_parts_are_those_that_compute_all_of_them():
    registry = filled(
        Toy("forward"),
        ToyBackward("epilogue", ["epilogue"]),
        ToyBackward("both", ["input", "weight"]),
        ToyBackward("all", ["epilogue", "input", "weight", "bias"]),
    )

    def computing(*parts):
        return [kernel.name for kernel in registry.computing(parts)]

    assert computing("forward") == ["forward"]
    assert computing("epilogue") == ["epilogue", "all"]
    assert computing("input", "weight") == ["both", "all"]
    assert computing("input", "bias") == ["all"]
    candidates = registry.candidates(BACKWARD.part(("input",)), HERE)
    assert [c.kernel.name for c in candidates] == ["both", "all"]


def test_support_is_truthy_and_frozen():
    assert Support.yes()
    assert not Support.no("reason")
    assert Support.no("reason").reason == "reason"
    with pytest.raises(dataclasses.FrozenInstanceError):
        Support.yes().ok = False


# ---- registration --------------------------------------------------------------------------------


def test_names_are_unique():
    registry = filled(Toy("one"))
    with pytest.raises(ValueError, match="name: 'one' is registered already"):
        registry.register(Toy("one", provider="others"))
    with pytest.raises(ValueError, match="name: 'one' is registered already"):
        registry.register(ToyBackward("one", ["weight"]))
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


@pytest.mark.parametrize("kind", [ForwardKernel, BackwardKernel])
def test_a_kernel_must_implement_the_three_methods(kind):
    for missing in ("supports", "cost", "compile"):
        methods = {
            name: getattr(Toy, name) for name in ("supports", "cost", "compile") if name != missing
        }
        with pytest.raises(TypeError, match=missing):
            type("Partial", (kind,), methods)()


@pytest.mark.parametrize("value", [None, frozenset(), {"weight"}, frozenset({"forward"}), "bias"])
def test_what_a_kernel_computes_is_checked(value):
    kernel = ToyBackward("good", ["weight"])
    kernel.computes = value
    with pytest.raises(ValueError, match=r"computes: got .* on ToyBackward, expected a frozenset"):
        Registry().register(kernel)


def test_a_forward_kernel_computes_the_forward_pass():
    kernel = Toy("good")
    kernel.computes = frozenset({"weight"})
    with pytest.raises(ValueError, match=r"computes: .* expected a frozenset of some of forward"):
        Registry().register(kernel)


# ---- the process's registry ----------------------------------------------------------------------


def test_built_in_providers_are_there():
    providers = {kernel.provider for kernel in registries.registry().kernels()}
    assert {"torch", "cpu", "cutlass_sm80", "cutlass_sm90", "groupnorm_cuda"} <= providers


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
    assert torch.equal(functional.group_norm(x, 2), x)


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
