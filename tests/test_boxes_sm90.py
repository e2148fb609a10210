"""Schedules of convolutions by tensor copies: what sets, taps and boxes say, by pure index
arithmetic. No GPU."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import numpy as np
import pytest
import torch
from problems import group_norm_stage
from test_taps import H200, Sizes, element_bytes, random_sizes
from test_taps_sm90 import phases_of

from fusedconv import _C, Norm, hypothetical
from fusedconv.benchmark import DTYPES
from fusedconv.kernels.cuda.boxes_costs import COSTS
from fusedconv.kernels.cuda.boxes_sm90 import BoxesSm90
from fusedconv.kernels.cuda.convolution import CHUNK_BYTES as MOST_SCRATCH
from fusedconv.registry import registry

KERNELS = [kernel for kernel in registry().kernels() if isinstance(kernel, BoxesSm90)]
pytestmark = pytest.mark.skipif(not KERNELS, reason="fusedconv was built without these kernels")
names = {"ids": lambda kernel: kernel.name}

SLAB = 64
CHUNK_BYTES = 128
#: Sizes that most rows serve.
PLAIN = {
    "channels": 16,
    "out": 16,
    "groups": 1,
    "spatial": (8, 8),
    "kernel": (3, 3),
    "stride": (2, 2),
    "padding": (0, 0),
    "output_padding": (0, 0),
    "dilation": (1, 1),
}


def drawn(kernel: BoxesSm90, seed: int):
    """A random problem that the row serves: with channels and, channels first, lines of whole 16
    bytes."""
    generator = random.Random(f"{kernel.name} {seed}")
    planar = kernel.row.planes or kernel.row.alike > 1
    layout = "nchw" if planar else generator.choice(("nchw", "nhwc"))
    vector = 16 // element_bytes(kernel)
    while True:
        sizes = random_sizes(generator)
        fields = vars(sizes) | {
            "channels": vector * generator.randint(1, 20),
            "out": vector * generator.randint(1, 40),
            "groups": 1,
        }
        if kernel.row.segments > 1 and layout == "nchw":
            ends = {
                "spatial": 8 * generator.randint(1, 4),
                "kernel": kernel.row.segments,
                "stride": kernel.row.segments,
                "padding": 0,
                "output_padding": 0,
                "dilation": 1,
            }
            fields |= {name: (*fields[name][:-1], end) for name, end in ends.items()}
        if kernel.row.filter_first:
            axes = len(fields["spatial"])
            none = (0,) * axes
            fields |= {"stride": (1,) * axes, "padding": none, "output_padding": none}
            fields["channels"] = vector * generator.randint(1, 8)
        sizes = Sizes(**fields)
        made = sizes.problem(kernel, layout=layout)
        if kernel.supports(made, H200):
            return sizes, made, kernel.config(made, H200)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_sets_have_every_phase_with_its_taps(kernel, seed):
    sizes, _, config = drawn(kernel, seed)
    axes = phases_of(sizes)
    expected = {
        residues: set(
            itertools.product(*(axis[r][1] for axis, r in zip(axes, residues, strict=True)))
        )
        for residues in itertools.product(*(range(len(axis)) for axis in axes))
    }
    found = {}
    for first, count, first_tap, taps in config.sets:
        assert 1 <= count <= kernel.row.columns // config.segment
        for i in range(count):
            own = slice(first_tap, first_tap + taps)
            found[tuple(config.phases[first + i])] = {
                tuple(shift)
                for shift, mask in zip(config.shifts[own], config.masks[own], strict=True)
                if mask >> i & 1
            }
    assert found == expected
    assert len(config.phases) == len(expected)
    if kernel.row.segments == 1:
        assert all(
            mask == (1 << count) - 1
            for first, count, first_tap, taps in config.sets
            for mask in config.masks[first_tap : first_tap + taps]
        )


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_boxes_hold_every_position(kernel, seed):
    sizes, made, config = drawn(kernel, seed)
    # Leading axes that a problem lacks count as one.
    positions = [axis[0][0] for axis in phases_of(sizes)]
    positions = [1] * (3 - len(positions)) + positions
    for batch in (1, 3, 100):
        box = config.box(batch)
        assert math.prod(box) <= kernel.row.positions
        boxes = _boxes((*positions, batch), box)
        assert config.launch_tiles(batch) == math.ceil(boxes / kernel.row.boxes)
        if kernel.row.segments > 1 and made.output_layout == "nchw":
            assert box[2] in (8, 16, 32, 64)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_each_phase_has_its_taps_of_the_filter(kernel, seed):
    sizes, _, config = drawn(kernel, seed)
    filter_taps, last = iter(config.filter_taps), (1, 1, *sizes.kernel)[-3:]
    axes = list(zip(sizes.stride, sizes.padding, sizes.dilation, strict=True))
    for first, count, first_tap, taps in config.sets:
        for tap in range(first_tap, first_tap + taps):
            for i in range(count):
                if not config.masks[tap] >> i & 1:
                    continue
                place = [int(n) for n in np.unravel_index(next(filter_taps), last)]
                residues, shifts = config.phases[first + i], config.shifts[tap]
                places = zip(residues, shifts, place, strict=True)
                # Output r + stride q reads input q + shift by that tap.
                for (stride, padding, dilation), (r, shift, t) in zip(
                    axes, list(places)[-len(axes) :], strict=True
                ):
                    assert dilation * t == r + padding - stride * shift
    assert next(filter_taps, None) is None
    line = config.line
    assert (line > 0) == (element_bytes(kernel) == 2)
    if line:
        assert config.segment % line == 0
        assert line in (8, 16, 32, 64)


@pytest.mark.parametrize("weight_layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("kernel_size", [1, 2, 3])
@pytest.mark.parametrize("out", [64, 40, 17])
@pytest.mark.parametrize(
    ("kernel", "shortest"),
    [
        pytest.param(kernel, 8 if kernel.row.stationary else 32, id=kernel.name)
        for kernel in KERNELS
        if kernel.row.segments == 1 and kernel.row.columns <= 128
    ],
)
def test_a_weight_whose_output_channels_are_beside_each_other_is_read_as_it_lies(
    kernel, shortest, out, kernel_size, weight_layout
):
    """In 16 bits, lines of so many; of one tap both layouts are one."""
    explicit = "tf32" if kernel.precision == "tf32" else None
    made = hypothetical.problem(
        batch=8, channels=64, out_channels=out, spatial=(16, 16), kernel_size=kernel_size,
        stride=1 if kernel.row.filter_first else 2, dtype=DTYPES[kernel.precision],
        precision=explicit, device="cuda", layout="nhwc", weight_layout=weight_layout,
    )  # fmt: skip
    if not kernel.supports(made, H200):
        pytest.skip("such a filter does not stay in shared memory")
    pack = next(step for step in kernel.compile(made, H200).steps if step.startswith("pack filter"))
    beside = kernel.precision != "tf32" and (weight_layout == "nhwc" or kernel_size == 1)
    as_it_lies = beside and math.gcd(out, 64) >= shortest
    assert pack.endswith("if the weight begins at no multiple of 16 bytes") == as_it_lies


def _boxes(whole: tuple[int, ...], box: list[int]) -> int:
    return math.prod(math.ceil(n / b) for n, b in zip(whole, box, strict=True))


@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_shared_memory_holds_the_ring(kernel):
    sizes, made, config = drawn(kernel, 0)
    row, halos = kernel.row, 0
    lines = 0 if row.stationary else row.columns
    if row.halo:
        halos = _C.sm90.boxes.halo_stages * row.boxes * config.halo_bytes
        assert config.halo_bytes >= row.positions * CHUNK_BYTES
    else:
        lines += row.boxes * SLAB
    steps = max(taps for *_, taps in config.sets) * config.chunks
    assert config.kept_bytes == (steps * row.columns * CHUNK_BYTES if row.stationary else 0)
    assert config.stages >= (8 if row.stationary else 3)
    ring = config.stages * lines * CHUNK_BYTES + halos + config.kept_bytes
    assert ring < config.shared_bytes <= H200.shared_bytes
    assert config.chunks == math.ceil(sizes.channels * element_bytes(kernel) / CHUNK_BYTES)
    assert config.segment * config.channel_blocks >= sizes.out
    rows = sum(
        kernel.row.columns if kernel.row.segments == 1 else mask.bit_count() * config.segment
        for mask in config.masks
    )
    assert config.filter_bytes == rows * config.channel_blocks * config.chunks * CHUNK_BYTES
    assert kernel.estimate(made, H200, COSTS) > 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"channels": 128}, "its filter of 147456 bytes and 2 boxes of"),
        ({"dilation": (3, 3)}, "do not fit the shared memory"),
        ({"stride": (2, 2)}, "its stride is 2, 1 is served"),
        ({"kernel": (5, 5), "dilation": (50, 1)}, "its taps reach 200 positions"),
    ],
)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_what_the_filter_first_is_for(layout, changes, reason):
    kernel = next(k for k in KERNELS if k.row.filter_first and k.precision == "bf16")
    fields = PLAIN | {"channels": 64, "out": 64, "stride": (1, 1), "spatial": (40, 50)} | changes
    made = Sizes(**fields).problem(kernel, layout=layout)
    support = kernel.supports(made, H200)
    assert bool(support) == (not reason)
    assert reason in (support.reason or "")
    if support:
        config = kernel.config(made, H200)
        # Of 42 lines 24 and, as products are of so many, 24 again; of 52 columns seven eights.
        assert config.multiplied == 48 * 56
        assert config.suits_moments and not config.holds_pixels
    other = next(k for k in KERNELS if k.row.stationary and not k.row.filter_first)
    with pytest.raises(ValueError, match=f"{other.name}: multiplied: got a row whose positions"):
        other.config(Sizes(**PLAIN).problem(other, layout="nhwc"), H200).multiplied  # noqa: B018


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"channels": 12, "groups": 2, "out": 16}, "it has 2 groups"),
        ({"groups": 2}, "it has 2 groups"),
        ({"stride": (5, 5)}, "25 sub-pixel phases"),
        ({"kernel": (21, 21)}, "it has 441 taps"),
        ({"kernel": (1000, 1000)}, "it has 1000000 taps"),
        ({"channels": 8, "out": 1 << 21, "kernel": (16, 8)}, "its packed filter has 2147483648"),
    ],
)
def test_what_is_refused(changes, reason):
    kernel = next(kernel for kernel in KERNELS if kernel.name == "sm90_boxes_bf16_256")
    support = kernel.supports(Sizes(**PLAIN | changes).problem(kernel, layout="nhwc"), H200)
    assert not support
    assert reason in support.reason


def upsampling(kernel: BoxesSm90, out: int, **changes):
    """A filter of 2x2 with a stride of 2 to ``out`` channels, channels last."""
    sizes = Sizes(
        channels=64, out=out, groups=1, spatial=(8, 8), kernel=(2, 2), stride=(2, 2),
        padding=(0, 0), output_padding=(0, 0), dilation=(1, 1),
    )  # fmt: skip
    return sizes.problem(kernel, layout="nhwc", **changes)


@pytest.mark.parametrize(
    ("out", "segment", "blocks"),
    [(64, 64, 1), (256, 256, 4), (384, 128, 6), (320, 64, 5), (512, 256, 8)],
)
def test_blocks_divide_channels_and_phases_alike(out, segment, blocks):
    """Of 384 channels two blocks of 256 columns a phase would leave a quarter unused."""
    kernel = next(kernel for kernel in KERNELS if kernel.name == "sm90_boxes_bf16_256")
    config = kernel.config(upsampling(kernel, out), H200)
    assert (config.segment, config.blocks) == (segment, blocks)


@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("out", [64, 384])
def test_an_epilogue_normalises_pixels_where_a_block_has_all_their_channels(out, save):
    kernel = next(kernel for kernel in KERNELS if kernel.name == "sm90_boxes_bf16_256")
    layer = Norm(
        kind="layer", num_groups=0, eps=1e-6, weight=True, bias=True, affine_dtype=torch.float32
    )
    made = upsampling(
        kernel, out, norm=layer, activation="gelu", order="norm_act", save=save, bias=True
    )
    plan = kernel.compile(made, H200)
    whole = out == 64 and not save
    assert len(plan.steps) == (2 if whole else 3)
    assert plan.steps[1].endswith("normalize over channels + gelu") == whole
    # A pass that is left out costs nothing.
    beside = kernel.milliseconds_beside(made, H200, 1)
    assert (beside < 2 * H200.launch_milliseconds + 1e-9) == whole


AFFINE = Norm(
    kind="affine", num_groups=0, eps=1e-5, weight=True, bias=True, affine_dtype=torch.float32
)


@pytest.mark.parametrize(
    ("norm", "steps"),
    [
        (None, ["bias + save + relu"]),
        (AFFINE, ["bias + save + affine + relu"]),
        # Statistics are known behind the convolution only.
        (group_norm_stage(8), ["bias", "moments (nhwc)", "normalize"]),
    ],
)
def test_an_epilogue_stores_what_is_saved_beside_the_result(norm, steps):
    kernel = next(kernel for kernel in KERNELS if kernel.name == "sm90_boxes_bf16_256")
    made = upsampling(
        kernel, 64, norm=norm, activation="relu", order="norm_act", save=True, bias=True
    )
    _, *own = kernel.compile(made, H200).steps
    assert len(own) == len(steps)
    assert own[0].endswith(f"(nhwc) + {steps[0]}")
    unsaved = dataclasses.replace(made, save=False)
    stores_more = "save + " in own[0]
    assert (kernel.cost(made, H200) > kernel.cost(unsaved, H200)) == stores_more


def normalising(name: str, **changes):
    """A row with a layer of U-Nets whose products take less than memory, behind it GroupNorm."""
    kernel = next(kernel for kernel in KERNELS if kernel.name == f"sm90_boxes_{name}")
    given = {"activation": "relu", "order": "norm_act", "bias": True, **changes}
    made = upsampling(kernel, 64, norm=group_norm_stage(8), **given)
    return kernel, dataclasses.replace(made, batch=16, spatial=(128, 128))


@pytest.mark.parametrize("name", ["bf16_4x32_pair", "bf16_256", "tf32_256", "tf32_128_pair"])
def test_what_memory_bounds_is_computed_twice(name):
    kernel, made = normalising(name)
    _, *own = kernel.compile(made, H200).steps
    assert [step.split(" + ", 1)[-1] for step in own] == [
        "bias + moments",
        "merge moments",
        "bias + normalize + relu",
    ]
    assert kernel.passes(made, H200) == 0


@pytest.mark.parametrize(
    "changes", [{"save": True}, {"order": "act_norm"}, {"output_dtype": torch.float16}], ids=str
)
@pytest.mark.parametrize("name", ["bf16_2x32_pair", "bf16_256", "tf32_256"])
def test_what_is_saved_activated_before_or_of_another_dtype_is_computed_once(name, changes):
    """With moments in the epilogue in float32, and in rows of 16 bits whose blocks share a
    multiprocessor and have several phases; else by a pass."""
    kernel, made = normalising(name, **changes)
    assert not kernel.computes_twice(made, H200)
    steps = kernel.compile(made, H200).steps
    takes_moments = name != "bf16_256"
    assert any(step.endswith("+ moments") for step in steps) == takes_moments
    assert ("merge moments" in steps) == takes_moments
    assert any(step.startswith("moments (") for step in steps) != takes_moments
    assert kernel.passes(made, H200) == 1


def test_planes_of_a_few_pixels_leave_moments_to_a_pass():
    """A slab holds several of their samples, of which moments are apart."""
    kernel, made = normalising("tf32_256")
    small = dataclasses.replace(made, batch=64, spatial=(3, 3))
    assert not kernel.can_take_moments(small, kernel.config(small, H200))
    assert any(step.startswith("moments (") for step in kernel.compile(small, H200).steps)


@pytest.mark.parametrize(
    ("channels", "out", "layout", "front", "behind"),
    [
        (64, 17, "nhwc", [], ["copy (nhwc -> nhwc)"]),
        (64, 17, "nchw", ["input nchw -> nhwc"], ["copy (nhwc -> nchw)"]),
        (3, 64, "nhwc", ["input nhwc -> nhwc"], []),
        (3, 17, "nhwc", ["input nhwc -> nhwc"], ["copy (nhwc -> nhwc)"]),
    ],
)
def test_pixels_that_are_not_whole_16_bytes_are_padded(channels, out, layout, front, behind):
    kernel = next(kernel for kernel in KERNELS if kernel.name == "sm90_boxes_bf16_64_pair")
    sizes = Sizes(
        channels=channels, out=out, groups=1, spatial=(8, 8), kernel=(4, 4), stride=(2, 2),
        padding=(1, 1), output_padding=(0, 0), dilation=(1, 1),
    )  # fmt: skip
    made = sizes.problem(kernel, layout=layout, bias=True)
    assert kernel.supports(made, H200)
    plan = kernel.compile(made, H200)
    steps = [step for step in plan.steps if not step.startswith("pack filter")]
    at = len(front)
    for step, expected in zip(steps[:at] + steps[at + 1 :], front + behind, strict=True):
        assert step.startswith(expected)
    assert steps[at].startswith("sm90_boxes_bf16_64_pair")
    padded = -(-channels // 8) * 8
    if front:
        assert steps[0].endswith(f"channels {channels} -> {padded}")
    assert kernel.scratch_bytes(made, kernel.config(made, H200)) >= 2 * 64 * padded * at


def test_scratch_of_a_padded_output_of_another_dtype_is_within_the_limit():
    """As autocast in front of a normalisation asks for it: chunks are of what the program takes."""
    kernel = next(kernel for kernel in KERNELS if kernel.name == "sm90_boxes_bf16_64_pair")
    sizes = Sizes(
        channels=64, out=1, groups=1, spatial=(256, 256), kernel=(4, 4), stride=(2, 2),
        padding=(1, 1), output_padding=(0, 0), dilation=(1, 1),
    )  # fmt: skip
    made = sizes.problem(kernel, layout="nhwc", bias=True, norm=group_norm_stage(1))
    made = dataclasses.replace(made, batch=1024, output_dtype=torch.float32)
    assert kernel.supports(made, H200)
    plan = kernel.compile(made, H200)
    assert plan._program.workspace_bytes <= MOST_SCRATCH + (16 << 20)


def test_an_output_in_another_layout_or_dtype_is_stored_by_a_pass():
    kernel = next(kernel for kernel in KERNELS if kernel.name == "sm90_boxes_bf16_256")
    made = upsampling(kernel, 64, activation="relu", save=True, bias=True)
    for changes in ({"layout": "nchw"}, {"output_dtype": torch.float32}):
        plan = kernel.compile(dataclasses.replace(made, **changes), H200)
        assert not any("save +" in step for step in plan.steps)
        assert len(plan.steps) > 2


def test_channels_first_asks_for_lines_of_whole_16_bytes():
    kernel = next(kernel for kernel in KERNELS if kernel.name == "sm90_boxes_bf16_2x64_planes_pair")
    for spatial, size, padding, reason in (
        ((8, 12), 2, 0, "a line of 12 pixels"),
        ((8, 16), 4, 1, "beside each other along width"),
    ):
        sizes = Sizes(
            channels=16, out=16, groups=1, spatial=spatial, kernel=(size, size), stride=(2, 2),
            padding=(padding, padding), output_padding=(0, 0), dilation=(1, 1),
        )  # fmt: skip
        support = kernel.supports(sizes.problem(kernel, layout="nchw"), H200)
        assert not support
        assert reason in support.reason
