"""The scripts under benchmarks/ and tools/, which are no packages but import what lies beside."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from checkout import ROOT


def script(name: str, folder: str = "benchmarks") -> ModuleType:
    """A script as a module; what it imports lies beside it, as where it is run."""
    path = str(ROOT / folder)
    if path not in sys.path:
        sys.path.append(path)
    return importlib.import_module(name)
