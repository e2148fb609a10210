"""The schedules of the Hopper convolutions whose positions come from registers: what their tiles
cover, what a stage holds, what they refuse. No GPU."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from problems import geometry_of, group_norm_stage, problem

import fusedconv
from fusedconv import _C
from fusedconv.device import KNOWN
from fusedconv.kernels.compiled import group_norm_problem
from fusedconv.problem import act_norm_act
from fusedconv.registry import registry
from fusedconv.selection import choose

HAS_ROWS = "sm90" in fusedconv.build.get("families", ())
pytestmark = pytest.mark.skipif(
    not HAS_ROWS, reason="fusedconv was built without kernels for compute capability 9.0"
)

H200 = KNOWN[90]
QUAD, TILE_QUADS, HEADER = 4, 32, 1024
MOMENTS = 4 * 1024  # bytes of a consumer


def rows() -> list:
    return _C.sm90.runs.rows() if HAS_ROWS else []


def has_own_taps(row) -> bool:
    """Whether its phases have taps of their own."""
    return row.interleaves and row.window != (0, 0)


def row_of(math_name: str, window: tuple[int, int]):
    (row,) = (
        r for r in rows() if (r.math.name, r.window) == (math_name, window) and not r.interleaves
    )
    return row


def element_bytes(row) -> int:
    return 4 if row.math.name.startswith("tf32") else 2


def parts(row) -> int:
    """Terms that an operand is split into."""
    return 2 if row.math.name == "tf32x3" else 1


def config(row, *, channels=64, out=64, output=(1, 258, 258), taps=(1, 3), dilation=(1, 1), **kw):
    """``taps`` and ``dilation`` along depth and height; the row's window is along width. Where
    phases have taps of their own there are two, along width."""
    before, after = row.window
    if has_own_taps(row):
        out *= 2
        width = {1: (2, 3, 1), 2: (2, 4, 1)}[before + after]
        kw["phases"] = ((1, taps[0], 0), (1, taps[1], 0), width)
    taps = (*taps, before + 1 + after)
    dilation = (*dilation, 1)
    lower = (0, 0, before) if "lower" not in kw else (*kw.pop("lower"), before)
    reach = [d * (t - 1) for t, d in zip(taps, dilation, strict=True)]
    # What pads above follows from the sizes; here as much input as the filter reads without.
    upper = (0, 0, after)
    given = [
        n + r - low - high for n, r, low, high in zip(output, reach, lower, upper, strict=True)
    ]
    return _C.sm90.runs.Config(
        row,
        problem=_C.ConvProblem(
            c=channels,
            k=out,
            input=kw.pop("input", given),
            output=output,
            taps=taps,
            lower_padding=lower,
            dilation=dilation,
        ),
        layout=kw.pop("layout", _C.Layout.nchw),
        aligned=kw.pop("aligned", True),
        padded_lines=kw.pop("padded_lines", False),
        device=kw.pop("device", H200).compiled,
        **kw,
    )


def wide_input(row, output, taps, dilation) -> tuple[int, int, int]:
    """An input whose lines are whole 16 bytes, whatever the output's are."""
    unit = 16 // element_bytes(row)
    return (*(n + d * (t - 1) for n, t, d in zip(output, taps, dilation, strict=False)), unit * 64)


def test_rows_are_named_by_math_and_window():
    names = [row.name for row in rows()]
    assert len(set(names)) == len(names) == 30
    for row in rows():
        phases = "interleaved_" if row.interleaves else ""
        window = "{}_{}".format(*row.window)
        assert row.name == f"sm90_runs_{row.math.name}_{phases}{window}"


def test_phases_are_those_of_interleaving_rows():
    for row in rows():
        arguments = dict(
            problem=_C.ConvProblem(
                c=16,
                k=32,
                input=(1, 8, 16),
                output=(1, 8, 16),
                taps=(1, 1, sum(row.window) + 1),
                lower_padding=(0, 0, row.window[0]),
                dilation=(1, 1, 1),
            ),
            layout=_C.Layout.nchw,
            aligned=True,
            device=H200.compiled,
        )
        if row.interleaves:
            made = _C.sm90.runs.Config(row, phases=phases_of(2, row.window), **arguments)
            assert made.support
            with pytest.raises(ValueError, match="phases: got 1x3x3 of 32 output channels"):
                _C.sm90.runs.Config(row, phases=phases_of(3, row.window), **arguments)
        else:
            with pytest.raises(ValueError, match="phases: got 1x2x2, expected 1x1x1"):
                _C.sm90.runs.Config(row, phases=phases_of(2, row.window), **arguments)


