"""Gradients of depthwise transposed convolutions and of those of few input channels: what the
kernels serve, how sums are cut, and the steps of plans. No GPU."""

from __future__ import annotations

import pytest
import torch
from problems import backward_problem, conv_geometry, explained, problem

import fusedconv
from fusedconv.device import KNOWN
from fusedconv.kernels import torch as vendor
from fusedconv.kernels.cuda import direct_gradients, few_gradients
from fusedconv.registry import registry
from fusedconv.selection import choose

pytestmark = pytest.mark.skipif(
    "direct" not in fusedconv.build.get("families", ()), reason="fusedconv was built without CUDA"
)

H200 = KNOWN[90]
KERNEL = "direct_gradients"
FEW = "direct_few_gradients"


def forward(layout="nchw", channels=128, multiplier=1, spatial=(32, 32, 32), batch=2, **changes):
    axes = len(spatial)
    conv = conv_geometry(
        in_channels=channels,
        out_channels=channels * multiplier,
        kernel_size=(3,) * axes,
        stride=(2,) * axes,
        padding=(1,) * axes,
        output_padding=(0,) * axes,
        dilation=(1,) * axes,
        groups=channels,
        weight_strides=(27, 27, *(3**i for i in reversed(range(axes)))),
    )
    fields = {
        "dtype": torch.bfloat16,
        "output_dtype": torch.bfloat16,
        "precision": "bf16",
        "norm": None,
        "activation": "identity",
        "save": False,
        **changes,
    }
    return problem(
        layout=layout, batch=batch, channels=channels, spatial=spatial, conv=conv, **fields
    )


def kernels_of(backward):
    chosen = choose(backward, H200).chosen
    return {part: candidate.kernel.name for piece, candidate in chosen for part in piece.parts}


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("precision", ["tf32", "fp32", "bf16"])
def test_it_is_chosen_for_depthwise_ones(precision, layout):
    changes = {}
    if precision != "bf16":
        changes = dict.fromkeys(("dtype", "output_dtype"), torch.float32)
        changes["precision"] = precision
    found = kernels_of(backward_problem(forward(layout, **changes)))
    assert found["input"] == found["weight"] == KERNEL


def test_groups_of_several_channels_are_others():
    backward = backward_problem(forward(multiplier=2)).part(["input", "weight"])
    (found,) = [c for c in registry().candidates(backward, H200) if c.kernel.name == KERNEL]
    assert not found.support and "256 channels" in found.support.reason
    assert set(kernels_of(backward).values()) == {"torch_convolution_backward"}


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("spatial", [(7,), (512, 512), (64, 64, 64)], ids=str)
@pytest.mark.parametrize("batch", [1, 3, 5000])
def test_runs_cover_a_sample(batch, spatial, layout):
    config = direct_gradients._config(
        backward_problem(forward(layout, 8, spatial=spatial, batch=batch))
    )
    pixels = torch.Size(spatial).numel()
    assert config.support and config.taps == 3 ** len(spatial)
    assert (config.runs - 1) * config.run < pixels <= config.runs * config.run
    assert config.parts == batch * config.runs <= max(1024, batch)
    assert config.partial_bytes == config.parts * 8 * config.taps * 4


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_steps(layout):
    backward = backward_problem(forward(layout))
    (explanation,) = explained(backward, device=H200)
    first, second, *_ = explanation.steps
    assert first == f"depthwise gradient of input and weight ({layout})"
    assert second == "add the depthwise weight gradient's parts"
    assert explanation.steps[-1] == "add sums by channel to gradients of bias"
    alone = backward_problem(forward(layout), "weight")
    assert explained(alone, device=H200)[0].steps[0] == f"depthwise gradient of weight ({layout})"


