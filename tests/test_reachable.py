"""Each compiled kernel is the cheapest of its provider for some problem: what no problem can choose
is dead weight. Selection only asks cost models, so this needs no GPU."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import pytest
import torch
from problems import geometry_of, problem

import fusedconv
from fusedconv import NormGeometry, Problem
from fusedconv.benchmark import DTYPES
from fusedconv.registry import registry

pytestmark = pytest.mark.skipif(
    not fusedconv.build["cuda"], reason="fusedconv was built without CUDA"
)

#: Compute capability times ten, and multiprocessors: an A100 and an H100.
DEVICES = {80: 108, 90: 132}
#: Of the device for which a provider is written.
ARCHITECTURES = {"cutlass_sm80": 80, "cutlass_sm90": 90, "groupnorm_cuda": 90}
CHANNELS = ((16, 16), (64, 64), (64, 128), (256, 16), (256, 96), (256, 256), (512, 200))
#: (batch, spatial extents, kernel size).
SIZES = (
    (1, (16, 16), 3),
    (2, (40, 41), 1),
    (16, (28, 28), 1),
    (64, (112, 112), 2),
    (16, (64, 64), 3),
    (128, (256, 256), 3),
    (1, (8, 8, 8), 3),
    (4, (16, 16, 16), 1),
    (16, (32, 32, 32), 3),
    (64, (16, 20, 20), 1),
)
#: (batch, channels, spatial extents, groups): groups of a few elements to millions.
NORMS = ((64, 32, (4, 4), 32), (16, 64, (128, 128), 8), (2, 16, (3000, 3000), 1))


def on_device(architecture: int, precision: str, layout: str, **fields: object) -> Problem:
    dtype = DTYPES[precision]
    return problem(
        device="cuda",
        architecture=architecture,
        multiprocessors=DEVICES[architecture],
        dtype=dtype,
        output_dtype=dtype,
        precision=precision,
        layout=layout,
        **fields,
    )


def convolutions(architecture: int) -> Iterator[Problem]:
    for precision, layout, (channels, out), (batch, spatial, kernel) in itertools.product(
        DTYPES, ("nchw", "nhwc"), CHANNELS, SIZES
    ):
        axes = len(spatial)
        weight = torch.empty(channels, out, *(kernel,) * axes, device="meta")
        yield on_device(
            architecture,
            precision,
            layout,
            batch=batch,
            channels=channels,
            spatial=spatial,
            conv=geometry_of(weight, bias=True),
            norm=NormGeometry(8, 1e-5, True, True, DTYPES[precision]),
        )


def normalisations(architecture: int) -> Iterator[Problem]:
    for precision, layout, (batch, channels, spatial, groups) in itertools.product(
        ("fp32", "fp16", "bf16"), ("nchw", "nhwc"), NORMS
    ):
        yield on_device(
            architecture,
            precision,
            layout,
            batch=batch,
            channels=channels,
            spatial=spatial,
            conv=None,
            norm=NormGeometry(groups, 1e-5, True, True, DTYPES[precision]),
        )


@functools.cache
def chosen(provider: str) -> set[str]:
    """The kernels of a provider that some problem chooses among them."""
    architecture = ARCHITECTURES[provider]
    problems = (normalisations if provider == "groupnorm_cuda" else convolutions)(architecture)
    own = [kernel for kernel in registry().kernels() if kernel.provider == provider]
    names = set()
    for each in problems:
        costs = [(kernel.cost(each), kernel.name) for kernel in own if kernel.supports(each)]
        if costs:
            names.add(min(costs, key=lambda pair: pair[0])[1])
    return names


def kernels() -> list[str]:
    if not fusedconv.build["cuda"]:
        return []
    return [f"{k.provider}:{k.name}" for k in registry().kernels() if k.provider in ARCHITECTURES]


@pytest.mark.parametrize("kernel", kernels())
def test_some_problem_chooses_the_kernel(kernel):
    provider, name = kernel.split(":")
    assert name in chosen(provider), f"no problem that was tried chooses {name}"


def test_the_rate_of_a_row_is_its_own():
    rows = [k.row for k in registry().kernels() if k.provider == "cutlass_sm80"]
    assert rows
    assert all(row.teraflops > 0 for row in rows)
    # Of rows that differ in their tile's depth or their stages alone, only one could be chosen.
    shapes = [(row.math, row.dimensions, row.tile[:2]) for row in rows]
    assert len(set(shapes)) == len(shapes)