def phases_of(stride: int, window: tuple[int, int]) -> tuple[tuple[int, int, int], ...]:
    """Of a filter as large as its stride along height, and of the window along width."""
    kernel, padding = {
        (0, 0): (stride, 0),
        (0, 1): (stride + stride // 2, stride // 2),
        (1, 1): (2 * stride, stride // 2),
    }.get(window, (stride, 0))
    return ((1, 1, 0), (stride, stride, 0), (stride, kernel, padding))


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.name)
def test_tiles_cover_every_output_once(row):
    generator = random.Random(row.name)
    several = last = staggered = 0
    for _ in range(120):
        output = (
            generator.randint(1, 3),
            generator.randint(1, 70),
            generator.randint(1, generator.choice((20, 150))),
        )
        taps = (generator.choice((1, 2)), generator.choice((1, 2, 3, 5)))
        dilation = (1, generator.choice((1, 2)))
        made = config(
            row,
            channels=generator.choice((1, 24, 64)),
            output=output,
            taps=taps,
            dilation=dilation,
            input=wide_input(row, output, taps, dilation),
        )
        assert made.support
        depth, height, width = output
        times = torch.zeros(depth, height, width, dtype=torch.int64)
        lies = row.window == (2, 0) and not row.interleaves and width % QUAD == 2
        assert made.is_staggered == (lies and depth * height * width % QUAD == 0)
        staggered += made.is_staggered
        tiles = 0
        for tiling in made.tilings:
            if tiling.strips == 0:
                continue
            assert 1 <= tiling.tile_quads <= TILE_QUADS
            quads = torch.arange(tiling.tiles * tiling.tile_quads)
            rows = (quads // tiling.quads).view(tiling.tiles, -1).clamp(max=height - 1)
            spanned = int((rows[:, -1] - rows[:, 0]).max()) + 1
            assert tiling.lines >= spanned + dilation[1] * (taps[1] - 1)
            # A stage holds what the positions of the tile read.
            assert tiling.columns >= QUAD * tiling.quads + sum(row.window)
            assert tiling.columns * element_bytes(row) % 16 == 0
            k_block = 32 // element_bytes(row)
            assert tiling.bytes == tiling.lines * tiling.columns * k_block * element_bytes(row)
            inside = quads < height * tiling.quads
            for slice_, strip in itertools.product(range(depth), range(tiling.strips)):
                left = tiling.column0 + strip * QUAD * tiling.quads
                columns = left + QUAD * (quads % tiling.quads)[inside, None] + torch.arange(QUAD)
                lines = slice_ * height + (quads // tiling.quads)[inside, None]
                if made.is_staggered:
                    columns = columns - 2 * (lines % 2)
                    # So that each quad may be stored at once.
                    assert ((lines * width + columns[:, :1]) % QUAD == 0).all()
                pixels = lines * width + columns
                pixels = pixels[(columns >= 0) & (columns < width)]
                times.view(-1).index_add_(0, pixels, torch.ones_like(pixels))
            tiles += tiling.strips * tiling.tiles
        assert (times == 1).all()
        assert made.tiles == output[0] * tiles
        several += made.tilings[0].strips > 1
        last += made.tilings[1].strips > 0
    assert several > 20
    assert last > 20
    assert (staggered > 5) == (row.window == (2, 0) and not row.interleaves)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.name)
def test_shared_memory_holds_filter_and_rings(row):
    generator = random.Random(row.name)
    served = streamed = 0
    for _ in range(200):
        output = (1, generator.randint(1, 300), generator.randint(1, 300))
        taps = (generator.choice((1, 3)), generator.choice((1, 2, 3, 5)))
        channels = generator.choice((1, 8, 40, 64, 128, 512))
        out = generator.choice((1, 64, 65, 200))
        made = config(
            row,
            channels=channels,
            out=out,
            output=output,
            taps=taps,
            input=wide_input(row, output, taps, (1, 1)),
        )
        k_blocks = math.ceil(channels / (32 // element_bytes(row)))
        assert made.support
        served += 1
        assert made.blocks_n == math.ceil(out / (32 if has_own_taps(row) else 64))
        assert made.k_iterations in (taps[0] * k_blocks, taps[0] * k_blocks + 1)
        assert made.k_iterations * taps[1] % 2 == 0
        steps = made.k_iterations * taps[1] * (sum(row.window) + 1)
        tap_bytes = 2048 * parts(row)
        assert made.filter_bytes == made.blocks_n * (steps * tap_bytes + 4)
        # A second set of accumulators takes the registers of a third warpgroup.
        assert made.consumers == (3 if parts(row) == 1 else 2)
        box = max(tiling.bytes for tiling in made.tilings)
        filter_stage = tap_bytes * taps[1] * (sum(row.window) + 1)
        assert made.filter_stage_bytes == filter_stage
        if made.streams_filter:
            streamed += 1
            held = made.stages * (made.consumers * box + filter_stage)
        else:
            held = steps * tap_bytes + made.consumers * made.stages * box
        # Where a filter leaves too little room to stay, tiles would hold few positions.
        if min(output[1:]) >= 32 and made.streams_filter:
            assert output[1] * output[2] > 0.5 * 128 * made.tiles
        moments = made.consumers * MOMENTS
        assert HEADER + held + moments <= made.shared_bytes <= H200.shared_bytes
        # With one filter row a stage, two of a shared ring would wait for each other.
        assert (3 if made.streams_filter and taps[1] == 1 else 2) <= made.stages <= 8
    assert served > 50
    assert streamed > 5


@pytest.mark.parametrize(
    ("math_name", "channels", "streams"),
    [
        ("tf32", 64, False),
        ("tf32", 80, True),
        ("tf32x3", 32, False),
        ("tf32x3", 64, True),
        ("bf16", 128, False),
        ("bf16", 160, True),
    ],
)
def test_a_filter_that_would_crowd_out_the_lines_is_streamed(math_name, channels, streams):
    made = config(
        row_of(math_name, (2, 0)),
        channels=channels,
        output=(1, 256, 256),
        input=(1, 256, 256),
        lower=(0, 2),
    )
    assert made.streams_filter == streams
    assert made.tiles < 1.1 * 256 * 256 / 128


def test_refusals_say_why():
    row = row_of("tf32", (2, 0))
    planes = {"input": (1, 256, 256), "lower": (0, 2)}
    assert config(row, **planes).support
    assert "reads NCHW" in config(row, **planes, layout=_C.Layout.nhwc).support.reason
    assert "16 bytes" in config(row, **planes, aligned=False).support.reason
    assert "16 bytes" in config(row, input=(1, 256, 255), lower=(0, 2)).support.reason
    assert "compute capability 9.0" in config(row, **planes, device=KNOWN[80]).support.reason
    assert "exceed the shared memory" in config(row, **planes, taps=(1, 40)).support.reason
    assert config(row, input=(1, 256, 255), lower=(0, 2), padded_lines=True).support
    half = row_of("tf32", (1, 1))
    with_other_padding = _C.sm90.runs.Config(
        half,
        problem=_C.ConvProblem(
            c=64,
            k=64,
            input=(1, 256, 256),
            output=(1, 258, 258),
            taps=(1, 3, 3),
            lower_padding=(0, 2, 2),
            dilation=(1, 1, 1),
        ),
        layout=_C.Layout.nchw,
        aligned=True,
        device=H200.compiled,
    )
    reason = with_other_padding.support.reason
    assert reason == "reads 1 columns before and 1 after an output's, not 2 and 0"


def system_1(precision: str, **changes):
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    settings = dict(
        dtype=dtype,
        output_dtype=dtype,
        precision=precision,
        batch=128,
        channels=64,
        spatial=(256, 256),
        conv=geometry_of(torch.empty(64, 64, 3, 3)),
        norm=group_norm_stage(8),
    )
    return problem(**{**settings, **changes})


def test_system_1_takes_no_scratch_tensor():
    """What lies in the workspace is the filter and partial moments."""
    kernel = next(k for k in registry().kernels() if k.name == "sm90_runs_tf32_2_0")
    assert kernel.supports(system_1("tf32"), H200)
    plan = kernel.compile(system_1("tf32"), H200)
    assert plan._program.workspace_bytes < 60e6


@pytest.mark.parametrize(
    ("changes", "streams"),
    [
        ({}, True),
        ({"save": True}, True),
        ({"save": True, "batch": 1}, False),  # a launch takes longer than it gains
        ({"spatial": (255, 256)}, False),  # of an odd number of lines no quad is staggered
        ({"spatial": (255, 256), "save": True}, True),
        ({"conv": geometry_of(torch.empty(64, 32, 3, 3))}, True),
        ({"conv": geometry_of(torch.empty(64, 32, 3, 3)), "batch": 1, "spatial": (32, 32)}, False),
        ({"conv": geometry_of(torch.empty(64, 40, 3, 3)), "spatial": (255, 256)}, False),
        ({"save": True, "activation": "identity"}, False),
        ({"save": True, "recompute": True}, True),
    ],
)
def test_what_follows_is_one_pass_where_the_epilogue_would_take_longer(changes, streams):
    """With half of a block's channels empty, where quads are staggered, and where a pass activates
    anyway."""
    kernel = next(k for k in registry().kernels() if k.name == "sm90_runs_tf32_2_0")
    asked = system_1("tf32", **changes)
    assert kernel.streams_norm(asked, H200) is streams
    *_, convolving, last = kernel.compile(asked, H200).steps
    assert ("moments + normalize in one pass" in last) is streams
    assert ("moments" in convolving) is not streams


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_in_16_bits_it_is_one_pass_where_the_output_is_saved(precision):
    name = f"sm90_runs_{precision.replace('fp', 'f')}_2_0"
    kernel = next(k for k in registry().kernels() if k.name == name)
    assert not kernel.streams_norm(system_1(precision), H200)
    assert kernel.streams_norm(system_1(precision, save=True), H200)


@pytest.mark.parametrize(
    ("name", "channels", "kernel_size"),
    [("sm90_runs_tf32_2_0", 64, (3, 3)), ("sm90_runs_tf32_0_0", 288, (1, 1))],
)
def test_one_pass_takes_less_than_the_epilogue_where_it_is_chosen(
    name, channels, kernel_size, monkeypatch
):
    kernel = next(k for k in registry().kernels() if k.name == name)
    conv = geometry_of(torch.empty(channels, 16, *kernel_size))
    asked = system_1("tf32", channels=channels, conv=conv)
    assert kernel.supports(asked, H200)
    one_pass = kernel.cost(asked, H200)
    monkeypatch.setattr(type(kernel), "streams_norm", lambda *_: False)
    assert 0 < one_pass < kernel.cost(asked, H200)


@pytest.mark.parametrize(
    ("batch", "spatial", "merges"),
    [(1, (32, 32), True), (2, (64, 64), True), (128, (32, 32), False), (1, (512, 512), False)],
)
@pytest.mark.parametrize("save", [False, True])
def test_few_partial_moments_are_merged_by_the_pass_that_normalises(batch, spatial, merges, save):
    kernel = next(k for k in registry().kernels() if k.name == "sm90_runs_tf32_2_0")
    asked = replace(system_1("tf32"), batch=batch, spatial=spatial, save=save)
    *_, merging, last = kernel.compile(asked, H200).steps
    assert last.startswith("merge moments + ") is merges
    assert (merging == "merge moments") is not merges


def test_one_pass_merges_and_normalises_channels_first_only():
    kernel = next(k for k in registry().kernels() if k.name == "sm90_runs_tf32_2_0")
    asked = system_1("tf32")
    config = kernel.config(asked, H200)
    absent = dict.fromkeys(
        ("input", "partials", "mean", "rstd", "weight", "bias", "output"), _C.Operand()
    )
    form = act_norm_act(asked.epilogue)
    for layouts in (("nhwc", "nhwc"), ("nhwc", "nchw")):
        norm = group_norm_problem(asked, form, input_layout=layouts[0], output_layout=layouts[1])
        with pytest.raises(ValueError, match="layout: got "):
            _C.sm90.runs.NormalizeMerging(config, problem=norm, **absent)


@pytest.mark.parametrize("precision", ["tf32", "fp32", "bf16", "fp16"])
def test_the_cheapest_row_of_wide_planes_is_one_of_these(precision):
    ((_, candidate),) = choose(system_1(precision), H200).chosen
    assert candidate.kernel.name.startswith("sm90_runs_")


def upsampling(**changes):
    """A layer of U-Nets: its filter is as large as its stride."""
    settings = dict(
        dtype=torch.bfloat16,
        output_dtype=torch.bfloat16,
        precision="bf16",
        batch=8,
        channels=64,
        spatial=(32, 48),
        conv=geometry_of(torch.empty(64, 24, 2, 2), stride=(2, 2)),
        norm=None,
    )
    return problem(**{**settings, **changes})


INTERLEAVED = "sm90_runs_bf16_interleaved_0_0"


def test_a_filter_as_large_as_its_stride_is_a_matrix_product():
    kernel = next(k for k in registry().kernels() if k.name == INTERLEAVED)
    asked = upsampling()
    assert kernel.supports(asked, H200)
    config = kernel.config(asked, H200)
    assert config.blocks_n == math.ceil(24 * 4 / 64)
    assert config.k_iterations == 64 // 16
    pack, convolve = kernel.compile(asked, H200).steps
    assert pack == "pack filter"
    assert convolve.startswith(INTERLEAVED)


@pytest.mark.parametrize("changes", [{"spatial": (32, 45)}, {"aligned": False}], ids=str)
def test_lines_that_tensor_copies_cannot_read_are_padded(changes):
    kernel = next(k for k in registry().kernels() if k.name == INTERLEAVED)
    asked = upsampling(**changes)
    assert kernel.supports(asked, H200)
    assert any("the input" in step for step in kernel.compile(asked, H200).steps)
    assert not any("the input" in step for step in kernel.compile(upsampling(), H200).steps)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"conv": dict(stride=(1, 1))}, "its stride is 1"),
        ({"conv": dict(stride=(2, 2), padding=(1, 1))}, "its output is (62, 94), not (64, 96)"),
        ({"conv": dict(stride=(2, 2), output_padding=(1, 1))}, "its output is (65, 97)"),
        ({"conv": dict(stride=(2, 2), dilation=(2, 2))}, "dilation is (2, 2)"),
        (
            {"conv": dict(stride=(4, 4), output_padding=(2, 2))},
            "the filter is (2, 2), the stride (4, 4): phases do not all have the same taps",
        ),
        ({"layout": "nhwc"}, "reads NCHW"),
    ],
    ids=str,
)
def test_interleaving_rows_refuse_the_rest(changes, reason):
    kernel = next(k for k in registry().kernels() if k.name == INTERLEAVED)
    changes = dict(changes)
    if "conv" in changes:
        changes["conv"] = geometry_of(torch.empty(64, 24, 2, 2), **changes["conv"])
    support = kernel.supports(upsampling(**changes), H200)
    assert not support
    assert reason in support.reason


