"""Gradients through LayerNorm over channels, affine maps of channels and activations alone on
processors, against fp64, relative to eager's error."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
import ungrouped
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import explained
from reference import ACTIVATIONS, GRADIENT_FLOOR, LAYOUTS, relative_error
from ungrouped import PRECISION, problem_of

from fusedconv import _C
from fusedconv.device import PROCESSOR
from fusedconv.functional import conv_transpose_act_norm
from fusedconv.kernels.cpu.epilogue_gradients import CpuUngroupedBackward
from fusedconv.plan import BackwardTensors

DTYPES = pytest.mark.parametrize("dtype", PRECISION, ids=str)
KERNEL = CpuUngroupedBackward()
#: Activations in front and behind that a map of channels has; LayerNorm has two at once too.
ONE = ((None, None), (None, "gelu"), (None, "relu"), (None, "silu"), ("gelu_tanh", None))


@contextlib.contextmanager
def poisoned():
    """New tensors hold NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def assert_as_accurate(*arguments):
    with poisoned():
        ungrouped.assert_as_accurate(KERNEL, *arguments)


def tensors_of(channels, spatial, layout, dtype, batch=3, affine_dtype=None):
    torch.manual_seed(channels)
    x = torch.randn(batch, channels, *spatial).to(dtype)
    weight, bias = torch.randn(2, channels).to(affine_dtype or dtype).unbind()
    return LAYOUTS[layout](x), weight, bias


