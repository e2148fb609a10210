"""The convolution's gradients by tensor copies against fp64, relative to eager's error."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from conv_gradients import (
    GEOMETRY,
    NAMES,
    TF32_ERROR,
    eager,
    gradients,
    in_layout,
    operands,
    output_gradient,
)
from gpu_checks import bound, poison, round_to_tf32
from problems import explained
from reference import relative_error

from fusedconv import _C
from fusedconv.benchmark import DTYPES
from fusedconv.functional import conv_transpose_act_norm
from fusedconv.layout import layout_of
from fusedconv.registry import registry
from fusedconv.selection import clear_cache

pytestmark = pytest.mark.gpu

KERNELS = [k for k in registry().kernels() if k.name.startswith("sm90_boxes_gradients_")]
#: Each with the rows of the weight's gradient, by their numbers.
WEIGHT_ROWS = [(kernel, row) for kernel in KERNELS for row in getattr(kernel, "weight_rows", ())]
#: Each with those of its rows of the input's gradient whose filter is the first operand.
FILTER_FIRST_ROWS = [
    (kernel, row)
    for kernel in KERNELS
    for row in getattr(kernel, "input_rows", ())
    if _C.sm90.boxes.rows()[row].filter_first
]
#: Of each kernel and layout.
RANDOM_PROBLEMS = 80
ODD_RANDOM_PROBLEMS = 40
#: Of each row of the weight's gradient.
ROW_PROBLEMS = 32
#: In terms of as many channels as are 16 bytes.
WHOLE_CHANNELS = (1, 2, 3, 8, 9, 16, 17, 24, 40)
#: Pixels of most are not whole 16 bytes.
ODD_CHANNELS = (3, 5, 17, 24, 31, 65, 130)


@pytest.fixture(autouse=True)
def on_hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels run on compute capability 9.0")


@pytest.fixture
def gradients_of(force, monkeypatch):
    """gradients_of(kernel): the convolution's gradients are this kernel's where it has them."""

    def use(kernel) -> None:
        force(kernel.name)
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", kernel.precision == "tf32")

    return use


def random_problem(generator: random.Random, channels: list[int]) -> dict[str, Any]:
    """Of which input and output have some of the channels."""
    axes = generator.choice((1, 2, 2, 3))
    sizes = {1: (300,), 2: (40, 70), 3: (6, 12, 30)}[axes]
    while True:
        stride = [generator.choice((1, 1, 2, 2, 3, 4)) for _ in range(axes)]
        kernel_size = [generator.choice((1, 2, 3, 4, 5)) for _ in range(axes)]
        if math.prod(stride) <= 16 and math.prod(kernel_size) <= 160:
            break
    dilation = [generator.choice((1, 1, 1, 2, 3)) for _ in range(axes)]
    reach = [spread * (size - 1) for size, spread in zip(kernel_size, dilation, strict=True)]
    padding = [generator.randint(0, min(3, far // 2 + 1)) for far in reach]
    extra = [generator.randrange(max(pair)) for pair in zip(stride, dilation, strict=True)]
    least = [
        max(1, -(-(2 * pad - far - more - 1 + each) // each) + 1)
        for pad, far, more, each in zip(padding, reach, extra, stride, strict=True)
    ]
    return {
        "batch": generator.randint(1, 5),
        "channels": generator.choice(channels),
        "out": generator.choice(channels),
        "spatial": [
            generator.randint(low, max(low, most)) for low, most in zip(least, sizes, strict=True)
        ],
        "kernel": kernel_size,
        "stride": stride,
        "padding": padding,
        "output_padding": extra,
        "dilation": dilation,
        "draw": generator.choice((torch.randn, torch.rand)),
        "grad": generator.choice(("dense", "channels last", "sliced", "expanded")),
        "weight_layout": generator.choice(("nchw", "nhwc")),
    }


def chosen_gradients(tensors: list[torch.Tensor], geometry: dict[str, Any]) -> dict[str, str]:
    """Which kernel computes which part of the backward pass."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    _, explanation = explained(lambda: conv_transpose_act_norm(*leaves, **geometry), gradients=True)
    return {part: c.kernel.name for parts, c in explanation.chosen for part in parts}


