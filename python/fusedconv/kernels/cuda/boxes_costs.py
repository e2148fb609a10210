"""What convolutions by tensor copies are estimated to take on compute capability 9.0: forward ones
and, by the same rows, gradients of inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fusedconv import _C
from fusedconv.device import Device

#: Cycles that a column takes of a step at full rate.
COLUMN_CYCLES = 4.0


@dataclass(frozen=True)
class CostConstants:
    """What estimates multiply, in cycles of a multiprocessor where nothing else is said."""

    #: A step's products, over their cycles at full rate, by a row's segments that differ in taps.
    products: Mapping[int, float]
    #: A byte that a step copies.
    copied: float
    #: A step beside the longer of these.
    step: float
    #: A column of a block in the epilogue, by layout and bytes of an element.
    column: Mapping[tuple[str, int], float]
    #: A block of columns beside these.
    block: float
    #: A column's moments, by bytes of an element, its GroupNorm by statistics, and a norm over
    #: channels; one that is not stored, over one that is.
    moments: Mapping[int, float]
    pixels: float
    normalised: float
    unstored: float
    #: Where blocks share a multiprocessor: a row's products and epilogue, over those of one that
    #: has it to itself, by segments and by layout and bytes of an element; what the shorter of the
    #: two adds to the longer, over itself, by bytes of an element.
    shared_products: Mapping[int, float]
    shared_epilogue: Mapping[tuple[str, int], float]
    shorter: Mapping[int, float]
    #: Where groups of warps take turns: all of a tile over the longer of its products and half of
    #: what one group does, by columns and bytes of an element.
    turns: Mapping[tuple[int, int], float]
    #: Where a box has what all taps read: all of a tile, over what the rest says, by bytes of an
    #: element, and where no tap reads more than the slab.
    halo: Mapping[int, float]
    no_halo: float
    #: Where the filter stays: a step beside its products; what a tile's epilogue takes of others'
    #: time, over a group of warps' own, by bytes of an element.
    kept_step: float
    kept_epilogue: Mapping[int, float]
    #: Where the filter is the first operand: a step's products, over their cycles at full rate.
    filter_first: float
    #: Where bytes bound those whose filter stays, over what they take elsewhere.
    kept_moved: Mapping[int, float]
    #: A launch beside these, and what of it waits for a pass in front that packs the filter or
    #: rewrites the input.
    launch: float
    behind_pass: float
    #: All of it where bytes bound it, over their time at copy rate, and what of the shorter of the
    #: two adds to the longer.
    moved: float
    hidden: float
    #: Passes that transpose a tensor from one layout to the other, over their time at copy rate.
    transposed: float
    #: Seconds of an element of the packed filter.
    pack: float


#: Fitted to the times of layers of real models in both layouts, tf32 and bf16, on an H200, of 18
#: and those of rows that share a multiprocessor of 22: the cheapest row by these takes 0.6 % longer
#: than the best. What moments and GroupNorm add is of seven layers on an H100. Turns, norms over
#: channels and what is hidden are of ten layers on another H200; turns, halos and filters that stay
#: of 15 layers, channels last but two, on a third, where the cheapest row takes 0.6 % longer than
#: the best. Halos of no reach are of two layers on a fourth, what waits for a pass of 20
#: small layers channels last in bf16, whose weights are read as they lie, on another.
COSTS = CostConstants(
    products={1: 0.90, 2: 1.14, 4: 1.25},
    copied=0.0131,
    step=200.0,
    column={("nhwc", 2): 18.8, ("nhwc", 4): 25.3, ("nchw", 2): 25.2, ("nchw", 4): 39.0},
    block=1030.0,
    moments={2: 18.0, 4: 10.0},
    pixels=20.0,
    normalised=9.0,
    unstored=0.1,
    shared_products={1: 0.92, 2: 0.99, 4: 1.24},
    shared_epilogue={("nhwc", 2): 0.72, ("nhwc", 4): 1.02, ("nchw", 2): 0.66, ("nchw", 4): 0.84},
    shorter={2: 1.0, 4: 0.83},
    turns={(256, 4): 0.94, (384, 2): 1.2, (384, 4): 1.1},
    halo={2: 0.94, 4: 0.98},
    no_halo=1.1,
    kept_step=40.0,
    kept_epilogue={2: 0.42, 4: 0.64},
    filter_first=1.1,
    kept_moved={2: 0.9, 4: 1.0},
    launch=9000.0,
    behind_pass=5700.0,
    moved=1.42,
    hidden=0.02,
    transposed=1.5,
    pack=3e-12,
)


@dataclass(frozen=True)
class Work:
    """What a launch of a row of ``_C.sm90.boxes.rows()`` does by its config. ``layout`` is the
    output's, ``size`` the bytes of an element; each column of a block is ``stored`` so many times
    and has cycles ``beside``."""

    row: Any
    config: Any
    layout: str
    size: int
    stored: int = 1
    beside: float = 0.0

    def epilogue(self, costs: CostConstants) -> float:
        """Of a block's columns."""
        column = costs.column[self.layout, self.size]
        column *= self.stored if self.stored else costs.unstored
        return float(self.row.columns * (column + self.beside) + costs.block)


