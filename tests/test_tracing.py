"""Who watches a call sees it: tracers, fake tensors, profilers, counters, negative views."""

from __future__ import annotations

import numpy as np
import pytest
import reference
import torch
from systems import pair, saved_and_loaded
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from fusedconv import ConvTransposeActNorm2d, GroupNorm, selection
from fusedconv.functional import conv_transpose_act_norm, group_norm
from fusedconv.models import SYSTEMS

# torch marks its TorchScript as deprecated; people still deploy with it.
traces = pytest.mark.filterwarnings(r"ignore:`torch\.jit\.")


def network(name: str) -> tuple[nn.Module, torch.Tensor]:
    """A system's drop-in or the stack below, and an input."""
    if name == "stack":
        return Stack(), torch.randn(2, 4, 5, 6)
    model, _, x = pair(name)
    return model, x


class Stack(nn.Module):
    """Our modules within a network of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = GroupNorm(2, 4, activation="silu", order="norm_act")
        self.up = ConvTransposeActNorm2d(4, 6, 3, num_groups=2, activation="gelu")
        self.last = nn.Conv2d(6, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.up(self.norm(x)))
        return result


# ---- torch.jit.trace -----------------------------------------------------------------------------


@traces
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", [*SYSTEMS, "stack"])
def test_a_trace_records_the_operator(name, gradients):
    """Nor is it the allocation of the output alone, where nothing asks for gradients."""
    model, x = network(name)
    with torch.set_grad_enabled(gradients):
        traced = torch.jit.trace(model, (x,))
        assert "fusedconv::" in str(traced.inlined_graph)
        for _ in range(2):
            other = torch.randn_like(x)
            torch.testing.assert_close(traced(other), model(other))
    other = torch.randn_like(x)
    torch.testing.assert_close(saved_and_loaded(traced)(other), model(other))


@traces
@pytest.mark.parametrize("name", SYSTEMS)
def test_what_was_traced_for_inference_can_be_trained(name):
    model, x = network(name)
    with torch.no_grad():
        traced = torch.jit.trace(model, (x,))
    traced(x).square().sum().backward()
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model(x).square().sum().backward()
    for grad, parameter in zip(grads, model.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad)


# ---- torch.fx, meta and fake tensors -------------------------------------------------------------


@pytest.mark.parametrize("name", [*SYSTEMS, "stack"])
def test_symbolic_trace(name):
    model, x = network(name)
    traced = torch.fx.symbolic_trace(model)
    torch.testing.assert_close(traced(x), model(x))
    called = {node.target for node in traced.graph.nodes if node.op == "call_function"}
    assert called & {conv_transpose_act_norm, group_norm}


@pytest.mark.parametrize("gradients", [False, True])
def test_meta_tensors(gradients):
    model = Stack().to("meta")
    with torch.set_grad_enabled(gradients):
        assert model(torch.empty(2, 4, 5, 6, device="meta")).shape == (2, 3, 7, 8)
        for name in SYSTEMS:
            original, x = network(name)
            expected = original(x)
            result = original.to("meta")(x.to("meta"))
            assert result.is_meta
            assert (result.shape, result.stride()) == (expected.shape, expected.stride())


def conv(**changes):
    arguments = {"weight": torch.ones(4, 6, 3, 3), "num_groups": 2, **changes}
    return lambda x: conv_transpose_act_norm(x, **arguments)


def norm(num_groups=2, **changes):
    return lambda x: group_norm(x, num_groups, **changes)


BAD_CALLS = {
    "channels": (conv(weight=torch.ones(5, 6, 3, 3)), "input: got 4 channels, expected 5"),
    "bias": (conv(bias=torch.ones(5)), r"bias: got shape \(5,\), expected \(6,\)"),
    "dtype": (conv(weight=torch.ones(4, 6, 3, 3).half()), "weight: got dtype torch.float16"),
    "groups": (conv(groups=3), "groups: got 3, expected a positive divisor"),
    "num_groups": (conv(num_groups=4), "num_groups: got 4, expected a positive divisor"),
    "norm_weight": (conv(norm_weight=torch.ones(4)), r"norm_weight: got shape \(4,\)"),
    "output_padding": (conv(output_padding=1), r"output_padding: got \(1, 1\), expected each"),
    "output": (conv(padding=5), "input: got spatial extents .* give an output"),
    "norm's num_groups": (norm(3), "num_groups: got 3, expected a positive divisor"),
    "norm's weight": (norm(weight=torch.ones(5)), r"weight: got shape \(5,\), expected \(4,\)"),
    "norm's dtypes": (
        norm(weight=torch.ones(4), bias=torch.ones(4).half()), "bias: got dtype torch.float16",
    ),
}  # fmt: skip


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize("case", BAD_CALLS)
def test_fake_implementations_check_what_real_calls_check(case):
    function, text = BAD_CALLS[case]
    x = torch.ones(2, 4, 5, 5)
    with pytest.raises((TypeError, ValueError), match=f"^{text}"):
        function(x)
    with pytest.raises(Exception, match=text):
        torch.export.export(Call(function), (x,))


# ---- profiler and counter ------------------------------------------------------------------------


@pytest.mark.parametrize("gradients", [False, True])
def test_a_profiler_sees_operator_and_kernel(gradients):
    model = Stack()
    x = torch.randn(2, 4, 5, 6)
    with torch.set_grad_enabled(gradients):
        model(x)
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as recorded:
            result = model(x)
            if gradients:
                result.sum().backward()
    names = {event.key for event in recorded.key_averages()}
    assert {"fusedconv::conv_transpose_act_norm", "fusedconv::group_norm"} <= names
    assert "fusedconv::cpu_group_norm" in names
    if gradients:
        assert "fusedconv::conv_transpose_act_norm_backward" in names
        assert "fusedconv::group_norm_backward" in names


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", SYSTEMS)
def test_flops_are_eagers(name, gradients):
    counts = []
    *models, x = pair(name)
    x.requires_grad_(gradients)
    for model in models:
        with torch.set_grad_enabled(gradients), FlopCounterMode(display=False) as counter:
            result = model(x)
            if gradients:
                result.sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1]
    assert counts[0] > 0 or name == "system3"


@pytest.mark.parametrize("needed", [(False, False), (True, False), (False, True), (True, True)])
def test_flops_of_the_operators_are_eagers(needed):
    """The counter's hooks on all modules make these call their children; functions have none.

    Without groups: torch counts a weight's gradient once for each of them.
    """
    x, weight, bias = torch.randn(2, 4, 5, 6), torch.randn(4, 6, 3, 2), torch.randn(6)
    for tensor, need in zip((x, weight), needed, strict=True):
        tensor.requires_grad_(need)
    bias.requires_grad_(any(needed))
    counts = []
    for function in (conv_transpose_act_norm, reference.conv_transpose_act_norm):
        with FlopCounterMode(display=False) as counter:
            result = function(x, weight, bias, stride=2, activation="gelu", num_groups=3)
            if any(needed):
                result.sum().backward()
        counts.append(counter.get_flop_counts()["Global"])
    assert sum(counts[0].values()) == sum(counts[1].values()) > 0
    assert all(str(operator).startswith("fusedconv.") for operator in counts[0])
    assert len(counts[0]) == 1 + any(needed)


def test_group_norm_has_no_flops_that_torch_counts():
    x = torch.randn(2, 4, 5, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        group_norm(x, 2, activation="gelu").sum().backward()
    assert set(counter.get_flop_counts()["Global"].values()) == {0}


# ---- values that memory does not hold ------------------------------------------------------------


@pytest.mark.parametrize("gradients", [False, True])
def test_negative_views(gradients):
    """``torch._neg_view``, and the imaginary part of a conjugate, are lazy: memory holds -x."""
    x, weight, scale = torch.randn(2, 4, 5, 5), torch.randn(4, 6, 3, 3), torch.randn(4)
    conjugate = torch.randn(2, 4, 5, 5, dtype=torch.complex64).conj().imag
    assert conjugate.is_neg()
    with torch.set_grad_enabled(gradients):
        for value in (torch._neg_view(x), conjugate):
            actual = group_norm(value, 2, torch._neg_view(scale), activation="gelu")
            expected = reference.group_norm(value, 2, -scale, activation="gelu")
            torch.testing.assert_close(actual, expected)
            if gradients:
                value = value.detach().requires_grad_()
            actual = conv_transpose_act_norm(value, torch._neg_view(weight), num_groups=2)
            expected = reference.conv_transpose_act_norm(value, -weight, num_groups=2)
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


# ---- what torch takes for arguments --------------------------------------------------------------


def test_integers_of_numpy_and_lists_of_one():
    x, weight = torch.randn(2, 4, 5, 5), torch.randn(4, 6, 3, 3)
    expected = conv_transpose_act_norm(x, weight, None, 2, 1, 1, num_groups=2, eps=1e-4)
    for one in (np.int64, np.int32, lambda value: [value], lambda value: (value,)):
        actual = conv_transpose_act_norm(
            x, weight, None, one(2), one(1), one(1), num_groups=2, eps=np.float32(1e-4)
        )
        torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(group_norm(x, np.int64(2)), group_norm(x, 2))


@pytest.mark.parametrize("first", [2, 2.0, np.float64(2)], ids=repr)
def test_a_call_does_not_open_or_close_the_way_for_its_equals(first):
    """1, 1.0 and True are equal and hash alike; a plan's key must not mix them up."""
    x = torch.randn(2, 4, 5, 5)
    for num_groups in (first, 2, 2.0, 2):
        if type(num_groups) is int:
            group_norm(x, num_groups)
        else:
            with pytest.raises(TypeError, match=r"^num_groups: got"):
                group_norm(x, num_groups)
    weight = torch.randn(4, 6, 3, 3)
    for stride in (1, True, 1, (1, True), (1, 1), (1.0, 1)):
        if stride in (1, (1, 1)) and all(
            type(part) is int for part in (stride if isinstance(stride, tuple) else (stride,))
        ):
            conv_transpose_act_norm(x, weight, None, stride)
        else:
            with pytest.raises(TypeError, match=r"^stride: got"):
                conv_transpose_act_norm(x, weight, None, stride)


