"""``convert``: which modules of a model are converted, and what is said of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fusedconv.arguments import flag, shown
from fusedconv.composing import is_replaced
from fusedconv.conversion.capturing import (
    ConvertedForward,
    forget,
    found_in,
    joins_others,
    may_join,
    reason_against_capture,
)
from fusedconv.conversion.classes import (
    Converted,
    convert_class,
    original_type,
    revert_class,
    reverted_type,
)
from fusedconv.conversion.graphs import Rewriting
from fusedconv.conversion.modules import (
    ConvertedConvTranspose,
    ConvertedGroupNorm,
    ConvertedSequential,
    chains,
    is_sequence,
)
from fusedconv.conversion.stages import CONVOLUTIONS
from fusedconv.models import system3
from fusedconv.modules import FusedConvTranspose, GroupNorm

#: Modules of ours; some read their children's parameters.
_OURS = (FusedConvTranspose, GroupNorm, system3.ModelNew)


@dataclass(frozen=True)
class Replaced:
    """Modules, by their names in the model, that one call of ours computes; ``chain`` says what.
    ``names`` is the one module that its first operation is in, where it was found in a graph."""

    names: tuple[str, ...]
    chain: str

    def __str__(self) -> str:
        return f"{', '.join(self.names)}: {self.chain}"


@dataclass(frozen=True)
class Kept:
    """A module that computes as before, or is not fused with what is in front of it, and why."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


class Conversion:
    """What ``convert`` did; ``str()`` of it lists everything.

    ``modules`` are convolutions and GroupNorms, and chains of them in sequences, that our functions
    compute. ``followed`` are names of modules whose forward code is followed when they are called,
    ``joined`` the chains found in it so far. ``kept`` is what is left as it was, with reasons; what
    calls have shown of forward code is in it too. ``dry_run`` says that nothing was changed.
    """

    def __init__(self, plan: _Plan, dry_run: bool) -> None:
        self._model = plan.model
        self._followed = plan.followed
        self._kept = tuple(plan.kept)
        self._found: dict[str, Rewriting] = {}
        self.dry_run = dry_run
        self.modules = tuple(plan.replaced)

    @property
    def followed(self) -> tuple[str, ...]:
        return tuple(self._followed)

    @property
    def joined(self) -> tuple[Replaced, ...]:
        looked = self._look().items()
        return tuple(
            Replaced((_place(name, each.place),), each.text)
            for name, found in looked
            for each in found.replaced
        )

    @property
    def replaced(self) -> tuple[Replaced, ...]:
        """``modules`` and ``joined``."""
        return (*self.modules, *self.joined)

    @property
    def kept(self) -> tuple[Kept, ...]:
        looked = self._look().items()
        refused = (
            Kept(_place(name, each.place), each.text)
            for name, found in looked
            for each in found.refused
        )
        return (*self._kept, *refused)

    def _look(self) -> dict[str, Rewriting]:
        """What calls have shown; of a dry run's call it is noted, as nothing is left of that."""
        return self._found or {name: found_in(module) for name, module in self._followed.items()}

    def revert(self) -> None:
        """Makes the model what it was; see ``fusedconv.revert``."""
        revert(self._model)

    def __str__(self) -> str:
        replaced, followed = "replaced in modules", "followed when called"
        if self.dry_run:
            replaced, followed = f"would be {replaced}", f"would be {followed}"
        lines = [f"{replaced}: {len(self.modules)}", *(f"    {each}" for each in self.modules)]
        for title, entries in (
            (followed, self._followed),
            ("chains found in their code", self.joined),
            ("left as they are", self.kept),
        ):
            if entries:
                lines += [f"{title}: {len(entries)}", *(f"    {each}" for each in entries)]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return (
            f"Conversion({len(self.modules)} replacements, {len(self._followed)} followed, "
            f"{len(self.kept)} kept, dry_run={self.dry_run})"
        )


_ROOT = "(model)"


def _place(owner: str, within: str) -> str:
    """The name in the model of what has the name ``within`` in the module ``owner``."""
    return within if within and owner == _ROOT else ".".join(filter(None, (owner, within)))