def tile_cycles(work: Work, costs: CostConstants) -> float:
    """Of a tile and all columns."""
    row, config, size = work.row, work.config, work.size
    steps = 0.0
    parts = row.segments // row.alike  # instructions of a step of channels
    halo_taps = _box_taps(config) if row.halo else frozenset()
    for tap, mask in enumerate(config.masks):
        own = row.columns
        if row.segments > 1:
            own = row.columns // row.segments * mask.bit_count()
        lines = _C.sm90.boxes.box_positions
        if row.halo:
            lines = config.halo_bytes // _C.sm90.boxes.chunk_bytes if tap in halo_taps else 0
        copied = (lines * row.boxes + own) * _C.sm90.boxes.chunk_bytes * costs.copied
        full_rate = own * COLUMN_CYCLES * row.boxes / 2
        steps += max(full_rate * costs.products[parts], copied)
        steps += costs.step
    products: float = steps * config.channel_blocks * config.chunks
    epilogue = config.blocks * work.epilogue(costs)
    if row.boxes == 1:
        return max(products, (products + epilogue) / 2) * costs.turns[row.columns, size]
    if row.residents == 1:
        return products + epilogue
    products *= costs.shared_products[parts]
    epilogue *= costs.shared_epilogue[work.layout, size]
    total = max(products, epilogue) + costs.shorter[size] * min(products, epilogue)
    if not row.halo:
        return total
    slab_bytes = _C.sm90.boxes.box_positions * _C.sm90.boxes.chunk_bytes
    return total * (costs.halo[size] if config.halo_bytes > slab_bytes else costs.no_halo)


def _box_taps(config: Any) -> frozenset[int]:
    """The taps that boxes with halos are copied for: the first of a set in each plane."""
    firsts = set()
    for *_, first, taps in config.sets:
        planes = [shift[0] for shift in config.shifts[first : first + taps]]
        firsts |= {first + planes.index(plane) for plane in planes}
    return frozenset(firsts)


def stationary_cycles(work: Work, tiles: int, device: Device, costs: CostConstants) -> float:
    """Of a launch of so many tiles by a row whose filter stays: each multiprocessor has a block of
    columns, and of its tiles takes the longest of products, copies and a share of what groups of
    warps do."""
    row, config = work.row, work.config
    steps = max(taps for *_, taps in config.sets) * config.chunks
    epilogue = costs.kept_epilogue[work.size] * work.epilogue(costs)
    if row.filter_first:
        slabs = config.multiplied / config.partial_slots / _C.sm90.boxes.box_positions
        products = slabs * row.columns * COLUMN_CYCLES / 2 * costs.filter_first
        tile = max(steps * products, slabs * epilogue)
    else:
        products = row.columns * COLUMN_CYCLES / 2 * costs.products[1] + costs.kept_step
        copied = _C.sm90.boxes.box_positions * _C.sm90.boxes.chunk_bytes * costs.copied
        tile = max(steps * max(products, copied), epilogue)
    filter = config.kept_bytes * costs.copied
    rounds = math.ceil(tiles / max(1, device.multiprocessors // config.blocks))
    return float(rounds * tile + filter + costs.launch)


def launch_cycles(work: Work, tiles: int, device: Device, costs: CostConstants) -> float:
    """Of a launch of so many tiles."""
    if work.row.stationary:
        return stationary_cycles(work, tiles, device, costs)
    multiprocessors = max(1, device.multiprocessors)
    whole, left = divmod(tiles, multiprocessors)
    # Tiles that are left over are divided by blocks of columns.
    blocks = work.config.blocks
    rounds = whole + math.ceil(left * blocks / multiprocessors) / blocks
    return float(rounds * tile_cycles(work, costs) + costs.launch)
