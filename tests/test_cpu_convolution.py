"""The forms of a transposed convolution on processors: values, exactness, choice, refusals."""

from __future__ import annotations

import dataclasses

import pytest
import reference
import torch
from problems import (
    NARROW_VECTORS,
    NEEDS_WIDE_VECTORS,
    backward_problem,
    explained,
    geometry_of,
    problem,
)
from reference import (
    FLOOR,
    GRADIENT_FLOOR,
    LAYOUTS,
    assert_as_accurate_as_torch,
    channels_last,
    cotangent,
    relative_error,
)

from fusedconv import device as devices
from fusedconv.device import AVX512, KNOWN, PROCESSOR, processor
from fusedconv.functional import conv_transpose_act_norm
from fusedconv.kernels import onednn
from fusedconv.kernels.cpu.conv_gradients import WidenedGradients
from fusedconv.kernels.cpu.conv_gradients import kernels as gradient_kernels
from fusedconv.kernels.cpu.conv_transpose import FORMS
from fusedconv.kernels.cpu.conv_transpose import kernels as forward_kernels
from fusedconv.kernels.cpu.convolution import as_stored
from fusedconv.kernels.cpu.direct import kernels as direct_kernels
from fusedconv.kernels.cpu.shifted import ShiftedGradients
from fusedconv.kernels.cpu.shifted import kernels as shifted_kernels
from fusedconv.plan import BackwardTensors
from fusedconv.precision import precisions_of
from fusedconv.reference import conv_transpose, convolution_gradients
from fusedconv.selection import choose

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
#: Without instructions for 16 bits, with pairs and with tiles.
WIDE = dict.fromkeys(AVX512, True)
EMULATING = processor(WIDE)
PAIRS = processor({**WIDE, "avx512_bf16": True, "avx512_fp16": True})
TILES = processor({**WIDE, "amx_tile": True, "amx_bf16": True, "amx_fp16": True})

#: (shape, output channels, kernel, arguments of torch's convolution)
CASES = {
    "k3": ((2, 6, 5, 7), 4, 3, {"padding": 1}),
    "k3 of one sample": ((1, 6, 5, 7), 4, 3, {}),
    "k4 s2": ((2, 6, 5, 7), 4, 4, {"stride": 2, "padding": 1}),
    "k3 s2": ((3, 5, 4, 6), 7, 3, {"stride": 2, "padding": 1, "output_padding": 1}),
    "k2 s2": ((2, 6, 5, 7), 4, 2, {"stride": 2}),
    "k2x3 s2x3": ((2, 6, 5, 7), 4, (2, 3), {"stride": (2, 3)}),
    "k1": ((2, 6, 5, 7), 4, 1, {}),
    "dilation": ((2, 6, 5, 7), 4, 3, {"dilation": 2, "padding": 1}),
    "groups": ((2, 6, 5, 7), 2, 3, {"groups": 2}),
    "one channel": ((2, 1, 5, 7), 1, 2, {"stride": 2}),
    "line k3": ((2, 6, 40), 4, 3, {"padding": 1}),
    "line k4 s2": ((2, 6, 40), 4, 4, {"stride": 2, "padding": 1}),
    "line k2 s2": ((1, 6, 40), 4, 2, {"stride": 2}),
    "volume k3": ((2, 6, 3, 4, 5), 4, 3, {"padding": 1}),
    "volume k3 of one sample": ((1, 6, 3, 4, 5), 4, 3, {"padding": 1}),
    "volume k2 s2": ((1, 6, 3, 4, 5), 4, 2, {"stride": 2}),
    "volume k3 s2 of one sample": (
        (1, 24, 3, 4, 5),
        20,
        3,
        {"stride": 2, "padding": 1, "output_padding": 1},
    ),
    "k2 s3 of one sample": ((1, 16, 5, 7), 20, 2, {"stride": 3, "output_padding": 2}),
    "k3 s2 d3 of one sample": ((1, 16, 5, 7), 20, 3, {"stride": 2, "dilation": 3, "padding": 4}),
    "k2 cropped of one sample": ((1, 16, 5, 7), 20, 2, {"padding": 2}),
    "line k3 s2 of one sample": ((1, 16, 40), 20, 3, {"stride": 2, "padding": 1}),
    "volume k2x1x3 s2x1x3": ((2, 6, 3, 4, 5), 4, (2, 1, 3), {"stride": (2, 1, 3)}),
    "many channels": ((2, 192, 14, 14), 64, 3, {"padding": 1}),
    "many channels s2": ((2, 192, 14, 14), 64, 4, {"stride": 2, "padding": 1}),
    "many channels k2 s2": ((2, 192, 14, 14), 64, 2, {"stride": 2}),
}


