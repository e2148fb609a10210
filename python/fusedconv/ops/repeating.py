"""Calls whose launches are repeated at once, where nobody wants to see them made."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler

from fusedconv.kernels.cuda.launches import Launches, launches_of
from fusedconv.noting import noting
from fusedconv.ops.watching import is_watched
from fusedconv.plan import BackwardTensors, ForwardPlan
from fusedconv.recording import Call, Composition, record
from fusedconv.selection import forced_kernels

#: A call is noted when it comes for the second time, as the first one plans, and tunes perhaps. Not
#: more than so many times where it cannot be told.
_MOST_TRIES = 3

Results = Sequence[Tensor | None]


class _Known(NamedTuple):
    """What repeats a call, of the tensors at ``places`` and of none at the others."""

    launches: Launches
    places: tuple[int, ...]
    absent: tuple[int, ...]
    forced: str | None

    def run(self, tensors: Results) -> list[Tensor | None] | None:
        """What the call returns, None where it is another one."""
        for place in self.absent:
            if tensors[place] is not None:
                return None
        # Modes, transforms and tracers that watch a call have keys that the launches look at.
        return self.launches.run([tensors[place] for place in self.places])  # type: ignore[misc]


def _is_of_cuda(tensors: Results) -> bool:
    return tensors[0] is not None and tensors[0].is_cuda


def repeated(
    plan: ForwardPlan, key: Hashable, tensors: Results, call: Callable[[], Results]
) -> Results:
    """What ``call()`` returns, new tensors that it computes from ``tensors`` alone, the first one
    among them: by a plan, or by those of its gradients, and by what else ``key`` tells apart."""
    if (
        torch.compiler.is_compiling()
        or record.active
        or profiler._is_profiler_enabled
        or forward_ad._current_level >= 0
    ):
        return call()
    known = plan.repeated
    if known is None:
        known = plan.repeated = {}
    latest = known.get(key)
    if latest is not None and latest.forced == forced_kernels():
        results = latest.run(tensors)
        if results is not None:
            return results
    if not _is_of_cuda(tensors) or is_watched():
        return call()
    forced = forced_kernels()
    own_key = (key, forced, *[each is None for each in tensors])
    before = known.get(own_key)
    if before is None:
        known[own_key] = 0
        return call()
    if isinstance(before, _Known):
        results = before.run(tensors)
        if results is None:
            return call()
        known[key] = before
        return results
    if before >= _MOST_TRIES:
        return call()
    places = tuple(place for place, each in enumerate(tensors) if each is not None)
    absent = tuple(place for place, each in enumerate(tensors) if each is None)
    with noting() as notes:
        found = call()
    launches = launches_of(notes, [each for each in tensors if each is not None], found)
    if launches is None:
        known[own_key] = before + 1
    else:
        known[own_key] = known[key] = _Known(launches, places, absent, forced)
    return found


def repeated_gradients(
    plan: ForwardPlan,
    key: Hashable,
    recording: list[Call | Composition] | None,
    tensors: Results,
    call: Callable[[], Results],
) -> Results:
    """The same of gradients by the plan of a forward pass, but where that was recorded: then every
    call is looked up. ``key`` is none of ``repeated``'s."""
    if recording is not None:
        return call()
    return repeated(plan, (BackwardTensors, key), tensors, call)
