"""Shared fixtures: seeds, empty plan caches, and where GPU tests can run."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import hypothesis
import pytest
import torch

import fusedconv
from fusedconv import training

# The same examples each run, no time limit on one, no files left behind.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("repeatable")


#: Bytes of the GPU that torch may keep from one test to the next.
MOST_RESERVED = 2 << 30


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz-problems",
        type=int,
        default=100,
        help="random problems of each precision that test_gpu_fuzz.py draws (default: 100)",
    )


@pytest.fixture
def fuzz_problems(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--fuzz-problems"))


def _why_no_gpu() -> str | None:
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if not fusedconv.build["cuda"]:
        return "fusedconv was built without CUDA"
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        return f"needs compute capability 8.0, the device has {capability[0]}.{capability[1]}"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # A profile ends the replays of its process for good: who counts them goes first. Of several
    # processes each takes its tests in this order.
    items.sort(key=lambda item: item.get_closest_marker("replays") is None)
    reason = _why_no_gpu()
    if reason is None:
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def _synchronisation_mode() -> int:
    # Asking would initialise CUDA.
    return torch.cuda.get_sync_debug_mode() if torch.cuda.is_initialized() else 0


def _set_synchronisation_mode(mode: int | str) -> None:
    with warnings.catch_warnings():
        # torch says so once a process; as an error it would come after the mode is set.
        warnings.filterwarnings(
            "ignore", "Synchronization debug mode is a prototype feature", UserWarning
        )
        torch.cuda.set_sync_debug_mode(mode)


def _conv_precision() -> tuple[bool | None, str | None]:
    """torch's older and newer switch; None where torch has none or they contradict each other."""
    try:
        older = torch.backends.cudnn.allow_tf32
    except RuntimeError:
        older = None
    conv = getattr(torch.backends.cudnn, "conv", None)
    return older, None if conv is None else conv.fp32_precision


def _set_conv_precision(precision: tuple[bool | None, str | None]) -> None:
    older, newer = precision
    if older is not None:
        torch.backends.cudnn.allow_tf32 = older
    if newer is not None:
        torch.backends.cudnn.conv.fp32_precision = newer


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("FUSEDCONV_")}


def _set_environment(variables: dict[str, str]) -> None:
    for name in _environment():
        del os.environ[name]
    os.environ.update(variables)


def _cudnn(name: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    cudnn = torch.backends.cudnn
    return lambda: getattr(cudnn, name), lambda value: setattr(cudnn, name, value)


#: What holds for a whole process and results, warnings or errors depend on: how to ask and set.
SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "anomaly detection": (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    "deterministic algorithms": (
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
    ),
    "matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "convolution precision": (_conv_precision, _set_conv_precision),
    "cudnn.enabled": _cudnn("enabled"),
    "cudnn.benchmark": _cudnn("benchmark"),
    "cudnn.deterministic": _cudnn("deterministic"),
    "autocast cache": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    "synchronisation mode": (_synchronisation_mode, _set_synchronisation_mode),
    "environment": (_environment, _set_environment),
}


@contextmanager
def switches_kept() -> Iterator[None]:
    """Raises AssertionError at the end where a switch differs, after setting it back."""
    before = {name: get() for name, (get, _) in SWITCHES.items()}
    yield
    changed = {}
    for name, (get, set_back) in SWITCHES.items():
        after = get()
        if after != before[name]:
            changed[name] = f"{before[name]} -> {after}"
            set_back(before[name])
    assert not changed, f"switches of the process left changed: {changed}"


@pytest.fixture(autouse=True)
def _switches_kept() -> Iterator[None]:
    """A test that leaves a switch changed fails, and no later one with it."""
    with switches_kept():
        yield


@pytest.fixture(scope="session")
def _no_winners(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder that nothing was tuned into."""
    return str(tmp_path_factory.mktemp("no_winners"))


# monkeypatch comes second, so that it puts things back before the switches are looked at.
@pytest.fixture(autouse=True)
def _fresh_state(
    _switches_kept: None, monkeypatch: pytest.MonkeyPatch, _no_winners: str
) -> Iterator[None]:
    """Each test selects its kernels anew, from a fixed seed, and forces none and tunes none unless
    it says so."""
    monkeypatch.delenv("FUSEDCONV_KERNEL", raising=False)
    monkeypatch.delenv("FUSEDCONV_AUTOTUNE", raising=False)
    monkeypatch.setenv("FUSEDCONV_CACHE_DIR", _no_winners)
    fusedconv.clear_cache()
    torch.manual_seed(0)
    yield
    fusedconv.clear_cache()
    # Tests of 2^31 elements leave gigabytes in torch's cache, which processes beside this one lack,
    # and the driver for graphs of this one.
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > MOST_RESERVED:
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _kernels_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests are of small tensors, whose training steps autograd would follow through torch's
    operators, and of kernels."""
    monkeypatch.setattr(training, "LEAST_GAIN", 0.0)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def random(generator: torch.Generator) -> Callable[..., torch.Tensor]:
    """random(*shape, dtype=, scale=, shift=): the same normal values each run."""

    def make(
        *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, shift: float = 0.0
    ) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return (values * scale + shift).to(dtype)

    return make


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """force(names): what FUSEDCONV_KERNEL allows for the rest of the test."""

    def use(names: str) -> None:
        monkeypatch.setenv("FUSEDCONV_KERNEL", names)

    return use


@pytest.fixture
def only(force: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """only(kernel, precision): the kernel serves what it can, next to eager in the precision, by
    default the kernel's own; on another device than its own the test is skipped."""

    def use(kernel: Any, precision: str | None = None) -> None:
        own = getattr(kernel, "architecture", None)
        major, minor = torch.cuda.get_device_capability()
        if own is not None and own != 10 * major + minor:
            pytest.skip(f"{kernel.name} runs on compute capability {own // 10}.{own % 10}")
        force(kernel.name)
        precision = precision or kernel.precision
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", precision == "tf32")

    return use


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """threads(count): torch's threads for the rest of the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def no_synchronisation() -> Callable[[], AbstractContextManager[None]]:
    """with no_synchronisation(): what waits for the GPU raises RuntimeError."""

    @contextmanager
    def forbid() -> Iterator[None]:
        before = _synchronisation_mode()
        try:
            _set_synchronisation_mode("error")
            yield
        finally:
            _set_synchronisation_mode(before)

    return forbid


@pytest.fixture
def compiled() -> Iterator[Callable[..., Any]]:
    """torch.compile from a clean slate, left clean."""
    torch._dynamo.reset()
    yield torch.compile
    torch._dynamo.reset()


@pytest.fixture
def cpp_compiler() -> None:
    """Skips where inductor has no C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:
        pytest.skip(f"inductor has no C++ compiler here: {error}")
