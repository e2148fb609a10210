"""Schedules of small convolutions in one launch of clusters: what blocks cover, what is refused,
and what the batch has no say in. No GPU."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from problems import explained, geometry_of, group_norm_stage, problem
from test_taps import H200, element_bytes, random_sizes

from fusedconv import _C
from fusedconv.benchmark import DTYPES
from fusedconv.kernels.cuda.clusters_sm90 import ClustersSm90
from fusedconv.registry import registry

KERNELS = [kernel for kernel in registry().kernels() if isinstance(kernel, ClustersSm90)]
pytestmark = pytest.mark.skipif(not KERNELS, reason="fusedconv was built without these kernels")
names = {"ids": lambda kernel: kernel.name}
#: Bytes of channels that a step of the tensor cores multiplies.
STEP_BYTES = 32


def drawn(kernel: ClustersSm90, seed: int):
    """A random problem that the row serves."""
    generator = random.Random(f"{kernel.name} {seed}")
    while True:
        sizes = replace(random_sizes(generator), groups=1)
        norm = group_norm_stage(num_groups=1) if generator.random() < 0.5 else None
        made = sizes.problem(kernel, layout=generator.choice(("nchw", "nhwc")), norm=norm)
        if kernel.supports(made, H200):
            return sizes, made, kernel.config(made, H200)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_blocks_cover_a_sample(kernel, seed):
    sizes, made, config = drawn(kernel, seed)
    assert config.columns * config.column_blocks == made.output_channels
    if made.norm_groups:
        assert config.column_blocks == made.norm_groups
    assert config.slabs * config.shares <= _C.sm90.clusters.most_blocks
    assert config.shared_bytes <= H200.shared_bytes
    step = STEP_BYTES // element_bytes(kernel)
    assert config.share_channels % step == config.chunk % step == 0
    # No block is without channels or positions, and none has more chunks than it fills.
    assert (config.shares - 1) * config.share_channels < sizes.channels
    assert config.shares * config.share_channels >= sizes.channels
    assert (config.chunks - 1) * config.chunk < config.share_channels
    assert config.chunks * config.chunk >= config.share_channels
    axis = config.outer - (3 - len(sizes.spatial))
    output = made.output_spatial[axis]
    positions = math.ceil(output / sizes.stride[axis])
    assert (config.slabs - 1) * config.slab < positions <= config.slabs * config.slab
    lines = min(config.slab * sizes.stride[axis], output)
    assert config.slab_outputs == lines * math.prod(made.output_spatial) // output
    assert all(
        i == 1 and o == 1
        for i, o in zip(sizes.spatial[:axis], made.output_spatial[:axis], strict=True)
    )


@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_the_batch_has_no_say(kernel):
    """In what a block of a launch does, or a sample would have other bits in another batch."""
    _, made, _ = drawn(kernel, 0)
    one, other = (
        kernel.compile(replace(made, batch=batch), H200).steps for batch in (made.batch, 64)
    )
    assert one == other


def small(kernel: ClustersSm90, **changes) -> object:
    """The layer 512 -> 256 on 14x14 with GELU and GroupNorm, changed."""
    dtype = DTYPES[kernel.precision]
    weight = torch.empty(512, 256, 3, 3, device="meta")
    fields = dict(
        batch=1,
        channels=512,
        spatial=(14, 14),
        dtype=dtype,
        output_dtype=dtype,
        precision=kernel.precision,
        activation="gelu",
        norm=group_norm_stage(num_groups=8),
        conv=geometry_of(weight, padding=(1, 1)),
    )
    return problem(**{**fields, **changes})


@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_one_launch_without_scratch(kernel):
    made = small(kernel)
    plan = kernel.compile(made, H200)
    (step,) = plan.steps
    assert step.startswith(f"{kernel.name} (nchw, clusters of ")
    assert step.endswith(" blocks) + bias + gelu + normalize")
    assert plan._program.workspace_bytes == 0
    config = kernel.config(made, H200)
    # A group of 32 channels on each cluster, whose blocks share the products.
    assert (config.columns, config.column_blocks) == (32, 8)
    assert config.slabs * config.shares == 8


def test_steps_say_what_they_do():
    kernel = KERNELS[0]
    (step,) = kernel.compile(small(kernel, norm=None), H200).steps
    assert step.endswith(" blocks) + bias + gelu")


def wide(channels: int, out: int, stride: int = 1) -> dict:
    weight = torch.empty(channels, out, 2, device="meta")
    conv = geometry_of(weight, stride=(stride,))
    return {"channels": channels, "spatial": (4,), "norm": None, "conv": conv}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (wide(64, 257), "257 output channels divide into no equal parts of 8 to 256"),
        (wide(1 << 20, 64), "1048576 input and 64 output channels"),
        (wide(64, 64, 1 << 16), "its stride is 65536"),
        (
            {"conv": geometry_of(torch.empty(512, 64, 3, 3, device="meta"), groups=4)},
            "the convolution has 4 groups",
        ),
        ({"norm": group_norm_stage(num_groups=8), "spatial": (300, 300)}, "do not fit"),
        ({"norm": None, "spatial": (3000, 3000)}, "pixels"),
    ],
    ids=["a prime", "channels", "a stride", "groups", "a large plane", "pixels"],
)
def test_what_is_refused(changes, words):
    kernel = KERNELS[0]
    support = kernel.supports(small(kernel, **changes), H200)
    assert not support and words in support.reason


@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_small_layers_choose_it(kernel):
    made = small(kernel)
    (explanation,) = explained(made, device=H200)
    assert explanation.kernel == kernel.name