def tensors(shape, out_channels, kernel, arguments, dtype, layout="nchw"):
    """Input, weight and bias; the weight keeps the output near 1."""
    axes = len(shape) - 2
    kernel = (kernel,) * axes if isinstance(kernel, int) else kernel
    generator = torch.Generator().manual_seed(5)

    def make(*size):
        return torch.randn(size, generator=generator, dtype=torch.float64)

    x = LAYOUTS[layout](make(*shape).to(dtype))
    weight = make(shape[1], out_channels, *kernel) / (shape[1] * 3) ** 0.5
    bias = make(out_channels * arguments.get("groups", 1))
    return x, weight.to(dtype), bias.to(dtype)


def problem_of(case, dtype, layout="nchw", **changes):
    """The problem of a case's convolution alone."""
    shape, out_channels, kernel, arguments = CASES[case] if isinstance(case, str) else case
    axes = len(shape) - 2
    kernel = (kernel,) * axes if isinstance(kernel, int) else kernel
    given = {
        name: (value,) * axes if isinstance(value, int) and name != "groups" else value
        for name, value in arguments.items()
    }
    outputs = out_channels * arguments.get("groups", 1)
    weight = torch.empty(shape[1], out_channels, *kernel, device="meta")
    fields = {"norm": None, "activation": "identity", **changes}
    return problem(
        dtype=dtype,
        output_dtype=dtype,
        precision=precisions_of(dtype)[-1],
        layout=layout,
        batch=shape[0],
        channels=shape[1],
        spatial=shape[2:],
        conv=geometry_of(weight, out_channels=outputs, **given),
        **fields,
    )


def torchs(case, x, weight, bias):
    shape, _, _, arguments = CASES[case]
    return reference.CONVOLUTIONS[len(shape) - 2](x, weight, bias, **arguments)


def test_float32_sums_in_one_chain_are_left_to_torchs_call():
    (form,) = [each for each in FORMS if each.name == "ordinary_convolution"]
    support = form.supports(problem_of("k3", torch.float32), processor({}))
    assert not support
    assert "more exactly without AVX-512" in support.reason
    assert form.supports(problem_of("k3", torch.bfloat16), processor({}))


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("dtype", "device"),
    [*((dtype, EMULATING) for dtype in DTYPES), (torch.bfloat16, PAIRS)],
    ids=["float32", "float16", "bfloat16", "bfloat16 in pairs"],
)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_form_is_as_exact_as_torchs_call(form, case, dtype, device, layout):
    what = problem_of(case, dtype, layout)
    # Values are this processor's.
    device = dataclasses.replace(device, vector_bytes=PROCESSOR.vector_bytes)
    support = form.supports(what, device)
    if not support:
        assert support.reason
        return
    x, weight, bias = tensors(*CASES[case], dtype, layout)
    convolution = form.compile(what, device)
    exact = torchs(case, x.double(), weight.double(), bias.double())
    for given in (bias, None):
        if given is None:
            exact = torchs(case, x.double(), weight.double(), None)
        result = convolution.run(x, weight, given)
        assert result.dtype == convolution.dtype
        assert as_stored(result, convolution.layout, result.dtype) is result
        if result.dtype != dtype:
            assert relative_error(result, exact) < 1e-6, "unrounded, from operands of 16 bits"
        else:
            assert_as_accurate_as_torch(result, torchs(case, x, weight, given), exact)


