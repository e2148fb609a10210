"""Existing models served by our kernels: ``convert``, and the same as a pass over graphs."""

from fusedconv.conversion.converting import Conversion, Kept, Replaced, convert, revert
from fusedconv.conversion.graphs import compile_backend, compile_pass

__all__ = [
    "Conversion",
    "Kept",
    "Replaced",
    "compile_backend",
    "compile_pass",
    "convert",
    "revert",
]
