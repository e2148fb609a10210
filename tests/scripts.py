"""The scripts under benchmarks/, which are no package but import each other."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from checkout import ROOT

FOLDER = ROOT / "benchmarks"


def script(name: str) -> ModuleType:
    """A script as a module; what it imports lies beside it, as where it is run."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return importlib.import_module(name)
