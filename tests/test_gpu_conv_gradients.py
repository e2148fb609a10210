"""The convolution's gradients on Hopper against fp64, relative to eager's error."""

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

from fusedconv.benchmark import DTYPES
from fusedconv.functional import conv_transpose_act_norm
from fusedconv.kernels.cuda.sm90_gradients import MOST_STRICT_ZEROS, SHORTEST_STRICT_POSITIONS
from fusedconv.layout import layout_of
from fusedconv.registry import registry

pytestmark = pytest.mark.gpu

KERNELS = [k for k in registry().kernels() if k.name.startswith("sm90_gradients_")]
#: Of each kernel; together more than 2**8.
RANDOM_PROBLEMS = 80
#: Random problems of a strict sum: chance may part eager's error and ours over a few values.
FEWEST_STRICT_VALUES = 1000


@pytest.fixture(autouse=True)
def on_hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels run on compute capability 9.0")


@pytest.fixture
def gradients_of(force, monkeypatch):
    """gradients_of(kernel, *others): the convolution's gradients are this kernel's where it has
    them, other parts those of the others."""

    def use(kernel, *others: str) -> None:
        force(",".join((kernel.name, *others)))
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", kernel.precision == "tf32")

    return use


def random_strided(kernel, generator: random.Random) -> dict[str, Any]:
    """Sizes that the kernel serves by planes of a stride's phases."""
    axes = generator.choice((1, 2, 2, 3))
    sizes = {1: (150,), 2: (20, 70), 3: (4, 7, 35)}[axes]
    strict = kernel.precision == "fp32"
    while True:
        stride = [generator.choice((1, 2, 2, 3)) for _ in range(axes - 1)]
        stride.append(generator.choice((2, 2, 3, 4)))
        dilation = [generator.choice((1, 1, 1, 2)) for _ in range(axes)]
        # Up to three taps of a phase.
        kernel_size = [
            generator.randint(1, (3 * each - 1) // spread + 1)
            for each, spread in zip(stride, dilation, strict=True)
        ]
        taps = [
            each * (spread * (size - 1) // each + 1)
            for each, spread, size in zip(stride, dilation, kernel_size, strict=True)
        ]
        if not strict or math.prod(taps) <= MOST_STRICT_ZEROS * math.prod(kernel_size):
            break
    reach = [spread * (size - 1) for size, spread in zip(kernel_size, dilation, strict=True)]
    case = random_problem(kernel, generator)
    return case | {
        "spatial": [generator.randint(2, most) for most in sizes],
        "kernel": kernel_size,
        "stride": stride,
        "dilation": dilation,
        "padding": [generator.randint(0, min(2, far // 2)) for far in reach],
        "output_padding": [
            generator.randrange(max(pair)) for pair in zip(stride, dilation, strict=True)
        ],
    }


def random_problem(kernel, generator: random.Random) -> dict[str, Any]:
    """Sizes that the kernel serves: widths are any."""
    axes = generator.choice((1, 2, 2, 3))
    sizes = {1: (300,), 2: (40, 150), 3: (5, 12, 70)}[axes]
    strict = kernel.precision == "fp32"
    kernel_size = [generator.choice((1, 2, 3)) for _ in range(axes - 1)]
    kernel_size.append(generator.choice((1, 2, 3, 3)))
    padding = [generator.randint(0, size - 1) for size in kernel_size]
    return {
        "batch": generator.randint(1, 4),
        "channels": generator.choice((5, 16, 64, 70, 130) if strict else (1, 3, 8, 64, 65, 130)),
        "out": generator.choice((16, 64, 100) if strict else (2, 6, 16, 64, 100)),
        "spatial": [
            generator.randint(max(1, 2 * pad - size + 2), most)
            for size, pad, most in zip(kernel_size, padding, sizes, strict=True)
        ],
        "kernel": kernel_size,
        "padding": padding,
        "draw": generator.choice((torch.randn, torch.rand)),
        "weight_layout": generator.choice(("nchw", "nhwc")),
        # Expanded, a strict sum has too few different values to compare errors of.
        "grad": generator.choice(
            ("dense", "channels last", "sliced", *([] if strict else ["expanded"]))
        ),
    }


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("draw", [random_problem, random_strided])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_random_problems(kernel, draw, layout, gradients_of):
    gradients_of(kernel)
    precision, dtype = kernel.precision, DTYPES[kernel.precision]
    generator = random.Random(kernel.name)
    torch.manual_seed(0)
    for _ in range(RANDOM_PROBLEMS):
        case = draw(kernel, generator)
        if precision == "fp32":  # shorter sums for the weight are refused
            fewest = math.ceil(SHORTEST_STRICT_POSITIONS / math.prod(case["spatial"]))
            case["batch"] = max(case["batch"], fewest)
        tensors = operands(case, dtype, layout)
        tensors[1] = in_layout(tensors[1], case["weight_layout"])
        # No row convolves the output's gradient with a filter of two columns and their padding.
        cropped = draw is random_problem and (case["kernel"][-1], case["padding"][-1]) == (2, 1)
        wanted = NAMES[1:] if cropped else NAMES
        geometry = {name: case[name] for name in GEOMETRY if name in case}
        keywords = {"wanted": wanted, **geometry}
        output = eager(*tensors, **geometry)
        grad = output_gradient(case["grad"], output)
        poison()
        actual = gradients(conv_transpose_act_norm, tensors, grad, **keywords)
        poison(32 << 20)
        again = gradients(conv_transpose_act_norm, tensors, grad, **keywords)
        torchs = gradients(eager, tensors, grad, **keywords)
        wide = [tensor.double() for tensor in tensors]
        exact = gradients(eager, wide, grad.double(), **keywords)
        rounded = exact
        if precision == "tf32":
            wide = [round_to_tf32(tensor).double() for tensor in tensors]
            rounded = gradients(eager, wide, round_to_tf32(grad).double(), **keywords)
        for name, a, b, t, r, e in zip(wanted, actual, again, torchs, rounded, exact, strict=True):
            if precision == "fp32" and name != "bias" and a.numel() < FEWEST_STRICT_VALUES:
                continue
            assert torch.equal(a, b), (name, case)
            if name != "bias":
                like = tensors[NAMES.index(name)]
                lies = layout_of(like.shape, like.stride())
                assert layout_of(a.shape, a.stride()) == lies, (name, case)
            limit = max(relative_error(t, e), relative_error(r, e))
            if name == "bias":
                limit = 2 * relative_error(t, e)  # of a sum of many terms
            error = relative_error(a, e)
            assert error <= bound(limit, precision), (name, error, limit, case)


STREAMED = "groupnorm_backward_streamed"


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize(
    ("spatial", "layout", "norm"),
    [
        ((37, 62), "nchw", None),
        ((37, 62), "nhwc", None),
        ((24, 64), "nchw", None),
        ((24, 64), "nhwc", None),
        # Planes that in 16 bits are not whole 16 bytes, of lines of odd and of even sizes.
        ((44, 65), "nchw", STREAMED),
        ((45, 64), "nchw", STREAMED),
        ((60, 62), "nchw", STREAMED),
    ],
    ids=str,
)
def test_behind_a_normalisation(kernel, spatial, layout, norm, gradients_of):
    """Its gradient comes channels first with padded lines, and the bias's with it."""
    gradients_of(kernel, *((norm,) if norm else ()))
    dtype = DTYPES[kernel.precision]
    case = {
        "batch": 3,
        "channels": 32,
        "out": 48,
        "spatial": spatial,
        "kernel": (3, 3),
        "draw": torch.randn,
    }
    affine = [torch.randn(48, device="cuda").to(dtype) for _ in range(2)]

    def ours(x, weight, bias, dtype=dtype):
        return conv_transpose_act_norm(
            x,
            weight,
            bias,
            activation="gelu",
            num_groups=4,
            norm_weight=affine[0].to(x.dtype),
            norm_bias=affine[1].to(x.dtype),
        )

    def composed(x, weight, bias):
        y = torch.nn.functional.gelu(eager(x, weight, bias))
        scale, shift = (parameter.to(x.dtype) for parameter in affine)
        return torch.nn.functional.group_norm(y, 4, scale, shift)

    tensors = operands(case, dtype, layout)
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    _, explanation = explained(lambda: ours(*leaves), gradients=True)
    parts = {part: c.kernel.name for parts, c in explanation.chosen for part in parts}
    assert parts["input"] == kernel.name
    assert norm in (None, parts["epilogue"])
    before = ("transpose the output's gradient", "pad the output's gradient")
    assert not any(step.startswith(before) for step in explanation.steps)
    output = composed(*tensors)
    grad = torch.randn_like(output)
    poison()
    actual = gradients(ours, tensors, grad)
    torchs = gradients(composed, tensors, grad)
    exact = gradients(composed, [tensor.double() for tensor in tensors], grad.double())
    for a, t, e in zip(actual, torchs, exact, strict=True):
        limit = 1.5 * relative_error(t, e)
        if kernel.precision == "tf32":
            limit = max(limit, TF32_ERROR)  # eager's small convolutions are not in TF32
        assert relative_error(a, e) <= bound(limit, kernel.precision)
    again = gradients(ours, tensors, grad)
    for name, a, b in zip(NAMES, actual, again, strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_some_of_the_gradients(kernel, gradients_of):
    gradients_of(kernel)
    case = {
        "batch": 2,
        "channels": 24,
        "out": 40,
        "spatial": (19, 45),
        "kernel": (3, 3),
        "padding": (1, 0),
        "draw": torch.randn,
    }
    tensors = operands(case, DTYPES[kernel.precision])
    grad = torch.randn_like(eager(*tensors, padding=[1, 0]))
    every = gradients(conv_transpose_act_norm, tensors, grad, padding=(1, 0))
    for name, expected in zip(NAMES, every, strict=True):
        (found,) = gradients(conv_transpose_act_norm, tensors, grad, (name,), padding=(1, 0))
        assert relative_error(found, expected) <= 1e-6


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kernel_size", [(3, 3), (2, 3), (1, 3), (1, 1), (2, 2, 3)], ids=str)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_channels_last_weight_has_a_channels_last_gradient(
    kernel, kernel_size, stride, layout, gradients_of
):
    """Of the same bits as a contiguous one's, for any number of channels."""
    axes = len(kernel_size)
    gradients_of(kernel)
    for channels, out in ((24, 40), (64, 64), (70, 100)):
        case = {
            "batch": 2,
            "channels": channels,
            "out": out,
            "spatial": (9, 19, 45)[-axes:],
            "kernel": kernel_size,
            "draw": torch.randn,
        }
        x, weight, bias = operands(case, DTYPES[kernel.precision], layout)
        placed = in_layout(weight, "nhwc")
        geometry = {"stride": [stride] * axes}
        grad = torch.randn_like(eager(x, weight, bias, **geometry))

        def of_weight(function, *tensors, grad=grad, geometry=geometry):
            (found,) = gradients(function, list(tensors), grad, ("weight",), **geometry)
            return found

        poison()
        found = of_weight(conv_transpose_act_norm, x, placed, bias)
        same = of_weight(conv_transpose_act_norm, x, weight, bias)
        assert layout_of(found.shape, found.stride()) == layout_of(placed.shape, placed.stride())
        assert same.is_contiguous()
        assert torch.equal(found, same), (channels, out)
        torchs = of_weight(eager, x, placed, bias)
        wide = [tensor.double() for tensor in (x, placed, bias)]
        exact = of_weight(eager, *wide, grad=grad.double())
        limit = relative_error(torchs, exact)
        if kernel.precision == "tf32":
            limit = max(limit, TF32_ERROR)  # eager's small convolutions are not in TF32
        assert relative_error(found, exact) <= bound(limit, kernel.precision), (channels, out)


#: Taps end before the output does, so that planes do not hold all of it.
LEFT_OUT = {"stride": [2, 2], "dilation": [1, 4], "padding": [0, 0], "output_padding": [1, 3]}


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize(
    ("kernel_size", "geometry"),
    [
        ((2, 2), {"stride": [2, 2]}),
        ((4, 4), {"stride": [2, 2], "padding": [1, 1]}),
        ((4, 1), LEFT_OUT),
    ],
    ids=str,
)
@pytest.mark.parametrize("order", ["act_norm", "norm_act"])
def test_strided_behind_a_normalisation(kernel, kernel_size, geometry, order, gradients_of):
    gradients_of(kernel)
    dtype = DTYPES[kernel.precision]
    case = {
        "batch": 2,
        "channels": 24,
        "out": 40,
        "spatial": (19, 23),
        "kernel": kernel_size,
        "draw": torch.randn,
    }

    def ours(x, weight, bias, **geometry):
        return conv_transpose_act_norm(
            x, weight, bias, activation="gelu", order=order, num_groups=4, **geometry
        )

    def composed(x, weight, bias, **geometry):
        y = eager(x, weight, bias, **geometry)
        gelu, group_norm = torch.nn.functional.gelu, torch.nn.functional.group_norm
        return group_norm(gelu(y), 4) if order == "act_norm" else gelu(group_norm(y, 4))

    tensors = operands(case, dtype)
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    _, explanation = explained(lambda: ours(*leaves, **geometry), gradients=True)
    parts = {part: c.kernel.name for parts, c in explanation.chosen for part in parts}
    assert parts["input"] == kernel.name
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
def test_some_of_the_gradients_with_a_stride(kernel, gradients_of):
    gradients_of(kernel)
    case = {
        "batch": 2,
        "channels": 24,
        "out": 40,
        "spatial": (19, 45),
        "kernel": (4, 1),
        "draw": torch.randn,
    }
    tensors = operands(case, DTYPES[kernel.precision])
    grad = torch.randn_like(eager(*tensors, **LEFT_OUT))
    every = gradients(conv_transpose_act_norm, tensors, grad, **LEFT_OUT)
    for name, expected in zip(NAMES, every, strict=True):
        (found,) = gradients(conv_transpose_act_norm, tensors, grad, (name,), **LEFT_OUT)
        assert relative_error(found, expected) <= 1e-6


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_an_empty_batch_has_zero_gradients(kernel, stride, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", kernel.precision == "tf32")
    dtype = DTYPES[kernel.precision]
    x = torch.empty(0, 8, 9, 12, device="cuda", dtype=dtype)
    weight, bias = torch.randn(8, 4, 3, 3, device="cuda").to(dtype), torch.randn(4, device="cuda")
    tensors = [x, weight, bias.to(dtype)]
    grad = torch.empty_like(eager(*tensors, stride=stride))
    found = gradients(conv_transpose_act_norm, tensors, grad, stride=stride)
    assert found[0].shape == x.shape
    assert not found[1].any()
    assert not found[2].any()
