"""Calls seen before: what is known again, and every difference that makes a call another one."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import fusedconv
from fusedconv import functional, ops, selection
from fusedconv.ops import common, seen

pytestmark = pytest.mark.skipif(seen._Guards is None, reason="torch has no guards of tensors")


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        return function(*arguments, **(keywords or {}))


class Subclass(torch.Tensor):
    pass


def unaligned(x):
    return torch.empty(x.numel() + 1)[1:].view_as(x).copy_(x)


@pytest.fixture(params=["by its key", "as the weight's latest"])
def known(request, monkeypatch):
    """A convolution's tensors and keywords, called once, or once more; ``recalls`` collects whether
    the first call and later ones are known again."""
    x, weight, bias = torch.randn(2, 4, 5, 6), torch.randn(4, 8, 3, 3), torch.randn(8)
    scale, shift = torch.randn(8), torch.randn(8)
    keywords = dict(stride=(1, 1), padding=1, activation="gelu", num_groups=2, eps=1e-5)
    recalls = []
    recall = ops.recall

    def noting(*arguments):
        found = recall(*arguments)
        recalls.append(found is not None)
        return found

    monkeypatch.setattr(ops, "recall", noting)

    def call(input=x, weight=weight, bias=bias, norm_weight=scale, norm_bias=shift, **changed):
        return functional.conv_transpose_act_norm(
            input,
            weight,
            bias,
            norm_weight=norm_weight,
            norm_bias=norm_bias,
            **{**keywords, **changed},
        )

    tensors = SimpleNamespace(x=x, weight=weight, bias=bias, scale=scale, shift=shift)
    first = call()
    if request.param != "by its key":
        call()
        assert recalls.pop()
    return SimpleNamespace(call=call, first=first, recalls=recalls, tensors=tensors)


def test_a_call_is_known_again_with_the_same_result(known):
    second = known.call()
    fresh = known.call(
        input=known.tensors.x.clone(), stride=tuple(map(int, "11")), eps=float("1e-5")
    )
    assert known.recalls == [False, True, True]
    assert torch.equal(known.first, second) and torch.equal(known.first, fresh)


@pytest.mark.parametrize(
    "changed",
    [
        dict(padding=0),
        dict(stride=(2, 2)),
        dict(activation="relu"),
        dict(order="norm_act"),
        dict(eps=1e-3),
        dict(num_groups=4),
        dict(bias=None),
        dict(norm_weight=None),
        dict(norm_weight=None, norm_bias=None),
    ],
    ids=str,
)
def test_another_argument_is_another_call(known, changed):
    known.call(**changed)
    assert known.recalls == [False, False]


def of_input(change):
    return lambda t: dict(input=change(t.x))


@pytest.mark.parametrize(
    "change",
    [
        of_input(lambda x: x[:1]),
        of_input(lambda x: x.contiguous(memory_format=torch.channels_last)),
        of_input(unaligned),
        of_input(lambda x: torch._neg_view(-x)),
        of_input(lambda x: x.clone().requires_grad_()),
        of_input(lambda x: x.as_subclass(Subclass)),
        lambda t: dict(weight=t.weight.transpose(2, 3).contiguous().transpose(2, 3)),
        lambda t: dict(weight=nn.Parameter(t.weight)),
        lambda t: dict(bias=t.bias.repeat_interleave(2)[::2]),
        lambda t: dict(norm_weight=t.scale.bfloat16(), norm_bias=t.shift.bfloat16()),
    ],
)
def test_another_kind_of_tensor_is_another_call(known, change):
    result = known.call(**change(known.tensors))
    assert not known.recalls[1]
    if result.shape == known.first.shape:
        assert torch.allclose(known.first, result.as_subclass(torch.Tensor), atol=0.05)


@pytest.mark.parametrize(
    "around",
    [
        lambda: torch.autocast("cpu"),
        torch.inference_mode,
        Mode,
        forward_ad.dual_level,
        lambda: torch.profiler.profile(acc_events=True),
        lambda: FakeTensorMode(allow_non_fake_inputs=True),
        seen.record.recording,
    ],
)
def test_whoever_wants_to_see_a_call_does(known, around):
    with contextlib.suppress(RuntimeError), around():
        known.call()
    assert known.recalls[1:] and not any(known.recalls[1:])


@pytest.mark.filterwarnings(r"ignore:`torch\.jit\.")
def test_transforms_and_tracers_see_a_call(known):
    samples = torch.stack([known.tensors.x] * 2)
    torch.vmap(lambda sample: known.call(input=sample))(samples)
    torch.func.grad(lambda x: known.call(input=x).sum())(known.tensors.x)
    torch.jit.trace(lambda x: known.call(input=x), (known.tensors.x,), check_trace=False)
    assert not any(known.recalls)


@pytest.mark.parametrize("grad", [False, True])
def test_a_graph_made_of_a_known_call_has_all_of_it(known, grad):
    leaves = [t.clone().requires_grad_(grad) for t in vars(known.tensors).values()]
    for _ in range(3):
        known.call(*leaves)
    known.recalls.clear()
    graph = make_fx(lambda x, w, b, scale, shift: known.call(x, w, b, scale, shift))(*leaves)
    assert known.recalls and not any(known.recalls)
    others = [-leaves[0], *leaves[1:]]
    assert torch.allclose(graph(*others), known.call(*others), atol=1e-5)


@pytest.mark.filterwarnings(r"ignore:`torch\.jit\.")
def test_transforms_see_a_call_of_tensors_that_they_do_not_wrap(known):
    """Which goes by no node of autograd that asks for them."""
    leaves = [t.clone().requires_grad_() for t in vars(known.tensors).values()]
    for _ in range(3):
        known.call(*leaves)
    assert known.recalls == [False, False, True, True]
    known.recalls.clear()
    torch.vmap(lambda x: known.call(*leaves).sum() + x)(torch.ones(2))
    torch.func.grad(lambda x: known.call(*leaves).sum() + x)(torch.ones(()))
    torch.func.jvp(lambda x: known.call(*leaves).sum() + x, (torch.ones(()),), (torch.ones(()),))
    assert known.recalls and not any(known.recalls)


def test_a_tensor_that_a_transform_has_left_wrapped(known):
    left = []
    torch.func.grad(lambda weight: left.append(weight) or weight.sum())(known.tensors.weight)
    x = known.tensors.x.clone().requires_grad_()
    expected = known.call(input=x)
    for _ in range(3):
        assert torch.equal(known.call(input=x, weight=left[0]), expected)
    assert not any(known.recalls[1:])


def test_grad_mode_and_forced_kernels_tell_calls_apart(known, force):
    weight = nn.Parameter(known.tensors.weight)
    for grad in (True, False, True, False):
        with torch.set_grad_enabled(grad):
            assert known.call(weight=weight).requires_grad is grad
    assert known.recalls == [False, False, False, True, True]
    force("torch")
    known.call()
    assert not known.recalls[-1]


def test_calls_that_alternate_are_both_known(known):
    t = known.tensors
    others = (
        dict(input=t.x.contiguous(memory_format=torch.channels_last)),
        dict(input=unaligned(t.x)),
        dict(input=t.x.clone().requires_grad_()),
        dict(weight=nn.Parameter(t.weight)),
        dict(weight=nn.Parameter(t.weight, requires_grad=False)),
    )
    for other in others:
        known.call(**other)
    known.recalls.clear()
    for other in others:
        known.call()
        known.call(**other)
    assert all(known.recalls)


def test_forgetting_forgets_calls(known):
    fusedconv.clear_cache()
    known.call()
    assert known.recalls == [False, False]


@pytest.mark.parametrize(
    "changed", [dict(padding=True), dict(num_groups=2.0), dict(stride=(True, 1)), dict(padding=1.0)]
)
def test_equal_values_of_other_types_are_refused_as_at_first(known, changed):
    with pytest.raises(TypeError, match=r"got .*, expected "):
        known.call(**changed)


def test_a_list_may_change_between_calls(known):
    padding = [1, 1]
    first = known.call(padding=padding)
    padding[:] = [0, 0]
    assert known.call(padding=padding).shape != first.shape


def test_a_tensor_given_twice(known):
    shared = known.tensors.scale
    expected = known.call(norm_weight=shared, norm_bias=shared.clone())
    for _ in range(2):
        assert torch.equal(known.call(norm_weight=shared, norm_bias=shared), expected)


def test_results_of_autocast_are_not_kept_for_calls_outside(known):
    x = torch.randn(2, 4, 7, 7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert known.call(input=x).dtype == torch.bfloat16
    assert known.call(input=x).dtype == torch.float32
    assert not any(known.recalls)


def test_gradients_of_a_known_call(known):
    def gradients():
        leaves = [t.clone().requires_grad_() for t in vars(known.tensors).values()]
        known.call(*leaves).square().sum().backward()
        return [leaf.grad for leaf in leaves]

    first, second = gradients(), gradients()
    assert known.recalls == [False, False, True]
    assert all(map(torch.equal, first, second))


def test_what_only_launches_does_so_before_autograd_makes_the_node_of_a_known_call(
    known, monkeypatch
):
    """Recording is switched off while autograd makes a node."""
    leaves = [t.clone().requires_grad_() for t in vars(known.tensors).values()]
    plans, recording = [], []
    outputs = common.DirectOperator.outputs

    def noting(operator, plan, tensors):
        plans.append(plan)
        recording.append(torch.is_grad_enabled())
        return outputs(operator, plan, tensors)

    monkeypatch.setattr(common.DirectOperator, "outputs", noting)

    def gradients():
        output = known.call(*leaves)
        assert output.requires_grad
        return torch.autograd.grad(output.square().sum(), leaves)

    expected = gradients()
    for only_launches in (False, True, True):
        monkeypatch.setattr(plans[0], "only_launches", only_launches, raising=False)
        assert all(map(torch.equal, gradients(), expected))
    assert recording == [False, False, True, True]
    assert known.recalls == [False, False, True, True, True]


def test_saved_tensors_of_a_known_call_are_brought_back_where_hooks_change_them(known):
    """Of the one call: nodes of calls that are known again share what they keep beside tensors."""
    leaves = [t.clone().requires_grad_() for t in vars(known.tensors).values()]
    forms = []

    def unpacked(tensor):
        forms.append(tensor.dim())
        return tensor if tensor.dim() < 4 else tensor.contiguous(memory_format=torch.channels_last)

    def gradients(hooked):
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpacked)
        with hooks if hooked else contextlib.nullcontext():
            output = known.call(*leaves)
        return torch.autograd.grad(output.square().sum(), leaves)

    expected = gradients(False)
    for hooked in (False, True, False, True):
        for found, each in zip(gradients(hooked), expected, strict=True):
            torch.testing.assert_close(found, each)
        assert bool(forms) == hooked
        forms.clear()
    assert known.recalls == [False, False, True, True, True, True]


def test_a_known_call_that_is_recorded_has_its_backward_pass_recorded(known):
    leaves = [t.clone().requires_grad_() for t in vars(known.tensors).values()]
    for _ in range(2):
        known.call(*leaves).sum().backward()
    with fusedconv.record_problems() as problems:
        known.call(*leaves).sum().backward()
    assert len(problems) == 2
    with fusedconv.record_problems() as problems:
        known.call(*leaves)
    assert len(problems) == 1


def test_calls_that_torchs_operators_serve_are_known_too(known, force):
    """With gradients autograd follows the operators by itself, and nothing of ours is in its graph;
    twice too."""
    force("torch")
    tensors = known.tensors
    leaves = [t.clone().requires_grad_() for t in vars(tensors).values()]
    x, weight, bias, scale, shift = leaves
    calls = [
        known.call(input=x, weight=weight, bias=bias, norm_weight=scale, norm_bias=shift)
        for _ in range(2)
    ]
    assert known.recalls == [False, False, True]
    found = [torch.autograd.grad((y * y).sum(), leaves, create_graph=True) for y in calls]
    for first, second in zip(*found, strict=True):
        assert torch.equal(first, second)
    torch.autograd.grad(found[1][0].sum(), weight)
    with torch.no_grad():
        known.call(), known.call()
    assert known.recalls[3:] == [False, True]


def test_without_guards_every_call_is_read(known, monkeypatch):
    monkeypatch.setattr(seen, "_Guards", None)
    fusedconv.clear_cache()
    assert torch.equal(known.call(), known.call())
    assert not any(known.recalls)


def test_parameters_that_a_module_computes_are_read_as_attributes():
    class Shifted(fusedconv.GroupNorm):
        def __getattr__(self, name):
            value = super().__getattr__(name)
            return value + 1 if name == "weight" else value

    x = torch.randn(2, 4, 5, 5)
    plain = fusedconv.GroupNorm(2, 4)
    expected = functional.group_norm(x, 2, plain.weight + 1, plain.bias)
    shifted = Shifted(2, 4)
    shifted.load_state_dict(plain.state_dict())
    assert torch.equal(shifted(x), expected)
    plain.__dict__["weight"] = plain._parameters["weight"] + 1
    assert torch.equal(plain(x), expected)


def test_what_is_forgotten_during_a_call_stays_forgotten(known, monkeypatch):
    cached = seen.cached

    def forgetting(key):
        found = cached(key)
        fusedconv.clear_cache()
        return found

    selection.latest_calls().clear()  # so that the key is asked for
    monkeypatch.setattr(seen, "cached", forgetting)
    known.call()
    monkeypatch.undo()
    assert selection.latest_calls() == {}


def test_few_calls_are_kept_by_their_weights(known, monkeypatch):
    monkeypatch.setattr(selection, "LATEST_CALLS", 3)
    for _ in range(5):
        weight = known.tensors.weight.clone()
        known.call(weight=weight)
        known.call(weight=weight)
    assert 0 < len(selection.latest_calls()) <= 3
