"""Problem: frozen and hashable, what it derives, how it reads layouts and torch's precision."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import conv_geometry, problem
from reference import CONVOLUTIONS

from fusedconv import Problem


def test_frozen_hashable_and_equal_by_value():
    one, other = problem(), problem()
    assert one == other
    assert hash(one) == hash(other)
    assert len({one, other, problem(save=True), problem(layout="nhwc")}) == 3
    for value, field in ((one, "batch"), (one.conv, "stride"), (one.norm, "eps")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field, 1)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Problem)])
def test_every_field_tells_problems_apart(field):
    other = {
        "device": "cuda",
        "dtype": torch.float16,
        "output_dtype": torch.float16,
        "precision": "tf32",
        "layout": "strided",
        "aligned": False,
        "spatial": (5, 8),
        "activation": "relu",
        "order": "norm_act",
        "conv": None,
        "norm": None,
        "save": True,
    }.get(field, 99)
    assert problem(**{field: other}) != problem()


def test_activation_stands_before_or_after_the_normalisation():
    assert problem().activation_before == "gelu"
    assert problem().activation_after == "identity"
    assert problem(order="norm_act").activation_before == "identity"
    assert problem(order="norm_act").activation_after == "gelu"
    for order in ("act_norm", "norm_act"):
        alone = problem(order=order, norm=None)
        assert alone.activation_before == "gelu"
        assert alone.activation_after == "identity"


def test_output_layout_is_channels_last_only_where_the_input_is():
    assert problem(layout="nhwc").output_layout == "nhwc"
    assert problem(layout="nchw").output_layout == "nchw"
    assert problem(layout="strided").output_layout == "nchw"


def test_sizes_and_work():
    one = problem()
    output = torch.empty(one.batch, one.output_channels, *one.output_spatial)
    assert one.output_channels == 6
    assert one.input_elements == 3 * 4 * 5 * 7
    assert one.output_elements == output.numel()
    # Each of the 4 input channels feeds 6 / 2 output channels through 3 x 2 taps.
    assert one.conv_flops == 2 * (3 * 5 * 7) * 4 * (6 // 2) * (3 * 2)
    assert one.minimal_bytes == 4 * (one.input_elements + one.output_elements)
    half = problem(dtype=torch.float16, precision="fp16")
    assert half.minimal_bytes == 2 * one.input_elements + 4 * one.output_elements

    alone = problem(conv=None)
    assert alone.output_channels == 4
    assert alone.output_spatial == (5, 7)
    assert alone.conv_flops == 0


@given(
    st.lists(
        st.tuples(
            st.integers(1, 6),  # extent
            st.integers(1, 4),  # kernel
            st.integers(1, 3),  # stride
            st.integers(0, 3),  # padding
            st.integers(0, 2),  # output padding
            st.integers(1, 3),  # dilation
        ),
        min_size=1,
        max_size=3,
    )
)
def test_output_extents_are_torchs(axes):
    axes = [
        (size, kernel, stride, padding, min(extra, max(stride, dilation) - 1), dilation)
        for size, kernel, stride, padding, extra, dilation in axes
    ]
    sizes, kernel, stride, padding, extra, dilation = map(tuple, zip(*axes, strict=True))
    geometry = conv_geometry(
        kernel_size=kernel, stride=stride, padding=padding, output_padding=extra, dilation=dilation
    )
    extents = geometry.output_spatial(sizes)
    if min(extents) < 1:
        return
    expected = CONVOLUTIONS[len(axes)](
        torch.empty(1, 1, *sizes, device="meta"),
        torch.empty(1, 1, *kernel, device="meta"),
        None,
        stride,
        padding,
        extra,
        1,
        dilation,
    )
    assert extents == tuple(expected.shape[2:])


def test_text_names_what_matters():
    text = str(problem(save=True))
    for part in (
        "conv_transpose2d 4->6 k3x2 s2x1 p1x0 d1x2 groups 2 +bias -> gelu -> group_norm 2",
        "3x4x5x7",
        "float32 (fp32)",
        "nchw",
        "cpu",
        "saving for backward",
    ):
        assert part in text
    assert "group_norm 2 -> gelu" in str(problem(order="norm_act"))
    plain = problem(conv=conv_geometry(dilation=(1, 1), groups=1, bias=False), norm=None)
    assert "groups" not in str(plain)
    assert "bias" not in str(plain)
    assert "d1x1" not in str(plain)
    assert "saving" not in str(plain)
    assert str(problem(conv=None, norm=None, activation="identity")).startswith("identity on ")
    assert "cuda sm_90" in str(problem(device="cuda", architecture=90))
