"""The convolution's gradients by tensor copies: which pixels taps read, what is served, and the
steps of plans. No GPU."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from conv_gradients import in_layout
from problems import backward_problem, geometry_of, group_norm_stage, problem

import fusedconv
from fusedconv import _C
from fusedconv.device import KNOWN
from fusedconv.layout import line_pitch
from fusedconv.plan import JoinedPlan
from fusedconv.problem import ForwardProblem
from fusedconv.registry import registry
from fusedconv.selection import choose, plan_of
from fusedconv.support import Support

HAS_ROWS = "sm90" in fusedconv.build.get("families", ())
pytestmark = pytest.mark.skipif(
    not HAS_ROWS, reason="fusedconv was built without kernels for compute capability 9.0"
)

H200 = KNOWN[90]
KERNELS = {k.name: k for k in registry().kernels() if k.provider == "boxes_gradients_sm90"}
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32}
#: Of the input and the output: pixels of some are not whole 16 bytes.
ODD_CHANNELS = [(3, 16), (512, 17), (5, 31), (1, 1), (72, 3), (72, 40)]


def forward(
    spatial=(19, 23), *, batch=3, kernel=(4, 4), channels=72, out=40, precision="bf16", **changes
) -> ForwardProblem:
    weight = in_layout(torch.empty(channels, out, *kernel), changes.pop("weight_layout", "nchw"))
    layout = changes.pop("layout", "nhwc")
    norm = changes.pop("norm", None)
    activation = changes.pop("activation", "identity")
    return problem(
        dtype=PRECISIONS[precision],
        output_dtype=PRECISIONS[precision],
        precision=precision,
        layout=layout,
        batch=batch,
        channels=channels,
        spatial=spatial,
        conv=geometry_of(weight, **changes),
        norm=norm,
        activation=activation,
        save=True,
    )


def kernel_of(precision: str):
    name = {"bf16": "bf16", "fp16": "f16", "tf32": "tf32"}[precision]
    return KERNELS[f"sm90_boxes_gradients_{name}"]


def served(case: ForwardProblem, *gradients: str, **changes) -> Support:
    asked = backward_problem(case, *(gradients or ("input",)), **changes)
    return kernel_of(case.precision).supports(asked, H200)


def test_taps_gather_what_the_transposed_convolution_scattered():
    """The gradient of the input in float64, by the sources, shifts and taps that kernels read."""
    generator = random.Random(0)
    room = _C.sm90.boxes
    row = next(row for row in room.rows() if row.name == "sm90_boxes_bf16_64_pair")
    checked = 0
    while checked < 60:
        stride = [generator.randint(1, 4) for _ in range(2)]
        kernel = [generator.randint(1, 5) for _ in range(2)]
        dilation = [generator.randint(1, 3) for _ in range(2)]
        reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        padding = [generator.randint(0, far // 2 + 1) for far in reach]
        extra = [generator.randrange(max(pair)) for pair in zip(stride, dilation, strict=True)]
        spatial = [generator.randint(1, 7) for _ in range(2)]
        x = torch.randn(2, 3, *spatial, dtype=torch.float64, requires_grad=True)
        weight = torch.randn(3, 4, *kernel, dtype=torch.float64)
        try:
            output = torch.nn.functional.conv_transpose2d(
                x, weight, None, stride, padding, extra, 1, dilation
            )
        except RuntimeError:  # no output is left
            continue
        grad = torch.randn_like(output)
        (exact,) = torch.autograd.grad(output, x, grad)
        config = room.Config(
            row,
            problem=_C.TransposedProblem(
                channels=8,
                output_channels=8,
                groups=1,
                input=(1, *output.shape[2:]),
                output=(1, *spatial),
                kernel=(1, *kernel),
                stride=(1, *stride),
                padding=(0, *padding),
                dilation=(1, *dilation),
                layout=_C.Layout.nhwc,
                aligned=True,
            ),
            device=H200.compiled,
            gathers=True,
        )
        if not config.support:
            assert "shorter than phase" in config.support.reason
            continue
        checked += 1
        found = torch.zeros_like(exact)
        taps = itertools.product(*map(range, kernel))
        for tap, shift, source in zip(taps, config.shifts, config.tap_sources, strict=True):
            first = config.sources[source][1:]
            plane = grad[:, :, first[0] :: stride[0], first[1] :: stride[1]]
            for q in itertools.product(*map(range, spatial)):
                at = [i + s for i, s in zip(q, shift[1:], strict=True)]
                if all(0 <= i < n for i, n in zip(at, plane.shape[2:], strict=True)):
                    read = plane[:, :, at[0], at[1]]
                    found[:, :, q[0], q[1]] += read @ weight[:, :, tap[0], tap[1]].T
        assert torch.allclose(found, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_is_served(precision):
    assert served(forward(precision=precision))
    assert served(forward(precision=precision, layout="nchw"))
    assert served(forward((40,), kernel=(16,), precision=precision, stride=(8,), padding=(4,)))
    assert served(
        forward(
            (5, 6, 7), kernel=(3, 3, 3), precision=precision, stride=(2, 2, 2), padding=(1,) * 3
        )
    )


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (forward((9,), kernel=(20,), stride=(17,)), "more than 16 phases"),
        (forward(batch=0), "batch is 0, 1 to"),
        (forward(batch=1 << 31), "batch is 2147483648, 1 to"),
        (forward((512, 512), out=1, batch=1024), "zeros beside its channels take 3802265600"),
    ],
    ids=str,
)
def test_what_is_refused(case, reason):
    support = served(case)
    assert not support
    assert reason in support.reason


def test_groups_and_other_precisions_are_refused():
    grouped = forward(channels=64, out=32, groups=2, out_channels=64)
    assert "2 groups" in served(grouped).reason
    strict = problem(
        dtype=torch.float32,
        precision="fp32",
        channels=64,
        conv=geometry_of(torch.empty(64, 64, 3, 3)),
        norm=None,
        activation="identity",
        save=True,
    )
    support = kernel_of("tf32").supports(backward_problem(strict, "input"), H200)
    assert "computes in tf32, fp32 is asked for" in support.reason


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_weights_gradient_is_served(precision):
    assert served(forward(precision=precision), "input", "weight")


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_steps(precision, layout):
    asked = backward_problem(forward(layout=layout, precision=precision), "input", "weight")
    choice = choose(asked, H200, "boxes_gradients_sm90")
    steps = plan_of(choice, H200).steps
    transposes = [step for step in steps if "transpose" in step or "->" in step]
    assert bool(transposes) == (layout == "nchw")
    name = kernel_of(precision).name.rsplit("_", 1)[1]
    assert any(step.startswith(f"sm90_boxes_weight_{name}_") for step in steps)
    assert any(step.startswith(f"sm90_boxes_{name}_") for step in steps)
    assert ("pack the input (rounded to TF32)" in steps) == packs(steps)
    assert steps[-1] == "add the weight gradient's parts"


@pytest.mark.parametrize("out", [40, 12, 17])
@pytest.mark.parametrize("weight_layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("kernel", [(4, 4), (2, 1), (1, 3), (1, 1)])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_weight_whose_output_channels_are_beside_each_other_is_not_packed(
    precision, kernel, out, weight_layout
):
    """In whole 16 bytes, which 12 channels are in TF32 alone; of one tap both layouts are one."""
    case = forward(precision=precision, out=out, kernel=kernel, weight_layout=weight_layout)
    steps = kernel_of(precision).compile(backward_problem(case, "input"), H200).steps
    beside = weight_layout == "nhwc" or kernel == (1, 1)
    as_it_lies = beside and out * PRECISIONS[precision].itemsize % 16 == 0
    pack, *_ = steps
    assert pack.startswith("pack filter")
    assert pack.endswith("if the weight begins at no multiple of 16 bytes") == as_it_lies


@pytest.mark.parametrize(
    ("changes", "writes"),
    [
        ({"weight_layout": "nhwc"}, True),
        ({"weight_layout": "nchw"}, False),
        ({"weight_layout": "nhwc", "out": 17}, False),
        ({"weight_layout": "nhwc", "batch": 64}, False),  # which several blocks divide
    ],
)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_block_that_has_all_positions_writes_the_weights_gradient(precision, changes, writes):
    """Where output channels are beside each other, in pairs."""
    case = forward((3, 5), precision=precision, **{"batch": 1, **changes})
    steps = kernel_of(precision).compile(backward_problem(case, "weight"), H200).steps
    assert any(step.endswith("(weight gradient, whole)") for step in steps) == writes
    assert ("add the weight gradient's parts" in steps) != writes


def packs(steps: tuple[str, ...]) -> bool:
    """Whether the row that computes the weight's gradient, where there is one, reads the input
    packed."""
    rows = {row.name: row for row in _C.sm90.boxes.weight.rows()}
    return any(rows[name].packs for name in (step.split()[0] for step in steps) if name in rows)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_biases_gradient_is_summed_beside_the_weights(precision, layout):
    """Where each pixel is read at one tap, and in one launch more than the weight's alone."""
    filter = {"kernel": (2, 2), "stride": (2, 2)}
    case = forward(precision=precision, layout=layout, batch=64, **filter)
    asked = backward_problem(case, "input", "weight", "bias")
    choice = choose(asked, H200, "boxes_gradients_sm90")
    name = kernel_of(precision).name
    taken = {part for piece, c in choice.chosen if c.kernel.name == name for part in piece.parts}
    assert {"weight", "bias"} <= taken
    steps = kernel_of(precision).compile(asked, H200).steps
    assert sum("weight gradient and bias's" in step for step in steps) == 1
    assert steps[-1] == "gradient of bias"


