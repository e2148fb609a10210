"""The convolution's gradients on Hopper: what the kernels serve, how the sums are cut,
and the steps of plans. No GPU."""

from __future__ import annotations

import dataclasses
import math
import random

import problems
import pytest
import torch
from problems import backward_problem, geometry_of, problem
from reference import LAYOUTS

import fusedconv
from fusedconv import _C
from fusedconv.device import KNOWN
from fusedconv.kernels.cuda import sm90_gradients
from fusedconv.kernels.cuda.convolution import weight_gradient
from fusedconv.kernels.cuda.phase_planes import input_convolution
from fusedconv.kernels.cuda.program import INPUT, OUTPUT
from fusedconv.kernels.cuda.sm90_gradients import (
    CONV_INPUT,
    GRAD_WEIGHT,
    SHORTEST_STRICT_POSITIONS,
)
from fusedconv.layout import dense_strides, layout_of, lies_in_lines, line_strides
from fusedconv.plan import BackwardTensors
from fusedconv.problem import ForwardProblem
from fusedconv.registry import registry
from fusedconv.selection import choose, plan_for
from fusedconv.support import Support

HAS_ROWS = "sm90" in fusedconv.build.get("families", ())
pytestmark = pytest.mark.skipif(
    not HAS_ROWS, reason="fusedconv was built without kernels for compute capability 9.0"
)

H200 = KNOWN[90]
BLOCK, HEADER = 64, 1024
DTYPES = {"tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def rows() -> list:
    return _C.sm90.wgrad.rows() if HAS_ROWS else []


def element_bytes(row) -> int:
    return 4 if row.math.name.startswith("tf32") else 2


def parts(row) -> int:
    """Of an operand's values."""
    return 2 if row.math.name == "tf32x3" else 1


def config(row, *, batch=2, c=64, k=64, spatial=(1, 32, 64), taps=(1, 3), padding=(0, 0, 0), **kw):
    """``taps`` along depth and width: the row's own number lies between."""
    depth, columns = taps
    taps = (depth, row.filter_rows, columns)
    output = tuple(n + t - 1 - 2 * p for n, t, p in zip(spatial, taps, padding, strict=True))
    return _C.sm90.wgrad.Config(
        row,
        problem=_C.ConvProblem(
            c=c,
            k=k,
            input=spatial,
            output=output,
            taps=taps,
            lower_padding=[t - 1 - p for t, p in zip(taps, padding, strict=True)],
            dilation=kw.pop("dilation", (1, 1, 1)),
        ),
        batch=batch,
        layout=kw.pop("layout", _C.Layout.nchw),
        device=kw.pop("device", H200).compiled,
    )


def kernel_named(name: str):
    (kernel,) = (kernel for kernel in registry().kernels() if kernel.name == name)
    return kernel


def system_1(precision: str, **changes) -> ForwardProblem:
    return problems.system_1(precision, **{"save": True, **changes})


def test_rows_are_named_by_math_and_filter_rows():
    names = [row.name for row in rows()]
    assert len(set(names)) == len(names) == 12
    for row in rows():
        assert row.name == f"sm90_wgrad_{row.math.name}_{row.filter_rows}"


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.name)
def test_stages_hold_what_the_taps_read(row):
    generator = random.Random(row.name)
    size, halved = element_bytes(row), 0
    for _ in range(100):
        taps = generator.randint(1, 3), generator.randint(1, 3)
        padding = (
            generator.randint(0, taps[0] - 1),
            generator.randint(0, row.filter_rows - 1),
            generator.randint(0, taps[1] - 1),
        )
        spatial = tuple(generator.randint(3, 99) for _ in range(3))
        batch = generator.randint(1, 40)
        made = config(
            row,
            batch=batch,
            c=generator.choice((1, 64, 65, 300)),
            k=generator.choice((1, 64, 200)),
            spatial=spatial,
            taps=taps,
            padding=padding,
        )
        assert made.support
        assert made.halves == (1 if spatial[2] * size <= 64 else 2)
        halved += made.halves == 1
        strip = 64 * made.halves // size
        assert made.strips == math.ceil(spatial[2] / strip)
        # The box begins at 16 bytes, before the first column of any tap, and holds the last one's.
        assert made.lead * size % 16 == 0
        assert made.lead >= padding[2]
        assert made.pitch_bytes % 32 == 16
        assert made.pitch_bytes // size >= made.lead - padding[2] + strip + taps[1] - 1
        # With one column, groups of output channels have a warpgroup each.
        assert made.groups == 1 or taps[1] == 1
        assert 1 <= made.groups <= 3
        line = parts(row) * BLOCK * 64 * made.halves
        assert made.stage_bytes == line + BLOCK * made.groups * made.pitch_bytes
        # Lines of all filter rows lie side by side wherever they begin.
        held = made.stages * made.stage_bytes + (row.filter_rows - 1) * line
        assert HEADER + held == made.shared_bytes <= H200.shared_bytes
        assert made.stages >= 4
        lines = made.strips * (spatial[1] + row.filter_rows - 1) * spatial[0]
        assert made.steps == batch * lines
        assert 1 <= made.splits <= max(1, made.steps)
        filter_bytes = 4 * BLOCK * BLOCK * row.filter_rows * taps[1] * made.groups
        assert made.partial_bytes == made.tasks * made.splits * filter_bytes
    assert halved > 5


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.name)
def test_the_number_of_parts_is_the_same_on_every_device(row):
    small = dataclasses.replace(H200, multiprocessors=7)
    for batch in (1, 3, 128):
        of_h200, of_small = (config(row, batch=batch, device=d).splits for d in (H200, small))
        assert of_h200 == of_small