#: (kernel, stride, padding, output padding) along an axis; strides 1 are of no phases.
AXES = [
    (2, 2, 0, 0), (3, 2, 1, 1), (4, 2, 1, 0), (5, 2, 2, 1), (6, 2, 2, 0), (1, 2, 0, 1),
    (3, 3, 0, 0), (5, 3, 1, 0), (6, 3, 2, 1), (4, 4, 0, 0), (8, 4, 2, 0), (16, 8, 4, 0),
    (1, 1, 0, 0), (3, 1, 1, 0),
]  # fmt: skip
_CONVOLUTIONS = {
    1: torch.nn.functional.conv_transpose1d,
    2: torch.nn.functional.conv_transpose2d,
    3: torch.nn.functional.conv_transpose3d,
}


def computed_by_phases(x, weight, axes, deltas, padding=16):
    """Each output as the sum over ``deltas(phase)``, by axis, of the inputs so far from its
    position times the weight's taps that these are; there may be none."""
    strides, paddings = (tuple(axis[i] for axis in axes) for i in (1, 2))
    spatial = x.shape[2:]
    wide = torch.nn.functional.pad(x, (padding,) * 6)
    result = torch.zeros(
        *(x.shape[0], weight.shape[1]), *(n * s for n, s in zip(spatial, strides, strict=True)),
        dtype=x.dtype,
    )  # fmt: skip
    for phase in itertools.product(*map(range, strides)):
        out = result[(..., *(slice(r, None, s) for r, s in zip(phase, strides, strict=True)))]
        for delta in itertools.product(*deltas(phase)):
            tap = [
                r + p - s * d for r, p, s, d in zip(phase, paddings, strides, delta, strict=True)
            ]
            if all(0 <= k < extent for k, extent in zip(tap, weight.shape[2:], strict=True)):
                read = (
                    slice(padding + d, padding + d + n) for d, n in zip(delta, spatial, strict=True)
                )
                out += torch.einsum("bcdhw,ck->bkdhw", wide[(..., *read)], weight[(..., *tap)])
    return result


