"""Gradients on Hopper's planes of tensors that are channels last: what is transposed, by which
step, and what comes as planes."""

from __future__ import annotations

import pytest
import torch
from problems import backward_problem, geometry_of
from test_sm90_gradients import H200, HAS_ROWS, kernel_named, system_1

from fusedconv.kernels.compiled import CONTIGUOUS_STEP
from fusedconv.plan import JoinedPlan
from fusedconv.problem import Bias, ForwardProblem, Residual
from fusedconv.selection import choose, plan_for

pytestmark = pytest.mark.skipif(
    not HAS_ROWS, reason="fusedconv was built without kernels for compute capability 9.0"
)

TRANSPOSED_GRAD = "transpose the output's gradient (nhwc -> nchw)"
TRANSPOSED_INPUT = "transpose the input (nhwc -> nchw)"


def channels_last(precision: str, **changes) -> ForwardProblem:
    return system_1(precision, **({"layout": "nhwc"} | changes))


@pytest.mark.parametrize("precision", ["tf32", "fp16", "bf16"])
def test_channels_last_is_turned_and_turned_back(precision):
    asked = backward_problem(channels_last(precision, batch=2), "input", "weight")
    kernel = kernel_named("sm90_gradients_" + precision.replace("fp", "f"))
    assert kernel.supports(asked, H200)
    steps = kernel.compile(asked, H200).steps
    pitch = 260 if precision == "tf32" else 264
    padded = f"pad the output's gradient, lines of 258 to {pitch}"
    assert steps.index(TRANSPOSED_GRAD) + 1 == steps.index(padded)
    back = "transpose the input's gradient nchw -> nhwc, copied, channels 64 -> 64"
    assert steps.index(back) + 1 == steps.index(TRANSPOSED_INPUT)
    assert steps[-1] == "add the weight gradient's parts"
    planes = backward_problem(system_1(precision, batch=2), "input", "weight")
    copied = 3 * 2 * asked.forward.input_elements * asked.forward.dtype.itemsize
    assert kernel.cost(asked, H200) > kernel.cost(planes, H200) + H200.copy_milliseconds(copied)


def test_what_is_not_asked_for_is_not_turned():
    kernel = kernel_named("sm90_gradients_bf16")
    asked = channels_last("bf16", epilogue=())
    alone = backward_problem(asked, "input", grad_layout="nhwc")
    steps = kernel.compile(alone, H200).steps
    assert TRANSPOSED_GRAD in steps
    assert TRANSPOSED_INPUT not in steps
    steps = kernel.compile(backward_problem(asked, "weight", grad_layout="nhwc"), H200).steps
    assert TRANSPOSED_INPUT in steps
    assert not any("nchw -> nhwc" in step for step in steps)
    # A gradient that lies in NCHW is read as it lies.
    steps = kernel.compile(backward_problem(asked, "weight", grad_layout="nchw"), H200).steps
    assert TRANSPOSED_GRAD not in steps


def test_channels_that_are_no_whole_16_bytes_are_copied_by_torch():
    asked = channels_last(
        "bf16", epilogue=(), channels=12, conv=geometry_of(torch.empty(12, 20, 3, 3))
    )
    steps = kernel_named("sm90_gradients_bf16").compile(
        backward_problem(asked, "input", "weight", grad_layout="nhwc"), H200
    ).steps  # fmt: skip
    assert steps[:2] == ("torch copy of the output's gradient to nchw", CONTIGUOUS_STEP)
    assert steps[-1] == "torch copy of the input's gradient to nhwc"
    assert not any("nhwc -> nchw" in step for step in steps)


def test_a_copy_by_torch_costs_more_than_its_pass():
    """Of a head with 17 channels the gradients are those of kernels that need none, though the
    planes by themselves are estimated to take less."""
    asked = backward_problem(
        channels_last(
            "bf16",
            epilogue=(Bias(),),
            batch=64,
            channels=512,
            spatial=(14, 14),
            conv=geometry_of(torch.empty(512, 17, 4, 4), stride=(2, 2), padding=(1, 1)),
        ),
        "input",
        "weight",
        "bias",
        grad_layout="nhwc",
    )
    for piece, candidate in choose(asked, H200).chosen:
        assert not any("torch copy" in s for s in candidate.kernel.compile(piece, H200).steps)


