"""Transposed convolutions of any stride by lists of taps on the GPU, against fp64, relative to
eager's error."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from gpu_checks import (
    FEWEST_STRICT_VALUES,
    bound,
    fused_against_fp64,
    poison,
    random_problem,
    round_to_tf32,
)
from reference import CONVOLUTIONS, relative_error
from test_opinfo import SampleInput, double_tensors, is_tensor, op_info

import fusedconv
from fusedconv.benchmark import DTYPES
from fusedconv.functional import conv_transpose_act_norm
from fusedconv.kernels.cuda.taps import TapsSm80
from fusedconv.kernels.cuda.taps_sm90 import TapsSm90
from fusedconv.registry import registry

pytestmark = pytest.mark.gpu

KERNELS = [kernel for kernel in registry().kernels() if isinstance(kernel, (TapsSm80, TapsSm90))]
names = {"ids": lambda kernel: kernel.name}
#: Of each row.
RANDOM_PROBLEMS = 40

#: A product of few terms as three TF32 products has 22 bits.
FEW_STRICT_PRODUCTS = 3e-7


@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_random_problems(kernel, only):
    only(kernel)
    generator = random.Random(kernel.name)
    served = 0
    while served < RANDOM_PROBLEMS:
        case = random_problem(kernel.precision, generator)
        if kernel.precision == "fp32" and case["batch"] * case["values"] < FEWEST_STRICT_VALUES:
            continue
        torch.manual_seed(served)
        # Sums of few products in strict fp32 are refused; other problems follow.
        served += fused_against_fp64(case, DTYPES[kernel.precision], kernel.precision)


def of(**changes: Any) -> dict[str, Any]:
    """A layer of U-Nets, changed."""
    return {
        "batch": 2,
        "channels": 24,
        "out": 20,
        "groups": None,
        "spatial": [9, 13],
        "kernel": [2, 2],
        "stride": [2, 2],
        "padding": [0, 0],
        "dilation": [1, 1],
        "bias": True,
        "activation": "gelu",
        "draw": torch.rand,
        **changes,
    }


CASES = {
    "depthwise": of(channels=33, out=33, conv_groups=33, kernel=[4, 4], padding=[1, 1]),
    "channel multiplier": of(channels=8, out=24, conv_groups=8, kernel=[4, 4], padding=[1, 1]),
    "phases without taps": of(kernel=[2, 1], stride=[3, 4], output_padding=[2, 3]),
    "dilation with stride": of(kernel=[3, 3], dilation=[2, 3], padding=[1, 2]),
    "dilation that the stride divides": of(kernel=[3, 3], stride=[2, 4], dilation=[2, 8]),
    "output padding": of(kernel=[3, 3], padding=[1, 1], output_padding=[1, 1]),
    "padding beyond the filter": of(kernel=[2, 3], padding=[4, 5]),
    "wide taps": of(spatial=[1, 300], kernel=[1, 3], stride=[1, 1], dilation=[1, 400]),
    "patches": of(kernel=[4, 4], stride=[4, 4], out=70),
    "one line": of(spatial=[40], kernel=[16], stride=[8], padding=[4], dilation=[1]),
    "volumes": of(
        spatial=[3, 4, 5],
        kernel=[3, 3, 3],
        stride=[2, 2, 2],
        padding=[1, 1, 1],
        output_padding=[1, 1, 1],
        dilation=[1, 1, 1],
    ),
    "few channels": of(channels=3, out=16, kernel=[3, 3], padding=[1, 1], groups=4),
    "large mean": of(groups=4, offset=1000.0, activation=None, order="norm_act"),
    "instances": of(groups=20, kernel=[3, 3]),
    "one group": of(groups=1, batch=1),
    "many channels": of(channels=513, out=129, spatial=[3, 3], kernel=[4, 4], padding=[1, 1]),
}


@pytest.mark.parametrize("layout", ["nchw", "nhwc", "strided"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_cases(kernel, case, layout, only):
    only(kernel)
    sizes = {**CASES[case], "layout": layout}
    if "offset" in sizes and DTYPES[kernel.precision].itemsize == 2:
        sizes["offset"] = 0.0
    served = fused_against_fp64(sizes, DTYPES[kernel.precision], kernel.precision)
    few = ("depthwise", "channel multiplier", "few channels")
    if isinstance(kernel, TapsSm80):
        assert served == (kernel.precision != "fp32" or case not in few)


@pytest.mark.parametrize("kernel", KERNELS, **names)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_same_bits_alone_in_a_batch_and_each_time(kernel, layout, only):
    only(kernel)
    dtype = DTYPES[kernel.precision]
    memory = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    x = torch.rand(9, 40, 19, 24, device="cuda").to(dtype).contiguous(memory_format=memory)
    weight = (torch.randn(40, 36, 4, 4, device="cuda") * 0.05).to(dtype)
    scale, shift = (torch.randn(36, device="cuda").to(dtype) for _ in range(2))

    def run(x):
        poison()
        return conv_transpose_act_norm(
            x,
            weight,
            None,
            2,
            1,
            activation="silu",
            num_groups=6,
            norm_weight=scale,
            norm_bias=shift,
            precision=kernel.precision if dtype is torch.float32 else None,
        )

    together = run(x)
    for _ in range(20):
        assert torch.equal(run(x), together)
    assert torch.equal(run(x[3:4]), together[3:4])


@pytest.mark.parametrize("axes", CONVOLUTIONS)
def test_an_empty_batch(axes):
    x = torch.rand(0, 8, *(5,) * axes, device="cuda")
    weight = torch.rand(8, 4, *(2,) * axes, device="cuda")
    result = conv_transpose_act_norm(x, weight, None, 2, activation="relu", num_groups=2)
    assert result.shape == (0, 4, *(10,) * axes)


# ---- torch's own samples -------------------------------------------------------------------------


@pytest.mark.parametrize("axes", CONVOLUTIONS)
@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_samples_of_torch(kernel, axes, only):
    only(kernel)
    dtype, torchs = DTYPES[kernel.precision], CONVOLUTIONS[axes]

    def rounded(value: Any) -> Any:
        return round_to_tf32(value).double() if is_tensor(value) else value

    def run(function, sample: SampleInput) -> torch.Tensor:
        return function(sample.input, *sample.args, **sample.kwargs)

    served = 0
    for dense in op_info(f"nn.functional.conv_transpose{axes}d").sample_inputs("cuda", dtype):
        for sample in (dense, dense.noncontiguous()):
            poison()
            try:
                actual = run(conv_transpose_act_norm, sample)
            except fusedconv.NoKernelError:
                # Sums of few products in strict fp32; some rooms lack more.
                assert kernel.precision == "fp32" or not isinstance(kernel, TapsSm80)
                continue
            exact = run(torchs, sample.transform(double_tensors))
            expected = run(torchs, sample)
            assert actual.dtype == expected.dtype
            errors = [relative_error(expected, exact)]
            if kernel.precision == "tf32":
                errors.append(relative_error(run(torchs, sample.transform(rounded)), exact))
            limit = bound(max(errors), kernel.precision)
            if kernel.precision == "fp32":
                limit += FEW_STRICT_PRODUCTS
            assert relative_error(actual, exact) <= limit, sample
            served += 1
    if isinstance(kernel, TapsSm80):
        assert served >= (4 if kernel.precision == "fp32" else 20)
