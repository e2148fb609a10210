"""What ``explain`` prints as a plan's steps is what runs, in that order, and nothing else runs."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator

import pytest
import torch
from problems import explained
from reference import LAYOUTS
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import fusedconv
from fusedconv import functional
from fusedconv.device import KNOWN

#: Stands for what a vendor's library starts, which may be several kernels.
ANY = "..."
#: What each step starts: a pattern of the step, and one for each kernel of the GPU, in order.
KERNELS = [
    (r"pack filter", ["pack_filter"]),
    (r"pack the input \(rounded to TF32\)", ["pack_input_kernel"]),
    (r"torch copy of ", ["elementwise_kernel"]),
    (r"(input|(transpose|pad) the .*) \w+ -> nhwc", ["channels_first_to_last|pad_channels"]),
    (r"sm80_conv", [r"sm80::"]),
    (r"sm90_conv", [r"sm90::convolve"]),
    (r"sm90_taps_", [r"taps::sm90::convolve"]),
    (r"sm90_boxes_weight_", [r"boxes::weight::sum_products"]),
    (r"sm90_boxes_", [r"boxes::convolve"]),
    (r"sm90_clusters_", [r"clusters::convolve"]),
    (r"sm90_col2im_", [r"col2im::convolve"]),
    (r"sm90_lines_", [r"lines::convolve"]),
    (r"sm90_phases_", [r"phases::convolve"]),
    (r"sm90_streams_", [r"streams::convolve"]),
    (r"sm90_strips_", [r"strips::convolve"]),
    (r"taps_", [r"taps::convolve"]),
    (r"direct_", [r"direct::(convolve|double)"]),
    (r"sm90_runs", [r"runs::convolve"]),
    (r"sm90_wgrad", [r"wgrad::sum_products"]),
    (r"add the weight gradient's parts", ["add_partials_kernel"]),
    (r"pad |sums of the output's gradient by channel", ["pad_planes"]),
    (r"gradient of bias", ["add_parts"]),
    (r"depthwise gradient of .* \(nchw\)", ["gradients_of_planes|input_gradient"]),
    (r"depthwise gradient of .* \(nhwc\)", ["gradients_of_pixels|input_gradient"]),
    (r"add the depthwise weight gradient's parts", ["add_parts_of_weight"]),
    (r"few-channel gradient of ", [r"few::gradients"]),
    (r"few_", [r"few::convolve"]),
    (r"depthwise_", [r"depthwise::convolve"]),
    (r"add the few-channel weight gradient's parts", ["add_parts_of_few"]),
    (r"merge moments \+ ", ["normalize_merging_kernel"]),
    (r"merge moments", ["merge_partials_kernel"]),
    (r".*\(accumulator order -> ", ["finalize_kernel"]),
    (r"save the convolution's output \(nhwc -> nhwc\)", ["normalize_rows"]),
    (r"save the convolution's output \(nhwc -> nchw\)", ["normalize_to_channels_first"]),
    (r".*moments \(nchw\)", ["moments_channels_first", "finalize_channels_first"]),
    (r".*moments \(nhwc\)", ["moments_channels_last", "merge_partials_kernel"]),
    (r".*normalize.* in one pass \(\d+ threads a group\)", ["block_per_group"]),
    (r".*normalize.* in one pass \(groups in the shared", ["normalize_stream"]),
    (r".*\(nchw -> nchw\)", ["normalize_planes|normalize_small_planes"]),
    (r".*\(nhwc -> nhwc\)", ["normalize_rows"]),
    (r".*\(nhwc -> nchw\)", ["normalize_to_channels_first"]),
    (r"sums of gradients \(nchw\)", ["sums_of_planes"]),
    (r"sums of gradients \(nhwc\)", ["sums_of_rows"]),
    (r"merge sums of gradients", ["merge_sums"]),
    (r"gradients? of norm (weight|bias)", ["sums_over_samples"]),
    (r"gradient through .* in one pass \(groups in the shared", ["gradients_stream"]),
    (r"gradient through .* \(nchw\)", ["grad_of_planes|grad_of_columns"]),
    (r"add sums by channel to gradients of ", ["add_parts_of_channels"]),
    (r"gradient through .* \(nhwc\)", ["grad_of_rows"]),
    (r"torch\.ops\.aten\.convolution_backward for ", [ANY]),
]
#: The same for operators of torch on the processor.
OPERATORS = [
    (r"torch copy of ", []),
    (r"torch\.conv_transpose2d", ["aten::conv_transpose2d"]),
    (r"torch\.conv2d", ["aten::conv2d"]),
    (r"torch\.group_norm", ["aten::native_group_norm"]),
    (r"torch gelu", ["aten::gelu"]),
    (r"torch silu", ["aten::silu"]),
    (r"fused ", []),
]
#: The same for the backward pass, which computes activations anew beside.
GRADIENT_OPERATORS = [
    (r"torch copy of ", []),
    (r"fused (gradients|sums) of ", []),
    (r"gradient of torch\.group_norm", ["aten::native_group_norm_backward"]),
    (r"gradient of torch gelu", ["aten::gelu_backward"]),
    (r"gradient of torch silu", ["aten::silu_backward"]),
    (r"torch\.ops\.aten\.convolution_backward for ", ["aten::convolution_backward"]),
]

Table = list[tuple[str, list[str]]]
#: A call, and the leaves that it can be differentiated by.
Case = tuple[Callable[[], Tensor], list[Tensor]]


def expected(steps: tuple[str, ...], table: Table) -> list[str]:
    result = []
    for step in steps:
        patterns = [started for pattern, started in table if re.match(pattern, step)]
        assert patterns, f"no pattern for the step {step!r}"
        result += patterns[0]
    return result


def assert_matches(started: list[str], patterns: list[str]) -> None:
    if patterns[-1:] == [ANY]:
        patterns = patterns[:-1]
        assert len(started) > len(patterns), (started, patterns)
        started = started[: len(patterns)]
    assert len(started) == len(patterns), (started, patterns)
    for name, pattern in zip(started, patterns, strict=True):
        assert re.search(pattern, name), (name, pattern, started)


def calls(device: str, dtype: torch.dtype, layout: str, kernel: str) -> Iterator[Case]:
    """Calls that a kernel or provider serves, of planes that gradients stream. Norm weights are in
    float32: their gradients come in it, and no kernel beside the steps' converts them."""

    def leaf(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape).to(device, kind).requires_grad_()

    def place(x: Tensor) -> Tensor:
        return LAYOUTS[layout](x.to(device, dtype)).requires_grad_()

    if kernel.startswith(("groupnorm", "cpu", "torch")):
        x = place(torch.randn(4, 32, 32, 64))
        weight, bias = (leaf(32, kind=torch.float32) for _ in range(2))
        for keywords in ({}, {"activation": "gelu"}, {"activation": "silu", "order": "norm_act"}):
            yield (
                lambda x=x, affine=(weight, bias), keywords=keywords: functional.group_norm(
                    x, 4, *affine, **keywords
                ),
                [x, weight, bias],
            )
    if not kernel.startswith("groupnorm"):
        x = place(torch.randn(3, 20, 46, 48))
        weight, bias = leaf(20, 24, 3, 3), leaf(24)
        affine = {name: leaf(24, kind=torch.float32) for name in ("norm_weight", "norm_bias")}
        for keywords in (
            {"num_groups": 4, "activation": "gelu"},
            {"num_groups": 4, "activation": "silu", "order": "norm_act"},
        ):
            yield (
                lambda keywords=keywords: functional.conv_transpose_act_norm(
                    x, weight, bias, **affine, **keywords
                ),
                [x, weight, bias, *affine.values()],
            )


