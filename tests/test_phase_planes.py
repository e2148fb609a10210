"""Gradients of strided transposed convolutions by planes of their phases: the arithmetic against
torch in float64, what is served, and the steps of plans. No GPU."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest
import torch
from problems import backward_problem, geometry_of, problem
from torch import Tensor

import fusedconv
from fusedconv.device import KNOWN
from fusedconv.kernels.compiled import by_axis
from fusedconv.kernels.cuda.phase_planes import (
    MOST_PHASES,
    compiled_phases,
    holds_all,
    input_convolution,
    of_planes,
)
from fusedconv.problem import ConvTransposeGeometry, ForwardProblem
from fusedconv.registry import registry
from fusedconv.selection import choose
from fusedconv.support import Support

HAS_ROWS = "sm90" in fusedconv.build.get("families", ())
pytestmark = pytest.mark.skipif(
    not HAS_ROWS, reason="fusedconv was built without kernels for compute capability 9.0"
)

H200 = KNOWN[90]
EVERY = slice(None)


def kernel_named(name: str):
    (kernel,) = (kernel for kernel in registry().kernels() if kernel.name == name)
    return kernel


def random_geometry(generator: random.Random, axes: int) -> tuple[dict, tuple[int, ...]]:
    """Arguments that torch admits, and the input's extents."""
    while True:
        stride = [generator.randint(1, 4) for _ in range(axes)]
        if set(stride) == {1}:
            continue
        kernel = [generator.randint(1, 5) for _ in range(axes)]
        dilation = [generator.choice((1, 1, 2, 3)) for _ in range(axes)]
        padding = [generator.randint(0, d * (k - 1)) for d, k in zip(dilation, kernel, strict=True)]
        extra = [generator.randrange(max(s, d)) for s, d in zip(stride, dilation, strict=True)]
        spatial = tuple(generator.randint(1, 6) for _ in range(axes))
        arguments = {
            "stride": tuple(stride),
            "padding": tuple(padding),
            "output_padding": tuple(extra),
            "dilation": tuple(dilation),
        }
        conv = geometry_of(torch.empty(3, 2, *kernel), **arguments)
        if min(conv.output_spatial(spatial)) > 0:
            return {"kernel": kernel, **arguments}, spatial