def test_strides_take_channels_last_too():
    conv = geometry_of(torch.empty(64, 32, 4, 4), stride=(2, 2), padding=(1, 1))
    asked = backward_problem(
        channels_last("tf32", epilogue=(), spatial=(32, 32), conv=conv),
        "input",
        "weight",
        grad_layout="nhwc",
    )
    steps = kernel_named("sm90_gradients_tf32").compile(asked, H200).steps
    assert steps.index(TRANSPOSED_GRAD) + 1 == next(
        index for index, step in enumerate(steps) if step.startswith("split the output's gradient")
    )


@pytest.mark.parametrize("precision", ["tf32", "fp32"])
def test_channels_last_the_gradient_of_the_normalisation_comes_as_planes(precision):
    plan = plan_for(backward_problem(system_1(precision, layout="nhwc")), H200)
    (written,) = (step for step in plan.steps if step.startswith("gradient through"))
    assert "(nhwc -> nchw)" in written
    assert written.endswith(", lines of 258 padded to 260, + sums by channel")
    before = ("transpose the output's gradient", "pad the output's gradient")
    assert not any(step.startswith(before) for step in plan.steps)
    assert "transpose the input (nhwc -> nchw)" in plan.steps


def test_planes_are_counted_on_where_they_are_given():
    """By kernels of ours for what is behind, where one kernel reads them for input and weight."""
    kernel = kernel_named("sm90_gradients_tf32")

    def cost(*names, **changes):
        forward = system_1("tf32", layout="nhwc", **changes)
        return kernel.cost(backward_problem(forward).part(names), H200)

    passes = cost("input") + cost("weight") - cost("input", "weight")
    gradient = H200.copy_milliseconds(2 * 128 * 64 * 258 * 258 * 4)
    assert passes > 3 * gradient  # transposed and padded for each
    bias, *behind = system_1("tf32").epilogue
    residual = system_1("tf32", layout="nhwc", epilogue=(bias, Residual(), *behind))
    asked = backward_problem(residual).part(("input", "weight"))
    planes = kernel.cost(asked, H200) - cost("input", "weight")
    assert planes > 1.5 * gradient


def test_torch_reads_what_is_behind_as_it_lies():
    """Where it computes one of the convolution's gradients no planes are given to the other."""
    asked = backward_problem(system_1("tf32", layout="nhwc"))
    given = [
        kernel_named("groupnorm_backward_two_pass").compile(asked.part(["epilogue"]), H200),
        kernel_named("sm90_gradients_tf32").compile(asked.part(["weight"]), H200),
        kernel_named("torch_convolution_backward").compile(asked.part(["input"]), H200),
    ]
    assert "transpose the output's gradient (nhwc -> nchw)" in JoinedPlan(given).steps
    assert "transpose the output's gradient (nhwc -> nchw)" not in JoinedPlan(given[:2]).steps


def test_what_writes_no_planes():
    """Where no gradient of the convolution's output is asked for, or planes are not counted."""
    kernel = kernel_named("groupnorm_backward_two_pass")

    def gives(**changes):
        asked = backward_problem(system_1("bf16", layout="nhwc", **changes))
        return kernel.compile(asked, H200).give_padded_lines()

    assert gives()
    asked = backward_problem(system_1("bf16", layout="nhwc"), "norm_weight")
    assert not kernel.compile(asked, H200).give_padded_lines()
    one_tap = geometry_of(torch.empty(8, 8, 1, 1))
    long = {"batch": 1, "channels": 8, "conv": one_tap}
    assert gives(**long, spatial=((1 << 28) - 1, 1))
    assert not gives(**long, spatial=(1 << 28, 1))  # lines of one column are padded to eight
