"""How ``boxes_gradients`` sees a backward problem: as a convolution that gathers, by which rows
serve it and what must be rewritten around them."""

from __future__ import annotations

import functools
from typing import Any

import torch

from fusedconv import _C
from fusedconv.device import Device
from fusedconv.kernels.compiled import by_axis
from fusedconv.kernels.cuda.gradient_tensors import grad_layout
from fusedconv.kernels.cuda.program import five_strides
from fusedconv.kernels.cuda.transposing import has_whole_vectors, whole_channels
from fusedconv.layout import dense_strides
from fusedconv.problem import BackwardProblem, ConvTransposeGeometry, ForwardProblem


def gathering_problem(
    conv: ConvTransposeGeometry, spatial: tuple[int, ...], aligned: bool, dtype: torch.dtype
) -> _C.TransposedProblem:
    """The ordinary convolution that takes the output's gradient to the input's, channels last,
    pixels padded to whole 16 bytes."""
    return _C.TransposedProblem(
        channels=whole_channels(conv.out_channels // conv.groups, dtype),
        output_channels=whole_channels(conv.in_channels // conv.groups, dtype),
        groups=conv.groups,
        input=by_axis(conv.output_spatial(spatial)),
        output=by_axis(spatial),
        kernel=by_axis(conv.kernel_size),
        stride=by_axis(conv.stride),
        padding=by_axis(conv.padding, 0),
        dilation=by_axis(conv.dilation),
        layout=_C.Layout.nhwc,
        aligned=aligned,
    )


@functools.lru_cache(maxsize=4096)
def input_config(
    row: int,
    conv: ConvTransposeGeometry,
    spatial: tuple[int, ...],
    aligned: bool,
    dtype: torch.dtype,
    device: Device,
) -> Any:
    room = _C.sm90.boxes
    return room.Config(
        room.rows()[row],
        problem=gathering_problem(conv, spatial, aligned, dtype),
        device=device.compiled,
        gathers=True,
    )


@functools.lru_cache(maxsize=4096)
def weight_config(
    row: int,
    conv: ConvTransposeGeometry,
    spatial: tuple[int, ...],
    aligned: bool,
    dtype: torch.dtype,
    batch: int,
    device: Device,
) -> Any:
    room = _C.sm90.boxes.weight
    return room.Config(
        room.rows()[row],
        problem=gathering_problem(conv, spatial, aligned, dtype),
        batch=batch,
        device=device.compiled,
    )


def rewrites_grad(problem: BackwardProblem) -> bool:
    """Whether the output's gradient is transposed or padded first."""
    forward = problem.forward
    whole = has_whole_vectors(forward.output_channels, forward.dtype)
    return grad_layout(problem) != "nhwc" or not whole


def rewrites_input(forward: ForwardProblem) -> bool:
    return forward.layout != "nhwc" or not has_whole_vectors(forward.channels, forward.dtype)


def rewrites_back(forward: ForwardProblem) -> bool:
    """Whether the input's gradient is transposed or cut behind."""
    return forward.output_layout != "nhwc" or not has_whole_vectors(forward.channels, forward.dtype)


def reads_weight(config: Any, forward: ForwardProblem) -> bool:
    """Whether the input's gradient reads the weight as it lies, and not packed first."""
    conv = forward.conv
    assert conv is not None
    return bool(config.reads_weight(filter_source(conv, conv.weight_strides)))


def grad_weight_filter(conv: ConvTransposeGeometry) -> Any:
    """The weight's gradient, which is dense, as ``filter_source`` describes the weight."""
    return filter_source(conv, dense_strides(conv.weight_shape, conv.weight_layout))


def writes_weight(config: Any, forward: ForwardProblem) -> bool:
    """Whether the row writes the weight's gradient itself, and leaves no parts to be added."""
    assert forward.conv is not None
    return bool(config.writes(grad_weight_filter(forward.conv)))


def filter_source(conv: ConvTransposeGeometry, strides: tuple[int, ...]) -> Any:
    """The weight as the convolution that gathers reads it: input channels are what it writes."""
    inputs, outputs, *taps = five_strides(strides)
    return _C.FilterSource(
        c=conv.out_channels,
        k=conv.in_channels,
        taps=by_axis(conv.kernel_size),
        strides=(outputs, inputs, *taps),
    )
