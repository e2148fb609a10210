"""Children that are replaced or hooked: called as eager calls them, and explained and logged."""

from __future__ import annotations

import copy
import logging
import pickle

import pytest
import torch
from problems import explained
from processes import python
from reference import ACTIVATIONS, cotangent
from systems import SMALL, pair, perturbed
from torch import nn
from torch.nn.utils import parametrize, prune

import fusedconv
from fusedconv import ConvTransposeActNorm2d, composing
from fusedconv.models import SYSTEMS
from fusedconv.recording import Composition

#: The children of each system, in the order of the calls.
CHILDREN = {
    "system1": ("conv_transpose", "group_norm"),
    "system2": ("conv_transpose", "relu", "group_norm"),
    "system3": ("gn",),
}
EVERY_CHILD = [(name, child) for name, children in CHILDREN.items() for child in children]


@pytest.fixture(autouse=True)
def _forgotten_reasons():
    composing._log.cache_clear()
    yield
    composing._log.cache_clear()


def composition_of(module, *args, **kwargs) -> Composition:
    (first, *_) = explained(module, *args, **kwargs)
    assert isinstance(first, Composition), first
    return first


def assert_composes(model, original, x, reason):
    """The drop-in's result and gradients are the original's, bit for bit, and it says why."""
    results = []
    for module in (model, original):
        inputs = x.clone().requires_grad_()
        output = module(inputs)
        output.backward(cotangent(output))
        results.append([output, inputs.grad, *(p.grad for p in module.parameters())])
    for ours, torchs in zip(*results, strict=True):
        assert (ours is None) == (torchs is None)
        assert ours is None or torch.equal(ours, torchs)
    assert reason in composition_of(model, x).reason


def doubling(module, args, output):
    return 2 * output


def shifting(module, args):
    return (args[0] + 1,)


def halving(module, grad_input, grad_output):
    return tuple(None if g is None else g / 2 for g in grad_input)


def tripling(module, grad_output):
    return tuple(3 * g for g in grad_output)


HOOKS = {
    "forward hooks": lambda m: m.register_forward_hook(doubling),
    "forward hooks always called": lambda m: m.register_forward_hook(doubling, always_call=True),
    "forward pre-hooks": lambda m: m.register_forward_pre_hook(shifting),
    "backward hooks": lambda m: m.register_full_backward_hook(halving),
    "backward pre-hooks": lambda m: m.register_full_backward_pre_hook(tripling),
}


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize(("name", "child"), EVERY_CHILD)
def test_hooks_on_children_run(name, child, kind):
    model, original, x = pair(name)
    plain = model(x)
    handles = [HOOKS[kind](module.get_submodule(child)) for module in (model, original)]
    expected = kind.removesuffix(" always called")
    assert_composes(model, original, x, f"{child} has {expected}")
    for handle in handles:
        handle.remove()
    assert torch.equal(model(x), plain)
    assert not any(isinstance(e, Composition) for e in explained(model, x))


@pytest.mark.parametrize(
    "register",
    [
        nn.modules.module.register_module_forward_hook,
        nn.modules.module.register_module_forward_pre_hook,
        nn.modules.module.register_module_full_backward_hook,
        nn.modules.module.register_module_full_backward_pre_hook,
    ],
)
@pytest.mark.parametrize("name", SYSTEMS)
def test_hooks_on_all_modules_see_the_children(name, register):
    model, original, x = pair(name)
    seen = {model: [], original: []}
    for module, calls in seen.items():

        def hook(each, *_, calls=calls):
            calls.append(type(each).__name__)

        handle = register(hook)
        try:
            module(x.clone().requires_grad_()).sum().backward()
            reason = explained(module, x)
        finally:
            handle.remove()
        calls[:] = [call for call in calls if call not in ("Model", "ModelNew")]
        if module is model:
            assert reason[0].reason == "hooks on all modules are registered"
    assert seen[model] == seen[original]
    assert len(seen[model]) >= len(CHILDREN[name])
    assert not isinstance(explained(model, x)[0], Composition)


def replacement(name: str, child: str) -> nn.Module:
    arguments = SMALL[name][0]
    if child == "conv_transpose":
        conv = {"system1": nn.Conv2d, "system2": nn.Conv3d}[name]
        return perturbed(conv(*arguments[:3], padding=2))
    if child == "relu":
        return nn.LeakyReLU(0.3)
    return nn.Identity()


@pytest.mark.parametrize(("name", "child"), EVERY_CHILD)
def test_replaced_children_are_called(name, child):
    model, original, x = pair(name)
    plain = model(x)
    new = replacement(name, child)
    setattr(model, child, new)
    setattr(original, child, copy.deepcopy(new))
    assert_composes(model, original, x, f"{child} is torch.nn.modules.")
    assert not torch.allclose(model(x), plain)