@pytest.mark.parametrize(
    ("k", "groups", "tasks"), [(64, 1, 1), (65, 2, 1), (256, 2, 2), (700, 3, 4)]
)
def test_one_column_shares_the_input_among_groups_of_channels(k, groups, tasks):
    row = next(row for row in rows() if row.name == "sm90_wgrad_bf16_1")
    made = config(row, k=k, taps=(1, 1))
    assert (made.groups, made.tasks) == (groups, tasks)
    assert config(row, k=k, taps=(1, 2)).groups == 1


def test_parts_fill_the_device_and_no_more():
    row = next(row for row in rows() if row.name == "sm90_wgrad_tf32_3")
    assert config(row, batch=128, spatial=(1, 256, 256)).splits == 132
    many = config(row, batch=128, c=1024, k=1024, spatial=(1, 16, 32))
    assert many.tasks == 256
    assert many.splits <= 2
    assert config(row, batch=1, spatial=(1, 1, 32)).splits == 1


def test_refusals_say_why():
    row = next(row for row in rows() if row.name == "sm90_wgrad_bf16_3")
    assert config(row).support
    assert "reads NCHW" in config(row, layout=_C.Layout.nhwc).support.reason
    assert "compute capability 9.0" in config(row, device=KNOWN[80]).support.reason
    assert "up to 3 columns, not 4" in config(row, taps=(1, 4)).support.reason
    assert "dilation is 2x1" in config(row, dilation=(1, 2, 1)).support.reason
    assert "padding of its columns is 3" in config(row, padding=(0, 0, 3)).support.reason
    other = next(row for row in rows() if row.name == "sm90_wgrad_bf16_2")
    rows_of_three = _C.sm90.wgrad.Config(
        other,
        problem=_C.ConvProblem(
            c=1,
            k=1,
            input=(1, 8, 8),
            output=(1, 10, 10),
            taps=(1, 3, 3),
            lower_padding=(0, 2, 2),
            dilation=(1, 1, 1),
        ),
        batch=1,
        layout=_C.Layout.nchw,
        device=H200.compiled,
    )
    assert rows_of_three.support.reason == "a filter of 2 rows, not 3"


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_the_input_gradient_is_a_convolution_of_the_filter_read_backwards(axes):
    generator = random.Random(axes)
    operator = getattr(torch.nn.functional, f"conv_transpose{axes}d")
    for _ in range(20):
        kernel = tuple(generator.randint(1, 3) for _ in range(axes))
        padding = tuple(generator.randint(0, size - 1) for size in kernel)
        spatial = tuple(generator.randint(3, 6) for _ in range(axes))
        weight = torch.randn(3, 2, *kernel, dtype=torch.float64)
        x = torch.randn(2, 3, *spatial, dtype=torch.float64, requires_grad=True)
        output = operator(x, weight, padding=padding)
        grad = torch.randn_like(output)
        (expected,) = torch.autograd.grad(output, x, grad)
        forward = problem(
            batch=2,
            channels=3,
            spatial=spatial,
            conv=geometry_of(weight, padding=padding),
        )
        convolution = input_convolution(forward)
        assert isinstance(convolution, ForwardProblem)
        conv = convolution.conv
        assert conv is not None
        assert convolution.output_shape == x.shape
        assert convolution.input_shape == grad.shape
        # Negative strides from the last tap, as torch has none: the taps' offsets one by one.
        taps = torch.cartesian_prod(*map(torch.arange, kernel)).reshape(-1, axes)
        last = sum((n - 1) * s for n, s in zip(kernel, weight.stride()[2:], strict=True))
        offsets = last + (taps * torch.tensor(conv.weight_strides[2:])).sum(1)
        channels = (
            torch.arange(2)[:, None] * conv.weight_strides[0]
            + torch.arange(3) * conv.weight_strides[1]
        )
        backwards = weight.reshape(-1)[channels[..., None] + offsets].reshape(2, 3, *kernel)
        actual = operator(grad, backwards, padding=conv.padding)
        torch.testing.assert_close(actual, expected)


