"""The lowering of a transposed convolution to ordinary ones, in fp64 against torch."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import CONVOLUTIONS
from torch.nn import functional as F

from fusedconv import ConvTransposeGeometry, Support
from fusedconv.lowering import Phase, lower


def geometry(weight, stride, padding, output_padding, dilation, groups=1):
    return ConvTransposeGeometry(
        in_channels=weight.shape[0],
        out_channels=weight.shape[1] * groups,
        kernel_size=tuple(weight.shape[2:]),
        stride=stride,
        padding=padding,
        output_padding=output_padding,
        dilation=dilation,
        groups=groups,
        weight_strides=tuple(weight.stride()),
    )


def upper_padding(phase: Phase) -> list[int]:
    """Zeros behind each axis that the outputs need; negative for positions they leave unread."""
    return [
        output - 1 + dilation * (taps - 1) - (extent - 1) - front
        for output, dilation, taps, extent, front in zip(
            phase.output,
            phase.dilation,
            phase.taps,
            phase.input,
            phase.lower_padding,
            strict=True,
        )
    ]


def run_phase(phase: Phase, x: torch.Tensor, weight: torch.Tensor, groups: int) -> torch.Tensor:
    """What a Phase describes, on [N, C, D, H, W] data, by torch's pad and convolution."""
    assert tuple(x.shape[2:]) == phase.input
    if 0 in phase.taps:
        return x.new_zeros(x.shape[0], weight.shape[1] * groups, *phase.output)
    filter = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
    for axis in range(3):
        first, step = phase.first_tap[axis], phase.tap_step[axis]
        chosen = [first + t * step for t in range(phase.taps[axis])]
        assert min(chosen) >= 0
        filter = filter.index_select(2 + axis, torch.tensor(chosen))
    upper = upper_padding(phase)
    pads = [max(0, pad) for pair in zip(phase.lower_padding, upper, strict=True) for pad in pair]
    view = F.pad(x, [*pads[4:], *pads[2:4], *pads[:2]])
    for axis, front in enumerate(phase.lower_padding):
        read = front + phase.input[axis] + upper[axis]
        view = view.narrow(2 + axis, max(0, -front), read)
    return F.conv3d(view, filter, dilation=phase.dilation, groups=groups)


def run(x, weight, stride, padding, output_padding, dilation, groups=1):
    """A transposed convolution by its phases, each of which must write what none wrote before."""
    conv = geometry(weight, stride, padding, output_padding, dilation, groups)
    spatial = tuple(x.shape[2:])
    extents = conv.output_spatial(spatial)
    missing = (1,) * (3 - len(spatial))
    lowering = lower(conv, spatial)
    output = x.new_full((x.shape[0], conv.out_channels, *missing, *extents), torch.nan)
    x = x.reshape(*x.shape[:2], *missing, *spatial)
    weight = weight.reshape(*weight.shape[:2], *missing, *weight.shape[2:])
    phases = list(lowering)
    assert len(phases) == len(lowering)
    for phase in phases:
        starts = zip(phase.output_offset, phase.output_step, strict=True)
        view = output[(..., *(slice(offset, None, step) for offset, step in starts))]
        assert tuple(view.shape[2:]) == phase.output
        assert min(phase.output) >= 1
        assert view.isnan().all()
        view.copy_(run_phase(phase, x, weight, groups))
    return output.reshape(*output.shape[:2], *extents)


