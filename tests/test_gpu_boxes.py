"""Transposed convolutions by tensor copies on the GPU, against fp64, relative to eager's error."""

from __future__ import annotations

import io
import math
import random
from typing import Any

import pytest
import torch
from gpu_checks import (
    FEWEST_NORMALISED_VALUES,
    bound,
    fused_against_fp64,
    meets_outputs,
    output_extent,
    poison,
    round_to_tf32,
)
from reference import ACTIVATIONS, CONVOLUTIONS, LAYOUTS, ORDERS, relative_error
from torch.nn import functional as F

import fusedconv
from fusedconv import ops
from fusedconv.benchmark import DTYPES
from fusedconv.functional import conv_transpose_act_norm
from fusedconv.kernels.cuda.boxes_sm90 import BoxesSm90
from fusedconv.registry import registry
from fusedconv.selection import clear_cache

pytestmark = pytest.mark.gpu

KERNELS = [kernel for kernel in registry().kernels() if isinstance(kernel, BoxesSm90)]
names = {"ids": lambda kernel: kernel.name}
PRECISIONS = pytest.mark.parametrize("precision", ["tf32", "fp16", "bf16"])
#: Of each row.
RANDOM_PROBLEMS = 30


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the rows run on compute capability 9.0")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)


def served_problem(kernel: BoxesSm90, generator: random.Random) -> dict[str, Any]:
    """A random problem that the row serves, for ``fused_against_fp64``."""
    row = kernel.row
    layout = "nchw" if row.planes else generator.choice(("nchw", "nhwc", "nhwc", "strided"))
    if row.alike > 1 and layout == "nhwc":
        layout = "strided"
    if row.filter_first:
        return filter_first_problem(kernel, layout, generator)
    along_width = row.segments > 1 and layout != "nhwc"
    axes = generator.choice((1, 2, 2, 3)) if layout != "nhwc" else generator.choice((2, 2, 3))
    most = {1: 300, 2: 30, 3: 8}[axes]
    drawn = []
    for axis in range(axes):
        kernel_size = generator.choice((1, 2, 3, 3, 4, 5))
        stride = generator.choice((1, 2, 2, 3))
        dilation = generator.choice((1, 1, 2, 3))
        extent = generator.randint(1, most)
        padding = generator.randint(0, kernel_size // 2)
        if axes == 3:
            stride = min(stride, 2)
        if along_width and axis == axes - 1:
            # Lines of whole 16 bytes, in and out.
            stride, extent = row.segments, 8 * generator.randint(1, most // 8)
            dilation, padding = 1, generator.randint(0, 1)
            if row.alike > 1:  # by so many do the first taps of phases differ, or by none
                padding = row.alike * generator.randint(0, 2)
            kernel_size = stride + 2 * padding
            if row.planes:
                kernel_size, padding = stride, 0
        drawn.append((extent, kernel_size, stride, padding, 0, dilation))
    channels = 8 * generator.choice((1, 3, 4, 8, 13, 33))
    case = problem_of(kernel, layout, channels, drawn, generator)
    case["empty"] |= along_width and output_extent(*drawn[-1]) < row.segments
    return case


def filter_first_problem(
    kernel: BoxesSm90, layout: str, generator: random.Random
) -> dict[str, Any]:
    """One whose filter stays in shared memory, with tiles that reach beyond the image or do not."""
    axes = generator.choice((1, 2, 2, 2, 3)) if layout != "nhwc" else generator.choice((2, 2, 2, 3))
    most, largest = {1: (300, 4), 2: (90, 3), 3: (20, 2)}[axes]
    drawn = []
    for _ in range(axes):
        kernel_size = generator.randint(1, largest)
        dilation = generator.choice((1, 1, 2)) if kernel_size == 2 else 1
        padding = generator.randint(0, kernel_size // 2)
        extent = generator.choice((8, 16, 32, 64, generator.randint(1, most)))
        drawn.append((min(extent, most), kernel_size, 1, padding, 0, dilation))
    taps = math.prod(axis[1] for axis in drawn)
    channels = 8 * generator.choice((1, 3, 8, 13) if taps <= 4 else (1, 4, 7, 8))
    return problem_of(kernel, layout, channels, drawn, generator)


def problem_of(
    kernel: BoxesSm90,
    layout: str,
    channels: int,
    drawn: list[tuple[int, ...]],
    generator: random.Random,
) -> dict[str, Any]:
    """drawn: by axis its extent, filter, stride, padding, output padding and dilation."""
    extent, kernel_size, stride, padding, _, dilation = map(list, zip(*drawn, strict=True))
    outputs = [output_extent(*axis) for axis in drawn]
    groups = generator.choice((1, 2, 4))
    out = 8 * groups * generator.choice((1, 2, 3, 5, 9))
    case = {
        "batch": generator.randint(1, 5),
        "channels": channels,
        "out": out,
        "groups": generator.choice((None, groups, groups)),
        "spatial": extent,
        "kernel": kernel_size,
        "stride": stride,
        "padding": padding,
        "dilation": dilation,
        "layout": layout,
        "weight_layout": generator.choice(("nchw", "nhwc")) if len(drawn) > 1 else "nchw",
        "bias": generator.random() < 0.7,
        "activation": generator.choice(list(ACTIVATIONS)),
        "order": generator.choice(ORDERS),
        "draw": generator.choice((torch.randn, torch.rand)),
        "offset": generator.choice((0.0, 0.0, 300.0)) if kernel.precision == "tf32" else 0.0,
        "saves": generator.random() < 0.3,
        "values": out * math.prod(max(0, output) for output in outputs),
        "empty": not all(meets_outputs(*axis) for axis in drawn),
    }
    if case["values"] // groups < FEWEST_NORMALISED_VALUES:
        case["groups"] = None
    return case


@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_random_problems(kernel, force):
    force(kernel.name)
    generator = random.Random(kernel.name)
    served = drawn = 0
    while served < RANDOM_PROBLEMS:
        case = served_problem(kernel, generator)
        if case.pop("empty"):
            continue
        torch.manual_seed(drawn)
        drawn += 1
        served += fused_against_fp64(case, DTYPES[kernel.precision], kernel.precision)
        # Some have more phases than are served.
        assert drawn <= 3 * RANDOM_PROBLEMS


@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if not kernel.row.planes], **names)
def test_random_problems_of_odd_channels(kernel, force):
    """Pixels that are no whole 16 bytes are padded in front and cut behind."""
    force(kernel.name)
    generator = random.Random(f"odd {kernel.name}")
    served = drawn = 0
    while served < RANDOM_PROBLEMS // 2:
        case = served_problem(kernel, generator)
        out = generator.choice((1, 3, 5, 17, 31, 64, 90))
        case["values"] = case["values"] // case["out"] * out
        most = 64 if kernel.row.filter_first else 97
        case |= {"channels": min(most, generator.choice((1, 3, 17, 64, 97))), "out": out}
        case["groups"] = generator.choice((None, None, 1, out))
        if case.pop("empty") or case["values"] // (case["groups"] or 1) < FEWEST_NORMALISED_VALUES:
            continue
        torch.manual_seed(drawn)
        drawn += 1
        served += fused_against_fp64(case, DTYPES[kernel.precision], kernel.precision)
        assert drawn <= 3 * RANDOM_PROBLEMS


def layer(precision: str, layout: str, **changes: Any) -> tuple[torch.Tensor, ...]:
    """(input, weight, bias) of a layer of U-Nets, changed."""
    sizes = {"batch": 5, "channels": 72, "out": 48, "spatial": (13, 16), "kernel": 4, **changes}
    torch.manual_seed(0)
    dtype = DTYPES[precision]
    channels, out, kernel = sizes["channels"], sizes["out"], sizes["kernel"]
    x = torch.rand(sizes["batch"], channels, *sizes["spatial"], device="cuda").to(dtype)
    weight = torch.randn(channels, out, kernel, kernel, device="cuda") / (channels * kernel) ** 0.5
    return LAYOUTS[layout](x), weight.to(dtype), torch.randn(out, device="cuda").to(dtype)


def layer_stride(row: Any) -> int:
    """Of a layer that the row serves."""
    if row.filter_first:
        return 1
    return row.segments if row.segments > 1 else 2


def limit_of(plain, tensors, exact, precision: str) -> float:
    """Of our error: eager's, which may be float32's where it does not round to TF32."""
    error = relative_error(plain(*tensors).to(tensors[0].dtype), exact)
    if precision == "tf32":
        x, weight, *rest = tensors
        wide = (None if each is None else each.double() for each in rest)
        rounded = plain(round_to_tf32(x).double(), round_to_tf32(weight).double(), *wide)
        error = max(error, relative_error(rounded, exact))
    return bound(error, precision)


#: How GroupNorm's moments are had: by a pass over the convolution's output, in its epilogue, or by
#: convolving twice, with nothing stored in between.
WAYS = ("pass", "once", "twice")


@pytest.fixture
def moments_by(monkeypatch):
    """moments_by(way): wherever a row can; the list has an entry for each time that it could."""

    def use(way: str) -> list[bool]:
        could: list[bool] = []

        def noted(able: Any) -> Any:
            def ask(*args: Any) -> bool:
                if able(*args):
                    could.append(True)
                    return True
                return False

            return ask

        def never(*args: Any) -> bool:
            return False

        once = noted(BoxesSm90.can_take_moments) if way == "once" else never
        twice = noted(BoxesSm90.can_compute_twice) if way == "twice" else never
        monkeypatch.setattr(BoxesSm90, "takes_moments", once)
        monkeypatch.setattr(BoxesSm90, "computes_twice", twice)
        clear_cache()
        return could

    yield use
    clear_cache()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_ways_to_moments(kernel, way, force, moments_by):
    """Of random problems, with slabs that reach beyond some phases' pixels and large means."""
    force(kernel.name)
    generator = random.Random(f"{way} {kernel.name}")
    could = moments_by(way)
    served = drawn = 0
    while served < RANDOM_PROBLEMS // 2:
        case = served_problem(kernel, generator)
        if case.pop("empty") or case["groups"] is None:
            continue
        if way == "twice":
            case |= {"order": "norm_act", "saves": False}
        torch.manual_seed(drawn)
        drawn += 1
        served += fused_against_fp64(case, DTYPES[kernel.precision], kernel.precision)
        assert drawn <= 3 * RANDOM_PROBLEMS
    assert way == "pass" or could


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_groups_of_equal_values_and_saved_statistics(kernel, way, force, moments_by):
    """Without an input's say a group is its bias: nothing is left of it, whatever that is. What is
    saved for the backward pass is of what is stored."""
    row, precision = kernel.row, kernel.precision
    stride = layer_stride(row)
    if stride == 8:
        pytest.skip("more phases than a layer here has")
    force(kernel.name)
    moments_by(way)
    layout = "nchw" if row.planes else "nhwc"
    x, weight, bias = layer(precision, layout, out=40, kernel=stride, spatial=(11, 16))
    bias = (bias * 0 + 1000.0 * torch.rand_like(bias)).to(bias.dtype)
    keywords = dict(stride=stride, activation="relu", order="norm_act", norm="instance")
    with torch.no_grad():
        poison()
        found = conv_transpose_act_norm(x, torch.zeros_like(weight), bias, **keywords)
        assert found.abs().max() == 0.0
    if way == "twice":
        return
    geometry = (stride, stride), (0, 0), (0, 0), (1, 1), 1
    call = ops.ConvCall(
        x, weight, bias, *geometry, "relu", "norm_act", 40, None, None, 1e-5, None, None, "group"
    )
    poison()
    found = ops.conv_plan(call, True).run(*call.tensors)
    stored = found.conv_output.double().flatten(2)
    assert relative_error(found.mean, stored.mean(2)) < 1e-6
    rstd = (stored.var(2, correction=0) + 1e-5).rsqrt()
    assert relative_error(found.rstd, rstd) < 1e-4


@PRECISIONS
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_samples_have_the_same_bits_alone_and_in_a_batch(layout, precision, force):
    force("boxes_sm90")
    x, weight, bias = layer(precision, layout)
    for groups in (None, 4):
        keywords = dict(stride=2, padding=1, activation="gelu", num_groups=groups)
        with torch.no_grad():
            whole = conv_transpose_act_norm(x, weight, bias, **keywords)
            for _ in range(20):
                poison()
                assert torch.equal(whole, conv_transpose_act_norm(x, weight, bias, **keywords))
            for i in range(len(x)):
                alone = conv_transpose_act_norm(x[i : i + 1], weight, bias, **keywords)
                assert torch.equal(alone[0], whole[i])


@PRECISIONS
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("kernel_size", [2, 4])
def test_a_norm_over_channels_behind(kernel_size, layout, precision, force):
    force("boxes_sm90")
    x, weight, bias = layer(precision, layout, kernel=kernel_size)
    scale, shift = (torch.randn(48, device="cuda").to(x.dtype) for _ in range(2))
    padding = kernel_size // 2 - 1

    def plain(x, weight, bias, scale, shift):
        y = CONVOLUTIONS[2](x, weight, bias, 2, padding)
        y = F.layer_norm(y.movedim(1, -1), (48,), scale, shift, 1e-6).movedim(-1, 1)
        return F.gelu(y)

    tensors = (x, weight, bias, scale, shift)
    exact = plain(*(tensor.double() for tensor in tensors))
    poison()
    with torch.no_grad():
        actual = conv_transpose_act_norm(
            x, weight, bias, 2, padding, activation="gelu", order="norm_act", norm="layer",
            norm_weight=scale, norm_bias=shift, eps=1e-6,
        )  # fmt: skip
    assert relative_error(actual, exact) <= limit_of(plain, tensors, exact, precision)


@pytest.mark.parametrize("offset", [0.0, 100.0])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("stride", [2, 3])
@pytest.mark.parametrize("pixels", [1, 2, 4, 8])
@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_a_norm_over_channels_in_the_epilogue(kernel, pixels, stride, layout, offset, force):
    """Where a block has all channels of its pixels: several pixels where phases share positions,
    of which the last block has fewer with stride 3."""
    row, precision = kernel.row, kernel.precision
    out = row.columns // pixels
    if row.filter_first:
        pytest.skip("warps of the row have channels of their own")
    if out % 8 or (row.segments > 1 and row.segments != pixels) or row.segments == 8:
        pytest.skip("no block of the row has pixels of such channels")
    if row.segments > 1:
        if layout != ("nchw" if row.planes else "nhwc") or stride != 2:
            pytest.skip("segments are phases, and planes of the row are channels first")
        stride = row.segments
    force(kernel.name)
    if offset and precision != "tf32":
        pytest.skip("16 bits keep nothing of a deviation beside such a mean")
    x, weight, bias = layer(precision, layout, out=out, kernel=stride, spatial=(6, 16))
    bias = bias + offset
    scale, shift = (torch.randn(out, device="cuda") for _ in range(2))

    def plain(x, weight, bias, scale, shift):
        y = CONVOLUTIONS[2](x, weight, bias, stride)
        y = F.layer_norm(y.movedim(1, -1).to(scale.dtype), (out,), scale, shift, 1e-6)
        return F.gelu(y.movedim(-1, 1)).to(x.dtype)

    tensors = (x, weight, bias, scale, shift)
    exact = plain(*(tensor.double() for tensor in tensors))
    keywords = dict(
        stride=stride, activation="gelu", order="norm_act", norm="layer", norm_weight=scale,
        norm_bias=shift, eps=1e-6,
    )  # fmt: skip
    text = io.StringIO()
    fusedconv.explain(conv_transpose_act_norm, x, weight, bias, file=text, **keywords)
    assert "normalize over channels" in text.getvalue()
    with torch.no_grad():
        poison()
        actual = conv_transpose_act_norm(x, weight, bias, **keywords)
        assert torch.equal(actual, conv_transpose_act_norm(x, weight, bias, **keywords))
    assert relative_error(actual, exact) <= limit_of(plain, tensors, exact, precision)


@PRECISIONS
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("given", [(True, True), (True, False), (False, True)], ids=str)
def test_an_affine_map_in_the_epilogue(given, layout, precision, force):
    force("boxes_sm90")
    x, weight, bias = layer(precision, layout)
    scale, shift = (torch.randn(48, device="cuda") if each else None for each in given)

    def plain(x, weight, bias, scale, shift):
        y = CONVOLUTIONS[2](x, weight, bias, 2, 1)
        y = y if scale is None else y * scale[:, None, None]
        return F.relu(y if shift is None else y + shift[:, None, None])

    tensors = (x, weight, bias, scale, shift)
    exact = plain(*(None if each is None else each.double() for each in tensors))
    poison()
    with torch.no_grad():
        actual = conv_transpose_act_norm(
            x, weight, bias, 2, 1, activation="relu", order="norm_act", norm="affine",
            norm_weight=scale, norm_bias=shift,
        )  # fmt: skip
    assert relative_error(actual, exact) <= limit_of(plain, tensors, exact, precision)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("norm", [None, "affine"])
@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_an_epilogue_stores_what_is_saved_beside_the_result(kernel, norm, layout, force):
    """The convolution's output has the bits that it has alone; the result is computed from it."""
    row, precision = kernel.row, kernel.precision
    stride = layer_stride(row)
    if layout != ("nchw" if row.planes else "nhwc") or stride == 8:
        pytest.skip("the row stores another layout, or has more phases than a layer here")
    out = row.columns // row.segments
    force(kernel.name)
    x, weight, bias = layer(precision, layout, out=out, kernel=stride, spatial=(6, 16))
    scale, shift = (torch.randn(out, device="cuda") for _ in range(2))

    def rest(y, scale, shift):
        if norm is not None:
            y = y * scale[:, None, None] + shift[:, None, None]
        return F.gelu(y)

    geometry = (stride, stride), (0, 0), (0, 0), (1, 1), 1
    affine = (None, None) if norm is None else (scale, shift)
    call = ops.ConvCall(
        x, weight, bias, *geometry, "gelu", "norm_act", 0, *affine, 1e-6, None, None, norm
    )
    alone = call.convolution()
    bare = ops.conv_plan(alone, False).run(*alone.tensors).output
    plan = ops.conv_plan(call, True)
    assert any("save + " in step for step in plan.steps)
    for _ in range(3):
        poison()
        found = plan.run(*call.tensors)
        assert torch.equal(found.conv_output, bare)
        exact = rest(bare.double(), scale.double(), shift.double())
        eager = rest(bare, scale, shift).to(bare.dtype)
        limit = bound(relative_error(eager, exact), precision)
        assert relative_error(found.output, exact) <= limit


def weights_of(weight: torch.Tensor) -> list[torch.Tensor]:
    """The same values as they may lie: dense in either layout, at addresses that 16 bytes divide
    and at others, and with gaps."""
    last = weight.contiguous(memory_format=torch.channels_last)
    shifted = torch.empty(2, weight.numel() + 1, dtype=weight.dtype, device=weight.device)[:, 1:]
    gaps = torch.empty(*weight.shape[:3], 2 * weight.shape[3], dtype=weight.dtype, device="cuda")
    return [
        weight,
        last,
        shifted[0].view_as(weight).copy_(weight),
        shifted[1].as_strided(last.shape, last.stride()).copy_(weight),
        gaps[..., ::2].copy_(weight),
    ]


@pytest.mark.parametrize("kernel_size", [1, 2, 3, 4])
@pytest.mark.parametrize(("channels", "out"), [(64, 64), (72, 40), (20, 17), (100, 12), (8, 136)])
@pytest.mark.parametrize("precision", ["tf32", "fp16", "bf16"])
def test_a_weight_is_packed_however_it_lies(precision, channels, out, kernel_size, force):
    force("boxes_sm90,boxes_gradients_sm90")
    dtype = DTYPES[precision]
    x = torch.randn(3, channels, 6, 8, device="cuda").to(dtype)
    x = x.contiguous(memory_format=torch.channels_last)
    weight = torch.randn(channels, out, kernel_size, kernel_size, device="cuda").to(dtype)
    explicit = "tf32" if dtype is torch.float32 else None
    found = []
    for each in weights_of(weight):
        poison()
        leaf = x.detach().requires_grad_()
        y = conv_transpose_act_norm(leaf, each, None, 2, kernel_size // 3, precision=explicit)
        found.append([y.detach(), *torch.autograd.grad(y, leaf, torch.ones_like(y))])
    exact = F.conv_transpose2d(x.double(), weight.double(), None, 2, kernel_size // 3)
    assert (
        relative_error(found[0][0], exact) <= {"tf32": 1e-3, "fp16": 1e-3, "bf16": 8e-3}[precision]
    )
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_an_expanded_weight_is_packed(precision, force):
    """One that has the same values for all channels and taps, with strides of 0."""
    force("boxes_sm90,boxes_gradients_sm90")
    dtype = DTYPES[precision]
    x = torch.rand(3, 64, 6, 8, device="cuda").to(dtype)
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    weight = torch.randn(1, 64, 1, 1, device="cuda").to(dtype).expand(64, 64, 3, 3)
    y = conv_transpose_act_norm(x, weight, None, 2, 1)
    (found,) = torch.autograd.grad(y, x, torch.ones_like(y))
    wide = x.detach().double().requires_grad_()
    exact = F.conv_transpose2d(wide, weight.double(), None, 2, 1)
    (expected,) = torch.autograd.grad(exact, wide, torch.ones_like(exact))
    for ours, reference in ((y, exact), (found, expected)):
        assert relative_error(ours, reference) <= (1e-3 if precision == "tf32" else 8e-3)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_many_samples(layout, force):
    """Boxes of several samples, the last of which holds fewer."""
    force("boxes_sm90")
    x, weight, bias = layer("bf16", layout, batch=131, spatial=(3, 8))
    with torch.no_grad():
        actual = conv_transpose_act_norm(x, weight, bias, 2, 1)
        exact = CONVOLUTIONS[2](x.double(), weight.double(), bias.double(), 2, 1)
        eager = CONVOLUTIONS[2](x, weight, bias, 2, 1)
    assert relative_error(actual, exact) <= bound(relative_error(eager, exact), "bf16")
