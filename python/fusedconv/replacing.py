"""Files that are replaced at once: who reads one finds the former or the new one."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


def target(path: Path) -> Path:
    """The file that a path leads to, there or not, behind symbolic links. Raises OSError where it
    leads to something that is no regular file, or around in a circle."""
    found = Path(os.path.realpath(path))
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    if found.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return found


def _partial(place: Path) -> Path:
    """Not by tempfile, whose files no other user may read, whatever the umask says."""
    return place.with_name(f"{place.name}.{secrets.token_hex(8)}")


def check_replaceable(path: Path) -> None:
    """Makes the folder. Raises OSError where ``replacing`` would."""
    place = target(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial(place)
    partial.touch(exist_ok=False)
    partial.unlink()


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """A file that takes the place of ``path``, of its target where that is a symbolic link, once it
    is written. An error leaves the former one. Raises OSError as ``target`` does, or where it
    cannot be written."""
    place = target(path)
    partial = _partial(place)
    try:
        with partial.open("x") as file:
            yield file
        partial.replace(place)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