def test_the_plan_cache_is_bounded_and_keeps_what_is_used(monkeypatch):
    monkeypatch.setattr(selection._plans, "capacity", 20)
    kept = torch.randn(1, 2, 7)
    group_norm(kept, 1)
    choices = []
    choose = selection.choose

    def counted(problem, *others):
        choices.append(problem)
        return choose(problem, *others)

    monkeypatch.setattr(selection, "choose", counted)
    for length in range(10, 60):
        group_norm(torch.randn(1, 2, length), 1)
        group_norm(kept, 1)
        assert len(selection._plans) <= 20
    assert len(choices) == 50, "a plan in use was put out"
    group_norm(torch.randn(1, 2, 10), 1)
    assert len(choices) == 51, "the oldest plan was kept"


def test_what_was_used_last_stays():
    recent = selection.Recent(2)
    for key in "abac":
        recent.put(key, key.upper())
    assert [recent.get(key) for key in "abc"] == ["A", None, "C"]
    recent.get("a")
    recent.put("d", "D")
    assert [recent.get(key) for key in "acd"] == ["A", None, "D"]
    assert len(recent) == 2


# ---- gradients where torch's own kernels fail ----------------------------------------------------


def test_channels_last_float64_without_the_inputs_gradient():
    """torch's kernel writes the input's gradient through a null pointer where none is asked for."""
    for needs_input in (False, True):
        x = reference.channels_last(torch.randn(2, 6, 5, 5, dtype=torch.float64))
        x.requires_grad_(needs_input)
        module = GroupNorm(2, 6, activation="gelu", dtype=torch.float64)
        output = module(x)
        assert reference.is_channels_last(output)
        grads = torch.autograd.grad(output.square().sum(), list(module.parameters()))
        plain = reference.group_norm(
            x.detach().contiguous(), 2, module.weight, module.bias, activation="gelu"
        )
        expected = torch.autograd.grad(plain.square().sum(), list(module.parameters()))
        for grad, other in zip(grads, expected, strict=True):
            torch.testing.assert_close(grad, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("order", reference.ORDERS)
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
def test_gradients_in_16_bits_are_computed_in_float32(dtype, order, activation):
    """A mean of 30 rounded to bfloat16 is off by a tenth of the deviation."""
    x = (torch.randn(2, 8, 12, 11) * 0.7 + 30).to(dtype)
    weight, bias = torch.randn(8).to(dtype), torch.randn(8).to(dtype)
    incoming = torch.randn(2, 8, 12, 11).to(dtype)
    results = []
    for function, wide in (
        (group_norm, dtype),
        (reference.group_norm, dtype),
        (reference.group_norm, torch.float64),
    ):
        leaves = [t.detach().to(wide).requires_grad_() for t in (x, weight, bias)]
        output = function(leaves[0], 2, *leaves[1:], 1e-5, activation=activation, order=order)
        results.append(torch.autograd.grad(output, leaves, incoming.to(wide)))
    for actual, torchs, exact in zip(*results, strict=True):
        reference.assert_as_accurate_as_torch(actual, torchs, exact, floor=torch.finfo(dtype).eps)
