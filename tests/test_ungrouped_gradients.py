"""Gradients through LayerNorm over channels, affine maps and activations alone, and of the bias
alone: which kernel serves them, and the steps of plans. No GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from problems import backward_problem, conv_geometry, explained, problem

import fusedconv
from fusedconv import Norm
from fusedconv.device import KNOWN
from fusedconv.functional import fold_batch_norm
from fusedconv.kernels.cuda.ungrouped_gradients import UngroupedBias
from fusedconv.norms import folded_batch_norm
from fusedconv.ops.batch_norm import _in_torch
from fusedconv.registry import registry
from fusedconv.selection import choose

pytestmark = pytest.mark.skipif(
    not fusedconv.build["cuda"], reason="fusedconv was built without CUDA"
)

H200 = KNOWN[90]
KERNEL = "ungrouped_backward"


def forward(kind, layout="nhwc", channels=64, activation="relu", order="norm_act", **changes):
    """``kind`` None is no normalisation."""
    groups = 8 if kind == "group" else 0
    norm = None if kind is None else Norm(kind, groups, 1e-6, True, True, torch.float32)
    conv = conv_geometry(
        in_channels=64,
        out_channels=channels,
        kernel_size=(4, 4),
        stride=(2, 2),
        padding=(1, 1),
        output_padding=(0, 0),
        dilation=(1, 1),
        groups=1,
        weight_strides=(16 * channels, 16, 4, 1),
    )
    fields = {
        "dtype": torch.bfloat16,
        "output_dtype": torch.bfloat16,
        "precision": "bf16",
        "layout": layout,
        "batch": 8,
        "channels": 64,
        "spatial": (32, 32),
        "conv": conv,
        "save": True,
        **changes,
    }
    return problem(norm=norm, activation=activation, order=order, **fields)


def kernel_of(backward, part):
    chosen = choose(backward, H200).chosen
    return next(candidate.kernel for piece, candidate in chosen if part in piece.parts)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("kind", ["layer", "affine"])
def test_it_has_the_epilogue_and_the_bias(kind, layout):
    assert kernel_of(backward_problem(forward(kind, layout)), "epilogue").name == KERNEL
    backward = backward_problem(forward(kind, layout), "bias", "norm_weight")
    assert kernel_of(backward, "epilogue").name == KERNEL
    assert kernel_of(backward, "bias").name == KERNEL


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kind": "layer", "channels": 2048}, "2048 channels"),
        ({"kind": "group"}, "LayerNorm"),
        ({"kind": None, "activation": "identity", "grad": torch.float32}, "the problem has none"),
    ],
    ids=lambda each: str(each),
)
def test_what_it_refuses(changes, reason):
    changes = dict(changes)
    grad = changes.pop("grad", torch.bfloat16)
    if changes["kind"] == "group":
        target = backward_problem(problem(save=True))
    else:
        target = backward_problem(forward(**changes), grad_dtype=grad)
    epilogue = target.part(["epilogue"])
    (found,) = [c for c in registry().candidates(epilogue, H200) if c.kernel.name == KERNEL]
    assert not found.support and reason in found.support.reason


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_gradients_in_float32_of_layer_norm(layout):
    """As under autocast."""
    backward = backward_problem(forward("layer", layout, output_dtype=torch.float32))
    assert backward.grad_dtype == torch.float32
    chosen = kernel_of(backward, "epilogue")
    assert chosen.name == KERNEL
    plan = chosen.compile(backward.part(["epilogue"]), H200)
    assert any("of float32" in step for step in plan.steps)
    wide, narrow = (
        chosen.cost(each.part(["epilogue"]), H200)
        for each in (backward, backward_problem(forward("layer", layout)))
    )
    assert wide > narrow


@pytest.mark.parametrize(
    ("kind", "dtype"), [("affine", torch.float32), (None, torch.float32), ("layer", torch.float16)]
)
def test_gradients_of_another_dtype_are_torchs(kind, dtype):
    backward = backward_problem(forward(kind))
    other = dataclasses.replace(backward, grad_dtype=dtype)
    assert kernel_of(other, "epilogue").provider == "torch"


# ---- an activation alone, and the bias alone -----------------------------------------------------


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("order", ["act_norm", "norm_act"])
def test_an_activation_alone_has_a_pass_with_the_bias_beside_it(order, activation, layout):
    alone = forward(None, layout, activation=activation, order=order)
    backward = backward_problem(alone, "bias")
    (explanation,) = explained(backward, device=H200)
    assert explanation.kernel == KERNEL
    steps = [
        f"gradient through {activation} in one pass ({layout}), + sums by channel",
        "add sums by channel to gradients of bias",
    ]
    assert list(explanation.steps) == steps


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_an_activation_alone_without_a_convolution(layout):
    alone = forward(None, layout, conv=None, activation="gelu")
    (explanation,) = explained(backward_problem(alone), device=H200)
    assert explanation.kernel == KERNEL and len(explanation.steps) == 1


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_the_bias_alone_is_summed(layout):
    backward = backward_problem(forward(None, layout, activation="identity"), "bias")
    assert backward.parts == ("bias",)
    (explanation,) = explained(backward, device=H200)
    assert list(explanation.steps) == [
        f"sums of the output's gradient by channel ({layout})",
        "add sums by channel to gradients of bias",
    ]
    other = dataclasses.replace(backward, grad_layout={"nchw": "nhwc", "nhwc": "nchw"}[layout])
    plan = UngroupedBias().compile(other, H200)
    assert plan.steps == (f"torch copy of the output's gradient to {layout}", *explanation.steps)
    kernel = UngroupedBias()
    assert kernel.cost(backward, H200) < kernel.cost(other, H200)


@pytest.mark.parametrize(("batch", "length"), [(1, 8), (128, 100)])
def test_channels_last_the_bias_is_summed_on_the_way_through_group_norm(batch, length):
    whole = forward("group", "nhwc", 64, batch=batch, spatial=(length, length))
    explanation = explained(backward_problem(whole), device=H200)[0]
    parts = {part: c.kernel.name for parts, c in explanation.chosen for part in parts}
    assert parts["bias"] == parts["epilogue"] == "groupnorm_backward_two_pass"
    through = next(step for step in explanation.steps if step.startswith("gradient through"))
    assert through.endswith("(nhwc), + sums by channel")
    assert "gradients of norm weight, norm bias, bias" in explanation.steps
    assert not any(step.startswith("torch") for step in explanation.steps)


def test_the_bias_behind_group_norm_is_summed_on_the_way_alone():
    """No call asks for it without what it is summed of; a problem that somebody makes may."""
    whole = backward_problem(forward("group", "nhwc", 64))
    asked = dataclasses.replace(whole, gradients=frozenset({"norm_weight", "bias"}))
    supports = {c.kernel.name: c.support for c in registry().candidates(asked, H200)}
    assert "sums the bias's gradient on the way" in supports["groupnorm_backward_two_pass"].reason
    assert not supports["groupnorm_backward_streamed"]


def test_planes_of_a_few_pixels_cost_their_blocks():
    tiny = forward(None, "nchw", activation="gelu", batch=65536, spatial=(1, 1))
    (found,) = [
        c
        for c in registry().candidates(backward_problem(tiny).part(["epilogue"]), H200)
        if c.kernel.name == KERNEL
    ]
    assert found.cost > 5.0


def test_what_the_bias_alone_refuses():
    changes = {"activation": "identity", "dtype": torch.float64, "output_dtype": torch.float64}
    backward = backward_problem(forward(None, **changes), "bias")
    support = UngroupedBias().supports(backward, H200)
    assert not support and "float64" in support.reason
    bare = backward_problem(forward(None, activation="identity"), "bias")
    wide = dataclasses.replace(bare, grad_dtype=torch.float32)
    assert "the output's gradient is torch.float32" in UngroupedBias().supports(wide, H200).reason
    # As under autocast.
    widened = backward_problem(forward("layer", output_dtype=torch.float32))
    assert not UngroupedBias().supports(widened.part(["bias"]), H200)
    with_input = backward_problem(forward(None, activation="identity"), "bias", "input")
    assert not UngroupedBias().supports(with_input, H200)


def test_rows_cost_what_they_were_measured_to():
    """Milliseconds on an H200."""
    layers = [
        (("affine", "nhwc", 256, 16), 0.101),
        (("affine", "nchw", 256, 16), 0.100),
        (("layer", "nhwc", 64, 64), 0.154),
        (("layer", "nchw", 64, 64), 0.226),
        (("layer", "nchw", 384, 4), 0.110),
    ]
    for (kind, layout, channels, batch), measured in layers:
        one = forward(kind, layout, channels, batch=batch, spatial=(64, 64))
        epilogue = backward_problem(one).part(["epilogue"])
        (found,) = [c for c in registry().candidates(epilogue, H200) if c.kernel.name == KERNEL]
        assert found.cost == pytest.approx(measured, rel=0.25), (kind, layout, channels)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_an_affine_map_that_saves_is_behind_what_is_saved(layout):
    """A pass of its own, or behind what the convolution's epilogue saves."""
    saving = forward("affine", layout)
    if "sm90" not in fusedconv.build["families"]:
        pytest.skip("fusedconv was built without kernels for compute capability 9.0")
    steps = explained(saving, device=H200)[0].steps
    assert any(
        step.startswith("affine_norm + relu") or step.endswith("save + affine + relu")
        for step in steps
    ), steps
    inference = dataclasses.replace(saving, save=False)
    steps = explained(inference, device=H200)[0].steps
    assert not any(step.startswith("affine_norm") or "save" in step for step in steps), steps


