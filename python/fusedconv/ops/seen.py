"""Calls seen before, known again by one look at all their tensors.

Reading shapes, strides, dtypes and devices one by one, and checking every argument, takes longer
than a small tensor. What torch.compile guards its own code with reads them in one call, and the
dispatch keys with them: autocast, modes, tracers, transforms and views that negate have keys of
their own. What has none is asked for here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler

from fusedconv.ops.watching import dispatch_modes
from fusedconv.plan import ForwardPlan
from fusedconv.precision import conv_fp32_precision
from fusedconv.recording import record
from fusedconv.selection import cached, forced_kernels, keep, keep_latest, latest_calls

_Guards: Any
try:
    from torch._C._dynamo.guards import TensorGuards as _Guards
except ImportError:  # a private name, which may move; then every call is read argument by argument
    _Guards = None

#: Types of tensors that nobody overrides.
PLAIN = (Tensor, torch.nn.Parameter)

try:
    _is_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
except AttributeError:  # a private name, which may move; then no call is known again

    def _is_wrapped(tensor: Tensor) -> bool:
        return True


#: The tensors of a call, the input first.
Tensors = tuple[Tensor | None, ...]


class Seen(NamedTuple):
    """A call's plan and what else tells the call apart. ``kept`` is what a node of autograd takes
    of it beside its tensors; ``save`` says whether autograd follows it."""

    plan: ForwardPlan
    save: bool
    kept: Any
    arguments: tuple[object, ...]
    matches: Callable[..., bool]
    present: Callable[[Any], Any] | None  # None where all are
    absent: tuple[int, ...]  # the places of the others
    places: int  # of all tensors
    switches: bool  # whether torch's switch of the precision says anything
    state: tuple[object, ...]


def picking(places: Sequence[int]) -> Callable[[Any], Any]:
    """What picks a sequence's elements at some places, one at least, as a tuple."""
    if len(places) == 1:
        (place,) = places
        return lambda sequence: (sequence[place],)
    return operator.itemgetter(*places)


def _state(input: Any, switches: bool) -> tuple[object, ...]:
    """What the guards do not see."""
    return (
        torch.is_grad_enabled(),
        input.data_ptr() & 15 == 0,  # whether kernels may read 16 bytes of it at once
        forced_kernels(),
        conv_fp32_precision() if switches else None,
    )


def _matches(seen: Seen, tensors: Tensors) -> bool:
    """Whether tensors lie as those of a call that had the same ones of them."""
    return seen.matches(*(tensors if seen.present is None else seen.present(tensors)))


def _is_latest(seen: Seen, tensors: Tensors, arguments: tuple[object, ...]) -> bool:
    """Whether a call, of which nothing is known, is this one with the very same arguments, as equal
    ones may be of another type."""
    if len(tensors) != seen.places or len(arguments) != len(seen.arguments):
        return False
    for place in seen.absent:
        if tensors[place] is not None:
            return False
    return (
        _matches(seen, tensors)
        and all(map(operator.is_, arguments, seen.arguments))
        and _state(tensors[0], seen.switches) == seen.state
    )


def _is_exact(value: object) -> bool:
    """Whether only a value of another type can equal this one and be another: no list, which may
    change, and no subclass, which may compare as it likes."""
    if type(value) is tuple:
        return {*map(type, value)} <= {int}
    return type(value) in (bool, int, float, str, NoneType)


def _same(value: object, known: object) -> bool:
    """Whether a value that equals an exact one is of its types: 1, 1.0 and True are equal."""
    return value is known or (type(value) is type(known) and _is_exact(value))


def _key(tensors: Any, arguments: tuple[object, ...]) -> Hashable:
    """What calls of one model differ in, so that none takes another's place."""
    input = tensors[0]
    weight = tensors[1]
    return (
        arguments,
        input.shape,
        input.stride(),
        input.requires_grad,
        None if weight is None else (weight.shape, weight.requires_grad),
        input.dtype,
        input.get_device(),
        *map(type, tensors),  # and which there are
        *_state(input, input.is_cuda),
    )


def recall(tensors: Tensors, arguments: tuple[object, ...]) -> Seen | None:
    """The call of these tensors and arguments, where ``remember`` was told of it and nobody wants
    to see it; None for another one."""
    input: Any = tensors[0]
    # The compiler takes the first question for a constant and looks no further.
    if torch.compiler.is_compiling() or type(input) not in PLAIN:
        return None
    if record.active or forward_ad._current_level >= 0 or profiler._is_profiler_enabled:
        return None
    if dispatch_modes():
        return None
    identity = id(tensors[1])
    # A module's weight is most often in the call that it was in last, and that is known sooner.
    calls = latest_calls()
    seen: Seen | None = calls.get(identity)
    if seen is not None and _is_latest(seen, tensors, arguments):
        return seen
    try:
        seen = cached(_key(tensors, arguments))
    except (AttributeError, RuntimeError, TypeError):
        return None  # a list, or something that the checks of arguments refuse
    if seen is None or not _matches(seen, tensors):
        return None
    known = seen.arguments
    if not all(map(operator.is_, arguments, known)) and not all(map(_same, arguments, known)):
        return None
    keep_latest(calls, identity, seen)
    return seen


def remember(
    tensors: Tensors,
    arguments: tuple[object, ...],
    plan: ForwardPlan,
    save: bool,
    kept: Any,
) -> None:
    """Keeps a call, whose arguments were checked and which ``goes_direct``, for ``recall``."""
    places = [place for place, each in enumerate(tensors) if each is not None]
    given: list[Any] = [tensors[place] for place in places]
    # Guards refuse a tensor that is given twice.
    if _Guards is None or record.active or len(set(map(id, given))) < len(given):
        return
    # Nobody unwraps for a call that is known again what a transform that has ended left wrapped.
    if not all(map(_is_exact, arguments)) or any(map(_is_wrapped, given)):
        return
    input: Any = tensors[0]
    switches = input.is_cuda and input.dtype is torch.float32
    seen = Seen(
        plan,
        save,
        kept,
        arguments,
        _Guards(*given, dynamic_dims_sizes=None, dynamic_dims_strides=None).check,
        None if len(given) == len(tensors) else picking(places),
        tuple(place for place, each in enumerate(tensors) if each is None),
        len(tensors),
        switches,
        _state(input, switches),
    )
    keep(_key(tensors, arguments), seen)
