"""Shared fixtures: seeds, empty plan caches, and where GPU tests can run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import hypothesis
import pytest
import torch

import fusedconv

# The same examples each run, no time limit on one, no files left behind.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("repeatable")


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
    reason = _why_no_gpu()
    if reason is None:
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _fresh_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test selects its kernels anew, from a fixed seed, and forces none unless it says so."""
    monkeypatch.delenv("FUSEDCONV_KERNEL", raising=False)
    fusedconv.clear_cache()
    torch.manual_seed(0)
    yield
    fusedconv.clear_cache()


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
def threads() -> Iterator[Callable[[int], None]]:
    """threads(count): torch's threads for the rest of the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