def test_folding_is_differentiated():
    mean, variance = torch.tensor([0.5, -1.0]), torch.tensor([4.0, 0.25])
    weight, bias = (torch.tensor(each, requires_grad=True) for each in ([2.0, 3.0], [1.0, 0.0]))
    scale, shift = fold_batch_norm(mean, variance, weight, bias, 0.0)
    assert scale.tolist() == [1.0, 6.0] and shift.tolist() == [0.5, 6.0]
    grads = torch.autograd.grad((scale, shift), (weight, bias), (torch.ones(2), torch.ones(2)))
    assert grads[0].tolist() == [0.25, 4.0] and grads[1].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(("scales", "shifts"), [(True, True), (True, False), (False, True)])
def test_gradients_of_folding_by_torchs_operators(scales, shifts):
    torch.manual_seed(0)
    mean, variance = torch.randn(5), torch.rand(5) + 0.5
    weight, bias = torch.randn(2, 5).requires_grad_().unbind()
    scale, shift = folded_batch_norm(mean, variance, weight, bias, 1e-3)
    grads = torch.randn(2, 5).unbind()
    given = [grad if asked else None for grad, asked in zip(grads, (scales, shifts), strict=True)]
    total = sum(
        (value * grad).sum()
        for value, grad in zip((scale, shift), given, strict=True)
        if grad is not None
    )
    expected = torch.autograd.grad(total, (weight, bias), allow_unused=True)
    found = _in_torch(mean, variance, *given, 1e-3)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)
