"""What torch's convolutions cost on a processor. oneDNN computes them, but for small ones.

The figures were fitted on two cores with AVX-512 and no instructions for 16 bits; they are to order
ways of computing the same, and their sizes mean little elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from fusedconv.device import AVX512_BYTES, Device
from fusedconv.layout import Layout, result_layout
from fusedconv.problem import ForwardProblem

#: What a call of an operator costs, in launches.
CALL = 3.0
#: Passes over input and output that bring channels-first tensors into oneDNN's blocks and back, for
#: a transposed convolution and for a gradient.
_TRANSPOSED_PASSES = 7.0
_GRADIENT_PASSES = 3.0
#: The same for an ordinary convolution.
FORWARD_PASSES = 3.5
#: The share of the products' rate that a weight's gradient reaches, whose sums are over positions.
_WEIGHT_GRADIENT = 0.6
#: torch's own loops write the products of every tap with every pixel, or the pixels that every tap
#: meets, and read them again: passes over these, as two cores with AVX-512 and instructions for
#: bfloat16 took for a dozen problems; a half of it where they fit caches.
_COLUMN_PASSES = 5.0
#: Passes over the output's gradient that the bias's takes oneDNN: on channels last and in 16 bits,
#: and else.
_SLOW_BIAS_PASSES, _BIAS_PASSES = 4.0, 2.0
#: The share of float32's rate that the loops of depthwise convolutions reach, forward and for the
#: weight's gradient, by size of an element and layout; the input's gradient is as fast as others.
_DEPTHWISE = {
    "forward": {
        (4, "nchw"): 1 / 40, (4, "nhwc"): 1 / 20, (2, "nchw"): 1 / 150, (2, "nhwc"): 1 / 150,
    },
    "weight": {
        (4, "nchw"): 1 / 40, (4, "nhwc"): 1 / 30, (2, "nchw"): 1 / 40, (2, "nhwc"): 1 / 200,
    },
}  # fmt: skip
#: Seconds of an output element whose bias is added by loops that take elements one by one, by its
#: size.
_SLOW_BIAS = {4: 2.4e-9, 2: 12e-9}
#: Below so many elements, counted over the first four axes, torch's own loops take one sample.
_SMALL_SAMPLE = 20480


def flops_rate(device: Device, dtype: torch.dtype) -> float:
    """Multiplications and additions a second on operands of a dtype."""
    rates = {torch.float16: device.fp16_flops, torch.bfloat16: device.bf16_flops}
    return rates.get(dtype, device.fp32_flops)


def in_plain_loops(problem: ForwardProblem, device: Device, dtype: torch.dtype) -> bool:
    """Whether torch leaves the convolution, in this dtype, to its own loops instead of oneDNN: a
    single small sample in float32, the filter narrow; bfloat16 without AVX-512."""
    conv = problem.conv
    assert conv is not None
    if dtype != torch.float32:
        return dtype == torch.bfloat16 and device.vector_bytes < AVX512_BYTES
    kernel = (1, *conv.kernel_size)[-2:]
    if conv.groups > 1 or min(kernel) > 3 or problem.batch > 1:
        return False
    axes = (1, *problem.spatial) if len(problem.spatial) == 1 else problem.spatial
    return problem.channels * math.prod(axes[:2]) <= _SMALL_SAMPLE


def product_milliseconds(problem: ForwardProblem, device: Device, dtype: torch.dtype) -> float:
    return problem.conv_flops / flops_rate(device, dtype) * 1e3


def matrix_milliseconds(problem: ForwardProblem, device: Device, dtype: torch.dtype) -> float:
    """The same by matrix products, which in float32 are another library's."""
    if dtype != torch.float32:
        return product_milliseconds(problem, device, dtype)
    return problem.conv_flops / (device.product_flops or device.fp32_flops) * 1e3


def is_depthwise(problem: ForwardProblem) -> bool:
    conv = problem.conv
    assert conv is not None
    return conv.groups == conv.in_channels > 1


def adds_bias_slowly(
    problem: ForwardProblem, device: Device, dtype: torch.dtype, layout: Layout
) -> bool:
    """Whether oneDNN has no kernel that adds a bias to the transposed convolution: it then goes
    over the output a second time, element by element.

    Seen with AVX-512: where a stride does not divide the output, with dilation, with groups in 16
    bits, and over channels first where the stride is 1.
    """
    conv = problem.conv
    assert conv is not None
    if not problem.bias or in_plain_loops(problem, device, dtype):
        return False
    if any(size % step for size, step in zip(problem.output_spatial, conv.stride, strict=True)):
        return True
    if any(d > 1 and k > 1 for d, k in zip(conv.dilation, conv.kernel_size, strict=True)):
        return True
    return (conv.groups > 1 and dtype.itemsize == 2) or (max(conv.stride) == 1 and layout != "nhwc")


