"""torch.jit.script of the drop-ins and modules: eager's results, gradients and state."""

from __future__ import annotations

import pytest
import torch
from problems import explained
from reference import ACTIVATIONS, cotangent
from systems import pair, perturbed, saved_and_loaded
from torch import nn

from fusedconv import ConvTransposeActNorm1d, ConvTransposeActNorm2d, GroupNorm
from fusedconv.models import SYSTEMS

# torch has deprecated TorchScript as a whole.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit")


def operators(scripted) -> set[str]:
    """The operators of ours that a scripted module calls."""
    graph = str(scripted.inlined_graph)
    return {
        name for name in ("conv_transpose_act_norm", "group_norm") if f"fusedconv::{name}" in graph
    }


def assert_equal_with_gradients(scripted, module, *inputs):
    results = []
    for each in (module, scripted):
        each.zero_grad()
        leaves = [x.clone().requires_grad_() for x in inputs]
        for _ in range(3):  # TorchScript compiles anew once it has seen shapes and gradients
            output = each(*leaves)
        output.backward(cotangent(output))
        results.append([output, *(x.grad for x in leaves), *(p.grad for p in each.parameters())])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        for _ in range(3):
            result = scripted(*inputs)
        assert not result.requires_grad
        torch.testing.assert_close(result, module(*inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SYSTEMS)
def test_drop_ins_script_to_the_operators(name):
    model, _, x = pair(name)
    scripted = torch.jit.script(model)
    expected = "group_norm" if name == "system3" else "conv_transpose_act_norm"
    assert operators(scripted) == {expected}
    assert list(scripted.state_dict()) == list(model.state_dict())
    for each in (scripted, saved_and_loaded(scripted)):
        assert list(each.state_dict()) == list(model.state_dict())
        assert_equal_with_gradients(each, model, x)
    inside = torch.jit.script(nn.Sequential(model))
    torch.testing.assert_close(inside(x), model(x))


@pytest.mark.parametrize("name", SYSTEMS)
def test_parameters_of_a_scripted_drop_in_are_its_own_models(name):
    model, _, x = pair(name)
    scripted = torch.jit.script(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-2)
    torch.testing.assert_close(scripted(x), model(x))


@pytest.mark.parametrize(("name", "child", "new"), [
    ("system1", "conv_transpose", lambda: nn.Conv2d(6, 16, 3)),
    ("system1", "group_norm", nn.Identity),
    ("system2", "relu", lambda: nn.LeakyReLU(0.3)),
    ("system2", "group_norm", lambda: GroupNorm(2, 8, activation="gelu")),
    ("system3", "gn", nn.Identity),
])  # fmt: skip
def test_replaced_children_are_called_when_scripted(name, child, new):
    model, _, x = pair(name)
    setattr(model, child, perturbed(new()))
    scripted = torch.jit.script(model)
    assert "conv_transpose_act_norm" not in operators(scripted)
    assert_equal_with_gradients(scripted, model, x)
    assert list(saved_and_loaded(scripted).state_dict()) == list(model.state_dict())


def scriptable_hook(self, input: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
    return 2 * output


def scriptable_conv_hook(
    self, input: tuple[torch.Tensor, list[int] | None], output: torch.Tensor
) -> torch.Tensor:
    return 2 * output


@pytest.mark.parametrize("name", SYSTEMS)
def test_hooks_that_torchscript_compiles_run(name):
    model, _, x = pair(name)
    model.get_submodule("gn" if name == "system3" else "group_norm").register_forward_hook(
        scriptable_hook
    )
    scripted = torch.jit.script(model)
    assert operators(scripted) == set()
    assert_equal_with_gradients(scripted, model, x)


@pytest.mark.parametrize("keywords", [
    {},
    {"num_groups": 2, "activation": "gelu", "order": "norm_act"},
    {"num_groups": 3, "affine": False, "activation": "silu", "bias": False, "precision": "fp32"},
    {"num_groups": 2, "activation": "gelu_tanh", "stride": 2, "groups": 2, "padding": 1},
    {"activation": "relu", "dilation": 2, "output_padding": 1},
], ids=str)  # fmt: skip
def test_general_modules_script(keywords):
    module = perturbed(ConvTransposeActNorm2d(4, 6, 3, **keywords))
    scripted = torch.jit.script(module)
    x = torch.randn(2, 4, 5, 6)
    assert operators(scripted) == {"conv_transpose_act_norm"}
    assert_equal_with_gradients(saved_and_loaded(scripted), module, x)
    if module.group_norm is None:
        module.conv_transpose.register_forward_hook(scriptable_conv_hook)
    else:
        module.group_norm.register_forward_hook(scriptable_hook)
    composed = torch.jit.script(module)
    assert operators(composed) == set()
    assert_equal_with_gradients(composed, module, x)


def test_output_size_and_input_without_a_batch_when_scripted():
    module = ConvTransposeActNorm1d(3, 4, 3, stride=2, activation="gelu")
    scripted = torch.jit.script(module)
    x = torch.randn(2, 3, 7)
    for extra in (0, 1):
        size = [module(x).shape[-1] + extra]
        torch.testing.assert_close(scripted(x, size), module(x, size))
    torch.testing.assert_close(scripted(x[0]), module(x[0]))
    torch.testing.assert_close(scripted(x[0], size), module(x[0], size))
    with pytest.raises(torch.jit.Error, match="output size"):
        scripted(x, [40])
    module.conv_transpose = nn.Conv1d(3, 4, 3)
    with pytest.raises(torch.jit.Error, match="output_size: got a size, expected None"):
        torch.jit.script(module)(x, [40])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("order", ["act_norm", "norm_act"])
def test_group_norm_scripts(order, activation):
    module = perturbed(GroupNorm(2, 6, activation=activation, order=order))
    scripted = torch.jit.script(module)
    assert operators(scripted) == {"group_norm"}
    for shape in ((3, 6), (2, 6, 5), (2, 6, 3, 4)):
        assert_equal_with_gradients(scripted, module, torch.randn(shape))
    plain = torch.jit.script(GroupNorm(2, 6, affine=False))
    x = torch.randn(2, 6, 4)
    torch.testing.assert_close(plain(x), torch.nn.functional.group_norm(x, 2))


def test_a_scripted_call_saves_nothing_without_gradients():
    model, _, x = pair("system1")
    scripted = torch.jit.script(model)
    (explanation,) = explained(scripted, x)
    assert explanation.problem.conv is not None
    assert not explanation.problem.save


@pytest.mark.parametrize("precision", [None, "tf32", "fp32"])
def test_precision_and_eps_are_passed_on_when_scripted(precision):
    module = ConvTransposeActNorm2d(4, 6, 3, num_groups=2, eps=0.25, precision=precision)
    x = torch.randn(2, 4, 5, 6)
    (eager,) = explained(module, x)
    (scripted,) = explained(torch.jit.script(module), x)
    assert scripted.problem == eager.problem
    assert eager.problem.precision == (precision or "fp32")
    assert eager.problem.norm.eps == 0.25


@pytest.mark.parametrize("name", ["system1", "system2"])
def test_autocast_gives_scripted_modules_inputs_of_another_dtype(name):
    model, _, x = pair(name)
    scripted = torch.jit.script(model)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        for each in (x, x.bfloat16()):
            expected, actual = model(each), scripted(each)
            torch.testing.assert_close(actual.float(), expected.float(), rtol=3e-2, atol=3e-2)