def test_what_has_no_such_convolution_is_refused():
    cropped = problem(conv=geometry_of(torch.empty(4, 6, 2, 2), padding=(2, 0)))
    support = input_convolution(cropped)
    assert isinstance(support, Support)
    assert "exceeds" in support.reason


@pytest.mark.parametrize("precision", ["tf32", "fp32", "fp16", "bf16"])
def test_system_1_has_all_its_gradients_here(precision):
    choice = choose(backward_problem(system_1(precision)), H200)
    names = [(problem.parts, candidate.kernel.name) for problem, candidate in choice.chosen]
    (first, norm), (second, conv) = names
    assert first == ("epilogue", "bias")
    assert norm.startswith("groupnorm_backward_")
    assert second == ("input", "weight")
    math = {"tf32": "tf32", "fp32": "tf32x3", "fp16": "f16", "bf16": "bf16"}[precision]
    assert conv == f"sm90_gradients_{math}"


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_the_gradient_of_the_normalisation_comes_with_padded_lines(precision):
    pitch = {"tf32": 260, "bf16": 264}[precision]
    plan = plan_for(backward_problem(system_1(precision)), H200)
    (written,) = (step for step in plan.steps if step.startswith("gradient through"))
    assert written.endswith(f", lines of 258 padded to {pitch}, + sums by channel")
    assert not any(step.startswith("pad ") for step in plan.steps)
    # Lines of the input are whole 16 bytes as they lie.
    assert plan.steps[-2].startswith(f"sm90_wgrad_{precision}_3 (weight gradient, ")
    assert plan.steps[-1] == "add the weight gradient's parts"


def test_a_dense_gradient_is_padded_by_a_step_of_its_own():
    bare = system_1("tf32", epilogue=(), spatial=(30, 33))
    asked = backward_problem(bare, "input", "weight")
    kernel = kernel_named("sm90_gradients_tf32")
    assert kernel.supports(asked, H200)
    steps = kernel.compile(asked, H200).steps
    assert "pad the output's gradient, lines of 35 to 36" in steps
    assert "pad the input, lines of 33 to 36" in steps
    aligned = backward_problem(
        system_1("tf32", epilogue=(), conv=geometry_of(torch.empty(64, 64, 3, 3), padding=(1, 1))),
        "input",
        "weight",
    )
    assert not any(step.startswith("pad ") for step in kernel.compile(aligned, H200).steps)
    apart = dataclasses.replace(aligned, aligned=False)
    padded = [step for step in kernel.compile(apart, H200).steps if step.startswith("pad ")]
    assert len(padded) == 2


def test_the_bias_alone_needs_one_pass():
    asked = backward_problem(system_1("bf16")).part(["bias"])
    steps = kernel_named("sm90_gradients_bf16").compile(asked, H200).steps
    assert steps == ("sums of the output's gradient by channel", "gradient of bias")


def test_strict_fp32_takes_the_steps_of_tf32():
    """Operands are split where they are multiplied: neither steps nor scratch of its own."""
    programs = {}
    for name, precision in (("tf32x3", "fp32"), ("tf32", "tf32")):
        asked = backward_problem(system_1(precision, epilogue=()), "weight")
        kernel = kernel_named(f"sm90_gradients_{name}")
        assert kernel.supports(asked, H200)
        steps = kernel.compile(asked, H200).steps
        assert steps[-2:] == (
            f"sm90_wgrad_{name}_3 (weight gradient, 132 parts)",
            "add the weight gradient's parts",
        )
        programs[name] = kernel.build(asked, H200, "lines")
    assert programs["tf32x3"].workspace_bytes == programs["tf32"].workspace_bytes


def test_strict_fp32_costs_less_than_three_products_of_tf32():
    asked = {
        precision: backward_problem(system_1(precision, epilogue=()), "weight")
        for precision in ("tf32", "fp32")
    }
    tf32 = kernel_named("sm90_gradients_tf32").cost(asked["tf32"], H200)
    strict = kernel_named("sm90_gradients_tf32x3").cost(asked["fp32"], H200)
    assert 1.5 * tf32 < strict < 3 * tf32


