"""Gradients of a strided transposed convolution as those of one of stride 1.

Along one axis, output o sums weight[t] input[i] over o = stride i + dilation t - padding. Plane r
of the stride's phases has position q at output stride q + r - padding, zero where there is none.
With dilation t = stride m + r, tap t takes input i to position i + m of that plane: a transposed
convolution of stride 1 without padding, of M = floor(dilation (kernel - 1) / stride) + 1 taps,
whose output channels are the channels' phases. Its filter has a zero where dilation does not divide
stride m + r, or the quotient is no tap.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

from fusedconv import _C
from fusedconv.device import Device
from fusedconv.kernels.compiled import by_axis, supports_extents
from fusedconv.kernels.cuda.program import ForwardProgram, five_strides
from fusedconv.layout import dense_strides
from fusedconv.precision import COMPILED_DTYPES
from fusedconv.problem import ConvTransposeGeometry, ForwardProblem
from fusedconv.support import Support

#: Of a stride, that are worth planes of their own.
MOST_PHASES = 64


def is_strided(forward: ForwardProblem) -> bool:
    return forward.conv is not None and set(forward.conv.stride) != {1}


@functools.lru_cache(maxsize=1024)
def of_planes(forward: ForwardProblem) -> ForwardProblem | Support:
    """The transposed convolution of stride 1 whose output is the planes of a strided one's, or why
    there is none; one of stride 1 is itself. The epilogue is not the planes'. Where phases have one
    tap, all axes are one."""
    conv = forward.conv
    assert conv is not None
    if not is_strided(forward):
        return forward
    phases = math.prod(conv.stride)
    if phases > MOST_PHASES:
        return Support.no(
            f"stride is {conv.stride}, {phases} phases; up to {MOST_PHASES} are served"
        )
    support = supports_extents(conv, forward.spatial)
    if not support:
        return support
    taps = tuple(
        dilation * (kernel - 1) // stride + 1
        for kernel, stride, dilation in zip(
            conv.kernel_size, conv.stride, conv.dilation, strict=True
        )
    )
    spatial = forward.spatial
    if set(taps) == {1}:  # positions are pixels of the input, in its order
        taps, spatial = (1,), (math.prod(spatial),)
    ones, zeros = (1,) * len(taps), (0,) * len(taps)
    planes = ConvTransposeGeometry(
        in_channels=conv.in_channels,
        out_channels=conv.out_channels * phases,
        kernel_size=taps,
        stride=ones,
        padding=zeros,
        output_padding=zeros,
        dilation=ones,
        groups=conv.groups,
        weight_strides=dense_strides(
            (conv.in_channels, conv.out_channels * phases // conv.groups, *taps), "nchw"
        ),
    )
    return dataclasses.replace(forward, conv=planes, epilogue=(), spatial=spatial)


@functools.lru_cache(maxsize=1024)
def input_convolution(forward: ForwardProblem) -> ForwardProblem | Support:
    """The transposed convolution that takes the output's gradient, or its planes, to the input's,
    over dense NCHW; with stride 1 its weight strides are those of the filter read backwards, from
    its last tap. Refuses what is no such convolution."""
    planes = of_planes(forward)
    if isinstance(planes, Support):
        return planes
    conv = planes.conv
    assert conv is not None
    padding = tuple(
        dilation * (kernel - 1) - pad
        for kernel, pad, dilation in zip(conv.kernel_size, conv.padding, conv.dilation, strict=True)
    )
    if min(padding) < 0:
        return Support.no(f"padding {conv.padding} exceeds dilation (kernel - 1)")
    inputs, outputs, *taps = conv.weight_strides
    backwards = ConvTransposeGeometry(
        in_channels=conv.out_channels,
        out_channels=conv.in_channels,
        kernel_size=conv.kernel_size,
        stride=conv.stride,
        padding=padding,
        output_padding=(0,) * len(padding),
        dilation=conv.dilation,
        groups=conv.groups,
        weight_strides=(outputs, inputs, *(-stride for stride in taps)),
    )
    return ForwardProblem(
        dtype=forward.dtype,
        output_dtype=forward.dtype,
        precision=forward.precision,
        layout="nchw",
        aligned=True,
        batch=forward.batch,
        channels=conv.out_channels,
        spatial=planes.output_spatial,
        conv=backwards,
    )


def compiled_phases(conv: ConvTransposeGeometry) -> Any:
    return _C.PhasePlanes(
        kernel=by_axis(conv.kernel_size),
        stride=by_axis(conv.stride),
        padding=by_axis(conv.padding, 0),
        dilation=by_axis(conv.dilation),
    )


def _problem(forward: ForwardProblem, pitch: int) -> Any:
    """The output's gradient, whose lines begin at multiples of ``pitch``, and its planes."""
    planes = of_planes(forward)
    assert isinstance(planes, ForwardProblem) and forward.conv is not None
    flat = len(planes.spatial) < len(forward.spatial)
    return _C.layout.PhasesProblem(
        batch=forward.batch,
        channels=forward.output_channels,
        extents=by_axis(forward.output_spatial),
        pitch=pitch,
        positions=by_axis(forward.spatial if flat else planes.output_spatial),
        phases=compiled_phases(forward.conv),
        flat=flat,
        dtype=COMPILED_DTYPES[forward.dtype],
    )


