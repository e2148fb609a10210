"""Schedules of tap lists by warpgroup products: what lists, tiles and boxes say, by pure index
arithmetic. No GPU."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from problems import geometry_of, problem
from test_taps import H200, Sizes, element_bytes, random_sizes

from fusedconv.kernels.cuda.taps_sm90 import TapsSm90
from fusedconv.lowering import lower
from fusedconv.registry import registry

KERNELS = [kernel for kernel in registry().kernels() if isinstance(kernel, TapsSm90)]
pytestmark = pytest.mark.skipif(not KERNELS, reason="fusedconv was built without these kernels")
names = {"ids": lambda kernel: kernel.name}

INSTRUCTION_ROWS = 64
CONSUMERS = 2


def phases_of(sizes: Sizes):
    """By axis, of each phase: its outputs, and the shifts of its taps."""
    conv = geometry_of(
        sizes.weight(),
        stride=sizes.stride,
        padding=sizes.padding,
        output_padding=sizes.output_padding,
        dilation=sizes.dilation,
    )
    axes = lower(conv, sizes.spatial).axes
    return [
        [
            (p.output, [t * p.dilation - p.lower_padding for t in reversed(range(p.taps))])
            for p in axis
        ]
        for axis in axes
    ]


def drawn(kernel: TapsSm90, seed: int):
    """A random problem that the row serves, in either layout."""
    generator = random.Random(f"{kernel.name} {seed}")
    sizes = random_sizes(generator)
    layout = generator.choice(("nchw", "nhwc"))
    made = sizes.problem(kernel, layout=layout)
    return sizes, made, kernel.config(made, H200)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_lists_hold_what_any_phase_of_a_row_group_reads(kernel, seed):
    sizes, _, config = drawn(kernel, seed)
    assert config.support, config.support.reason
    depth, height, width = phases_of(sizes)
    expected = []
    for (_, dz), (_, dy) in itertools.product(depth, height):
        for first in range(0, len(width), config.group_phases):
            group = width[first : first + config.group_phases]
            columns = sorted({shift for _, shifts in group for shift in shifts})
            expected.append(set(itertools.product(dz, dy, columns)))
    found = [
        [tuple(shift) for shift in config.shifts[begin:end]]
        for begin, end in itertools.pairwise(config.first_tap)
    ]
    assert [set(taps) for taps in found] == expected
    assert all(len(set(taps)) == len(taps) for taps in found)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_blocks_have_every_row_and_tiles_every_position(kernel, seed):
    sizes, _, config = drawn(kernel, seed)
    axes = phases_of(sizes)
    width = len(axes[2])
    assert config.group_channels * config.group_phases == INSTRUCTION_ROWS
    blocks = math.ceil(sizes.out // sizes.groups / config.group_channels)
    sets = width // (config.group_phases * config.joined_groups)
    assert sets * config.group_phases * config.joined_groups == width
    assert config.units == blocks * sets * len(axes[0]) * len(axes[1])
    assert config.blocks_m == math.ceil(config.units / config.block_units)

    columns = kernel.row.columns * (CONSUMERS if config.shares_rows else 1)
    positions = [axis[0][0] for axis in axes]
    if config.order == "line":
        assert all(set(shifts) == {0} for axis in axes for _, shifts in axis if shifts)
        assert config.tiles[2] == math.ceil(math.prod(positions) / columns)
        assert config.tile == [1, 1, columns]
        return
    assert config.tiles == [math.ceil(p / t) for p, t in zip(positions, config.tile, strict=True)]
    reach = [_reach(axis) for axis in axes]
    needed = [tile + high - low for tile, (low, high) in zip(config.tile, reach, strict=True)]
    assert config.box[:2] == needed[:2]
    assert config.box[2] >= config.lead + needed[2]
    assert config.positions >= math.prod(config.box)
    lines = (config.tile[0] - 1) * config.box[1] + config.tile[1]
    if config.order == "boxes":
        assert (lines - 1) * config.box[2] + config.tile[2] <= columns
    elif config.order == "eights":
        assert config.tile[2] <= 8
        assert lines * 8 <= columns
    else:
        instruction = min(kernel.row.columns, 128)
        assert lines * 8 <= instruction
        assert config.tile[2] <= 8 * (columns // instruction)


def _reach(axis) -> tuple[int, int]:
    shifts = [shift for _, shifts in axis for shift in shifts]
    return min(shifts, default=0), max(shifts, default=0)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_shared_memory_holds_the_rings(kernel, seed):
    sizes, made, config = drawn(kernel, seed)
    parts = 2 if kernel.precision == "fp32" else 1
    box = config.positions * config.pieces * 16 * parts
    slot = INSTRUCTION_ROWS * config.pieces * 16 * parts
    assert config.stages >= 2
    assert config.slots & (config.slots - 1) == 0
    assert config.stages * box + config.slots * slot < config.shared_bytes <= H200.shared_bytes
    assert config.positions % 2 == 1
    channels = sizes.channels // sizes.groups * element_bytes(kernel)
    assert config.chunks == math.ceil(channels / (config.pieces * 16))
    assert kernel.estimate(made, H200, _costs()) > 0


def _costs():
    from fusedconv.kernels.cuda.taps_sm90 import COSTS

    return COSTS


def test_many_phases_are_refused():
    kernel = KERNELS[0]
    for stride, reason in ((65, "its stride is 65"), (17, "phases")):
        weight = torch.randn(2, 2, 1, 1)
        conv = geometry_of(weight, stride=(stride, stride))
        made = problem(
            dtype=torch.float32,
            output_dtype=torch.float32,
            precision=kernel.precision,
            channels=2,
            spatial=(3, 3),
            norm=None,
            conv=conv,
        )
        support = kernel.supports(made, H200)
        assert not support
        assert reason in support.reason
