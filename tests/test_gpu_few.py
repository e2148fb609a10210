"""Transposed convolutions of few input channels on the GPU, against fp64, relative to eager's
error."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from gpu_checks import (
    FEWEST_NORMALISED_VALUES,
    bound,
    fused_against_fp64,
    output_extent,
    poison,
)
from problems import explained
from reference import ACTIVATIONS, ORDERS, relative_error
from reference import conv_transpose_act_norm as composition
from test_gpu_taps import of
from test_steps import KERNELS as STEPS
from test_steps import assert_matches, expected, kernels_of

import fusedconv
from fusedconv.benchmark import DTYPES
from fusedconv.functional import conv_transpose_act_norm
from fusedconv.kernels.cuda import few
from fusedconv.kernels.cuda.few import Few
from fusedconv.ops import ConvCall, conv_plan
from fusedconv.registry import registry

pytestmark = pytest.mark.gpu

KERNELS = [kernel for kernel in registry().kernels() if isinstance(kernel, Few)]
names = {"ids": lambda kernel: kernel.name}
#: Of each row.
RANDOM_PROBLEMS = 80
SIZES = {
    "channels": 3,
    "out": 16,
    "spatial": [5, 9, 21],
    "kernel": [3, 3, 3],
    "stride": [2, 2, 2],
    "padding": [1, 1, 1],
    "dilation": [1, 1, 1],
    "activation": "silu",
    "groups": 4,
}


def served(case: dict[str, Any], kernel: Few) -> bool:
    return fused_against_fp64(case, DTYPES[kernel.precision], kernel.precision)


def drawn(kernel: Few, generator: random.Random) -> dict[str, Any]:
    axes = generator.choice((2, 3))
    padding = [generator.choice((1, 1, 1, 3)) for _ in range(axes)]
    largest = {2: 90, 3: 18}[axes]
    extent = [generator.randint(1 if each == 1 else 4, largest) for each in padding]
    extra = [generator.randint(0, 1) for _ in range(axes)]
    groups = generator.choice((1, 2, 5))
    out = groups * generator.choice((1, 3, 8, 16))
    outputs = [
        output_extent(n, 3, 2, p, more, 1)
        for n, p, more in zip(extent, padding, extra, strict=True)
    ]
    assert min(outputs) > 0
    if math.prod(outputs) * out // groups < FEWEST_NORMALISED_VALUES:
        groups = 0
    return of(
        batch=generator.randint(1, 3),
        channels=generator.randint(1, 4),
        out=out,
        groups=generator.choice((None, groups or None, groups or None)),
        spatial=extent,
        kernel=[3] * axes,
        stride=[2] * axes,
        padding=padding,
        output_padding=extra,
        dilation=[1] * axes,
        layout=generator.choice(("nchw", "nchw", "strided")),
        bias=generator.random() < 0.7,
        activation=generator.choice(list(ACTIVATIONS)),
        order=generator.choice(ORDERS),
        draw=generator.choice((torch.randn, torch.rand)),
        offset=generator.choice((0.0, 0.0, 300.0)) if kernel.precision == "tf32" else 0.0,
        saves=generator.random() < 0.4,
    )


@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_random_problems(kernel, force):
    force(kernel.name)
    generator = random.Random(kernel.name)
    for number in range(RANDOM_PROBLEMS):
        torch.manual_seed(number)
        assert served(drawn(kernel, generator), kernel)


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(spatial=[16, 32, 32], batch=5),
        dict(spatial=[40, 7, 8]),  # several blocks along depth
        dict(spatial=[3, 4, 500]),  # lines of many tiles, one of which is a block's
        dict(spatial=[2, 200, 17], out=40),  # several blocks along height and of channels
        dict(groups=16),
        dict(groups=None, activation="gelu"),
        dict(groups=None, activation=None),
    ],
    ids=str,
)
@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_sizes(kernel, changes, saves, force):
    force(kernel.name)
    assert served({**of(**SIZES), **changes, "saves": saves}, kernel)


def test_a_large_mean_costs_no_precision(force):
    kernel = next(k for k in KERNELS if k.precision == "tf32")
    force(kernel.name)
    changes = dict(activation=None, order="norm_act", offset=1000.0, spatial=[16, 32, 32])
    assert served({**of(**SIZES), **changes}, kernel)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_gradients_read_what_is_saved(kernel, order, force):
    force(kernel.name)
    dtype = DTYPES[kernel.precision]
    shapes = [(2, 3, 6, 10, 21), (3, 16, 3, 3, 3), (16,), (16,), (16,)]
    leaves = [torch.rand(shape, device="cuda").sub(0.4).to(dtype) for shape in shapes]
    grad = torch.randn(2, 16, 11, 19, 41, device="cuda").to(dtype)

    def gradients(function, tensors, **keywords):
        tensors = [each.detach().requires_grad_() for each in tensors]
        x, weight, bias, scale, shift = tensors
        output = function(
            x, weight, bias, stride=2, padding=1, activation="silu", order=order, num_groups=4,
            norm_weight=scale, norm_bias=shift, **keywords,
        )  # fmt: skip
        return torch.autograd.grad(output, tensors, grad.to(output.dtype))

    explicit = "tf32" if dtype is torch.float32 else None
    actual = gradients(conv_transpose_act_norm, leaves, precision=explicit)
    rest = dict(output_padding=0, groups=1, dilation=1)
    reference = gradients(composition, [each.double() for each in leaves], **rest)
    eager = gradients(composition, leaves, **rest)
    for one, other, exact in zip(actual, eager, reference, strict=True):
        # Sums of sixteen values may part by a rounding.
        rounding = {"tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8}[kernel.precision]
        limit = bound(relative_error(other, exact), kernel.precision)
        assert relative_error(one, exact) <= max(limit, rounding)


def example(dtype: torch.dtype, gradients: bool = False) -> Any:
    x = torch.rand(9, 3, 7, 19, 24, device="cuda").to(dtype)
    weight = (torch.randn(3, 40, 3, 3, 3, device="cuda") * 0.3).to(dtype).requires_grad_(gradients)
    scale, shift = (torch.randn(40, device="cuda").to(dtype) for _ in range(2))

    def run(x: torch.Tensor = x, num_groups: int | None = 8) -> torch.Tensor:
        affine = dict(norm_weight=scale, norm_bias=shift) if num_groups else {}
        return conv_transpose_act_norm(
            x, weight, None, 2, 1, activation="silu", num_groups=num_groups, **affine,
            precision="tf32" if dtype is torch.float32 else None,
        )  # fmt: skip

    return x, run


@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_same_bits_alone_in_a_batch_and_each_time(kernel, force):
    force(kernel.name)
    x, run = example(DTYPES[kernel.precision])
    together = run()
    for _ in range(20):
        poison()
        assert torch.equal(run(), together)
    assert torch.equal(run(x[3:4]), together[3:4])


@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_a_batch_in_chunks_has_the_same_bits(kernel, force, monkeypatch):
    force(kernel.name)
    _, run = example(DTYPES[kernel.precision])
    whole = run()
    monkeypatch.setattr(few, "CHUNK_BYTES", 1)
    fusedconv.clear_cache()
    explanation = explained(run)[0]
    assert "for each 1 samples" in explanation.steps[0]
    assert torch.equal(run(), whole)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_statistics_are_those_of_what_the_backward_pass_reads(precision, recompute, force):
    force(f"few_{'f16' if precision == 'fp16' else precision}")
    dtype = DTYPES[precision]
    x = torch.randn(2, 2, 5, 9, 21, device="cuda").to(dtype)
    # Next to a bias of one, products are lost when the sum is stored.
    weight = (torch.randn(2, 16, 3, 3, 3, device="cuda") * 1e-5).to(dtype)
    call = ConvCall(
        x, weight, torch.ones(16, device="cuda", dtype=dtype), (2,) * 3, (1,) * 3, (0,) * 3,
        (1,) * 3, 1, "identity", "act_norm", 4, None, None, 1e-10, None, None, None, recompute,
    )  # fmt: skip
    plan = conv_plan(call, True)
    _, conv_output, mean, rstd = plan.run(*call.tensors)
    assert (conv_output is None) == recompute
    torch.testing.assert_close(mean, torch.ones_like(mean), rtol=0, atol=0)
    torch.testing.assert_close(rstd, torch.full_like(rstd, 1e5))


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("num_groups", [None, 8])
@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_steps_are_what_runs(kernel, num_groups, gradients, force):
    force(kernel.name)
    _, run = example(DTYPES[kernel.precision], gradients)

    def call() -> torch.Tensor:
        return run(num_groups=num_groups)

    explanation = explained(call, gradients=gradients)[0]
    assert explanation.kernel == kernel.name
    with torch.set_grad_enabled(gradients):
        started = kernels_of(call)
    assert_matches(started, expected(explanation.steps, STEPS))
