"""Imports within the package point down only; what is compiled without torch includes none of it.

Imports inside functions and under TYPE_CHECKING count: they would hide a cycle, not undo it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkout import ROOT

PACKAGE = ROOT / "python" / "fusedconv"
CPP = ROOT / "cpp"

#: From the bottom. A module is in the layer of the longest name here that its own begins with, and
#: imports from layers before its own and from modules of its own folder.
LAYERS = (
    "_C",
    "errors",
    "arguments",
    "support",
    "activations",
    "layout",
    "precision",
    "norms",
    "device",
    "problem",
    "lowering",
    "validation",
    "describing",
    "replacing",
    "recording",
    "timing",
    "winners",
    "noting",
    "plan",
    "checking",
    "reference",
    "kernels.compiled",
    "kernels.onednn",
    "kernels.torch",
    "kernels.cpu",
    "kernels.cuda",
    "kernels.batch_norm",
    "kernels",
    "registry",
    "selection",
    "training",
    "tuning",
    "explaining",
    "hypothetical",
    "ops",
    "functional",
    "composing",
    "scripting",
    "modules",
    "models",
    "conversion",
    "",  # fusedconv/__init__.py
    "testing",
    "benchmark",
    "cli",
    "__main__",
)
#: Who talks to the compiled kernels; everything else goes through these.
USE_COMPILED = {
    "",
    "activations",
    "device",
    "errors",
    "precision",
    "kernels.batch_norm",
    "kernels.compiled",
    "kernels.cpu.conv_gradients",
    "kernels.cpu.convolution",
    "kernels.cpu.direct",
    "kernels.cpu.epilogue_gradients",
    "kernels.cpu.group_norm",
    "kernels.cpu.pixel_shuffle",
    "selection",
    "winners",
    "kernels.cuda.batch_norm",
    "kernels.cuda.boxes_costs",
    "kernels.cuda.boxes_gradient_problems",
    "kernels.cuda.boxes_gradients",
    "kernels.cuda.boxes_sm90",
    "kernels.cuda.clusters_sm90",
    "kernels.cuda.col2im_sm90",
    "kernels.cuda.conditions",
    "kernels.cuda.convolution",
    "kernels.cuda.depthwise",
    "kernels.cuda.direct",
    "kernels.cuda.direct_gradients",
    "kernels.cuda.few",
    "kernels.cuda.few_gradients",
    "kernels.cuda.gradients",
    "kernels.cuda.group_norm",
    "kernels.cuda.launches",
    "kernels.cuda.lines_sm90",
    "kernels.cuda.phase_planes",
    "kernels.cuda.phases_sm90",
    "kernels.cuda.program",
    "kernels.cuda.sm80",
    "kernels.cuda.sm90",
    "kernels.cuda.sm90_gradients",
    "kernels.cuda.sm90_runs",
    "kernels.cuda.sm90_weight",
    "kernels.cuda.streams_sm90",
    "kernels.cuda.strips_sm90",
    "kernels.cuda.taps",
    "kernels.cuda.taps_sm90",
    "kernels.cuda.transposing",
    "kernels.cuda.ungrouped_gradients",
}


def modules() -> dict[str, Path]:
    """Files by module, without the leading "fusedconv."; "" is the package itself."""
    result = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        result[".".join(part for part in parts if part != "__init__")] = path
    return result


MODULES = modules()


def layer_of(module: str) -> str | None:
    """The layer of a module, None where it has none."""
    fitting = [
        layer for layer in LAYERS if layer and (module == layer or module.startswith(f"{layer}."))
    ]
    if module == "":
        return ""
    return max(fitting, key=len, default=None)


def imported_by(source: str) -> set[str]:
    """The package's modules that a file imports anywhere in it, as ``modules`` names them."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                inner = whole.removeprefix("fusedconv.")
                # A submodule where there is one, else a name within the module.
                found.add(whole if inner in MODULES or inner == "_C" else str(node.module))
    ours = {name for name in found if name.split(".")[0] == "fusedconv"}
    return {name.removeprefix("fusedconv").removeprefix(".") for name in ours}


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module or "fusedconv")
def test_imports_point_down_only(module):
    layer = layer_of(module)
    assert layer is not None, f"{module} has no place in LAYERS: give it one"
    for imported in imported_by(MODULES[module].read_text()) - {module}:
        target = layer_of(imported)
        assert target is not None, f"{imported} has no place in LAYERS: give it one"
        down = LAYERS.index(target) < LAYERS.index(layer)
        assert down or target == layer, f"{module} imports {imported}, which is not below"