@DTYPES
@pytest.mark.parametrize("kind", ["layer", "affine"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("spatial", [(16, 16), (3,), (2, 3, 6), (1, 1)], ids=str)
@pytest.mark.parametrize("channels", [1, 3, 8, 64, 385, 1025])
def test_against_fp64(channels, spatial, layout, kind, dtype):
    x, weight, bias = tensors_of(channels, spatial, layout, dtype)
    for before, after in (*ONE, *([("gelu_tanh", "silu")] if kind == "layer" else [])):
        # Of three values alike, which an activation may make, one rounding decides.
        if channels >= 8 or before is None:
            assert_as_accurate(kind, x, weight, bias, before, after)


@DTYPES
@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("spatial", [(3,), (2, 3, 6), (196, 260)], ids=str)
@pytest.mark.parametrize("channels", [3, 72])
def test_activations_alone(channels, spatial, layout, activation, dtype):
    x, *_ = tensors_of(channels, spatial, layout, dtype)
    assert_as_accurate(None, x, None, None, activation, None)
    assert_as_accurate(None, x, None, None, activation, None, ["conv_output"])


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("kind", ["layer", "affine"])
@pytest.mark.parametrize(
    "wanted", [["conv_output"], ["norm_weight"], ["norm_bias"], ["norm_weight", "bias"]], ids=str
)
def test_what_is_asked_for_is_computed(wanted, kind, layout):
    x, weight, bias = tensors_of(20, (9, 7), layout, torch.float32)
    assert_as_accurate(kind, x, weight, bias, None, "silu", wanted)
    assert_as_accurate(kind, x, weight, None, "relu", None, [*wanted, "conv_output"])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_problems(data):
    kind = data.draw(st.sampled_from(["layer", "affine", None]))
    axes = data.draw(st.integers(1, 3))
    spatial = tuple(data.draw(st.integers(1, 90 if axes == 1 else 12)) for _ in range(axes))
    channels = data.draw(st.integers(8 if kind == "layer" else 1, 150))
    dtype = data.draw(st.sampled_from(list(PRECISION)))
    layout = data.draw(st.sampled_from(["nchw", "nhwc"]))
    before, after = data.draw(st.sampled_from(ONE))
    x, weight, bias = tensors_of(
        channels, spatial, layout, dtype, data.draw(st.integers(1, 4)),
        data.draw(st.sampled_from([dtype, torch.float32])),
    )  # fmt: skip
    if kind is None:
        before, after, weight, bias = after or before or "relu", None, None, None
    assert_as_accurate(kind, x, weight, bias, before, after)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("kind", [None, "affine"])
def test_what_relu_stops_is_zero_whatever_comes(kind, layout):
    x = LAYOUTS[layout](-torch.rand(2, 5, 9, 11) - 0.1)
    grad = torch.full_like(x, float("inf"))
    problem = problem_of(kind, x, None, None, None if kind else "relu", "relu" if kind else None)
    found = KERNEL.compile(problem, PROCESSOR).run(
        BackwardTensors(grad, x, None, x, None, None, None, None)
    )
    assert torch.equal(found.conv_output, torch.zeros_like(x))
    assert torch.equal(found.bias, torch.zeros(5))


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("kind", [None, "affine"])
def test_an_infinite_output_spoils_nothing_else(kind, layout):
    x = LAYOUTS[layout](torch.randn(2, 5, 9, 11))
    x[0, 2, 3, 4] = float("inf")
    grad = torch.randn_like(x)
    leaf = x.detach().requires_grad_()
    torch.relu(leaf).backward(grad)
    problem = problem_of(kind, x, None, None, None if kind else "relu", "relu" if kind else None)
    found = KERNEL.compile(problem, PROCESSOR).run(
        BackwardTensors(grad, x, None, x, None, None, None, None)
    )
    assert torch.equal(found.conv_output, leaf.grad)


@DTYPES
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("kind", ["layer", "affine", None])
def test_threads_change_no_bit(kind, layout, dtype):
    x, weight, bias = tensors_of(37, (61, 67), layout, dtype, batch=2)
    if kind is None:
        weight = bias = None
    grad = torch.randn_like(x)
    problem = problem_of(
        kind, x, weight, bias, "gelu" if kind is None else None, None if kind is None else "gelu"
    )
    plan = KERNEL.compile(problem, PROCESSOR)
    threads = torch.get_num_threads()
    results = []
    try:
        for number in (1, 2, 3, 7):
            torch.set_num_threads(number)
            found = plan.run(BackwardTensors(grad, x, None, x, None, None, weight, bias))
            results.append([getattr(found, name) for name in sorted(problem.gradients)])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.parametrize("norm", ["layer", "batch", None])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@DTYPES
def test_a_layer_is_served_with_its_bias(dtype, layout, norm):
    """Through the function: who serves, and gradients of everything."""
    torch.manual_seed(0)
    x = LAYOUTS[layout](torch.randn(2, 6, 9, 7).to(dtype))
    weight, bias = torch.randn(6, 10, 3, 3).to(dtype), torch.randn(10).to(dtype)
    stages = {"activation": "gelu", "order": "norm_act", "norm": norm} if norm else {
        "activation": "gelu"
    }  # fmt: skip
    affine = torch.randn(2, 10).to(dtype) if norm else None
    if norm == "batch":
        stages |= {"running_mean": torch.randn(10), "running_var": torch.rand(10) + 0.5}

    def leaves(dtype):
        given = [x, weight, bias, *(affine if norm else ())]
        return [each.detach().to(dtype).requires_grad_() for each in given]

    mine = leaves(dtype)
    named = dict(zip(("norm_weight", "norm_bias"), mine[3:], strict=True)) if norm else {}
    _, *backward = explained(
        conv_transpose_act_norm, *mine[:3], 2, **named, **stages, gradients=True
    )
    steps = [step for each in backward for step in each.steps]
    assert any(step.startswith("fused gradients of gelu") for step in steps), steps
    output = conv_transpose_act_norm(*mine[:3], 2, **named, **stages)
    grad = torch.randn_like(output)
    found = torch.autograd.grad(output, mine, grad)

    def eager(dtype):
        own = leaves(dtype)
        result = torch.nn.functional.conv_transpose2d(*own[:3], 2)
        if norm == "batch":
            given = (stages["running_mean"], stages["running_var"])
            result = torch.nn.functional.batch_norm(
                result, *(each.to(dtype) for each in given), *own[3:]
            )
        elif norm == "layer":
            result = torch.nn.functional.layer_norm(result.movedim(1, -1), (10,), *own[3:])
            result = result.movedim(-1, 1)
        return torch.autograd.grad(torch.nn.functional.gelu(result), own, grad.to(dtype))

    for actual, torchs, exact in zip(found, eager(dtype), eager(torch.float64), strict=True):
        limit = 2 * relative_error(torchs, exact) + 4 * GRADIENT_FLOOR[dtype]
        assert relative_error(actual, exact) <= limit


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gradients": frozenset({"bias"})}, "beside the epilogue's only"),
        ({"grad_dtype": torch.bfloat16}, "dtype of the output's gradient is bfloat16"),
    ],
)
def test_what_it_does_not_serve_has_a_reason(changes, reason):
    x, weight, bias = tensors_of(8, (3, 3), "nchw", torch.float16)
    one = problem_of("affine", x, weight, bias, None, "relu")
    support = KERNEL.supports(dataclasses.replace(one, **changes), PROCESSOR)
    assert not support
    assert reason in support.reason
    two = problem_of("affine", x, weight, bias, "relu", "gelu")
    assert "in front of the" in KERNEL.supports(two, PROCESSOR).reason


def test_the_binding_names_what_is_wrong():
    problem = _C.GroupNormProblem(
        batch=1, channels=2, pixels=3, groups=1, eps=0.0,
        input_layout=_C.Layout.nchw, output_layout=_C.Layout.nchw, dtype=_C.DType.float32,
        output_dtype=_C.DType.float32, affine_dtype=_C.DType.float32,
        activation_before=_C.Activation.identity, activation_after=_C.Activation.identity,
        row_channels=0, tf32=False,
    )  # fmt: skip
    for run in (_C.cpu.map_gradients, _C.cpu.layer_norm_gradients):
        with pytest.raises(ValueError, match="grad_output: got null"):
            run(problem, 0, 0, 0, 0, 0, 0, 0, 0, 1)
        with pytest.raises(ValueError, match="grad_input: got null"):
            run(problem, 0, 0, 0, 0, 0, 0, 0, 8, 1)
        with pytest.raises(ValueError, match="threads: got 0"):
            run(problem, 0, 0, 0, 0, 0, 0, 0, 0, 0)