def planes_of(grad: Tensor, conv: ConvTransposeGeometry, positions: tuple[int, ...]) -> Tensor:
    """[batch, channels, phases, *positions] flattened to channels, index by index."""
    batch, channels, *extents = grad.shape
    result = grad.new_zeros(batch, channels, *conv.stride, *positions)
    for phase in itertools.product(*map(range, conv.stride)):
        for at in itertools.product(*map(range, positions)):
            source = [
                s * q + r - p
                for s, q, r, p in zip(conv.stride, at, phase, conv.padding, strict=True)
            ]
            if all(0 <= i < n for i, n in zip(source, extents, strict=True)):
                result[(EVERY, EVERY, *phase, *at)] = grad[(EVERY, EVERY, *source)]
    return result.reshape(batch, -1, *positions)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_gradients_are_those_of_the_planes(axes):
    generator = random.Random(axes)
    torch.manual_seed(axes)
    operator = getattr(torch.nn.functional, f"conv_transpose{axes}d")
    left_out = partial = 0
    for _ in range({1: 60, 2: 40, 3: 15}[axes]):
        arguments, spatial = random_geometry(generator, axes)
        kernel = arguments.pop("kernel")
        weight = torch.randn(3, 2, *kernel, dtype=torch.float64, requires_grad=True)
        x = torch.randn(2, 3, *spatial, dtype=torch.float64, requires_grad=True)
        output = operator(x, weight, **arguments)
        grad = torch.randn_like(output)
        expected = torch.autograd.grad(output, (x, weight), grad)
        forward = problem(
            batch=2, channels=3, spatial=spatial, conv=geometry_of(weight, **arguments)
        )
        conv = forward.conv
        assert conv is not None
        planes = of_planes(forward)
        assert isinstance(planes, ForwardProblem)
        assert planes.conv is not None
        # Where phases have one tap, all axes are one.
        flat = len(planes.spatial) < axes
        positions = spatial if flat else planes.output_spatial
        extents = (1,) * axes if flat else planes.conv.kernel_size
        split = planes_of(grad, conv, positions)
        assert split.numel() == math.prod(planes.output_shape)
        # The filter of stride 1, by what the kernels read and write.
        sources = compiled_phases(conv)
        assert sources.count == math.prod(conv.stride)
        filter = weight.new_zeros(3, planes.output_channels, *extents)
        seen = []
        for channel in range(planes.output_channels):
            for taps in itertools.product(*map(range, extents)):
                found = sources.source(channel, by_axis(taps, 0))
                if found is None:
                    partial += 1
                    continue
                source = (found[0], *found[1][3 - axes :])
                seen.append(source)
                filter[(EVERY, channel, *taps)] = weight.detach()[(EVERY, *source)]
        # Each of the weight's taps is one of the filter's.
        assert sorted(seen) == sorted(itertools.product(range(2), *map(range, kernel)))
        convolution = input_convolution(forward)
        assert isinstance(convolution, ForwardProblem)
        assert convolution.conv is not None
        assert math.prod(convolution.output_shape) == x.numel()
        backwards = filter.flip([*range(2, 2 + axes)]).transpose(0, 1)
        actual = operator(split, backwards, padding=[size - 1 for size in extents])
        assert convolution.conv.padding == ((0,) if flat else tuple(n - 1 for n in extents))
        torch.testing.assert_close(actual, expected[0])
        filter.requires_grad_()
        (whole,) = torch.autograd.grad(operator(x.detach(), filter), filter, split)
        scattered = torch.zeros_like(weight)
        for channel in range(planes.output_channels):
            for taps in itertools.product(*map(range, extents)):
                found = sources.source(channel, by_axis(taps, 0))
                if found is not None:
                    source = (found[0], *found[1][3 - axes :])
                    scattered[(EVERY, *source)] = whole[(EVERY, channel, *taps)]
        torch.testing.assert_close(scattered, expected[1])
        if holds_all(forward):
            torch.testing.assert_close(split.sum(), grad.sum())
        else:
            left_out += 1
    assert partial
    assert left_out or axes == 3


def strided(**changes) -> ForwardProblem:
    fields = dict(
        precision="tf32",
        batch=16,
        channels=256,
        spatial=(64, 64),
        conv=geometry_of(torch.empty(256, 128, 4, 4), stride=(2, 2), padding=(1, 1)),
        epilogue=(),
        save=True,
    )
    return problem(**(fields | changes))


def test_a_convolution_of_stride_1_is_its_own_planes():
    forward = strided(conv=geometry_of(torch.empty(256, 128, 4, 4)))
    assert of_planes(forward) is forward


def test_planes_have_the_stride_in_their_channels():
    planes = of_planes(strided())
    assert isinstance(planes, ForwardProblem)
    assert planes.conv is not None
    assert planes.output_shape == (16, 512, 65, 65)
    assert planes.conv.kernel_size == (2, 2)
    whole_layer = strided(conv=geometry_of(torch.empty(256, 128, 2, 2), stride=(2, 2)))
    whole = of_planes(whole_layer)
    assert isinstance(whole, ForwardProblem)
    assert whole.output_shape == (16, 512, 64 * 64)
    asked = backward_problem(dataclasses.replace(whole_layer, batch=2), "input", "weight")
    steps = kernel_named("sm90_gradients_tf32").compile(asked, H200).steps
    assert "split the output's gradient into 4 phases, planes of 4096" in steps


def test_many_phases_are_refused():
    stride = (MOST_PHASES + 1, 1)
    support = of_planes(strided(conv=geometry_of(torch.empty(256, 128, 4, 4), stride=stride)))
    assert isinstance(support, Support)
    assert f"{MOST_PHASES + 1} phases; up to {MOST_PHASES}" in support.reason
    asked = backward_problem(
        strided(conv=geometry_of(torch.empty(256, 128, 4, 4), stride=stride)), "input"
    )
    assert not kernel_named("sm90_gradients_tf32").supports(asked, H200)