def test_every_form_serves_cases_of_every_dtype():
    """Else the test above says nothing of it."""
    for form in FORMS:
        for dtype in DTYPES:
            assert [c for c in CASES if form.supports(problem_of(c, dtype), EMULATING)], form.name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "kernel",
    [*gradient_kernels(), *direct_kernels(), *shifted_kernels()],
    ids=lambda kernel: kernel.name,
)
@pytest.mark.parametrize("grad_dtype", [None, torch.float32], ids=["narrow", "wide"])
def test_gradients_are_as_exact_as_torchs(kernel, case, dtype, layout, grad_dtype):
    """``grad_dtype`` is float32 behind an epilogue, whatever the problem's."""
    x, weight, bias = tensors(*CASES[case], dtype, layout)
    y = torchs(case, x, weight, bias)
    grad = cotangent(y).to(grad_dtype or dtype)
    grad = channels_last(grad) if layout == "nhwc" else grad
    forward = problem_of(case, dtype, layout, save=True)
    given = BackwardTensors(grad, x, weight, y, None, None, None, None)
    served = 0
    every = ("input", "weight", "bias")
    for wanted in (("input",), ("weight",), ("bias",), ("input", "weight"), every):
        if not set(wanted) <= kernel.computes:
            continue
        what = backward_problem(forward, *wanted, grad_dtype=grad.dtype)
        what = what.part(wanted)
        if not kernel.supports(what, EMULATING):
            continue
        served += 1
        found = kernel.compile(what, EMULATING).run(given)
        plain = convolution_gradients(what, given)
        wide = dataclasses.replace(forward, dtype=torch.float64)
        exact = convolution_gradients(
            dataclasses.replace(what, forward=wide),
            given._replace(grad_output=grad.double(), input=x.double(), weight=weight.double()),
        )
        for name in ("input", "weight", "bias"):
            actual = getattr(found, name)
            assert (actual is not None) == (name in wanted), name
            if actual is not None:
                expected = getattr(exact, name)
                narrow = getattr(plain, name).to(dtype)
                assert_as_accurate_as_torch(
                    actual.to(dtype), narrow, expected, GRADIENT_FLOOR[dtype]
                )
    tiles = case in ("k2 s2", "k1", "line k2 s2", "volume k2x1x3 s2x1x3")
    tiles = tiles and not isinstance(kernel, ShiftedGradients)
    if dtype != torch.float32 and (tiles or isinstance(kernel, WidenedGradients)):
        assert served, "16 bits are widened everywhere"


