"""Exceptions that fusedconv raises beyond ``ValueError``, ``TypeError`` and ``RuntimeError``."""

from __future__ import annotations

from fusedconv import _C

#: A CUDA or CUTLASS call of a kernel failed, or a third party's kernel returned what it was not
#: asked for. The message names the kernel and what was wrong.
KernelError: type[RuntimeError] = _C.KernelError


class NoKernelError(RuntimeError):
    """No admissible kernel serves a problem; the message lists each candidate's reason."""


class PluginError(RuntimeError):
    """A third party's entry point could not be loaded or registered something invalid."""
