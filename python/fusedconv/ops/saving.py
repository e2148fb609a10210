"""Tensors that autograd keeps for a backward pass, as they were when it got them.

torch.autograd.graph.saved_tensors_hooks may give back others: save_on_cpu with pinned memory, for
one, forgets channels last. Kernels read memory, so that what lies otherwise is brought back first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_top_hooks: Callable[[bool], Any] | None
try:
    from torch._C._autograd import _top_saved_tensors_default_hooks as _top_hooks
except ImportError:  # a private name, which may move; then every call is taken to have hooks
    _top_hooks = None

#: Shape, strides and dtype of each tensor.
Lying = tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype] | None, ...]


def lying(tensors: Sequence[Tensor | None]) -> Lying | None:
    """How tensors lie that are to be saved; None where nothing comes between."""
    if _top_hooks is not None and _top_hooks(False) is None:
        return None
    return tuple(
        None if each is None else (tuple(each.shape), each.stride(), each.dtype) for each in tensors
    )


def as_saved(tensors: Sequence[Any], lies: Lying | None) -> Sequence[Any]:
    """The tensors that ``lying`` was told of, of their strides. Raises RuntimeError where one is of
    another shape or dtype, as autograd's own nodes do."""
    if lies is None:
        return tensors
    return [
        None if each is None or how is None else _brought_back(each, *how)
        for each, how in zip(tensors, lies, strict=True)
    ]


def _brought_back(
    tensor: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise RuntimeError(
            f"saved tensor: got shape {tuple(tensor.shape)} and {tensor.dtype} back from a hook, "
            f"expected {shape} and {dtype}"
        )
    if tensor.stride() == strides:
        return tensor
    # Expanded axes have one element, which is repeated.
    once = [n if stride else min(n, 1) for n, stride in zip(shape, strides, strict=True)]
    values = tensor[tuple(slice(n) for n in once)]
    like: Tensor = tensor.new_empty_strided(once, strides)
    return like.copy_(values).expand(shape)
