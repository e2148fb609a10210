"""Transposed convolutions of few channels a group: what tiles cover and stage, what is refused,
plans and their place in the selection. No GPU."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from problems import explained, geometry_of, group_norm_stage, problem

import fusedconv
from fusedconv import ForwardProblem
from fusedconv.benchmark import DTYPES
from fusedconv.device import KNOWN
from fusedconv.kernels.compiled import by_axis
from fusedconv.kernels.cuda.direct import Direct
from fusedconv.registry import registry
from fusedconv.selection import choose

KERNELS = [kernel for kernel in registry().kernels() if isinstance(kernel, Direct)]
pytestmark = pytest.mark.skipif(not KERNELS, reason="fusedconv was built without these kernels")

H200 = KNOWN[90]
names = {"ids": lambda kernel: kernel.name}


def depthwise(
    kernel: Direct,
    *,
    groups: int = 64,
    channels: int = 1,
    out: int = 1,
    spatial: tuple[int, ...] = (32, 32),
    size: int | tuple[int, ...] = 4,
    stride: int | tuple[int, ...] = 2,
    padding: int | tuple[int, ...] = 1,
    output_padding: int | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    **changes: object,
) -> ForwardProblem:
    """``channels`` and ``out`` are those of a group."""

    def each(value: int | tuple[int, ...]) -> tuple[int, ...]:
        return value if isinstance(value, tuple) else (value,) * len(spatial)

    weight = torch.empty(groups * channels, out, *each(size), device="meta")
    conv = geometry_of(
        weight,
        out_channels=groups * out,
        stride=each(stride),
        padding=each(padding),
        output_padding=each(output_padding),
        dilation=each(dilation),
        groups=groups,
    )
    dtype = DTYPES[kernel.precision]
    fields = dict(
        dtype=dtype,
        output_dtype=dtype,
        precision=kernel.precision,
        channels=groups * channels,
        spatial=spatial,
        conv=conv,
        norm=None,
    )
    return problem(**{**fields, **changes})


def random_problem(kernel: Direct, generator: random.Random, layout: str) -> ForwardProblem:
    axes = generator.choice((1, 2, 2, 3))
    drawn = []
    for _ in range(axes):
        size, stride = generator.randint(1, 7), generator.choice((1, 2, 2, 3, 4, 9))
        dilation = generator.choice((1, 1, 1, 2, 3))
        extra = generator.randint(0, max(stride, dilation) - 1)
        extent = generator.randint(1, {1: 900, 2: 90, 3: 14}[axes])
        last = (extent - 1) * stride + dilation * (size - 1) + extra
        padding = generator.randint(0, min(last // 2, dilation * size))
        drawn.append((extent, size, stride, padding, extra, dilation))
    spatial, size, stride, padding, extra, dilation = map(tuple, zip(*drawn, strict=True))
    return depthwise(
        kernel,
        groups=generator.choice((1, 5, 24, 64)),
        channels=generator.choice((1, 1, 3)),
        out=generator.choice((1, 1, 2, 6)),
        spatial=spatial,
        size=size,
        stride=stride,
        padding=padding,
        output_padding=extra,
        dilation=dilation,
        layout=layout,
        aligned=generator.random() < 0.7,
    )


# ---- schedules -----------------------------------------------------------------------------------


def inputs_of(output: int, size: int, stride: int, padding: int, dilation: int, extent: int):
    """The input positions that an output's taps meet."""
    for tap in range(size):
        at, rest = divmod(output + padding - dilation * tap, stride)
        if rest == 0 and 0 <= at < extent:
            yield at


