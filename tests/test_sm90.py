"""The schedules of the Hopper convolutions, which need no GPU: what they cover, hold and refuse."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

import fusedconv
from fusedconv import _C

pytestmark = pytest.mark.skipif(
    not fusedconv.build["cuda"], reason="fusedconv was built without CUDA"
)

TF32, TF32X3, F16, BF16 = 0, 2, 3, 4
TURNS, CHANNELS, POSITIONS = range(3)


def rows() -> list[dict]:
    return _C.sm90_rows() if fusedconv.build["cuda"] else []


def plan(row: dict, channels, out, spatial, kernel, padding=0, dilation=1, layout=0, aligned=True):
    axes = len(spatial)

    def three(values, filler):
        return (filler,) * (3 - axes) + tuple(values)

    kernel = [kernel] * axes if isinstance(kernel, int) else list(kernel)
    reach = [dilation * (k - 1) for k in kernel]
    return _C.Sm90Plan(
        row=row["index"],
        c=channels,
        k=out,
        input_extent=three(spatial, 1),
        output_extent=three((n + r - 2 * padding for n, r in zip(spatial, reach, strict=True)), 1),
        taps=three(kernel, 1),
        lower_padding=three((r - padding for r in reach), 0),
        dilation=three([dilation] * axes, 1),
        layout=layout,
        aligned=aligned,
        multiprocessors=132,
    )


def test_rows_are_named_and_numbered():
    names = [row["name"] for row in rows()]
    assert len(set(names)) == len(names) == 11
    assert [row["index"] for row in rows()] == list(range(len(names)))
    assert {row["math"] for row in rows()} == {TF32, TF32X3, F16, BF16}
    # The filter of strict fp32 is twice as large: it has no row that keeps it in shared memory.
    assert TF32X3 not in {row["math"] for row in rows() if row["sharing"] == TURNS}


def stored_pixels(p: _C.Sm90Plan, tiles: int, tile: int, output: tuple[int, int, int]):
    """The output pixels that a sample's tiles store, in the order in which they store them.

    A tile is ``tile`` neighbouring positions of a strip's line. Position i lies in column
    i % pitch_w of row i // pitch_w, and pitch_h rows make a slice; what a pitch leaves beside the
    strip's columns and the output's rows is not stored.
    """
    z, height, width = output
    position = torch.arange(tiles * tile)
    column, row = position % p.pitch_w, position // p.pitch_w
    row, slice_ = row % p.pitch_h, row // p.pitch_h
    stored = []
    for strip in range(p.strips):
        first = strip * p.strip_width
        inside = (slice_ < z) & (row < height) & (column < min(p.strip_width, width - first))
        stored.append(((slice_ * height + row) * width + first + column)[inside])
    return torch.cat(stored)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row["name"])
@pytest.mark.parametrize("layout", [0, 1])
def test_tiles_cover_every_output_once(row, layout):
    generator = random.Random(row["name"])
    tile = row["tile"][1]
    served = several_strips = linear = 0
    for _ in range(90):
        axes = generator.choice((2, 3))
        kernel = generator.randint(1, 5)
        dilation = generator.randint(1, 2)
        # Without padding lines can be the output plane itself; wide planes are cut into strips.
        padding = generator.choice((0, generator.randint(0, dilation * (kernel - 1))))
        least = max(1, 2 * padding - dilation * (kernel - 1) + 1)
        spatial = [generator.randint(least, least + 300 // axes**2) for _ in range(axes)]
        spatial[-1] += generator.choice((0, 200 // axes))
        out = generator.randint(1, 64)
        p = plan(row, 24, out, spatial, kernel, padding, dilation, layout)
        if p.obstacle:
            assert row["sharing"] == TURNS  # 125 taps of 24 channels need not fit
            continue
        output = [n + dilation * (kernel - 1) - 2 * padding for n in spatial]
        pixels = math.prod(output)
        # At most 64 output channels: one tile along them.
        tiles, rest = divmod(p.tiles, p.strips)
        assert rest == 0
        assert tiles == math.ceil(p.positions / tile)
        stored = stored_pixels(p, tiles, tile, (1,) * (3 - axes) + tuple(output))
        times = torch.bincount(stored, minlength=pixels)
        assert times.shape == (pixels,)
        assert (times == 1).all(), (spatial, kernel, padding, dilation)
        # The kernel takes eight positions as parts of one row or of two neighbouring ones, and a
        # linear plan's positions for pixels.
        assert p.pitch_w >= 8
        if p.linear:
            assert p.positions == pixels
            assert torch.equal(stored, torch.arange(pixels))
        # Halos and rounding: far less than everything twice, but for tiny planes.
        if pixels > 20_000 and kernel < 4 and dilation == 1:
            assert p.tiles * tile <= 1.5 * pixels
        served += 1
        several_strips += p.strips > 1
        linear += p.linear
    assert served >= 60
    assert several_strips >= 3
    assert linear >= 5


@pytest.mark.parametrize("row", rows(), ids=lambda row: row["name"])
def test_scratch_is_about_the_output(row):
    for channels, out, spatial, kernel in (
        (64, 64, (256, 256), 3),
        (64, 128, (32, 32, 32), 3),
        (128, 64, (100, 60), 3),
    ):
        p = plan(row, channels, out, spatial, kernel)
        if p.obstacle:
            continue
        size = 2 if row["math"] in (F16, BF16) else 4
        output = out * math.prod(n + kernel - 1 for n in spatial) * size
        # Whole tiles, and twelve bytes of moments for each 128 or 256 positions of a channel.
        assert output <= p.scratch_bytes_per_sample <= 1.15 * output


def test_a_plain_transposed_convolution_wastes_no_positions():
    """Padded by k - 1, the pitch is the output's width: only a plane's last tile is short."""
    row = next(r for r in rows() if r["math"] == BF16 and r["sharing"] == CHANNELS)
    p = plan(row, 64, 128, (32, 32, 32), 3)
    assert p.strips == 1
    assert p.tiles == math.ceil(34**3 / 256)


def test_wide_planes_are_cut_into_strips():
    row = next(r for r in rows() if r["math"] == TF32 and r["sharing"] == TURNS)
    p = plan(row, 64, 64, (256, 256), 3)
    assert p.strips > 1
    # 768 positions of three whole rows would be staged for 256 outputs.
    assert p.stage_rows < 600


def test_tensor_copies_need_lines_of_whole_16_bytes():
    row = next(r for r in rows() if r["math"] == TF32 and r["sharing"] == POSITIONS)
    assert plan(row, 24, 24, (20, 40), 3).tensor_copies
    assert not plan(row, 24, 24, (20, 41), 3).tensor_copies
    assert not plan(row, 24, 24, (20, 40), 3, aligned=False).tensor_copies
    assert plan(row, 24, 24, (20, 41), 3, layout=1).tensor_copies
    assert not plan(row, 25, 24, (20, 40), 3, layout=1).tensor_copies


def test_obstacles_name_the_reason():
    row = next(r for r in rows() if r["math"] == TF32 and r["sharing"] == TURNS)
    assert "64 output channels, not 65" in plan(row, 8, 65, (20, 40), 3).obstacle
    assert "shared memory" in plan(row, 512, 64, (20, 40), 3).obstacle


def test_rows_of_other_sharings_serve_what_turns_cannot():
    for math_code, sharing in itertools.product((TF32, F16, BF16), (CHANNELS, POSITIONS)):
        row = next(r for r in rows() if r["math"] == math_code and r["sharing"] == sharing)
        assert not plan(row, 512, 200, (20, 40), 3).obstacle
