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
from fusedconv import _C, problem

CPP = ROOT / "cpp"
TYPES = CPP / "include" / "fusedconv" / "types.hpp"


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
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", build["version"])
    assert fusedconv.__version__ == build["version"]
    cuda = {"cuda_runtime", "architectures", "cutlass"}
    assert cuda & build.keys() == (cuda if build["cuda"] else set())


def test_the_version_is_the_packages():
    text = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{fusedconv.__version__}"' in text
    try:
        installed = metadata.version("fusedconv")
    except metadata.PackageNotFoundError:
        return
    assert installed == fusedconv.__version__


def test_what_needs_cuda_is_there_exactly_with_it():
    for name in ("Program", "Operand", "GroupNormPasses", "conv_rows"):
        assert hasattr(_C, name) == fusedconv.build["cuda"], name
    assert callable(_C.cpu_group_norm)


@pytest.mark.skipif(not fusedconv.build["cuda"], reason="fusedconv was built without CUDA")
def test_every_compiled_row_is_a_kernel_of_the_registry():
    from fusedconv.registry import registry

    rows = _C.conv_rows()
    names = [row["name"] for row in rows]
    assert len(set(names)) == len(names) > 0
    assert [row["index"] for row in rows] == list(range(len(rows)))
    assert set(names) <= {kernel.name for kernel in registry().kernels()}
    architectures = {int(re.sub(r"\D", "", a)) for a in fusedconv.build["architectures"].split()}
    for row in rows:
        assert row["architecture"] >= min(architectures)


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


def enumerators(name: str) -> dict[str, int]:
    """An enum class of types.hpp, by name."""
    text = re.sub(r"//[^\n]*", "", TYPES.read_text())
    match = re.search(rf"enum class {name} : int \{{(.*?)\}};", text, re.DOTALL)
    assert match, name
    pairs = re.findall(r"k(\w+)\s*=\s*(\d+)", match[1])
    assert len(pairs) == len([part for part in match[1].split(",") if part.strip()])
    return {key: int(value) for key, value in pairs}


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def test_activation_codes():
    expected = {snake(name): code for name, code in enumerators("Activation").items()}
    assert expected == problem.ACTIVATION_CODES
    assert tuple(problem.ACTIVATION_CODES) == problem.ACTIVATIONS


def test_dtype_codes():
    expected = {name.lower(): code for name, code in enumerators("DType").items()}
    assert expected == {problem.dtype_name(d): code for d, code in problem.DTYPE_CODES.items()}


def test_layout_codes():
    names = {"ChannelsFirst": "nchw", "ChannelsLast": "nhwc"}
    expected = {names[name]: code for name, code in enumerators("Layout").items()}
    assert expected == problem.LAYOUT_CODES


def test_the_binding_knows_as_many_codes_as_there_are():
    """checked_enum's counts in the binding, which Python's codes are checked against."""
    text = (CPP / "binding" / "module.cpp").read_text()
    counts = dict(re.findall(r"checked_enum<(\w+)>\(name, value, (\d+)\)", text))
    for name in ("DType", "Layout", "Activation"):
        assert int(counts[name]) == len(enumerators(name)), name


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
    for name in tracked():
        path = ROOT / name
        if path.is_file():
            assert path.stat().st_size < 512 * 1024, name


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