@pytest.mark.parametrize(
    "changes",
    [
        {"kernel": (3, 3), "stride": (2, 2)},
        {"kernel": (2, 2), "stride": (3, 3)},
        {"kernel": (2, 2), "stride": (2, 2), "padding": (0, 1)},
        {"kernel": (2, 2), "stride": (2, 2), "dilation": (1, 2)},
        {"kernel": (2, 2), "stride": (2, 2), "output_padding": (1, 0)},
    ],
    ids=str,
)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_biases_gradient_is_refused_where_pixels_are_read_more_or_less_often(
    precision, changes
):
    case = forward(precision=precision, **changes)
    assert served(case, "weight")
    assert "as large as its stride" in served(case, "weight", "bias").reason


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_biases_gradient_alone_is_others(precision):
    case = forward(precision=precision, kernel=(2, 2), stride=(2, 2))
    for gradients in (("bias",), ("input", "bias")):
        assert "beside the weight's only" in served(case, *gradients).reason


def rewriting_steps(case: ForwardProblem) -> dict[str, str | None]:
    """The step that transposes, pads or cuts each tensor, None where it is taken as it lies."""

    def whole(channels: int) -> int:
        return line_pitch(channels, case.dtype)

    def in_front(name: str, channels: int) -> str | None:
        if case.layout == "nhwc" and whole(channels) == channels:
            return None
        verb = "pad" if case.layout == "nhwc" else "transpose"
        counts = f"channels {channels} -> {whole(channels)}"
        return f"{verb} {name} {case.layout} -> nhwc, copied, {counts}"

    assert case.conv is not None
    back = "transpose the input's gradient (nhwc -> nchw)"
    if case.layout == "nhwc":
        cuts = whole(case.channels) != case.channels
        back = "cut the input's gradient (nhwc -> nhwc)" if cuts else None
    return {
        "grad": in_front("the output's gradient", case.conv.out_channels),
        "input": in_front("the input", case.channels),
        "back": back,
    }


