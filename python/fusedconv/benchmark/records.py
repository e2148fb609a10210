"""Files of results: a header and one record for each contender and cell."""

from __future__ import annotations

import datetime
import errno
import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import fusedconv
from fusedconv import benchmark

_KEY = ("workload", "pass", "dtype", "precision", "layout", "contender")


def _commit() -> str:
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def header(
    device: dict[str, Any], commit: str | None, rates: dict[str, float], method: str | None = None
) -> dict[str, Any]:
    """What a figure is worth nothing without; ``device`` as ``measuring.device_facts`` gives it."""
    return {
        "device": device["name"],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "fusedconv": fusedconv.__version__,
        "commit": commit or _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "rates": rates,
        "method": (method or benchmark.__doc__ or "").strip(),
    }


def _read(path: Path) -> list[dict[str, Any]]:
    """The records of a file; ValueError where it holds something else."""
    try:
        records: list[dict[str, Any]] = json.loads(path.read_text())["records"]
        for record in records:
            for field in _KEY:
                record[field]
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"output: got {path}, expected a file of this benchmark's records"
        ) from None
    return records


def check_writable(path: Path) -> None:
    """Makes the folder. Raises OSError where the file cannot be written, ValueError where another
    one is in its place."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists():
        _read(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial(path)
    partial.touch()
    partial.unlink()


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


def write(path: Path, head: dict[str, Any], records: Iterable[dict[str, Any]]) -> None:
    """Replaces the records that were measured anew in the file, and keeps the others."""
    old = _read(path) if path.exists() else []
    kept = {tuple(r[field] for field in _KEY): r for r in (*old, *records)}
    partial = _partial(path)
    partial.write_text(json.dumps({"header": head, "records": list(kept.values())}, indent=1))
    partial.replace(path)
