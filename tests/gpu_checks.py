"""What tests of convolutions on the GPU share."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from reference import ACTIVATIONS, LAYOUTS, ORDERS, relative_error
from reference import conv_transpose_act_norm as composition

import fusedconv
from fusedconv.functional import conv_transpose_act_norm

#: Of an output in strict fp32: eager's error and that of 3xTF32 are alike, but over a few values
#: chance may part them.
FEWEST_STRICT_VALUES = 1000
#: Of a problem with normalised groups of a few values, whose deviations may be next to nothing.
FEWEST_NORMALISED_VALUES = 32


def poison(num_bytes: int = 64 << 20, device: str = "cuda") -> None:
    """Leaves NaN in the memory that the next allocations get."""
    blocks = [torch.full((size // 4,), torch.nan, device=device) for size in (num_bytes, 1 << 20)]
    del blocks


def bound(eager_error: float, precision: str) -> float:
    # 1.1 times eager's error, and a floor of a few roundings for results that eager has exact.
    return 1.1 * eager_error + {"tf32": 2e-6, "fp32": 4e-8, "fp16": 1e-5, "bf16": 1e-4}[precision]


def same_bits_beside_products(run: Callable[[], torch.Tensor]) -> None:
    """Asserts that 1000 calls have the bits of the first, while another stream multiplies."""
    first = run()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    square = torch.randn(1536, 1536, device="cuda")
    for repetition in range(1000):
        if repetition % 4 == 0:
            with torch.cuda.stream(side):
                torch.mm(square, square)
        assert torch.equal(run(), first), repetition


def round_to_tf32(x: torch.Tensor) -> torch.Tensor:
    """To nearest, ties to even, as torch's TF32 convolutions round finite operands."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFF).view(torch.float32).reshape(x.shape)


def limit(plain, tensors, exact, precision: str) -> float:
    """Of our error: eager's, which may be float32's where it does not round to TF32."""
    error = relative_error(plain(*tensors), exact)
    if precision == "tf32":
        x, weight, *rest = tensors
        rounded = (round_to_tf32(x).double(), round_to_tf32(weight).double())
        error = max(
            error, relative_error(plain(*rounded, *(each.double() for each in rest)), exact)
        )
    return bound(error, precision)