def test_forcing_the_convolution_says_nothing_of_its_gradients():
    chosen = choose(backward_problem(forward(multiplier=2)), H200, "direct").chosen
    providers = {candidate.kernel.provider for _, candidate in chosen}
    assert providers == {"torch", "ungrouped_cuda"}  # to input and weight, to the bias


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_the_bias_alone(layout):
    (explanation,) = explained(backward_problem(forward(layout), "bias"), device=H200)
    assert explanation.kernel in (KERNEL, "ungrouped_bias")
    (piece, _), *_ = choose(backward_problem(forward(layout), "bias"), H200, KERNEL).chosen
    steps = direct_gradients.DirectGradients().compile(piece, H200).steps
    assert not any("depthwise" in step for step in steps)


def test_filters_that_no_kernel_was_compiled_for_take_a_pass_for_each_gradient():
    conv = conv_geometry(
        in_channels=8, out_channels=8, kernel_size=(7, 7), stride=(4, 4), padding=(2, 2),
        output_padding=(0, 0), dilation=(1, 1), groups=8, weight_strides=(49, 49, 7, 1),
    )  # fmt: skip
    asked = problem(
        conv=conv, channels=8, spatial=(9, 9), norm=None, activation="identity", bias=False
    )
    piece = backward_problem(asked)
    steps = direct_gradients.DirectGradients().compile(piece, H200).steps
    assert steps[:2] == (
        "depthwise gradient of input (nchw)",
        "depthwise gradient of weight (nchw)",
    )


# ---- few input channels --------------------------------------------------------------------------


def few(channels=3, out_channels=16, spatial=(16, 32, 32), layout="nchw", **changes):
    """A layer of 3 to 16 channels in three dimensions, changed."""
    axes = len(spatial)
    fields = {
        "kernel_size": (3,) * axes,
        "stride": (2,) * axes,
        "padding": (1,) * axes,
        "output_padding": (0,) * axes,
        "dilation": (1,) * axes,
        "groups": 1,
    }
    fields |= {name: changes.pop(name) for name in list(changes) if name in fields}
    kernel = fields["kernel_size"]
    weight = torch.empty(channels, out_channels // fields["groups"], *kernel, device="meta")
    conv = conv_geometry(
        in_channels=channels,
        out_channels=out_channels,
        weight_strides=weight.stride(),
        **fields,
    )
    precision = changes.pop("precision", "bf16")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    made = {
        "dtype": dtype,
        "output_dtype": dtype,
        "precision": precision,
        "norm": None,
        "activation": "identity",
        "save": False,
        "batch": 128,
        "bias": False,
        **changes,
    }
    return problem(layout=layout, channels=channels, spatial=spatial, conv=conv, **made)


def few_config(**changes):
    return few_gradients._config(backward_problem(few(**changes)))


@pytest.mark.parametrize("precision", ["tf32", "fp32", "fp16", "bf16"])
def test_few_channels_are_chosen(precision):
    found = kernels_of(backward_problem(few(precision=precision)))
    assert found == {"input": FEW, "weight": FEW}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"channels": 5}, "5 input channels, up to 4"),
        ({"channels": 4, "groups": 2}, "groups is 2"),
        ({"layout": "nhwc"}, "channels last"),
        ({"kernel_size": (3, 3, 7)}, "7 taps along width"),
        ({"spatial": (9, 9, 9), "stride": (40, 2, 2), "kernel_size": (40, 9, 5)}, "shared memory"),
        ({"out_channels": 1 << 20, "kernel_size": (16, 16, 4)}, "a weight of 1024 taps"),
    ],
    ids=str,
)
def test_what_few_channels_are_refused(changes, reason):
    support = few_gradients.FewGradients().supports(backward_problem(few(**changes)), H200)
    assert not support and reason in support.reason


@pytest.mark.parametrize(
    "changes",
    [
        {"kernel_size": (2, 2, 2), "padding": (0, 0, 0)},
        {"kernel_size": (4, 4, 4)},
        {"stride": (1, 1, 1)},
        {"stride": (3, 2, 1), "dilation": (2, 1, 3)},
        {"spatial": (64, 64), "kernel_size": (4, 4)},
        {"spatial": (64, 64), "kernel_size": (5, 5), "padding": (2, 2)},
        {"spatial": (500,)},
        {"spatial": (33, 1), "kernel_size": (1, 4), "padding": (0, 0)},
    ],
    ids=str,
)
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_tiles_of_few_channels(channels, changes):
    config = few_config(channels=channels, **changes)
    assert config.support, config.support.reason
    assert 0 < config.parts <= min(config.items, 2048)
    assert config.partial_bytes == config.parts * 16 * channels * config.taps * 4
    assert config.shared_bytes <= 96 << 10


