"""Transposed convolutions of few output channels by col2im on the GPU, against fp64, relative to
eager's error."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from gpu_checks import (
    FEWEST_NORMALISED_VALUES,
    fused_against_fp64,
    limit,
    meets_outputs,
    output_extent,
    poison,
)
from reference import ACTIVATIONS, LAYOUTS, ORDERS, relative_error
from torch.nn import functional as F

from fusedconv.benchmark import DTYPES
from fusedconv.functional import conv_transpose_act_norm
from fusedconv.kernels.cuda.col2im_sm90 import Col2imSm90
from fusedconv.registry import registry

pytestmark = pytest.mark.gpu

KERNELS = [kernel for kernel in registry().kernels() if isinstance(kernel, Col2imSm90)]
names = {"ids": lambda kernel: kernel.name}
PRECISIONS = pytest.mark.parametrize("precision", ["tf32", "fp16", "bf16"])
#: Of each row.
RANDOM_PROBLEMS = 100


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the rows run on compute capability 9.0")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)


def served_problem(kernel: Col2imSm90, generator: random.Random) -> dict[str, Any]:
    """A random problem that the row serves, for ``fused_against_fp64``."""
    axes = generator.choice((2, 2, 3))
    while True:
        drawn = []
        for _ in range(axes):
            taps = generator.choice((1, 2, 3, 3, 4, 5))
            dilation = generator.choice((1, 1, 1, 2, 3))
            stride = generator.choice((1, 2, 2, 3, 4))
            extent = generator.randint(1, 40 if axes == 2 else 9)
            extra = generator.randint(0, max(stride, dilation) - 1)
            drawn.append((extent, taps, stride, generator.randint(0, taps // 2), extra, dilation))
        extent, taps, stride, padding, extra, dilation = map(list, zip(*drawn, strict=True))
        groups = generator.choice((1, 2, 3))
        most = kernel.row.columns // math.prod(taps) // groups
        reach = math.prod(
            d * (t - 1) // s + 2 for t, s, d in zip(taps, stride, dilation, strict=True)
        )
        if most and reach <= kernel.row.positions and all(meets_outputs(*each) for each in drawn):
            break
    out = groups * generator.randint(1, most)
    case = {
        "batch": generator.randint(1, 5),
        "channels": 8 * generator.choice((1, 3, 4, 8, 13, 33)),
        "out": out,
        "groups": generator.choice((None, None, groups)),
        "spatial": extent,
        "kernel": taps,
        "stride": stride,
        "padding": padding,
        "output_padding": extra,
        "dilation": dilation,
        "layout": "nhwc",
        "weight_layout": generator.choice(("nchw", "nhwc")),
        "bias": generator.random() < 0.7,
        "activation": generator.choice(list(ACTIVATIONS)),
        "order": generator.choice(ORDERS),
        "draw": generator.choice((torch.randn, torch.rand)),
        "offset": generator.choice((0.0, 0.0, 300.0)) if kernel.precision == "tf32" else 0.0,
        "saves": generator.random() < 0.3,
    }
    values = out * math.prod(output_extent(*axis) for axis in drawn)
    if values // groups < FEWEST_NORMALISED_VALUES:
        case["groups"] = None
    return case


@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_random_problems(kernel, force):
    force(kernel.name)
    generator = random.Random(kernel.name)
    for seed in range(RANDOM_PROBLEMS):
        torch.manual_seed(seed)
        case = served_problem(kernel, generator)
        assert fused_against_fp64(case, DTYPES[kernel.precision], kernel.precision), case


def layer(precision: str, **changes):
    """(input, weight, bias) of a keypoint head's last layer, changed."""
    sizes = {"batch": 3, "channels": 136, "out": 17, "spatial": (14, 14), "kernel": 4, **changes}
    torch.manual_seed(0)
    dtype, channels, out, kernel = (
        DTYPES[precision],
        *(sizes[each] for each in ("channels", "out", "kernel")),
    )
    x = torch.rand(sizes["batch"], channels, *sizes["spatial"], device="cuda").to(dtype)
    weight = torch.randn(channels, out, kernel, kernel, device="cuda") / (channels * kernel) ** 0.5
    bias = torch.randn(out, device="cuda").to(dtype)
    return LAYOUTS["nhwc"](x), weight.to(dtype), bias


def run(x, weight, bias, precision: str) -> torch.Tensor:
    poison()
    own = precision if x.dtype is torch.float32 else None
    with torch.no_grad():
        return conv_transpose_act_norm(x, weight, bias, stride=2, padding=1, precision=own)


def against_fp64(actual: torch.Tensor, tensors, precision: str) -> None:
    def plain(x, weight, bias):
        return F.conv_transpose2d(x, weight, bias, stride=2, padding=1)

    exact = plain(*(each.double() for each in tensors))
    assert relative_error(actual, exact) <= limit(plain, tensors, exact, precision)


@PRECISIONS
@pytest.mark.parametrize(
    "weights", ["contiguous", "channels_last", "strided", "unaligned", "apart", "expanded"]
)
@pytest.mark.parametrize("out", [17, 3, 5])
def test_weights_as_they_lie(out, weights, precision, force):
    force("col2im_sm90")
    x, weight, bias = layer(precision, out=out)
    if weights == "channels_last":
        weight = weight.contiguous(memory_format=torch.channels_last)
    elif weights == "strided":
        weight = weight.permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0)
    elif weights == "unaligned":
        weight = torch.cat([weight.new_zeros(1), weight.flatten()])[1:].view(weight.shape)
    elif weights == "apart":  # lines of each input channel are longer than what is read of them
        weight = torch.cat([weight, weight], 1)[:, :out]
    elif weights == "expanded":
        weight = weight[:, :1].expand(-1, out, -1, -1)
    against_fp64(run(x, weight, bias, precision), (x, weight, bias), precision)


@PRECISIONS
@pytest.mark.parametrize("width", [120, 300])
def test_lines_longer_than_what_is_staged(width, precision, force):
    """A line of a tile's outputs has up to 2,000 pixels of 17 channels, 65 kB of 16 bits; 24 kB are
    staged at a time."""
    force("col2im_sm90")
    torch.manual_seed(0)
    x = torch.rand(2, 136, 2, width, device="cuda").to(DTYPES[precision])
    weight = (torch.randn(136, 17, 1, 16, device="cuda") / 12).to(x.dtype)
    bias = torch.randn(17, device="cuda").to(x.dtype)

    def plain(x, weight, bias):
        return F.conv_transpose2d(x, weight, bias, stride=(1, 16))

    poison()
    own = precision if x.dtype is torch.float32 else None
    x = LAYOUTS["nhwc"](x)
    with torch.no_grad():
        actual = conv_transpose_act_norm(x, weight, bias, stride=(1, 16), precision=own)
    tensors = x, weight, bias
    exact = plain(*(each.double() for each in tensors))
    assert relative_error(actual, exact) <= limit(plain, tensors, exact, precision)


@PRECISIONS
def test_the_same_bits_each_time_and_in_any_batch(precision, force):
    force("col2im_sm90")
    x, weight, bias = layer(precision, batch=7)
    whole = run(x, weight, bias, precision)
    assert torch.equal(whole, run(x, weight, bias, precision))
    assert torch.equal(whole[2:3], run(x[2:3], weight, bias, precision))
