"""Gradients of depthwise transposed convolutions: what the kernel serves, how sums are cut, and the
steps of plans. No GPU."""

from __future__ import annotations

import pytest
import torch
from problems import backward_problem, conv_geometry, explained, problem

import fusedconv
from fusedconv.device import KNOWN
from fusedconv.kernels.cuda import direct_gradients
from fusedconv.registry import registry
from fusedconv.selection import choose

pytestmark = pytest.mark.skipif(
    "direct" not in fusedconv.build.get("families", ()), reason="fusedconv was built without CUDA"
)

H200 = KNOWN[90]
KERNEL = "direct_gradients"


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


@pytest.mark.parametrize(
    ("layout", "last"), [("nchw", "gradient of bias"), ("nhwc", "torch sum by channel")]
)
def test_steps(layout, last):
    backward = backward_problem(forward(layout))
    (explanation,) = explained(backward, device=H200)
    first, second, *_ = explanation.steps
    assert first == f"depthwise gradient of input and weight ({layout})"
    assert second == "add the depthwise weight gradient's parts"
    assert explanation.steps[-1].startswith((last, "torch.ops.aten"))
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
