"""Imports within the package point down only."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from checkout import ROOT

PACKAGE = ROOT / "python" / "fusedconv"
#: From the top; a module may import from its own line and from those below.
LAYERS = (
    {"__main__"},
    {"cli"},
    {"benchmark", "testing", "hypothetical"},
    {""},  # fusedconv/__init__.py
    {"models"},
    {"modules"},
    {"composing", "scripting"},
    {"functional"},
    {"ops"},
    {"gradients"},
    {"kernels"},
    {"registry"},
    {"explaining"},
    {"plan"},
    {"recording", "lowering", "validation"},
    {"problem", "errors"},
    {"arguments"},
    {"_C"},
)
RANKS = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}


def layer_of(module: str) -> str:
    """fusedconv.kernels.cpu -> kernels; fusedconv -> ""."""
    return [*module.split("."), ""][1]


def is_type_checking(node: ast.stmt) -> bool:
    if not isinstance(node, ast.If):
        return False
    return "TYPE_CHECKING" in {n.id for n in ast.walk(node.test) if isinstance(n, ast.Name)}


def imports_on_load(statements: list[ast.stmt]) -> list[str]:
    """Modules of the package that importing these statements imports; functions are not entered."""
    result = []
    for node in statements:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_type_checking(node):
            continue
        if isinstance(node, ast.Import):
            result += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                # A submodule where there is one, else a name within the module.
                folder = PACKAGE.parent / Path(*(node.module or "").split("."))
                submodule = (
                    alias.name == "_C"
                    or (folder / f"{alias.name}.py").exists()
                    or (folder / alias.name / "__init__.py").exists()
                )
                result.append(f"{node.module}.{alias.name}" if submodule else str(node.module))
        else:
            for field in ("body", "orelse", "finalbody"):
                result += imports_on_load(getattr(node, field, []))
            for handler in getattr(node, "handlers", []):
                result += imports_on_load(handler.body)
    return [name for name in result if name.split(".")[0] == "fusedconv"]


def modules() -> dict[str, Path]:
    """Module names by file, without those of __init__'s own packages' folders."""
    result = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        result[".".join(part for part in parts if part != "__init__")] = path
    return result


@pytest.mark.parametrize("module", modules())
def test_imports_point_down_only(module):
    layer = layer_of(module)
    assert layer in RANKS, f"{module} has no place in LAYERS: give it one"
    tree = ast.parse(modules()[module].read_text())
    for imported in imports_on_load(tree.body):
        target = layer_of(imported)
        assert target in RANKS, f"{imported} has no place in LAYERS: give it one"
        within = target == layer or RANKS[target] == RANKS[layer]
        assert within or RANKS[target] > RANKS[layer], (
            f"{module} imports {imported}, which is above"
        )


def test_the_import_check_sees_imports():
    """The parser above finds what the core is known to import, and skips functions."""
    plan = imports_on_load(ast.parse((PACKAGE / "plan.py").read_text()).body)
    ops = imports_on_load(ast.parse((PACKAGE / "ops" / "group_norm.py").read_text()).body)
    assert "fusedconv.registry" not in plan
    assert {"fusedconv.gradients", "fusedconv.plan", "fusedconv.ops.planning"} <= set(ops)
