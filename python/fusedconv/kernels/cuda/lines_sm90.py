"""Transposed convolution along one axis, channels first in 16 bits, on compute capability 9.0.

Filters of more than one stride and up to two, as vocoders' upsamplings have them, give each phase
of the output two taps. Both are multiplied by the same lines of the input, which are read as they
lie, and what they gave at neighbouring positions is added behind the products; the filter stays in
shared memory. A row is how many groups of four warps multiply: each has rows of the filter of its
own, or where that is too large for it a tile of positions.
"""

from __future__ import annotations

from typing import Any

from fusedconv import _C
from fusedconv.kernels.cuda.conditions import FAMILIES, NotBuiltForward
from fusedconv.kernels.cuda.line_row import LineRow
from fusedconv.plan import Kernel

#: Cycles of a byte of the filter that a block copies first.
KEPT_BYTE_CYCLES = 0.04


class LinesSm90(LineRow):
    """A row of ``_C.sm90.lines.rows()``."""

    provider = "lines_sm90"
    pack_cycles = 5700.0
    bytes_bound = 1.15

    def kept_cycles(self, config: Any) -> float:
        return float(KEPT_BYTE_CYCLES * config.kept_bytes)


def kernels() -> list[Kernel]:
    if "sm90" not in FAMILIES:
        return [NotBuiltForward("sm90_lines", "lines_sm90")]
    room = _C.sm90.lines
    return [LinesSm90(room, index, row) for index, row in enumerate(room.rows())]
