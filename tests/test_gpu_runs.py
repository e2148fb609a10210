"""The Hopper convolutions whose positions come from registers, against fp64, relative to eager's
error."""

from __future__ import annotations

import math
import random

import pytest
import torch
from gpu_checks import (
    FEWEST_NORMALISED_VALUES,
    fused_against_fp64,
    same_bits_beside_products,
)
from reference import ACTIVATIONS, ORDERS

from fusedconv.benchmark import DTYPES
from fusedconv.functional import conv_transpose_act_norm
from fusedconv.kernels.cuda import convolution
from fusedconv.kernels.cuda.sm90_runs import InterleavingRunsSm90
from fusedconv.registry import registry

pytestmark = pytest.mark.gpu

ALL_ROWS = [k for k in registry().kernels() if k.name.startswith("sm90_runs_")]
INTERLEAVING = [k for k in ALL_ROWS if isinstance(k, InterleavingRunsSm90)]
ROWS = [k for k in ALL_ROWS if k not in INTERLEAVING]
#: Of each row; together more than 2**8.
RANDOM_PROBLEMS = 29
#: Of an output in strict fp32, or by phases with taps of their own, whose error eager's is held
#: against: over fewer chance may part them.
FEWEST_VALUES = 1000


@pytest.fixture(autouse=True)
def on_hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the rows run on compute capability 9.0")


def random_problem(kernel, generator: random.Random) -> dict:
    """A problem that the row serves, but for shared memory: the window fixes kernel and padding
    along width, lines are whole 16 bytes."""
    before, after = kernel.row.window
    axes = generator.choice((1, 2, 2, 3))
    unit = 16 // DTYPES[kernel.precision].itemsize
    kernel_size, padding, dilation, spatial = [], [], [], []
    for _ in range(axes - 1):
        kernel_size.append(generator.choice((1, 2, 3, 3, 5)))
        dilation.append(generator.choice((1, 1, 2)))
        reach = dilation[-1] * (kernel_size[-1] - 1)
        padding.append(generator.randint(0, reach))
        least = max(1, 2 * padding[-1] - reach + 1)
        spatial.append(max(least, generator.randint(1, 40 if axes == 2 else 9)))
    kernel_size.append(before + 1 + after)
    dilation.append(1)
    padding.append(after)  # lower padding is reach - padding
    spatial.append(unit * generator.randint(1, generator.choice((4, 40))))
    groups = generator.choice((1, 2, 4))
    return {
        "batch": generator.randint(1, 3),
        "channels": generator.choice((1, 3, 8, 20, 64, 100)),
        "out": groups * generator.choice((1, 5, 8, 16, 33)),
        "groups": generator.choice((None, groups, groups)),
        "spatial": spatial,
        "kernel": kernel_size,
        "padding": padding,
        "dilation": dilation,
        "bias": generator.random() < 0.7,
        "activation": generator.choice(list(ACTIVATIONS)),
        "draw": generator.choice((torch.randn, torch.rand)),
        # With 16 bits a bias far beyond the products leaves nothing of them.
        "offset": generator.choice((0.0, 0.0, 300.0)) if unit == 4 else 0.0,
        "saves": generator.random() < 0.3,
    }


@pytest.mark.parametrize("kernel", ROWS, ids=lambda kernel: kernel.name)
def test_random_problems(kernel, force, monkeypatch):
    precision = kernel.precision
    force(kernel.name)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", precision == "tf32")
    dtype = DTYPES[precision]
    generator = random.Random(kernel.name)
    served = 0
    while served < RANDOM_PROBLEMS:
        case = random_problem(kernel, generator)
        # Eager's error and that of 3xTF32 are alike, but over a few values chance may part them.
        values = case["batch"] * case["out"] * math.prod(case["spatial"])
        if precision == "fp32" and values < FEWEST_VALUES:
            continue
        # Where it does not serve one, the filter or a stage does not fit; other problems follow.
        served += fused_against_fp64(case, dtype, precision)


