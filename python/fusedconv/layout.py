"""Dense layouts of [N, C, *spatial] tensors: channels first ("nchw") and channels last ("nhwc")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Layout = Literal["nchw", "nhwc", "strided"]


def _order(axes: int, layout: str) -> list[int]:
    """The axes from the one that lies closest together outwards."""
    if layout == "nhwc":
        return [1, *range(axes - 1, 1, -1), 0]
    return list(range(axes - 1, -1, -1))


def dense_strides(shape: Sequence[int], layout: str) -> tuple[int, ...]:
    """Strides of a dense tensor in elements."""
    strides = [0] * len(shape)
    expected = 1
    for axis in _order(len(shape), layout):
        strides[axis] = expected
        expected *= shape[axis]
    return tuple(strides)


#: What lines, the runs along the last axis, begin at multiples of where tensor copies read them.
LINE_BYTES = 16


def line_pitch(columns: int, dtype: torch.dtype) -> int:
    """Elements from one padded line to the next."""
    unit = LINE_BYTES // dtype.itemsize
    return -(-columns // unit) * unit


def line_strides(shape: Sequence[int], dtype: torch.dtype) -> tuple[int, ...]:
    """Strides of an NCHW tensor that is dense but for padded lines."""
    return dense_strides((*shape[:-1], line_pitch(shape[-1], dtype)), "nchw")


def lies_in_lines(tensor: Tensor, strides: tuple[int, ...]) -> bool:
    """Whether a tensor lies in padded lines at a multiple of LINE_BYTES; ``strides`` are what
    ``line_strides`` says of its shape and dtype."""
    return tensor.stride() == strides and tensor.data_ptr() % LINE_BYTES == 0


def layout_of(shape: Sequence[int], strides: Sequence[int]) -> Layout:
    """Which dense layout the strides are, "strided" for any other; axes of extent 1 do not matter,
    and what is both is "nchw"."""
    layouts: tuple[Layout, Layout] = ("nchw", "nhwc")
    for layout in layouts:
        expected = 1
        for axis in _order(len(shape), layout):
            if shape[axis] != 1:
                if strides[axis] != expected:
                    break
                expected *= shape[axis]
        else:
            return layout
    return "strided"


#: What torch calls channels last, by a tensor's axes.
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _is_channels_last(tensor: Tensor) -> bool:
    """Whether torch knows a tensor for dense channels last, as it does of most such: sooner than
    strides are read. False says nothing; batches of torch.vmap refuse the question."""
    memory_format = _CHANNELS_LAST.get(tensor.dim())
    if memory_format is None or type(tensor) not in (Tensor, torch.nn.Parameter):
        return False
    try:
        return tensor.is_contiguous(memory_format=memory_format)
    except RuntimeError:
        return False


def result_layout(layout: str) -> Layout:
    """The dense layout of what is computed from a tensor: channels last where that is."""
    return "nhwc" if layout == "nhwc" else "nchw"


def result_layout_of(tensor: Tensor) -> Layout:
    """``result_layout`` of a tensor's own."""
    if tensor.is_contiguous() and tensor.numel():
        return "nchw"  # the same, known sooner
    if _is_channels_last(tensor) and tensor.numel():
        return "nhwc"
    return result_layout(layout_of(tensor.shape, tensor.stride()))


def empty(like: Tensor, shape: Sequence[int], layout: str, dtype: torch.dtype) -> Tensor:
    """An uninitialised dense tensor on the device of ``like``; extents may be symbolic."""
    axes = len(shape)
    if layout != "nhwc":
        return like.new_empty(shape, dtype=dtype)
    physical = [shape[0], *shape[2:], shape[1]]
    return like.new_empty(physical, dtype=dtype).permute(0, axes - 1, *range(1, axes - 1))


def dense(tensor: Tensor, layout: str) -> Tensor:
    """The tensor in a dense layout: itself where it is, else a copy."""
    if layout != "nhwc":
        return tensor.contiguous()
    if _is_channels_last(tensor):
        return tensor
    axes = tensor.dim()
    last = tensor.permute(0, *range(2, axes), 1)
    if last.is_contiguous():
        return tensor
    return last.contiguous().permute(0, axes - 1, *range(1, axes - 1))


def owning(tensor: Tensor) -> Tensor:
    """A tensor whose memory nobody else has, as none that is a view: autograd refuses to change
    views in place that were made where it did not look. It does not follow this."""
    return tensor.data if tensor._is_view() else tensor
