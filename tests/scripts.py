"""The scripts under benchmarks/, which are no package."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from checkout import ROOT

FOLDER = ROOT / "benchmarks"


def script(name: str) -> ModuleType:
    """A script as a module, loaded once."""
    module_name = f"benchmarks_{name}"
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, FOLDER / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
    return sys.modules[module_name]