class Scaled(nn.GroupNorm):
    def forward(self, input):
        return 3 * super().forward(input)


class Adapted(nn.Module):
    """A low-rank adapter around a layer, as fine-tuning libraries wrap them."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x, output_size=None):
        return self.layer(x, output_size) * self.scale


@pytest.mark.parametrize("name", ["system1", "system2"])
def test_wrapped_and_derived_children_are_called(name):
    model, original, x = pair(name)
    for module in (model, original):
        module.conv_transpose = Adapted(module.conv_transpose)
    assert_composes(model, original, x, "conv_transpose is test_composing.Adapted, not torch.nn.")
    model, original, x = pair(name)
    for module in (model, original):
        module.group_norm.__class__ = Scaled
    assert_composes(model, original, x, "group_norm is test_composing.Scaled, not torch.nn.")


@pytest.mark.parametrize(("name", "child"), EVERY_CHILD)
def test_forwards_of_an_instance_and_of_a_class_are_called(name, child, monkeypatch):
    model, original, x = pair(name)
    for module in (model, original):
        layer = module.get_submodule(child)
        layer.forward = lambda input, old=layer.forward: old(input) - 1
    assert_composes(model, original, x, f"{child} has a forward of its own")

    model, original, x = pair(name)
    cls = type(model.get_submodule(child))
    old = cls.forward
    monkeypatch.setattr(cls, "forward", lambda self, *args: old(self, *args) - 1)
    assert_composes(model, original, x, f"torch.nn.{cls.__name__}.forward has been replaced")
    monkeypatch.undo()

    monkeypatch.setattr(cls, "__call__", lambda self, *args: self.forward(*args) + 1)
    assert_composes(model, original, x, f"torch.nn.{cls.__name__}.__call__ has been replaced")


@pytest.mark.parametrize("name", ["system1", "system2"])
def test_pruned_and_weight_normalised_convolutions_are_recomputed(name):
    model, original, x = pair(name)
    for module in (model, original):
        prune.l1_unstructured(module.conv_transpose, "weight", amount=0.5)
        with torch.no_grad():  # what the pre-hook multiplies by its mask
            module.conv_transpose.weight_orig.mul_(2)
    assert_composes(model, original, x, "conv_transpose has forward pre-hooks")

    model, original, x = pair(name)
    for module in (model, original):
        with pytest.warns(FutureWarning, match="weight_norm"):
            nn.utils.weight_norm(module.conv_transpose)
        with torch.no_grad():
            module.conv_transpose.weight_g.mul_(2)
    assert_composes(model, original, x, "conv_transpose has forward pre-hooks")


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


@pytest.mark.parametrize("name", SYSTEMS)
def test_parametrised_children_stay_fused(name):
    model, original, x = pair(name)
    for module in (model, original):
        parametrize.register_parametrization(
            module.get_submodule(CHILDREN[name][0]), "weight", Doubled()
        )
    torch.testing.assert_close(model(x), original(x), rtol=1e-4, atol=1e-5)
    assert not isinstance(explained(model, x)[0], Composition)
    model.get_submodule(CHILDREN[name][0]).register_forward_hook(doubling)
    original.get_submodule(CHILDREN[name][0]).register_forward_hook(doubling)
    assert_composes(model, original, x, "has forward hooks")


def test_parametrised_children_of_other_classes_are_called():
    """torch.nn.utils.parametrize makes a class of any module, under the module's own class."""
    model, original, x = pair("system1")
    for module in (model, original):
        module.group_norm.__class__ = Scaled
        parametrize.register_parametrization(module.group_norm, "weight", Doubled())
    assert_composes(model, original, x, "ParametrizedScaled, not torch.nn.GroupNorm")


REPLACED_BEFORE = """
from torch import nn
forward = nn.GroupNorm.forward
nn.GroupNorm.forward = lambda self, x: 3 * forward(self, x)
import torch, fusedconv
model = fusedconv.ModelNew(4, 6, 3, 1, 1, 2)
x = torch.randn(1, 4, 5, 5)
expected = model.group_norm(torch.nn.functional.gelu(model.conv_transpose(x)))
torch.testing.assert_close(model(x), expected)
print(fusedconv.explain(model, x)[0].reason)
"""


