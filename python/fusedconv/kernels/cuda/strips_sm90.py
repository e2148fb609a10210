"""Convolutions with 3 x 3 taps and up to 64 input channels on Hopper (sm_90a), NCHW of 16 bits, by
blocks that go down strips of the image.

The filter stays in registers, and lines of the input are read from shared memory as they lie, with
a copy for each tap of a filter's row. What they store is the convolution with its bias, in lines of
whole 16 bytes: GroupNorm and the activation in front of it are one pass behind. They serve outputs
as wide as the input, and gradients of inputs whose lines are whole 16 bytes. A row is how many
columns before an output's the filter reads.
"""

from __future__ import annotations

import math
from typing import Any

from fusedconv import _C
from fusedconv.device import Device
from fusedconv.kernels.cuda.conditions import FAMILIES, NotBuiltForward
from fusedconv.kernels.cuda.convolution import InPlaceRow
from fusedconv.kernels.cuda.program import ForwardProgram
from fusedconv.kernels.cuda.sm90_runs import CostConstants, RunsSm90
from fusedconv.norms import KINDS
from fusedconv.plan import Kernel
from fusedconv.problem import ActNormAct, ForwardProblem, act_norm_act
from fusedconv.support import Support

#: Cycles of the tensor cores for a line of 64 positions and channels: 9 taps in steps of 16.
_LINE_CYCLES = 36 * 32.0
#: What products take of what the estimate of the runs says of theirs: system 1's input gradient in
#: bf16 took 0.83 to 0.88 ms for 1.01 to 1.10, by profiles on H200s. Blocks of few lines took half
#: of what the runs did, which is not counted.
_OVER_RUNS = 0.8
#: Cycles of a line that is read beside a block's own.
_HALO_LINE = 100.0


class StripsSm90(RunsSm90):
    """A row of ``_C.sm90.strips.rows()``."""

    packs_phases = False

    def supports(self, problem: ForwardProblem, device: Device) -> Support:
        support = super().supports(problem, device)
        if not support or self._stores_plainly(problem) or self.streams_norm(problem, device):
            return support
        return Support.no("stores the convolution with its bias alone, not what is activated")

    def estimate(self, problem: ForwardProblem, device: Device, costs: CostConstants) -> float:
        """Milliseconds of a supported problem, were the constants of the runs these."""
        config = self.config(problem, device)
        chunk = self.chunk(problem, config)
        height = problem.output_spatial[-2]
        lines = math.ceil(chunk * height / min(config.sets, chunk * height))
        segments = math.ceil((lines + height - 1) / height)
        line = _LINE_CYCLES * costs.main_loop * _OVER_RUNS
        rounds = math.ceil(config.strips * config.blocks_n / max(1, device.multiprocessors))
        cycles = (lines * line + segments * 2 * _HALO_LINE) * rounds
        chunks = -(-problem.batch // chunk)
        size = problem.dtype.itemsize
        output = problem.output_elements * size
        moved = problem.input_elements * config.blocks_n * size + output
        conv = max(chunks * cycles * 1e3 / device.clock_hertz, device.copy_milliseconds(moved))
        if problem.norm_groups and not self.streams_norm(problem, device):
            # A pass that takes the moments.
            conv += device.copy_milliseconds(output) + chunks * device.launch_milliseconds
        return conv + self.milliseconds_beside(problem, device, chunks)

    def most_samples(self, problem: ForwardProblem, config: Any) -> int:
        return int(self.room.most_lines) // problem.output_spatial[-2]

    def streams_norm(self, problem: ForwardProblem, device: Device) -> bool:
        """Whether one pass behind the convolution activates, takes the moments and normalises:
        wherever it can, as nothing else activates. A sample's bits then depend on its batch, in
        whose order the pass merges moments."""
        return self.can_stream_norm(problem, device)

    def finish(self, program: ForwardProgram, config: Any, input: Any, partials: Any) -> None:
        InPlaceRow.finish(self, program, config, input, partials)

    def _stores_plainly(self, problem: ForwardProblem) -> bool:
        form = act_norm_act(problem.epilogue, frozenset(KINDS))
        assert isinstance(form, ActNormAct)
        return form.before == "identity" or problem.saves_conv_output


def kernels() -> list[Kernel]:
    """Rows of outputs as wide as the input. Others' lines are whole 16 bytes only where the
    input's are not, which output gradients are padded for."""
    if "sm90" not in FAMILIES:
        return [NotBuiltForward("sm90_strips", "cutlass_sm90")]
    room = _C.sm90.strips
    return [
        StripsSm90(room, index, row) for index, row in enumerate(room.rows()) if row.before == 1
    ]