@pytest.mark.parametrize("kernel", KERNELS, **names)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_tiles_cover_every_output_and_boxes_what_it_reads(kernel, layout):
    generator = random.Random(f"{kernel.name} {layout}")
    several = compiled = vectors = 0
    for _ in range(60):
        asked = random_problem(kernel, generator, layout)
        conv = asked.conv
        config = kernel.config(asked, H200)
        assert config.support, config.support.reason
        outputs = by_axis(conv.output_spatial(asked.spatial))
        axes = zip(
            by_axis(asked.spatial),
            outputs,
            by_axis(conv.kernel_size),
            by_axis(conv.stride),
            by_axis(conv.padding, 0),
            by_axis(conv.dilation),
            strict=True,
        )
        for a, (extent, output, size, stride, padding, dilation) in enumerate(axes):
            tile, tiles = config.tile[a], config.tiles[a]
            by_outputs = a == 2 and layout == "nchw"
            span = tile if by_outputs else tile * stride
            assert (tiles - 1) * span < output <= tiles * span
            if layout == "nhwc":
                continue
            for index in range(tiles):
                origin = index * tile // stride if by_outputs else index * tile
                origin += config.before[a]
                for each in range(index * span, min(output, (index + 1) * span)):
                    for at in inputs_of(each, size, stride, padding, dilation, extent):
                        assert 0 <= at - origin < config.box[a], (asked, a)
        assert config.shared_bytes <= H200.shared_bytes
        assert config.block_channels * config.channel_blocks >= (
            conv.out_channels // (conv.groups if layout == "nchw" else 1)
        )
        slots = math.prod(config.tiles)
        assert config.partial_slots == slots
        assert config.partial_bytes_per_sample == 16 * slots * conv.out_channels
        several += slots > 1
        compiled += config.compiled_taps
        vectors += config.vector > 1
    assert several > 10
    assert (compiled if layout == "nchw" else vectors) >= 3


@pytest.mark.parametrize("kernel", KERNELS, **names)
@pytest.mark.parametrize("case", [(1, 3, 1), (2, 2, 0), (2, 3, 1), (2, 4, 1), (2, 5, 2), (4, 4, 0)])
def test_taps_of_common_layers_are_compiled(kernel, case):
    stride, size, padding = case
    asked = depthwise(kernel, stride=stride, size=size, padding=padding)
    assert kernel.config(asked, H200).compiled_taps
    assert not kernel.config(replace(asked, layout="nhwc"), H200).compiled_taps
    dilated = depthwise(kernel, stride=stride, size=size, padding=padding, dilation=3)
    assert not kernel.config(dilated, H200).compiled_taps


@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_which_planes_are_doubled_from_registers(kernel):
    assert kernel.config(depthwise(kernel), H200).doubles
    others = (
        {"layout": "nhwc"},
        {"spatial": (32, 30)},
        {"spatial": (4, 32, 32)},
        {"spatial": (32,)},
        {"size": 3},
        {"size": (2, 4), "padding": (0, 1)},
        {"padding": 2},
        {"output_padding": 1},
        {"stride": 1},
        {"dilation": 2},
        {"out": 2},
        {"channels": 2},
    )
    for changes in others:
        assert not kernel.config(depthwise(kernel, **changes), H200).doubles, changes


def test_teams_of_small_planes_share_a_block():
    kernel = KERNELS[0]
    assert kernel.config(depthwise(kernel, spatial=(4, 4)), H200).teams == 8
    assert kernel.config(depthwise(kernel, spatial=(64, 64)), H200).teams == 1