def convert(
    model: nn.Module,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    follow: bool = True,
    dry_run: bool = False,
) -> Conversion:
    """Makes our kernels serve the transposed convolutions and GroupNorms of ``model``, in place,
    each with the normalisation and activation beside it; returns a report.

    Modules stay the objects that they are, with their parameters, buffers, hooks and names, so that
    state dicts load in either direction; their classes become subclasses of what they were.

    - Every torch.nn.ConvTranspose1d, 2d, 3d and GroupNorm is computed by our functions.
    - Sequences (torch.nn.Sequential and subclasses with its forward) compute convolution,
      [normalisation] and [activation], in either order of the two, and GroupNorm and activation, in
      one call. Normalisations are GroupNorm, InstanceNorm without running statistics and BatchNorm
      in evaluation mode; activations ReLU, GELU and SiLU.
    - With ``follow``, modules whose forward code joins such chains are captured by torch.compile
      when they are called, and run its graphs with the chains replaced (``compile_pass``), without
      a compiler. Compiled code around the model is not changed by this; see ``compile_backend``.

    Whatever else a call would do stays: what has hooks, was replaced or patched is called, what
    other code reads is not fused; both are looked at in each call, so that they may change later.
    A result has the memory format of the input, channels first or last.

    ``args`` and ``kwargs`` are those of a call; with them the model is called once, without
    gradients, so that the report says what was found in forward code (buffers and torch's random
    numbers are put back). With ``dry_run`` the model is left as it was.

    Copies, pickles and replicas of a converted model are converted; ``revert`` undoes it for any.
    torch.jit.script refuses converted modules. Raises TypeError where ``model`` is no Module,
    ``args`` no sequence or ``kwargs`` no mapping, ValueError where the model is to be called and
    has lazy modules, which a call changes for good, and what a call of the model raises.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {shown(model)}, expected a torch.nn.Module")
    # A tensor in place of a tuple of it would be taken for its rows.
    for name, given, kind, expected in (
        ("args", args, Sequence, "a tuple of a call's arguments"),
        ("kwargs", kwargs, Mapping, "arguments by name"),
    ):
        if given is not None and (isinstance(given, str) or not isinstance(given, kind)):
            raise TypeError(f"{name}: got {shown(given)}, expected {expected}")
    follow, dry_run = flag("follow", follow), flag("dry_run", dry_run)
    plan = _Plan(model, follow)
    report = Conversion(plan, dry_run)
    is_called = args is not None or kwargs is not None
    if is_called:
        _check_initialized(model)
    if dry_run and not is_called:
        return report
    with _reverted_if(plan, dry_run):
        plan.carry_out()
        if is_called:
            _call(model, args or (), kwargs or {})
            if dry_run:
                report._found = report._look()
    return report


def revert(model: nn.Module) -> None:
    """Gives every converted module within ``model``, itself included, the class it had before.

    What has been made of a converted class since, by a parametrisation or FSDP2, is made of the
    original. Raises TypeError where ``model`` is no Module, or one within it has a class that code
    made from a converted one; nothing is changed then.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {shown(model)}, expected a torch.nn.Module")
    for name, module in model.named_modules():
        try:
            reverted_type(type(module))
        except TypeError as error:
            raise TypeError(f"{name or _ROOT}: {error}") from None
    for module in model.modules():
        revert_class(module)
        forget(module)


