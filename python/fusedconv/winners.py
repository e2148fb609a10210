"""Winners of timings, kept in a JSON file for every later process.

The file is data that anybody may have written: it is read by the JSON parser alone and held
against a schema, and one that does not hold is ignored as a whole. Problems in it are compared as
text, never made into objects.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import platformdirs
import torch

from fusedconv import _C
from fusedconv.describing import described
from fusedconv.device import PROCESSOR, Device, processor_name
from fusedconv.problem import Problem
from fusedconv.replacing import replacing, target

#: The folder of the file, in place of the user's cache folder.
FOLDER_VARIABLE = "FUSEDCONV_CACHE_DIR"
#: Another schema has another name, so that versions of the package do not take each other's file
#: for damaged.
_FILE_NAME = "winners-1.json"
#: Of a file that is read, and of a text in it.
_MOST_BYTES = 64 << 20
_MOST_CHARACTERS = 4096
#: How long a process waits for another one that writes.
_WAIT_SECONDS = 10.0

_IGNORED = "tuned kernels are ignored"

#: A kernel's name by the parts of the pass that it computes together.
Piece = tuple[tuple[str, ...], str]
Times = Mapping[Piece, float]


class DamagedFileError(ValueError):
    """A file of winners that does not hold against the schema."""


@dataclass(frozen=True)
class Winner:
    """The fastest pieces of a problem, in the order in which they run, and the milliseconds that
    each piece timed took, the others' included."""

    pieces: tuple[Piece, ...]
    times: Times = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Entry:
    """A winner as the file has it: ``problem`` in JSON's types, ``summary`` as it is printed."""

    problem: dict[str, Any]
    device: str
    versions: dict[str, str | None]
    summary: str
    winner: Winner

    @property
    def key(self) -> str:
        return _key(self.problem, self.device, self.versions)


def _key(problem: object, device: str, versions: Mapping[str, str | None]) -> str:
    return json.dumps([problem, device, versions], sort_keys=True)


# ---- what tells entries apart --------------------------------------------------------------------


def _device_name(device: Device) -> str:
    """A processor's name is with its threads, by which kernels differ."""
    if device == PROCESSOR:
        return f"{processor_name()}, {torch.get_num_threads()} threads"
    return device.name


@functools.cache
def build() -> str:
    """The version, with what tells this build of it from others."""
    facts = json.dumps(_C.build, sort_keys=True, default=str).encode()
    return f"{_C.build['version']}, build {hashlib.sha256(facts).hexdigest()[:12]}"


def _versions(device: Device) -> dict[str, str | None]:
    cudnn = torch.backends.cudnn.version() if device.type == "cuda" else None
    return {
        "fusedconv": build(),
        "torch": torch.__version__,
        "cudnn": None if cudnn is None else str(cudnn),
    }


def entry(problem: Problem, device: Device, winner: Winner) -> Entry:
    """What is kept of a problem's winner, with the versions of this process."""
    return Entry(described(problem), _device_name(device), _versions(device), str(problem), winner)


# ---- the schema ----------------------------------------------------------------------------------


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise DamagedFileError(f"expected {what}")


def _fields(value: Any, *names: str) -> list[Any]:
    _expect(isinstance(value, dict) and set(value) == set(names), f"fields {', '.join(names)}")
    return [value[name] for name in names]


def _text(value: Any) -> str:
    # What is printed on a terminal must not steer it.
    _expect(isinstance(value, str) and value.isprintable(), "printable text")
    _expect(0 < len(value) <= _MOST_CHARACTERS, f"1 to {_MOST_CHARACTERS} characters")
    return str(value)


def _list(value: Any) -> list[Any]:
    _expect(isinstance(value, list) and len(value) <= _MOST_CHARACTERS, "a list")
    return list(value)


def _piece(parts: Any, kernel: Any) -> Piece:
    _expect(bool(_list(parts)), "a part at least")
    return tuple(_text(part) for part in parts), _text(kernel)


def _time(value: Any) -> tuple[Piece, float]:
    parts, kernel, milliseconds = _fields(value, "parts", "kernel", "milliseconds")
    _expect(type(milliseconds) in (int, float), "a number of milliseconds")
    # JSON's integers have any size: one that no float holds is below infinity all the same.
    _expect(0 <= milliseconds <= sys.float_info.max, "a finite time")
    return _piece(parts, kernel), float(milliseconds)