def test_a_forward_replaced_before_the_import_is_called():
    done = python("-c", REPLACED_BEFORE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "torch.nn.GroupNorm.forward has been replaced"


# ---- the general modules -------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["act_norm", "norm_act"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_general_module_composes_in_its_order(activation, order):
    module = perturbed(
        ConvTransposeActNorm2d(
            4, 6, 3, stride=2, num_groups=2, activation=activation, order=order
        )
    )  # fmt: skip
    x = torch.randn(2, 4, 5, 6)
    for output_size in (None, [12, 14]):
        expected = module(x, output_size=output_size)
        seen = []
        handles = [
            child.register_forward_hook(
                lambda m, args, out, seen=seen: seen.append(type(m).__name__)
            )
            for child in (module.conv_transpose, module.group_norm)
        ]
        result = module(x, output_size=output_size)
        composition = composition_of(module, x, output_size=output_size)
        for handle in handles:
            handle.remove()
        assert seen[:2] == ["ConvTranspose2d", "GroupNorm"]
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    steps = ["conv_transpose (ConvTranspose2d)", "group_norm (GroupNorm)"]
    if activation:
        steps.insert(2 if order == "norm_act" else 1, activation)
    assert list(composition.steps) == steps


def test_a_norm_of_ours_inside_is_called_and_explained():
    module = perturbed(ConvTransposeActNorm2d(4, 6, 3, num_groups=2, activation="relu"))
    x = torch.randn(2, 4, 5, 6)
    expected = module(x)
    norm = fusedconv.GroupNorm(2, 6)
    norm.load_state_dict(module.group_norm.state_dict())
    module.group_norm = norm
    torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-5)
    composition, explanation = explained(module, x)
    assert "group_norm is fusedconv.modules.GroupNorm" in composition.reason
    assert explanation.problem.norm is not None and explanation.problem.conv is None


def test_a_norm_taken_away_is_left_out():
    module = perturbed(ConvTransposeActNorm2d(4, 6, 3, num_groups=2, activation="relu"))
    module.group_norm = None
    x = torch.randn(2, 4, 5, 6)
    torch.testing.assert_close(module(x), module.conv_transpose(x).relu())
    module.conv_transpose.register_forward_hook(doubling)
    assert torch.equal(module(x), module.conv_transpose(x).relu())


# ---- what it says --------------------------------------------------------------------------------


def test_the_block_that_explain_prints(capsys):
    model, _, x = pair("system2")
    model.relu = nn.LeakyReLU()
    (composition,) = fusedconv.explain(model, x)
    assert capsys.readouterr().out == (
        "ModelNew composes its children: relu is torch.nn.modules.activation.LeakyReLU, not "
        "torch.nn.ReLU\n"
        "    1. conv_transpose (ConvTranspose3d)\n"
        "    2. relu (LeakyReLU)\n"
        "    3. group_norm (GroupNorm)\n"
    )
    assert composition.module == "ModelNew"


def test_each_reason_is_logged_once(caplog):
    caplog.set_level(logging.INFO, logger="fusedconv")
    model, _, x = pair("system1")
    handle = model.group_norm.register_forward_hook(doubling)
    for _ in range(3):
        model(x)
    handle.remove()
    model(x)
    model.conv_transpose.register_forward_hook(doubling)
    model(x)
    lines = [r.getMessage() for r in caplog.records if "composes" in r.getMessage()]
    assert lines == [
        "ModelNew composes its children: group_norm has forward hooks",
        "ModelNew composes its children: conv_transpose has forward hooks",
    ]


# ---- what must stay fused ------------------------------------------------------------------------


def replica_of(module: nn.Module) -> nn.Module:
    """What torch.nn.parallel.replicate makes on another device: plain tensors for parameters."""
    replica = module._replicate_for_data_parallel()
    for key, child in module._modules.items():
        setattr(replica, key, replica_of(child))
    for key, parameter in module._parameters.items():
        if parameter is None:
            replica._parameters[key] = None
        else:
            setattr(replica, key, parameter.clone())
    return replica