def test_a_strict_gradient_of_few_products_is_refused():
    kernel = kernel_named("sm90_gradients_tf32x3")
    few = system_1("fp32", batch=1, spatial=(7, 73), epilogue=())
    support = kernel.supports(backward_problem(few, "weight"), H200)
    assert "sums 511 products" in support.reason
    assert f"from {SHORTEST_STRICT_POSITIONS} on" in support.reason
    # The input's gradient sums channels and taps.
    assert kernel.supports(backward_problem(few, "input"), H200)
    enough = dataclasses.replace(few, spatial=(8, 64))
    assert kernel.supports(backward_problem(enough, "weight"), H200)
    # TF32 is not held to that.
    tf32 = dataclasses.replace(few, precision="tf32")
    asked = backward_problem(tf32, "weight")
    assert kernel_named("sm90_gradients_tf32").supports(asked, H200)
    assert choose(backward_problem(few, "weight"), H200)


@pytest.mark.parametrize(
    ("shape", "taps", "measured"),
    [
        ((128, 64, 64, 256, 256), (3, 3), 4.31),
        ((16, 64, 128, 32, 32, 32), (3, 3, 3), 1.65),
        ((32, 128, 128, 56, 56), (3, 3), 0.267),
        ((32, 256, 256, 28, 28), (3, 3), 0.271),
        ((64, 256, 256, 14, 14), (3, 3), 0.157),
        ((16, 64, 64, 128, 128), (2, 3), 0.113),
    ],
)
def test_the_estimate_of_strict_fp32_is_what_was_measured(shape, taps, measured):
    """Milliseconds of the products on an H100, where they and not the memory bound them."""
    batch, channels, out, *spatial = shape
    asked = backward_problem(
        system_1(
            "fp32",
            epilogue=(),
            batch=batch,
            channels=channels,
            spatial=tuple(spatial),
            conv=geometry_of(torch.empty(channels, out, *taps)),
        ),
        "weight",
    )
    found = kernel_named("sm90_gradients_tf32x3")._weight.milliseconds(asked.forward, H200)
    is_system = batch * math.prod(spatial) >= 1 << 19
    assert found == pytest.approx(measured, rel=0.1 if is_system else 0.2)


@pytest.mark.parametrize("draw", [torch.randn, torch.rand], ids=["randn", "rand"])
def test_three_products_of_tf32_are_as_exact_as_float32(draw):
    """What the steps compute, in float64 behind each rounding: the product that is left out is
    below what float32 keeps."""

    def big(x: torch.Tensor) -> torch.Tensor:
        bits = x.view(torch.int32)
        return ((bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFF).view(torch.float32)

    torch.manual_seed(0)
    x, grad = draw(16, 4096), torch.randn(4096, 16)
    exact = x.double() @ grad.double()
    small_x, small_grad = x - big(x), grad - big(grad)
    pairs = ((small_x, grad), (x, small_grad), (x, grad))
    found = sum(big(a).double() @ big(b).double() for a, b in pairs)
    assert (found - exact).norm() / exact.norm() < 1e-7
    alone = big(x).double() @ big(grad).double()
    assert (alone - exact).norm() / exact.norm() > 1e-5


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"conv": geometry_of(torch.empty(64, 64, 5, 3))}, "not 5"),
        ({"conv": geometry_of(torch.empty(64, 64, 3, 8), stride=(1, 2))}, "not 4"),
        ({"conv": geometry_of(torch.empty(64, 64, 3, 3), groups=2)}, "groups is 2"),
        ({"batch": 0}, "empty"),
        ({"precision": "fp32"}, "fp32 is asked for"),
    ],
    ids=str,
)
def test_what_is_not_served_says_why(changes, text):
    asked = backward_problem(dataclasses.replace(system_1("tf32"), **changes), "weight")
    support = kernel_named("sm90_gradients_tf32").supports(asked, H200)
    assert not support
    assert text in support.reason
    assert choose(asked, H200)


