"""How the tensors of a convolution's backward pass lie, and what is done to them before kernels
read them: they are transposed to channels first, split into planes of a stride's phases, and padded
to whole lines.
"""

from __future__ import annotations

import math
from typing import Literal

from fusedconv.kernels.compiled import supports_compiled
from fusedconv.kernels.cuda.phase_planes import is_strided, of_planes
from fusedconv.kernels.cuda.transposing import has_whole_vectors
from fusedconv.layout import Layout, line_pitch
from fusedconv.problem import BackwardProblem, Bias, ForwardProblem

#: How the gradient of the convolution's output lies: in padded lines, or dense.
GradForm = Literal["lines", "nchw", "nhwc"]


def sample_bytes(forward: ForwardProblem) -> int:
    """Of the input."""
    return forward.channels * math.prod(forward.spatial) * forward.dtype.itemsize


def grad_layout(problem: BackwardProblem) -> Layout:
    """Of the gradient of the convolution's output, as it comes."""
    behind = any(not isinstance(stage, Bias) for stage in problem.forward.epilogue)
    return problem.forward.output_layout if behind else problem.grad_layout


def grad_form(problem: BackwardProblem) -> GradForm:
    """In which form the program takes the gradient of the convolution's output, unless that comes
    in padded lines; what is neither is copied to NCHW first."""
    forward = problem.forward
    transposes = has_whole_vectors(forward.output_channels, forward.dtype)
    return "nhwc" if transposes and grad_layout(problem) == "nhwc" else "nchw"


def comes_in_lines(problem: BackwardProblem) -> bool:
    """Whether estimates count on it that the gradient of the convolution's output comes in padded
    lines, channels first, from a kernel of ours for what is behind, with a GroupNorm: channels last
    where the program reads it for both input and weight, as another kernel for one of them would
    read it dense."""
    if not (problem.forward.norm_groups and supports_compiled(problem.forward)):
        return False
    return grad_layout(problem) == "nchw" or problem.gradients >= {"input", "weight"}


def reads_channels_last(forward: ForwardProblem) -> bool:
    """Whether the program transposes the input, which is channels last."""
    return forward.layout == "nhwc" and has_whole_vectors(forward.channels, forward.dtype)


def writes_channels_last(forward: ForwardProblem) -> bool:
    """Whether the program transposes the input's gradient to channels last."""
    return forward.output_layout == "nhwc" and has_whole_vectors(forward.channels, forward.dtype)


def copies_to_channels_last(forward: ForwardProblem) -> bool:
    """Whether torch does, as the program cannot."""
    return forward.output_layout == "nhwc" and not writes_channels_last(forward)


def transposed_elements(problem: BackwardProblem) -> list[tuple[int, bool]]:
    """Of each tensor that is channels last, and whether torch copies it, in front or behind, as the
    program cannot."""
    forward, gradients = problem.forward, problem.gradients
    transposed = []
    if grad_layout(problem) == "nhwc" and not comes_in_lines(problem):
        transposed.append((forward.output_elements, grad_form(problem) != "nhwc"))
    if forward.layout == "nhwc" and "weight" in gradients:
        transposed.append((forward.input_elements, not reads_channels_last(forward)))
    if forward.output_layout == "nhwc" and "input" in gradients:
        transposed.append((forward.input_elements, copies_to_channels_last(forward)))
    return transposed


def begin_apart(problem: BackwardProblem, columns: int) -> bool:
    """Whether lines of a dense tensor do not all begin at multiples of 16 bytes."""
    return not problem.aligned or line_pitch(columns, problem.forward.dtype) != columns


def splits_grad(problem: BackwardProblem) -> bool:
    """Whether the output's gradient is split into planes first."""
    return is_strided(problem.forward) and bool(problem.gradients & {"input", "weight"})


def pads_grad(problem: BackwardProblem) -> bool:
    """Whether the lines of the output's gradient are padded first, where it is dense and whole."""
    return (
        bool(problem.gradients & {"input", "weight"})
        and not is_strided(problem.forward)
        and begin_apart(problem, problem.forward.output_spatial[-1])
    )


def asks_for_lines(problem: BackwardProblem) -> bool:
    """Whether the output's gradient is padded first, or transposed, unless it comes in lines."""
    reads = bool(problem.gradients & {"input", "weight"})
    return pads_grad(problem) or (reads and grad_layout(problem) == "nhwc")


def pads_input(problem: BackwardProblem) -> bool:
    """Whether the lines of the input are padded first."""
    return "weight" in problem.gradients and begin_apart(problem, read_spatial(problem.forward)[-1])


def read_spatial(forward: ForwardProblem) -> tuple[int, ...]:
    """The input's extents as the weight's gradient reads it."""
    planes = of_planes(forward)
    assert isinstance(planes, ForwardProblem)
    return planes.spatial
