"""What is published: the check of wheels, and what a build needs."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

import pytest
from checkout import ROOT
from scripts import script

from fusedconv import _C

check_wheel = script("check_wheel", "tools")


def elf(*libraries: str, symbols: bool = False) -> bytes:
    """A 64-bit ELF file with a dynamic section, and perhaps a table of symbols."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in libraries)
    dynamic, place = b"", 1
    for name in libraries:
        dynamic += struct.pack("<QQ", check_wheel.NEEDED, place)
        place += len(name) + 1
    contents = [(3, names, 0), (check_wheel.DYNAMIC, dynamic, 0)]
    if symbols:
        contents.append((check_wheel.SYMBOLS, b"", 0))
    body, headers = b"", b""
    for kind, data, link in contents:
        headers += struct.pack(
            "<IIQQQQIIQQ", 0, kind, 0, 0, 64 + len(body), len(data), link, 0, 1, 0
        )
        body += data
    header = struct.pack("<6s10xHHIQQQIHHHHHH", b"\x7fELF\x02\x01", 3, 62, 1, 0, 0,
                         64 + len(body), 0, 64, 0, 0, 64, len(contents), 0)  # fmt: skip
    return header + body + headers


MODULE = "fusedconv/_C.cpython-311-x86_64-linux-gnu.so"
GOOD = {
    "fusedconv/__init__.py": b"",
    "fusedconv/py.typed": b"",
    "fusedconv-0.1.0.dist-info/licenses/LICENSE": b"",
    MODULE: elf("libstdc++.so.6", "libc.so.6", "libgomp.so.1", "ld-linux-x86-64.so.2"),
}


def wheel(folder: Path, files: dict[str, bytes | None]) -> Path:
    """A wheel with these files beside or in place of the good ones; None leaves one out."""
    path = folder / "fusedconv-0.1.0-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, contents in {**GOOD, **files}.items():
            if contents is not None:
                archive.writestr(name, contents)
    return path


def test_a_good_wheel_passes(tmp_path, capsys):
    assert check_wheel.main([str(wheel(tmp_path, {}))]) == 0
    assert capsys.readouterr().out.endswith(" MB, good\n")


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({MODULE: elf("libc.so.6", symbols=True)}, "got a table of symbols"),
        ({MODULE: elf("libc.so.6", "libtorch.so")}, "got libtorch.so"),
        ({MODULE: elf("libcudart.so.13")}, "got libcudart.so.13"),
        ({MODULE: None}, r"compiled modules: got \[\]"),
        ({"fusedconv/_D.so": elf()}, "compiled modules: got"),
        ({"fusedconv.libs/libgomp-1.so.1": b""}, "got fusedconv.libs/libgomp-1.so.1"),
        ({"tests/test_packaging.py": b""}, "got tests/test_packaging.py"),
        ({"fusedconv/py.typed": None}, "got no fusedconv/py.typed"),
        ({"fusedconv-0.1.0.dist-info/licenses/LICENSE": None}, "got no LICENSE"),
    ],
)
def test_what_is_wrong_with_a_wheel_is_said(tmp_path, files, text):
    path = wheel(tmp_path, files)
    with pytest.raises(AssertionError, match=text):
        assert check_wheel.problems(path) == []
    assert check_wheel.main([str(path)]) == 1


def test_what_is_no_wheel_fails_and_the_others_are_checked(tmp_path, capsys):
    other = tmp_path / "other.whl"
    other.write_text("no archive")
    arguments = [other, tmp_path / "*.gone", wheel(tmp_path, {})]
    assert check_wheel.main(list(map(str, arguments))) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "other.whl: File is not a zip file"
    assert lines[1].startswith("*.gone: [Errno 2] No such file or directory")
    assert lines[2].endswith(" MB, good")


def test_a_large_wheel_fails(tmp_path, monkeypatch):
    path = wheel(tmp_path, {})
    monkeypatch.setattr(check_wheel, "MEGABYTES", path.stat().st_size / 1e6)
    assert check_wheel.problems(path)[0].startswith("size: got 0.0 MB, expected less than")


def test_a_wheel_of_this_build_would_pass(tmp_path):
    """But for symbols, which installing strips and a plain build does not."""
    module = Path(_C.__file__).read_bytes()
    assert "libc.so.6" in check_wheel.libraries(module)
    found = check_wheel.problems(wheel(tmp_path, {MODULE: module}))
    assert [problem for problem in found if "table of symbols" not in problem] == []


def test_building_needs_no_torch():
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = project["build-system"]["requires"] + project["dependency-groups"]["build"]
    assert needed
    assert not [name for name in needed if name.startswith("torch")]
