"""The schedules of the Hopper convolutions whose positions come from registers: what their tiles
cover, what a stage holds, what they refuse. No GPU."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

import fusedconv
from fusedconv import _C
from fusedconv.device import KNOWN

HAS_ROWS = "sm90" in fusedconv.build.get("families", ())
pytestmark = pytest.mark.skipif(
    not HAS_ROWS, reason="fusedconv was built without kernels for compute capability 9.0"
)

H200 = KNOWN[90]
QUAD, TILE_QUADS, HEADER = 4, 32, 1024
MOMENTS = 4 * 1024  # bytes of a consumer


def rows() -> list:
    return _C.sm90.runs.rows() if HAS_ROWS else []


def has_own_taps(row) -> bool:
    """Whether its phases have taps of their own."""
    return row.interleaves and row.window != (0, 0)


def row_of(math_name: str, window: tuple[int, int]):
    (row,) = (
        r for r in rows() if (r.math.name, r.window) == (math_name, window) and not r.interleaves
    )
    return row


def element_bytes(row) -> int:
    return 4 if row.math.name.startswith("tf32") else 2


def parts(row) -> int:
    """Terms that an operand is split into."""
    return 2 if row.math.name == "tf32x3" else 1


def config(row, *, channels=64, out=64, output=(1, 258, 258), taps=(1, 3), dilation=(1, 1), **kw):
    """``taps`` and ``dilation`` along depth and height; the row's window is along width. Where
    phases have taps of their own there are two, along width."""
    before, after = row.window
    if has_own_taps(row):
        out *= 2
        width = {1: (2, 3, 1), 2: (2, 4, 1)}[before + after]
        kw["phases"] = ((1, taps[0], 0), (1, taps[1], 0), width)
    taps = (*taps, before + 1 + after)
    dilation = (*dilation, 1)
    lower = (0, 0, before) if "lower" not in kw else (*kw.pop("lower"), before)
    reach = [d * (t - 1) for t, d in zip(taps, dilation, strict=True)]
    # What pads above follows from the sizes; here as much input as the filter reads without.
    upper = (0, 0, after)
    given = [
        n + r - low - high for n, r, low, high in zip(output, reach, lower, upper, strict=True)
    ]
    return _C.sm90.runs.Config(
        row,
        problem=_C.ConvProblem(
            c=channels,
            k=out,
            input=kw.pop("input", given),
            output=output,
            taps=taps,
            lower_padding=lower,
            dilation=dilation,
        ),
        layout=kw.pop("layout", _C.Layout.nchw),
        aligned=kw.pop("aligned", True),
        padded_lines=kw.pop("padded_lines", False),
        device=kw.pop("device", H200).compiled,
        **kw,
    )


def wide_input(row, output, taps, dilation) -> tuple[int, int, int]:
    """An input whose lines are whole 16 bytes, whatever the output's are."""
    unit = 16 // element_bytes(row)
    return (*(n + d * (t - 1) for n, t, d in zip(output, taps, dilation, strict=False)), unit * 64)


def test_rows_are_named_by_math_and_window():
    names = [row.name for row in rows()]
    assert len(set(names)) == len(names) == 30
    for row in rows():
        phases = "interleaved_" if row.interleaves else ""
        window = "{}_{}".format(*row.window)
        assert row.name == f"sm90_runs_{row.math.name}_{phases}{window}"


def test_phases_are_those_of_interleaving_rows():
    for row in rows():
        arguments = dict(
            problem=_C.ConvProblem(
                c=16,
                k=32,
                input=(1, 8, 16),
                output=(1, 8, 16),
                taps=(1, 1, sum(row.window) + 1),
                lower_padding=(0, 0, row.window[0]),
                dilation=(1, 1, 1),
            ),
            layout=_C.Layout.nchw,
            aligned=True,
            device=H200.compiled,
        )
        if row.interleaves:
            made = _C.sm90.runs.Config(row, phases=phases_of(2, row.window), **arguments)
            assert made.support
            with pytest.raises(ValueError, match="phases: got 1x3x3 of 32 output channels"):
                _C.sm90.runs.Config(row, phases=phases_of(3, row.window), **arguments)
        else:
            with pytest.raises(ValueError, match="phases: got 1x2x2, expected 1x1x1"):
                _C.sm90.runs.Config(row, phases=phases_of(2, row.window), **arguments)


