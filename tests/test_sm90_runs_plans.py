"""What follows the Hopper convolutions whose positions come from registers: which passes a plan
has, and when. No GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from problems import geometry_of, system_1

import fusedconv
from fusedconv import _C
from fusedconv.device import KNOWN
from fusedconv.kernels.compiled import group_norm_problem
from fusedconv.problem import act_norm_act
from fusedconv.registry import registry
from fusedconv.selection import choose

pytestmark = pytest.mark.skipif(
    "sm90" not in fusedconv.build.get("families", ()),
    reason="fusedconv was built without kernels for compute capability 9.0",
)

H200 = KNOWN[90]


def test_system_1_takes_no_scratch_tensor():
    """What lies in the workspace is the filter and partial moments."""
    kernel = next(k for k in registry().kernels() if k.name == "sm90_runs_tf32_2_0")
    assert kernel.supports(system_1("tf32"), H200)
    plan = kernel.compile(system_1("tf32"), H200)
    assert plan._program.workspace_bytes < 60e6


@pytest.mark.parametrize(
    ("changes", "streams"),
    [
        ({}, True),
        ({"save": True}, True),
        ({"save": True, "batch": 1}, False),  # a launch takes longer than it gains
        ({"spatial": (255, 256)}, False),  # of an odd number of lines no quad is staggered
        ({"spatial": (255, 256), "save": True}, True),
        ({"conv": geometry_of(torch.empty(64, 32, 3, 3))}, True),
        ({"conv": geometry_of(torch.empty(64, 32, 3, 3)), "batch": 1, "spatial": (32, 32)}, False),
        ({"conv": geometry_of(torch.empty(64, 40, 3, 3))}, True),
        ({"conv": geometry_of(torch.empty(64, 40, 3, 3)), "spatial": (255, 256)}, False),
        ({"conv": geometry_of(torch.empty(16, 64, 3, 3)), "channels": 16}, False),  # few products
        ({"save": True, "activation": "identity"}, False),
        ({"save": True, "recompute": True}, True),
    ],
)
def test_what_follows_is_one_pass_where_the_epilogue_would_take_longer(changes, streams):
    """With half of a block's channels empty, where quads are staggered, and where a pass activates
    anyway."""
    kernel = next(k for k in registry().kernels() if k.name == "sm90_runs_tf32_2_0")
    asked = system_1("tf32", **changes)
    assert kernel.streams_norm(asked, H200) is streams
    *_, convolving, last = kernel.compile(asked, H200).steps
    assert ("moments + normalize in one pass" in last) is streams
    assert ("moments" in convolving) is not streams


@pytest.mark.parametrize(
    ("precision", "activation", "always"),
    [("fp16", "gelu", False), ("bf16", "gelu", True), ("bf16", "silu", False)],
)
def test_in_16_bits_it_is_one_pass_where_that_gains(precision, activation, always):
    """Where the output is saved, or the pass activates in half precision."""
    name = f"sm90_runs_{precision.replace('fp', 'f')}_2_0"
    kernel = next(k for k in registry().kernels() if k.name == name)
    asked = dict(activation=activation)
    assert kernel.streams_norm(system_1(precision, **asked), H200) is always
    assert kernel.streams_norm(system_1(precision, save=True, **asked), H200)


@pytest.mark.parametrize(
    ("name", "channels", "kernel_size"),
    [("sm90_runs_tf32_2_0", 64, (3, 3)), ("sm90_runs_tf32_0_0", 288, (1, 1))],
)
def test_one_pass_takes_less_than_the_epilogue_where_it_is_chosen(
    name, channels, kernel_size, monkeypatch
):
    kernel = next(k for k in registry().kernels() if k.name == name)
    conv = geometry_of(torch.empty(channels, 16, *kernel_size))
    asked = system_1("tf32", channels=channels, conv=conv)
    assert kernel.supports(asked, H200)
    one_pass = kernel.cost(asked, H200)
    monkeypatch.setattr(type(kernel), "streams_norm", lambda *_: False)
    assert 0 < one_pass < kernel.cost(asked, H200)


@pytest.mark.parametrize(
    ("batch", "spatial", "merges"),
    [(1, (32, 32), True), (2, (64, 64), True), (128, (32, 32), False), (1, (512, 512), False)],
)
@pytest.mark.parametrize("save", [False, True])
def test_few_partial_moments_are_merged_by_the_pass_that_normalises(batch, spatial, merges, save):
    kernel = next(k for k in registry().kernels() if k.name == "sm90_runs_tf32_2_0")
    asked = replace(system_1("tf32"), batch=batch, spatial=spatial, save=save)
    *_, merging, last = kernel.compile(asked, H200).steps
    assert last.startswith("merge moments + ") is merges
    assert (merging == "merge moments") is not merges


def test_one_pass_merges_and_normalises_channels_first_only():
    kernel = next(k for k in registry().kernels() if k.name == "sm90_runs_tf32_2_0")
    asked = system_1("tf32")
    config = kernel.config(asked, H200)
    absent = dict.fromkeys(
        ("input", "partials", "mean", "rstd", "weight", "bias", "output"), _C.Operand()
    )
    form = act_norm_act(asked.epilogue)
    for layouts in (("nhwc", "nhwc"), ("nhwc", "nchw")):
        norm = group_norm_problem(asked, form, input_layout=layouts[0], output_layout=layouts[1])
        with pytest.raises(ValueError, match="layout: got "):
            _C.sm90.runs.NormalizeMerging(config, problem=norm, **absent)


@pytest.mark.parametrize("precision", ["tf32", "fp32", "bf16", "fp16"])
def test_the_cheapest_row_of_wide_planes_is_one_of_these(precision):
    ((_, candidate),) = choose(system_1(precision), H200).chosen
    assert candidate.kernel.name.startswith("sm90_runs_")
