"""Kernels by name: who offers what, and which of them serves a problem at the lowest cost."""

from __future__ import annotations

import importlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points

from fusedconv.errors import NoKernelError, PluginError
from fusedconv.plan import Plan
from fusedconv.problem import Problem

#: Third parties name a function ``register(registry)`` under this entry-point group.
ENTRY_POINT_GROUP = "fusedconv.kernels"
#: Comma-separated names of kernels or providers; only these may be chosen.
FORCE_VARIABLE = "FUSEDCONV_KERNEL"

_BUILT_IN = (
    "fusedconv.kernels.torch_reference",
    "fusedconv.kernels.cpu",
    "fusedconv.kernels.cutlass_sm80",
    "fusedconv.kernels.cutlass_sm90",
    "fusedconv.kernels.groupnorm_cuda",
)


@dataclass(frozen=True)
class Support:
    """Whether a kernel serves a problem; true or false, with a reason where false."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok

    @staticmethod
    def yes() -> Support:
        return Support(True)

    @staticmethod
    def no(reason: str) -> Support:
        return Support(False, reason)


class Kernel(ABC):
    """One way to compute a problem. Subclass it, set the names, register an instance."""

    #: Unique; what ``FUSEDCONV_KERNEL`` and ``explain`` call it.
    name: str
    #: The family it belongs to; several kernels may share one.
    provider: str

    @abstractmethod
    def supports(self, problem: Problem) -> Support:
        """Whether it serves the problem; a reason where it does not. Touches no device."""

    @abstractmethod
    def cost(self, problem: Problem) -> float:
        """Estimated milliseconds of a supported problem. Lower wins."""

    @abstractmethod
    def compile(self, problem: Problem) -> Plan:
        """The plan of a supported problem."""


@dataclass(frozen=True)
class Candidate:
    """A kernel held against a problem; ``cost`` is in milliseconds, None where unsupported."""

    kernel: Kernel
    support: Support
    cost: float | None


class Registry:
    """The kernels of this process. Built-ins and plugins enter through ``register``."""

    def __init__(self) -> None:
        self._kernels: dict[str, Kernel] = {}

    def register(self, kernel: Kernel) -> None:
        """Adds a kernel. Raises TypeError or ValueError where it is none or its name is taken."""
        if not isinstance(kernel, Kernel):
            raise TypeError(f"kernel: got {kernel!r}, expected an instance of fusedconv.Kernel")
        for field in ("name", "provider"):
            value = getattr(kernel, field, None)
            if not isinstance(value, str) or not value or "," in value:
                raise ValueError(
                    f"{field}: got {value!r} on {type(kernel).__name__}, expected a non-empty str "
                    "without commas"
                )
        if kernel.name in self._kernels:
            raise ValueError(f"name: {kernel.name!r} is registered already")
        self._kernels[kernel.name] = kernel

    def kernels(self) -> list[Kernel]:
        return list(self._kernels.values())

    def candidates(self, problem: Problem) -> list[Candidate]:
        """Every kernel with its verdict, supported ones first, by cost."""
        result = []
        for kernel in self._kernels.values():
            support = kernel.supports(problem)
            result.append(Candidate(kernel, support, kernel.cost(problem) if support else None))
        return sorted(result, key=lambda c: (c.cost is None, c.cost or 0.0))

    def forced_names(self, forced: str) -> list[str]:
        """The kernels and providers that a value of FUSEDCONV_KERNEL lists. Raises NoKernelError
        where it lists none, or one that is not registered."""
        names = [name.strip() for name in forced.split(",") if name.strip()]
        providers = {kernel.provider for kernel in self._kernels.values()}
        unknown = [name for name in names if name not in providers and name not in self._kernels]
        if unknown or not names:
            raise NoKernelError(
                f"{FORCE_VARIABLE}: "
                + (
                    f"no kernel or provider is called {', '.join(unknown)}"
                    if unknown
                    else f"got {forced!r}, expected names of kernels or providers between commas"
                )
                + f"; known providers: {', '.join(sorted(providers))}"
            )
        return names

    def select(self, problem: Problem, forced: str | None = None) -> Candidate:
        """The admissible candidate of lowest cost.

        ``forced`` restricts the choice to the named kernels or providers. Raises NoKernelError with
        each candidate's reason where none is left.
        """
        candidates = self.candidates(problem)
        if forced:
            names = self.forced_names(forced)
            candidates = [
                c for c in candidates if c.kernel.name in names or c.kernel.provider in names
            ]
        if not candidates or not candidates[0].support:
            reasons = "\n".join(f"  {c.kernel.name}: {c.support.reason}" for c in candidates)
            scope = f" among {forced}" if forced else ""
            raise NoKernelError(f"no kernel{scope} serves {problem}:\n{reasons}")
        return candidates[0]


_lock = threading.Lock()
_registry: Registry | None = None


def _load_plugins(registry: Registry) -> None:
    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        try:
            register: Callable[[Registry], None] = entry_point.load()
            register(registry)
        except Exception as error:
            raise PluginError(
                f"entry point {entry_point.name!r} ({entry_point.value}) of group "
                f"{ENTRY_POINT_GROUP!r} failed: {type(error).__name__}: {error}"
            ) from error


def registry() -> Registry:
    """The process's registry, with built-ins and installed plugins."""
    global _registry
    with _lock:
        if _registry is None:
            loaded = Registry()
            for module in _BUILT_IN:
                importlib.import_module(module).register(loaded)
            _load_plugins(loaded)
            _registry = loaded
        return _registry


def forced_kernels() -> str | None:
    return os.environ.get(FORCE_VARIABLE) or None