# ---- what is served ------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_every_problem_of_the_family_is_served(kernel):
    generator = random.Random(kernel.name)
    for _ in range(40):
        for layout, save in itertools.product(("nchw", "nhwc", "strided"), (False, True)):
            asked = replace(random_problem(kernel, generator, layout), save=save)
            support = kernel.supports(asked, H200)
            assert support, (asked, support)
            assert 0 < kernel.cost(asked, H200) < 10.0


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"conv": None, "epilogue": ()}, "computes convolutions"),
        ({"dtype": torch.float64, "output_dtype": torch.float64, "precision": "fp64"}, "dtype is"),
        ({"batch": 0}, "the input is empty"),
        ({"epilogue": (fusedconv.Residual(),)}, "no fused kernel has the stage"),
        ({"spatial": (1 << 15, 1 << 15)}, "pixels"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_refusals_say_why(kernel, changes, text):
    asked = depthwise(kernel)
    assert kernel.supports(asked, H200)
    support = kernel.supports(replace(asked, **changes), H200)
    assert not support
    assert text in support.reason


@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_many_channels_large_filters_and_strides_are_refused(kernel):
    refused = {
        "output channels": depthwise(kernel, groups=4, channels=17, out=16),
        "stride": depthwise(kernel, spatial=(3,), stride=40_000, padding=0),
        "filter": depthwise(kernel, spatial=(3, 3), size=300, stride=1, padding=0),
    }
    for text, asked in refused.items():
        assert text in kernel.supports(asked, H200).reason
    assert "runs on CUDA" in kernel.supports(depthwise(kernel), fusedconv.device.PROCESSOR).reason
    assert "8.0" in kernel.supports(depthwise(kernel), KNOWN[75]).reason


@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_few_input_channels_are_served_whatever_the_output_channels(kernel):
    assert kernel.supports(depthwise(kernel, groups=1, channels=16, out=96), H200)


def test_float32_serves_both_of_its_precisions():
    for kernel in KERNELS:
        for precision, dtype in DTYPES.items():
            asked = replace(depthwise(kernel), precision=precision, dtype=dtype, output_dtype=dtype)
            served = precision == kernel.precision or (kernel.precision, precision) == (
                "fp32",
                "tf32",
            )
            if dtype in (torch.float32, torch.float16, torch.bfloat16):
                assert bool(kernel.supports(asked, H200)) == served


# ---- plans ---------------------------------------------------------------------------------------


def steps_of(kernel: Direct, **changes: object) -> list[str]:
    asked = depthwise(kernel, **changes)
    assert kernel.supports(asked, H200)
    return list(kernel.compile(asked, H200).steps)


@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_steps(kernel):
    name = kernel.name
    assert steps_of(kernel, activation="gelu") == [f"{name} (nchw) + bias + gelu"]
    assert steps_of(kernel, layout="nhwc", activation="identity", bias=False) == [f"{name} (nhwc)"]
    general = steps_of(kernel, size=3, stride=3)
    assert general == [f"{name} (nchw, output by output) + bias + gelu"]
    assert "copy of the strided input" in steps_of(kernel, layout="strided")[0]
    norm = group_norm_stage(16)
    steps = steps_of(kernel, norm=norm)
    assert steps[:2] == [f"{name} (nchw) + bias + gelu + moments", "merge moments"]
    assert steps[2].startswith("normalize")
    behind = steps_of(kernel, norm=norm, order="norm_act")
    assert behind[0] == f"{name} (nchw) + bias + moments"
    assert "gelu" in behind[2]
    saved = steps_of(kernel, norm=norm, save=True)
    assert len(saved) == 3
    assert saved[-1].startswith("gelu")
    if kernel.precision != "fp32":
        wide = steps_of(kernel, norm=norm, output_dtype=torch.float32)
        assert wide[-1].startswith("normalize")


# ---- selection -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_forced_by_name(kernel):
    ((_, candidate),) = choose(depthwise(kernel), H200, kernel.name).chosen
    assert candidate.kernel is kernel


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("precision", ["tf32", "fp32", "fp16", "bf16"])
def test_depthwise_layers_are_served_by_these(precision, layout):
    kernel = next(k for k in KERNELS if DTYPES[k.precision] == DTYPES[precision])
    layer = dict(precision=precision, layout=layout, batch=8)
    for architecture in (80, 90):
        for asked in (
            depthwise(kernel, groups=128, spatial=(64, 64), **layer),
            depthwise(kernel, groups=128, spatial=(32, 32, 32), size=3, **layer),
            depthwise(kernel, groups=64, spatial=(4000,), norm=group_norm_stage(64), **layer),
        ):
            (explanation,) = explained(asked, device=KNOWN[architecture])
            assert explanation.provider == "direct", explanation


@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_the_cost_grows_with_the_batch(kernel):
    asked = depthwise(kernel, groups=128, spatial=(64, 64), batch=64)
    half = kernel.cost(replace(asked, batch=32), H200)
    assert 0.4 < half / kernel.cost(asked, H200) < 0.7
