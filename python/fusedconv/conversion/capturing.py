"""Modules whose forward code joins chains: torch.compile follows it, and chains are replaced in the
graphs that it finds, which then run as they are, without a compiler.

torch.compile guards whatever the code depends on (training mode, attributes, shapes, hooks) and
leaves to Python what it cannot follow, so that results are those of the code.
"""

from __future__ import annotations

import functools
import itertools
import re
import types
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule
from torch.fx import _symbolic_trace as symbolic_trace

from fusedconv.composing import any_hooked_within
from fusedconv.conversion.classes import Converted, original_type
from fusedconv.conversion.graphs import Found, Rewriting, logger, rewrite
from fusedconv.conversion.modules import Chain, flattened, is_sequence
from fusedconv.conversion.stages import CONVOLUTIONS
from fusedconv.ops import is_watched

#: torch before 2.8 has the former name only.
_is_symbolic_tracing: Callable[[], bool] = getattr(
    symbolic_trace, "is_fx_symbolic_tracing", symbolic_trace.is_fx_tracing
)


#: What decides which chains there are in the same code: training, and whether autograd follows.
_Mode = tuple[bool, bool]


def _mode_of(module: nn.Module) -> _Mode:
    return module.training, torch.is_grad_enabled()


class _Capture:
    """The captured forward of one module, to be called with it, and the chains found in it so far,
    by the mode of the call."""

    def __init__(self, code: Any) -> None:
        self.found: dict[_Mode, Rewriting] = {}
        self._code = code
        self._forwards: dict[_Mode, Callable[..., Any]] = {}
        self._given_up: set[_Mode] = set()

    def _compiled(self, mode: _Mode) -> Callable[..., Any]:
        code = self._code
        # A code object of its own: torch.compile counts graphs by code, and gives up after some.
        own = types.FunctionType(
            code.__code__.replace(), code.__globals__, code.__name__, code.__defaults__,
            code.__closure__,
        )  # fmt: skip
        own.__kwdefaults__ = code.__kwdefaults__
        return torch.compile(own, backend=functools.partial(self._backend, mode))

    def _backend(
        self, mode: _Mode, graph_module: GraphModule, inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        called = _for_compilers_only(graph_module)
        if called is not None:
            self._given_up.add(mode)
            reason = f"its code is not followed: it calls {called}"
            self.found[mode] = Rewriting([], [Found("", reason)])
            # The code that was to run as this graph runs as it is.
            raise import_module("torch._dynamo.exc").SkipFrame(called)
        if mode not in self._given_up:
            found = self.found[mode]
            try:
                done = rewrite(graph_module)
            except Exception as error:
                logger.warning("compile_pass: a graph is left as it is", exc_info=True)
                reason = f"a graph of its code is left as it is: {type(error).__name__}: {error}"
                done = Rewriting([], [Found("", reason)])
            found.replaced.extend(done.replaced)
            found.refused.extend(done.refused)
        # The module itself would be called with the hooks on all modules.
        return graph_module.forward

    def forget_absent(self) -> None:
        """Drops the modes in which no chain was found, so that the next calls look again."""
        kept = {mode for mode, each in self.found.items() if each.replaced} | self._given_up
        self.found = {mode: each for mode, each in self.found.items() if mode in kept}

    def call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        mode = _mode_of(module)
        self.found.setdefault(mode, Rewriting([], []))
        forward = self._forwards.get(mode)
        if forward is None:
            forward = self._forwards[mode] = self._compiled(mode)
        return forward(module, *args, **kwargs)


def _for_compilers_only(graph_module: GraphModule) -> str | None:
    """An operator of higher order in a graph, by name: torch's compilers lower it, and called as it
    is it may compute something else (a checkpoint draws random numbers anew in the backward
    pass)."""
    graphs = [each.graph for each in graph_module.modules() if isinstance(each, GraphModule)]
    targets = (node.target for graph in graphs for node in graph.nodes)
    found = (target for target in targets if isinstance(target, HigherOrderOperator))
    return next((f"torch.ops.higher_order.{each.name()}" for each in found), None)


_captures: WeakKeyDictionary[nn.Module, _Capture] = WeakKeyDictionary()


def found_in(module: nn.Module) -> Rewriting:
    """What was found in a captured module's forward so far, each once."""
    capture = _captures.get(module)
    found = [] if capture is None else list(capture.found.values())
    return Rewriting(
        list(dict.fromkeys(item for each in found for item in each.replaced)),
        list(dict.fromkeys(item for each in found for item in each.refused)),
    )


def forget(module: nn.Module) -> None:
    """Drops what was captured of a module."""
    _captures.pop(module, None)


class ConvertedForward(Converted):
    """A module whose forward runs as the graphs that torch.compile makes of it, with the chains in
    them replaced. Where somebody else follows the code (torch.compile around it, export, a tracer,
    a transform), they follow the original's, and so does a call in a mode in which no
    chain was found. So do calls in which hooks run within it, which torch.compile guards on request
    only, and replicas of nn.DataParallel, which live for one call."""

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        # Where the module goes, chains may be found that its calls have not had so far.
        capture = _captures.get(self)
        if capture is not None:
            capture.forget_absent()
        return super()._apply(*args, **kwargs)

    @classmethod
    def _fusedconv_members(cls, original: type[nn.Module]) -> dict[str, Any]:
        """The forward, with the name and the signature of the original's."""

        @functools.wraps(original.forward)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if (
                is_watched()
                or _is_symbolic_tracing()
                or "_is_replica" in self.__dict__
                or any_hooked_within(self)
            ):
                return original.forward(self, *args, **kwargs)
            capture = _captures.get(self)
            if capture is None:
                capture = _captures[self] = _Capture(original.forward)
            else:
                found = capture.found.get(_mode_of(self))
                if found is not None and not found.replaced:
                    return original.forward(self, *args, **kwargs)
            return capture.call(self, *args, **kwargs)

        return {"forward": forward}


# ---- which modules -------------------------------------------------------------------------------

_STAGES = re.compile(r"norm|relu|gelu|silu|swish|activation", re.IGNORECASE)


def may_join(module: nn.Module) -> bool:
    """Whether the forward code of ``module`` may join a chain: it calls a head, and a stage or
    what is called like one. A guess, since a capture costs time in each call; what a capture then
    finds is no guess."""
    if is_sequence(module) or isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    called = list(_called(module))
    heads = [each for each in called if _is_head(each)]
    if not heads:
        return False
    forward = original_type(module).forward
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    others = [type(each).__name__ for each in called if each is not heads[0]]
    return any(map(_STAGES.search, [*names, *others]))


def joins_others(found: list[Chain]) -> bool:
    """Whether a sequence has a convolution and behind it a normalisation of a class that is not
    torch's, such as a LayerNorm of channels: only graphs show what that computes."""
    return any(
        chain.has_convolution and _is_others_norm(behind.modules[0]) and len(chain.modules) == 1
        for chain, behind in itertools.pairwise(found)
    )


def _is_others_norm(module: nn.Module) -> bool:
    kind = original_type(module)
    return "norm" in kind.__name__.lower() and not kind.__module__.startswith("torch.nn")


def _is_head(module: nn.Module) -> bool:
    kind = original_type(module)
    return kind in CONVOLUTIONS or kind is nn.GroupNorm


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that a module's code calls, as far as its children say: of sequences the last,
    in whose output a chain may begin."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _called(child)
        elif is_sequence(child):
            inner = [each for each in flattened(child) if not isinstance(each, nn.Identity)]
            yield from inner[-1:]
        else:
            yield child


def reason_against_capture(module: nn.Module) -> str | None:
    """Why the forward of ``module`` is not captured; None where it can be."""
    if isinstance(module, GraphModule):
        return "it is a GraphModule, which fusedconv.compile_pass takes"
    if not isinstance(original_type(module).forward, types.FunctionType):
        return "its forward is no Python function"
    if "forward" in module.__dict__:
        return "it has a forward of its own"
    if not import_module("torch._dynamo").is_dynamo_supported():
        return "torch.compile does not support this platform"
    return None
