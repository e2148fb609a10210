"""Schedules of transposed convolutions along one axis by lines as they lie: which outputs a tile's
columns are, what is refused, and which layers they are chosen for. No GPU."""

from __future__ import annotations

import random

import pytest
import torch
from problems import geometry_of, upsampled_line
from test_taps import H200

from fusedconv import _C
from fusedconv.kernels.cuda.line_row import LineRow
from fusedconv.kernels.cuda.lines_sm90 import LinesSm90
from fusedconv.registry import registry

FAMILIES = [kernel for kernel in registry().kernels() if isinstance(kernel, LineRow)]
KERNELS = [kernel for kernel in FAMILIES if isinstance(kernel, LinesSm90)]
pytestmark = pytest.mark.skipif(not KERNELS, reason="fusedconv was built without these kernels")
names = {"ids": lambda kernel: kernel.name}


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_columns_are_each_output_once(kernel, seed):
    """Row q at a position has taps q + rotation and a stride more, and is output base + stride
    position + q; of what is beyond the stride, a stride before."""
    generator = random.Random(seed)
    stride = generator.choice((2, 4, 8, 16))
    taps = generator.randint(stride + 1, 2 * stride)
    length, extra = 8 * generator.randint(1, 40), generator.randrange(stride)
    # Where it is large the first tile's positions are not the first inputs.
    most = ((length - 1) * stride + taps + extra - 1) // 2
    padding = generator.randint(0, min(most, generator.choice((taps, 40 * stride))))
    made = upsampled_line(
        kernel.precision,
        spatial=(length,),
        stride=stride,
        taps=taps,
        padding=padding,
        extra=extra,
        channels=8,
    )
    config = kernel.config(made, H200)
    assert kernel.supports(made, H200)
    room = _C.sm90.lines
    found: dict[int, tuple[int, int]] = {}
    for tile in range(config.tiles):
        for slot in range(room.first_output, room.first_output + room.outputs):
            for row in range(stride):
                late = row + config.rotation >= stride
                position = config.first + tile * room.outputs + slot + late
                output = config.base + stride * (position - late) + row
                if 0 <= output < made.output_spatial[0]:
                    assert output not in found
                    found[output] = position, (row + config.rotation) % stride
    assert sorted(found) == list(range(made.output_spatial[0]))
    for output, (position, tap) in found.items():
        assert output == stride * position - padding + tap
    assert config.first % 8 == 0 and config.shared_bytes <= H200.shared_bytes


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(layout="nhwc", spatial=(64, 64)), "the layout is channels last"),
        (dict(spatial=(64, 64)), "more than one axis"),
        (dict(stride=5, taps=10), "the stride is 5, 2, 4, 8 and 16 are served"),
        (dict(stride=1, taps=2, padding=0), "the stride is 1"),
        (dict(taps=8), "8 taps, more than the stride 8 and up to two are served"),
        (dict(taps=17), "17 taps"),
        (dict(dilation=2), "the filter is dilated"),
        (dict(spatial=(4097,)), "lines of 4097 positions are no whole 16 bytes"),
        (dict(channels=768), "filters of 768 channels have no room"),
        (dict(out=1 << 22), "34359738368 bytes, up to 17179869184 are served"),
    ],
)
def test_what_is_refused(changes, reason, precision):
    for kernel in KERNELS:
        if kernel.precision == precision:
            support = kernel.supports(upsampled_line(kernel.precision, **changes), H200)
            assert not support and reason in support.reason


@pytest.mark.parametrize("kernel", FAMILIES, **names)
@pytest.mark.parametrize(("padding", "extra", "served"), [(0, 0, True), (1, 2, False)])
def test_an_axis_of_one_position(kernel, padding, extra, served):
    """Is none, unless its padding keeps the product off the output, which is the bias then."""
    weight = torch.empty(256, 128, 1, 16, device="meta")
    conv = geometry_of(
        weight, stride=(3, 8), padding=(padding, 4), output_padding=(extra, 0), dilation=(1, 1)
    )
    made = upsampled_line(kernel.precision, spatial=(1, 4096), conv=conv)
    assert made.output_spatial == (1, 32768)
    assert bool(kernel.supports(made, H200)) == served


@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_who_shares_a_tile(kernel):
    """Consumers have rows of the filter of their own where memory holds these, else tiles."""
    few = kernel.config(upsampled_line(kernel.precision, channels=64), H200)
    assert few.together == kernel.row.consumers
    many = kernel.config(upsampled_line(kernel.precision, channels=640), H200)
    assert many.together == 1 and many.groups == 16
    assert many.filter_bytes == 16 * 2 * 64 * 640 * 2


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(channels=192, out=96, spatial=(40000,), stride=2, taps=4, padding=1),
        dict(channels=384, out=192, spatial=(10000,), stride=4, taps=8, padding=2),
    ],
)
def test_a_vocoder_takes_it(changes, precision):
    kernel = next(kernel for kernel in KERNELS if kernel.precision == precision)
    made = upsampled_line(kernel.precision, **changes)
    first = next(each for each in registry().candidates(made, H200) if each.support)
    assert first.kernel.provider == "lines_sm90"


def test_steps():
    kernel = next(kernel for kernel in KERNELS if kernel.precision == "bf16")
    first, second = kernel.compile(upsampled_line(kernel.precision), H200).steps
    assert first == "pack filter" and second == f"{kernel.name} (nchw) + bias"