def _entry(value: Any) -> Entry:
    problem, device, versions, summary, pieces, times = _fields(
        value, "problem", "device", "versions", "summary", "pieces", "times"
    )
    _expect(isinstance(problem, dict), "a problem's fields")
    _expect(isinstance(versions, dict), "versions by name")
    _expect(bool(_list(pieces)), "a kernel at least")
    return Entry(
        problem,
        _text(device),
        {_text(k): None if v is None else _text(v) for k, v in versions.items()},
        _text(summary),
        Winner(
            tuple(_piece(*_fields(piece, "parts", "kernel")) for piece in pieces),
            dict(map(_time, _list(times))),
        ),
    )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, whose names are different ones."""
    found = dict(pairs)
    _expect(len(found) == len(pairs), "names that are not given twice")
    return found


def _number(text: str) -> float:
    """A number of JSON, or one of the names that Python's parser takes for numbers too."""
    value = float(text)
    _expect(math.isfinite(value), "finite numbers")
    return value


def read(path: Path) -> dict[str, Entry]:
    """The entries of a file by what tells them apart. Raises DamagedFileError where it does not
    hold against the schema, OSError where it cannot be read."""
    if path.exists() and not path.is_file():
        raise DamagedFileError("expected a file")  # reading a pipe would wait for its writer
    with path.open("rb") as file:
        content = file.read(_MOST_BYTES + 1)
    _expect(len(content) <= _MOST_BYTES, f"at most {_MOST_BYTES} bytes")
    try:
        found = json.loads(
            content, object_pairs_hook=_object, parse_float=_number, parse_constant=_number
        )
        (entries,) = _fields(found, "entries")
        _expect(isinstance(entries, list), "a list of entries")
        return {each.key: each for each in map(_entry, entries)}
    except DamagedFileError:
        raise
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"expected JSON: {type(error).__name__}") from None


def write(path: Path, entries: Mapping[str, Entry]) -> None:
    """Writes a file, at once. Raises OSError where that cannot be."""

    def piece(parts: tuple[str, ...], kernel: str) -> dict[str, Any]:
        return {"parts": list(parts), "kernel": kernel}

    content = {
        "entries": [
            {
                "problem": each.problem,
                "device": each.device,
                "versions": each.versions,
                "summary": each.summary,
                "pieces": [piece(*p) for p in each.winner.pieces],
                "times": [
                    {**piece(*p), "milliseconds": time} for p, time in each.winner.times.items()
                ],
            }
            for _, each in sorted(entries.items())
        ]
    }
    with replacing(path) as file:
        json.dump(content, file)


# ---- the process's file --------------------------------------------------------------------------

_lock = threading.Lock()
_loaded: tuple[Path, dict[str, Entry]] | None = None
_warned: set[Path] = set()


def path() -> Path:
    """Where the file is, or would be."""
    folder = os.environ.get(FOLDER_VARIABLE)
    return Path(folder or platformdirs.user_cache_dir("fusedconv", appauthor=False)) / _FILE_NAME


def _warn(file: Path, message: str) -> None:
    if file not in _warned:
        _warned.add(file)
        warnings.warn(f"{file}: {message}", RuntimeWarning, stacklevel=2)


def _read_leniently(file: Path) -> dict[str, Entry]:
    try:
        return read(file)
    except FileNotFoundError:
        return {}
    except (DamagedFileError, OSError) as error:
        _warn(file, f"{_IGNORED}: {error}")
        return {}


def entries() -> dict[str, Entry]:
    """What is kept, read when first asked for; a file that does not hold is warned of once."""
    global _loaded
    file = path()
    with _lock:
        if _loaded is None or _loaded[0] != file:
            _loaded = file, _read_leniently(file)
        return _loaded[1]


def forget() -> None:
    """The next question reads the file anew."""
    global _loaded
    with _lock:
        _loaded = None


def kept(problem: Problem, device: Device) -> Winner | None:
    """The winner of a problem on a device of this name, by these versions."""
    known = entries()
    if not known:
        return None
    found = known.get(_key(described(problem), _device_name(device), _versions(device)))
    return None if found is None else found.winner


def change(changed: Callable[[dict[str, Entry]], dict[str, Entry]]) -> None:
    """Replaces what is kept by what ``changed`` makes of it, other processes locked out meanwhile.
    A damaged file is kept beside, as ``damaged`` names it. Raises OSError (TimeoutError too) where
    the file cannot be read or written."""
    file = path()
    file.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f"{target(file)}.lock", timeout=_WAIT_SECONDS):
        try:
            known = read(file)
        except FileNotFoundError:
            known = {}
        except DamagedFileError as error:
            _warn(file, f"{_IGNORED}: {error}")
            known = {}
            if file.is_file():
                shutil.copyfile(file, damaged(file))
        write(file, changed(known))
    forget()


def damaged(file: Path) -> Path:
    """Where a damaged file is kept when what is tuned takes its place."""
    return file.with_name(f"{file.name}.damaged")


def store(problem: Problem, device: Device, winner: Winner) -> None:
    """Adds a winner to what is kept; a folder that cannot be written is warned of once."""
    added = entry(problem, device, winner)
    try:
        change(lambda known: {**known, added.key: added})
    except OSError as error:
        _warn(path(), f"tuned kernels are not kept: {error}")
