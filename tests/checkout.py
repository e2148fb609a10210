"""The files of this source tree: of a checkout by git, of an unpacked sdist by its folders."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


@functools.cache
def tracked() -> tuple[str, ...] | None:
    """What git tracks, relative to ROOT; None where ROOT is no checkout or there is no git."""
    try:
        result = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    return tuple(filter(None, result.stdout.split("\0"))) if result.returncode == 0 else None


def files() -> list[Path]:
    """The tracked files, or without git all but those that builds and environments write."""
    names = tracked()
    if names is not None:
        # What the index holds may have been deleted since.
        return [path for path in (ROOT / name for name in names) if path.is_file()]
    found = []
    for folder, folders, here in os.walk(ROOT):
        folders[:] = [
            name
            for name in folders
            if not name.startswith((".", "__")) and name not in ("build", "dist")
        ]
        found += [Path(folder, name) for name in here]
    return found
