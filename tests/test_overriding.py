"""Who may stand between a call and its kernel: subclasses, function modes, dispatch modes, tracers.

Without any of them a call goes to its plan directly, around torch's dispatcher.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fusedconv import functional, ops
from fusedconv.ops import repeating, seen, watching

# ---- the direct way ------------------------------------------------------------------------------


def goes_direct(x, *others):
    return ops.goes_direct(x, (x, *others))


class Tagged(torch.Tensor):
    pass


class Watching(TorchDispatchMode):
    """Lets every operator be, and records it."""

    def __init__(self):
        super().__init__()
        self.called = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.called.add(str(function))
        return function(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Lets every function be, and records it with its keywords."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def called(self):
        return {function for function, _ in self.calls}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.calls.append((function, kwargs or {}))
        return function(*args, **(kwargs or {}))


def test_plain_calls_go_direct():
    x = torch.randn(2, 4)
    assert goes_direct(x, None, nn.Parameter(torch.randn(4)))
    assert goes_direct(nn.Parameter(x), torch.randn(4), None)


@pytest.mark.parametrize("position", range(3))
@pytest.mark.parametrize("change", [lambda t: t.as_subclass(Tagged), torch._neg_view])
def test_what_memory_or_class_say_otherwise_does_not(position, change):
    tensors = [torch.randn(2, 4), torch.randn(4), torch.randn(4)]
    tensors[position] = change(tensors[position])
    assert not goes_direct(*tensors)


def test_other_devices_do_not():
    assert not goes_direct(torch.empty(2, 4, device="meta"))


def test_calls_that_are_watched_do_not(monkeypatch):
    x = torch.randn(2, 4)
    with Watching():
        assert not goes_direct(x)
    with forward_ad.dual_level():
        assert not goes_direct(x)
    seen = []
    torch.vmap(lambda sample: seen.append(goes_direct(x)) or sample)(x)
    assert seen == [False]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert not goes_direct(x)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not goes_direct(x)


def test_traced_calls_do_not(monkeypatch):
    monkeypatch.setattr("fusedconv.ops.watching._is_tracing", lambda: True)
    assert not goes_direct(torch.randn(2, 4))


def test_no_call_does_where_torch_does_not_tell_of_modes(monkeypatch):
    for module in (watching, seen, repeating):
        monkeypatch.setattr(module, "dispatch_modes", watching.modes_untold)
    x = torch.randn(2, 4, 3)
    assert not goes_direct(x)
    for _ in range(3):
        torch.testing.assert_close(functional.group_norm(x, 2), nn.functional.group_norm(x, 2))


# ---- tensors that override -----------------------------------------------------------------------


class Wrapper(torch.Tensor):
    """A tensor that holds another one and no memory of its own, as quantised ones do."""

    seen: list[str]

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(str(function))
        args, kwargs = pytree.tree_map_only(cls, lambda t: t.inner, (args, kwargs or {}))
        return pytree.tree_map_only(torch.Tensor, cls, function(*args, **kwargs))


def conv(x, weight, bias, norm_weight, norm_bias):
    """Every argument but ``precision`` differs from its default and from its neighbours."""
    return functional.conv_transpose_act_norm(
        x, weight, bias, (3, 2), (2, 1), (1, 0), 2, (1, 2), activation="silu", order="norm_act",
        num_groups=3, norm_weight=norm_weight, norm_bias=norm_bias, eps=0.5,
    )  # fmt: skip


def norm(x, weight, bias):
    return functional.group_norm(x, 2, weight, bias, 0.5, activation="silu", order="norm_act")


CALLS = {
    "conv_transpose_act_norm": (conv, ((2, 4, 5, 6), (4, 3, 2, 3), (6,), (6,), (6,))),
    "group_norm": (norm, ((2, 4, 5, 6), (4,), (4,))),
}
POSITIONS = [
    (name, position) for name, (_, shapes) in CALLS.items() for position in range(len(shapes))
]


@pytest.mark.parametrize(("name", "position"), POSITIONS)
def test_any_tensor_may_be_a_wrapper(name, position):
    call, shapes = CALLS[name]
    tensors = [torch.randn(shape) for shape in shapes]
    expected = call(*tensors)
    Wrapper.seen = []
    tensors[position] = Wrapper(tensors[position])
    result = call(*tensors)
    assert f"fusedconv.{name}.default" in Wrapper.seen
    torch.testing.assert_close(result.inner, expected)


@pytest.mark.parametrize(("name", "position"), POSITIONS)
def test_any_tensor_may_override_the_function(name, position):
    call, shapes = CALLS[name]
    tensors = [torch.randn(shape) for shape in shapes]
    seen = []

    class Overriding(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append((function, cls in types))
            return "overridden"

    tensors[position] = tensors[position].as_subclass(Overriding)
    assert call(*tensors) == "overridden"
    assert seen == [(getattr(functional, name), True)]


@pytest.mark.parametrize("name", CALLS)
def test_function_modes_get_every_argument(name):
    call, shapes = CALLS[name]
    tensors = [torch.randn(shape) for shape in shapes]
    expected = call(*tensors)
    with Functions() as mode:
        torch.testing.assert_close(call(*tensors), expected, rtol=0, atol=0)
    assert getattr(functional, name) in mode.called()


def test_function_modes_get_the_precision():
    for precision in (None, "fp32", "tf32"):
        with Functions() as mode:
            functional.conv_transpose_act_norm(
                torch.randn(1, 2, 3), torch.randn(2, 2, 2), precision=precision
            )
        assert [
            keywords["precision"]
            for function, keywords in mode.calls
            if function is functional.conv_transpose_act_norm
        ] == [precision]


def test_subclasses_and_modes_see_the_operator():
    x, weight = torch.randn(2, 4, 5, 5), torch.randn(4, 6, 3, 3)
    with Functions() as functions:
        functional.group_norm(x, 2)
        functional.conv_transpose_act_norm(x, weight)
    assert {functional.group_norm, functional.conv_transpose_act_norm} <= functions.called()
    with Watching() as operators:
        functional.group_norm(x, 2)
        functional.conv_transpose_act_norm(x, weight, num_groups=2)
    assert {
        "fusedconv.group_norm.default",
        "fusedconv.conv_transpose_act_norm.default",
    } <= operators.called
    tagged = functional.group_norm(x.as_subclass(Tagged), 2)
    torch.testing.assert_close(tagged.as_subclass(torch.Tensor), functional.group_norm(x, 2))