#: With long sums of few rows or columns, of input, weight and output.
LONG = {
    "positions, 4 channels": ((1, 8, 8, 16, 16), 4, 3, {"stride": 2, "padding": 1}),
    "positions, 11 channels": ((1, 8, 8, 16, 16), 11, 3, {"stride": 2, "padding": 1}),
    "positions, 16 channels": ((1, 8, 8, 16, 16), 16, 3, {"stride": 2, "padding": 1}),
    "positions of k1": ((1, 8, 64, 128), 8, 1, {}),
    "positions of k2 s2": ((1, 64, 128, 128), 1, 2, {"stride": 2}),
    "channels to one": ((1, 512, 32, 32), 1, 1, {}),
    "channels of three": ((1, 3, 32, 32), 512, 1, {}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", LONG)
def test_long_sums_are_as_exact_as_torchs(case, layout):
    """Of values of one sign, where a chain of additions is far off."""
    x, weight, _ = tensors(*LONG[case], torch.float32, layout)
    x, weight = x.abs(), weight.abs()
    forward = problem_of(LONG[case], torch.float32, layout, save=True)
    conv = forward.conv

    def given(dtype):
        values = x.to(dtype), weight.to(dtype)
        return BackwardTensors(grad.to(dtype), *values, y.to(dtype), None, None, None, None)

    y = conv_transpose(conv, x, weight, None)
    exact = conv_transpose(conv, x.double(), weight.double(), None)
    ran = []
    for form in FORMS:
        if form.supports(forward, EMULATING):
            ran.append(form.name)
            found = form.compile(forward, EMULATING).run(x, weight, None)
            assert_as_accurate_as_torch(found, y, exact)
    grad = torch.rand_like(y)
    wide = dataclasses.replace(forward, dtype=torch.float64)
    for kernel in (*gradient_kernels(), *direct_kernels(), *shifted_kernels()):
        for name in {"input", "weight"} & kernel.computes:
            what = backward_problem(forward, name).part((name,))
            if not kernel.supports(what, EMULATING):
                continue
            ran.append(f"{kernel.name} {name}")
            values = [
                getattr(gradients, name)
                for gradients in (
                    kernel.compile(what, EMULATING).run(given(torch.float32)),
                    convolution_gradients(what, given(torch.float32)),
                    convolution_gradients(
                        dataclasses.replace(what, forward=wide), given(torch.float64)
                    ),
                )
            ]
            assert_as_accurate_as_torch(*values)
    product = "shifted_products" if LONG[case][2] == 3 else "matrix_product"
    assert f"cpu_{product}_backward weight" in ran


@pytest.mark.parametrize(
    ("case", "refused"),
    [
        (((2, 8, 64, 64), 8, 1, {}), {"weight"}),
        (((2, 512, 8, 8), 1, 1, {}), {"forward"}),
        (((2, 3, 32, 32), 512, 1, {}), {"input", "weight"}),
        (((2, 32, 32, 32), 32, 1, {}), set()),
    ],
)
def test_long_sums_of_several_samples_are_torchs_channels_first(case, refused):
    """Where they would have to be copied."""
    (form,) = [each for each in FORMS if each.name == "matrix_product"]
    (kernel,) = [k for k in gradient_kernels() if k.name == "cpu_matrix_product_backward"]
    for layout in ("nchw", "nhwc"):
        forward = problem_of(case, torch.float32, layout, save=True)
        found = {"forward": form.supports(forward, EMULATING)}
        for name in ("input", "weight"):
            what = backward_problem(forward, name).part((name,))
            found[name] = kernel.supports(what, EMULATING)
        less = {name for name, each in found.items() if "less exact" in each.reason}
        assert less == (refused if layout == "nchw" else set())


def test_a_large_bias_rounds_no_sum_that_torch_keeps():
    case = ((2, 512, 16, 16), 32, 2, {"stride": 2})
    x, weight, _ = tensors(*case, torch.float32, "nhwc")
    bias = torch.full((32,), 1e4)
    (form,) = [each for each in FORMS if each.name == "matrix_product"]
    what = problem_of(case, torch.float32, "nhwc")
    found = form.compile(what, EMULATING).run(x, weight, bias)
    plain, exact = (
        conv_transpose(what.conv, *(each.to(dtype) for each in (x, weight, bias)))
        for dtype in (torch.float32, torch.float64)
    )
    assert_as_accurate_as_torch(found - 1e4, plain - 1e4, exact - 1e4)


@pytest.mark.parametrize("kernel", [kernel.name for kernel in forward_kernels()])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", ["act_norm", "norm_act"])
@pytest.mark.parametrize("norm", ["group", "layer", "affine", None])
def test_a_whole_layer_is_as_accurate_as_torchs(kernel, layout, dtype, norm, order, force):
    kernel_size, stride = {
        "cpu_conv_transpose": (3, 1),
        "cpu_channels_last": (4, 2),
        "cpu_ordinary_convolution": (3, 1),
        "cpu_matrix_product": (2, 2),
        "cpu_pixel_shuffle": (2, 2),
        "cpu_direct": (3, 2),
        "cpu_shifted_products": (3, 2),
    }[kernel]
    # torch leaves single samples to loops of its own.
    batch, channels = (1, 24) if kernel == "cpu_shifted_products" else (2, 8)
    shape, arguments = (batch, channels, 9, 11), {"stride": stride}
    outputs = 18 if kernel == "cpu_shifted_products" else 12
    x, weight, bias = tensors(shape, outputs, kernel_size, {}, dtype, layout)
    affine = [torch.linspace(*ends, outputs).to(dtype) for ends in ((0.5, 2), (-1, 1))]
    extra = {"activation": "silu", "order": order, "norm": norm}
    if norm is not None:
        extra.update(norm_weight=affine[0], norm_bias=affine[1])
    if norm == "group":
        extra["num_groups"] = 3

    def whole(function, cast, x, weight, bias):
        cast_extra = {n: cast(v) if isinstance(v, torch.Tensor) else v for n, v in extra.items()}
        leaves = [cast(t).detach().requires_grad_() for t in (x, weight, bias)]
        with torch.no_grad():
            alone = function(*leaves, **arguments, **cast_extra)
        y = function(*leaves, **arguments, **cast_extra)
        # Without gradients the stages overwrite the convolution's output.
        assert torch.equal(alone, y)
        y.backward(cotangent(y))
        return [y.detach(), *(leaf.grad for leaf in leaves)]

    call = (x, weight, bias)
    exact = whole(reference.conv_transpose_act_norm, torch.Tensor.double, *call)
    plain = whole(reference.conv_transpose_act_norm, torch.Tensor.clone, *call)
    widened = onednn.flops_rate(PROCESSOR, dtype) < PROCESSOR.fp32_flops
    if NARROW_VECTORS and kernel == "cpu_ordinary_convolution" and dtype == torch.float32:
        pytest.skip(NEEDS_WIDE_VECTORS)
    if layout == "nhwc" and kernel == "cpu_channels_last" and not widened:
        pytest.skip("torch's own call is this form")
    if kernel == "cpu_shifted_products" and dtype != torch.float32 and not widened:
        pytest.skip("the processor multiplies 16 bits")
    force(kernel)
    (explanation,) = explained(conv_transpose_act_norm, *call, **arguments, **extra)
    assert explanation.kernel == kernel
    # An activation alone ends the products in float32.
    alone = kernel == "cpu_pixel_shuffle" and norm is None and dtype == torch.float32
    least = 1 if alone and layout != "strided" else 2
    assert len(explanation.steps) == len(set(explanation.steps)) >= least
    ours = whole(conv_transpose_act_norm, torch.Tensor.clone, *call)
    for number, (actual, torch_result, expected) in enumerate(zip(ours, plain, exact, strict=True)):
        floor = GRADIENT_FLOOR[dtype] if number else FLOOR[dtype]
        assert_as_accurate_as_torch(actual, torch_result, expected, floor)


# ---- what they do not serve ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "case", "dtype", "layout", "reason"),
    [
        ("cpu_channels_last", "k3", torch.float32, "nchw", "less exact"),
        ("cpu_channels_last", "k4 s2", torch.float32, "nhwc", "this form already"),
        ("cpu_channels_last", "line k3", torch.float32, "nhwc", "less exact"),
        ("cpu_channels_last", "k3", torch.float64, "nchw", "less exact|float64"),
        ("cpu_channels_last", "k4 s2", torch.float64, "nchw", "float64"),
        ("cpu_ordinary_convolution", "k4 s2", torch.float32, "nchw", "stride"),
        ("cpu_ordinary_convolution", "groups", torch.float32, "nchw", "groups are 2"),
        ("cpu_ordinary_convolution", "k3 of one sample", torch.float32, "nchw", "own loops"),
        ("cpu_ordinary_convolution", "k3", torch.float64, "nchw", "float64"),
        ("cpu_matrix_product", "k3", torch.float32, "nchw", "overlap or leave gaps"),
        ("cpu_matrix_product", "groups", torch.float32, "nchw", "groups are 2"),
        ("cpu_matrix_product", "k2 s2", torch.float64, "nchw", "float64"),
        ("cpu_shifted_products", "many channels", torch.float32, "nchw", "oneDNN computes it"),
        ("cpu_shifted_products", "k3 of one sample", torch.float32, "nchw", "below 16"),
        ("cpu_shifted_products", "line k3 s2 of one sample", torch.float64, "nchw", "float64"),
    ],
)
def test_refusals_of_forms(kernel, case, dtype, layout, reason):
    (one,) = [each for each in forward_kernels() if each.name == kernel]
    support = one.supports(problem_of(case, dtype, layout), EMULATING)
    assert not support
    assert any(each in support.reason for each in reason.split("|")), support.reason


@pytest.mark.parametrize("change", [{"padding": 1}, {"dilation": 2}, {"output_padding": 1}])
def test_a_matrix_product_wants_whole_tiles_side_by_side(change):
    (form,) = [each for each in FORMS if each.name == "matrix_product"]
    case = ((2, 6, 5, 7), 4, 2, {"stride": 2})
    assert form.supports(problem_of(case, torch.float32), EMULATING)
    changed = (*case[:3], {**case[3], **change})
    assert not form.supports(problem_of(changed, torch.float32), EMULATING)


def test_an_ordinary_convolution_has_the_same_padding_on_both_sides():
    (form,) = [each for each in FORMS if each.name == "ordinary_convolution"]
    case = ((2, 6, 5, 7), 4, 3, {"dilation": 2, "output_padding": 1})
    support = form.supports(problem_of(case, torch.float32), EMULATING)
    assert "output padding" in support.reason


@pytest.mark.parametrize("kernel", forward_kernels(), ids=lambda kernel: kernel.name)
def test_kernels_refuse_other_devices_no_convolution_and_no_elements(kernel):
    tiled = problem_of("k2 s2", torch.bfloat16)
    assert "input is on cuda" in kernel.supports(tiled, KNOWN[90]).reason
    assert "no convolution" in kernel.supports(problem(conv=None), EMULATING).reason
    empty = dataclasses.replace(problem_of("k1", torch.bfloat16), batch=0)
    assert "empty" in kernel.supports(empty, EMULATING).reason


@pytest.mark.parametrize(
    ("case", "dtype", "wanted", "reasons"),
    [
        ("k2 s2", torch.float32, "input", ("this form already", "less exact")),
        ("k2 s2", torch.float64, "input", ("float64", "float64")),
        ("k3", torch.bfloat16, "input", ("", "overlap or leave gaps")),
    ],
)
def test_refusals_of_gradients(case, dtype, wanted, reasons):
    what = backward_problem(problem_of(case, dtype, save=True), wanted).part((wanted,))
    kernels = [kernel for kernel in gradient_kernels() if wanted in kernel.computes]
    for kernel, reason in zip(kernels, reasons, strict=True):
        support = kernel.supports(what, EMULATING)
        assert bool(support) == (not reason)
        assert reason in support.reason
        assert "input is on cuda" in kernel.supports(what, KNOWN[90]).reason


@pytest.mark.parametrize(
    ("case", "layout", "dtype", "reason"),
    [
        # These ended in garbage, or beyond memory.
        (((2, 16, 3, 4, 8), 40, (4, 3, 2), {"stride": (2, 1, 1), "padding": (3, 0, 1)}), "nhwc",
         torch.float16, "padding is 3 of 4 taps"),
        (((4, 6, 2), 1, 3, {"stride": 2, "padding": 2, "groups": 3}), "nhwc", torch.bfloat16,
         "padding is 2 of 3 taps"),
        (((2, 8, 1), 16, 4, {"stride": 3, "padding": 1}), "nhwc", torch.bfloat16,
         "tap 0 of 4 meets no output"),
        (((2, 8, 5), 16, 3, {"padding": 1, "groups": 2}), "nhwc", torch.float32,
         "sums of groups are less exact"),
        (((2, 8, 5), 16, 4, {"stride": 2, "padding": 1}), "nhwc", torch.bfloat16, ""),
        (((2, 8, 5), 16, 3, {"padding": 2, "dilation": 2}), "nhwc", torch.bfloat16, ""),
    ],
)  # fmt: skip
def test_gradients_that_onednn_gets_wrong_are_left_to_torchs_loops(case, layout, dtype, reason):
    forward = problem_of(case, dtype, layout, save=True)
    device = PAIRS if dtype == torch.bfloat16 else EMULATING
    for name in ("weight", "bias"):
        what = backward_problem(forward, name).part((name,))
        if name == "bias" and dtype == torch.float32:
            continue
        support = WidenedGradients().supports(what, device)
        assert bool(support) == (not reason) and reason in support.reason


# ---- the choice ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "outputs", "kernel", "arguments", "layout", "expected"),
    [
        ((2, 64, 128, 128), 64, 3, {}, "nchw", "cpu_ordinary_convolution"),
        ((2, 64, 128, 128), 64, 3, {}, "nhwc", "torch"),
        ((1, 512, 14, 14), 256, 3, {}, "nchw", "cpu_conv_transpose"),
        ((2, 64, 64, 64), 64, 1, {}, "nchw", "cpu_matrix_product"),
        ((2, 64, 64, 64), 64, 4, {"stride": 2, "padding": 1}, "nhwc", "torch"),
        ((4, 64, 4096), 64, 3, {"padding": 1}, "nchw", "cpu_ordinary_convolution"),
        ((4, 64, 4096), 64, 3, {"padding": 1}, "nhwc", "cpu_ordinary_convolution"),
        ((4, 64, 2048), 64, 4, {"stride": 2, "padding": 1}, "nhwc", "cpu_channels_last"),
        ((1, 64, 16, 16, 16), 32, 2, {"stride": 2}, "nhwc", "cpu_pixel_shuffle"),
        ((8, 256, 32, 32), 128, 2, {"stride": 2}, "nchw", "cpu_pixel_shuffle"),
        ((8, 256, 32, 32), 128, 2, {"stride": 2}, "nhwc", "torch"),
        ((1, 32, 16, 32, 32), 32, 3, {"padding": 1}, "nchw", "cpu_shifted_products"),
        ((1, 512, 6, 6), 512, 3, {"padding": 1}, "nchw", "torch"),
        ((1, 768, 3, 3, 3), 384, 2, {"stride": 2}, "nchw", "torch"),
        ((1, 2, 3, 3), 2, 3, {}, "nchw", "torch"),
    ],
)
def test_forms_are_chosen_where_they_were_measured_to_be_faster(
    shape, outputs, kernel, arguments, layout, expected
):
    """The convolution alone in float32, two cores with AVX-512."""
    what = problem_of((shape, outputs, kernel, arguments), torch.float32, layout)
    assert choose(what, EMULATING).chosen[0][1].kernel.name == expected


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_16_bits_run_in_float32_unless_the_processor_multiplies_them(dtype, layout):
    what = problem_of(((2, 64, 64, 64), 64, 4, {"stride": 2, "padding": 1}), dtype, layout)
    assert choose(what, EMULATING).chosen[0][1].kernel.name == "cpu_channels_last"
    gradients = backward_problem(dataclasses.replace(what, save=True))

    def chosen_on(device):
        return {
            part: candidate.kernel.name
            for piece, candidate in choose(gradients, device).chosen
            for part in piece.parts
        }

    names = chosen_on(EMULATING)
    assert names["input"] == names["weight"] == "cpu_convolution_backward"
    if layout == "nhwc":
        assert names["bias"] == "cpu_bias_backward"
    for device in (PAIRS, TILES):
        assert onednn.flops_rate(device, dtype) > device.fp32_flops
        kernel = choose(what, device).chosen[0][1].kernel
        if layout == "nhwc":
            assert kernel.name == "torch"
        assert not any("float32" in step for step in kernel.compile(what, device).steps)
        names = chosen_on(device)
        assert names["input"] == names["weight"] == "torch_convolution_backward"