@functools.lru_cache(maxsize=1024)
def holds_all(forward: ForwardProblem) -> bool:
    """Whether each of the output's gradient is in some plane: not where taps end before it does."""
    return bool(_problem(forward, forward.output_spatial[-1]).holds_all)


#: Of a split's estimate: times what copying takes, and cycles of a multiprocessor for an element of
#: the planes, more where their lines do not begin at multiples of 16 bytes. Measured on an H200.
_PASSES, _ALIGNED_ELEMENT, _ELEMENT = 1.17, 0.26, 0.85


def split_milliseconds(forward: ForwardProblem, device: Device) -> float:
    """What ``split`` is estimated to take, but for its launch."""
    phases = _problem(forward, forward.output_spatial[-1])
    size = forward.dtype.itemsize
    written = forward.batch * phases.sample_bytes
    copies = _PASSES * device.copy_milliseconds(forward.output_elements * size + written)
    element = _ALIGNED_ELEMENT if phases.aligned else _ELEMENT
    cycles = element * written / size / max(1, device.multiprocessors)
    return max(copies, cycles * 1e3 / device.clock_hertz)


#: What sums by channel are of, and where they lie.
Summed = tuple[Any, Any]


def split(
    program: ForwardProgram,
    name: str,
    forward: ForwardProblem,
    grad: Any,
    pitch: int,
    *,
    sums: bool,
) -> Summed | None:
    """Appends what splits the output's gradient, ``name`` for a person, into planes: the program's
    input. Where planes hold all of it, ``sums`` asks for those by channel too."""
    phases = _problem(forward, pitch)
    program.input = program.scratch(phases.sample_bytes)
    summed, parts = phases.sums(), program.absent
    if sums and phases.holds_all:
        parts = program.scratch(0, summed.bytes)
    program.compiled.per_chunk(
        _C.layout.SplitPhases(name, problem=phases, input=grad, output=program.input, sums=parts)
    )
    return (summed, parts) if parts.present else None


def pack_phases(
    program: ForwardProgram, room: Any, config: Any, conv: ConvTransposeGeometry
) -> Any:
    """Appends what packs a strided weight, its channel axes swapped, for planes that a ``config``
    of ``room`` convolves; where the packed filter lies."""
    inputs, outputs, *taps = conv.weight_strides
    filter = program.scratch(0, config.filter_bytes)
    program.compiled.before(
        room.PackPhases(
            config,
            source=_C.FilterSource(
                c=conv.out_channels,
                k=conv.in_channels,
                taps=by_axis(conv.kernel_size),
                strides=five_strides((outputs, inputs, *taps)),
            ),
            phases=compiled_phases(conv),
            weight=program.weight,
            filter=filter,
        )
    )
    return filter