@pytest.mark.parametrize("gradients", [("input",), ("weight",), ("input", "weight")], ids=str)
@pytest.mark.parametrize(("channels", "out"), ODD_CHANNELS)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_pixels_are_padded_and_cut_where_they_are_not_whole(
    precision, layout, channels, out, gradients
):
    case = forward(precision=precision, layout=layout, channels=channels, out=out)
    asked = backward_problem(case, *gradients)
    kernel = kernel_of(precision)
    assert kernel.supports(asked, H200)
    expected = rewriting_steps(case)
    if "input" not in gradients:
        expected["back"] = None
    if "weight" not in gradients:
        expected["input"] = None
    steps = kernel.compile(asked, H200).steps
    rewriting = {step for step in steps if step.startswith(("transpose", "pad", "cut"))}
    assert rewriting == {step for step in expected.values() if step}
    assert ("pack the input (rounded to TF32)" in steps) == packs(steps)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_scratch_holds_padded_tensors(precision):
    """What a plan for odd channels has beyond one for whole channels of as many: the output's
    gradient, the input, and its gradient."""
    whole = line_pitch(17, PRECISIONS[precision])
    odd, even = (
        kernel_of(precision).build(
            backward_problem(forward(precision=precision, channels=n, out=n), "input", "weight"),
            H200,
        )
        for n in (17, whole)
    )
    case = forward(precision=precision, channels=whole, out=whole)
    elements = 2 * case.input_elements + case.output_elements
    extra = odd.workspace_bytes - even.workspace_bytes
    assert 0 <= extra - elements * case.dtype.itemsize < 3 * 1024  # of which each begins aligned