@pytest.mark.parametrize("name", SYSTEMS)
def test_copies_replicas_and_swapped_parameters_stay_fused(name):
    model, original, x = pair(name)
    expected = model(x)
    swapped = {key: 2 * value for key, value in model.state_dict().items()}
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), replica_of(model)):
        assert torch.equal(other(x), expected)
        assert not isinstance(explained(other, x)[0], Composition)
    torch.testing.assert_close(
        torch.func.functional_call(model, swapped, (x,)),
        torch.func.functional_call(original, swapped, (x,)),
        rtol=1e-4,
        atol=1e-5,
    )
    replica_of(model)(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    half = copy.deepcopy(model).half()
    assert half(x.half()).dtype == torch.float16
    assert not isinstance(explained(half, x.half())[0], Composition)


def test_hooks_on_the_drop_in_itself_run_and_leave_it_fused():
    model, _, x = pair("system1")
    expected = model(x)
    model.register_forward_pre_hook(lambda module, args: (args[0],))
    model.register_forward_hook(doubling)
    assert torch.equal(model(x), 2 * expected)
    assert not isinstance(explained(model, x)[0], Composition)


@pytest.mark.parametrize("name", SYSTEMS)
def test_compiles_whole_fused_and_composed(name):
    model, original, x = pair(name)
    child = CHILDREN[name][-1]
    for hooked in (False, True):
        if hooked:
            model.get_submodule(child).register_forward_hook(doubling)
            original.get_submodule(child).register_forward_hook(doubling)
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        for module, leaf in zip((compiled, original), inputs, strict=True):
            output = module(leaf)
            output.square().sum().backward()
        torch.testing.assert_close(compiled(x), original(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-3, atol=1e-3)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", SYSTEMS)
def test_exports_fused_or_composed(name):
    model, _, x = pair(name)
    for hooked in (False, True):
        if hooked:
            model.get_submodule(CHILDREN[name][-1]).register_forward_hook(doubling)
        program = torch.export.export(model, (x,))
        targets = {str(node.target) for node in program.graph.nodes}
        assert any(target.startswith("fusedconv.") for target in targets) != hooked
        torch.testing.assert_close(program.module()(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SYSTEMS)
def test_symbolic_traces_call_the_functions(name):
    """torch.fx replaces Module.__call__ while it traces, which makes no child another one."""
    model, _, x = pair(name)
    traced = torch.fx.symbolic_trace(model)
    kinds = {node.op for node in traced.graph.nodes}
    assert "call_function" in kinds and "call_module" not in kinds
    assert torch.equal(traced(x), model(x))


# ---- hooks within a model ------------------------------------------------------------------------


def tree():
    """Modules in lists, one of them in two places, and one that holds the whole."""
    shared = nn.ReLU()
    model = nn.Sequential(nn.Sequential(nn.Conv2d(1, 1, 1), shared), nn.ModuleList([shared]), None)
    model[1].append(nn.Sequential(nn.GroupNorm(1, 1)))
    model[1][1].whole = model
    return model


# They change nothing, so that only their being there is seen.
QUIET_HOOKS = {
    "forward": lambda module: module.register_forward_hook(lambda *_: None),
    "forward_pre": lambda module: module.register_forward_pre_hook(lambda *_: None),
    "backward": lambda module: module.register_full_backward_hook(lambda *_: None),
    "backward_pre": lambda module: module.register_full_backward_pre_hook(lambda *_: None),
}


@pytest.mark.parametrize("place", ["0.0", "1.0", "1.1.0"])
@pytest.mark.parametrize("kind", QUIET_HOOKS)
def test_hooks_within_a_model_are_found_and_no_others(kind, place):
    model = nn.Sequential(tree())
    assert not composing.any_hooked_within(model)
    handle = QUIET_HOOKS[kind](model[0].get_submodule(place))
    assert composing.any_hooked_within(model)
    handle.remove()
    assert not composing.any_hooked_within(model)
    handle = QUIET_HOOKS[kind](model)  # its own is nobody's within
    assert not composing.any_hooked_within(model)
    handle.remove()


def scripted_by_method():
    """As scripts were written before torch.jit.script."""

    class Scripted(torch.jit.ScriptModule):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.ReLU())

        @torch.jit.script_method
        def forward(self, x):
            return self.inner(x)

    return Scripted()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("form", ["traced", "script method", "scripted"])
def test_modules_of_torch_script_are_looked_into(form):
    plain = nn.Sequential(nn.ReLU())
    made = {
        "traced": lambda: torch.jit.trace(plain, (torch.randn(2, 3),)),
        "script method": scripted_by_method,
        "scripted": lambda: torch.jit.script(plain),
    }
    child = made[form]()
    beside = nn.ReLU()
    model = nn.Sequential(nn.ModuleList([child]), beside)
    # The others' forward is an instance's.
    assert composing.any_hooked_within(model) == (form != "traced")
    beside.register_forward_hook(lambda *_: None)
    assert composing.any_hooked_within(model)


def test_a_forward_of_its_own_and_hooks_on_all_modules_are_found():
    model = nn.Sequential(tree())
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert composing.any_hooked_within(model)
    assert not composing.any_hooked_within(nn.ReLU())
    handle.remove()
    assert not composing.any_hooked_within(model)
    inner = model[0][1][1][0]
    inner.forward = inner.forward
    assert composing.any_hooked_within(model)
