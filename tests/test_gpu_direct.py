"""Transposed convolutions of few channels a group on the GPU, against fp64, relative to eager's
error."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from gpu_checks import fused_against_fp64, poison
from problems import explained
from test_gpu_taps import CASES, of, random_problem
from test_steps import KERNELS as STEPS
from test_steps import assert_matches, expected, kernels_of

from fusedconv.benchmark import DTYPES
from fusedconv.functional import conv_transpose_act_norm
from fusedconv.kernels.cuda.direct import Direct
from fusedconv.registry import registry

pytestmark = pytest.mark.gpu

KERNELS = [kernel for kernel in registry().kernels() if isinstance(kernel, Direct)]
names = {"ids": lambda kernel: kernel.name}
#: Of each row.
RANDOM_PROBLEMS = 60
#: With few products eager's error in float32 is a rounding or two, and what a group's statistics
#: are off by is in all of its values.
ONE_ROUNDING = 2.0**-24


def served(case: dict[str, Any], kernel: Direct) -> bool:
    floor = ONE_ROUNDING if kernel.precision == "fp32" else 0.0
    return fused_against_fp64(case, DTYPES[kernel.precision], kernel.precision, floor=floor)


def thin(case: dict[str, Any], generator: random.Random) -> dict[str, Any]:
    """The case with few channels a group."""
    groups = generator.choice((1, 7, 16, 40))
    channels, out = generator.choice(((1, 1), (1, 1), (1, 3), (2, 2), (4, 2), (3, 16)))
    total = groups * out
    norm = generator.choice((1, total)) if case["groups"] else None
    small = case["values"] // (case["out"] or 1) * total < 64
    return {
        **case,
        "channels": groups * channels,
        "out": total,
        "conv_groups": groups,
        "groups": None if small else norm,
    }


@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_random_problems(kernel, only):
    only(kernel)
    generator = random.Random(kernel.name)
    for number in range(RANDOM_PROBLEMS):
        case = thin(random_problem(kernel.precision, generator), generator)
        torch.manual_seed(number)
        assert served(case, kernel)


COMMON = {
    f"{'x'.join(map(str, spatial))} k{size} s{stride} p{padding} +{extra}": of(
        channels=16,
        out=16,
        conv_groups=16,
        spatial=spatial,
        kernel=[size] * len(spatial),
        stride=[stride] * len(spatial),
        padding=[padding] * len(spatial),
        output_padding=[extra] * len(spatial),
        dilation=[1] * len(spatial),
    )
    for spatial in ([200], [20, 36], [17, 23], [5, 8, 12])
    for size, stride, padding, extra in (
        (3, 1, 1, 0),
        (5, 1, 2, 0),
        (7, 1, 3, 0),
        (2, 2, 0, 0),
        (3, 2, 0, 0),
        (3, 2, 1, 0),
        (3, 2, 1, 1),
        (4, 2, 1, 0),
        (4, 2, 2, 0),
        (5, 2, 2, 1),
        (6, 2, 2, 0),
        (7, 2, 3, 1),
        (4, 4, 0, 0),
        (16, 8, 4, 0),
    )
}


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("case", COMMON)
@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_common_filters(kernel, case, layout, only):
    only(kernel)
    sizes = {**COMMON[case], "layout": layout, "groups": 4}
    assert served(sizes, kernel)


@pytest.mark.parametrize("layout", ["nchw", "strided"])
@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("spatial", [(1, 4), (3, 4), (5, 8), (17, 36), (64, 64)])
@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_doubled_planes(kernel, spatial, activation, layout, only):
    only(kernel)
    sizes = of(
        batch=3,
        channels=21,
        out=21,
        conv_groups=21,
        spatial=list(spatial),
        kernel=[4, 4],
        stride=[2, 2],
        padding=[1, 1],
        dilation=[1, 1],
        groups=None,
        activation=activation,
        draw=torch.rand,
        layout=layout,
    )
    for bias in (False, True):
        assert served({**sizes, "bias": bias}, kernel)


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_moments_of_values_that_are_mostly_zero(kernel, layout, activation, only):
    """Five sixths of the outputs have no taps: a chain of equal values rounds the same way each
    time, and the variance would be off by a millionth."""
    only(kernel)
    for seed in range(4):
        torch.manual_seed(seed)
        sizes = of(
            channels=3,
            out=66,
            groups=2,
            spatial=[7, 32],
            kernel=[5, 8],
            stride=[4, 3],
            padding=[4, 3],
            output_padding=[1, 2],
            dilation=[2, 3],
            bias=False,
            activation=activation,
            layout=layout,
        )
        assert served(sizes, kernel)


THIN = ("depthwise", "channel multiplier", "few channels")


@pytest.mark.parametrize("layout", ["nchw", "nhwc", "strided"])
@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("case", THIN)
@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_cases(kernel, case, layout, saves, only):
    only(kernel)
    sizes = {**CASES[case], "layout": layout, "saves": saves}
    assert served(sizes, kernel)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_a_large_mean_costs_no_precision(layout, only):
    kernel = next(k for k in KERNELS if k.precision == "fp32")
    only(kernel)
    sizes = of(channels=32, out=32, conv_groups=32, kernel=[4, 4], padding=[1, 1], offset=1000.0)
    changes = dict(layout=layout, groups=32, activation=None, order="norm_act")
    assert served({**sizes, **changes}, kernel)


@pytest.mark.parametrize("kernel", KERNELS, **names)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_same_bits_alone_in_a_batch_and_each_time(kernel, layout, only):
    only(kernel)
    dtype = DTYPES[kernel.precision]
    memory = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    x = torch.rand(9, 40, 19, 24, device="cuda").to(dtype).contiguous(memory_format=memory)
    weight = (torch.randn(40, 1, 3, 3, device="cuda") * 0.3).to(dtype)
    scale, shift = (torch.randn(40, device="cuda").to(dtype) for _ in range(2))

    def run(x):
        poison()
        return conv_transpose_act_norm(
            x,
            weight,
            None,
            2,
            1,
            groups=40,
            activation="silu",
            num_groups=8,
            norm_weight=scale,
            norm_bias=shift,
            precision="fp32" if dtype is torch.float32 else None,
        )

    together = run(x)
    for _ in range(20):
        assert torch.equal(run(x), together)
    assert torch.equal(run(x[3:4]), together[3:4])


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("num_groups", [None, 8])
def test_steps_are_what_runs(num_groups, gradients, layout, only):
    kernel = KERNELS[0]
    only(kernel)
    memory = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    x = torch.rand(2, 40, 19, 24, device="cuda").contiguous(memory_format=memory)
    weight = torch.randn(40, 1, 3, 3, device="cuda", requires_grad=gradients)

    def call() -> torch.Tensor:
        return conv_transpose_act_norm(
            x, weight, None, 2, 1, groups=40, activation="gelu", num_groups=num_groups,
            precision="fp32",
        )  # fmt: skip

    explanation = explained(call, gradients=gradients)[0]
    assert explanation.kernel == kernel.name
    with torch.set_grad_enabled(gradients):
        started = kernels_of(call)
    assert_matches(started, expected(explanation.steps, STEPS))
