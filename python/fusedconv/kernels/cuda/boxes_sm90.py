"""Transposed convolution by tensor copies, on compute capability 9.0.

For each tap of the filter and chunk of channels, a tensor copy brings a box of the input, shifted
by the tap, to shared memory as the warpgroup instructions want it, with zeros for what lies
outside; two consumer warpgroups multiply boxes of their own by the same block of the filter, or
take boxes in turns, so that one multiplies while the other finishes. What they finish leaves by
tensor copies as well, to the pixels of one sub-pixel phase each or, channels first, with the phases
along width side by side. A row is a way in which products are formed, how many columns (output
channels of phases) a block has, and how many neighbouring phases share them.

GroupNorm's moments are taken in the epilogue, in 16 bits by part of the rows. Where only the result
is asked for and products take less than memory, it is convolved twice: for the moments, of which
nothing is stored, and with the normalisation in the epilogue.

Copies start at whole 16 bytes: shifted by a pixel along width they read channels last. So inputs in
NCHW are transposed first, unless the filter is as large as its stride; outputs where the row has
one phase in a block. Pixels that are not whole 16 bytes are padded in front and cut behind.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fusedconv import _C
from fusedconv.activations import COMPILED
from fusedconv.device import Device
from fusedconv.kernels.compiled import readable_aligned
from fusedconv.kernels.cuda.convolution import (
    UNGROUPED,
    goes_through_scratch,
    supports_partials,
)
from fusedconv.kernels.cuda.program import (
    FAMILIES,
    ForwardProgram,
    NotBuiltForward,
    ProgramPlan,
    launched_chunks,
)
from fusedconv.kernels.cuda.taps import TapsRow, taps_config
from fusedconv.kernels.cuda.transposing import (
    has_whole_vectors,
    padded_elements,
    whole_channels,
)
from fusedconv.norms import KINDS
from fusedconv.plan import Kernel
from fusedconv.problem import ForwardProblem, act_norm_act
from fusedconv.support import Support

#: Cycles that a column takes of a step at full rate.
COLUMN_CYCLES = 4.0


@dataclass(frozen=True)
class CostConstants:
    """What ``BoxesSm90.estimate`` multiplies, in cycles of a multiprocessor."""

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
    #: element.
    halo: Mapping[int, float]
    #: Where the filter stays: a step beside its products; what a tile's epilogue takes of others'
    #: time, over a group of warps' own, by bytes of an element.
    kept_step: float
    #: From when a stage is given back until what is copied to it has landed.
    latency: float
    kept_epilogue: Mapping[int, float]
    #: Where bytes bound that, over what they take elsewhere.
    kept_moved: Mapping[int, float]
    #: A launch beside these.
    launch: float
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
#: the best.
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
    kept_step=40.0,
    latency=900.0,
    kept_epilogue={2: 0.42, 4: 0.64},
    kept_moved={2: 0.9, 4: 1.0},
    launch=9000.0,
    moved=1.42,
    hidden=0.02,
    transposed=1.5,
    pack=3e-12,
)


def tile_cycles(
    row: Any,
    config: Any,
    layout: str,
    size: int,
    costs: CostConstants,
    stored: int = 1,
    beside: float = 0.0,
) -> float:
    """Of a tile and all columns, each ``stored`` so many times and with cycles ``beside``;
    ``layout`` is the output's, ``size`` an element's."""
    steps = 0.0
    parts = row.segments // row.alike  # instructions of a step of channels
    # Taps that boxes with halos are copied for: the first of a set in each plane.
    firsts = {
        first + [shift[0] for shift in config.shifts[first : first + taps]].index(plane)
        for *_, first, taps in config.sets
        for plane in {shift[0] for shift in config.shifts[first : first + taps]}
    }
    for tap, mask in enumerate(config.masks):
        own = row.columns
        if row.segments > 1:
            own = row.columns // row.segments * mask.bit_count()
        lines = _C.sm90.boxes.box_positions * row.boxes + own
        if row.halo:
            box = config.halo_bytes // _C.sm90.boxes.chunk_bytes
            lines = own + (box * row.boxes if tap in firsts else 0)
        copied = lines * _C.sm90.boxes.chunk_bytes * costs.copied
        full_rate = own * COLUMN_CYCLES * row.boxes / 2
        steps += max(full_rate * costs.products[parts], copied)
        steps += costs.step
    column = costs.column[layout, size] * (stored if stored else costs.unstored) + beside
    products: float = steps * config.channel_blocks * config.chunks
    epilogue: float = config.blocks * (row.columns * column + costs.block)
    if row.boxes == 1:
        return max(products, (products + epilogue) / 2) * costs.turns[row.columns, size]
    if row.residents == 1:
        return products + epilogue
    products *= costs.shared_products[parts]
    epilogue *= costs.shared_epilogue[layout, size]
    total = max(products, epilogue) + costs.shorter[size] * min(products, epilogue)
    return total * costs.halo[size] if row.halo else total


def stationary_cycles(
    row: Any,
    config: Any,
    layout: str,
    size: int,
    tiles: int,
    device: Device,
    costs: CostConstants,
    stored: int,
    beside: float,
) -> float:
    """Of a launch of a row whose filter stays: each multiprocessor has a block of columns, and of
    its tiles takes the longest of products, copies and a share of what groups of warps do."""
    taps = max(taps for *_, taps in config.sets)
    steps = taps * config.chunks
    products = row.columns * COLUMN_CYCLES / 2 * costs.products[1] + costs.kept_step
    copied = _C.sm90.boxes.box_positions * _C.sm90.boxes.chunk_bytes * costs.copied
    column = costs.column[layout, size] * (stored if stored else costs.unstored) + beside
    epilogue = row.columns * column + costs.block
    waited = costs.latency / max(1, config.stages - 1)
    tile = max(steps * max(products, copied, waited), costs.kept_epilogue[size] * epilogue)
    filter = steps * row.columns * _C.sm90.boxes.chunk_bytes * costs.copied
    rounds = math.ceil(tiles / max(1, device.multiprocessors // config.blocks))
    return float(rounds * tile + filter + costs.launch)


def launch_cycles(
    row: Any,
    config: Any,
    layout: str,
    size: int,
    tiles: int,
    device: Device,
    costs: CostConstants,
    stored: int = 1,
    beside: float = 0.0,
) -> float:
    """Of a launch of so many tiles; the rest as of ``tile_cycles``."""
    if row.stationary:
        return stationary_cycles(row, config, layout, size, tiles, device, costs, stored, beside)
    tile = tile_cycles(row, config, layout, size, costs, stored, beside)
    multiprocessors = max(1, device.multiprocessors)
    whole, left = divmod(tiles, multiprocessors)
    # Tiles that are left over are divided by blocks of columns.
    rounds = whole + math.ceil(left * config.blocks / multiprocessors) / config.blocks
    return float(rounds * tile + costs.launch)


class BoxesSm90(TapsRow):
    """A row of ``_C.sm90.boxes.rows()``."""

    provider = "boxes_sm90"
    architecture = 90
    most_blocks = (1 << 30) - 1

    def config(self, problem: ForwardProblem, device: Device) -> Any:
        aligned = self._rewrites_input(problem) or readable_aligned(problem)
        layout = self._conv_layout(problem)
        if self._pads_input(problem) or self._pads_output(problem):
            problem = self._padded(problem)
        return taps_config(self.room, self.index, problem, layout, aligned, device)

    def _padded(self, problem: ForwardProblem) -> ForwardProblem:
        """The problem with the channels that the convolution's tensors have in memory."""
        conv = problem.conv
        assert conv is not None
        inputs, outputs = conv.in_channels, conv.out_channels
        if self._pads_input(problem):
            inputs = whole_channels(inputs, problem.dtype)
        if self._pads_output(problem):
            outputs = whole_channels(outputs, problem.dtype)
        padded = dataclasses.replace(conv, in_channels=inputs, out_channels=outputs)
        return dataclasses.replace(problem, channels=inputs, conv=padded)

    def _pads_input(self, problem: ForwardProblem) -> bool:
        """Whether pixels of the input are padded with zeros to whole 16 bytes, as copies of pixels
        ask."""
        conv = problem.conv
        assert conv is not None
        whole = has_whole_vectors(problem.channels, problem.dtype)
        return not whole and conv.groups == 1 and not self.row.planes

    def _pads_output(self, problem: ForwardProblem) -> bool:
        """The same of what the convolution stores, which is cut behind it."""
        conv = problem.conv
        assert conv is not None
        whole = has_whole_vectors(problem.output_channels, problem.dtype)
        return not whole and conv.groups == 1 and self._conv_layout(problem) == "nhwc"

    def _row_channels(self, problem: ForwardProblem) -> int:
        """Of a pixel that the convolution stores."""
        channels = problem.output_channels
        return whole_channels(channels, problem.dtype) if self._pads_output(problem) else channels

    def _rewrites_input(self, problem: ForwardProblem) -> bool:
        """Whether it is transposed or padded first."""
        if self.row.planes:
            return False
        return problem.output_layout != "nhwc" or self._pads_input(problem)

    def _conv_layout(self, problem: ForwardProblem) -> str:
        """Of the convolution's output."""
        return problem.output_layout if self.row.segments > 1 else "nhwc"

    def _rewrites_output(self, problem: ForwardProblem) -> bool:
        """Whether a pass behind the convolution transposes or cuts it."""
        return self._conv_layout(problem) != problem.output_layout or self._pads_output(problem)

    def sample_blocks(self, problem: ForwardProblem, config: Any) -> int:
        # Boxes are counted, of which a tile may have two.
        return int(2 * config.launch_tiles(1) * config.blocks)

    def supports(self, problem: ForwardProblem, device: Device) -> Support:
        support = super().supports(problem, device)
        if not support or not self._rewrites_output(problem):
            return support
        form = act_norm_act(problem.epilogue, frozenset(KINDS))
        norm = None if isinstance(form, Support) else form.norm
        if norm is not None and norm.kind == "layer" and not self._normalises(problem, device):
            return Support.no("the passes that transpose its output have no norm of pixels")
        return Support.yes()

    def _elements(self, problem: ForwardProblem) -> tuple[int, int]:
        """Of the tensors that the convolution reads and stores, padding counted."""
        read, written = problem.input_elements, problem.output_elements
        if self._pads_input(problem):
            read = padded_elements(problem.input_shape, problem.dtype)
        if self._pads_output(problem):
            written = padded_elements(problem.output_shape, problem.dtype)
        return read, written

    def can_take_moments(self, problem: ForwardProblem, config: Any) -> bool:
        return (
            problem.norm_groups > 0
            and bool(config.suits_moments)
            and not self._pads_output(problem)
            and bool(supports_partials(problem, config))
        )

    def takes_moments(self, problem: ForwardProblem, config: Any) -> bool:
        # Of 16 bits a pass over the output takes no longer, unless other blocks multiply meanwhile
        # and phases are added before the lanes of a warp are.
        is_quick = problem.dtype.itemsize == 4 or (self.row.segments > 1 and self.row.residents > 1)
        return is_quick and self.can_take_moments(problem, config)

    def can_compute_twice(self, problem: ForwardProblem, device: Device) -> bool:
        form = act_norm_act(problem.epilogue, frozenset(KINDS))
        return (
            not isinstance(form, Support)
            and form.before == "identity"
            and not problem.save
            and not goes_through_scratch(problem)
            and not self._rewrites_output(problem)
            and self.can_take_moments(problem, self.config(problem, device))
        )

    def computes_twice(self, problem: ForwardProblem, device: Device) -> bool:
        """Whether the convolution is computed once for moments and once more, normalised."""
        if not self.can_compute_twice(problem, device):
            return False
        twice, once = (
            self._milliseconds(problem, device, COSTS, twice=each) for each in (True, False)
        )
        return twice < once

    def scratch_bytes(self, problem: ForwardProblem, config: Any) -> int:
        elements = 0
        if self._rewrites_input(problem):
            channels = problem.channels
            if self._pads_input(problem):
                channels = whole_channels(channels, problem.dtype)
            elements += math.prod(problem.spatial) * channels
        if self._rewrites_output(problem):
            channels = self._row_channels(problem)
            # What is of another dtype than the result is counted as in scratch as it is.
            if goes_through_scratch(problem):
                channels -= problem.output_channels
            elements += math.prod(problem.output_spatial) * channels
        scratch = super().scratch_bytes(problem, config) + elements * problem.dtype.itemsize
        if self.can_take_moments(problem, config) and not self.takes_moments(problem, config):
            scratch += int(config.partial_bytes_per_sample)  # where it is computed twice
        return scratch

    def _normalises(self, problem: ForwardProblem, device: Device) -> bool:
        """Whether the convolution's epilogue normalises pixels, whose channels a block has all."""
        form = act_norm_act(problem.epilogue, UNGROUPED)
        return (
            not isinstance(form, Support)
            and form.norm is not None
            and form.norm.kind == "layer"
            and form.before == "identity"
            # It takes longer to store both from such an epilogue than to go over what is saved.
            and not problem.saves_conv_output
            and not goes_through_scratch(problem)
            and not self._pads_output(problem)
            and bool(self.config(problem, device).holds_pixels)
        )

    def _saves_apart(self, problem: ForwardProblem) -> bool:
        """Whether the convolution's epilogue stores its output, which is saved, and what becomes of
        that: an activation and an affine map, in the same layout and dtype."""
        form = act_norm_act(problem.epilogue, frozenset(KINDS))
        if isinstance(form, Support) or not problem.saves_conv_output:
            return False
        if problem.output_dtype != problem.dtype or self._rewrites_output(problem):
            return False
        return form.after == "identity" if form.norm is None else form.norm.kind == "affine"

    def passes(self, problem: ForwardProblem, device: Device) -> int:
        return 0 if self.computes_twice(problem, device) else self._passes_of_one(problem, device)

    def _passes_of_one(self, problem: ForwardProblem, device: Device) -> int:
        """Behind a convolution that is computed once."""
        if self._normalises(problem, device) or self._saves_apart(problem):
            return 0
        return super().passes(problem, device)

    def _rewrite_input(self, program: ForwardProgram) -> None:
        """Appends what transposes or pads the input, where something does."""
        problem = program.problem
        if self._rewrites_input(problem):
            padded = whole_channels(problem.channels, problem.dtype)
            program.input = program.channels_last_input(padded_channels=padded)

    def convolve(
        self,
        program: ForwardProgram,
        config: Any,
        output: Any,
        filter: Any | None = None,
        saved: Any | None = None,
    ) -> Any:
        problem = program.problem
        self._rewrite_input(program)
        if not self._normalises(problem, program.device):
            return super().convolve(program, config, output, filter, saved)
        if filter is None:
            filter = self.pack_filter(program, config)
        norm = self.behind(program)
        self._convolve_normalising(program, config, output, filter, norm, program.absent)
        return program.absent

    def _convolve_normalising(
        self,
        program: ForwardProgram,
        config: Any,
        output: Any,
        filter: Any,
        norm: Any,
        statistics: Any,
    ) -> None:
        """Appends what normalises in its epilogue: pixels where there are no statistics."""
        program.compiled.per_chunk(
            self.room.ConvolveNormalizing(
                config,
                norm=norm,
                input=program.input,
                filter=filter,
                bias=program.bias,
                statistics=statistics,
                weight=program.norm_weight,
                norm_bias=program.norm_bias,
                output=output,
            )
        )

    def compile(self, problem: ForwardProblem, device: Device) -> ProgramPlan:
        config = self.config(problem, device)
        program = ForwardProgram(problem, device, self.chunk(problem, config))
        if self._saves_apart(problem):
            self.convolve(program, config, program.output, saved=program.conv_output)
            return program.plan(self.name)
        if self.computes_twice(problem, device):
            self._rewrite_input(program)
            filter = self.pack_filter(program, config)
            partials = program.scratch(config.partial_bytes_per_sample)
            program.compiled.per_chunk(
                self.room.Convolve(
                    config,
                    activation=COMPILED["identity"],
                    activates_output=True,
                    input=program.input,
                    filter=filter,
                    bias=program.bias,
                    output=program.absent,
                    partials=partials,
                )
            )
            norm, statistics = self.statistics(program, config, partials)
            self._convolve_normalising(program, config, program.output, filter, norm, statistics)
            return program.plan(self.name)
        if not self._rewrites_output(problem):
            return super().compile(problem, device)
        row_channels = self._row_channels(problem)
        pixels = math.prod(problem.output_spatial)
        output = program.scratch(pixels * row_channels * problem.dtype.itemsize)
        program.conv_layout, program.conv_row_channels = "nhwc", row_channels
        partials = self.convolve(program, config, output)
        if problem.saves_conv_output:
            program.save_conv_output(output, row_channels=row_channels)
        if self.passes(problem, device) == 0:
            program.transpose(output, program.output, row_channels=row_channels)
        else:
            self.finish(program, config, output, partials)
        return program.plan(self.name)

    def cost(self, problem: ForwardProblem, device: Device) -> float:
        return self.estimate(problem, device, COSTS)

    def _launch_milliseconds(
        self,
        problem: ForwardProblem,
        device: Device,
        costs: CostConstants,
        stored: int,
        beside: float,
    ) -> float:
        """The convolution once; with something of a GroupNorm ``beside`` a column, boxes are of one
        sample."""
        config = self.config(problem, device)
        size, layout = problem.dtype.itemsize, self._conv_layout(problem)
        own = beside + (costs.pixels if self._normalises(problem, device) else 0.0)
        boxes = config.partial_slots // len(config.sets)  # of a sample
        cycles = 0.0
        for samples, launches in launched_chunks(problem.batch, self.chunk(problem, config)):
            by_sample = math.ceil(samples * boxes / self.row.boxes)
            tiles = by_sample if beside else config.launch_tiles(samples)
            cycles += launches * launch_cycles(
                self.row, config, layout, size, tiles, device, costs, stored, own
            )
        read, written = self._elements(problem)
        bytes_bound = device.copy_milliseconds((read + stored * written) * size) * costs.moved
        if self.row.stationary:
            bytes_bound *= costs.kept_moved[size]
        computed = cycles * 1e3 / device.clock_hertz
        return max(computed, bytes_bound) + costs.hidden * min(computed, bytes_bound)

    def estimate(self, problem: ForwardProblem, device: Device, costs: CostConstants) -> float:
        """Milliseconds of a supported problem, were the constants these."""
        twice = self.computes_twice(problem, device)
        return self._milliseconds(problem, device, costs, twice)

    def _milliseconds(
        self, problem: ForwardProblem, device: Device, costs: CostConstants, twice: bool
    ) -> float:
        config = self.config(problem, device)
        size = problem.dtype.itemsize
        takes_moments = twice or self.takes_moments(problem, config)
        read, written = self._elements(problem)
        packed = config.filter_bytes / size * costs.pack * 1e3
        chunks = -(-problem.batch // self.chunk(problem, config))
        if twice:
            milliseconds = self._launch_milliseconds(problem, device, costs, 0, costs.moments[size])
            milliseconds += self._launch_milliseconds(problem, device, costs, 1, costs.normalised)
            launches = 1 + 3 * chunks
            moved = 2 * problem.input_elements * size if problem.layout == "strided" else 0
            beside = device.copy_milliseconds(moved) + launches * device.launch_milliseconds
        else:
            stored = 1 + self._saves_apart(problem)
            moments = costs.moments[size] if takes_moments else 0.0
            milliseconds = self._launch_milliseconds(problem, device, costs, stored, moments)
            passes = self._passes_of_one(problem, device)
            beside = self.milliseconds_beside(problem, device, chunks, passes)
        if takes_moments:
            # Partial moments, read as sectors of which a group may have a part.
            partials = 2 * problem.batch * config.partial_bytes_per_sample
            beside += device.copy_milliseconds(partials)
        elif problem.norm_groups:
            # A pass takes the moments, in two launches where one merges what the convolution left.
            beside += device.copy_milliseconds(problem.output_elements * size)
            beside += chunks * device.launch_milliseconds
        if self._rewrites_input(problem):
            rewritten = device.copy_milliseconds((problem.input_elements + read) * size)
            beside += rewritten * costs.transposed
            beside += chunks * device.launch_milliseconds
        if self._rewrites_output(problem):
            # What normalises transposes as well, more slowly than it would go over planes.
            stores_result = self._passes_of_one(problem, device) == 0
            trips = costs.transposed if stores_result else costs.transposed - 1.0
            rewritten = device.copy_milliseconds((problem.output_elements + written) * size)
            beside += rewritten * trips
            beside += chunks * device.launch_milliseconds
        return milliseconds + packed + beside


def kernels() -> list[Kernel]:
    if "sm90" not in FAMILIES:
        return [NotBuiltForward("sm90_boxes", "boxes_sm90")]
    room = _C.sm90.boxes
    # Blocks of 128 columns that have a multiprocessor to themselves compute input gradients alone:
    # forward, where they store more for as many products, others are quicker.
    forward = [
        (index, row)
        for index, row in enumerate(room.rows())
        if row.columns > 128 or row.residents > 1 or row.stationary
    ]
    return [BoxesSm90(room, index, row) for index, row in forward]
