"""What ``explain`` prints as a plan's steps is what runs, in that order, and nothing else runs."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from problems import explained
from reference import LAYOUTS
from torch.profiler import ProfilerActivity, profile

from fusedconv import functional

#: What each step starts: a pattern of the step, and one for each kernel of the GPU, in order. A
#: step without kernels is part of the one before it.
KERNELS = [
    (r"pack filter", ["pack_filter_kernel"]),
    (r"torch copy of the strided input", ["elementwise_kernel"]),
    (r"input \w+ -> nhwc", ["channels_first_to_last|pad_channels"]),
    (r"sm80_conv", [r"sm80::"]),
    (r"sm90_conv", [r"sm90::convolve"]),
    (r"merge moments", ["merge_moments_kernel"]),
    (r".*\(accumulator order -> ", ["unpack_kernel"]),
    (r"save the convolution's output \(\w+, same pass\)", []),
    (r"save the convolution's output \(nhwc -> nhwc\)", ["normalize_rows"]),
    (r"save the convolution's output \(nhwc -> nchw\)", ["normalize_to_channels_first"]),
    (r".*moments \(nchw\)", ["moments_channels_first", "finalize_channels_first"]),
    (r".*moments \(nhwc\)", ["moments_channels_last", "finalize_channels_last"]),
    (r".* in one pass \(\d+ threads a group\)", ["block_per_group"]),
    (r".* in one pass \(groups in the shared", ["normalize_stream"]),
    (r".*\(nchw -> nchw\)", ["normalize_planes|normalize_small_planes"]),
    (r".*\(nhwc -> nhwc\)", ["normalize_rows"]),
    (r".*\(nhwc -> nchw\)", ["normalize_to_channels_first"]),
]
#: The same for operators of torch on the processor.
OPERATORS = [
    (r"torch copy of the strided input", []),
    (r"torch\.conv_transpose2d", ["aten::conv_transpose2d"]),
    (r"torch\.group_norm", ["aten::native_group_norm"]),
    (r"torch gelu", ["aten::gelu"]),
    (r"torch silu", ["aten::silu"]),
    (r"fused ", []),
]


def expected(steps, table) -> list[str]:
    result = []
    for step in steps:
        patterns = [started for pattern, started in table if re.match(pattern, step)]
        assert patterns, f"no pattern for the step {step!r}"
        result += patterns[0]
    return result


def assert_matches(started: list[str], patterns: list[str]) -> None:
    assert len(started) == len(patterns), (started, patterns)
    for name, pattern in zip(started, patterns, strict=True):
        assert re.search(pattern, name), (name, pattern, started)


def calls(device: str, dtype: torch.dtype, layout: str, kernel: str, gradients: bool = False):
    """Calls that a kernel or provider serves, saving for a backward pass if asked to."""

    def place(x):
        return LAYOUTS[layout](x.to(device, dtype)).requires_grad_(gradients)

    if kernel.startswith(("groupnorm", "cpu", "torch")):
        x = place(torch.randn(4, 32, 24, 24))
        for keywords in ({}, {"activation": "gelu"}, {"activation": "silu", "order": "norm_act"}):
            yield lambda x=x, keywords=keywords: functional.group_norm(x, 4, **keywords)
    if not kernel.startswith("groupnorm"):
        x = place(torch.randn(3, 20, 13, 16))
        weight = torch.randn(20, 24, 3, 3).to(device, dtype)
        bias = torch.randn(24).to(device, dtype)
        for keywords in (
            {"num_groups": 4, "activation": "gelu"},
            {"num_groups": 4, "activation": "silu", "order": "norm_act"},
        ):
            yield lambda x=x, keywords=keywords: functional.conv_transpose_act_norm(
                x, weight, bias, **keywords
            )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kernel", ["cpu", "torch"])
def test_steps_on_the_processor(kernel, layout, force):
    force(kernel)
    known = {name for _, names in OPERATORS for name in names}
    for call in calls("cpu", torch.float32, layout, kernel):
        (explanation,) = explained(call)
        with (
            torch.no_grad(),
            profile(activities=[ProfilerActivity.CPU], acc_events=True) as recorded,
        ):
            call()
        started = [event.name for event in recorded.events() if event.name in known]
        patterns = expected(explanation.steps, OPERATORS)
        assert_matches(started, patterns)


@pytest.mark.gpu
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "kernel",
    [
        "cutlass_sm80",
        "cutlass_sm90",
        "groupnorm_resident",
        "groupnorm_streamed",
        "groupnorm_two_pass",
    ],
)
def test_steps_on_the_gpu(kernel, dtype, layout, gradients, force):
    if "sm90" in kernel and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the rows run on compute capability 9.0")
    if kernel == "groupnorm_streamed":
        if torch.cuda.get_device_capability() < (9, 0):
            pytest.skip("the kernel needs compute capability 9.0")
        if layout == "nhwc":
            pytest.skip("the kernel reads channels first")
    force(kernel)
    for call in calls("cuda", dtype, layout, kernel, gradients):
        (explanation,) = explained(call)
        problem = dataclasses.replace(explanation.problem, save=gradients)
        (explanation,) = explained(problem)
        call()
        torch.cuda.synchronize()
        with (
            torch.set_grad_enabled(gradients),
            profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded,
        ):
            call()
            torch.cuda.synchronize()
        started = [
            event.name
            for event in sorted(recorded.events(), key=lambda event: event.time_range.start)
            if event.device_type == torch.autograd.DeviceType.CUDA
            and not event.name.startswith(("Memset", "Memcpy"))
            and not re.fullmatch(r"fusedconv::\w+", event.name)  # the plan's range
        ]
        assert_matches(started, expected(explanation.steps, KERNELS))
