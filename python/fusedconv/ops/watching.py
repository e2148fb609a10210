"""Whether anybody but autograd wants to see the calls that are made."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import forward_ad

try:
    functorch_level = torch._C._functorch.peek_interpreter_stack
except AttributeError:  # a private name, which may move

    def functorch_level() -> None:  # type: ignore[misc]
        return None


_is_tracing = torch.jit.is_tracing  # type: ignore[attr-defined]


def modes_untold() -> int:
    """Where torch does not tell, every call goes through the dispatcher, as with a mode."""
    return 1


#: How many modes see what is dispatched. Guards of tensors overlook torch's own: those of fake
#: tensors, of ``make_fx`` and of functionalisation. A private name, which may move.
dispatch_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", modes_untold)


def is_watched() -> bool:
    """Whether a compiler, tracer, mode or transform wants to see the calls that are made."""
    if torch.compiler.is_compiling():
        return True
    return bool(
        dispatch_modes()
        or functorch_level() is not None
        or forward_ad._current_level >= 0
        or _is_tracing()
    )