class _Plan:
    """The modules to be converted, and what the report says of them."""

    def __init__(self, model: nn.Module, follow: bool) -> None:
        self.model = model
        self._follow = follow
        self.replaced: list[Replaced] = []
        self.kept: list[Kept] = []
        self.followed: dict[str, nn.Module] = {}
        self._mixins: dict[nn.Module, type[Converted]] = {}
        self._names = {module: name or _ROOT for name, module in _walk(model)}
        self._in_chains: set[nn.Module] = set()
        for module in self._names:
            if is_sequence(module):
                self._sequence(module)
        for module in self._names:
            self._layer(module)
            if follow and may_join(module):
                self._forward(module)

    def carry_out(self) -> None:
        for module, mixin in self._mixins.items():
            convert_class(module, mixin)

    def undo(self) -> None:
        for module in self._mixins:
            revert_class(module)
            forget(module)

    def _plan(self, module: nn.Module, mixin: type[Converted]) -> None:
        if not isinstance(module, Converted):
            self._mixins[module] = mixin

    def _name(self, module: nn.Module) -> str:
        # One that is shared with a module of ours is left out of the walk.
        return self._names.get(module, type(module).__name__)

    def _keep(self, module: nn.Module, reason: str) -> None:
        self.kept.append(Kept(self._name(module), reason))

    def _layer(self, module: nn.Module) -> None:
        """A convolution or a GroupNorm by itself."""
        kind = original_type(module)
        torchs = (*CONVOLUTIONS, nn.GroupNorm)
        if not isinstance(module, torchs):
            return
        name = type(module).__name__
        if kind not in torchs:
            self._keep(module, f"{name} is not torch's class")
        elif kind is not type(module) and not isinstance(module, Converted):
            self._keep(module, f"{name} computes its parameters; within sequences it is fused")
        elif is_replaced(kind):
            self._keep(module, f"torch.nn.{name}.forward has been replaced")
        elif "forward" in module.__dict__:
            self._keep(module, "it has a forward of its own")
        else:
            is_norm = kind is nn.GroupNorm
            self._plan(module, ConvertedGroupNorm if is_norm else ConvertedConvTranspose)
            if module not in self._in_chains:
                self.replaced.append(Replaced((self._name(module),), kind.__name__))

    def _sequence(self, sequence: nn.Module) -> None:
        """The chains of a sequence, unless one around it has them already."""
        found = list(chains(sequence))
        if self._follow and reason_against_capture(sequence) is None and joins_others(found):
            self._forward(sequence)
            return
        if not any(chain.may_join for chain in found):
            return
        if "forward" in sequence.__dict__:
            self._keep(sequence, "it has a forward of its own")
            return
        self._plan(sequence, ConvertedSequential)
        for chain in found:
            head = chain.modules[0]
            if head in self._in_chains:
                continue
            if len(chain.modules) > 1:
                self._in_chains.update(chain.modules)
                names = tuple(map(self._name, chain.modules))
                self.replaced.append(Replaced(names, str(chain)))
            if chain.next is not None:
                self._keep(chain.next, f"not fused with {self._name(head)}: {chain.reason}")

    def _forward(self, module: nn.Module) -> None:
        reason = reason_against_capture(module)
        if isinstance(module, Converted) and not isinstance(module, ConvertedForward):
            return
        if reason is not None:
            self._keep(module, f"its code is not followed: {reason}")
            return
        self._plan(module, ConvertedForward)
        self.followed[self._name(module)] = module


def _walk(model: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Modules by name, each once, those within modules of ours and TorchScript's left out."""
    left_out = (*_OURS, torch.jit.ScriptModule)
    inner: set[nn.Module] = set()
    for path, module in model.named_modules(prefix=name):
        if isinstance(module, left_out):
            inner.update(module.modules())
        if module not in inner:
            yield path, module


@contextmanager
def _reverted_if(plan: _Plan, dry_run: bool) -> Iterator[None]:
    """Undoes a plan in the end of a dry run, and where something is raised."""
    try:
        yield
    except BaseException:
        plan.undo()
        raise
    if dry_run:
        plan.undo()


def _check_initialized(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(
                f"model: got {name} without a shape, expected lazy modules to have been called "
                "where args or kwargs are given"
            )


def _call(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """One call, without gradients; buffers and random numbers are put back."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = {buffer.device for buffer in (*model.parameters(), *model.buffers())}
    cuda = [device.index or 0 for device in devices if device.type == "cuda"]
    with torch.no_grad():
        try:
            with torch.random.fork_rng(cuda):
                model(*args, **kwargs)
        finally:
            for buffer, before in buffers:
                buffer.copy_(before)