def hold_against_fp64(kernel: Any, case: dict[str, Any], layout: str) -> None:
    """All gradients of a case, twice, in memory that held NaN."""
    precision = kernel.precision
    tensors = operands(case, DTYPES[precision], layout)
    geometry = {name: case[name] for name in GEOMETRY if name in case}
    output = eager(*tensors, **geometry)
    grad = output_gradient(case["grad"], output)
    poison()
    actual = gradients(conv_transpose_act_norm, tensors, grad, **geometry)
    poison(32 << 20)
    again = gradients(conv_transpose_act_norm, tensors, grad, **geometry)
    torchs = gradients(eager, tensors, grad, **geometry)
    wide = [tensor.double() for tensor in tensors]
    exact = gradients(eager, wide, grad.double(), **geometry)
    rounded = exact
    if precision == "tf32":
        wide = [round_to_tf32(tensor).double() for tensor in tensors]
        rounded = gradients(eager, wide, round_to_tf32(grad).double(), **geometry)
    for name, a, b, t, r, e in zip(NAMES, actual, again, torchs, rounded, exact, strict=True):
        assert torch.equal(a, b), (name, case)
        if name == "input":
            x = tensors[0]
            assert layout_of(a.shape, a.stride()) == layout_of(x.shape, x.stride()), case
        limit = max(relative_error(t, e), relative_error(r, e))
        if name == "bias":
            limit = 2 * relative_error(t, e)  # of a sum of many terms
        error = relative_error(a, e)
        assert error <= bound(limit, precision), (name, error, limit, case)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_random_problems(kernel, layout, gradients_of):
    gradients_of(kernel)
    unit = 4 if kernel.precision == "tf32" else 8
    channels = [unit * count for count in WHOLE_CHANNELS]
    generator = random.Random(kernel.name + layout)
    torch.manual_seed(0)
    for _ in range(RANDOM_PROBLEMS):
        hold_against_fp64(kernel, random_problem(generator, channels), layout)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_random_problems_of_odd_channels(kernel, layout, gradients_of):
    gradients_of(kernel)
    generator = random.Random(kernel.name + layout + "odd")
    torch.manual_seed(0)
    for _ in range(ODD_RANDOM_PROBLEMS):
        hold_against_fp64(kernel, random_problem(generator, list(ODD_CHANNELS)), layout)


def input_named(value: Any) -> str:
    return _C.sm90.boxes.rows()[value].name if isinstance(value, int) else ""


def named(value: Any) -> str:
    return _C.sm90.boxes.weight.rows()[value].name if isinstance(value, int) else ""


