"""Python in a process of its own, for what a process does once or must not do to this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def python(
    *arguments: str, path: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs Python with ``path``, where given, in front of what this process imports from."""
    search = [str(path)] if path else []
    search += filter(None, [os.environ.get("PYTHONPATH")])
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(search), **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