def fused_against_fp64(
    case: dict[str, Any],
    dtype: torch.dtype,
    precision: str,
    device: str = "cuda",
    floor: float = 0.0,
) -> bool:
    """Computes a random problem by what FUSEDCONV_KERNEL names and holds it against float64; False
    where that serves it not. Beside sizes a case may name its ``layout`` and that of its weight
    (``weight_layout``), ``stride``, ``output_padding`` and ``conv_groups``, how the input is drawn
    (``draw``), an ``offset`` of the bias, the ``order`` of activation and normalisation, and
    whether gradients are asked for (``saves``). ``floor`` adds to the bound."""
    draw, groups = case.get("draw", torch.randn), case["groups"]
    x = draw(case["batch"], case["channels"], *case["spatial"], device=device).to(dtype)
    x = LAYOUTS[case.get("layout", "nchw")](x)
    conv_groups, stride = case.get("conv_groups", 1), case.get("stride", [1])
    shape = (case["channels"], case["out"] // conv_groups, *case["kernel"])
    products = case["channels"] // conv_groups * math.prod(case["kernel"]) / math.prod(stride)
    weight = (torch.randn(shape, device=device) / products**0.5).to(dtype)
    weight = LAYOUTS[case.get("weight_layout", "nchw")](weight)
    bias = scale = shift = None
    if case["bias"]:
        bias = (case.get("offset", 0.0) + torch.randn(case["out"], device=device)).to(dtype)
    if groups:
        scale, shift = (torch.randn(case["out"], device=device).to(dtype) for _ in range(2))
    keywords = dict(
        padding=case["padding"],
        dilation=case["dilation"],
        stride=stride,
        output_padding=case.get("output_padding", 0),
        groups=conv_groups,
        activation=case["activation"],
        order=case.get("order", "act_norm"),
        num_groups=groups,
    )

    def run(x, weight, bias, scale, shift):
        return composition(x, weight, bias, norm_weight=scale, norm_bias=shift, **keywords)

    poison(device=device)
    saves = case.get("saves", False)
    with torch.set_grad_enabled(saves):
        try:
            actual = conv_transpose_act_norm(
                x.detach().requires_grad_(saves),
                weight,
                bias,
                norm_weight=scale,
                norm_bias=shift,
                precision=precision if dtype is torch.float32 else None,
                **keywords,
            ).detach()
        except fusedconv.NoKernelError:
            return False
    tensors = (x, weight, bias, scale, shift)
    wide = [None if t is None else t.double() for t in tensors]
    reference = run(*wide)
    eager_error = relative_error(run(*tensors), reference)
    if precision == "tf32":
        rounded = [round_to_tf32(x).double(), round_to_tf32(weight).double(), *wide[2:]]
        eager_error = max(eager_error, relative_error(run(*rounded), reference))
    error = relative_error(actual, reference)
    assert error <= bound(eager_error, precision) + floor, (case, error, eager_error)
    return True


def random_axis(generator: random.Random, largest: int) -> tuple[int, ...]:
    """(extent, kernel, stride, padding, output padding, dilation) as torch admits them."""
    kernel = generator.choice((1, 2, 3, 3, 4, 5, 8))
    stride = generator.choice((1, 2, 2, 3, 4))
    dilation = generator.choice((1, 1, 1, 2, 3))
    extra = generator.randint(0, max(stride, dilation) - 1)
    extent = generator.randint(1, largest)
    last = (extent - 1) * stride + dilation * (kernel - 1) + extra
    return extent, kernel, stride, generator.randint(0, min(last // 2, kernel)), extra, dilation


def output_extent(extent, kernel, stride, padding, extra, dilation) -> int:
    return (extent - 1) * stride - 2 * padding + dilation * (kernel - 1) + extra + 1


def meets_outputs(extent, kernel, stride, padding, extra, dilation) -> bool:
    """Whether any product along the axis lands within the output."""
    outputs = range(output_extent(extent, kernel, stride, padding, extra, dilation))
    places = (stride * i + dilation * k - padding for i in range(extent) for k in range(kernel))
    return any(place in outputs for place in places)


def random_problem(precision: str, generator: random.Random) -> dict[str, Any]:
    """A transposed convolution of any arguments with what follows it, for
    ``fused_against_fp64``."""
    axes = generator.choice((1, 2, 2, 3))
    drawn = [random_axis(generator, {1: 200, 2: 30, 3: 7}[axes]) for _ in range(axes)]
    if generator.random() < 0.5:  # lines of whole 16 bytes
        drawn[-1] = (8 * generator.randint(1, {1: 25, 2: 5, 3: 2}[axes]), *drawn[-1][1:])
        drawn[-1] = (*drawn[-1][:3], min(drawn[-1][3], 3), *drawn[-1][4:])
    extent, kernel, stride, padding, extra, dilation = map(list, zip(*drawn, strict=True))
    conv_groups = generator.choice((1, 1, 1, 2, 5))
    groups = generator.choice((1, 2, 4))
    channels = generator.choice((1, 3, 8, 20, 64, 100)) if conv_groups < 5 else 4
    out = groups * generator.choice((1, 5, 8, 16, 33))
    outputs = [output_extent(*axis) for axis in drawn]
    normalised = math.prod(outputs) * out * conv_groups // groups
    case = {
        "batch": generator.randint(1, 3),
        "channels": conv_groups * channels,
        "out": conv_groups * out,
        "conv_groups": conv_groups,
        "groups": generator.choice((None, groups, groups)),
        "spatial": extent,
        "kernel": kernel,
        "stride": stride,
        "padding": padding,
        "output_padding": extra,
        "dilation": dilation,
        "layout": generator.choice(("nchw", "nchw", "nhwc", "nhwc", "strided")),
        "bias": generator.random() < 0.7,
        "activation": generator.choice(list(ACTIVATIONS)),
        "order": generator.choice(ORDERS),
        "draw": generator.choice((torch.randn, torch.rand)),
        # With 16 bits a bias far beyond the products leaves nothing of them.
        "offset": generator.choice((0.0, 0.0, 300.0)) if precision in ("tf32", "fp32") else 0.0,
        "saves": generator.random() < 0.3,
        "values": math.prod(outputs) * conv_groups * out,
    }
    if normalised < FEWEST_NORMALISED_VALUES:
        case["groups"] = None
    return case
