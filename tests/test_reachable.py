"""Each compiled kernel is the cheapest of its provider for some problem: what no problem can choose
is dead weight. Selection only asks cost models, so this needs no GPU."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from problems import backward_problem, geometry_of, group_norm_stage, problem

import fusedconv
from fusedconv import ForwardProblem, Norm
from fusedconv.benchmark import DTYPES, LAYOUTS
from fusedconv.device import KNOWN
from fusedconv.kernels.cuda.conditions import NotBuiltBackward, NotBuiltForward
from fusedconv.problem import Problem
from fusedconv.registry import registry

pytestmark = pytest.mark.skipif(
    not fusedconv.build["cuda"], reason="fusedconv was built without CUDA"
)

#: Compute capability, times ten, of the device for which a provider is written.
ARCHITECTURES = {
    "cutlass_sm80": 80,
    "cutlass_sm90": 90,
    "taps_sm80": 80,
    "boxes_sm90": 90,
    "clusters_sm90": 90,
    "col2im_sm90": 90,
    "lines_sm90": 90,
    "phases_sm90": 90,
    "streams_sm90": 90,
    "taps_sm90": 90,
    "depthwise": 90,
    "groupnorm_cuda": 90,
    "gradients_sm90": 90,
}
CHANNELS = ((16, 16), (48, 48), (64, 64), (64, 128), (256, 16), (256, 96), (256, 256), (512, 200))
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
#: The same of strides as large as the kernel.
PATCHES = ((4, (37, 37), 4), (4, (40, 40), 4), (16, (64, 64), 2), (2, (32, 32, 32), 2))
#: As vocoders upsample a line: by half the kernel.
LINES = ((8, (4096,), 16),)
#: As decoders double a plane, a volume or a line.
DOUBLED = ((16, (128, 128), 3), (16, (128, 128), 4), (1, (32, 40, 40), 3), (8, (40000,), 4))
#: As feature pyramids begin, with a LayerNorm over channels behind.
PYRAMID = dict(batch=4, channels=768, spatial=(64, 64))
#: (batch, channels, spatial extents, groups): groups of a few elements to millions.
NORMS = ((64, 32, (4, 4), 32), (16, 64, (128, 128), 8), (2, 16, (3000, 3000), 1))


def asked_for(precision: str, layout: str, groups: int, **fields: object) -> ForwardProblem:
    dtype = DTYPES[precision]
    norm = group_norm_stage(groups, affine_dtype=dtype)
    return problem(
        dtype=dtype, output_dtype=dtype, precision=precision, layout=layout, norm=norm, **fields
    )


def convolutions() -> Iterator[ForwardProblem]:
    for precision, layout, (channels, out), (batch, spatial, kernel) in itertools.product(
        DTYPES, LAYOUTS, CHANNELS, (*SIZES, *PATCHES, *LINES, *DOUBLED)
    ):
        weight = torch.empty(channels, out, *(kernel,) * len(spatial), device="meta")
        size = batch, spatial, kernel
        stride = kernel if size in PATCHES else kernel // 2 if size in LINES else 1
        paddings, extra = {0, kernel // 2, kernel - 1}, 0
        if size in DOUBLED:
            stride, paddings, extra = 2, {1}, kernel % 2
        for padding in paddings:
            each = asked_for(
                precision,
                layout,
                8,
                batch=batch,
                channels=channels,
                spatial=spatial,
                conv=geometry_of(
                    weight,
                    padding=(padding,) * len(spatial),
                    stride=(stride,) * len(spatial),
                    output_padding=(extra,) * len(spatial),
                ),
            )
            yield each
            if stride > 1:
                yield dataclasses.replace(each, epilogue=())


def pyramids() -> Iterator[ForwardProblem]:
    for precision in ("tf32", "fp16", "bf16"):
        weight = torch.empty(768, 384, 2, 2, device="meta")
        conv = geometry_of(weight, stride=(2, 2))
        made = asked_for(precision, "nhwc", 8, **PYRAMID, conv=conv, order="norm_act")
        norm = group_norm_stage(0, kind="layer", affine_dtype=made.dtype)
        stages = (norm if isinstance(stage, Norm) else stage for stage in made.epilogue)
        yield dataclasses.replace(made, epilogue=tuple(stages))


def depthwise_convolutions() -> Iterator[ForwardProblem]:
    weight = torch.empty(64, 1, 3, 3, 3, device="meta")
    conv = geometry_of(
        weight, out_channels=64, stride=(2,) * 3, padding=(1,) * 3, output_padding=(1,) * 3,
        groups=64,
    )  # fmt: skip
    for precision in DTYPES:
        sizes = dict(batch=4, channels=64, spatial=(32, 32, 32))
        yield asked_for(precision, "nchw", 64, activation="identity", conv=conv, **sizes)


def input_gradients() -> Iterator[Problem]:
    for each in convolutions():
        yield backward_problem(dataclasses.replace(each, epilogue=(), save=True), "input")


def normalisations() -> Iterator[Problem]:
    for precision, layout, (batch, channels, spatial, groups) in itertools.product(
        ("fp32", "fp16", "bf16"), LAYOUTS, NORMS
    ):
        sizes = dict(batch=batch, channels=channels, spatial=spatial, conv=None)
        yield asked_for(precision, layout, groups, **sizes)
        for activation in ("identity", "gelu"):
            forward = dict(sizes, activation=activation, save=True)
            yield backward_problem(asked_for(precision, layout, groups, **forward))


#: By provider, what makes its problems, where that is not ``convolutions``.
PROBLEMS: dict[str, tuple[Callable[[], Iterator[Problem]], ...]] = {
    "groupnorm_cuda": (normalisations,),
    "gradients_sm90": (input_gradients,),
    "depthwise": (depthwise_convolutions,),
    "boxes_sm90": (convolutions, pyramids),
}


@functools.cache
def chosen(problems: Callable[[], Iterator[Problem]], architecture: int) -> dict[str, set[str]]:
    """By provider, its kernels that some problem chooses among them."""
    device = KNOWN[architecture]
    names: dict[str, set[str]] = {}
    for each in problems():
        cheapest: dict[str, str] = {}
        for candidate in registry().candidates(each, device):
            if candidate.support:
                cheapest.setdefault(candidate.kernel.provider, candidate.kernel.name)
        for provider, name in cheapest.items():
            names.setdefault(provider, set()).add(name)
    return names


def kernels() -> list[str]:
    return [
        f"{k.provider}:{k.name}"
        for k in registry().kernels()
        if k.provider in ARCHITECTURES and not isinstance(k, NotBuiltForward | NotBuiltBackward)
    ]


@pytest.mark.parametrize("kernel", kernels())
def test_some_problem_chooses_the_kernel(kernel):
    provider, name = kernel.split(":")
    made = [
        chosen(problems, ARCHITECTURES[provider])
        for problems in PROBLEMS.get(provider, (convolutions,))
    ]
    assert any(name in each.get(provider, ()) for each in made), (
        f"no problem that was tried chooses {name}"
    )


def test_the_rate_of_a_row_is_its_own():
    rows = [k.row for k in registry().kernels() if k.provider == "cutlass_sm80"]
    assert rows
    assert all(row.efficiency > 0 for row in rows)
    # Of rows that differ in their tile's depth or their stages alone, only one could be chosen.
    shapes = [(row.math, row.dimensions, row.tile[:2]) for row in rows]
    assert len(set(shapes)) == len(shapes)
