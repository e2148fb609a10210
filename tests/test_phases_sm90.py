"""Schedules of transposed convolutions of stride two with all phases at once: products against
torch's operator in float64, packed columns, what is refused, plans and choices. No GPU."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from problems import geometry_of, group_norm_stage, problem
from test_taps import H200
from torch.nn import functional as F

from fusedconv import _C
from fusedconv.benchmark import DTYPES
from fusedconv.kernels.cuda.phases_sm90 import PhasesSm90
from fusedconv.registry import registry

KERNELS = [kernel for kernel in registry().kernels() if isinstance(kernel, PhasesSm90)]
pytestmark = pytest.mark.skipif(not KERNELS, reason="fusedconv was built without these kernels")
names = {"ids": lambda kernel: kernel.name}


def layer(kernel: PhasesSm90, **changes) -> object:
    """A decoder's upsampling, changed."""
    axes, dtype = kernel.row.axes, DTYPES[kernel.precision]
    spatial = changes.get("spatial", (64,) * axes)
    out, channels = changes.pop("out", kernel.row.channels), changes.get("channels", 48)
    taps, stride = changes.pop("taps", 3), changes.pop("stride", 2)
    padding, extra = changes.pop("padding", 1), changes.pop("extra", 1)
    dilation, groups = changes.pop("dilation", 1), changes.pop("groups", 1)
    weight = torch.empty(channels, out // groups, *(taps,) * len(spatial), device="meta")
    conv = geometry_of(
        weight,
        stride=(stride,) * len(spatial),
        padding=(padding,) * len(spatial),
        output_padding=(extra,) * len(spatial),
        dilation=(dilation,) * len(spatial),
        groups=groups,
    )
    fields = dict(
        batch=1,
        channels=channels,
        spatial=spatial,
        dtype=dtype,
        output_dtype=dtype,
        precision=kernel.precision,
        layout="nhwc",
        activation="identity",
        order="norm_act",
        norm=None,
        conv=conv,
    )
    return problem(**{**fields, **changes})


def bits(number: int, axes: int) -> tuple[int, ...]:
    """Of a phase or neighbour, by axis, width last."""
    return tuple(number >> axis & 1 for axis in reversed(range(axes)))


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_products_are_the_convolution(kernel, seed):
    """A phase's output at a position is the sum of its taps by the inputs of its neighbours."""
    generator = random.Random(seed)
    axes = kernel.row.axes
    spatial = tuple(generator.randint(2, 10) for _ in range(axes))
    padding = generator.choice((1, 1, 3)) if min(spatial) > 3 else 1
    extra = generator.randrange(2)
    made = layer(kernel, spatial=spatial, padding=padding, extra=extra)
    config = kernel.config(made, H200)
    assert kernel.supports(made, H200)
    torch.manual_seed(seed)
    x, weight = torch.randn(1, 2, *spatial).double(), torch.randn(2, 3, *[3] * axes).double()
    conv = F.conv_transpose3d if axes == 3 else F.conv_transpose2d
    expected = conv(x, weight, stride=2, padding=padding, output_padding=extra)
    positions = [-(-extent // 2) for extent in expected.shape[2:]]
    found = torch.zeros(3, *[2 * each for each in positions]).double()
    room = 2 * max(*positions, *spatial) + padding + 2
    wide = F.pad(x[0], [0, room] * axes)
    for neighbour, phase in _C.sm90.phases.products(kernel.row):
        odd, ahead = bits(phase, axes), bits(neighbour, axes)
        taps = tuple(map(_C.sm90.phases.tap_of, odd, ahead))
        shifts = config.shift[-axes:]
        inputs = tuple(
            slice(s + a, s + a + n) for s, a, n in zip(shifts, ahead, positions, strict=True)
        )
        target = found[(slice(None), *(slice(o, None, 2) for o in odd))]
        tap = weight[(slice(None), slice(None), *taps)]
        target += torch.einsum("c...,ck->k...", wide[(slice(None), *inputs)], tap)
    within = tuple(slice(0, extent) for extent in expected.shape[2:])
    assert torch.allclose(found[(slice(None), *within)], expected[0])
    tiles = [-(-n // _C.sm90.phases.edge) for n in positions]
    if axes == 3:
        tiles[0] = positions[0]
    assert list(config.tiles)[-axes:] == tiles


@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_every_tap_and_channel_once(kernel):
    axes, channels = kernel.row.axes, kernel.row.channels
    met = []
    for neighbour, phase in _C.sm90.phases.products(kernel.row):
        odd, ahead = bits(phase, axes), bits(neighbour, axes)
        met.append((phase, tuple(map(_C.sm90.phases.tap_of, odd, ahead))))
    expected = [
        (phase, taps)
        for phase in range(1 << axes)
        for taps in itertools.product(*((0, 2) if odd else (1,) for odd in bits(phase, axes)))
    ]
    assert sorted(met) == sorted(expected)
    of = [_C.sm90.phases.channel_of(column, channels) for column in range(channels)]
    assert sorted(of) == list(range(channels))
    # A lane has columns 8 j + 2 t and the next of every eight: neighbours, by whole 16 bytes of
    # each 32 channels.
    for block in range(channels // 32):
        for lane in range(4):
            own = [of[block * 32 + 8 * j + 2 * lane + half] for j in range(4) for half in range(2)]
            assert own == list(range(block * 32 + 8 * lane, block * 32 + 8 * lane + 8))


@pytest.mark.parametrize("steps", [1, 3, 4, 9])
@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_rounds_of_the_filter(kernel, steps):
    """The even plane's by step; then of each step the odd one's two."""
    expected = [(0, step) for step in range(steps)]
    if kernel.row.axes == 3:
        expected += [(product, step) for step in range(steps) for product in (1, 2)]
    rounds = _C.sm90.phases.rounds(kernel.row, steps)
    assert list(map(tuple, rounds)) == expected


@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_stages_hold_what_planes_free_together(kernel):
    """The second plane's consumer waits for its turn until all of a tile's stages were full."""
    for channels in range(8, 257, 8):
        made = layer(kernel, channels=channels)
        config = kernel.config(made, H200)
        if kernel.supports(made, H200):
            chunks = -(-channels // 64)
            assert config.stages >= (max(2, chunks) if kernel.row.axes == 3 else 2)


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_parts_are_all_tiles(kernel, batch):
    for extent in (1, 9, 40, 64):
        made = layer(kernel, spatial=(extent,) * kernel.row.axes, batch=batch)
        config = kernel.config(made, H200)
        tiles = math.prod(config.tiles)
        assert (config.parts - 1) * config.part_tiles < tiles <= config.parts * config.part_tiles
        assert config.partial_slots == kernel.row.consumers * config.parts
        assert config.shared_bytes <= H200.shared_bytes


@pytest.mark.parametrize("kernel", KERNELS, **names)
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(taps=4), "served are filters of 3 taps"),
        (dict(stride=1, extra=0), "served are filters of 3 taps"),
        (dict(dilation=2), "served are filters of 3 taps"),
        (dict(padding=2), "odd padding"),
        (dict(padding=0), "odd padding"),
        (dict(groups=2, out=64, channels=64), "has groups"),
        (dict(channels=1024), "filters of 1024 channels have no room beside a ring"),
    ],
)
def test_what_is_refused(kernel, changes, reason):
    support = kernel.supports(layer(kernel, **changes), H200)
    assert not support and reason in support.reason


@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_filters_beyond_an_index_are_refused(kernel):
    support = kernel.supports(layer(kernel, channels=1 << 26, spatial=(1,) * kernel.row.axes), H200)
    assert not support and "have no room beside a ring" in support.reason


@pytest.mark.parametrize("kernel", KERNELS, **names)
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(output=(1, 0, 8)), "is empty"),
        (dict(input=(1, 4, 0)), "is empty"),
        (dict(output=(1, -3, -3)), "is empty"),
        (dict(output_channels=0), "no channels"),
    ],
)
def test_nothing_to_compute_is_refused(kernel, changes, reason):
    """What the checks of arguments leave to nobody; a schedule would divide by its tiles."""
    deep = kernel.row.axes == 3
    fields = dict(
        channels=16,
        output_channels=16,
        groups=1,
        input=(4 if deep else 1, 4, 4),
        output=(8 if deep else 1, 8, 8),
        kernel=(3 if deep else 1, 3, 3),
        stride=(2 if deep else 1, 2, 2),
        padding=(1 if deep else 0, 1, 1),
        dilation=(1, 1, 1),
        layout=_C.Layout.nhwc,
        aligned=True,
    )
    problem = _C.TransposedProblem(**{**fields, **changes})
    support = _C.sm90.phases.Config(kernel.row, problem=problem, device=H200.compiled).support
    assert not support and reason in support.reason


@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_axes_are_the_rows(kernel):
    other = (16,) * (5 - kernel.row.axes)
    support = kernel.supports(layer(kernel, spatial=other), H200)
    assert not support and f"along {kernel.row.axes} axes" in support.reason


def volume(kernel: PhasesSm90, **changes) -> object:
    """A layer whose products take less than memory, behind it GroupNorm and ReLU."""
    return layer(
        kernel, norm=group_norm_stage(kernel.row.channels // 8), activation="relu", **changes
    )


@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_steps(kernel):
    made = layer(kernel, activation="relu")
    own = f"{kernel.name} (nhwc) + bias"
    assert kernel.compile(made, H200).steps == ("pack filter", f"{own} + relu")
    made = volume(kernel, spatial=(96,) * kernel.row.axes, batch=4)
    assert kernel.compile(made, H200).steps == (
        "pack filter",
        f"{own} + moments",
        "merge moments",
        f"{own} + normalize + relu",
    )


@pytest.mark.parametrize(
    "changes", [{"save": True}, {"order": "act_norm"}, {"output_dtype": torch.float32}], ids=str
)
@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_what_is_saved_activated_before_or_of_another_dtype_is_computed_once(kernel, changes):
    made = volume(kernel, **changes)
    assert not kernel.computes_twice(made, H200)
    steps = kernel.compile(made, H200).steps
    assert sum(step.startswith(kernel.name) for step in steps) == 1
    assert not any("+ moments" in step for step in steps)