def test_padding_costs():
    for gradients in (("input",), ("weight",), ("input", "weight")):
        odd, whole = (
            kernel_of("bf16").cost(
                backward_problem(forward(channels=n, out=n, batch=64), *gradients), H200
            )
            for n in (17, 24)
        )
        assert odd > whole


def test_an_unaligned_tensor_is_served_where_it_is_padded():
    assert served(forward(out=17), "input", aligned=False)
    assert "not aligned" in served(forward(out=24), "input", aligned=False).reason


@pytest.mark.parametrize("room", ["boxes", "weight"])
def test_a_weight_has_the_configs_channels_or_those_that_are_padded_to_them(room):
    """Of a config of 24 channels in and out, in 16 bits."""
    problem = _C.TransposedProblem(
        channels=24,
        output_channels=24,
        groups=1,
        input=(1, 9, 9),
        output=(1, 8, 8),
        kernel=(1, 2, 2),
        stride=(1, 1, 1),
        padding=(0, 0, 0),
        dilation=(1, 1, 1),
        layout=_C.Layout.nhwc,
        aligned=True,
    )
    boxes, device = _C.sm90.boxes, H200.compiled
    source = _C.Operand()

    def make(c: int, k: int):
        weight = _C.FilterSource(c=c, k=k, taps=(1, 2, 2), strides=(4, 4 * c, 0, 2, 1))
        if room == "boxes":
            row = next(row for row in boxes.rows() if row.name == "sm90_boxes_bf16_64_pair")
            config = boxes.Config(row, problem=problem, device=device, gathers=True)
            return boxes.PackFilter(config, source=weight, weight=source, filter=source)
        row = next(row for row in boxes.weight.rows() if row.math.name == "bf16")
        config = boxes.weight.Config(row, problem=problem, batch=1, device=device)
        return boxes.weight.AddPartials(config, target=weight, partials=source, grad_weight=source)

    for channels in (17, 23, 24):
        make(channels, 24)
        make(24, channels)
    for channels in (16, 25):
        with pytest.raises(ValueError, match=f"input channels .* got {channels}, expected 24"):
            make(channels, 24)
        with pytest.raises(ValueError, match=f"output channels .* got {channels}, expected 24"):
            make(24, channels)


