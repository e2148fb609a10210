"""A transposed convolution as ordinary ones: pure index arithmetic, shared by every provider.

Along one axis, output o sums weight[k] input[i] over o = stride i + dilation k - padding. Outputs
of one residue a modulo the stride, o = a + stride q, are a sub-pixel phase. With
g = gcd(dilation, stride), its taps solve dilation k = a + padding (mod stride): none where g does
not divide a + padding, else every (stride / g)-th from the smallest solution k0. Tap
k = k0 + j stride / g meets input i = q + f - j dilation / g, with
f = (a + padding - dilation k0) / stride. With the taps reversed that is a forward convolution of
stride 1 whose dilation is dilation / g, with (taps - 1) dilation / g - f zeros in front. Axes are
independent: the phases of several axes are the products of the phases of each.

Groups do not enter: each group of channels is lowered alike.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

from fusedconv.problem import ConvTransposeGeometry
from fusedconv.support import Support


@dataclass(frozen=True)
class AxisPhase:
    """A ``Phase`` along one axis; its fields mean what the Phase's mean."""

    input: int = 1
    output: int = 1
    taps: int = 1
    first_tap: int = 0
    tap_step: int = -1
    lower_padding: int = 0
    dilation: int = 1
    output_offset: int = 0
    output_step: int = 1


@dataclass(frozen=True)
class Phase:
    """A stride-1 forward convolution on channels-last data that yields one sub-pixel phase.

    Every tuple has three entries (depth, height, width); missing leading axes have extent 1.

    - ``input``: extents D H W of the whole input, ``output``: extents of the phase's outputs.
    - ``taps``: extents of the sub-filter, whose channel axes are swapped against the weight's and
      whose tap t is the weight's tap ``first_tap + t tap_step``. An entry of 0 means that no tap
      meets these outputs: the convolution is 0 there, and they must be written all the same.
    - ``lower_padding``: zeros in front of the input; negative where the first ``-lower_padding``
      positions are to be cropped instead. Behind it stand as many zeros as ``output`` needs, or are
      cropped as many positions as it leaves unread.
    - ``dilation``: of the sub-filter, in input positions.
    - ``output_offset``, ``output_step``: output q of the phase is output
      ``output_offset + q output_step`` of the transposed convolution.
    """

    input: tuple[int, int, int]
    output: tuple[int, int, int]
    taps: tuple[int, int, int]
    first_tap: tuple[int, int, int]
    tap_step: tuple[int, int, int]
    lower_padding: tuple[int, int, int]
    dilation: tuple[int, int, int]
    output_offset: tuple[int, int, int]
    output_step: tuple[int, int, int]


def _product(depth: AxisPhase, height: AxisPhase, width: AxisPhase) -> Phase:
    names = [field.name for field in fields(Phase)]
    return Phase(**{n: (getattr(depth, n), getattr(height, n), getattr(width, n)) for n in names})


@dataclass(frozen=True)
class Lowering:
    """The phases of a transposed convolution; iterating yields each ``Phase``, width fastest.

    Together they cover every output exactly once. Phases without outputs are left out. ``axes``
    holds the phases along depth, height and width: their products are made on iteration, since a
    large stride has more of them than is worth keeping.
    """

    conv: ConvTransposeGeometry
    axes: tuple[tuple[AxisPhase, ...], tuple[AxisPhase, ...], tuple[AxisPhase, ...]]

    def __len__(self) -> int:
        return math.prod(len(phases) for phases in self.axes)

    def __iter__(self) -> Iterator[Phase]:
        return itertools.starmap(_product, itertools.product(*self.axes))

    def single(self) -> Phase | Support:
        """The only phase, for kernels that run one convolution of every tap on the whole input.

        Refuses, with the reason, where there are several phases, or where the one leaves out taps
        or crops the input. One that is not refused equals some transposed convolution of stride 1.
        """
        conv = self.conv
        if len(self) != 1:
            return Support.no(
                f"stride is {conv.stride}, which lowers to {len(self)} forward convolutions, only "
                "one is served"
            )
        (phase,) = self
        taps = phase.taps[-len(conv.kernel_size) :]
        if taps != conv.kernel_size:
            return Support.no(
                f"stride is {conv.stride}, which leaves {taps} of {conv.kernel_size} taps, only "
                "all are served"
            )
        if min(phase.lower_padding) < 0:
            return Support.no(
                f"padding {conv.padding} exceeds dilation (kernel - 1): the input would have to be "
                "cropped"
            )
        return phase


def _axis_phases(
    extent: int, outputs: int, kernel: int, stride: int, padding: int, dilation: int
) -> tuple[AxisPhase, ...]:
    divisor = math.gcd(dilation, stride)
    tap_step, sub_dilation = stride // divisor, dilation // divisor
    inverse = pow(sub_dilation, -1, tap_step)
    phases = []
    for offset in range(min(stride, outputs)):
        solvable = (offset + padding) % divisor == 0
        first = (offset + padding) // divisor * inverse % tap_step
        taps = len(range(first, kernel, tap_step)) if solvable else 0
        shift = (offset + padding - dilation * first) // stride
        phases.append(
            AxisPhase(
                input=extent,
                output=len(range(offset, outputs, stride)),
                taps=taps,
                first_tap=first + (taps - 1) * tap_step if taps else 0,
                tap_step=-tap_step,
                lower_padding=(taps - 1) * sub_dilation - shift if taps else 0,
                dilation=sub_dilation,
                output_offset=offset,
                output_step=stride,
            )
        )
    return tuple(phases)


def lower(conv: ConvTransposeGeometry, spatial: tuple[int, ...]) -> Lowering:
    """Lowers a transposed convolution of one to three axes to forward convolutions of stride 1.

    ``spatial`` are the input's extents. Every stride, padding, output padding and dilation that
    torch admits is served; a stride of 1 yields one phase.
    """
    missing = ((AxisPhase(),),) * (3 - len(spatial))
    given = map(
        _axis_phases,
        spatial,
        conv.output_spatial(spatial),
        conv.kernel_size,
        conv.stride,
        conv.padding,
        conv.dilation,
    )
    axes = [*missing, *given]
    return Lowering(conv, (axes[0], axes[1], axes[2]))
