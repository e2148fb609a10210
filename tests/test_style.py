"""What linters do not see: the length of lines in every kind of file."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkout import ROOT, files

LENGTH = 100
SUFFIXES = (".py", ".pyi", ".md", ".hpp", ".cpp", ".cu", ".cuh", ".cmake", ".toml")
NAMES = ("CMakeLists.txt", "Makefile", "run")


def long_lines(path: Path) -> list[str]:
    """Lines of more than LENGTH columns; a table's row and a URL cannot be broken."""
    return [
        f"{path.name}:{number}: {len(line)} columns"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > LENGTH
        and "://" not in line
        and not (path.suffix == ".md" and line.startswith("|"))
    ]


def test_no_line_is_long():
    checked = [path for path in files() if path.suffix in SUFFIXES or path.name in NAMES]
    assert {path.suffix for path in checked} >= {".py", ".md", ".hpp", ".cpp", ".cu", ".toml"}
    offenders = [
        f"{path.parent.relative_to(ROOT).as_posix()}/{line}"
        for path in checked
        for line in long_lines(path)
    ]
    assert not offenders, "\n".join(["longer than 100 columns:", *offenders])


@pytest.mark.parametrize(("name", "line", "found"), [
    ("a.py", "x" * 100, False),
    ("a.py", "x" * 101, True),
    ("a.py", "\u00d7" * 100, False),  # columns, not bytes
    ("a.md", "|" + "x" * 100, False),
    ("a.cpp", "|" + "x" * 100, True),
    ("a.md", "https://" + "x" * 100, False),
])  # fmt: skip
def test_the_check_sees_long_lines(tmp_path, name, line, found):
    path = tmp_path / name
    path.write_text(f"short\n{line}\n", encoding="utf-8")
    assert long_lines(path) == ([f"{name}:2: {len(line)} columns"] if found else [])
