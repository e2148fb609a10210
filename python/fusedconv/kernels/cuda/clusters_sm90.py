"""Small transposed convolutions with all that follows them in one launch, on compute capability
9.0.

A cluster of blocks computes some output channels of one sample, all of a group that is normalised.
Its blocks divide the output positions and the input channels, add each other's sums up through
shared memory, and normalise what they hold there: nothing is packed, no scratch is written, nothing
waits for another launch. A row is a way in which products are formed (``mma.sync``).
"""

from __future__ import annotations

import functools
import math
from typing import Any

from fusedconv import _C
from fusedconv.device import Device
from fusedconv.kernels.compiled import group_norm_problem, transposed_problem
from fusedconv.kernels.cuda.conditions import FAMILIES, NotBuiltForward
from fusedconv.kernels.cuda.convolution import filter_source, supports_transposed
from fusedconv.kernels.cuda.program import ForwardProgram, ProgramPlan, equal_chunk
from fusedconv.plan import ForwardKernel, Kernel
from fusedconv.precision import Precision
from fusedconv.problem import ConvTransposeGeometry, ForwardProblem
from fusedconv.support import Support

#: Of a launch.
MOST_BLOCKS = (1 << 31) - 1
#: Cycles of a launch beside its blocks', whose estimate is their config's; of the same fit.
LAUNCH_CYCLES = 7900.0
#: The other rows' estimates of problems that this one is for, over their times: what estimates are
#: compared by must be alike.
OPTIMISM = 0.8


@functools.lru_cache(maxsize=4096)
def _config(
    row: int,
    conv: ConvTransposeGeometry,
    spatial: tuple[int, ...],
    layout: str,
    norm_groups: int,
    device: Device,
) -> Any:
    room = _C.sm90.clusters
    return room.Config(
        room.rows()[row],
        problem=transposed_problem(conv, spatial, layout, True),
        source=filter_source(conv),
        norm_groups=norm_groups,
        device=device.compiled,
    )


class ClustersSm90(ForwardKernel):
    """A row of ``_C.sm90.clusters.rows()``."""

    provider = "clusters_sm90"

    def __init__(self, index: int, row: Any) -> None:
        self.index = index
        self.row = row
        self.name = row.name
        self.precision: Precision = _C.math_traits(row.math).precision

    def config(self, problem: ForwardProblem, device: Device) -> Any:
        """How the row serves a problem of any batch size; whether it does is its ``support``."""
        assert problem.conv is not None
        return _config(
            self.index,
            problem.conv,
            problem.spatial,
            problem.output_layout,
            problem.norm_groups,
            device,
        )

    def supports(self, problem: ForwardProblem, device: Device) -> Support:
        common = supports_transposed(problem, device, self.precision, frozenset({"affine"}), 90)
        return Support.of(self.config(problem, device).support) if common else common

    def _sample_blocks(self, config: Any) -> int:
        return int(config.column_blocks * config.slabs * config.shares)

    def cost(self, problem: ForwardProblem, device: Device) -> float:
        config = self.config(problem, device)
        waves = math.ceil(problem.batch * config.column_blocks / config.resident)
        cycles = LAUNCH_CYCLES + waves * config.block_cycles
        moved = 0
        if problem.layout == "strided":
            moved = 2 * problem.input_elements * problem.dtype.itemsize
        milliseconds = OPTIMISM * cycles / device.clock_hertz * 1e3
        return float(milliseconds + device.copy_milliseconds(moved))

    def compile(self, problem: ForwardProblem, device: Device) -> ProgramPlan:
        config = self.config(problem, device)
        chunk = equal_chunk(problem.batch, MOST_BLOCKS // self._sample_blocks(config))
        program = ForwardProgram(problem, device, chunk)
        layout = problem.output_layout
        absent = program.form.norm is None
        program.compiled.per_chunk(
            _C.sm90.clusters.Forward(
                config,
                norm=group_norm_problem(
                    problem, program.form, input_layout=layout, output_layout=layout
                ),
                input=program.input,
                weight=program.weight,
                bias=program.bias,
                norm_weight=program.absent if absent else program.norm_weight,
                norm_bias=program.absent if absent else program.norm_bias,
                output=program.output,
                conv_output=program.conv_output,
                mean=program.mean,
                rstd=program.rstd,
            )
        )
        return program.plan(self.name)


def kernels() -> list[Kernel]:
    if "sm90" not in FAMILIES:
        return [NotBuiltForward("sm90_clusters", "clusters_sm90")]
    return [ClustersSm90(index, row) for index, row in enumerate(_C.sm90.clusters.rows())]