def moved_bytes(problem: ForwardProblem, dtype: torch.dtype) -> int:
    """Of the convolution's input and output."""
    return (problem.input_elements + problem.output_elements) * dtype.itemsize


def copy_milliseconds(
    device: Device, elements: int, source: torch.dtype, target: torch.dtype
) -> float:
    """A tensor brought into another dtype or layout."""
    moved = device.copy_milliseconds(elements * (source.itemsize + target.itemsize))
    return moved + CALL * device.launch_milliseconds


def weight_elements(problem: ForwardProblem) -> int:
    conv = problem.conv
    assert conv is not None
    return conv.in_channels * conv.out_channels // conv.groups * math.prod(conv.kernel_size)


def weight_lies_last(problem: ForwardProblem) -> bool:
    """Whether output channels are innermost in the weight, in front of which the taps lie then."""
    conv = problem.conv
    assert conv is not None
    return conv.weight_strides[1] == 1 and math.prod(conv.kernel_size) > 1


def _plain_loops_milliseconds(
    problem: ForwardProblem, device: Device, dtype: torch.dtype, layout: Layout
) -> float:
    """Of the convolution or a gradient in torch's own loops: one matrix product a sample, and
    columns of it that are spread out in memory."""
    conv = problem.conv
    assert conv is not None
    pixels = problem.batch * math.prod(problem.spatial)
    columns = pixels * conv.out_channels * math.prod(conv.kernel_size)
    passes = 2.0 if layout == "nhwc" else 1.0
    # They take a contiguous weight, and bring others into that order against the grain.
    weight = weight_elements(problem) * (5 if weight_lies_last(problem) else 1)
    moved = (_COLUMN_PASSES * columns + weight) * dtype.itemsize
    moved += passes * moved_bytes(problem, dtype)
    return matrix_milliseconds(problem, device, dtype) + device.copy_milliseconds(moved)


def _milliseconds(
    problem: ForwardProblem,
    device: Device,
    dtype: torch.dtype,
    layout: Layout,
    passes: float,
    share: float,
    what: str,
) -> float:
    """``what`` is "forward" or the gradient's name."""
    # Lines of channels last are copied to channels first before anything else.
    if layout == "nhwc":
        passes = passes + 1.0 if len(problem.spatial) == 1 else 1.0
    if in_plain_loops(problem, device, dtype):
        return _plain_loops_milliseconds(problem, device, dtype, layout)
    products = product_milliseconds(problem, device, dtype) / share
    if is_depthwise(problem) and what in _DEPTHWISE:
        share = _DEPTHWISE[what][min(4, dtype.itemsize), result_layout(layout)]
        products = problem.conv_flops / (share * device.fp32_flops) * 1e3
    return products + device.copy_milliseconds(passes * moved_bytes(problem, dtype))


def forward_milliseconds(
    problem: ForwardProblem,
    device: Device,
    dtype: torch.dtype,
    layout: Layout,
    *,
    one_more_pass: bool = False,
) -> float:
    """torch's transposed convolution of operands of this dtype and layout; ``one_more_pass`` over
    the output is made instead of adding the bias slowly."""
    total = CALL * device.launch_milliseconds
    if adds_bias_slowly(problem, device, dtype, layout):
        if one_more_pass:
            total += device.copy_milliseconds(problem.output_elements * dtype.itemsize)
        else:
            slow = _SLOW_BIAS.get(dtype.itemsize, _SLOW_BIAS[4])
            total += problem.output_elements * slow * 1e3
    return total + _milliseconds(problem, device, dtype, layout, _TRANSPOSED_PASSES, 1.0, "forward")


def gradients_milliseconds(
    problem: ForwardProblem,
    device: Device,
    dtype: torch.dtype,
    layout: Layout,
    gradients: Iterable[str],
) -> float:
    """torch's gradients of some of "input", "weight" and "bias" by one call."""
    total = CALL * device.launch_milliseconds
    asked = set(gradients)
    if "bias" in asked:
        slow = layout == "nhwc" or dtype.itemsize == 2
        passes = _SLOW_BIAS_PASSES if slow else _BIAS_PASSES
        if not in_plain_loops(problem, device, dtype):
            asked.add("weight")  # oneDNN computes both or none
        elif layout != "nhwc":
            passes = 1.0
        total += device.copy_milliseconds(passes * problem.output_elements * dtype.itemsize)
    for gradient, share in (("input", 1.0), ("weight", _WEIGHT_GRADIENT)):
        if gradient in asked:
            total += _milliseconds(
                problem, device, dtype, layout, _GRADIENT_PASSES, share, gradient
            )
    return total
