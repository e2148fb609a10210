"""Transposed convolutions along one axis by lines as they lie on the GPU, in 16 bits and in TF32,
against fp64, relative to eager's error."""

from __future__ import annotations

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
from reference import ACTIVATIONS, ORDERS, relative_error
from torch.nn import functional as F

from fusedconv.benchmark import DTYPES
from fusedconv.functional import conv_transpose_act_norm
from fusedconv.kernels.cuda.line_row import LineRow
from fusedconv.kernels.cuda.streams_sm90 import StreamsSm90
from fusedconv.registry import registry

pytestmark = pytest.mark.gpu

KERNELS = [kernel for kernel in registry().kernels() if isinstance(kernel, LineRow)]
PROVIDERS = {kernel.precision: kernel.provider for kernel in KERNELS}
names = {"ids": lambda kernel: kernel.name}
PRECISIONS = pytest.mark.parametrize("precision", sorted(PROVIDERS))
#: Of each row.
RANDOM_PROBLEMS = 40


@pytest.fixture(autouse=True)
def on_hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the rows run on compute capability 9.0")


def served_problem(row: LineRow, generator: random.Random) -> dict[str, Any]:
    """A random problem that a row serves, for ``fused_against_fp64``."""
    streams = isinstance(row, StreamsSm90)
    strides = (2, 2, 3, 4, 5, 6, 8, 10, 16, 64) if streams else (2, 2, 4, 4, 8, 16)
    while True:
        stride = generator.choice(strides)
        kernel = generator.randint(stride + 1, 2 * stride)
        extent = 8 * generator.choice((1, 2, 7, 14, 15, 16, 29, 30, 31, 60, 100))
        if streams:
            extent = generator.choice((extent, extent + 4, 4))
        axis = (
            extent,
            kernel,
            stride,
            generator.randint(0, generator.choice((kernel, kernel, 10 * stride))),
            generator.randrange(stride),
            1,
        )
        if output_extent(*axis) > 0 and meets_outputs(*axis):
            break
    out = generator.choice((1, 3, 8, 31, 32, 33, 64, 96, 100, 130))
    groups = generator.choice([None, None] + [each for each in (1, 3, 4) if out % each == 0])
    if groups and out // groups * output_extent(*axis) < FEWEST_NORMALISED_VALUES:
        groups = None
    return {
        "batch": generator.randint(1, 5),
        "channels": generator.choice((1, 3, 8, 40, 63, 64, 65, 128, 200, 300)),
        "out": out,
        "groups": groups,
        "spatial": [extent],
        "kernel": [kernel],
        "stride": [stride],
        "padding": [axis[3]],
        "output_padding": [axis[4]],
        "dilation": [1],
        "bias": generator.random() < 0.7,
        "activation": generator.choice(list(ACTIVATIONS)),
        "order": generator.choice(ORDERS),
        "draw": generator.choice((torch.randn, torch.rand)),
        "saves": generator.random() < 0.3,
    }


@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_random_problems(kernel, force):
    force(kernel.name)
    generator = random.Random(kernel.name)
    for seed in range(RANDOM_PROBLEMS):
        torch.manual_seed(seed)
        case = served_problem(kernel, generator)
        assert fused_against_fp64(case, DTYPES[kernel.precision], kernel.precision), case


def layer(precision: str, batch=3, channels=136, out=40, length=1000, taps=8):
    """(input, weight, bias) of a vocoder's upsampling by half as many as ``taps``."""
    torch.manual_seed(0)
    dtype = DTYPES[precision]
    x = torch.rand(batch, channels, length, device="cuda").to(dtype)
    weight = torch.randn(channels, out, taps, device="cuda") / (2 * channels) ** 0.5
    return x, weight.to(dtype), torch.randn(out, device="cuda").to(dtype)


