"""The compiled module, its vocabulary, and what the sources promise."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest
import torch
from checkout import ROOT, tracked
from processes import python

import fusedconv
from fusedconv import _C, winners
from fusedconv.device import KNOWN
from fusedconv.kernels.cuda import conditions

CPP = ROOT / "cpp"


def sources(*patterns: str) -> list[Path]:
    found = sorted(path for pattern in patterns for path in CPP.rglob(pattern))
    assert found
    return found


# ---- the module ----------------------------------------------------------------------------------


def test_build_says_what_was_built():
    build = fusedconv.build
    assert build is _C.build
    assert isinstance(build["cuda"], bool)
    assert isinstance(build["openmp"], bool)
    assert build["compiler"]
    assert re.fullmatch(r"[0-9a-f]{12}", build["sources"])
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", build["version"])
    assert fusedconv.__version__ == build["version"]
    cuda = {"cuda_runtime", "architectures", "cutlass"}
    assert cuda & build.keys() == (cuda if build["cuda"] else set())
    for family in ("sm80", "taps", "direct", "few"):
        assert (family in build["families"]) == build["cuda"]


def test_the_build_is_told_by_its_sources(monkeypatch):
    """What was tuned for other kernels does not count."""
    own = winners.build.__wrapped__()
    monkeypatch.setattr(_C, "build", {**_C.build, "sources": "0" * 12})
    assert winners.build.__wrapped__() != own


def test_the_version_is_the_packages():
    text = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{fusedconv.__version__}"' in text
    try:
        installed = metadata.version("fusedconv")
    except metadata.PackageNotFoundError:
        return
    assert installed == fusedconv.__version__


def test_what_needs_cuda_is_there_exactly_with_it():
    for name in ("Program", "Operand", "Step", "query_device", "layout", "group_norm"):
        assert hasattr(_C, name) == fusedconv.build["cuda"], name
    assert callable(_C.cpu.group_norm)


def test_families_are_there_exactly_where_their_architecture_was_compiled():
    families = fusedconv.build["families"]
    assert families == [
        name for name in ("sm80", "taps", "direct", "few", "depthwise", "sm90") if hasattr(_C, name)
    ]
    compiled = "90a" in fusedconv.build.get("architectures", "").split()
    assert {"sm90", "depthwise"} & set(families) == ({"sm90", "depthwise"} if compiled else set())


@pytest.mark.skipif(not fusedconv.build["cuda"], reason="fusedconv was built without CUDA")
def test_every_compiled_row_is_a_kernel_of_the_registry():
    from fusedconv.registry import registry

    rows = [row for family in fusedconv.build["families"] for row in getattr(_C, family).rows()]
    names = [row.name for row in rows]
    assert len(set(names)) == len(names) > 0
    assert set(names) <= {kernel.name for kernel in registry().kernels()}


@pytest.mark.skipif(not fusedconv.build["cuda"], reason="fusedconv was built without CUDA")
def test_rows_say_what_a_candidate_is_chosen_by():
    for row in _C.sm80.rows():
        traits = _C.math_traits(row.math)
        assert traits.name in row.name and f"{row.dimensions}d" in row.name
        assert "x".join(map(str, row.tile)) in row.name
        assert 0 < row.efficiency < 1
        assert row.architecture == 80


def test_errors_are_what_python_expects():
    assert issubclass(fusedconv.KernelError, RuntimeError)
    assert fusedconv.KernelError is _C.KernelError
    assert issubclass(fusedconv.NoKernelError, RuntimeError)
    assert issubclass(fusedconv.PluginError, RuntimeError)


def test_public_names_exist():
    for name in fusedconv.__all__:
        assert getattr(fusedconv, name) is not None
    assert sorted(fusedconv.__all__) == fusedconv.__all__


# ---- one vocabulary in C++ and Python ------------------------------------------------------------


def enumerators(name: str) -> list[str]:
    """An enum class of the sources, in snake case."""
    found = [
        match[1]
        for path in sources("*.hpp")
        for match in re.finditer(
            rf"enum class {name} : int \{{(.*?)\}};",
            re.sub(r"//[^\n]*", "", path.read_text()),
            re.DOTALL,
        )
    ]
    assert len(found) == 1, name
    parts = [part.strip() for part in found[0].split(",") if part.strip()]
    assert all(re.fullmatch(r"k\w+", part) for part in parts), "values count from 0"
    return [snake(part.removeprefix("k")) for part in parts]


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])", "_", name).lower()


@pytest.mark.parametrize("name", ["DType", "Activation", "Math"])
def test_names_of_an_enum_are_its_enumerators(name):
    """Names stand in a table of their own, which must follow the enumerators."""
    assert enumerators(name) == list(getattr(_C, name).__members__)


def test_layouts_are_named_as_their_axes():
    names = {"nchw": "channels_first", "nhwc": "channels_last"}
    assert enumerators("Layout") == [names[name] for name in _C.Layout.__members__]


def test_dtypes_have_the_names_of_torchs():
    for name in _C.DType.__members__:
        assert isinstance(getattr(torch, name), torch.dtype)


def test_each_math_has_a_row_in_the_table():
    for math in _C.Math:
        traits = _C.math_traits(math)
        assert traits.name == math.name
        assert traits.dtype in _C.DType
        assert traits.precision in ("tf32", "fp32", "fp16", "bf16")


# ---- the sources ---------------------------------------------------------------------------------


def test_no_torch_below_the_operators():
    for path in sources("*.hpp", "*.cpp", "*.cu", "*.cuh"):
        for include in re.findall(r'#\s*include\s*[<"]([^>"]+)[>"]', path.read_text()):
            assert not re.match(r"(torch|ATen|c10|caffe2)\b", include), f"{path}: {include}"


def test_public_headers_know_neither_python_nor_cuda():
    for path in (CPP / "include").rglob("*"):
        if path.is_file():
            text = re.sub(r"//[^\n]*", "", path.read_text())
            assert not re.search(r"#\s*include\s*[<\"](pybind11|Python\.h|cuda|cute|cutlass)", text)
            assert "#pragma once" in text


def test_the_extension_does_not_link_torch():
    """One build serves every version of torch."""
    binary = Path(_C.__file__).read_bytes()
    for library in (b"libtorch", b"libc10"):
        assert library not in binary


def test_every_source_is_listed_and_none_is_globbed():
    listed = (ROOT / "CMakeLists.txt").read_text()
    for helper in (ROOT / "cmake").glob("*.cmake"):
        if helper.name != "FusedconvSources.cmake":  # which compiles nothing
            listed += helper.read_text()
    for path in sources("*.cpp", "*.cu"):
        assert path.relative_to(CPP).as_posix() in listed, path
    assert not re.search(r"file\s*\(\s*GLOB", listed)


@pytest.mark.skipif(tracked() is None, reason="not a git checkout")
def test_nothing_built_is_tracked():
    built = re.compile(
        r"\.(so|o|a|pyd|dylib|pyc|whl|cubin|fatbin|ptx|ii|egg)$|\.tar\.gz$"
        r"|(^|/)(build|dist|__pycache__|\.venv|[^/]*\.egg-info|\.ninja_deps)(/|$)"
    )
    assert [name for name in tracked() if built.search(name)] == []


@pytest.mark.skipif(tracked() is None, reason="not a git checkout")
def test_no_file_is_large():
    """Raw figures of a whole benchmark may take twice what any other file may."""
    for name in tracked():
        path = ROOT / name
        if path.is_file():
            kibibytes = 1024 if name.startswith("benchmarks/results/") else 512
            assert path.stat().st_size < kibibytes * 1024, name


def test_importing_starts_no_device():
    """import fusedconv initialises no CUDA context and changes no setting of torch."""
    code = (
        "import torch; before = torch.get_num_threads(), torch.backends.cudnn.allow_tf32\n"
        "import fusedconv\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert before == (torch.get_num_threads(), torch.backends.cudnn.allow_tf32)\n"
    )
    done = python("-W", "error", "-c", code)
    assert done.returncode == 0, done.stderr


def test_this_torch_is_one_that_is_promised():
    assert tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) >= (2, 6)


@pytest.mark.parametrize(
    ("code", "runs", "does_not"),
    [
        ("80", (80, 86, 90, 120), (70, 75)),
        ("80-real", (80, 89), (75, 90)),
        ("80-virtual", (80, 90), (75,)),
        ("90a", (90,), (80, 89, 100)),
        ("100f", (100, 103), (90, 120)),
        ("native", (80, 90), ()),
    ],
)
def test_devices_that_run_what_is_compiled(code, runs, does_not):
    assert all(conditions.runs_on(architecture, code) for architecture in runs)
    assert not any(conditions.runs_on(architecture, code) for architecture in does_not)


def test_a_build_without_code_for_the_device_says_so(monkeypatch):
    monkeypatch.setattr(conditions, "HAS_CUDA", True)
    monkeypatch.setitem(_C.build, "architectures", "80-real 90a")
    assert conditions.supports_device(KNOWN[90])
    support = conditions.supports_device(KNOWN[100])
    assert support.reason == "this build holds code for 80-real 90a, the device has 10.0"
