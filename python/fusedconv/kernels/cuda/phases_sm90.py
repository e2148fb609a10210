"""Transposed convolution of stride two, all sub-pixel phases at once, on compute capability 9.0.

Filters of three taps with stride two in 16 bits, along height and width, and depth. A group of four
warps has sums of all phases of a plane of a box of positions, which read the same inputs: a tensor
copy brings these once, for all phases and taps, and the filter stays in shared memory. So it serves
few channels, of which larger tiles of one phase would read the input several times. Where a
normalisation follows whose result alone is asked for, and products take less than memory, it is
convolved twice, as by tensor copies of boxes, whose layouts and padding it shares. A row is how
many axes have a stride, and how many output channels a block has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fusedconv import _C
from fusedconv.device import Device
from fusedconv.kernels.cuda.boxes_costs import CostConstants as BoxesCosts
from fusedconv.kernels.cuda.conditions import FAMILIES, NotBuiltForward
from fusedconv.kernels.cuda.convolution import supports_partials
from fusedconv.kernels.cuda.copied_row import CopiedRow
from fusedconv.kernels.cuda.program import launched_chunks
from fusedconv.norms import KINDS
from fusedconv.plan import Kernel
from fusedconv.problem import ForwardProblem, act_norm_act
from fusedconv.support import Support


@dataclass(frozen=True)
class CostConstants:
    """What ``PhasesSm90`` multiplies, in cycles of a multiprocessor."""

    #: Products, over what the config says of them.
    products: float
    #: A column of a tile in the epilogue: stored, what an activation by special functions adds, and
    #: one of which moments are taken. Groups of warps have their epilogues beside others' products,
    #: but as if they had not: instructions of both are what takes time.
    stored: float
    activation: float
    moments: float
    #: A launch beside its tiles', and a byte of the filter that a block copies first.
    launch: float
    kept_byte: float
    #: What a launch takes whose bytes bound it, over a copy of as many.
    bytes_bound: float


#: From the times of twelve problems in bf16 on an H200, three of each row, as they are, with GELU
#: and with InstanceNorm and GELU, less a fifth of what GELU added, as its polynomial is shorter
#: since: those of 14 to 160 us are estimated within 17 %.
COSTS = CostConstants(
    products=1.02,
    stored=3.1,
    activation=3.6,
    moments=1.5,
    launch=10500.0,
    kept_byte=0.005,
    bytes_bound=1.39,
)


class PhasesSm90(CopiedRow):
    """A row of ``_C.sm90.phases.rows()``."""

    provider = "phases_sm90"

    def sample_blocks(self, problem: ForwardProblem, config: Any) -> int:
        return int(math.prod(config.tiles) * config.channel_blocks)

    def can_take_moments(self, problem: ForwardProblem, config: Any) -> bool:
        return (
            problem.norm_groups > 0
            and not self._pads_output(problem)
            and bool(supports_partials(problem, config))
        )

    def takes_moments(self, problem: ForwardProblem, config: Any) -> bool:
        # Not where it stores: of 16 bits a pass over the output takes no longer.
        return False

    def _activates(self, problem: ForwardProblem, normalises: bool) -> bool:
        """Whether the epilogue has an activation of more than a comparison."""
        form = act_norm_act(problem.epilogue, frozenset(KINDS))
        if isinstance(form, Support) or problem.saves_conv_output:
            return False
        affine = form.norm is not None and form.norm.kind == "affine"
        activation = form.after if normalises or affine else form.before
        return activation not in ("identity", "relu")

    def _launch_milliseconds(
        self,
        problem: ForwardProblem,
        device: Device,
        costs: BoxesCosts,
        stored: int,
        beside: float,
    ) -> float:
        config = self.config(problem, device)
        ranks = max(1, device.multiprocessors // config.channel_blocks)
        turns = math.ceil(config.channel_blocks / max(1, device.multiprocessors))
        cycles = 0.0
        for samples, launches in launched_chunks(problem.batch, self.chunk(problem, config)):
            if stored:
                rounds = math.ceil(samples * math.prod(config.tiles) / ranks)
            else:
                rounds = math.ceil(samples * config.parts / ranks) * config.part_tiles
            products = config.tile_cycles * COSTS.products
            epilogue = COSTS.stored if stored else COSTS.moments
            if stored and self._activates(problem, beside > 0.0):
                epilogue += COSTS.activation
            epilogue *= self.row.columns
            tile = products + epilogue
            own = COSTS.launch + COSTS.kept_byte * config.kept_bytes
            cycles += launches * (rounds * turns * tile + own)
        computed = cycles / device.clock_hertz * 1e3
        read, written = self._elements(problem)
        moved = (read + stored * written) * problem.dtype.itemsize
        return max(computed, COSTS.bytes_bound * device.copy_milliseconds(moved))


def kernels() -> list[Kernel]:
    if "sm90" not in FAMILIES:
        return [NotBuiltForward("sm90_phases", "phases_sm90")]
    room = _C.sm90.phases
    return [PhasesSm90(room, index, row) for index, row in enumerate(room.rows())]