def test_steps_of_a_strided_layer():
    biased = strided(epilogue=problem().epilogue[:1])
    asked = backward_problem(biased, "input", "weight", "bias")
    kernel = kernel_named("sm90_gradients_tf32")
    assert kernel.supports(asked, H200)
    plan = kernel.compile(asked, H200)
    assert not plan.pads_lines
    assert plan.steps[0] == "pack filter by phases"
    assert plan.steps[1:3] == (
        "split the output's gradient into 4 phases, lines of 65 padded to 68, + sums by channel",
        "gradient of bias",
    )
    assert plan.steps[3].startswith("sm90_runs_tf32_0_1 ")
    assert plan.steps[4].startswith("sm90_wgrad_tf32_2 ")
    assert plan.steps[5:] == ("add the weight gradient's parts",)
    alone = kernel.compile(backward_problem(biased).part(["bias"]), H200)
    assert alone.steps == ("sums of the output's gradient by channel", "gradient of bias")


def test_what_planes_leave_out_is_summed_apart():
    conv = geometry_of(torch.empty(256, 128, 1, 1), stride=(2, 2), output_padding=(1, 1))
    biased = strided(conv=conv, epilogue=problem().epilogue[:1])
    assert holds_all(biased)
    conv = dataclasses.replace(conv, dilation=(4, 1), output_padding=(3, 0))
    biased = dataclasses.replace(biased, conv=conv)
    assert not holds_all(biased)
    asked = backward_problem(biased, "input", "bias")
    steps = kernel_named("sm90_gradients_tf32").compile(asked, H200).steps
    assert steps[1].startswith("split the output's gradient into 4 phases, planes of 4096")
    assert not steps[1].endswith("by channel")
    assert steps[2:4] == ("sums of the output's gradient by channel", "gradient of bias")


def test_short_strict_sums_are_left_to_torch():
    conv = geometry_of(torch.empty(256, 2, 2, 2), stride=(2, 2))
    asked = backward_problem(strided(precision="fp32", conv=conv), "input")
    support = kernel_named("sm90_gradients_tf32x3").supports(asked, H200)
    assert "sums 8 products" in support.reason
    conv = geometry_of(torch.empty(256, 8, 2, 2), stride=(2, 2))
    asked = backward_problem(strided(precision="fp32", conv=conv), "input")
    assert kernel_named("sm90_gradients_tf32x3").supports(asked, H200)
    conv = dataclasses.replace(conv, dilation=(2, 2))
    asked = backward_problem(strided(precision="fp32", conv=conv), "input")
    support = kernel_named("sm90_gradients_tf32x3").supports(asked, H200)
    assert "filters have 128 taps for 32" in support.reason


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_large_strided_layers_have_their_gradients_here(precision):
    dtype = {"tf32": torch.float32, "bf16": torch.bfloat16}[precision]
    asked = backward_problem(
        strided(precision=precision, dtype=dtype, output_dtype=dtype), "input", "weight"
    )
    ((problem_part, candidate),) = choose(asked, H200).chosen
    assert problem_part.parts == ("input", "weight")
    names = {f"sm90_gradients_{precision}", f"sm90_boxes_gradients_{precision}"}
    assert candidate.kernel.name in names


def test_small_strided_layers_of_many_channels_are_not_left_to_torch():
    """Whose operators keep the host longer than launches that are repeated."""
    conv = geometry_of(torch.empty(768, 384, 2, 2, 2), stride=(2, 2, 2))
    small = strided(batch=1, channels=768, spatial=(3, 3, 3), conv=conv)
    chosen = choose(backward_problem(small, "input", "weight"), H200).chosen
    assert [candidate.kernel.provider for _, candidate in chosen] == ["boxes_gradients_sm90"]
