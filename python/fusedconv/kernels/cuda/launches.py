"""The launches of a call, repeated: one look at its tensors, what it returns allocated, and one
call into the compiled module for all its programs.

Each plan of a call by itself looks at tensors, allocates and launches, which in small layers takes
the processor longer than the device computes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedconv import _C
from fusedconv.kernels.cuda.program import allocator, raw_stream
from fusedconv.layout import LINE_BYTES
from fusedconv.noting import Notes

_Guards: Any
try:
    from torch._C._dynamo.guards import TensorGuards as _Guards
except ImportError:  # a private name, which may move; then nothing is repeated
    _Guards = None

#: What a call allocates beside its results lies in one workspace up to so many bytes each, beyond
#: them in memory of its own, as it would without.
_MOST_SHARED_BYTES = 16 << 20
#: The bits of an address that say where in a line it lies.
_IN_LINE = LINE_BYTES - 1
#: Parts of a workspace begin at multiples of so many bytes.
_WORKSPACE_ALIGNMENT = 256


def _end(tensor: Tensor) -> int:
    """The address behind a tensor's last element."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.itemsize


class _Places:
    """Where a repeated call has tensors: addresses that it passes, or parts of a workspace."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int, Callable[[int], Any]]] = []

    def add(self, tensor: Tensor, place: Callable[[int], Any]) -> bool:
        """Whether the tensor's memory is apart from that of all others."""
        first, end = tensor.data_ptr(), _end(tensor)
        if any(first < other_end and other < end for other, other_end, _ in self._ranges):
            return False
        self._ranges.append((first, end, place))
        return True

    def of(self, tensor: Tensor | None) -> Any:
        """A tensor's place, None where it is not known."""
        if tensor is None:
            return _C.Operand()
        address = tensor.data_ptr()
        for first, end, place in self._ranges:
            if first <= address < end:
                return place(address - first)
        return None


class Launches:
    """A call on tensors that lie as those of a call before it."""

    def __init__(
        self,
        given: Sequence[Tensor],
        allocated: Sequence[Tensor],
        results: Sequence[int | None],
        workspace_bytes: int,
        sequence: Any,
    ) -> None:
        device = given[0].device
        self._device = device
        self._index = device.index
        self._matches = _Guards(*given, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        self._allocated = [(tuple(t.shape), t.stride(), t.dtype) for t in allocated]
        self._results = tuple(results)
        self._workspace = ((workspace_bytes,), (1,), torch.uint8) if workspace_bytes else None
        self._sequence = sequence
        self._run = sequence.run

    def run(self, given: Sequence[Tensor]) -> list[Tensor | None] | None:
        """What the call returns on other tensors, all that there are, in the same order; None
        where these lie otherwise."""
        if not self._matches(*given):
            return None
        addresses = [tensor.data_ptr() for tensor in given]
        for address in addresses:
            if address & _IN_LINE:
                return None
        empty = allocator(self._device)
        allocated = [empty(*each) for each in self._allocated]
        addresses += [tensor.data_ptr() for tensor in allocated]
        workspace = 0
        if self._workspace is not None:
            held = empty(*self._workspace)
            workspace = held.data_ptr()
        self._run(addresses, workspace, raw_stream(self._index))
        return [None if place is None else allocated[place] for place in self._results]


def launches_of(
    notes: Notes, given: Sequence[Tensor], results: Sequence[Tensor | None]
) -> Launches | None:
    """What repeats the call of ``notes`` on tensors that lie as ``given``; ``results`` are what it
    returned. None where it cannot be told by them: where it did more than allocate and run
    programs, where tensors share memory, or where one begins at no multiple of 16 bytes."""
    if _Guards is None or not notes.complete or not notes.runs:
        return None
    device = given[0].device
    everything = (*given, *notes.allocated)
    if any(each.device != device or each.numel() == 0 for each in everything):
        return None
    if any(each.data_ptr() % LINE_BYTES for each in given):
        return None
    returned = [each for each in results if each is not None]
    allocated = [
        each
        for each in notes.allocated
        if each.nbytes > _MOST_SHARED_BYTES or any(each is result for result in returned)
    ]
    places = _Places()
    apart = [
        places.add(each, functools.partial(_C.Sequence.address, slot))
        for slot, each in enumerate((*given, *allocated))
    ]
    # Programs' own begin where it does, one after another; what stays between them lies behind.
    workspace_bytes = _aligned(max(run.workspace_bytes for run in notes.runs))
    for each in notes.allocated:
        if not any(each is other for other in allocated):
            apart.append(places.add(each, functools.partial(_in_workspace, workspace_bytes)))
            workspace_bytes += _aligned(each.nbytes)
    found = [
        next((place for place, other in enumerate(allocated) if other is each), None)
        for each in results
    ]
    known = all(
        (each is None) == (place is None) for each, place in zip(results, found, strict=True)
    )
    if not all(apart) or not known:
        return None
    sequence = _C.Sequence(device.index)
    for run in notes.runs:
        pointers = [places.of(each) for each in run.tensors]
        if any(pointer is None for pointer in pointers):
            return None
        sequence.add(run.program, pointers)
    return Launches(given, allocated, found, workspace_bytes, sequence)


def _in_workspace(first: int, offset: int) -> Any:
    return _C.Sequence.workspace(first + offset)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _WORKSPACE_ALIGNMENT) * _WORKSPACE_ALIGNMENT
