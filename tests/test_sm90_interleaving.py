"""The Hopper convolutions whose output channels are sub-pixel phases: what they serve, and that
phases as channels are the transposed convolution, in float64. No GPU."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from problems import geometry_of, problem

import fusedconv
from fusedconv.device import KNOWN
from fusedconv.registry import registry

pytestmark = pytest.mark.skipif(
    "sm90" not in fusedconv.build.get("families", ()),
    reason="fusedconv was built without kernels for compute capability 9.0",
)

H200 = KNOWN[90]


def upsampling(**changes):
    """A layer of U-Nets: its filter is as large as its stride."""
    settings = dict(
        dtype=torch.bfloat16,
        output_dtype=torch.bfloat16,
        precision="bf16",
        batch=8,
        channels=64,
        spatial=(32, 48),
        conv=geometry_of(torch.empty(64, 24, 2, 2), stride=(2, 2)),
        norm=None,
    )
    return problem(**{**settings, **changes})


INTERLEAVED = "sm90_runs_bf16_interleaved_0_0"


def test_a_filter_as_large_as_its_stride_is_a_matrix_product():
    kernel = next(k for k in registry().kernels() if k.name == INTERLEAVED)
    asked = upsampling()
    assert kernel.supports(asked, H200)
    config = kernel.config(asked, H200)
    assert config.blocks_n == math.ceil(24 * 4 / 64)
    assert config.k_iterations == 64 // 16
    pack, convolve = kernel.compile(asked, H200).steps
    assert pack == "pack filter"
    assert convolve.startswith(INTERLEAVED)


@pytest.mark.parametrize("changes", [{"spatial": (32, 45)}, {"aligned": False}], ids=str)
def test_lines_that_tensor_copies_cannot_read_are_padded(changes):
    kernel = next(k for k in registry().kernels() if k.name == INTERLEAVED)
    asked = upsampling(**changes)
    assert kernel.supports(asked, H200)
    assert any("the input" in step for step in kernel.compile(asked, H200).steps)
    assert not any("the input" in step for step in kernel.compile(upsampling(), H200).steps)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"conv": dict(stride=(1, 1))}, "its stride is 1"),
        ({"conv": dict(stride=(2, 2), padding=(1, 1))}, "its output is (62, 94), not (64, 96)"),
        ({"conv": dict(stride=(2, 2), output_padding=(1, 1))}, "its output is (65, 97)"),
        ({"conv": dict(stride=(2, 2), dilation=(2, 2))}, "dilation is (2, 2)"),
        (
            {"conv": dict(stride=(4, 4), output_padding=(2, 2))},
            "the filter is (2, 2), the stride (4, 4): phases do not all have the same taps",
        ),
        ({"layout": "nhwc"}, "reads NCHW"),
    ],
    ids=str,
)
def test_interleaving_rows_refuse_the_rest(changes, reason):
    kernel = next(k for k in registry().kernels() if k.name == INTERLEAVED)
    changes = dict(changes)
    if "conv" in changes:
        changes["conv"] = geometry_of(torch.empty(64, 24, 2, 2), **changes["conv"])
    support = kernel.supports(upsampling(**changes), H200)
    assert not support
    assert reason in support.reason


#: (kernel, stride, padding, output padding) along an axis; strides 1 are of no phases.
AXES = [
    (2, 2, 0, 0), (3, 2, 1, 1), (4, 2, 1, 0), (5, 2, 2, 1), (6, 2, 2, 0), (1, 2, 0, 1),
    (3, 3, 0, 0), (5, 3, 1, 0), (6, 3, 2, 1), (4, 4, 0, 0), (8, 4, 2, 0), (16, 8, 4, 0),
    (1, 1, 0, 0), (3, 1, 1, 0),
]  # fmt: skip
_CONVOLUTIONS = {
    1: torch.nn.functional.conv_transpose1d,
    2: torch.nn.functional.conv_transpose2d,
    3: torch.nn.functional.conv_transpose3d,
}


def computed_by_phases(x, weight, axes, deltas, padding=16):
    """Each output as the sum over ``deltas(phase)``, by axis, of the inputs so far from its
    position times the weight's taps that these are; there may be none."""
    strides, paddings = (tuple(axis[i] for axis in axes) for i in (1, 2))
    spatial = x.shape[2:]
    wide = torch.nn.functional.pad(x, (padding,) * 6)
    result = torch.zeros(
        *(x.shape[0], weight.shape[1]), *(n * s for n, s in zip(spatial, strides, strict=True)),
        dtype=x.dtype,
    )  # fmt: skip
    for phase in itertools.product(*map(range, strides)):
        out = result[(..., *(slice(r, None, s) for r, s in zip(phase, strides, strict=True)))]
        for delta in itertools.product(*deltas(phase)):
            tap = [
                r + p - s * d for r, p, s, d in zip(phase, paddings, strides, delta, strict=True)
            ]
            if all(0 <= k < extent for k, extent in zip(tap, weight.shape[2:], strict=True)):
                read = (
                    slice(padding + d, padding + d + n) for d, n in zip(delta, spatial, strict=True)
                )
                out += torch.einsum("bcdhw,ck->bkdhw", wide[(..., *read)], weight[(..., *tap)])
    return result