@pytest.mark.parametrize("kernel", ROWS, ids=lambda kernel: kernel.name)
def test_norms_in_a_pass_behind(kernel, force, monkeypatch):
    """The convolution stores what it is before the activation; one pass does the rest, wherever it
    can, also where it would not be chosen."""
    streamed = []

    def streams_norm(row, problem, device):
        streamed.append(row.can_stream_norm(problem, device))
        return streamed[-1]

    precision = kernel.precision
    force(kernel.name)
    monkeypatch.setattr(type(kernel), "streams_norm", streams_norm)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", precision == "tf32")
    generator = random.Random(f"{kernel.name} behind")
    served = 0
    while served < RANDOM_PROBLEMS:
        case = random_problem(kernel, generator)
        values = case["batch"] * case["out"] * math.prod(case["spatial"])
        # A ReLU may leave a small part of them.
        if not case["groups"] or values < 8 * FEWEST_VALUES:
            continue
        streamed.clear()
        case["order"] = generator.choice(list(ORDERS))
        fused_against_fp64(case, DTYPES[precision], precision)
        served += any(streamed)


def what_follows(kernel, **arguments) -> dict:
    """Arguments of a call with 72 output channels, a random affine map of them among them."""
    dtype = DTYPES[kernel.precision]
    for name in ("norm_weight", "norm_bias"):
        arguments[name] = torch.randn(72, device="cuda").to(dtype)
    if dtype is torch.float32:
        arguments["precision"] = kernel.precision
    return arguments


