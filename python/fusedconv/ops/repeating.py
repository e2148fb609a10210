"""Calls whose launches are repeated at once, where nobody wants to see them made."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler

from fusedconv.kernels.cuda.launches import Launches, launches_of
from fusedconv.noting import noting
from fusedconv.ops.seen import picking
from fusedconv.ops.watching import dispatch_modes, is_watched
from fusedconv.plan import ForwardPlan
from fusedconv.recording import record
from fusedconv.selection import forced_kernels

#: A call is noted when it comes for the second time, as the first one plans, and tunes perhaps. Not
#: more than so many times where it cannot be told.
_MOST_TRIES = 3

Results = Sequence[Tensor | None]


class _Known(NamedTuple):
    """What repeats a call, of tensors that ``given`` picks and of none at the places ``absent``."""

    launches: Launches
    given: Callable[[Results], Sequence[Tensor]]
    absent: tuple[int, ...]
    forced: str | None

    def run(self, tensors: Results) -> list[Tensor | None] | None:
        """What the call returns, None where it is another one."""
        for place in self.absent:
            if tensors[place] is not None:
                return None
        # Modes, transforms and tracers that watch a call have keys that the launches look at.
        return self.launches.run(self.given(tensors))


try:
    _has_storage: Callable[[Tensor], bool] = torch._C._has_storage
except AttributeError:  # a private name, which may move; then no call is repeated

    def _has_storage(tensor: Tensor) -> bool:
        return False


def _is_of_cuda(tensors: Results) -> bool:
    return tensors[0] is not None and tensors[0].is_cuda


def _lie_in_memory(tensors: Results) -> bool:
    """Not so what autograd makes of gradients that it takes as a batch."""
    return all(each is None or _has_storage(each) for each in tensors)


def repeated(
    plan: ForwardPlan,
    key: Hashable,
    tensors: Results,
    call: Callable[..., Results],
    *arguments: Any,
) -> Results:
    """What ``call(*arguments)`` returns, new tensors that it computes from ``tensors`` alone, the
    first one among them: by a plan, or by those of its gradients, and by what else ``key`` tells
    apart, the pass too."""
    if (
        torch.compiler.is_compiling()
        or record.active
        or profiler._is_profiler_enabled
        or forward_ad._current_level >= 0
        or dispatch_modes()
    ):
        return call(*arguments)
    known = plan.repeated
    if known is None:
        known = plan.repeated = {}
    latest = known.get(key)
    if latest is not None and latest.forced == forced_kernels():
        results = latest.run(tensors)
        if results is not None:
            return results
    return _looked_up(known, key, tensors, call, arguments)


def _looked_up(
    known: dict[Hashable, Any],
    key: Hashable,
    tensors: Results,
    call: Callable[..., Results],
    arguments: tuple[Any, ...],
) -> Results:
    """The same of a call that is not the one known last under its key."""
    if not _is_of_cuda(tensors) or is_watched() or not _lie_in_memory(tensors):
        return call(*arguments)
    forced = forced_kernels()
    own_key = (key, forced, *[each is None for each in tensors])
    before = known.get(own_key)
    if before is None:
        known[own_key] = 0
        return call(*arguments)
    if isinstance(before, _Known):
        results = before.run(tensors)
        if results is None:
            return call(*arguments)
        known[key] = before
        return results
    if before >= _MOST_TRIES:
        return call(*arguments)
    places = [place for place, each in enumerate(tensors) if each is not None]
    absent = tuple(place for place, each in enumerate(tensors) if each is None)
    with noting() as notes:
        found = call(*arguments)
    launches = launches_of(notes, [each for each in tensors if each is not None], found)
    if launches is None:
        known[own_key] = before + 1
    else:
        known[own_key] = known[key] = _Known(launches, picking(places), absent, forced)
    return found
