"""Transposed convolutions of few input channels on tensor cores: blocks, refusals,
plans and their place in the selection. No GPU."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from problems import geometry_of, group_norm_stage, problem

from fusedconv import _C, ForwardProblem
from fusedconv.benchmark import DTYPES
from fusedconv.device import KNOWN
from fusedconv.kernels.cuda.few import Few
from fusedconv.norms import Norm
from fusedconv.problem import Activation
from fusedconv.registry import registry
from fusedconv.selection import choose

KERNELS = [kernel for kernel in registry().kernels() if isinstance(kernel, Few)]
pytestmark = pytest.mark.skipif(not KERNELS, reason="fusedconv was built without these kernels")

H200 = KNOWN[90]
names = {"ids": lambda kernel: kernel.name}


def few(
    kernel: Few,
    *,
    channels: int = 3,
    out: int = 16,
    spatial: tuple[int, ...] = (16, 32, 32),
    size: int = 3,
    stride: int = 2,
    padding: int = 1,
    dilation: int = 1,
    groups: int = 1,
    **changes: object,
) -> ForwardProblem:
    axes = len(spatial)
    weight = torch.empty(channels, out // groups, *(size,) * axes, device="meta")
    conv = geometry_of(
        weight,
        out_channels=out,
        stride=(stride,) * axes,
        padding=(padding,) * axes,
        output_padding=(0,) * axes,
        dilation=(dilation,) * axes,
        groups=groups,
    )
    dtype = DTYPES[kernel.precision]
    fields = dict(
        dtype=dtype,
        output_dtype=dtype,
        precision=kernel.precision,
        channels=channels,
        spatial=spatial,
        conv=conv,
        norm=None,
    )
    return problem(**{**fields, **changes})


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_blocks_cover_a_sample(kernel, seed):
    generator = random.Random(f"{kernel.name} {seed}")
    axes = generator.choice((2, 3))
    spatial = tuple(generator.randint(2, {2: 200, 3: 20}[axes]) for _ in range(axes))
    made = few(
        kernel,
        channels=generator.randint(1, 4),
        out=generator.randint(1, 70),
        spatial=spatial,
        padding=generator.choice((1, 1, 3)) if min(spatial) > 4 else 1,
    )
    assert kernel.supports(made, H200)
    config = kernel.config(made, H200)
    depth, height, width = (1, *made.output_spatial)[-3:]
    assert (config.tiles[0] - 1) * config.planes < depth <= config.tiles[0] * config.planes
    # Later planes begin with an even one, whose taps the earlier ones do not need.
    assert config.tiles[0] == 1 or config.planes % 2 == 0
    lines = 2 * config.lines
    assert (config.tiles[1] - 1) * lines < height <= config.tiles[1] * lines
    outputs = _C.few.tile_outputs
    assert (config.width_tiles - 1) * outputs < width <= config.width_tiles * outputs
    assert config.channel_blocks * _C.few.block_channels >= made.output_channels
    assert config.shared_bytes <= H200.shared_bytes
    assert config.partial_slots == config.tiles[0] * config.tiles[1]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(layout="nhwc"), "the layout is channels last"),
        (dict(channels=4, out=8, groups=2), "the convolution has groups"),
        (dict(channels=5), "5 input channels; up to 4 are served"),
        (dict(size=4), "filters of 3 taps with stride 2"),
        (dict(stride=3), "filters of 3 taps with stride 2"),
        (dict(padding=2), "odd padding"),
        (dict(dilation=2), "dilation 1"),
        (dict(spatial=(32,)), "filters of 3 taps with stride 2"),
        (dict(spatial=(4, 20000)), "a line of outputs exceeds"),
        (dict(output_dtype=torch.float64), "output dtype is torch.float64"),
        (dict(norm=Norm("layer", 0, 1e-5, True, True, torch.float32)), "layer_norm"),
    ],
)
@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_what_is_refused(kernel, changes, reason):
    support = kernel.supports(few(kernel, **changes), H200)
    assert not support and reason in support.reason


def test_strict_fp32_is_left_to_others():
    kernel = next(k for k in KERNELS if k.precision == "tf32")
    support = kernel.supports(few(kernel, precision="fp32"), H200)
    assert "computes in tf32, fp32 is asked for" in support.reason


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_a_normalised_output_is_computed_twice(kernel, saves):
    norm = group_norm_stage(num_groups=4)
    made = few(kernel, norm=norm, activation="silu", save=saves)
    steps = kernel.compile(made, H200).steps
    first = "bias + save + silu + moments" if saves else "bias + silu + moments"
    name = f"{kernel.name} (nchw)"
    assert steps == (f"{name} + {first}", "merge moments", f"{name} + bias + silu + normalize")


@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_an_activation_alone_is_in_one_pass_unless_what_it_is_of_is_saved(kernel):
    made = few(kernel, activation="gelu")
    name = f"{kernel.name} (nchw)"
    assert kernel.compile(made, H200).steps == (f"{name} + bias + gelu",)
    saved = replace(made, save=True)
    assert saved.saves_conv_output
    assert kernel.compile(saved, H200).steps == (f"{name} + bias", f"{name} + bias + gelu")


@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_it_is_chosen_for_what_it_is_made_for(kernel):
    made = few(kernel, batch=128, norm=group_norm_stage(num_groups=4), activation="silu")
    assert any(isinstance(stage, Activation) for stage in made.epilogue)
    ((_, chosen),) = choose(made, H200).chosen
    assert chosen.kernel is kernel


@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_an_estimate_grows_with_what_is_computed(kernel):
    # Of two planes of the input there are three of the output.
    costs = [
        kernel.cost(few(kernel, batch=512, spatial=spatial), H200)
        for spatial in ((64, 64), (2, 64, 64))
    ]
    assert 2.8 < costs[1] / costs[0] < 3.2
