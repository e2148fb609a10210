"""Schedules of the Hopper convolutions that go down strips: what their blocks cover and hold, what
they refuse, and which problems choose them. No GPU."""

from __future__ import annotations

import math

import pytest
import torch
from problems import geometry_of, group_norm_stage, problem, system_1

import fusedconv
from fusedconv import BackwardProblem
from fusedconv.benchmark import DTYPES
from fusedconv.device import KNOWN
from fusedconv.kernels.cuda.sm90_gradients import GradientsSm90
from fusedconv.kernels.cuda.strips_sm90 import StripsSm90
from fusedconv.registry import registry
from fusedconv.selection import choose

KERNELS = [kernel for kernel in registry().kernels() if isinstance(kernel, StripsSm90)]
pytestmark = pytest.mark.skipif(not KERNELS, reason="fusedconv was built without these kernels")
names = {"ids": lambda kernel: kernel.name}
H200 = KNOWN[90]
#: Of a precision, as rows name it.
MATHS = {"fp16": "f16", "bf16": "bf16"}


def plain(precision: str, *, before: int = 2, out: int = 64, taps: int = 3, **changes):
    """System 1's convolution and its bias, changed."""
    padding = taps - 1 - before
    channels = changes.get("channels", 64)
    conv = geometry_of(
        torch.empty(channels, out, taps, taps, device="meta"), padding=(0, padding)
    )
    fields = {"conv": conv, "norm": None, "epilogue": (fusedconv.Bias(),), **changes}
    return system_1(precision, **fields)


@pytest.mark.parametrize("kernel", KERNELS, **names)
@pytest.mark.parametrize("width", [8, 88, 96, 128, 256, 264, 1024])
@pytest.mark.parametrize("out", [1, 64, 65, 300])
def test_blocks_cover_the_output(kernel, width, out):
    made = plain(kernel.precision, before=kernel.row.before, out=out, spatial=(40, width))
    assert kernel.supports(made, H200)
    config = kernel.config(made, H200)
    columns = made.output_spatial[1]
    assert (config.strips - 1) * kernel.row.positions < columns
    assert columns <= config.strips * kernel.row.positions
    assert config.blocks_n == math.ceil(out / 64)
    blocks = config.sets * config.strips * config.blocks_n
    assert config.sets == 1 or blocks <= H200.multiprocessors
    assert config.filter_bytes == config.blocks_n * 64 * 64 * 9 * 2


@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_what_a_block_holds(kernel):
    """Three copies of each line, what they are made of behind it, and what is stored."""
    config = kernel.config(plain(kernel.precision, before=kernel.row.before), H200)
    width = {88: 96, 128: 128}[kernel.row.positions]
    ring = kernel.row.stages * 3 * 64 * width * 2
    assert ring < config.shared_bytes <= H200.shared_bytes


@pytest.mark.parametrize("precision", list(MATHS))
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(layout="nhwc"), "channels last"),
        (dict(channels=65), "has 65 input channels, up to 64 are served"),
        (dict(taps=2, before=1), "its filter is 3 x 3 neighbours, not 2 x 2"),
        (dict(spatial=(256, 255)), "lines are no multiples of 16 bytes: 255 times 2"),
        (dict(aligned=False), "or its address is none"),
        (
            dict(epilogue=(fusedconv.Bias(), fusedconv.Activation("gelu"))),
            "stores the convolution with its bias alone",
        ),
    ],
)
def test_what_is_refused(changes, reason, precision):
    for kernel in KERNELS:
        if kernel.precision == precision and kernel.row.before == changes.get("before", 2):
            support = kernel.supports(plain(precision, **changes), H200)
            assert not support and reason in support.reason


@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_columns_before_an_output(kernel):
    for before in range(3):
        support = kernel.supports(plain(kernel.precision, before=before), H200)
        assert bool(support) == (before == kernel.row.before)


def input_row(forward):
    """What convolves the output's gradient to the input's."""
    (family,) = (
        k
        for k in registry().kernels()
        if isinstance(k, GradientsSm90) and k.precision == forward.precision
    )
    backward = BackwardProblem(forward, forward.dtype, "nchw", True, frozenset({"input"}))
    return family.input_row(backward, H200)


def chosen(made) -> str:
    ((_, candidate),) = choose(made, H200).chosen
    name: str = candidate.kernel.name
    return name


@pytest.mark.parametrize("precision", list(MATHS))
def test_system_1_takes_them(precision):
    training = system_1(precision, save=True)
    assert chosen(training) == f"sm90_strips_{MATHS[precision]}_88_2"
    assert input_row(training).name == f"sm90_strips_{MATHS[precision]}_128_0"


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