@pytest.mark.parametrize("last", [axis for axis in AXES if axis[1] > 1], ids=str)
@pytest.mark.parametrize("number", range(6))
def test_phases_as_channels_are_the_transposed_convolution(last, number):
    """In fp64: what the rows compute, with the taps that they are given."""
    generator = random.Random(f"{last} {number}")
    axes = [generator.choice(AXES) for _ in range(generator.randint(0, 2))] + [last]
    spatial = tuple(generator.randint(1, 6) for _ in axes)
    kernel, stride, padding, output_padding = map(tuple, zip(*axes, strict=True))
    x = torch.randn(2, 3, *spatial, dtype=torch.float64)
    weight = torch.randn(3, 4, *kernel, dtype=torch.float64)
    expected = _CONVOLUTIONS[len(axes)](x, weight, None, stride, padding, output_padding)
    asked = upsampling(
        channels=3,
        batch=2,
        spatial=spatial,
        conv=geometry_of(weight, stride=stride, padding=padding, output_padding=output_padding),
    )
    served = 0
    for row in registry().kernels():
        if not row.name.startswith("sm90_runs_bf16_interleaved") or not row.supports(asked, H200):
            continue
        served += 1
        lowered, made = row.lowered(asked), row.config(asked, H200)
        before, after = row.row.window
        windows = [
            range(-low, taps - low)
            for low, taps in zip(lowered.lower_padding, lowered.taps, strict=True)
        ]

        def deltas(phase, row=row, made=made, windows=windows, before=before, after=after):
            if not row.own_taps:
                return windows
            rows = [made.phase_taps[axis][phase[axis]] for axis in range(2)]
            upper = phase[2] >= stride[-1] // 2
            width = range(after + 1) if upper else range(-before, 1)
            return *(range(low, low + count) for low, count in rows), width

        whole = [(1, 1, 0, 0)] * (3 - len(axes)) + axes
        missing = (1,) * (3 - len(axes))
        computed = computed_by_phases(
            x.reshape(2, 3, *missing, *spatial), weight.reshape(3, 4, *missing, *kernel), whole,
            deltas,
        )  # fmt: skip
        assert torch.allclose(computed.reshape(expected.shape), expected), row.name
    if last in ((3, 2, 1, 1), (4, 2, 1, 0), (8, 4, 2, 0), (16, 8, 4, 0)):
        assert served == ((1, 2, 0, 1) not in axes)  # which has a phase without taps
    elif last[0] == last[1]:
        assert served == all(k == s or s == 1 for k, s, *_ in axes)
    else:
        assert not served


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        ((6, 3, 2, 1), "its stride along width is 3; 2, 4 and 8 have halves of phases"),
        ((5, 2, 2, 1), "phase 0 along width reads inputs from -1 to 1 of a position; from -1 to 0"),
    ],
    ids=str,
)
def test_phases_that_do_not_divide_in_halves_are_refused(last, reason):
    kernel, stride, padding, output_padding = last
    asked = upsampling(
        conv=geometry_of(
            torch.empty(64, 24, 2, kernel),
            stride=(2, stride),
            padding=(0, padding),
            output_padding=(0, output_padding),
        )
    )
    row = next(k for k in registry().kernels() if k.name == "sm90_runs_bf16_interleaved_1_1")
    assert reason in row.supports(asked, H200).reason


@pytest.mark.parametrize("channels", [8, 48, 300])
def test_blocks_of_phases_have_the_steps_of_their_taps(channels):
    weight = torch.empty(64, channels, 3, 3, 3)
    asked = upsampling(
        spatial=(16, 16, 32),
        conv=geometry_of(weight, stride=(2,) * 3, padding=(1,) * 3, output_padding=(1,) * 3),
    )
    row = next(k for k in registry().kernels() if k.name == "sm90_runs_bf16_interleaved_0_1")
    made = row.config(asked, H200)
    assert made.block_steps == [[4, 1], [4, 2], [8, 1], [8, 2]]
    assert made.phase_taps == [[[0, 1], [0, 2]], [[0, 1], [0, 2]]]
    assert made.blocks_n == 4 * math.ceil(channels / 32)
