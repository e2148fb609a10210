"""When a module must call its children instead of reading their parameters.

A fused kernel computes what torch's own modules compute. A child that is something else, or that
carries hooks, does what only a call of it does: the module then composes, as eager's forward would.
"""

from __future__ import annotations

import logging
import sys
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize

from fusedconv.recording import Composition, record

logger = logging.getLogger("fusedconv")

_global_forward_hooks = torch_module._global_forward_hooks
_global_forward_pre_hooks = torch_module._global_forward_pre_hooks
_global_backward_hooks = torch_module._global_backward_hooks
_global_backward_pre_hooks = torch_module._global_backward_pre_hooks

_HOOKS = {
    "_forward_hooks": "forward hooks",
    "_forward_pre_hooks": "forward pre-hooks",
    "_backward_hooks": "backward hooks",
    "_backward_pre_hooks": "backward pre-hooks",
}


def _forward_of_torch(cls: type[nn.Module]) -> object:
    """A class's ``forward``, or nothing that it can equal where someone had replaced it already."""
    forward = cls.forward
    at_home = getattr(forward, "__globals__", None) is vars(sys.modules[cls.__module__])
    return forward if at_home else None


_FORWARD: dict[type[nn.Module], object] = {}


def watch(*classes: type[nn.Module]) -> None:
    """Notes what ``departure`` takes for the forward of torch's classes, and of ours made from
    them."""
    _FORWARD.update((cls, _forward_of_torch(cls)) for cls in classes)


watch(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.GroupNorm, nn.ReLU)


def is_replaced(cls: type[nn.Module]) -> bool:
    """Whether someone has replaced the forward of a class that ``watch`` has seen."""
    return cls.forward is not _FORWARD[cls]


_CALL = nn.Module.__call__


def departure(name: str, child: Any, expected: type[nn.Module]) -> str | None:
    """Why a call of ``child`` may do more than ``expected``, one of torch's classes, does.

    None where it does that and no more. A parametrised child counts as plain: its parameters are
    computed where they are read.
    """
    if type(child) is expected and expected.forward is _FORWARD[expected]:
        state = child.__dict__
        if not (
            state["_forward_hooks"]
            or state["_forward_pre_hooks"]
            or state["_backward_hooks"]
            or state["_backward_pre_hooks"]
            or "forward" in state
            or _global_forward_hooks
            or _global_forward_pre_hooks
            or _global_backward_hooks
            or _global_backward_pre_hooks
            or expected.__call__ is not _CALL
        ):
            return None
    return _departure(name, child, expected)


def _departure(name: str, child: Any, expected: type[nn.Module]) -> str | None:
    cls = type(child)
    if cls is not expected and not _only_parametrized(child, expected):
        return f"{name} is {cls.__module__}.{cls.__qualname__}, not {_public(expected)}"
    reason = hooked(name, child)
    if reason is not None:
        return reason
    if cls.forward is not _FORWARD[expected]:
        return f"{_public(expected)}.forward has been replaced"
    # torch's tracers replace the call while they trace, and see the operators too.
    call = cls.__call__
    if call is not _CALL and not _is_torchs(call):
        return f"{_public(expected)}.__call__ has been replaced"
    return None


def hooked(name: str, child: nn.Module) -> str | None:
    """Why a call of ``child`` does more than its class's forward; None where it does not."""
    for attribute, kind in _HOOKS.items():
        if getattr(child, attribute):
            return f"{name} has {kind}"
    if (
        _global_forward_hooks
        or _global_forward_pre_hooks
        or _global_backward_hooks
        or _global_backward_pre_hooks
    ):
        return "hooks on all modules are registered"
    if "forward" in child.__dict__:
        return f"{name} has a forward of its own"
    return None


def any_hooked_within(module: nn.Module) -> bool:
    """Whether ``hooked`` says anything of a module within ``module``. Asked for at each call of a
    model, so that it looks at what hooks are kept in itself."""
    inner = [each for each in module._modules.values() if each is not None]
    if inner and (
        _global_forward_hooks
        or _global_forward_pre_hooks
        or _global_backward_hooks
        or _global_backward_pre_hooks
    ):
        return True
    seen = set(inner)
    for each in inner:  # which grows
        state = each.__dict__
        if (
            state["_forward_hooks"]
            or state["_forward_pre_hooks"]
            or state["_backward_hooks"]
            or state["_backward_pre_hooks"]
            or "forward" in state
        ):
            return True
        children = state.get("_modules")
        if children is None:  # traced modules keep theirs elsewhere
            children = each._modules
        for below in children.values():
            if below is not None and below not in seen:
                seen.add(below)
                inner.append(below)
    return False


def _only_parametrized(child: Any, expected: type[nn.Module]) -> bool:
    """Whether torch.nn.utils.parametrize made the child's class from ``expected``."""
    return (
        isinstance(child, nn.Module)
        and type(child).__bases__ == (expected,)
        and parametrize.is_parametrized(child)
    )


def _is_torchs(function: Any) -> bool:
    module: str = getattr(function, "__globals__", {}).get("__name__", "")
    return module.partition(".")[0] == "torch"


def _public(cls: type[nn.Module]) -> str:
    return f"torch.nn.{cls.__name__}"


def announce(module: nn.Module, reason: str, steps: tuple[tuple[str, object], ...]) -> None:
    """Notes for ``explain`` that ``module`` composes, and logs each reason once, at INFO.

    ``steps`` are names and what is called under them: children, or None for functions of torch.
    """
    if torch.compiler.is_compiling():
        return
    name = type(module).__name__
    _log(name, reason)
    if record.active:
        shown = (
            step if called is None else f"{step} ({type(called).__name__})"
            for step, called in steps
        )
        record.note_composition(Composition(name, reason, tuple(shown)))


@lru_cache(maxsize=256)
def _log(name: str, reason: str) -> None:
    """The cache is what makes it once: 256 reasons are remembered."""
    logger.info("%s composes its children: %s", name, reason)