# ---- the processor -------------------------------------------------------------------------------


def operators_of(call: Callable[[], object], table: Table) -> list[str]:
    """The operators of a table that a call starts, in order."""
    known = {name for _, names in table for name in names}
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as recorded:
        call()
    return [event.name for event in recorded.events() if event.name in known]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kernel", ["cpu", "torch"])
def test_steps_on_the_processor(kernel, layout, force):
    force(kernel)
    for call, _ in calls("cpu", torch.float32, layout, kernel):
        (explanation,) = explained(call)
        with torch.no_grad():
            started = operators_of(call, OPERATORS)
        assert_matches(started, expected(explanation.steps, OPERATORS))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_of_gradients_on_the_processor(layout, force):
    """Behind the processor's kernel; what torch's operators serve, autograd differentiates."""
    force("cpu,torch_convolution_backward")
    for call, leaves in calls("cpu", torch.float32, layout, "cpu"):
        forward, backward = explained(call, gradients=True)
        assert forward.problem.save
        assert backward.problem.forward == forward.problem
        assert all(leaf.grad is None for leaf in leaves)
        output = call()
        started = operators_of(
            lambda output=output, leaves=leaves: torch.autograd.grad(
                output, leaves, torch.ones_like(output)
            ),
            GRADIENT_OPERATORS,
        )
        assert_matches(started, expected(backward.steps, GRADIENT_OPERATORS))


