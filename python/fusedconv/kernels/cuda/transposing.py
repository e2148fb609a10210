"""Steps that transpose tensors between channels first and channels last."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from fusedconv import _C
from fusedconv.kernels.compiled import group_norm_problem
from fusedconv.kernels.cuda.program import ForwardProgram
from fusedconv.layout import LINE_BYTES, line_pitch
from fusedconv.precision import COMPILED_DTYPES
from fusedconv.problem import ActNormAct

_NOTHING = ActNormAct(False, "identity", None, "identity")


def has_whole_vectors(channels: int, dtype: torch.dtype) -> bool:
    """Whether a pixel's channels are whole 16 bytes, which both directions ask of channels last
    tensors; their addresses are multiples of that too."""
    return channels * dtype.itemsize % LINE_BYTES == 0


def whole_channels(channels: int, dtype: torch.dtype) -> int:
    """Of a pixel that is padded to whole 16 bytes; as they are where kernels would not count so
    many."""
    padded = line_pitch(channels, dtype)
    return padded if padded < 1 << 31 else channels


def padded_elements(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Of a tensor [N, C, ...] whose pixels are padded so."""
    batch, channels, *spatial = shape
    return math.prod((batch, whole_channels(channels, dtype), *spatial))


def transposed_to_channels_first(
    program: ForwardProgram, tensor: Any, channels: int, spatial: tuple[int, ...], name: str
) -> Any:
    """Appends what transposes a channels last tensor [batch, channels, *spatial] of the program's
    dtype, ``name`` for a person, to dense NCHW; where that lies."""
    problem = program.problem
    shaped = dataclasses.replace(
        problem, conv=None, epilogue=(), channels=channels, spatial=spatial
    )
    transposed = program.scratch(channels * math.prod(spatial) * problem.dtype.itemsize)
    program.compiled.per_chunk(
        _C.group_norm.Normalize(
            problem=group_norm_problem(
                shaped,
                _NOTHING,
                input_layout="nhwc",
                output_layout="nchw",
                output_dtype=problem.dtype,
            ),
            input=tensor,
            statistics=program.absent,
            weight=program.absent,
            bias=program.absent,
            output=transposed,
            name=f"transpose {name}",
        )
    )
    return transposed


def transposed_to_channels_last(
    program: ForwardProgram,
    tensor: Any,
    channels: int,
    spatial: tuple[int, ...],
    name: str,
    *,
    layout: str = "nchw",
) -> Any:
    """Appends what writes a dense tensor in a layout channels last, pixels padded with zeros to
    whole 16 bytes; where that lies. The rest is as ``transpose_to_channels_last`` takes it."""
    pixel_bytes = whole_channels(channels, program.problem.dtype) * program.problem.dtype.itemsize
    output = program.scratch(math.prod(spatial) * pixel_bytes)
    transpose_to_channels_last(program, tensor, output, channels, spatial, name, layout=layout)
    return output


def transpose_to_channels_last(
    program: ForwardProgram,
    tensor: Any,
    output: Any,
    channels: int,
    spatial: tuple[int, ...],
    name: str = "the input's gradient",
    *,
    layout: str = "nchw",
) -> None:
    """Appends what writes a dense tensor [batch, channels, *spatial] of the program's dtype,
    ``name`` for a person, from a layout to channels last, pixels padded with zeros to whole 16
    bytes, in ``output``."""
    dtype = program.problem.dtype
    program.compiled.per_chunk(
        _C.layout.ToChannelsLast(
            channels=channels,
            padded_channels=whole_channels(channels, dtype),
            pixels=math.prod(spatial),
            source=_C.Layout[layout],
            dtype=COMPILED_DTYPES[dtype],
            round_tf32=False,
            input=tensor,
            output=output,
            name=f"{'pad' if layout == 'nhwc' else 'transpose'} {name}",
        )
    )
