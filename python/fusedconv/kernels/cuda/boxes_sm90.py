"""Transposed convolution by tensor copies, on compute capability 9.0.

For each tap of the filter and chunk of channels, a tensor copy brings a box of the input, shifted
by the tap, to shared memory as the warpgroup instructions want it, with zeros for what lies
outside; two consumer warpgroups multiply boxes of their own by the same block of the filter, or
take boxes in turns, so that one multiplies while the other finishes. Where the filter of few output
channels stays in shared memory, boxes that all taps share are the products' second operand. What
they finish leaves by tensor copies as well, to the pixels of one sub-pixel phase each or, channels
first, with the phases along width side by side. A row is a way in which products are formed, how
many columns (output channels of phases) a block has, and how many neighbouring phases share them.

GroupNorm's moments are taken in the epilogue, in 16 bits by part of the rows, and outputs are
stored channels first where a block has several phases. In 16 bits a weight that is channels last is
read as it lies, else it is packed first.
"""

from __future__ import annotations

import math
from typing import Any

from fusedconv import _C
from fusedconv.device import Device
from fusedconv.kernels.cuda.boxes_costs import CostConstants, Work, launch_cycles
from fusedconv.kernels.cuda.conditions import FAMILIES, NotBuiltForward
from fusedconv.kernels.cuda.convolution import (
    UNGROUPED,
    filter_source,
    goes_through_scratch,
    supports_partials,
)
from fusedconv.kernels.cuda.copied_row import CopiedRow
from fusedconv.kernels.cuda.program import launched_chunks
from fusedconv.norms import KINDS
from fusedconv.plan import Kernel
from fusedconv.problem import ForwardProblem, act_norm_act
from fusedconv.support import Support


class BoxesSm90(CopiedRow):
    """A row of ``_C.sm90.boxes.rows()``."""

    provider = "boxes_sm90"

    @property
    def reads_planes(self) -> bool:
        return bool(self.row.planes)

    @property
    def stores_planes(self) -> bool:
        return bool(self.row.segments > 1)

    def sample_blocks(self, problem: ForwardProblem, config: Any) -> int:
        # Boxes are counted, of which a tile may have two.
        return int(2 * config.launch_tiles(1) * config.blocks)

    def can_take_moments(self, problem: ForwardProblem, config: Any) -> bool:
        return (
            problem.norm_groups > 0
            and bool(config.suits_moments)
            and not self._pads_output(problem)
            and bool(supports_partials(problem, config))
        )

    def takes_moments(self, problem: ForwardProblem, config: Any) -> bool:
        # Of 16 bits a pass over the output takes no longer, unless other blocks multiply meanwhile
        # and phases are added before the lanes of a warp are, or lanes have channels of their own.
        row = self.row
        is_quick = problem.dtype.itemsize == 4 or (row.segments > 1 and row.residents > 1)
        return (is_quick or row.filter_first) and self.can_take_moments(problem, config)

    def reads_weight(self, problem: ForwardProblem, config: Any) -> bool:
        conv = problem.conv
        assert conv is not None
        return bool(config.reads_weight(filter_source(conv)))

    def _normalises(self, problem: ForwardProblem, device: Device) -> bool:
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
        form = act_norm_act(problem.epilogue, frozenset(KINDS))
        if isinstance(form, Support) or not problem.saves_conv_output:
            return False
        if problem.output_dtype != problem.dtype or self._rewrites_output(problem):
            return False
        return form.after == "identity" if form.norm is None else form.norm.kind == "affine"

    def _launch_milliseconds(
        self,
        problem: ForwardProblem,
        device: Device,
        costs: CostConstants,
        stored: int,
        beside: float,
    ) -> float:
        config = self.config(problem, device)
        size, layout = problem.dtype.itemsize, self._conv_layout(problem)
        own = beside + (costs.pixels if self._normalises(problem, device) else 0.0)
        work = Work(self.row, config, layout, size, stored, own)
        boxes = config.partial_slots // len(config.sets)  # of a sample
        cycles = 0.0
        for samples, launches in launched_chunks(problem.batch, self.chunk(problem, config)):
            by_sample = math.ceil(samples * boxes / self.row.boxes)
            tiles = by_sample if beside else config.launch_tiles(samples)
            cycles += launches * launch_cycles(work, tiles, device, costs)
        read, written = self._elements(problem)
        bytes_bound = device.copy_milliseconds((read + stored * written) * size) * costs.moved
        if self.row.stationary:
            bytes_bound *= costs.kept_moved[size]
        computed = cycles * 1e3 / device.clock_hertz
        return max(computed, bytes_bound) + costs.hidden * min(computed, bytes_bound)


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