def test_a_processors_record_follows_from_its_instructions():
    assert EMULATING.bf16_flops < EMULATING.fp32_flops < PAIRS.bf16_flops < TILES.bf16_flops
    assert EMULATING.fp16_flops < EMULATING.fp32_flops < PAIRS.fp16_flops < TILES.fp16_flops
    one = processor({"avx512_bf16": True})
    assert one.fp16_flops == EMULATING.fp16_flops
    assert one.bf16_flops == PAIRS.bf16_flops
    assert processor({**WIDE, "amx_bf16": True}) == EMULATING, "tiles are not enabled"
    narrow = processor({name: name != AVX512[-1] for name in AVX512})
    assert narrow == processor({}) == dataclasses.replace(EMULATING, vector_bytes=0)


def test_this_processors_record_with_and_without_torchs_query(monkeypatch):
    if hasattr(torch.cpu, "get_capabilities"):
        named = {"cpu_name": devices.processor_name(), **torch.cpu.get_capabilities()}
        assert processor(named) == PROCESSOR
        monkeypatch.delattr(torch.cpu, "get_capabilities")
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    without = dataclasses.replace(
        EMULATING if wide else processor({}), product_flops=PROCESSOR.product_flops
    )
    assert processor(devices._capabilities()) == without


def test_float32_products_are_slow_where_their_library_has_no_kernels_for_the_processor(
    monkeypatch,
):
    for name, slow in (("AMD EPYC", True), ("Intel(R) Xeon(R)", False)):
        monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
        device = processor({**WIDE, "cpu_name": name})
        assert (device.product_flops < device.fp32_flops) is slow
        assert processor({"cpu_name": name}).product_flops == device.fp32_flops, "no AVX-512"
        monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
        assert processor({**WIDE, "cpu_name": name}).product_flops == device.fp32_flops


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_weights_gradient_is_by_products_where_these_are_as_fast_as_convolutions(layout):
    """Of upsampling by filters as large as their stride."""
    forward = problem_of(((1, 128, 32, 32, 32), 64, 2, {"stride": 2}), torch.float32, layout)
    asked = backward_problem(forward, "input", "weight")
    for name, kernel in (
        ("Intel(R) Xeon(R)", "cpu_matrix_product_backward"),
        ("AMD EPYC", "torch_convolution_backward"),
    ):
        chosen = choose(asked, processor({**WIDE, "cpu_name": name})).chosen
        (found,) = [each.kernel.name for piece, each in chosen if "weight" in piece.parts]
        assert found == kernel


@pytest.mark.parametrize("dtype", DTYPES[:1] + DTYPES[2:], ids=str)
@pytest.mark.parametrize("kernel", [1, 2, 3, 4])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    "shape", [(1, 8, 640), (1, 8, 2561), (2, 8, 64), (1, 80, 16, 16), (1, 81, 16, 16),
              (3, 4, 6, 6), (1, 80, 16, 16, 2), (1, 82, 16, 16, 2), (1, 4, 2, 64, 64)],
    ids=str,
)  # fmt: skip
def test_which_convolutions_torch_leaves_to_its_own_loops(shape, kernel, groups, dtype):
    if shape[1] % groups:
        shape = (shape[0], shape[1] + 1, *shape[2:])
    what = problem_of((shape, 4, kernel, {"groups": groups}), dtype)
    axes = len(shape) - 2
    x = torch.empty(shape, dtype=dtype)
    weight = torch.empty(shape[1], 4, *(kernel,) * axes, dtype=dtype)
    arguments = [1] * axes, [0] * axes, [1] * axes, True, [0] * axes, groups
    backend = torch._C._select_conv_backend(x, weight, None, *arguments)
    assert onednn.in_plain_loops(what, PROCESSOR, dtype) == ("Slow" in str(backend))
