"""Checks wheels before they are published: python tools/check_wheel.py WHEEL...

Each holds the package and one compiled module, with the licence; the module keeps no symbols for
debuggers and links nothing of torch, CUDA or Python; and PyPI would take the file for its size.
Prints a line a wheel, and exits with status 1 where one fails.
"""

from __future__ import annotations

import re
import struct
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

MEGABYTES = 60
#: Of shared libraries: what each machine has, or has by torch.
ALLOWED = re.compile(
    r"(lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s|gomp)|ld-linux-(x86-64|aarch64))\.so\.\d"
)
MODULE = re.compile(r"fusedconv/_C\.[^/]*\.so")

SYMBOLS, DYNAMIC = 2, 6  # types of ELF sections
NEEDED = 1  # the tag of a shared library's name


def _sections(elf: bytes) -> Iterator[tuple[int, bytes, int]]:
    """Type, contents and linked section of each section of a 64-bit little-endian ELF file."""
    if elf[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"module: got {elf[:6]!r}, expected a 64-bit little-endian ELF file")
    (start,) = struct.unpack_from("<Q", elf, 40)
    size, count = struct.unpack_from("<HH", elf, 58)
    for header in range(start, start + size * count, size):
        kind, _, _, offset, length, link = struct.unpack_from("<IQQQQI", elf, header + 4)
        yield kind, elf[offset : offset + length], link


def libraries(elf: bytes) -> list[str]:
    """The shared libraries that an ELF file names."""
    sections = list(_sections(elf))
    found = []
    for kind, contents, link in sections:
        if kind == DYNAMIC:
            names = sections[link][1]
            for tag, value in struct.iter_unpack("<QQ", contents):
                if tag == NEEDED:
                    found.append(names[value : names.index(b"\0", value)].decode())
    return found


def is_stripped(elf: bytes) -> bool:
    """Whether an ELF file has no table of symbols beside the one that it is loaded by."""
    return not any(kind == SYMBOLS for kind, _, _ in _sections(elf))


def problems(wheel: Path) -> list[str]:
    """What is wrong with a wheel."""
    found = []
    size = wheel.stat().st_size / 1e6
    if size >= MEGABYTES:
        found.append(f"size: got {size:.1f} MB, expected less than {MEGABYTES} MB")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        modules = [name for name in names if name.endswith(".so")]
        if len(modules) != 1 or not MODULE.fullmatch(modules[0]):
            found.append(f"compiled modules: got {modules}, expected one fusedconv/_C.*.so")
        for needed in ("fusedconv/__init__.py", "fusedconv/py.typed"):
            if needed not in names:
                found.append(f"files: got no {needed}")
        if not any(re.fullmatch(r"[^/]*\.dist-info/licenses/LICENSE", name) for name in names):
            found.append("files: got no LICENSE among the metadata")
        for name in names:
            if not re.match(r"fusedconv(/|-[^/]*\.dist-info/)", name):
                found.append(f"files: got {name}, expected the package and its metadata")
        for name in modules:
            elf = archive.read(name)
            if not is_stripped(elf):
                found.append(f"{name}: got a table of symbols, expected a stripped module")
            for library in libraries(elf):
                if not ALLOWED.fullmatch(library):
                    found.append(f"{name}: got {library}, expected libraries of every machine")
    return found


def main(arguments: list[str]) -> int:
    if not arguments:
        print("WHEEL: got none, expected paths of wheels", file=sys.stderr)
        return 2
    failed = False
    for wheel in map(Path, arguments):
        try:
            wrong, size = problems(wheel), f"{wheel.stat().st_size / 1e6:.1f} MB, "
        except (OSError, zipfile.BadZipFile) as error:
            wrong, size = [str(error)], ""
        failed = failed or bool(wrong)
        print(f"{wheel.name}: {size}{'; '.join(wrong) or 'good'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
