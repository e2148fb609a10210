"""The Hopper convolutions that go down strips against fp64, relative to eager's error."""

from __future__ import annotations

import math
import random

import pytest
import torch
from conv_gradients import eager, gradients, operands, output_gradient
from gpu_checks import bound, fused_against_fp64, poison, same_bits_beside_products
from reference import ACTIVATIONS, ORDERS, relative_error

from fusedconv.benchmark import DTYPES
from fusedconv.functional import conv_transpose_act_norm
from fusedconv.kernels.cuda.sm90_gradients import GradientsSm90
from fusedconv.kernels.cuda.strips_sm90 import StripsSm90
from fusedconv.registry import registry

pytestmark = pytest.mark.gpu

FORWARD = [k for k in registry().kernels() if isinstance(k, StripsSm90)]
#: With those that convolve output gradients alone.
FAMILIES = [k for k in registry().kernels() if isinstance(k, GradientsSm90)]
ROWS = [(k, row) for k in FAMILIES for row in k._input_rows if isinstance(row, StripsSm90)]
names = {"ids": lambda kernel: kernel.name}
#: Of each row; together more than 2**8.
RANDOM_PROBLEMS = 25


@pytest.fixture(autouse=True)
def on_hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the rows run on compute capability 9.0")


def random_sizes(padding: int, generator: random.Random) -> dict:
    """Inputs with lines of whole 16 bytes, a strip's width and a few more among them; ``padding``
    along width."""
    return {
        "batch": generator.randint(1, 4),
        "channels": generator.choice((1, 5, 16, 33, 63, 64)),
        "out": generator.choice((1, 5, 24, 64, 65, 130)),
        "spatial": [
            generator.randint(6, generator.choice((8, 40, 150))),
            8 * generator.choice((2, 3, 7, 8, 9, 15, 16, 17, 32, 33)),
        ],
        "kernel": [3, 3],
        "padding": [generator.randint(0, 2), padding],
        "dilation": [1, 1],
        "draw": generator.choice((torch.randn, torch.rand)),
    }


def random_problem(kernel, generator: random.Random) -> dict:
    case = random_sizes(1, generator)
    saves = generator.random() < 0.5
    groups = generator.choice((None, 1, case["out"]))
    return case | {
        "groups": groups,
        "bias": generator.random() < 0.7,
        # Where nothing is behind, what is activated is not theirs.
        "activation": generator.choice(list(ACTIVATIONS)) if saves or groups else None,
        "order": generator.choice(ORDERS),
        "saves": saves,
    }


@pytest.mark.parametrize("kernel", FORWARD, **names)
def test_random_problems(kernel, force):
    force(kernel.name)
    generator = random.Random(kernel.name)
    served = 0
    while served < RANDOM_PROBLEMS:
        case = random_problem(kernel, generator)
        served += fused_against_fp64(case, DTYPES[kernel.precision], kernel.precision)


@pytest.mark.parametrize("kernel", FORWARD, **names)
def test_norms_by_passes_behind(kernel, force, monkeypatch):
    """One takes the moments, one normalises what is saved; an activation in front is theirs."""
    force(kernel.name)
    monkeypatch.setattr(StripsSm90, "can_stream_norm", lambda *_: False)
    generator = random.Random(f"{kernel.name} behind")
    served = 0
    while served < RANDOM_PROBLEMS:
        case = random_problem(kernel, generator) | {"saves": True}
        # An activation alone, of which the result is saved, is not theirs.
        served += fused_against_fp64(case, DTYPES[kernel.precision], kernel.precision)


@pytest.mark.parametrize(("family", "kernel"), ROWS, ids=[row.name for _, row in ROWS])
def test_random_input_gradients(family, kernel, force, monkeypatch):
    """Of output gradients whose lines are padded."""
    monkeypatch.setattr(family, "_input_rows", [kernel])
    force(family.name)
    generator = random.Random(f"{kernel.name} gradients")
    dtype = DTYPES[kernel.precision]
    for _ in range(RANDOM_PROBLEMS):
        case = random_sizes(kernel.row.before, generator)
        case["channels"], case["out"] = case["out"], case["channels"]
        geometry = {name: case[name] for name in ("padding", "dilation")}
        tensors = operands(case, dtype)
        output = eager(*tensors, **geometry)
        grad = output_gradient(generator.choice(("dense", "sliced", "expanded")), output)
        poison()
        keywords = {"wanted": ("input",), **geometry}
        (actual,) = gradients(conv_transpose_act_norm, tensors, grad, **keywords)
        poison(32 << 20)
        (again,) = gradients(conv_transpose_act_norm, tensors, grad, **keywords)
        (torchs,) = gradients(eager, tensors, grad, **keywords)
        wide = [tensor.double() for tensor in tensors]
        (exact,) = gradients(eager, wide, grad.double(), **keywords)
        limit = bound(relative_error(torchs, exact), kernel.precision)
        assert relative_error(actual, exact) <= limit, case
        assert torch.equal(actual, again), case


@pytest.mark.parametrize("kernel", FORWARD, **names)
def test_same_bits_while_other_streams_hold_part_of_the_gpu(kernel, force):
    force(kernel.name)
    dtype = DTYPES[kernel.precision]
    x = torch.rand(5, 64, 61, 256, device="cuda").to(dtype)
    weight = (torch.randn(64, 72, 3, 3, device="cuda") * 0.05).to(dtype)

    def run():
        return conv_transpose_act_norm(x, weight, None, padding=(0, 1))

    same_bits_beside_products(run)


@pytest.mark.parametrize("kernel", FORWARD, **names)
def test_infinity_reaches_what_reads_it_alone(kernel, force):
    """And NaN: of the positions, channels and lines beside a block's, nothing is multiplied."""
    force(kernel.name)
    dtype = DTYPES[kernel.precision]
    x = torch.rand(3, 24, 40, 264, device="cuda").to(dtype)
    for place, value in (
        ((0, 3, 0, 0), math.inf),
        ((0, 23, 39, 263), math.nan),
        ((1, 0, 17, 87), math.inf),
        ((1, 5, 20, 128), math.nan),
        ((2, 11, 39, 90), math.inf),
    ):
        x[place] = value
    weight = (torch.rand(24, 40, 3, 3, device="cuda") + 0.5).to(dtype)
    padding = (0, 1)
    result = conv_transpose_act_norm(x, weight, None, padding=padding)
    expected = torch.nn.functional.conv_transpose2d(x.double(), weight.double(), padding=padding)
    assert torch.equal(result.isfinite(), expected.isfinite())
    assert torch.equal(result.isnan(), expected.isnan())


@pytest.mark.parametrize("kernel", FORWARD, **names)
def test_few_lines_of_many_samples(kernel, force):
    """Blocks go from a sample to the next after every line."""
    force(kernel.name)
    case = {
        "batch": 700,
        "channels": 64,
        "out": 8,
        "groups": None,
        "spatial": [1, 64],
        "kernel": [3, 3],
        "padding": [1, 1],
        "dilation": [1, 1],
        "bias": True,
        "activation": None,
        "saves": False,
    }
    assert fused_against_fp64(case, DTYPES[kernel.precision], kernel.precision)