@pytest.mark.parametrize("kernel", ROWS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize(("height", "width"), [(30, 32), (64, 64)])
def test_samples_have_the_same_bits_alone_and_in_a_batch(kernel, force, saves, height, width):
    """Alone, the pass that normalises merges the partial moments; in the batch a kernel does. Of
    the larger plane each of its threads has several."""
    force(kernel.name)
    dtype = DTYPES[kernel.precision]
    before, after = kernel.row.window
    x = torch.rand(64, 20, height, width, device="cuda").to(dtype)
    weight = (torch.randn(20, 72, 3, before + 1 + after, device="cuda") * 0.05).to(dtype)
    weight.requires_grad_(saves)
    arguments = what_follows(kernel, padding=(1, after), activation="silu", num_groups=6)
    together = conv_transpose_act_norm(x, weight, None, **arguments)
    alone = [conv_transpose_act_norm(x[i : i + 1], weight, None, **arguments) for i in (0, 63)]
    assert torch.equal(torch.cat(alone), together[[0, 63]])
    if saves:  # the statistics, which the gradients come from
        first, second = (
            torch.autograd.grad(1e3 * y.float().pow(3).mean(), weight)[0].double()
            for y in (torch.cat(alone), together[[0, 63]])
        )
        assert (first - second).norm() < 0.01 * second.norm()


@pytest.mark.parametrize("kernel", ROWS, ids=lambda kernel: kernel.name)
def test_same_bits_while_other_streams_hold_part_of_the_gpu(kernel, force):
    force(kernel.name)
    dtype = DTYPES[kernel.precision]
    before, after = kernel.row.window
    x = torch.rand(5, 64, 37, 96, device="cuda").to(dtype)
    weight = (torch.randn(64, 72, 3, before + 1 + after, device="cuda") * 0.05).to(dtype)
    arguments = what_follows(kernel, padding=(0, after), activation="gelu", num_groups=8)

    def run():
        return conv_transpose_act_norm(x, weight, None, **arguments)

    same_bits_beside_products(run)


@pytest.mark.parametrize("kernel", ROWS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("extreme", [float("inf"), float("nan"), 1e30, 0.5])
def test_extreme_values_stay_in_their_group(kernel, force, extreme):
    """A lane sums up two channels of every eight; groups have nine."""
    dtype = DTYPES[kernel.precision]
    if dtype is torch.float16 and extreme == 1e30:
        pytest.skip("fp16 has no such number")
    force(kernel.name)
    before, after = kernel.row.window
    x = torch.rand(2, 20, 30, 32, device="cuda").to(dtype)
    weight = torch.randn(20, 72, 3, before + 1 + after, device="cuda") * 0.05
    bias = torch.randn(72, device="cuda")
    # Of each extreme group one channel is it, and of one all are the same number.
    bias[3] = bias[40] = extreme
    weight[:, 45:54] = 0.0
    bias[45:54] = 2.25
    weight, bias = weight.to(dtype), bias.to(dtype)
    arguments = what_follows(kernel, padding=(1, after), activation="gelu", num_groups=8)
    result = conv_transpose_act_norm(x, weight, bias, **arguments)
    groups = result.double().unflatten(1, (8, 9))
    expected = torch.nn.functional.gelu(
        torch.nn.functional.conv_transpose2d(
            x.double(), weight.double(), bias.double(), padding=(1, after)
        )
    )
    scale, shift = (arguments[name].double() for name in ("norm_weight", "norm_bias"))
    expected = torch.nn.functional.group_norm(expected, 8, scale, shift)
    expected = expected.unflatten(1, (8, 9))
    plain = [1, 2, 3, 6, 7]
    tolerance = 0.02 if dtype.itemsize == 2 else 2e-3
    error = (groups[:, plain] - expected[:, plain]).norm() / expected[:, plain].norm()
    assert error < tolerance
    equal = shift[45:54].reshape(9, 1, 1).expand_as(groups[:, 5])
    torch.testing.assert_close(groups[:, 5], equal, atol=tolerance, rtol=tolerance)
    if not math.isfinite(extreme):
        assert groups[:, [0, 4]].isnan().all()


#: (kernel, stride, padding, output padding) of axes whose output is the stride times the input: of
#: depth and height, and of width by the columns that a row reads before and after an output's.
OTHER_AXES = [
    (1, 1, 0, 0),
    (2, 2, 0, 0),
    (2, 2, 0, 0),
    (3, 1, 1, 0),
    (3, 2, 1, 1),
    (3, 3, 0, 0),
    (4, 2, 1, 0),
    (5, 2, 2, 1),
    (6, 3, 2, 1),
    (1, 2, 0, 1),
]
LAST_AXES = {
    (0, 0): [(2, 2, 0, 0), (2, 2, 0, 0), (3, 3, 0, 0), (4, 4, 0, 0), (6, 6, 0, 0), (1, 2, 0, 1)],
    (0, 1): [(3, 2, 1, 1), (3, 2, 1, 1), (6, 4, 2, 2)],
    (1, 1): [(4, 2, 1, 0), (4, 2, 1, 0), (8, 4, 2, 0), (16, 8, 4, 0)],
}


def random_interleaving_problem(kernel, generator: random.Random) -> dict:
    """A strided problem of the row's window, over lines of whole 16 bytes or of any. Along other
    axes than width a stride may be 1."""
    axes = generator.choice((1, 2, 2, 3))
    unit = 16 // DTYPES[kernel.precision].itemsize
    among = [generator.choice(OTHER_AXES) for _ in range(axes - 1)]
    among.append(generator.choice(LAST_AXES[kernel.row.window]))
    taps, stride, padding, extra = map(list, zip(*among, strict=True))
    spatial = [generator.randint(1, {2: 30, 3: 7}[axes]) for _ in range(axes - 1)]
    whole = unit * generator.randint(1, generator.choice((3, 12)))
    spatial.append(generator.choice((whole, generator.randint(1, 45))))
    out = generator.choice((1, 3, 8, 20, 33, 64))
    pixels = math.prod(spatial) * math.prod(stride)
    norms = (None, None, 1, out) if pixels >= FEWEST_NORMALISED_VALUES else (None,)
    return {
        "batch": generator.randint(1, 3),
        "channels": generator.choice((1, 3, 8, 20, 64, 100)),
        "out": out,
        "groups": generator.choice(norms),
        "order": generator.choice(ORDERS),
        "spatial": spatial,
        "kernel": taps,
        "stride": stride,
        "padding": padding,
        "output_padding": extra,
        "dilation": [1] * axes,
        "bias": generator.random() < 0.7,
        "activation": generator.choice(list(ACTIVATIONS)),
        "draw": generator.choice((torch.randn, torch.rand)),
        "saves": generator.random() < 0.3,
    }


@pytest.mark.parametrize("kernel", INTERLEAVING, ids=lambda kernel: kernel.name)
def test_random_problems_of_interleaving_rows(kernel, force, monkeypatch):
    precision = kernel.precision
    force(kernel.name)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", precision == "tf32")
    generator = random.Random(kernel.name)
    served = 0
    while served < 2 * RANDOM_PROBLEMS:
        case = random_interleaving_problem(kernel, generator)
        values = case["batch"] * case["out"] * math.prod(case["spatial"])
        if (precision == "fp32" or kernel.own_taps) and values < FEWEST_VALUES:
            continue
        # Sums of few products in strict fp32 are refused; other problems follow.
        served += fused_against_fp64(case, DTYPES[precision], precision)


@pytest.mark.parametrize("kernel", INTERLEAVING, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("axes", [2, 3])
def test_infinity_reaches_what_reads_it_alone(kernel, axes, force):
    """And NaN: nothing is multiplied by a tap that a phase lacks."""
    force(kernel.name)
    dtype = DTYPES[kernel.precision]
    size = {(0, 0): 2, (0, 1): 3, (1, 1): 4}[kernel.row.window]
    x = torch.rand(2, 24, *(6, 10, 16)[-axes:], device="cuda").to(dtype)
    x[0, 3][(2,) * axes] = torch.inf
    x[1, 20][(0,) * (axes - 1) + (15,)] = torch.nan
    weight = (torch.rand(24, 40, *[size] * axes, device="cuda") + 0.5).to(dtype)
    arguments = dict(stride=2, padding=(size - 1) // 2, output_padding=size % 2)
    result = conv_transpose_act_norm(x, weight, None, **arguments)
    functions = {2: torch.nn.functional.conv_transpose2d, 3: torch.nn.functional.conv_transpose3d}
    expected = functions[axes](x.double(), weight.double(), None, **arguments)
    assert torch.equal(result.isfinite(), expected.isfinite())
    # Infinity less its big part, in strict fp32.
    assert kernel.precision == "fp32" or torch.equal(result.isnan(), expected.isnan())


@pytest.mark.parametrize("kernel", INTERLEAVING, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("save", [False, True])
def test_interleaving_rows_in_chunks_of_samples(kernel, save, force, monkeypatch):
    """With groups of some channels, in which phases along depth and height are part of a group."""
    monkeypatch.setattr(convolution, "CHUNK_BYTES", 1)
    force(kernel.name)
    size = {(0, 0): 2, (0, 1): 3, (1, 1): 4}[kernel.row.window]
    case = dict(
        batch=3,
        channels=20,
        out=72,
        groups=8,
        spatial=(9, 21),
        kernel=(size, size),
        stride=(2, 2),
        padding=((size - 1) // 2,) * 2,
        output_padding=(size % 2,) * 2,
        dilation=(1, 1),
        bias=True,
        activation="gelu",
        draw=torch.rand,
        saves=save,
    )
    precision = kernel.precision
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", precision == "tf32")
    assert fused_against_fp64(case, DTYPES[precision], precision)


@pytest.mark.parametrize("kernel", INTERLEAVING, ids=lambda kernel: kernel.name)
def test_interleaving_rows_have_the_same_bits_alone_and_each_time(kernel, force):
    force(kernel.name)
    dtype = DTYPES[kernel.precision]
    x = torch.rand(9, 40, 30, 32, device="cuda").to(dtype)
    size = {(0, 0): 2, (0, 1): 3, (1, 1): 4}[kernel.row.window]
    weight = (torch.randn(40, 36, size, size, device="cuda") * 0.1).to(dtype)
    arguments = dict(stride=2, padding=(size - 1) // 2, output_padding=size % 2, activation="gelu")
    if dtype is torch.float32:
        arguments["precision"] = kernel.precision
    first = conv_transpose_act_norm(x, weight, None, **arguments)
    for _ in range(100):
        assert torch.equal(conv_transpose_act_norm(x, weight, None, **arguments), first)
    alone = conv_transpose_act_norm(x[4:5], weight, None, **arguments)
    assert torch.equal(alone, first[4:5])
