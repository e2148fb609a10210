"""The lowering of a transposed convolution to an ordinary one, in fp64 against torch."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import geometry_of
from reference import CONVOLUTIONS
from torch.nn import functional as F

from fusedconv.lowering import ForwardConv, lower_unit_stride


def forward_conv(lowered: ForwardConv, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What ForwardConv describes, on [N, C, *spatial] data, by torch's pad and convolution."""
    missing = 3 - (weight.dim() - 2)
    x3 = x.reshape(*x.shape[:2], *(1,) * missing, *x.shape[2:])
    filter = weight.reshape(*weight.shape[:2], *(1,) * missing, *weight.shape[2:])
    filter = filter.flip(2, 3, 4).transpose(0, 1)
    assert tuple(x3.shape[2:]) == lowered.input
    assert tuple(filter.shape[2:]) == lowered.taps
    upper = [
        output - 1 + dilation * (taps - 1) - (extent - 1) - lower
        for output, dilation, taps, extent, lower in zip(
            lowered.output,
            lowered.dilation,
            lowered.taps,
            lowered.input,
            lowered.lower_padding,
            strict=True,
        )
    ]
    assert min(upper) >= 0
    pads = reversed(list(zip(lowered.lower_padding, upper, strict=True)))
    flat = [value for pair in pads for value in pair]
    result = F.conv3d(F.pad(x3, flat), filter, dilation=lowered.dilation)
    assert tuple(result.shape[2:]) == lowered.output
    return result.reshape(*result.shape[:2], *result.shape[2 + missing :])


@st.composite
def axis(draw):
    """(extent, kernel, padding, output padding, dilation) along one axis, with an output."""
    dilation = draw(st.integers(1, 3))
    kernel = draw(st.integers(1, 5))
    extra = draw(st.integers(0, dilation - 1))
    padding = draw(st.integers(0, dilation * (kernel - 1)))
    least = max(1, 1 + 2 * padding - dilation * (kernel - 1) - extra)
    return draw(st.integers(least, least + 6)), kernel, padding, extra, dilation


@settings(max_examples=500)
@given(
    axes=st.lists(axis(), min_size=1, max_size=3),
    batch=st.integers(1, 2),
    channels=st.integers(1, 4),
    out_channels=st.integers(1, 4),
    seed=st.integers(0, 2**16),
)
def test_equals_the_transposed_convolution(axes, batch, channels, out_channels, seed):
    spatial, kernel, padding, extra, dilation = map(tuple, zip(*axes, strict=True))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, channels, *spatial, dtype=torch.float64, generator=generator)
    weight = torch.randn(channels, out_channels, *kernel, dtype=torch.float64, generator=generator)
    geometry = geometry_of(weight, padding=padding, output_padding=extra, dilation=dilation)
    lowered = lower_unit_stride(geometry, spatial)
    assert isinstance(lowered, ForwardConv)
    expected = CONVOLUTIONS[len(axes)](x, weight, None, 1, padding, extra, 1, dilation)
    torch.testing.assert_close(forward_conv(lowered, x, weight), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("spatial", "kernel", "padding", "dilation"),
    [
        ((256, 255), (3, 3), (0, 0), (1, 1)),
        ((1, 1), (7, 5), (3, 2), (1, 1)),
        ((9,), (1,), (0,), (1,)),
        ((33,), (4,), (6,), (3,)),
        ((5, 6, 7), (3, 2, 1), (1, 0, 0), (2, 3, 1)),
    ],
    ids=str,
)
def test_equals_the_transposed_convolution_at_chosen_sizes(spatial, kernel, padding, dilation):
    x = torch.randn(2, 5, *spatial, dtype=torch.float64)
    weight = torch.randn(5, 3, *kernel, dtype=torch.float64)
    lowered = lower_unit_stride(geometry_of(weight, padding=padding, dilation=dilation), spatial)
    assert isinstance(lowered, ForwardConv)
    expected = CONVOLUTIONS[len(kernel)](x, weight, None, 1, padding, 0, 1, dilation)
    torch.testing.assert_close(forward_conv(lowered, x, weight), expected, rtol=1e-12, atol=1e-12)


@given(axes=st.lists(axis(), min_size=1, max_size=3))
def test_missing_axes_have_extent_one(axes):
    spatial, kernel, padding, extra, dilation = map(tuple, zip(*axes, strict=True))
    weight = torch.empty(1, 1, *kernel)
    geometry = geometry_of(weight, padding=padding, output_padding=extra, dilation=dilation)
    lowered = lower_unit_stride(geometry, spatial)
    assert isinstance(lowered, ForwardConv)
    missing = 3 - len(axes)
    neutral = {"input": 1, "output": 1, "taps": 1, "lower_padding": 0, "dilation": 1}
    for name, value in neutral.items():
        triple = getattr(lowered, name)
        assert len(triple) == 3
        assert triple[:missing] == (value,) * missing, name
    assert set(neutral) == {field.name for field in dataclasses.fields(ForwardConv)}


def test_a_stride_is_refused_with_a_reason():
    weight = torch.empty(2, 2, 3, 3)
    refused = lower_unit_stride(geometry_of(weight, stride=(1, 2)), (4, 4))
    assert isinstance(refused, str)
    assert "stride is (1, 2)" in refused


def test_padding_that_would_crop_the_input_is_refused_with_a_reason():
    weight = torch.empty(2, 2, 3, 3)
    at_the_limit = lower_unit_stride(geometry_of(weight, padding=(2, 4), dilation=(1, 2)), (9, 9))
    assert isinstance(at_the_limit, ForwardConv)
    refused = lower_unit_stride(geometry_of(weight, padding=(2, 5), dilation=(1, 2)), (9, 9))
    assert isinstance(refused, str)
    assert "padding (2, 5)" in refused


def test_lowered_convolution_is_hashable():
    weight = torch.empty(2, 2, 3)
    one = lower_unit_stride(geometry_of(weight), (4,))
    assert one == lower_unit_stride(geometry_of(weight), (4,))
    assert hash(one) == hash(lower_unit_stride(geometry_of(weight), (4,)))
