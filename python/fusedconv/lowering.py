"""A transposed convolution as an ordinary one: pure index arithmetic, shared by every provider."""

from __future__ import annotations

from dataclasses import dataclass

from fusedconv.problem import ConvTransposeGeometry


@dataclass(frozen=True)
class ForwardConv:
    """A stride-1 forward convolution on channels-last data that equals a transposed convolution.

    Its filter is the weight with taps reversed and channel axes swapped; ``lower_padding`` zeros
    stand in front of each axis and as many as ``output`` needs behind it. Every tuple has three
    entries (depth, height, width); missing leading axes have extent 1.
    """

    input: tuple[int, int, int]
    output: tuple[int, int, int]
    taps: tuple[int, int, int]
    lower_padding: tuple[int, int, int]
    dilation: tuple[int, int, int]


def _triple(values: tuple[int, ...], fill: int) -> tuple[int, int, int]:
    padded = (fill,) * (3 - len(values)) + tuple(values)
    return (padded[0], padded[1], padded[2])


def lower_unit_stride(conv: ConvTransposeGeometry, spatial: tuple[int, ...]) -> ForwardConv | str:
    """Lowers a transposed convolution of stride 1, or says why it cannot.

    Output o of the transposed convolution sums weight[k] input[i] over o = i + d k - p. With the
    taps reversed, t = kernel - 1 - k, the input position is i = o + d t - (d (kernel - 1) - p): an
    ordinary convolution with d (kernel - 1) - p zeros in front.
    """
    if set(conv.stride) != {1}:
        return f"stride is {conv.stride}, only 1 lowers to a single forward convolution"
    lower = tuple(
        dilation * (kernel - 1) - padding
        for dilation, kernel, padding in zip(
            conv.dilation, conv.kernel_size, conv.padding, strict=True
        )
    )
    if min(lower) < 0:
        return (
            f"padding {conv.padding} exceeds dilation (kernel - 1): the input would have to be "
            "cropped"
        )
    return ForwardConv(
        input=_triple(spatial, 1),
        output=_triple(conv.output_spatial(spatial), 1),
        taps=_triple(conv.kernel_size, 1),
        lower_padding=_triple(lower, 0),
        dilation=_triple(conv.dilation, 1),
    )