# ---- the GPU -------------------------------------------------------------------------------------

FORWARD = (
    "cutlass_sm80",
    "cutlass_sm90",
    "taps_sm80",
    "groupnorm_resident",
    "groupnorm_streamed",
    "groupnorm_two_pass",
)
#: What computes the forward pass, and what the gradients through GroupNorm.
BACKWARD = [
    f"{forward},groupnorm_backward_{backward}"
    for forward, backward in itertools.product(
        ("groupnorm_two_pass", "cutlass_sm80", "cutlass_sm90", "taps_sm80"),
        ("two_pass", "streamed"),
    )
]


def skip_what_cannot_run(kernel: str, layout: str) -> None:
    if "sm90" in kernel and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the rows run on compute capability 9.0")
    if "streamed" in kernel:
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("the kernel runs on compute capability 9.0")
        if layout == "nhwc":
            pytest.skip("the kernel reads channels first")


def kernels_of(call: Callable[[], object]) -> list[str]:
    """The kernels that a call starts, in order."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
        call()
        torch.cuda.synchronize()
    return [
        event.name
        for event in sorted(recorded.events(), key=lambda event: event.time_range.start)
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not event.name.startswith(("Memset", "memset", "Memcpy"))  # memset: a graph's
        and not re.fullmatch(r"fusedconv::[\w +]+", event.name)  # the plan's range
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", FORWARD)
def test_steps_on_the_gpu(kernel, dtype, layout, gradients, force):
    skip_what_cannot_run(kernel, layout)
    force(kernel)
    for call, _ in calls("cuda", dtype, layout, kernel):
        explanation = explained(call, gradients=gradients)[0]
        assert explanation.problem.save == gradients
        with torch.set_grad_enabled(gradients):
            started = kernels_of(call)
        assert_matches(started, expected(explanation.steps, KERNELS))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", BACKWARD)
def test_steps_of_gradients_on_the_gpu(kernel, dtype, layout, force):
    skip_what_cannot_run(kernel, layout)
    force(kernel)
    for call, leaves in calls("cuda", dtype, layout, kernel):
        _, backward = explained(call, gradients=True)
        assert backward.kernel.startswith(kernel.split(",")[1])
        output = call()
        started = kernels_of(
            lambda output=output, leaves=leaves: torch.autograd.grad(
                output, leaves, torch.ones_like(output), retain_graph=True
            )
        )
        # ones_like fills a tensor, in front of the steps.
        assert_matches(started[1:], expected(backward.steps, KERNELS))


@pytest.mark.skipif(not fusedconv.build["cuda"], reason="fusedconv was built without CUDA")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kernel", [*FORWARD, *BACKWARD])
def test_every_step_is_known(kernel, layout, force):
    """Where there is no GPU to hold the steps against."""
    if "sm90" in kernel and "sm90" not in fusedconv.build["families"]:
        pytest.skip("fusedconv was built without kernels for compute capability 9.0")
    if "streamed" in kernel and layout == "nhwc":
        pytest.skip("the kernel reads channels first")
    for call, _ in calls("cpu", torch.bfloat16, layout, kernel):
        problems = [explanation.problem for explanation in explained(call, gradients=True)]
        force(kernel if kernel in BACKWARD else f"{kernel},groupnorm_backward_two_pass")
        for problem in problems:
            (explanation,) = explained(problem, device=KNOWN[90])
            assert expected(explanation.steps, KERNELS)
        force("")
