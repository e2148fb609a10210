"""Kernels by name: who offers what. Built-ins are here, plugins enter by an entry point."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points

from fusedconv import kernels
from fusedconv.checking import verdict
from fusedconv.device import Device
from fusedconv.errors import NoKernelError, PluginError
from fusedconv.plan import BackwardKernel, Candidate, ForwardKernel, Kernel
from fusedconv.problem import Problem

#: Third parties name a function ``register(registry)`` under this entry-point group.
ENTRY_POINT_GROUP = "fusedconv.kernels"
#: Comma-separated names of kernels or providers; only these may be chosen.
FORCE_VARIABLE = "FUSEDCONV_KERNEL"


def _candidate(kernel: Kernel, problem: Problem, device: Device) -> Candidate:
    return Candidate(kernel, *verdict(kernel, problem, device))


class Registry:
    """The kernels of this process. Built-ins and plugins enter through ``register``."""

    def __init__(self) -> None:
        self._kernels: dict[str, Kernel] = {}

    def register(self, kernel: Kernel) -> None:
        """Adds a kernel. Raises TypeError or ValueError where it is none or its name is taken."""
        if not isinstance(kernel, ForwardKernel | BackwardKernel):
            raise TypeError(
                f"kernel: got {kernel!r}, expected an instance of fusedconv.ForwardKernel or "
                "fusedconv.BackwardKernel"
            )
        for field in ("name", "provider"):
            value = getattr(kernel, field, None)
            if not isinstance(value, str) or not value or "," in value:
                raise ValueError(
                    f"{field}: got {value!r} on {type(kernel).__name__}, expected a non-empty str "
                    "without commas"
                )
        parts = (
            {"forward"}
            if isinstance(kernel, ForwardKernel)
            else {"epilogue", "input", "weight", "bias"}
        )
        computes = getattr(kernel, "computes", None)
        if not isinstance(computes, frozenset) or not computes or computes - parts:
            raise ValueError(
                f"computes: got {computes!r} on {type(kernel).__name__}, expected a frozenset of "
                f"some of {', '.join(sorted(parts))}"
            )
        if kernel.name in self._kernels:
            raise ValueError(f"name: {kernel.name!r} is registered already")
        self._kernels[kernel.name] = kernel

    def kernels(self) -> list[Kernel]:
        return list(self._kernels.values())

    def computing(self, parts: Sequence[str]) -> list[Kernel]:
        """The kernels that compute all of these parts of a pass."""
        wanted = set(parts)
        return [kernel for kernel in self._kernels.values() if wanted <= kernel.computes]

    def candidates(self, problem: Problem, device: Device) -> list[Candidate]:
        """Every kernel that computes the problem's parts, with its verdict: supported ones first,
        by cost."""
        result = [_candidate(k, problem, device) for k in self.computing(problem.parts)]
        return sorted(result, key=lambda c: (c.cost is None, c.cost or 0.0))

    def forced_names(self, forced: str, source: str = FORCE_VARIABLE) -> list[str]:
        """The kernels and providers that a value of FUSEDCONV_KERNEL lists, or one of the same form
        from another ``source``. Raises NoKernelError where it lists none, or one that is not
        registered."""
        names = [name.strip() for name in forced.split(",") if name.strip()]
        providers = {kernel.provider for kernel in self._kernels.values()}
        unknown = [name for name in names if name not in providers and name not in self._kernels]
        if unknown or not names:
            raise NoKernelError(
                f"{source}: "
                + (
                    f"no kernel or provider is called {', '.join(unknown)}"
                    if unknown
                    else f"got {forced!r}, expected names of kernels or providers between commas"
                )
                + f"; known providers: {', '.join(sorted(providers))}"
            )
        return names


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
            for kernel in kernels.built_in():
                loaded.register(kernel)
            _load_plugins(loaded)
            _registry = loaded
        return _registry