@pytest.mark.parametrize(("kernel", "row"), FILTER_FIRST_ROWS, ids=input_named)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_rows_of_the_inputs_gradient_whose_filter_comes_first(
    kernel, row, layout, gradients_of, monkeypatch
):
    gradients_of(kernel)
    monkeypatch.setattr(kernel, "input_rows", [row])
    generator = random.Random(input_named(row) + layout)
    torch.manual_seed(0)
    clear_cache()
    try:
        for _ in range(ROW_PROBLEMS):
            axes = generator.choice((1, 2, 2, 2, 3))
            most, largest = {1: (300, 4), 2: (90, 3), 3: (20, 2)}[axes]
            filter = [generator.randint(1, largest) for _ in range(axes)]
            case = {
                "batch": generator.randint(1, 5),
                "channels": generator.choice((3, 8, 31, 64, 90)),
                "out": generator.choice((8, 17, 64)),
                "spatial": [generator.choice((8, 32, generator.randint(3, most))) for _ in filter],
                "kernel": filter,
                "padding": [generator.randint(0, size // 2) for size in filter],
                "draw": generator.choice((torch.randn, torch.rand)),
                "grad": generator.choice(("dense", "channels last", "sliced", "expanded")),
                "weight_layout": generator.choice(("nchw", "nhwc")) if axes > 1 else "nchw",
            }
            keywords = {name: case[name] for name in GEOMETRY if name in case}
            tensors = operands(case, DTYPES[kernel.precision], layout)
            assert chosen_gradients(tensors, keywords)["input"] == kernel.name
            hold_against_fp64(kernel, case, layout)
    finally:
        clear_cache()


def use_planes_of_three_by_three(case: dict[str, Any], generator: random.Random) -> None:
    axes = generator.choice((2, 2, 2, 3))
    sizes = (90, 100) if axes == 2 else (5, 20, 36)
    filter = [generator.choice((1, 2, 3)), 3, 3][-axes:]
    dilation = [generator.choice((1, 1, 2)), *[generator.choice((1, 1, 1, 2, 3))] * 2][-axes:]
    reach = [spread * (size - 1) for size, spread in zip(filter, dilation, strict=True)]
    case.update(
        spatial=[generator.choice((most, generator.randint(3, most))) for most in sizes],
        kernel=filter,
        stride=[1] * axes,
        dilation=dilation,
        padding=[generator.randint(0, far // 2) for far in reach],
        output_padding=[0] * axes,
        weight_layout=generator.choice(("nchw", "nhwc")),
    )


@pytest.mark.parametrize(("kernel", "row"), WEIGHT_ROWS, ids=named)
def test_rows_of_the_weights_gradient(kernel, row, gradients_of, monkeypatch):
    """In every second problem the filter is as large as its stride: rows that pack nothing before
    sum the bias's gradient on the way."""
    gradients_of(kernel)
    monkeypatch.setattr(kernel, "weight_rows", [row])
    compiled = _C.sm90.boxes.weight.rows()[row]
    sums_bias = not compiled.packs
    generator = random.Random(named(row))
    torch.manual_seed(0)
    clear_cache()
    try:
        for number in range(ROW_PROBLEMS):
            case = random_problem(generator, list(ODD_CHANNELS))
            if compiled.halo:
                use_planes_of_three_by_three(case, generator)
            elif number % 2:
                filter = [generator.choice((1, 2, 2, 2)) for _ in case["spatial"]]
                filter[-1] = generator.choice((1, 2, 3, 4))
                none = [0] * len(filter)
                case.update(kernel=filter, stride=filter, padding=none, output_padding=none)
                case.update(dilation=[1] * len(filter))
                keywords = {name: case[name] for name in GEOMETRY}
                tensors = operands(case, DTYPES[kernel.precision], "nhwc")
                parts = chosen_gradients(tensors, keywords)
                assert parts["weight"] == kernel.name
                assert (parts["bias"] == kernel.name) == sums_bias, case
            hold_against_fp64(kernel, case, "nhwc")
    finally:
        clear_cache()


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize(
    ("channels", "out", "spatial", "geometry"),
    [
        (3, 16, (5, 18, 20), {"kernel": (3, 3, 3), "stride": [2, 2, 2], "padding": [1, 1, 1]}),
        (512, 17, (14, 14), {"kernel": (4, 4), "stride": [2, 2], "padding": [1, 1]}),
        (64, 3, (30, 37), {"kernel": (4, 4), "stride": [2, 2], "padding": [1, 1]}),
        (5, 31, (19, 45), {"kernel": (3, 3), "padding": [1, 1]}),
        (31, 5, (300,), {"kernel": (8,), "stride": [4], "padding": [2]}),
        (17, 40, (19, 23), {"kernel": (2, 2), "stride": [2, 2]}),
        (1, 1, (64, 65), {"kernel": (5, 5), "stride": [2, 2], "padding": [2, 2]}),
    ],
    ids=str,
)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_odd_channels(kernel, channels, out, spatial, geometry, layout, gradients_of):
    gradients_of(kernel)
    torch.manual_seed(0)
    case = {
        "batch": 3,
        "channels": channels,
        "out": out,
        "spatial": spatial,
        "draw": torch.randn,
        **geometry,
    }
    keywords = {name: case[name] for name in GEOMETRY if name in case}
    tensors = operands(case, DTYPES[kernel.precision], layout)
    parts = chosen_gradients(tensors, keywords)
    assert {parts["input"], parts["weight"]} == {kernel.name}
    for kind in ("dense", "channels last"):
        hold_against_fp64(kernel, {**case, "grad": kind}, layout)
    grad = torch.randn_like(eager(*tensors, **keywords))
    every = gradients(conv_transpose_act_norm, tensors, grad, **keywords)
    for name, expected in zip(NAMES, every, strict=True):
        if name == "bias" and parts[name] == kernel.name:
            continue  # beside the weight's; by itself another kernel's
        poison()
        (found,) = gradients(conv_transpose_act_norm, tensors, grad, (name,), **keywords)
        assert torch.equal(found, expected), name


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_padding_keeps_infinities_apart(kernel, gradients_of):
    """An infinite channel of the output's gradient reaches its own weights alone."""
    gradients_of(kernel)
    case = {"batch": 2, "channels": 5, "out": 17, "spatial": (9, 11), "kernel": (2, 2)}
    tensors = operands({**case, "draw": torch.rand}, DTYPES[kernel.precision], "nhwc")
    geometry = {"stride": [2, 2]}  # no tap reads what lies outside
    grad = torch.rand_like(eager(*tensors, **geometry))
    grad[:, 16] = torch.inf
    (weight,) = gradients(conv_transpose_act_norm, tensors, grad, ("weight",), **geometry)
    assert weight[:, :16].isfinite().all()
    assert not weight[:, 16].isfinite().any()


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize(
    ("kernel_size", "geometry"),
    [
        ((3, 3), {"padding": [1, 1]}),
        ((2, 2), {"stride": [2, 2]}),
        ((4, 4), {"stride": [2, 2], "padding": [1, 1]}),
        ((4, 4), {"stride": [4, 4]}),
        ((3, 3), {"stride": [2, 2], "padding": [1, 1], "output_padding": [1, 1]}),
    ],
    ids=str,
)
def test_behind_a_normalisation(kernel, layout, kernel_size, geometry, gradients_of):
    gradients_of(kernel)
    dtype = DTYPES[kernel.precision]
    case = {
        "batch": 3,
        "channels": 72,
        "out": 40,
        "spatial": (19, 23),
        "kernel": kernel_size,
        "draw": torch.randn,
    }

    def ours(x, weight, bias, **geometry):
        return conv_transpose_act_norm(x, weight, bias, activation="gelu", num_groups=4, **geometry)

    def composed(x, weight, bias, **geometry):
        y = torch.nn.functional.gelu(eager(x, weight, bias, **geometry))
        return torch.nn.functional.group_norm(y, 4)

    tensors = operands(case, dtype, layout)
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    _, explanation = explained(lambda: ours(*leaves, **geometry), gradients=True)
    parts = {part: c.kernel.name for parts, c in explanation.chosen for part in parts}
    assert {parts["input"], parts["weight"]} == {kernel.name}
    transposes = [step for step in explanation.steps if "nchw -> nhwc" in step]
    assert bool(transposes) == (layout == "nchw")
    grad = torch.randn_like(composed(*tensors, **geometry))
    poison()
    actual = gradients(ours, tensors, grad, **geometry)
    torchs = gradients(composed, tensors, grad, **geometry)
    exact = gradients(composed, [tensor.double() for tensor in tensors], grad.double(), **geometry)
    for name, a, t, e in zip(NAMES, actual, torchs, exact, strict=True):
        # The bias's sums what the normalisation's gradient rounds.
        limit = (3 if name == "bias" else 1.5) * relative_error(t, e)
        if kernel.precision == "tf32":
            limit = max(limit, TF32_ERROR)  # eager's small convolutions are not in TF32
        assert relative_error(a, e) <= bound(limit, kernel.precision), name


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_each_gradient_alone(kernel, gradients_of):
    gradients_of(kernel)
    case = {
        "batch": 2,
        "channels": 24,
        "out": 40,
        "spatial": (19, 45),
        "kernel": (4, 3),
        "draw": torch.randn,
    }
    geometry = {"stride": [2, 1], "padding": [1, 0]}
    tensors = operands(case, DTYPES[kernel.precision], "nhwc")
    grad = torch.randn_like(eager(*tensors, **geometry))
    every = gradients(conv_transpose_act_norm, tensors, grad, **geometry)
    for name, expected in zip(NAMES, every, strict=True):
        (found,) = gradients(conv_transpose_act_norm, tensors, grad, (name,), **geometry)
        assert torch.equal(found, expected), name


@pytest.mark.parametrize(("first", "out"), [(0, 40), (0, 72), (16, 40), (1, 40)])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_weight_that_is_a_part_of_another(kernel, first, out, gradients_of):
    """Its output channels from ``first`` on: one of which tensor copies read what lies beside each
    other, and begin at whole 16 bytes, or at none."""
    gradients_of(kernel)
    case = {
        "batch": 3,
        "channels": 136,
        "out": 72,
        "spatial": (11, 13),
        "kernel": (3, 2),
        "draw": torch.randn,
        "weight_layout": "nhwc",
    }
    x, wide, bias = operands(case, DTYPES[kernel.precision], "nhwc")
    last = min(first + out, 72)
    tensors = [x, wide[:, first:last], bias[first:last]]
    geometry = {"stride": [2, 1], "padding": [1, 0]}
    grad = torch.randn_like(eager(*tensors, **geometry))
    wanted = NAMES[:2]
    poison()
    found = gradients(conv_transpose_act_norm, tensors, grad, wanted, **geometry)
    tensors[1] = in_layout(tensors[1], "nhwc")
    expected = gradients(conv_transpose_act_norm, tensors, grad, wanted, **geometry)
    for name, one, other in zip(wanted, found, expected, strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_long_sums(kernel, gradients_of):
    """More slabs than the accumulators take before they are added to sums in memory."""
    gradients_of(kernel)
    case = {
        "batch": 40,
        "channels": 16,
        "out": 16,
        "spatial": (300, 260),
        "kernel": (2, 2),
        "draw": torch.rand,
    }
    tensors = operands(case, DTYPES[kernel.precision], "nhwc")
    grad = torch.rand_like(eager(*tensors))
    (found,) = gradients(conv_transpose_act_norm, tensors, grad, ("weight",))
    (torchs,) = gradients(eager, tensors, grad, ("weight",))
    wide = [tensor.double() for tensor in tensors]
    (exact,) = gradients(eager, wide, grad.double(), ("weight",))
    # The tensor core drops bits of each addition to an accumulator; eager's small convolutions are
    # not in TF32.
    limit = relative_error(torchs, exact) + 3e-5
    assert relative_error(found, exact) <= bound(limit, kernel.precision)