def run(x, weight, bias) -> torch.Tensor:
    poison()
    stride = weight.shape[2] // 2
    with torch.no_grad():
        return conv_transpose_act_norm(x, weight, bias, stride=stride, padding=stride // 2)


def against_fp64(actual: torch.Tensor, tensors, precision: str) -> None:
    def plain(x, weight, bias):
        stride = weight.shape[2] // 2
        return F.conv_transpose1d(x, weight, bias, stride=stride, padding=stride // 2)

    exact = plain(*(each.double() for each in tensors))
    assert relative_error(actual, exact) <= limit(plain, tensors, exact, precision)


@PRECISIONS
@pytest.mark.parametrize("weights", ["contiguous", "transposed", "unaligned", "expanded"])
@pytest.mark.parametrize("taps", [4, 8, 16, 32])
def test_weights(taps, weights, precision, force):
    force(PROVIDERS[precision])
    x, weight, bias = layer(precision, taps=taps)
    if weights == "transposed":
        weight = weight.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    elif weights == "unaligned":
        weight = torch.cat([weight.new_zeros(1), weight.flatten()])[1:].view(weight.shape)
    elif weights == "expanded":
        weight = weight[:, :1].expand(-1, weight.shape[1], -1)
    against_fp64(run(x, weight, bias), (x, weight, bias), precision)


@PRECISIONS
@pytest.mark.parametrize(
    ("channels", "out", "taps"), [(640, 64, 16), (520, 200, 4), (256, 128, 16), (448, 32, 4)]
)
def test_large_filters(channels, out, taps, precision, force):
    """Whose rows consumers share, or have tiles of their own beside."""
    force(PROVIDERS[precision])
    tensors = layer(precision, channels=channels, out=out, taps=taps, length=2000)
    against_fp64(run(*tensors), tensors, precision)


@PRECISIONS
def test_more_channels_than_blocks(precision, force):
    """Of the filter more groups than there are multiprocessors."""
    force(PROVIDERS[precision])
    tensors = layer(precision, channels=16, out=2200, taps=32, length=96)
    against_fp64(run(*tensors), tensors, precision)


@PRECISIONS
def test_ends_of_lines_are_not_the_next_channels(precision, force):
    """Copies beyond a line's ends bring zeros, and so do channels that are not there."""
    force(PROVIDERS[precision])
    x, weight, bias = layer(precision, channels=70, length=128)
    x[:, :, [0, -1]] = 100.0
    against_fp64(run(x, weight, bias), (x, weight, bias), precision)
    x[1] = torch.nan
    actual = run(x, weight, bias)
    assert actual[1].isnan().all() and not actual[[0, 2]].isnan().any()


@PRECISIONS
@pytest.mark.parametrize(
    ("taps", "padding"), [(4, 0), (4, 1), (4, 3), (8, 2), (16, 4), (16, 5), (32, 8)]
)
def test_a_folded_batch_norm(taps, padding, precision, force):
    """Scale and shift in the epilogue, which change from call to call."""
    force(PROVIDERS[precision])
    x, weight, bias = layer(precision, taps=taps)
    stride = taps // 2
    mean, variance = torch.empty(40, device="cuda"), torch.empty(40, device="cuda")
    for _ in range(6):
        mean.uniform_(-3.0, 3.0)
        variance.uniform_(0.2, 4.0)
        poison()
        with torch.no_grad():
            actual = conv_transpose_act_norm(
                x, weight, bias, stride, padding, activation="silu", order="norm_act",
                norm="batch", running_mean=mean, running_var=variance,
            )  # fmt: skip

        def plain(x, weight, bias):
            output = F.conv_transpose1d(x, weight, bias, stride, padding)
            wide = x.dtype is torch.double
            own = (mean.double(), variance.double()) if wide else (mean, variance)
            return F.silu(F.batch_norm(output, *own))

        exact = plain(*(each.double() for each in (x, weight, bias)))
        assert relative_error(actual, exact) <= limit(plain, (x, weight, bias), exact, precision)


@PRECISIONS
def test_the_same_bits_each_time_and_in_any_batch(precision, force):
    force(PROVIDERS[precision])
    x, weight, bias = layer(precision, batch=7)
    whole = run(x, weight, bias)
    assert torch.equal(whole, run(x, weight, bias))
    assert torch.equal(whole[2:3], run(x[2:3].clone(), weight, bias))
