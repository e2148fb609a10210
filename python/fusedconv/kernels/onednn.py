"""What torch's convolutions cost on a processor. oneDNN computes them, but for small ones.

The figures were fitted on two cores with AVX-512 and no instructions for 16 bits; they are to order
ways of computing the same, and their sizes mean little elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from fusedconv.device import AVX512_BYTES, Device
from fusedconv.problem import ForwardProblem

#: What a call of an operator costs, in launches.
CALL = 3.0
#: Passes over input and output that bring channels-first tensors into oneDNN's blocks and back, for
#: a transposed convolution and for a gradient.
_TRANSPOSED_PASSES = 7.0
_GRADIENT_PASSES = 3.0
#: The same for an ordinary convolution.
FORWARD_PASSES = 3.5
#: The share of the products' rate that torch's own loops reach, and that of a weight's gradient,
#: whose sums are over positions.
_PLAIN_LOOPS = 1 / 8
_WEIGHT_GRADIENT = 0.6
#: Passes over the output's gradient that the bias's takes on channels last.
_BIAS_PASSES_LAST = 4.0
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


def moved_bytes(problem: ForwardProblem, dtype: torch.dtype) -> int:
    """Of the convolution's input and output."""
    return (problem.input_elements + problem.output_elements) * dtype.itemsize


def copy_milliseconds(
    device: Device, elements: int, source: torch.dtype, target: torch.dtype
) -> float:
    """A tensor brought into another dtype or layout."""
    moved = device.copy_milliseconds(elements * (source.itemsize + target.itemsize))
    return moved + CALL * device.launch_milliseconds


def _milliseconds(
    problem: ForwardProblem,
    device: Device,
    dtype: torch.dtype,
    layout: str,
    passes: float,
    share: float,
) -> float:
    # Lines of channels last are copied to channels first before anything else.
    if layout == "nhwc":
        passes = passes + 1.0 if len(problem.spatial) == 1 else 1.0
    if in_plain_loops(problem, device, dtype):
        share = _PLAIN_LOOPS
    return product_milliseconds(problem, device, dtype) / share + device.copy_milliseconds(
        passes * moved_bytes(problem, dtype)
    )


def forward_milliseconds(
    problem: ForwardProblem, device: Device, dtype: torch.dtype, layout: str
) -> float:
    """torch's transposed convolution of operands of this dtype and layout."""
    call = CALL * device.launch_milliseconds
    return call + _milliseconds(problem, device, dtype, layout, _TRANSPOSED_PASSES, 1.0)


def gradients_milliseconds(
    problem: ForwardProblem,
    device: Device,
    dtype: torch.dtype,
    layout: str,
    gradients: Iterable[str],
) -> float:
    """torch's gradients of some of "input", "weight" and "bias" by one call."""
    total = CALL * device.launch_milliseconds
    asked = set(gradients)
    if "bias" in asked:
        passes = _BIAS_PASSES_LAST if layout == "nhwc" else 1.0
        total += device.copy_milliseconds(passes * problem.output_elements * dtype.itemsize)
        if not in_plain_loops(problem, device, dtype):
            asked.add("weight")  # oneDNN computes both or none
    for gradient, share in (("input", 1.0), ("weight", _WEIGHT_GRADIENT)):
        if gradient in asked:
            total += _milliseconds(problem, device, dtype, layout, _GRADIENT_PASSES, share)
    return total
