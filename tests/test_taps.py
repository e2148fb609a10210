"""Transposed convolutions of any stride by lists of taps: what blocks cover and read, what they
refuse, their plans and their place in the selection. No GPU."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, replace

import pytest
import torch
from problems import explained, geometry_of, group_norm_stage, problem
from reference import CONVOLUTIONS

import fusedconv
from fusedconv import ForwardProblem
from fusedconv.benchmark import DTYPES
from fusedconv.device import KNOWN
from fusedconv.kernels.compiled import by_axis
from fusedconv.kernels.cuda import taps, taps_sm90
from fusedconv.lowering import lower
from fusedconv.registry import registry
from fusedconv.selection import choose

ROWS = (taps.TapsSm80, taps_sm90.TapsSm90)
KERNELS = [kernel for kernel in registry().kernels() if isinstance(kernel, ROWS)]
#: Whose schedules these tests know, and which serve every problem.
SM80 = [kernel for kernel in KERNELS if isinstance(kernel, taps.TapsSm80)]
pytestmark = pytest.mark.skipif(not KERNELS, reason="fusedconv was built without these kernels")

H200 = KNOWN[90]
CHUNK_BYTES = 64  # of channels, in a stage
names = {"ids": lambda kernel: kernel.name}


def element_bytes(kernel: taps.TapsRow) -> int:
    return DTYPES[kernel.precision].itemsize


@dataclass(frozen=True)
class Sizes:
    """A transposed convolution of one to three axes."""

    channels: int
    out: int
    groups: int
    spatial: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    output_padding: tuple[int, ...]
    dilation: tuple[int, ...]

    def weight(self) -> torch.Tensor:
        return torch.randn(self.channels, self.out // self.groups, *self.kernel).double()

    def problem(self, kernel: taps.TapsRow, **changes: object) -> ForwardProblem:
        fields = dict(
            stride=self.stride,
            padding=self.padding,
            output_padding=self.output_padding,
            dilation=self.dilation,
            groups=self.groups,
            out_channels=self.out,
        )
        dtype = DTYPES[kernel.precision]
        # A shape alone: problems too large to be served have weights of many gigabytes.
        weight = torch.empty(self.channels, self.out // self.groups, *self.kernel, device="meta")
        return problem(
            **{
                "dtype": dtype,
                "output_dtype": dtype,
                "precision": kernel.precision,
                "channels": self.channels,
                "spatial": self.spatial,
                "norm": None,
                "conv": geometry_of(weight, **fields),
                **changes,
            }
        )


def random_sizes(generator: random.Random, most: int = 14) -> Sizes:
    axes = generator.choice((1, 2, 2, 3))
    drawn = []
    for _ in range(axes):
        kernel, stride = generator.randint(1, 5), generator.randint(1, 4)
        dilation = generator.choice((1, 1, 2, 3))
        extra = generator.randint(0, max(stride, dilation) - 1)
        extent = generator.randint(1, {1: 90, 2: most, 3: 5}[axes])
        last = (extent - 1) * stride + dilation * (kernel - 1) + extra
        padding = generator.randint(0, min(last // 2, dilation * kernel))
        drawn.append((extent, kernel, stride, padding, extra, dilation))
    groups = generator.choice((1, 1, 2, 3))
    channels, out = generator.choice((1, 3, 8, 20)), generator.choice((1, 5, 33, 70))
    return Sizes(channels * groups, out * groups, groups, *map(tuple, zip(*drawn, strict=True)))


# ---- schedules -----------------------------------------------------------------------------------


class Axis:
    """What blocks read along an axis, from the phases that a transposed convolution lowers to."""

    def __init__(self, phases, tile: int, box: int, split: bool, lead: int) -> None:
        self.phases, self.tile, self.split = phases, tile, split
        shifts = [(p.taps - 1) * p.dilation - p.lower_padding for p in phases if p.taps]
        lowest = [-p.lower_padding for p in phases if p.taps]
        self.lowest_shift = min(shifts, default=0)
        self.lowest = min(lowest, default=0)
        self.box, self.lead = box, lead

    def box_origin(self, tile_index: int, tap: int) -> int:
        """The first input position of what is staged: of a split axis, for one tap."""
        below = self.lowest
        if self.split:
            below = self.lowest_shift - tap * self.phases[0].dilation
        return tile_index * self.tile + below - self.lead

    def offset(self, phase, tap: int) -> int:
        """Of the tap from the position, in the box."""
        shift = (phase.taps - 1) * phase.dilation - phase.lower_padding
        if self.split:
            return self.lead + shift - self.lowest_shift
        return self.lead + shift - tap * phase.dilation - self.lowest


def by_blocks(config, sizes: Sizes, x: torch.Tensor, weight: torch.Tensor, lead: int):
    """The convolution of one group as blocks compute it: tiles of positions, of each phase its
    taps, read from the box that is staged. Every output must be written once."""
    conv = geometry_of(
        weight,
        stride=sizes.stride,
        padding=sizes.padding,
        output_padding=sizes.output_padding,
        dilation=sizes.dilation,
    )
    lowered = lower(conv, sizes.spatial).axes
    axes = [
        Axis(phases, config.tile[a], config.box[a], config.split[a], lead if a == 2 else 0)
        for a, phases in enumerate(lowered)
    ]
    output = x.new_full((weight.shape[1], *by_axis(conv.output_spatial(sizes.spatial))), torch.nan)
    x = x.reshape(x.shape[0], *by_axis(sizes.spatial))
    weight = weight.reshape(*weight.shape[:2], *by_axis(sizes.kernel))

    def staged(tile, tap) -> torch.Tensor:
        """The box, with zeros where it lies outside of the input."""
        result = x.new_zeros(x.shape[0], *config.box)
        places = []
        for axis, index, one, extent in zip(axes, tile, tap, x.shape[1:], strict=True):
            first = axis.box_origin(index, one)
            low, high = max(0, first), min(extent, first + axis.box)
            if high <= low:
                return result
            places.append((slice(low - first, high - first), slice(low, high)))
        result[(slice(None), *(to for to, _ in places))] = x[
            (slice(None), *(source for _, source in places))
        ]
        return result

    for tile in itertools.product(*map(range, config.tiles)):
        for phases in itertools.product(*lowered):
            # Positions of the tile that the phase has.
            counts = [
                min(axis.tile, phase.output - index * axis.tile)
                for axis, phase, index in zip(axes, phases, tile, strict=True)
            ]
            if min(counts) <= 0:
                continue
            sums = x.new_zeros(weight.shape[1], *counts)
            for tap in itertools.product(*(range(phase.taps) for phase in phases)):
                box = staged(tile, tap)
                filter = weight
                for axis, phase, one, count in zip(axes, phases, tap, counts, strict=True):
                    at = axis.offset(phase, one)
                    assert 0 <= at <= axis.box - count, "a tap reads beside the box"
                    dim = 1 + axes.index(axis)
                    box = box.narrow(dim, at, count)
                    # A Phase lists its taps reversed.
                    k = phase.first_tap + (phase.taps - 1 - one) * phase.tap_step
                    filter = filter.narrow(1 + dim, k, 1)
                sums += torch.einsum("cdhw,ck->kdhw", box, filter.flatten(2).squeeze(-1))
            target = output
            for dim, (axis, phase, index, count) in enumerate(
                zip(axes, phases, tile, counts, strict=True), 1
            ):
                first = phase.output_offset + index * axis.tile * phase.output_step
                span = slice(first, first + (count - 1) * phase.output_step + 1, phase.output_step)
                target = target[(*(slice(None),) * dim, span)]
            assert target.isnan().all()
            target.copy_(sums)
    return output.reshape(weight.shape[1], *conv.output_spatial(sizes.spatial))


def lead_of(config, kernel, sizes: Sizes) -> int:
    """Columns by which a box begins before the first that is read, where whole vectors are."""
    if config.reads != "nchw":
        return 0
    conv = sizes.problem(kernel).conv
    phases = lower(conv, sizes.spatial).axes[2]
    lowest = min((-p.lower_padding for p in phases if p.taps), default=0)
    return lowest % (16 // element_bytes(kernel))


@pytest.mark.parametrize("kernel", SM80, **names)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_blocks_compute_the_convolution(kernel, layout):
    generator = random.Random(kernel.name)
    several, read = 0, set()
    for number in range(12):
        torch.manual_seed(number)
        sizes = random_sizes(generator)
        if number % 3 == 0:  # whole vectors, several tiles
            last = 8 * generator.randint(70, 90) // len(sizes.spatial) ** 3 // 8 * 8 + 8
            sizes = replace(sizes, channels=8, out=5, groups=1)
            sizes = replace(sizes, spatial=(*sizes.spatial[:-1], last))
        asked = sizes.problem(kernel, layout=layout)
        config = kernel.config(asked, H200)
        assert config.support, config.support.reason
        weight = sizes.weight()[: sizes.channels // sizes.groups]
        x = torch.randn(weight.shape[0], *sizes.spatial).double()
        expected = CONVOLUTIONS[len(sizes.spatial)](
            x[None],
            weight,
            None,
            sizes.stride,
            sizes.padding,
            sizes.output_padding,
            1,
            sizes.dilation,
        )[0]
        lead = lead_of(config, kernel, sizes)
        actual = by_blocks(config, sizes, x, weight, lead)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
        several += math.prod(config.tiles) > 1
        read.add(config.reads)
    assert several >= 2
    assert read == {layout, "element by element"}


@pytest.mark.parametrize("kernel", SM80, **names)
def test_what_a_schedule_says_of_sizes(kernel):
    generator = random.Random(kernel.name)
    split = 0
    for _ in range(60):
        sizes = random_sizes(generator, most=60)
        asked = sizes.problem(kernel)
        config = kernel.config(asked, H200)
        axes = lower(asked.conv, sizes.spatial).axes
        phases = math.prod(len(axis) for axis in axes)
        channels = sizes.channels // sizes.groups
        assert config.chunks == math.ceil(channels * element_bytes(kernel) / CHUNK_BYTES)
        assert config.width_phases in (1, len(axes[2]))
        for axis, tile, tiles in zip(axes, config.tile, config.tiles, strict=True):
            positions = max(phase.output for phase in axis)
            assert (tiles - 1) * tile < positions <= tiles * tile
        most = [max(1, *(phase.taps for phase in axis)) for axis in axes]
        assert config.stages * config.steps == math.prod(most)
        assert config.stages == math.prod(m for m, s in zip(most, config.split, strict=True) if s)
        split += any(config.split)
        tiles = math.prod(config.tiles)
        assert config.partial_slots == tiles * phases // config.width_phases
        assert config.partial_bytes_per_sample == 16 * sizes.out * config.partial_slots
        assert config.shared_bytes <= H200.shared_bytes
        rows = math.ceil(sizes.out // sizes.groups * phases / config.blocks_m)
        least = rows * CHUNK_BYTES * config.blocks_m * sizes.groups * config.chunks
        assert config.filter_bytes >= least * math.prod(most)


@pytest.mark.parametrize("kernel", SM80, **names)
def test_a_box_beyond_shared_memory_is_split(kernel):
    wide = Sizes(8, 8, 1, (300,), (3,), (1,), (0,), (0,), (400,))
    config = kernel.config(wide.problem(kernel), H200)
    assert config.support
    assert config.split[2]
    assert config.stages == 3


def products_of(sizes: Sizes) -> float:
    """Of an output that any tap meets, on average."""
    conv = sizes.problem(KERNELS[0]).conv
    met = [
        [phase.taps for phase in axis if phase.taps]
        for axis in lower(conv, (64,) * len(sizes.spatial)).axes
    ]
    taps_of_axes = [sum(axis) / len(axis) for axis in met]
    return sizes.channels // sizes.groups * math.prod(taps_of_axes)


# ---- what is served ------------------------------------------------------------------------------

PLAIN = Sizes(16, 24, 1, (9, 11), (4, 4), (2, 2), (1, 1), (0, 0), (1, 1))


@pytest.mark.parametrize("kernel", SM80, **names)
def test_every_problem_of_the_family_is_served(kernel):
    generator = random.Random(kernel.name)
    for _ in range(100):
        sizes = random_sizes(generator)
        products = products_of(sizes)
        for layout, save in itertools.product(("nchw", "nhwc", "strided"), (False, True)):
            asked = sizes.problem(
                kernel, layout=layout, save=save, aligned=generator.random() < 0.5
            )
            support = kernel.supports(asked, H200)
            expected = kernel.precision != "fp32" or products >= 12
            assert bool(support) == expected, (sizes, support)
            if support:
                assert 0 < kernel.cost(asked, H200) < 1.0


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"conv": None}, "computes convolutions"),
        ({"dtype": torch.float64, "output_dtype": torch.float64, "precision": "fp64"}, "dtype is"),
        ({"batch": 0}, "the input is empty"),
        ({"epilogue": (fusedconv.Residual(),)}, "no fused kernel has the stage"),
        ({"spatial": (1 << 15, 1 << 15)}, "counted to"),
        ({"spatial": (9, 1 << 29)}, "counted to"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_refusals_say_why(kernel, changes, text):
    asked = PLAIN.problem(kernel)
    assert kernel.supports(asked, H200)
    if changes.get("conv", asked.conv) is None:
        changes = {**changes, "epilogue": ()}
    support = kernel.supports(replace(asked, **changes), H200)
    assert not support
    assert text in support.reason


@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_devices_and_precisions_that_are_refused(kernel):
    asked = PLAIN.problem(kernel)
    assert "runs on CUDA" in kernel.supports(asked, fusedconv.device.PROCESSOR).reason
    asks = "9.0" if kernel.architecture == 90 else "8.0"
    assert asks in kernel.supports(asked, KNOWN[75]).reason
    other = next(k for k in KERNELS if k.precision not in (kernel.precision, "tf32", "fp32"))
    assert not kernel.supports(
        replace(asked, dtype=DTYPES[other.precision], precision=other.precision), H200
    )


@pytest.mark.parametrize("kernel", SM80, **names)
def test_a_stride_and_a_filter_beyond_what_is_counted(kernel):
    far = Sizes(16, 16, 1, (3,), (2,), (40_000,), (0,), (0,), (1,))
    assert "stride" in kernel.supports(far.problem(kernel), H200).reason
    long = Sizes(16, 1, 1, (3,), (1 << 20,), (1,), (0,), (0,), (1,))
    conv = replace(
        PLAIN.problem(kernel).conv,
        **{
            field: getattr(long, field)
            for field in ("stride", "padding", "output_padding", "dilation")
        },
        kernel_size=long.kernel,
        out_channels=1,
        weight_strides=(1 << 20, 1 << 20, 1),
    )
    asked = replace(PLAIN.problem(kernel), conv=conv, spatial=(3,))
    assert "taps" in kernel.supports(asked, H200).reason


# ---- plans ---------------------------------------------------------------------------------------


def steps_of(kernel, sizes: Sizes = PLAIN, **changes: object) -> list[str]:
    asked = sizes.problem(kernel, **changes)
    assert kernel.supports(asked, H200)
    return list(kernel.compile(asked, H200).steps)


@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_steps(kernel):
    first, *others = steps_of(kernel, activation="gelu")
    assert first.startswith("pack filter")
    assert others == [f"{kernel.name} (element by element) + bias + gelu"]
    whole = replace(PLAIN, spatial=(9, 16))
    # Hopper's rows load whole vectors of 16-bit planes alone.
    vectors = kernel in SM80 or element_bytes(kernel) == 2
    reads = "nchw" if vectors else "element by element"
    assert steps_of(kernel, whole, activation="relu")[1:] == [
        f"{kernel.name} ({reads}) + bias + relu"
    ]
    _, convolve = steps_of(kernel, layout="nhwc", activation="identity", bias=False)
    assert convolve == f"{kernel.name} (nhwc)"
    copy, *_ = steps_of(kernel, layout="strided")
    assert "copy of the strided input" in copy
    norm = group_norm_stage(3)
    _, convolve, merge, last = steps_of(kernel, norm=norm)
    assert convolve.endswith("+ bias + gelu + moments")
    assert merge == "merge moments"
    assert "normalize" in last
    saved = steps_of(kernel, norm=norm, save=True)
    assert "gelu" in saved[3]  # once more behind the saved convolution output
    assert len(saved) == 4
    instance = group_norm_stage(PLAIN.out)
    assert steps_of(kernel, norm=instance, order="norm_act")[2] == "merge moments"


LAYER = group_norm_stage(0, kind="layer")
AFFINE = group_norm_stage(0, kind="affine")


@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_a_layer_norm_is_one_pass_behind(kernel):
    _, convolve, last = steps_of(kernel, norm=LAYER, order="norm_act", activation="gelu")
    assert convolve.endswith("+ bias")
    assert last == "layer norm + gelu over channels in one pass (nchw)"
    _, convolve, last = steps_of(kernel, norm=LAYER, activation="gelu", layout="nhwc")
    assert convolve.endswith("+ bias + gelu")
    assert last == "layer norm over channels in one pass (nhwc)"
    saved = steps_of(kernel, norm=LAYER, activation="gelu", save=True)
    assert saved[2:] == ["gelu + layer norm over channels in one pass (nchw)"]


@pytest.mark.parametrize("kernel", SM80, **names)
def test_an_affine_map_is_in_the_epilogue(kernel):
    steps = steps_of(kernel, norm=AFFINE, order="norm_act", activation="relu")
    assert len(steps) == 2
    assert steps[1].endswith("+ bias + affine + relu")
    for changes, text in (
        ({"order": "act_norm"}, "gelu is in front of the affine map"),
        ({"norm": replace(AFFINE, affine_dtype=torch.float16)}, "dtype is float16, not float32"),
    ):
        asked = PLAIN.problem(kernel, **{"norm": AFFINE, "order": "norm_act", **changes})
        support = kernel.supports(asked, H200)
        assert not support
        assert text in support.reason


@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_an_affine_map_behind_a_saved_output_is_a_pass_of_its_own(kernel):
    steps = steps_of(kernel, norm=AFFINE, order="norm_act", activation="relu", save=True)
    assert len(steps) == 3
    assert steps[1].endswith("+ bias")
    assert steps[2] == "affine_norm + relu (nchw -> nchw)"


@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_a_batch_beyond_the_scratch_limit_comes_in_chunks(kernel):
    asked = PLAIN.problem(kernel, norm=group_norm_stage(3), batch=1 << 24)
    config = kernel.config(asked, H200)
    chunk = kernel.chunk(asked, config)
    assert chunk * config.partial_bytes_per_sample <= 2 << 30
    assert chunk < asked.batch
    assert kernel.cost(asked, H200) > 100 * kernel.cost(replace(asked, batch=1 << 14), H200)


# ---- selection -----------------------------------------------------------------------------------

LARGE = Sizes(256, 256, 1, (32, 32), (4, 4), (2, 2), (1, 1), (0, 0), (1, 1))


@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_forced_by_name_and_by_provider(kernel):
    asked = PLAIN.problem(kernel)
    ((_, candidate),) = choose(asked, H200, kernel.name).chosen
    assert candidate.kernel is kernel
    ((_, candidate),) = choose(asked, H200, kernel.provider).chosen
    assert candidate.kernel.provider == kernel.provider


@pytest.mark.parametrize("precision", ["tf32", "fp16", "bf16"])
def test_strided_layers_are_served_by_these(precision):
    """But on Hopper by rows of its own, a matrix product where the filter is as large as the
    stride."""
    kernel = next(k for k in KERNELS if k.precision == precision)
    mask = Sizes(64, 32, 1, (128, 128), (2, 2), (2, 2), (0, 0), (0, 0), (1, 1))
    normalised = Sizes(
        48, 48, 1, (32, 32, 32), (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1), (1, 1, 1)
    )
    for asked in (
        mask.problem(kernel, batch=16),
        normalised.problem(kernel, norm=group_norm_stage(48)),
    ):
        for architecture in (80, 90):
            (explanation,) = explained(asked, device=KNOWN[architecture])
            product = architecture == 90 and asked.conv.kernel_size == asked.conv.stride
            if product:
                assert explanation.kernel.endswith("_interleaved_0_0"), explanation.kernel
            else:
                # In 16 bits reading the input as it lies is estimated to take less.
                hopper = "boxes_sm90" if precision == "tf32" else "cutlass_sm90"
                expected = hopper if architecture == 90 else "taps_sm80"
                assert explanation.provider == expected, explanation.kernel


def test_a_tensor_with_few_positions_is_left_to_torch():
    """Where a layer's blocks are fewer than multiprocessors."""
    kernel = next(k for k in SM80 if k.precision == "bf16")
    few = replace(LARGE, channels=512, spatial=(8, 8))
    (explanation,) = explained(few.problem(kernel, batch=1), device=KNOWN[80])
    assert explanation.provider == "torch"


@pytest.mark.parametrize("kernel", SM80, **names)
def test_the_cost_is_of_what_blocks_multiply(kernel):
    """Half of the channels or of the batch, half of the time; of the taps, as far as staging their
    input leaves it."""
    sizes = replace(LARGE, channels=1024)
    asked = sizes.problem(kernel, batch=64)
    whole = kernel.cost(asked, H200)
    for other, most in (
        (replace(sizes, channels=512).problem(kernel, batch=64), 0.6),
        (replace(asked, batch=32), 0.6),
        (replace(sizes, kernel=(2, 4), padding=(0, 1)).problem(kernel, batch=64), 0.8),
    ):
        assert 0.4 < kernel.cost(other, H200) / whole < most


def test_taps_of_a_block_are_those_of_its_phases():
    kernel = SM80[0]
    # Phases of 1 and 2 taps along either axis; a block has both along width.
    odd = replace(LARGE, kernel=(3, 3), output_padding=(1, 1))
    asked = odd.problem(kernel)
    config = kernel.config(asked, H200)
    assert taps._block_steps(asked, config) == pytest.approx(1.5 * 2)
    asked = LARGE.problem(kernel)
    assert taps._block_steps(asked, kernel.config(asked, H200)) == 4
