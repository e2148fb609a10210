"""The weight's gradient of a transposed convolution of stride 1 on Hopper, as steps of a program.

It is a sum over positions of products of the input and the output's gradient, in a fixed number of
parts that are added in a fixed order: the same bits on every device. In strict fp32 each product is
three in TF32: of the operands, and of each with what rounding to TF32 leaves of the other.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

from fusedconv import _C
from fusedconv.device import Device
from fusedconv.kernels.compiled import conv_problem
from fusedconv.kernels.cuda.convolution import weight_gradient
from fusedconv.kernels.cuda.phase_planes import compiled_phases, is_strided, of_planes
from fusedconv.kernels.cuda.program import ForwardProgram
from fusedconv.kernels.cuda.sm90 import only_phase
from fusedconv.problem import ForwardProblem
from fusedconv.support import Support


@dataclass(frozen=True)
class CostConstants:
    """What the estimate multiplies, in cycles of a multiprocessor."""

    #: A line of a whole strip for one filter tap, on the tensor cores.
    tap: float
    #: A line, and a byte of it that lands in shared memory, where products take less.
    line: float
    staged_byte: float
    #: What a block costs beside its lines, in lines.
    block_lines: float
    #: Times what copying both tensors takes, where all that takes less.
    passes: float


#: Measured on an H200: both systems' convolutions, planes of 14 to 56 squared, and 18 strided
#: layers, most of them of real models.
COSTS = CostConstants(tap=174.0, line=300.0, staged_byte=0.02, block_lines=20.0, passes=1.5)
#: Of strict fp32, measured on an H100: both systems' convolutions, planes of 14 to 56 squared, and
#: filters of 1 to 6 taps. A line takes a warpgroup so long by itself, with nothing under way while
#: it adds.
STRICT_COSTS = dataclasses.replace(COSTS, tap=423.0, line=1400.0, staged_byte=0.0)


@functools.lru_cache(maxsize=4096)
def _config(row: int, forward: ForwardProblem, device: Device) -> Any:
    room = _C.sm90.wgrad
    planes = _planes(forward)
    return room.Config(
        room.rows()[row],
        problem=conv_problem(only_phase(planes), planes.channels, planes.output_channels),
        batch=forward.batch,
        layout=_C.Layout.nchw,
        device=device.compiled,
    )


def _planes(forward: ForwardProblem) -> ForwardProblem:
    """The problem whose tensors are read."""
    planes = of_planes(forward)
    assert isinstance(planes, ForwardProblem)
    return planes


class WeightSm90:
    """The sums of one way to form products."""

    def __init__(self, math: Any) -> None:
        self._costs = STRICT_COSTS if _C.math_traits(math).precision == "fp32" else COSTS
        rows = enumerate(_C.sm90.wgrad.rows())
        self._rows = [index for index, row in rows if row.math.name == math.name]

    def config(self, forward: ForwardProblem, device: Device) -> Any:
        """Of the row that serves the problem, where its ``support`` says so."""
        configs = [_config(row, forward, device) for row in self._rows]
        return next((config for config in configs if config.support), configs[-1])

    def supports(self, forward: ForwardProblem, device: Device) -> Support:
        return Support.of(self.config(forward, device).support)

    def milliseconds(self, forward: ForwardProblem, device: Device) -> float:
        """Of a supported problem."""
        config, planes, costs = self.config(forward, device), _planes(forward), self._costs
        assert planes.conv is not None
        taps = math.prod(planes.conv.kernel_size[-2:])
        share = config.groups * config.halves / 2
        line = max(taps * costs.tap * share, costs.line + config.stage_bytes * costs.staged_byte)
        blocks = config.tasks * config.splits
        waves = math.ceil(blocks / max(1, device.multiprocessors))
        lines = waves * (math.ceil(config.steps / config.splits) + costs.block_lines)
        read = (forward.input_elements + planes.output_elements) * forward.dtype.itemsize
        total = max(
            lines * line * 1e3 / device.clock_hertz,
            costs.passes * device.copy_milliseconds(read),
        )
        total += device.copy_milliseconds(2 * config.partial_bytes)
        return total + 3 * device.launch_milliseconds

    def append(
        self,
        program: ForwardProgram,
        forward: ForwardProblem,
        device: Device,
        input: Any,
        grad_weight: Any,
    ) -> None:
        """Appends the steps from ``input`` and the output's gradient or its planes, which are the
        program's input; the lines of both are padded."""
        room, config = _C.sm90.wgrad, self.config(forward, device)
        partials = program.scratch(0, config.partial_bytes)
        program.compiled.per_chunk(
            room.SumProducts(config, input=input, grad_output=program.input, partials=partials)
        )
        assert forward.conv is not None
        program.compiled.per_chunk(
            room.AddPartials(
                config,
                partials=partials,
                grad_weight=grad_weight,
                phases=compiled_phases(forward.conv) if is_strided(forward) else None,
                weight=weight_gradient(forward.conv),
            )
        )
