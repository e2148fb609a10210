"""The schedules of the Hopper convolutions, which need no GPU: what they cover, hold and refuse."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest
import torch
from problems import geometry_of, problem

import fusedconv
from fusedconv import _C
from fusedconv.device import KNOWN
from fusedconv.kernels.cuda.sm90 import CutlassSm90
from fusedconv.registry import registry

HAS_ROWS = "sm90" in fusedconv.build.get("families", ())
pytestmark = pytest.mark.skipif(
    not HAS_ROWS, reason="fusedconv was built without kernels for compute capability 9.0"
)

H200 = KNOWN[90]
LAYOUTS = list(_C.Layout)


def rows() -> list:
    return _C.sm90.rows() if HAS_ROWS else []


def row_of(math: str, sharing: str):
    (row,) = (r for r in rows() if (r.math.name, r.sharing.name) == (math, sharing))
    return row


def config(
    row,
    channels,
    out,
    spatial,
    kernel,
    padding=0,
    dilation=1,
    layout=_C.Layout.nchw,
    aligned=True,
    device=H200,
):
    axes = len(spatial)

    def three(values, filler):
        return (filler,) * (3 - axes) + tuple(values)

    kernel = [kernel] * axes if isinstance(kernel, int) else list(kernel)
    reach = [dilation * (k - 1) for k in kernel]
    return _C.sm90.Config(
        row,
        problem=_C.ConvProblem(
            c=channels,
            k=out,
            input=three(spatial, 1),
            output=three((n + r - 2 * padding for n, r in zip(spatial, reach, strict=True)), 1),
            taps=three(kernel, 1),
            lower_padding=three((r - padding for r in reach), 0),
            dilation=three([dilation] * axes, 1),
        ),
        layout=layout,
        aligned=aligned,
        device=device.compiled,
    )


def test_rows_are_named_by_math_tile_and_sharing():
    names = [row.name for row in rows()]
    assert len(set(names)) == len(names) == 11
    for row in rows():
        m, n, _ = row.tile
        assert row.name == f"sm90_conv_{row.math.name}_{m}x{n}_{row.sharing.name}"
    assert {row.math.name for row in rows()} == {"tf32", "tf32x3", "f16", "bf16"}
    # The filter of strict fp32 is twice as large: it has no row that keeps it in shared memory.
    assert "tf32x3" not in {r.math.name for r in rows() if r.sharing.name == "ping_pong"}


def stored_pixels(p, tiles: int, tile: int, output: tuple[int, int, int]) -> torch.Tensor:
    """The output pixels that a sample's tiles store, in the order in which they store them.

    A tile is ``tile`` neighbouring positions of a strip's raster. Position i lies in column
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


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.name)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_tiles_cover_every_output_once(row, layout):
    generator = random.Random(row.name)
    tile = row.tile[1]
    served = several_strips = linear = 0
    for _ in range(90):
        axes = generator.choice((2, 3))
        kernel = generator.randint(1, 5)
        dilation = generator.randint(1, 2)
        # Without padding the raster can be the output plane; wide planes are cut into strips.
        padding = generator.choice((0, generator.randint(0, dilation * (kernel - 1))))
        least = max(1, 2 * padding - dilation * (kernel - 1) + 1)
        spatial = [generator.randint(least, least + 300 // axes**2) for _ in range(axes)]
        spatial[-1] += generator.choice((0, 200 // axes))
        out = generator.randint(1, 64)
        p = config(row, 24, out, spatial, kernel, padding, dilation, layout)
        if not p.support:
            assert row.sharing.name == "ping_pong"  # 125 taps of 24 channels need not fit
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
        # linear raster's positions for pixels.
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


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.name)
def test_scratch_is_about_the_output(row):
    for channels, out, spatial, kernel in (
        (64, 64, (256, 256), 3),
        (64, 128, (32, 32, 32), 3),
        (128, 64, (100, 60), 3),
    ):
        p = config(row, channels, out, spatial, kernel)
        if not p.support:
            continue
        size = 2 if row.math.name in ("f16", "bf16") else 4
        output = out * math.prod(n + kernel - 1 for n in spatial) * size
        # Whole tiles, and sixteen bytes of moments for each 128 or 256 positions of a channel.
        scratch = p.output_bytes_per_sample + p.partial_bytes_per_sample
        assert output <= scratch <= 1.15 * output


def test_a_plain_transposed_convolution_wastes_no_positions():
    """Padded by k - 1, the pitch is the output's width: only a plane's last tile is short."""
    p = config(row_of("bf16", "cooperative_m"), 64, 128, (32, 32, 32), 3)
    assert p.strips == 1
    assert p.tiles == math.ceil(34**3 / 256)


def test_wide_planes_are_cut_into_strips():
    p = config(row_of("tf32", "ping_pong"), 64, 64, (256, 256), 3)
    assert p.strips > 1
    # 768 positions of three whole rows would be staged for 256 outputs.
    assert p.staged_positions < 600


def test_tma_needs_rows_of_whole_16_bytes():
    row = row_of("tf32", "cooperative_n")
    nhwc = _C.Layout.nhwc
    assert config(row, 24, 24, (20, 40), 3).tma
    assert not config(row, 24, 24, (20, 41), 3).tma
    assert not config(row, 24, 24, (20, 40), 3, aligned=False).tma
    assert config(row, 24, 24, (20, 41), 3, layout=nhwc).tma
    assert not config(row, 25, 24, (20, 40), 3, layout=nhwc).tma


def test_refusals_name_the_reason():
    row = row_of("tf32", "ping_pong")
    assert "64 output channels, not 65" in config(row, 8, 65, (20, 40), 3).support.reason
    assert "shared memory" in config(row, 512, 64, (20, 40), 3).support.reason


def test_rows_of_other_sharings_serve_what_ping_pong_cannot():
    for math_name, sharing in itertools.product(
        ("tf32", "f16", "bf16"), ("cooperative_m", "cooperative_n")
    ):
        assert config(row_of(math_name, sharing), 512, 200, (20, 40), 3).support


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.name)
@pytest.mark.parametrize("architecture", KNOWN)
def test_rows_run_on_compute_capability_9_0_alone(architecture, row):
    support = config(row, 24, 24, (20, 40), 3, device=KNOWN[architecture]).support
    assert bool(support) == (architecture == 90)
    if not support:
        assert support.reason == (
            "runs on compute capability 9.0, the device has "
            f"{architecture // 10}.{architecture % 10}"
        )


@pytest.mark.parametrize("architecture", [80, 100])
def test_kernels_pass_the_refusal_on(architecture):
    asked = problem(
        channels=24, spatial=(20, 40), conv=geometry_of(torch.empty(24, 16, 3, 3, device="meta"))
    )
    kernels = [k for k in registry().kernels() if isinstance(k, CutlassSm90)]
    assert len(kernels) == 11
    for kernel in kernels:
        reason = kernel.supports(asked, KNOWN[architecture]).reason
        assert f"the device has {architecture / 10}" in reason
        assert kernel.supports(asked, H200) or kernel.precision != "fp32"


def test_shared_memory_is_the_devices():
    """A filter that the H200 keeps in shared memory, on a device that has half as much."""
    half = dataclasses.replace(H200, shared_bytes=H200.shared_bytes // 2)
    row = row_of("bf16", "ping_pong")
    whole = config(row, 64, 64, (256, 256), 3)
    assert whole.support
    assert 0 < whole.shared_bytes <= H200.shared_bytes
    assert "shared memory" in config(row, 64, 64, (256, 256), 3, device=half).support.reason


# ---- the benchmark's problems --------------------------------------------------------------------

#: What is pinned of a schedule, and its values for the convolutions of systems 1 and 2 in either
#: layout on an H200, by math and sharing: a change here is a change of speed.
PINNED = (
    "strips", "tiles", "positions", "strip_width", "pitch_w", "pitch_h", "linear",
    "k_iterations", "staged_positions", "input_rows", "taps_per_stage", "k_blocks_per_stage",
    "tma",
)  # fmt: skip
WIDE = (3, 267, 22702, 86, 88, 260, False)
NARROW = (7, 567, 10318, 38, 40, 260, False)
LINEAR = (39304, 34, 34, 34, True)
SCHEDULES = {
    "system1": {
        ("tf32", "ping_pong"): (*WIDE, 8, 434, 6, 9, 1, True, 17771520),
        ("tf32", "cooperative_m"): (*WIDE, 8, 434, 6, 9, 1, True, 17771520),
        ("tf32", "cooperative_n"): (3, 135, *WIDE[2:], 8, 690, 9, 9, 1, True, 17971200),
        ("tf32x3", "cooperative_m"): (*NARROW, 8, 210, 7, 9, 1, True, 19160064),
        ("tf32x3", "cooperative_n"): (*WIDE, 8, 434, 6, 9, 1, True, 18044928),
        ("f16", "ping_pong"): (*WIDE, 4, 434, 6, 9, 1, True, 9022464),
        ("f16", "cooperative_m"): (*WIDE, 4, 434, 6, 9, 1, True, 9022464),
        ("f16", "cooperative_n"): (3, 135, *WIDE[2:], 4, 690, 9, 9, 1, True, 9123840),
    },
    "system2": {
        ("tf32", "cooperative_m"): (1, 154, *LINEAR, 24, 326, 11, 9, 1, True, 20500480),
        ("tf32", "cooperative_n"): (1, 154, *LINEAR, 24, 582, 19, 9, 1, True, 20500480),
        ("tf32x3", "cooperative_m"): (1, 308, *LINEAR, 24, 198, 7, 9, 1, True, 20815872),
        ("tf32x3", "cooperative_n"): (1, 308, *LINEAR, 24, 326, 11, 9, 1, True, 20815872),
        ("f16", "cooperative_m"): (1, 154, *LINEAR, 12, 326, 11, 9, 1, True, 10407936),
        ("f16", "cooperative_n"): (1, 154, *LINEAR, 12, 582, 19, 9, 1, True, 10407936),
    },
}
#: (channels, output channels, spatial extents, kernel size).
CONVOLUTIONS = {"system1": (64, 64, (256, 256), 3), "system2": (64, 128, (32, 32, 32), 3)}


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("system", SCHEDULES)
def test_schedules_of_the_systems(system, layout):
    expected = dict(SCHEDULES[system])
    for (math_name, sharing), values in SCHEDULES[system].items():
        if math_name == "f16":
            expected["bf16", sharing] = values
    found = {}
    for row in rows():
        p = config(row, *CONVOLUTIONS[system], layout=layout)
        if p.support:
            scratch = p.output_bytes_per_sample + p.partial_bytes_per_sample
            found[row.math.name, row.sharing.name] = (*(getattr(p, n) for n in PINNED), scratch)
    assert found == expected


def strict(kernel: tuple[int, ...], channels: int, precision: str = "fp32"):
    weight = torch.empty(channels, 24, *kernel, device="meta")
    return problem(
        precision=precision,
        channels=channels,
        spatial=(12,) * len(kernel),
        conv=geometry_of(weight),
        norm=None,
    )


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (strict((3, 3), 1), "an output sums 9 products"),
        (strict((1, 1), 11), "an output sums 11 products"),
        (strict((5, 5, 1), 64), "a filter of 25 rows"),
        (strict((5, 3), 3), "3 input channels"),
        (strict((3, 2), 4), None),
        (strict((5, 3), 3, "tf32"), None),
        (strict((4, 4, 5), 64), None),
        (strict((17, 3), 20), "a filter of 17 rows"),
        (strict((5, 5, 1), 64, "tf32"), None),
        (strict((3, 3), 1, "tf32"), None),
    ],
)
def test_strict_fp32_serves_what_it_is_exact_at(asked, reason):
    """Where TF32 is asked for, strict rows are exact enough whatever the sum."""
    refusals = {
        kernel.supports(asked, H200).reason
        for kernel in registry().kernels()
        if kernel.provider == "cutlass_sm90" and kernel.precision == "fp32"
    }
    assert all(refusals) if reason else "" in refusals
    if reason:
        assert all(refusal.startswith(reason) for refusal in refusals)
