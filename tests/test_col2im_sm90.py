"""Schedules of transposed convolutions by col2im: what boxes cover, what is refused, how weights
are read, and which layers they are chosen for. No GPU."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from problems import geometry_of, problem
from test_taps import H200, random_sizes

from fusedconv import _C
from fusedconv.benchmark import DTYPES
from fusedconv.kernels.cuda.col2im_sm90 import Col2imSm90
from fusedconv.kernels.cuda.convolution import filter_source
from fusedconv.registry import registry

KERNELS = [kernel for kernel in registry().kernels() if isinstance(kernel, Col2imSm90)]
pytestmark = pytest.mark.skipif(not KERNELS, reason="fusedconv was built without these kernels")
names = {"ids": lambda kernel: kernel.name}


def drawn(kernel: Col2imSm90, seed: int):
    """A random problem that the row serves."""
    generator = random.Random(f"{kernel.name} {seed}")
    while True:
        sizes = replace(
            random_sizes(generator, most=60),
            groups=1,
            channels=8 * generator.randint(1, 20),
            out=generator.randint(1, 17),
        )
        made = sizes.problem(kernel, layout="nhwc", norm=None)
        if kernel.supports(made, H200):
            return sizes, made, kernel.config(made, H200)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_boxes_cover_what_their_tiles_read(kernel, seed):
    sizes, made, config = drawn(kernel, seed)
    assert math.prod(config.box) <= kernel.row.positions
    assert config.shared_bytes <= H200.shared_bytes
    for axis in range(-len(sizes.spatial), 0):
        extent, output = sizes.spatial[axis], made.output_spatial[axis]
        stride, padding = sizes.stride[axis], sizes.padding[axis]
        box, tile, tiles = config.box[axis], config.tile[axis], config.tiles[axis]
        assert tile % stride == 0 and (tiles - 1) * tile < output <= tiles * tile
        met = [
            {
                i
                for k in range(sizes.kernel[axis])
                for i in range(extent)
                if first <= stride * i + sizes.dilation[axis] * k - padding < first + tile
                and stride * i + sizes.dilation[axis] * k - padding < output
            }
            for first in range(0, output, tile)
        ]
        assert 1 <= box <= extent
        assert all(max(each) - min(each) < box for each in met if each)


def layer(kernel: Col2imSm90, **changes) -> object:
    """The last layer of a keypoint head, changed."""
    dtype = DTYPES[kernel.precision]
    out, taps = changes.pop("out", 17), changes.pop("taps", 4)
    stride, padding = changes.pop("stride", 2), changes.pop("padding", 1)
    channels = changes.get("channels", 512)
    spatial = changes.get("spatial", (14, 14))
    weight = torch.empty(channels, out, *(taps,) * len(spatial), device="meta")
    if changes.pop("weight_layout", "nchw") == "nhwc":
        weight = weight.contiguous(memory_format=torch.channels_last)
    axes = len(spatial)
    conv = geometry_of(weight, stride=(stride,) * axes, padding=(padding,) * axes)
    fields = dict(
        batch=64,
        channels=channels,
        spatial=spatial,
        dtype=dtype,
        output_dtype=dtype,
        precision=kernel.precision,
        layout="nhwc",
        activation="identity",
        norm=None,
        conv=conv,
    )
    return problem(**{**fields, **changes})


def test_tiles_of_long_strides_have_room():
    """For the table of what their outputs add up."""
    kernel = widest("bf16")
    made = layer(kernel, spatial=(3, 512), out=1, taps=1, stride=100, padding=0)
    config = kernel.config(made, H200)
    assert kernel.supports(made, H200)
    assert config.tile[2] < made.output_spatial[1] and config.shared_bytes <= H200.shared_bytes


def widest(precision: str) -> Col2imSm90:
    rows = [kernel for kernel in KERNELS if kernel.precision == precision]
    return max(rows, key=lambda kernel: kernel.row.columns)


@pytest.mark.parametrize("precision", ["tf32", "fp16", "bf16"])
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(layout="nchw"), "the layout is channels first"),
        (dict(channels=509), "no whole 16 bytes"),
        (dict(out=18), "output channels of taps are 288, up to 272 are served"),
        (dict(spatial=(200, 200), taps=16, out=1, stride=1, padding=0), "reaches more positions"),
        (dict(spatial=(2, 2), taps=1, out=1, stride=14000, padding=0), "than a block has room for"),
    ],
)
def test_what_is_refused(changes, reason, precision):
    kernel = widest(precision)
    support = kernel.supports(layer(kernel, **changes), H200)
    assert not support and reason in support.reason


@pytest.mark.parametrize("weight_layout", ["nchw", "nhwc"])
def test_weights_that_are_read_as_they_lie(weight_layout):
    for precision, out, expected in (("bf16", 17, True), ("fp16", 5, True), ("tf32", 17, False)):
        kernel = widest(precision)
        made = layer(kernel, out=out, weight_layout=weight_layout)
        assert kernel.reads_weight(made, kernel.config(made, H200)) == expected
    # Lines of 27 elements begin at no whole 16 bytes.
    kernel = widest("bf16")
    made = layer(kernel, out=3, taps=3, weight_layout=weight_layout)
    config = kernel.config(made, H200)
    assert not config.reads_weight(filter_source(made.conv))
    assert config.filter_bytes == 512 * 32 * 2
    first, second = kernel.compile(made, H200).steps
    assert first == "pack filter" and second.startswith(kernel.name)


@pytest.mark.parametrize("precision", ["tf32", "fp16", "bf16"])
def test_a_keypoint_head_takes_it(precision):
    made = layer(widest(precision))
    first = next(each for each in registry().candidates(made, H200) if each.support)
    assert first.kernel.provider == "col2im_sm90"


def test_rows():
    rows = _C.sm90.col2im.rows()
    assert {row.columns for row in rows} == {64, 128, 272}
    assert all(row.positions % 64 == 0 for row in rows)