def test_modules_of_a_layer_import_each_other_without_cycles():
    graph = {name: imported_by(path.read_text()) - {name} for name, path in MODULES.items()}
    remaining = dict(graph)
    while remaining:
        free = [name for name, needs in remaining.items() if not needs & remaining.keys()]
        assert free, f"imports go in a circle among {sorted(remaining)}"
        for name in free:
            del remaining[name]


def test_every_layer_has_modules():
    layers = {layer_of(module) for module in MODULES} | {"_C"}
    assert set(LAYERS) == layers
    assert len(set(LAYERS)) == len(LAYERS)


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("kernels")])
def test_kernels_know_nothing_of_who_chooses_or_calls_them(module):
    above = {"registry", "selection", "explaining", "ops", "functional", "modules", ""}
    imported = imported_by(MODULES[module].read_text())
    assert not {name for name in imported if layer_of(name) in above}


def test_who_uses_the_compiled_module_is_listed():
    using = {name for name, path in MODULES.items() if "_C" in imported_by(path.read_text())}
    assert using == USE_COMPILED


def test_the_import_check_sees_imports():
    """In functions and under TYPE_CHECKING too; submodules and names within modules apart."""
    source = """
import torch, fusedconv.plan
from fusedconv import _C, functional, explain
from fusedconv.kernels import cpu as processor
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from fusedconv.selection import choose
def inside():
    try:
        from fusedconv.ops.planning import ConvCall
    except ImportError:
        import fusedconv.models
"""
    assert imported_by(source) == {
        "plan", "_C", "functional", "", "kernels.cpu", "selection", "ops.planning", "models"
    }  # fmt: skip
    assert {"norms", "layout", "precision", "support"} <= imported_by(
        MODULES["problem"].read_text()
    )


# ---- C++ -----------------------------------------------------------------------------------------

INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
SOURCES = sorted(path for end in ("hpp", "cpp", "cu") for path in CPP.rglob(f"*.{end}"))


def includes(path: Path) -> list[str]:
    return INCLUDE.findall(path.read_text())


def room(path: Path) -> str:
    return path.relative_to(CPP).parts[0]


def files(*rooms: str) -> Iterator[Path]:
    found = [path for path in SOURCES if room(path) in rooms]
    assert found, f"no sources in {rooms}"
    yield from found


def test_no_kernel_knows_of_torch_or_python():
    for path in SOURCES:
        for header in includes(path):
            assert not header.startswith(("torch/", "ATen/", "c10/")), (path, header)
            if room(path) != "binding":
                assert not re.match(r"Python\.h|pybind11/", header), (path, header)


#: What the files of a room may include of ours, beside those of the room itself.
ROOMS = {
    "include": (),
    "program": ("include",),
    "cuda": ("include",),
    "cpu": ("include", "conv"),  # conv/transposed.hpp's geometry
    "layout": ("include", "program", "cuda", "conv"),  # conv/problem.hpp's filters
    "groupnorm": ("include", "program", "cuda"),
    "layernorm": ("include", "program", "cuda", "groupnorm"),
    "conv": ("include", "program", "cuda", "groupnorm", "layernorm"),
}


@pytest.mark.parametrize("name", ROOMS)
def test_rooms_include_what_is_below_them(name):
    for path in files(name):
        for header in includes(path):
            beside = (path.parent / header).resolve()
            target = None
            if header.startswith("fusedconv/"):
                target = "include"
            elif (CPP / header).exists():
                target = header.split("/")[0]
            elif beside.exists():
                target = room(beside)
            assert target in (None, name, *ROOMS[name]), (path, header)


def test_families_of_convolutions_are_apart():
    """So that one is compiled for its own architectures and another moves in beside."""
    families = sorted(path.name for path in (CPP / "conv").iterdir() if path.is_dir())
    assert {"sm80", "sm90"} <= set(families)
    for family in families:
        others = [f"conv/{other}/" for other in families if other != family]
        for path in files("conv"):
            if (CPP / "conv" / family) in path.parents:
                for header in includes(path):
                    assert not any(header.startswith(other) for other in others), (path, header)


def test_the_include_check_sees_includes():
    assert INCLUDE.findall('#include <vector>\n  # include "cuda/tile.hpp"\n// include "x"\n') == [
        "vector", "cuda/tile.hpp"
    ]  # fmt: skip
    assert "program/step.hpp" in includes(CPP / "program" / "program.hpp")