def test_steps_that_touch_the_weight_itself_refuse_one_that_lies_otherwise():
    case = forward((3, 5), batch=1)
    kernel, asked = kernel_of("bf16"), backward_problem(case, "input", "weight")
    (gathers, row), (sums, sums_row) = kernel._input(asked, H200), kernel._weight(asked, H200)
    slot, room = _C.Operand(), _C.sm90.boxes
    first = _C.Program(0, 1, 0).tensor(0, 0)
    weight = _C.FilterSource(c=40, k=72, taps=(1, 4, 4), strides=(16, 640, 0, 4, 1))

    def convolve(source):
        filter = _C.FilterOperand(slot, weight=first, source=source)
        return room.Convolve(
            gathers, activation=_C.Activation.identity, activates_output=True, input=slot,
            filter=filter, bias=slot, output=slot, partials=slot,
        )  # fmt: skip

    with pytest.raises(ValueError, match=f"{row.name}: whether the weight is read .*got 0"):
        convolve(weight)
    fewer = _C.FilterSource(c=40, k=72, taps=(1, 4, 3), strides=(12, 480, 0, 3, 1))
    with pytest.raises(ValueError, match=f"{row.name}: taps along width: got 3, expected 4"):
        convolve(fewer)

    def make(**places):
        return room.weight.SumProducts(sums, input=slot, grad_output=slot, target=weight, **places)

    with pytest.raises(ValueError, match=f"{sums_row.name}: whether the weight's gradient is"):
        make(partials=slot, grad_weight=first)
    for both in (slot, first):
        with pytest.raises(ValueError, match=f"{sums_row.name}: whether there are partials"):
            make(partials=both, grad_weight=both)


@pytest.mark.parametrize(
    "row", _C.sm90.boxes.weight.rows() if HAS_ROWS else [], ids=lambda row: row.name
)
def test_splits_fill_the_device_and_leave_no_slab_out(row):
    stride = 1 if row.halo else 2
    for batch, spatial, kernel, channels in [
        (1, (5, 7), (3, 3), 64),
        (64, (64, 64), (2, 2), 256),
        (16, (64, 64), (4, 4), 256),
        (2, (3, 3), (5, 5), 1024),
        (3, (60, 64), (3, 3), 192),
    ]:
        if row.halo and kernel != (3, 3):
            continue
        config = _C.sm90.boxes.weight.Config(
            row,
            problem=_C.TransposedProblem(
                channels=channels,
                output_channels=channels,
                groups=1,
                input=(1, *(stride * (n - 1) + k for n, k in zip(spatial, kernel, strict=True))),
                output=(1, *spatial),
                kernel=(1, *kernel),
                stride=(1, stride, stride),
                padding=(0, 0, 0),
                dilation=(1, 1, 1),
                layout=_C.Layout.nhwc,
                aligned=True,
            ),
            batch=batch,
            device=H200.compiled,
        )
        assert config.support
        columns = math.prod(kernel) * channels
        assert config.tasks == -(-channels // row.channels) * -(-columns // row.columns)
        assert 1 <= config.splits <= config.slabs
        assert config.slabs * row.positions >= batch * math.prod(spatial)
        assert config.shared_bytes <= H200.shared_bytes
        sums = config.tasks * config.splits * row.channels * row.columns
        assert config.partial_bytes == 4 * sums


def test_the_output_gradient_comes_dense_where_a_plan_reads_no_padded_lines():
    """The gradient through GroupNorm is written in padded lines where all who read it take them."""
    conv = geometry_of(torch.empty(384, 32, 3, 3), padding=(1, 1))
    whole = problem(
        dtype=torch.bfloat16,
        output_dtype=torch.bfloat16,
        precision="bf16",
        batch=16,
        channels=384,
        spatial=(28, 30),
        conv=conv,
        norm=group_norm_stage(8, affine_dtype=torch.bfloat16),
        save=True,
    )
    asked = backward_problem(whole)
    by_runs = choose(asked, H200, "gradients_sm90,groupnorm_backward_two_pass")
    assert any("lines of 30 padded to 32" in step for step in plan_of(by_runs, H200).steps)
    by_boxes = choose(asked, H200, "boxes_gradients_sm90,groupnorm_backward_two_pass")
    assert not any("padded" in step for step in plan_of(by_boxes, H200).steps)
    pieces = [
        (asked.part(parts), name)
        for parts, name in (
            (("epilogue", "bias"), "groupnorm_backward_two_pass"),
            (("input",), "sm90_gradients_bf16"),
            (("weight",), "sm90_boxes_gradients_bf16"),
        )
    ]
    kernels = {kernel.name: kernel for kernel in registry().kernels()}
    plans = [kernels[name].compile(piece, H200) for piece, name in pieces]
    steps = JoinedPlan(plans).steps
    assert any("pad the output's gradient, lines of 30 to 32" in step for step in steps)
    assert not any("padded" in step for step in steps)