def test_four_blocks_share_a_multiprocessor():
    config = few_config()
    assert 4 * (config.shared_bytes + 1024) <= 228 << 10
    assert config.items == config.parts == 128 * 16


def test_samples_share_tiles_of_small_planes():
    assert few_config(spatial=(4, 4), batch=128).items == 128 * 4 // 32
    assert few_config(spatial=(20,), batch=128).items == 4
    assert few_config(spatial=(2, 4, 4), batch=128).items == 128


def test_parts_of_a_large_weight_are_bounded():
    config = few_config(out_channels=2048)
    assert config.partial_bytes <= 64 << 20 and config.parts < config.items


@pytest.mark.parametrize(
    ("gradients", "steps"),
    [
        (
            ("input", "weight"),
            (
                "few-channel gradient of input and weight",
                "add the few-channel weight gradient's parts",
            ),
        ),
        (("input",), ("few-channel gradient of input",)),
        (
            ("weight",),
            ("few-channel gradient of weight", "add the few-channel weight gradient's parts"),
        ),
    ],
)
def test_steps_of_few_channels(gradients, steps):
    backward = backward_problem(few(), *gradients)
    assert few_gradients.FewGradients().compile(backward, H200).steps == steps
    wide = backward_problem(few(), *gradients, grad_layout="nhwc")
    copied = few_gradients.FewGradients().compile(wide, H200).steps
    assert copied == ("torch copy of the output's gradient to nchw", *steps)


def test_the_bias_of_few_channels():
    backward = backward_problem(few(bias=True))
    steps = few_gradients.FewGradients().compile(backward, H200).steps
    assert steps[-1] == "add sums by channel to gradients of bias" and len(steps) == 4
    alone = backward_problem(few(bias=True), "bias")
    steps = few_gradients.FewGradients().compile(alone, H200).steps
    assert steps[-1] == "add sums by channel to gradients of bias"
    assert not any("few-channel" in step for step in steps)


@pytest.mark.parametrize(
    ("precision", "layout", "measured"),
    [
        ("bf16", "nchw", 2.43),
        ("tf32", "nchw", 4.13),
        ("bf16", "nhwc", 0.96),
        ("tf32", "nhwc", 3.75),
    ],
)
def test_the_vendors_estimate_of_few_channels_is_what_was_measured(precision, layout, measured):
    backward = backward_problem(few(precision=precision, layout=layout))
    estimate = vendor.TorchConvolutionBackward().cost(backward, H200)
    assert 0.95 < estimate / measured < 1.05


def test_the_vendors_estimate_of_many_channels_is_as_it_was():
    def cost(**changes):
        return vendor.TorchConvolutionBackward().cost(backward_problem(few(**changes)), H200)

    assert cost(channels=8) < 0.5 * cost(channels=7)
    assert cost(channels=16, out_channels=8) < 0.5 * cost(channels=16, out_channels=7)
    assert cost(channels=3, stride=(1, 1, 1), spatial=(32, 64, 64)) < cost()


def test_the_cost_of_few_channels():
    kernel = few_gradients.FewGradients()

    def cost(*gradients, **changes):
        return kernel.cost(backward_problem(few(**changes), *gradients), H200)

    assert 0.3 < cost() < 0.7  # what instructions say; no GPU has timed it
    assert max(cost("input"), cost("weight")) < cost() < cost("input") + cost("weight")
    assert cost(channels=1) < cost(channels=4) and cost() < cost(out_channels=32)
    assert cost(batch=1) < 0.2 * cost()