def phases_of(stride: int, window: tuple[int, int]) -> tuple[tuple[int, int, int], ...]:
    """Of a filter as large as its stride along height, and of the window along width."""
    kernel, padding = {
        (0, 0): (stride, 0),
        (0, 1): (stride + stride // 2, stride // 2),
        (1, 1): (2 * stride, stride // 2),
    }.get(window, (stride, 0))
    return ((1, 1, 0), (stride, stride, 0), (stride, kernel, padding))


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.name)
def test_tiles_cover_every_output_once(row):
    generator = random.Random(row.name)
    several = last = staggered = 0
    for _ in range(120):
        output = (
            generator.randint(1, 3),
            generator.randint(1, 70),
            generator.randint(1, generator.choice((20, 150))),
        )
        taps = (generator.choice((1, 2)), generator.choice((1, 2, 3, 5)))
        dilation = (1, generator.choice((1, 2)))
        made = config(
            row,
            channels=generator.choice((1, 24, 64)),
            output=output,
            taps=taps,
            dilation=dilation,
            input=wide_input(row, output, taps, dilation),
        )
        assert made.support
        depth, height, width = output
        times = torch.zeros(depth, height, width, dtype=torch.int64)
        lies = row.window == (2, 0) and not row.interleaves and width % QUAD == 2
        assert made.is_staggered == (lies and depth * height * width % QUAD == 0)
        staggered += made.is_staggered
        tiles = 0
        for tiling in made.tilings:
            if tiling.strips == 0:
                continue
            assert 1 <= tiling.tile_quads <= TILE_QUADS
            quads = torch.arange(tiling.tiles * tiling.tile_quads)
            rows = (quads // tiling.quads).view(tiling.tiles, -1).clamp(max=height - 1)
            spanned = int((rows[:, -1] - rows[:, 0]).max()) + 1
            assert tiling.lines >= spanned + dilation[1] * (taps[1] - 1)
            # A stage holds what the positions of the tile read.
            assert tiling.columns >= QUAD * tiling.quads + sum(row.window)
            assert tiling.columns * element_bytes(row) % 16 == 0
            k_block = 32 // element_bytes(row)
            assert tiling.bytes == tiling.lines * tiling.columns * k_block * element_bytes(row)
            inside = quads < height * tiling.quads
            for slice_, strip in itertools.product(range(depth), range(tiling.strips)):
                left = tiling.column0 + strip * QUAD * tiling.quads
                columns = left + QUAD * (quads % tiling.quads)[inside, None] + torch.arange(QUAD)
                lines = slice_ * height + (quads // tiling.quads)[inside, None]
                if made.is_staggered:
                    columns = columns - 2 * (lines % 2)
                    # So that each quad may be stored at once.
                    assert ((lines * width + columns[:, :1]) % QUAD == 0).all()
                pixels = lines * width + columns
                pixels = pixels[(columns >= 0) & (columns < width)]
                times.view(-1).index_add_(0, pixels, torch.ones_like(pixels))
            tiles += tiling.strips * tiling.tiles
        assert (times == 1).all()
        assert made.tiles == output[0] * tiles
        several += made.tilings[0].strips > 1
        last += made.tilings[1].strips > 0
    assert several > 20
    assert last > 20
    assert (staggered > 5) == (row.window == (2, 0) and not row.interleaves)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.name)
def test_shared_memory_holds_filter_and_rings(row):
    generator = random.Random(row.name)
    served = streamed = 0
    for _ in range(200):
        output = (1, generator.randint(1, 300), generator.randint(1, 300))
        taps = (generator.choice((1, 3)), generator.choice((1, 2, 3, 5)))
        channels = generator.choice((1, 8, 40, 64, 128, 512))
        out = generator.choice((1, 64, 65, 200))
        made = config(
            row,
            channels=channels,
            out=out,
            output=output,
            taps=taps,
            input=wide_input(row, output, taps, (1, 1)),
        )
        k_blocks = math.ceil(channels / (32 // element_bytes(row)))
        assert made.support
        served += 1
        assert made.blocks_n == math.ceil(out / (32 if has_own_taps(row) else 64))
        assert made.k_iterations in (taps[0] * k_blocks, taps[0] * k_blocks + 1)
        assert made.k_iterations * taps[1] % 2 == 0
        steps = made.k_iterations * taps[1] * (sum(row.window) + 1)
        tap_bytes = 2048 * parts(row)
        assert made.filter_bytes == made.blocks_n * (steps * tap_bytes + 4)
        # A second set of accumulators takes the registers of a third warpgroup.
        assert made.consumers == (3 if parts(row) == 1 else 2)
        box = max(tiling.bytes for tiling in made.tilings)
        filter_stage = tap_bytes * taps[1] * (sum(row.window) + 1)
        assert made.filter_stage_bytes == filter_stage
        if made.streams_filter:
            streamed += 1
            held = made.stages * (made.consumers * box + filter_stage)
        else:
            held = steps * tap_bytes + made.consumers * made.stages * box
        # Where a filter leaves too little room to stay, tiles would hold few positions.
        if min(output[1:]) >= 32 and made.streams_filter:
            assert output[1] * output[2] > 0.5 * 128 * made.tiles
        moments = made.consumers * MOMENTS
        assert HEADER + held + moments <= made.shared_bytes <= H200.shared_bytes
        # With one filter row a stage, two of a shared ring would wait for each other.
        assert (3 if made.streams_filter and taps[1] == 1 else 2) <= made.stages <= 8
    assert served > 50
    assert streamed > 5


@pytest.mark.parametrize(
    ("math_name", "channels", "streams"),
    [
        ("tf32", 64, False),
        ("tf32", 80, True),
        ("tf32x3", 32, False),
        ("tf32x3", 64, True),
        ("bf16", 128, False),
        ("bf16", 160, True),
    ],
)
def test_a_filter_that_would_crowd_out_the_lines_is_streamed(math_name, channels, streams):
    made = config(
        row_of(math_name, (2, 0)),
        channels=channels,
        output=(1, 256, 256),
        input=(1, 256, 256),
        lower=(0, 2),
    )
    assert made.streams_filter == streams
    assert made.tiles < 1.1 * 256 * 256 / 128


@pytest.mark.parametrize(("math_name", "stages"), [("bf16", 6), ("f16", 6), ("tf32", 3)])
def test_a_narrow_last_strip_leaves_the_ring_its_depth(math_name, stages):
    """Of 65 quads the last strip has one: its tiles may be of many lines, whose boxes would take
    twice what the others do, and half of the stages. In TF32 there are no more either way."""
    found = config(row_of(math_name, (2, 0)), lower=(0, 2), input=(1, 256, 256))
    wide, last = found.tilings
    assert (wide.quads, last.quads) == (8, 1)
    assert found.stages == stages
    assert (last.bytes <= wide.bytes) == (stages > 3)


def test_refusals_say_why():
    row = row_of("tf32", (2, 0))
    planes = {"input": (1, 256, 256), "lower": (0, 2)}
    assert config(row, **planes).support
    assert "reads NCHW" in config(row, **planes, layout=_C.Layout.nhwc).support.reason
    assert "16 bytes" in config(row, **planes, aligned=False).support.reason
    assert "16 bytes" in config(row, input=(1, 256, 255), lower=(0, 2)).support.reason
    assert "compute capability 9.0" in config(row, **planes, device=KNOWN[80]).support.reason
    assert "exceed the shared memory" in config(row, **planes, taps=(1, 40)).support.reason
    assert config(row, input=(1, 256, 255), lower=(0, 2), padded_lines=True).support
    half = row_of("tf32", (1, 1))
    with_other_padding = _C.sm90.runs.Config(
        half,
        problem=_C.ConvProblem(
            c=64,
            k=64,
            input=(1, 256, 256),
            output=(1, 258, 258),
            taps=(1, 3, 3),
            lower_padding=(0, 2, 2),
            dilation=(1, 1, 1),
        ),
        layout=_C.Layout.nchw,
        aligned=True,
        device=H200.compiled,
    )
    reason = with_other_padding.support.reason
    assert reason == "reads 1 columns before and 1 after an output's, not 2 and 0"