@pytest.mark.parametrize("last", [axis for axis in AXES if axis[1] > 1], ids=str)
@pytest.mark.parametrize("number", range(6))
def test_phases_as_channels_are_the_transposed_convolution(last, number):
    """In fp64: what the rows compute, with the taps that they are given."""
    generator = random.Random(f"{last} {number}")
    axes = [generator.choice(AXES) for _ in range(generator.randint(0, 2))] + [last]
    spatial = tuple(generator.randint(1, 6) for _ in axes)
    kernel, stride, padding, output_padding = map(tuple, zip(*axes, strict=True))
    x = torch.randn(2, 3, *spatial, dtype=torch.float64)
    weight = torch.randn(3, 4, *kernel, dtype=torch.float64)
    expected = _CONVOLUTIONS[len(axes)](x, weight, None, stride, padding, output_padding)
    asked = upsampling(
        channels=3,
        batch=2,
        spatial=spatial,
        conv=geometry_of(weight, stride=stride, padding=padding, output_padding=output_padding),
    )
    served = 0
    for row in registry().kernels():
        if not row.name.startswith("sm90_runs_bf16_interleaved") or not row.supports(asked, H200):
            continue
        served += 1
        lowered, made = row.lowered(asked), row.config(asked, H200)
        before, after = row.row.window
        windows = [
            range(-low, taps - low)
            for low, taps in zip(lowered.lower_padding, lowered.taps, strict=True)
        ]

        def deltas(phase, row=row, made=made, windows=windows, before=before, after=after):
            if not row.own_taps:
                return windows
            rows = [made.phase_taps[axis][phase[axis]] for axis in range(2)]
            upper = phase[2] >= stride[-1] // 2
            width = range(after + 1) if upper else range(-before, 1)
            return *(range(low, low + count) for low, count in rows), width

        whole = [(1, 1, 0, 0)] * (3 - len(axes)) + axes
        missing = (1,) * (3 - len(axes))
        computed = computed_by_phases(
            x.reshape(2, 3, *missing, *spatial), weight.reshape(3, 4, *missing, *kernel), whole,
            deltas,
        )  # fmt: skip
        assert torch.allclose(computed.reshape(expected.shape), expected), row.name
    if last in ((3, 2, 1, 1), (4, 2, 1, 0), (8, 4, 2, 0), (16, 8, 4, 0)):
        assert served == ((1, 2, 0, 1) not in axes)  # which has a phase without taps
    elif last[0] == last[1]:
        assert served == all(k == s or s == 1 for k, s, *_ in axes)
    else:
        assert not served


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        ((6, 3, 2, 1), "its stride along width is 3; 2, 4 and 8 have halves of phases"),
        ((5, 2, 2, 1), "phase 0 along width reads inputs from -1 to 1 of a position; from -1 to 0"),
    ],
    ids=str,
)
def test_phases_that_do_not_divide_in_halves_are_refused(last, reason):
    kernel, stride, padding, output_padding = last
    asked = upsampling(
        conv=geometry_of(
            torch.empty(64, 24, 2, kernel),
            stride=(2, stride),
            padding=(0, padding),
            output_padding=(0, output_padding),
        )
    )
    row = next(k for k in registry().kernels() if k.name == "sm90_runs_bf16_interleaved_1_1")
    assert reason in row.supports(asked, H200).reason


@pytest.mark.parametrize("channels", [8, 48, 300])
def test_blocks_of_phases_have_the_steps_of_their_taps(channels):
    weight = torch.empty(64, channels, 3, 3, 3)
    asked = upsampling(
        spatial=(16, 16, 32),
        conv=geometry_of(weight, stride=(2,) * 3, padding=(1,) * 3, output_padding=(1,) * 3),
    )
    row = next(k for k in registry().kernels() if k.name == "sm90_runs_bf16_interleaved_0_1")
    made = row.config(asked, H200)
    assert made.block_steps == [[4, 1], [4, 2], [8, 1], [8, 2]]
    assert made.phase_taps == [[[0, 1], [0, 2]], [[0, 1], [0, 2]]]
    assert made.blocks_n == 4 * math.ceil(channels / 32)
