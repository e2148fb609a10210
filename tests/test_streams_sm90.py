"""Schedules of transposed convolutions along one axis in TF32 by filters that stream: which outputs
a tile's rows are, what is refused, and which layers they are chosen for. No GPU."""

from __future__ import annotations

import random

import pytest
from problems import upsampled_line
from test_taps import H200

from fusedconv import _C
from fusedconv.kernels.cuda.streams_sm90 import StreamsSm90
from fusedconv.registry import registry

KERNELS = [kernel for kernel in registry().kernels() if isinstance(kernel, StreamsSm90)]
pytestmark = pytest.mark.skipif(not KERNELS, reason="fusedconv was built without these kernels")
names = {"ids": lambda kernel: kernel.name}


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_rows_are_each_output_once(kernel, seed):
    """Phase q at a position is output stride position - padding + q, by tap q there and by tap q
    and a stride more at the position before, which copies bring too."""
    generator = random.Random(seed)
    stride = generator.choice((2, 3, 4, 5, 8, 10, 16, 64))
    taps = generator.randint(stride + 1, 2 * stride)
    extra, length = generator.randrange(stride), 4 * generator.randint(1, 90)
    # Where it is large the first tiles' positions are not the first inputs.
    most = ((length - 1) * stride + taps + extra - 1) // 2
    padding = generator.randint(0, min(most, generator.choice((taps, 40 * stride))))
    made = upsampled_line(
        "tf32",
        spatial=(length,),
        stride=stride,
        taps=taps,
        padding=padding,
        extra=extra,
        channels=8,
    )
    config = kernel.config(made, H200)
    assert kernel.supports(made, H200)
    room = _C.sm90.streams
    found = set()
    for tile in range(config.tiles):
        first = config.first + tile * room.tile
        assert first % 4 == 0
        for position in range(first, first + room.tile):
            for phase in range(stride):
                output = stride * position - padding + phase
                if 0 <= output < made.output_spatial[0]:
                    assert output not in found
                    found.add(output)
    assert len(found) == made.output_spatial[0]
    assert config.groups * kernel.row.columns >= 128 * stride
    assert config.shared_bytes <= H200.shared_bytes


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(layout="nhwc", spatial=(64, 64)), "the layout is channels last"),
        (dict(spatial=(64, 64)), "more than one axis"),
        (dict(stride=65, taps=130), "the stride is 65, 2 to 64 are served"),
        (dict(stride=1, taps=2, padding=0), "the stride is 1"),
        (dict(taps=8), "8 taps, more than the stride 8 and up to two are served"),
        (dict(taps=17), "17 taps"),
        (dict(dilation=2), "the filter is dilated"),
        (dict(spatial=(4098,)), "lines of 4098 positions are no whole 16 bytes"),
        (dict(channels=1 << 20), "a sample has 4294967296 elements of input and 4457472"),
        (dict(out=1 << 20), "a sample has 1048576 elements of input and 36515610624 of output"),
        (dict(channels=1 << 20, out=1 << 12, spatial=(8,)), "bytes, up to 17179869184"),
    ],
)
def test_what_is_refused(changes, reason):
    for kernel in KERNELS:
        support = kernel.supports(upsampled_line("tf32", **changes), H200)
        assert not support and reason in support.reason


@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_blocks_of_columns(kernel):
    """Each with its part of the filter, both taps of chunks of 16 channels."""
    config = kernel.config(upsampled_line("tf32", channels=250), H200)
    assert config.groups == -(-128 * 8 // kernel.row.columns)
    assert config.chunks == 16
    assert config.filter_bytes == config.groups * 16 * 2 * 16 * kernel.row.columns * 4


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(channels=192, out=96, spatial=(40000,), stride=2, taps=4, padding=1),
        dict(channels=384, out=192, spatial=(10000,), stride=4, taps=8, padding=2),
        dict(channels=512, out=256, spatial=(3000,), stride=5, taps=10, padding=2),
    ],
)
def test_a_vocoder_takes_it(changes):
    first = next(
        each
        for each in registry().candidates(upsampled_line("tf32", **changes), H200)
        if each.support
    )
    assert first.kernel.provider == "streams_sm90"


def test_steps():
    kernel = KERNELS[0]
    first, second = kernel.compile(upsampled_line("tf32"), H200).steps
    assert first == "pack filter (rounded to TF32)" and second == f"{kernel.name} (nchw) + bias"
