"""Small transposed convolutions in one launch of clusters on the GPU, against fp64, relative to
eager's error."""

from __future__ import annotations

import random

import pytest
import torch
from gpu_checks import (
    FEWEST_NORMALISED_VALUES,
    fused_against_fp64,
    limit,
    meets_outputs,
    output_extent,
    poison,
    random_problem,
    round_to_tf32,
)
from reference import CONVOLUTIONS, LAYOUTS, relative_error
from torch.nn import functional as F

from fusedconv.benchmark import DTYPES
from fusedconv.functional import conv_transpose_act_norm
from fusedconv.kernels.cuda.clusters_sm90 import ClustersSm90
from fusedconv.registry import registry

pytestmark = pytest.mark.gpu

KERNELS = [kernel for kernel in registry().kernels() if isinstance(kernel, ClustersSm90)]
names = {"ids": lambda kernel: kernel.name}
PRECISIONS = pytest.mark.parametrize("precision", ["tf32", "fp32", "fp16", "bf16"])
#: Of each row.
RANDOM_PROBLEMS = 150
#: What splitting operands in two costs whatever the sum; eager's error is less in a short one.
SPLITTING = 1e-7


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the rows run on compute capability 9.0")


@pytest.fixture
def eager_in(monkeypatch):
    """Sets the mode that eager computes float32 in."""

    def set_mode(precision: str) -> None:
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", precision != "fp32")

    return set_mode


@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_random_problems(kernel, force, eager_in):
    force(kernel.name)
    eager_in(kernel.precision)
    generator = random.Random(kernel.name)
    served = drawn = 0
    while served < RANDOM_PROBLEMS:
        case = random_problem(kernel.precision, generator)
        axes = zip(
            case["spatial"], case["kernel"], case["stride"], case["padding"],
            case["output_padding"], case["dilation"], strict=True,
        )  # fmt: skip
        axes = list(axes)
        if case["values"] <= 0 or not all(meets_outputs(*axis) for axis in axes):
            continue
        case |= {"out": case["out"] // case["conv_groups"], "conv_groups": 1}
        case["channels"] = generator.choice((1, 3, 16, 50, 64, 200))
        values = case["out"]
        for axis in axes:
            values *= output_extent(*axis)
        if values // (case["groups"] or 1) < FEWEST_NORMALISED_VALUES:
            case["groups"] = None
        torch.manual_seed(drawn)
        drawn += 1
        floor = SPLITTING if kernel.precision == "fp32" else 0.0
        served += fused_against_fp64(case, DTYPES[kernel.precision], kernel.precision, floor=floor)
        assert drawn <= 3 * RANDOM_PROBLEMS, f"{served} of {drawn} problems are served"


def layer(precision: str, layout: str, **changes):
    """(input, weight, bias, norm weight, norm bias) of a small layer, changed."""
    sizes = {"batch": 3, "channels": 72, "out": 48, "spatial": (14, 14), "kernel": 3, **changes}
    torch.manual_seed(0)
    dtype = DTYPES[precision]
    channels, out, kernel = sizes["channels"], sizes["out"], sizes["kernel"]
    x = torch.rand(sizes["batch"], channels, *sizes["spatial"], device="cuda").to(dtype)
    weight = torch.randn(channels, out, kernel, kernel, device="cuda") / (channels * kernel) ** 0.5
    bias, scale, shift = (torch.randn(out, device="cuda").to(dtype) for _ in range(3))
    return LAYOUTS[layout](x), weight.to(dtype), bias, scale, shift


@PRECISIONS
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("weights", ["contiguous", "channels_last", "strided", "unaligned"])
@pytest.mark.parametrize("out", [48, 20])
def test_weights_as_they_lie(out, weights, layout, precision, force, eager_in):
    force("clusters_sm90")
    eager_in(precision)
    x, weight, *rest = layer(precision, layout, out=out)
    if weights == "channels_last":
        weight = weight.contiguous(memory_format=torch.channels_last)
    elif weights == "strided":
        weight = weight.permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0)
    elif weights == "unaligned":
        weight = torch.cat([weight.flatten()[:1], weight.flatten()])[1:].view(weight.shape)

    def plain(x, weight, bias, scale, shift):
        return F.group_norm(F.gelu(CONVOLUTIONS[2](x, weight, bias, 1, 1)), 4, scale, shift)

    tensors = (x, weight, *rest)
    exact = plain(*(tensor.double() for tensor in tensors))
    poison()
    with torch.no_grad():
        actual = conv_transpose_act_norm(
            *tensors[:3], 1, 1, activation="gelu", num_groups=4, norm_weight=rest[1],
            norm_bias=rest[2],
        )  # fmt: skip
    assert relative_error(actual, exact) <= limit(plain, tensors, exact, precision)


@PRECISIONS
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_samples_have_the_same_bits_alone_and_in_a_batch(layout, precision, force, eager_in):
    force("clusters_sm90")
    eager_in(precision)
    x, weight, bias, scale, shift = layer(precision, layout, channels=300)
    for groups in (None, 4):
        keywords = dict(stride=1, padding=1, activation="gelu", num_groups=groups)
        if groups:
            keywords |= dict(norm_weight=scale, norm_bias=shift)
        with torch.no_grad():
            whole = conv_transpose_act_norm(x, weight, bias, **keywords)
            for _ in range(50):
                poison()
                assert torch.equal(whole, conv_transpose_act_norm(x, weight, bias, **keywords))
            for i in range(len(x)):
                alone = conv_transpose_act_norm(x[i : i + 1], weight, bias, **keywords)
                assert torch.equal(alone[0], whole[i])


@PRECISIONS
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("given", [(True, True), (True, False), (False, True)], ids=str)
def test_an_affine_map(given, layout, precision, force, eager_in):
    force("clusters_sm90")
    eager_in(precision)
    x, weight, bias, *_ = layer(precision, layout)
    scale, shift = (torch.randn(48, device="cuda") for _ in given)

    def plain(x, weight, bias, scale, shift):
        y = CONVOLUTIONS[2](x, weight, bias, 1, 1)
        y = y * scale[:, None, None] if given[0] else y
        return F.relu(y + shift[:, None, None] if given[1] else y)

    tensors = (x, weight, bias, scale, shift)
    exact = plain(*(each.double() for each in tensors))
    poison()
    with torch.no_grad():
        actual = conv_transpose_act_norm(
            x, weight, bias, 1, 1, activation="relu", order="norm_act", norm="affine",
            norm_weight=scale if given[0] else None, norm_bias=shift if given[1] else None,
        )  # fmt: skip
    assert relative_error(actual, exact) <= limit(plain, tensors, exact, precision)


@pytest.mark.parametrize("precision", ["tf32", "fp32"])
def test_a_large_mean(precision, force, eager_in):
    force("clusters_sm90")
    eager_in(precision)
    x, weight, bias, scale, shift = layer(precision, "nchw")
    bias = bias + 1e4
    with torch.no_grad():
        actual = conv_transpose_act_norm(
            x, weight, bias, 1, 1, num_groups=1, norm_weight=scale, norm_bias=shift
        )
        tensors = [each.double() for each in (x, weight, bias, scale, shift)]
        if precision == "tf32":
            tensors[:2] = [round_to_tf32(each).double() for each in (x, weight)]
        y = CONVOLUTIONS[2](*tensors[:3], 1, 1)
        exact = F.group_norm(y, 1, *tensors[3:])
    # A sum near 1e4 is rounded by 5e-4, whatever computes it; a deviation is about 6.
    assert relative_error(actual, exact) <= 2e-4
