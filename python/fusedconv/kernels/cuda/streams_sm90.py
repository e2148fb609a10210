"""Transposed convolution along one axis, channels first in TF32, on compute capability 9.0.

What ``lines_sm90`` serves in 16 bits: filters of more than one stride and up to two. In TF32 the
tensor cores want channels innermost of what they read from shared memory, so that positions come
from registers, by lines of the input as they lie, and the filter streams beside them. A row is how
many columns, phases of channels, a block has.
"""

from __future__ import annotations

from fusedconv import _C
from fusedconv.kernels.cuda.conditions import FAMILIES, NotBuiltForward
from fusedconv.kernels.cuda.line_row import LineRow
from fusedconv.plan import Kernel


class StreamsSm90(LineRow):
    """A row of ``_C.sm90.streams.rows()``."""

    provider = "streams_sm90"
    pack_cycles = 1000.0
    bytes_bound = 1.45


def kernels() -> list[Kernel]:
    if "sm90" not in FAMILIES:
        return [NotBuiltForward("sm90_streams", "streams_sm90")]
    room = _C.sm90.streams
    return [StreamsSm90(room, index, row) for index, row in enumerate(room.rows())]