@pytest.mark.parametrize("channels", [(64, 32), (6, 10)], ids=str)
@pytest.mark.parametrize("kind", ["nchw", "nhwc", "expanded", "lines"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("weight_layout", ["nchw", "nhwc", "strided"])
def test_a_program_gets_what_it_was_built_for(layout, weight_layout, kind, channels, monkeypatch):
    """A run with the program's work done by torch, from what the program is given."""
    inputs, outputs = channels
    form = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    x = torch.randn(2, inputs, 5, 5).contiguous(memory_format=form).requires_grad_()
    weight = LAYOUTS[weight_layout](torch.randn(inputs, outputs, 3, 3)).requires_grad_()
    output = torch.nn.functional.conv_transpose2d(x, weight)
    grad = torch.randn_like(output).contiguous()
    if kind == "nhwc":
        grad = grad.contiguous(memory_format=torch.channels_last)
    elif kind == "expanded":
        grad = grad[..., :1].expand_as(grad)
    elif kind == "lines":
        padded = torch.empty_strided(grad.shape, line_strides(grad.shape, grad.dtype))
        grad = padded.copy_(grad)
    wanted = torch.autograd.grad(output, (x, weight), grad)
    asked = backward_problem(
        problem(
            batch=2,
            channels=inputs,
            spatial=(5, 5),
            layout=layout,
            precision="tf32",
            conv=geometry_of(weight),
        ),
        "input",
        "weight",
        grad_layout=layout_of(grad.shape, grad.stride()),
    )
    plan = kernel_named("sm90_gradients_tf32").compile(asked, H200)
    whole = {name: size % 4 == 0 for name, size in (("x", inputs), ("grad", outputs))}

    def run(program, device, slots):
        (built_for,) = [form for form, built in plan._programs.items() if built is program]
        grad, given, result = slots[INPUT], slots[CONV_INPUT], slots[OUTPUT]
        copied = kind == "expanded" or (kind == "nhwc" and not whole["grad"])
        assert built_for == ("nchw" if copied else kind)
        in_lines = lies_in_lines(grad, line_strides(grad.shape, grad.dtype))
        assert in_lines == (built_for == "lines")
        if built_for != "lines":
            assert layout_of(grad.shape, grad.stride()) == built_for
        expected = layout if whole["x"] else "nchw"
        for tensor in (given, result):
            assert layout_of(tensor.shape, tensor.stride()) == expected
        leaves = given.detach().requires_grad_(), weight
        found = torch.autograd.grad(torch.nn.functional.conv_transpose2d(*leaves), leaves, grad)
        result.copy_(found[0])
        gradient = slots[GRAD_WEIGHT]
        written = "nhwc" if weight_layout == "nhwc" else "nchw"
        assert gradient.stride() == dense_strides(gradient.shape, written)
        gradient.copy_(found[1])

    def empty(shape, strides, dtype):
        return torch.empty_strided(shape, strides, dtype=dtype)

    monkeypatch.setattr(sm90_gradients, "run_program", run)
    # The plan's own asks for the current CUDA device.
    monkeypatch.setattr(sm90_gradients, "allocator", lambda device: empty)
    tensors = BackwardTensors(grad, x.detach(), weight.detach(), *6 * (None,))
    found = plan.run(tensors)
    torch.testing.assert_close((found.input, found.weight), wanted)
    assert layout_of(found.input.shape, found.input.stride()) == layout


def test_the_step_that_writes_the_weights_gradient_knows_its_extents():
    (row,) = (row for row in rows() if row.name == "sm90_wgrad_tf32_3")
    made, program = config(row), _C.Program(0, 2, 0)
    operands = {"partials": program.scratch(0, made.partial_bytes)}
    operands["grad_weight"] = program.tensor(0, 0)
    conv = geometry_of(torch.empty(64, 64, 3, 3).contiguous(memory_format=torch.channels_last))
    assert conv.weight_layout == "nhwc"
    step = _C.sm90.wgrad.AddPartials(made, **operands, weight=weight_gradient(conv))
    assert step.describe() == "add the weight gradient's parts"
    wrong = {
        "input channels of the weight: got 63, expected 64": (63, 64, 3, 3),
        "output channels of the weight: got 32, expected 64": (64, 32, 3, 3),
        "taps along height: got 2, expected 3": (64, 64, 2, 3),
        "taps along width: got 1, expected 3": (64, 64, 3, 1),
    }
    for text, shape in wrong.items():
        with pytest.raises(ValueError, match=text):
            _C.sm90.wgrad.AddPartials(
                made, **operands, weight=weight_gradient(geometry_of(torch.empty(shape)))
            )


def test_lines():
    for dtype, strides in ((torch.float32, (84, 28, 4, 1)), (torch.bfloat16, (168, 56, 8, 1))):
        assert line_strides((2, 3, 7, 3), dtype) == strides
        padded = torch.empty_strided((2, 3, 7, 3), strides, dtype=dtype)
        assert lies_in_lines(padded, strides)
        assert not lies_in_lines(padded.contiguous(), strides)
        shifted = padded[..., 1:]
        assert not lies_in_lines(shifted, line_strides(shifted.shape, dtype))
    whole = torch.empty(2, 3, 7, 8)
    assert whole.stride() == line_strides(whole.shape, whole.dtype)
