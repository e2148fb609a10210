"""Schedules of the Hopper convolutions that go down strips: what their blocks cover and hold, what
they refuse, and which problems choose them. No GPU."""

from __future__ import annotations

import math

import pytest
import torch
from problems import geometry_of, group_norm_stage, problem, system_1

import fusedconv
from fusedconv import _C, BackwardProblem
from fusedconv.benchmark import DTYPES
from fusedconv.device import KNOWN
from fusedconv.kernels.cuda.sm90_gradients import GradientsSm90
from fusedconv.kernels.cuda.strips_sm90 import StripsSm90
from fusedconv.registry import registry
from fusedconv.selection import choose

FAMILIES = [kernel for kernel in registry().kernels() if isinstance(kernel, GradientsSm90)]
KERNELS = [kernel for kernel in registry().kernels() if isinstance(kernel, StripsSm90)]
#: Those that convolve output gradients, whose lines are padded: of any width.
ROWS = [row for family in FAMILIES for row in family._input_rows if isinstance(row, StripsSm90)]
pytestmark = pytest.mark.skipif(not KERNELS, reason="fusedconv was built without these kernels")
names = {"ids": lambda kernel: kernel.name}
H200 = KNOWN[90]
POSITIONS = 64  # of a strip's line
#: Of a precision, as rows name it.
MATHS = {"fp16": "f16", "bf16": "bf16"}


def plain(precision: str, *, before: int = 1, out: int = 64, taps: int = 3, **changes):
    """A convolution of system 1's size, of outputs of 256 x 256, and its bias, changed."""
    padding = taps - 1 - before
    channels, width = changes.get("channels", 64), changes.pop("width", 256)
    weight = torch.empty(channels, out, taps, taps, device="meta")
    fields = {
        "conv": geometry_of(weight, padding=(1, padding)),
        "spatial": (256, width + 2 * padding - taps + 1),
        "norm": None,
        "epilogue": (fusedconv.Bias(),),
    }
    return system_1(precision, **{**fields, **changes})


@pytest.mark.parametrize("row", ROWS, **names)
@pytest.mark.parametrize("width", [8, 64, 72, 128, 256, 264, 1024])
@pytest.mark.parametrize("out", [1, 64, 65, 300])
def test_blocks_cover_the_output(row, width, out):
    made = plain(row.precision, before=row.row.before, out=out, width=width)
    assert row.supports(made, H200)
    config = row.config(made, H200)
    assert made.output_spatial == (256, width)
    assert (config.strips - 1) * POSITIONS < width <= config.strips * POSITIONS
    assert config.blocks_n == math.ceil(out / 64)
    blocks = config.sets * config.strips * config.blocks_n
    assert config.sets == 1 or blocks <= H200.multiprocessors
    assert config.filter_bytes == config.blocks_n * 64 * 64 * 9 * 2


@pytest.mark.parametrize("row", ROWS, **names)
def test_what_a_block_holds(row):
    """Three copies of each line, what they are made of behind it, and what is stored."""
    config = row.config(plain(row.precision, before=row.row.before), H200)
    room = _C.sm90.strips
    assert room.positions == POSITIONS
    ring = room.stages * 3 * 64 * POSITIONS * 2
    tails = room.stages * 64 * 16 * (2 if row.row.before == 1 else 1)
    stored = 2 * 64 * POSITIONS * 2
    assert ring + tails + stored < config.shared_bytes <= H200.shared_bytes


@pytest.mark.parametrize("precision", list(MATHS))
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(layout="nhwc"), "channels last"),
        (dict(channels=65), "has 65 input channels, up to 64 are served"),
        (dict(taps=2), "its filter is 3 x 3 neighbours, not 2 x 2"),
        (dict(width=255), "the input's lines are no multiples of 16 bytes: 255 times 2"),
        (dict(aligned=False), "the input's address is no multiple of 16 bytes"),
        (dict(epilogue=(fusedconv.Bias(), fusedconv.Activation("gelu"))), "with its bias alone"),
    ],
)
def test_what_is_refused(changes, reason, precision):
    for kernel in KERNELS:
        if kernel.precision == precision:
            support = kernel.supports(plain(precision, **changes), H200)
            assert not support and reason in support.reason


@pytest.mark.parametrize("row", ROWS, **names)
def test_columns_before_an_output(row):
    for before in range(3):
        support = row.supports(plain(row.precision, before=before), H200)
        assert bool(support) == (before == row.row.before)


@pytest.mark.parametrize("row", ROWS, **names)
def test_lines_of_the_output_are_whole(row):
    support = row.supports(plain(row.precision, before=row.row.before, width=258), H200)
    assert not support and "258 times 2" in support.reason


def input_row(forward):
    """What convolves the output's gradient to the input's."""
    (family,) = (family for family in FAMILIES if family.precision == forward.precision)
    backward = BackwardProblem(forward, forward.dtype, "nchw", True, frozenset({"input"}))
    return family.input_row(backward, H200)


def chosen(made) -> str:
    ((_, candidate),) = choose(made, H200).chosen
    name: str = candidate.kernel.name
    return name


@pytest.mark.parametrize("precision", list(MATHS))
def test_system_1s_gradient_takes_them(precision):
    """Its output's lines are of 258 elements: the forward pass is not theirs."""
    training = system_1(precision, save=True)
    assert chosen(training) == f"sm90_runs_{MATHS[precision]}_2_0"
    assert input_row(training).name == f"sm90_strips_{MATHS[precision]}_0"


@pytest.mark.parametrize("precision", list(MATHS))
def test_what_else_normalises_has_a_pass_for_the_moments(precision, monkeypatch):
    """Where one pass cannot do all of it, the estimate has one more, and less is chosen."""
    (kernel,) = (kernel for kernel in KERNELS if kernel.precision == precision)
    weight = torch.empty(64, 64, 3, 3, device="meta")
    made = system_1(precision, save=True, conv=geometry_of(weight, padding=(1, 1)))
    streamed = kernel.cost(made, H200)
    monkeypatch.setattr(StripsSm90, "can_stream_norm", lambda *_: False)
    assert kernel.cost(made, H200) > streamed
    assert kernel.supports(made, H200)
    assert not kernel.supports(system_1(precision, conv=made.conv), H200)


@pytest.mark.parametrize("precision", list(MATHS))
def test_outputs_as_wide_as_the_input_take_them(precision):
    assert chosen(plain(precision)) == f"sm90_strips_{MATHS[precision]}_1"


def test_strided_gradients_are_not_theirs():
    """They do not pack a weight by phases."""
    weight = torch.empty(64, 16, 6, 6, device="meta")
    conv = geometry_of(weight, stride=(2, 2), padding=(2, 2))
    made = problem(
        dtype=DTYPES["bf16"],
        output_dtype=DTYPES["bf16"],
        precision="bf16",
        batch=64,
        channels=64,
        spatial=(64, 64),
        conv=conv,
        norm=group_norm_stage(8),
        save=True,
    )
    row = input_row(made)
    assert row and row.packs_phases