def expect_equal(x, weight, stride, padding, output_padding, dilation, groups=1):
    result = run(x, weight, stride, padding, output_padding, dilation, groups)
    expected = CONVOLUTIONS[x.dim() - 2](
        x, weight, None, stride, padding, output_padding, groups, dilation
    )
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("stride", [1, 2, 3, 4])
@pytest.mark.parametrize("dilation", [1, 2, 3, 4])
def test_every_small_problem_along_one_axis(stride, dilation):
    """Every padding and output padding that torch admits, for small kernels and extents."""
    for kernel, extent in itertools.product(range(1, 5), range(1, 4)):
        x = torch.randn(1, 1, extent, dtype=torch.float64)
        weight = torch.randn(1, 1, kernel, dtype=torch.float64)
        for extra in range(max(stride, dilation)):
            last_output = (extent - 1) * stride + dilation * (kernel - 1) + extra
            for padding in range(last_output // 2 + 1):
                expect_equal(x, weight, (stride,), (padding,), (extra,), (dilation,))


@st.composite
def axis(draw, longest_stride=6):
    """(extent, kernel, stride, padding, output padding, dilation) along one axis."""
    stride, dilation = draw(st.integers(1, longest_stride)), draw(st.integers(1, 6))
    kernel, extent = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    extra = draw(st.integers(0, max(stride, dilation) - 1))
    last_output = (extent - 1) * stride + dilation * (kernel - 1) + extra
    return extent, kernel, stride, draw(st.integers(0, last_output // 2)), extra, dilation


@settings(max_examples=300)
@given(
    axes=st.lists(axis(), min_size=1, max_size=3),
    batch=st.integers(0, 2),
    channels=st.integers(1, 3),
    out_channels=st.integers(1, 3),
    groups=st.integers(1, 2),
    seed=st.integers(0, 2**16),
)
def test_equals_the_transposed_convolution(axes, batch, channels, out_channels, groups, seed):
    spatial, kernel, *arguments = map(tuple, zip(*axes, strict=True))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, groups * channels, *spatial, dtype=torch.float64, generator=generator)
    weight = torch.randn(
        groups * channels, out_channels, *kernel, dtype=torch.float64, generator=generator
    )
    expect_equal(x, weight, *arguments, groups)


@pytest.mark.parametrize(
    ("spatial", "kernel", "stride", "padding", "dilation"),
    [
        ((256, 255), (3, 3), (1, 1), (0, 0), (1, 1)),
        ((64, 33), (4, 4), (2, 2), (1, 1), (1, 1)),
        ((1, 1), (7, 5), (1, 1), (3, 2), (1, 1)),
        ((33,), (4,), (1,), (7,), (2,)),
        ((100,), (16,), (8,), (4,), (1,)),
        ((5, 6, 7), (3, 2, 1), (2, 3, 4), (1, 0, 0), (2, 3, 1)),
    ],
    ids=str,
)
def test_equals_the_transposed_convolution_at_chosen_sizes(
    spatial, kernel, stride, padding, dilation
):
    x = torch.randn(2, 5, *spatial, dtype=torch.float64)
    weight = torch.randn(5, 3, *kernel, dtype=torch.float64)
    expect_equal(x, weight, stride, padding, (0,) * len(kernel), dilation)


def test_phases_of_a_stride():
    """Kernel 3, stride 2, padding 1 on 4: even outputs take tap 1, odd ones taps 2 and 0. Stride 4
    and kernel 1 beside it: only every fourth output meets a tap."""
    lowering = lower(
        geometry(torch.empty(1, 1, 3, 1), (2, 4), (1, 0), (0, 1), (1, 1)), spatial=(4, 2)
    )
    assert len(lowering) == 8
    phases = {phase.output_offset: phase for phase in lowering}
    assert phases[0, 0, 0] == Phase(
        input=(1, 4, 2),
        output=(1, 4, 2),
        taps=(1, 1, 1),
        first_tap=(0, 1, 0),
        tap_step=(-1, -2, -4),
        lower_padding=(0, 0, 0),
        dilation=(1, 1, 1),
        output_offset=(0, 0, 0),
        output_step=(1, 2, 4),
    )
    odd = phases[0, 1, 3]
    assert (odd.taps, odd.first_tap[1], odd.lower_padding[1]) == ((1, 2, 0), 2, 0)
    assert odd.output == (1, 3, 1)


@given(axes=st.lists(axis(longest_stride=1), min_size=1, max_size=3))
def test_a_stride_of_one_has_a_single_phase_of_every_tap(axes):
    spatial, kernel, stride, padding, extra, dilation = map(tuple, zip(*axes, strict=True))
    conv = geometry(torch.empty(1, 1, *kernel), stride, padding, extra, dilation)
    (phase,) = lower(conv, spatial)
    missing = (1,) * (3 - len(axes))
    assert phase.input == (*missing, *spatial)
    assert phase.output == (*missing, *conv.output_spatial(spatial))
    assert phase.taps == (*missing, *kernel)
    assert phase.first_tap == tuple(taps - 1 for taps in phase.taps)
    assert phase.tap_step == (-1, -1, -1)
    pads = [d * (k - 1) - p for d, k, p in zip(dilation, kernel, padding, strict=True)]
    assert phase.lower_padding == (*(0 for _ in missing), *pads)
    assert phase.dilation == (*missing, *dilation)
    assert (phase.output_offset, phase.output_step) == ((0, 0, 0), (1, 1, 1))
    single = lower(conv, spatial).single()
    if min(pads) >= 0:
        assert single == phase
    else:
        assert isinstance(single, Support)


def refusal(weight, stride, padding, dilation, spatial):
    single = lower(geometry(weight, stride, padding, (0, 0), dilation), spatial).single()
    assert isinstance(single, Support)
    assert not single
    return single.reason


def test_several_phases_are_refused_with_a_reason():
    reason = refusal(torch.empty(2, 2, 3, 3), (3, 2), (0, 0), (1, 1), (4, 4))
    assert "stride is (3, 2), which lowers to 6 forward convolutions" in reason


def test_a_single_phase_that_leaves_taps_out_is_refused_with_a_reason():
    reason = refusal(torch.empty(2, 2, 3, 3), (2, 1), (1, 0), (1, 1), (1, 4))
    assert "stride is (2, 1), which leaves (1, 3) of (3, 3) taps" in reason


def test_padding_that_would_crop_the_input_is_refused_with_a_reason():
    weight = torch.empty(2, 2, 3, 3)
    at_the_limit = lower(geometry(weight, (1, 1), (2, 4), (0, 0), (1, 2)), (9, 9))
    assert isinstance(at_the_limit.single(), Phase)
    assert "padding (2, 5)" in refusal(weight, (1, 1), (2, 5), (1, 2), (9, 9))


def test_a_stride_along_an_axis_of_one_position_is_served():
    """The single phase then is that of stride 1, but for steps along an axis of one output."""
    weight = torch.empty(2, 2, 1, 3)
    strided = lower(geometry(weight, (2, 1), (0, 1), (0, 0), (1, 1)), (1, 9)).single()
    plain = lower(geometry(weight, (1, 1), (0, 1), (0, 0), (1, 1)), (1, 9)).single()
    assert isinstance(strided, Phase)
    assert isinstance(plain, Phase)
    assert (
        dataclasses.replace(strided, tap_step=plain.tap_step, output_step=plain.output_step)
        == plain
    )


def test_many_phases_are_not_made_before_they_are_asked_for():
    weight = torch.empty(1, 1, 2, 2, 2)
    lowering = lower(geometry(weight, (4096,) * 3, (0,) * 3, (0,) * 3, (1,) * 3), (2, 2, 2))
    assert len(lowering) == 4096**3
    assert isinstance(lowering.single(), Support)
    assert next(iter(lowering)).output == (2, 2, 2)


def test_lowering_is_hashable():
    one, other = (
        lower(geometry(torch.empty(2, 2, 3), (2,), (0,), (0,), (1,)), (4,)) for _ in range(2)
    )
    assert one == other
    assert hash(one) == hash(other)
