"""Transposed convolutions of few channels a group on processors, depthwise ones above all, and
their gradients: compiled sums of shifted lines. oneDNN leaves depthwise ones to loops that reach a
fiftieth of the processor's rate.

Everything is summed in float32, whatever the dtype, over channels first; other layouts are copied.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from fusedconv import _C
from fusedconv.device import Device
from fusedconv.kernels import onednn
from fusedconv.kernels.compiled import address, supports_extents, transposed_problem
from fusedconv.kernels.cpu.conv_gradients import supports_gradients
from fusedconv.kernels.cpu.convolution import (
    PROVIDER,
    Convolution,
    Form,
    as_stored,
    conversion_milliseconds,
    supports_form,
)
from fusedconv.layout import empty
from fusedconv.plan import BackwardKernel, BackwardPlan, BackwardTensors, Gradients, Kernel
from fusedconv.precision import COMPILED_DTYPES, dtype_name
from fusedconv.problem import BackwardProblem, ConvTransposeGeometry, ForwardProblem
from fusedconv.support import Support

#: Of a group: pairs of an input and an output channel, or input channels.
MOST_PRODUCTS, MOST_INPUTS = 64, 16
#: Up to so many input channels a group the float32 sums are as exact as those of torch's own loops,
#: which are matrix products; of 16 they had 1.9 times the error.
_EXACT_INPUTS = 8
#: Bytes of lines that a thread holds.
_MOST_BYTES = 16 << 20
#: The shares of the processor's rate that the loops reach, passes over what a pass reads and
#: writes, and seconds that a line of a phase takes beside. Measured on two cores with AVX-512.
_SHARE, _WEIGHT_SHARE, _PASSES, _LINE = 0.2, 0.15, 1.5, 20e-9


@functools.lru_cache(maxsize=1024)
def _compiled(conv: ConvTransposeGeometry, spatial: tuple[int, ...]) -> Any:
    return transposed_problem(conv, spatial, "nchw", True)


def _float_weight(weight: Tensor) -> Tensor:
    return weight.to(torch.float32).contiguous()


def supports_channels(conv: ConvTransposeGeometry, most_inputs: int) -> Support:
    """Whether a group has as few channels as the loops are made for: ``most_inputs`` of the input,
    whatever the output, or ``MOST_PRODUCTS``."""
    inputs, outputs = conv.in_channels // conv.groups, conv.out_channels // conv.groups
    if inputs * outputs <= MOST_PRODUCTS or inputs <= most_inputs:
        return Support.yes()
    few = f"up to {most_inputs} input channels or " if most_inputs else "up to "
    return Support.no(
        f"a group has {inputs} input and {outputs} output channels, {few}{MOST_PRODUCTS} pairs are "
        "served"
    )


def _supports_lines(forward: ForwardProblem) -> Support:
    """Whether the loops can count the problem, and a thread hold the lines that meet one."""
    conv = forward.conv
    assert conv is not None
    support = supports_extents(conv, forward.spatial)
    if not support:
        return support
    stride, most = conv.stride[-1], _C.cpu.most_column_stride
    if stride > most:
        return Support.no(f"a stride of {stride} along the last axis, up to {most} are served")
    channels = max(conv.in_channels, conv.out_channels) // conv.groups
    reach = conv.dilation[-1] * (conv.kernel_size[-1] - 1) // stride
    line = forward.spatial[-1] + 2 * reach + 64
    lines = (channels * math.prod(conv.kernel_size[:-1]) + 2) * stride
    if 4 * lines * line > _MOST_BYTES:
        return Support.no(
            f"{lines} lines of {line} meet one, {_MOST_BYTES >> 20} MB of them are held"
        )
    return Support.yes()


def _line_milliseconds(forward: ForwardProblem, channels: int, extents: tuple[int, ...]) -> float:
    """What lines of each of the stride's phases take beside their products."""
    assert forward.conv is not None
    lines = forward.batch * channels * math.prod(extents[:-1]) * forward.conv.stride[-1]
    return lines * _LINE * 1e3


# ---- forward -------------------------------------------------------------------------------------


class _Direct(Convolution):
    def __init__(self, problem: ForwardProblem) -> None:
        super().__init__(problem, problem.dtype, "nchw", "direct sums (fusedconv._C)")
        self._problem = _compiled(self.conv, problem.spatial)
        self._shape = problem.output_shape

    def compute(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        output = empty(input, self._shape, "nchw", self.dtype)
        weight = _float_weight(weight)
        bias = None if bias is None else bias.to(torch.float32).contiguous()
        _C.cpu.direct_convolution(
            self._problem,
            COMPILED_DTYPES[self.dtype],
            input.shape[0],
            input.data_ptr(),
            weight.data_ptr(),
            address(bias),
            output.data_ptr(),
            torch.get_num_threads(),
        )
        return output


class Direct(Form):
    """Sums of shifted lines of the input, a phase of the stride at a time."""

    name = "direct"

    def supports(self, problem: ForwardProblem, device: Device) -> Support:
        conv = problem.conv
        assert conv is not None
        for support in (
            supports_form(problem),
            supports_channels(conv, MOST_INPUTS),
            _supports_lines(problem),
        ):
            if not support:
                return support
        inputs = conv.in_channels // conv.groups
        plain = onednn.in_plain_loops(problem, device, problem.dtype)
        if problem.dtype == torch.float32 and plain and inputs > _EXACT_INPUTS:
            return Support.no(
                f"sums {inputs} input channels in float32, where torch's own loops sum more than "
                f"{_EXACT_INPUTS} more exactly"
            )
        return Support.yes()

    def cost(self, problem: ForwardProblem, device: Device) -> float:
        sums = problem.conv_flops / (_SHARE * device.fp32_flops) * 1e3
        sums += _line_milliseconds(problem, problem.output_channels, problem.output_spatial)
        moved = _PASSES * onednn.moved_bytes(problem, problem.dtype)
        return (
            conversion_milliseconds(problem, device, problem.dtype, "nchw")
            + max(sums, device.copy_milliseconds(moved))
            + 2 * onednn.CALL * device.launch_milliseconds
        )

    def compile(self, problem: ForwardProblem, device: Device) -> Convolution:
        return _Direct(problem)


# ---- backward ------------------------------------------------------------------------------------


class _GradientsPlan(BackwardPlan):
    def __init__(self, kernel: str, problem: BackwardProblem) -> None:
        forward = problem.forward
        assert forward.conv is not None
        self.kernel = kernel
        self.gradients = problem.gradients
        self.dtype = forward.dtype
        self.input_shape = forward.input_shape
        self._problem = _compiled(forward.conv, forward.spatial)
        asked = [name for name in ("input", "weight") if name in problem.gradients]
        self.steps = tuple(f"direct sums for {name} (fusedconv._C)" for name in asked)

    def run(self, tensors: BackwardTensors) -> Gradients:
        assert tensors.weight is not None
        grad = as_stored(tensors.of_convolution, "nchw", self.dtype)
        common = self._problem, COMPILED_DTYPES[self.dtype], grad.shape[0]
        threads = torch.get_num_threads()
        grad_input = grad_weight = None
        if "input" in self.gradients:
            weight = _float_weight(tensors.weight)
            grad_input = empty(grad, self.input_shape, "nchw", self.dtype)
            _C.cpu.direct_input_gradient(
                *common, grad.data_ptr(), weight.data_ptr(), grad_input.data_ptr(), threads
            )
        if "weight" in self.gradients:
            input = as_stored(tensors.input, "nchw", self.dtype)
            grad_weight = grad.new_empty(tensors.weight.shape, dtype=torch.float32)
            _C.cpu.direct_weight_gradient(
                *common, input.data_ptr(), grad.data_ptr(), grad_weight.data_ptr(), threads
            )
        return Gradients(input=grad_input, weight=grad_weight)


class DirectGradients(BackwardKernel):
    """Sums of shifted lines of the output gradient's phases for the input, and of products of
    lines for the weight."""

    name = f"{PROVIDER}_direct_backward"
    provider = PROVIDER
    computes = frozenset({"input", "weight"})

    def supports(self, problem: BackwardProblem, device: Device) -> Support:
        support = supports_gradients(problem, device)
        if not support:
            return support
        forward = problem.forward
        assert forward.conv is not None
        if problem.grad_dtype not in (forward.dtype, torch.float32):
            return Support.no(f"dtype of the output's gradient is {dtype_name(problem.grad_dtype)}")
        # Sums of the weight's gradient are a vector for each of its elements.
        support = supports_channels(forward.conv, 0)
        return support and _supports_lines(forward)

    def cost(self, problem: BackwardProblem, device: Device) -> float:
        forward = problem.forward
        total = 0.0
        if forward.output_layout == "nhwc":
            total += onednn.copy_milliseconds(
                device, forward.output_elements, forward.dtype, forward.dtype
            )
        for name, share in (("input", _SHARE), ("weight", _WEIGHT_SHARE)):
            if name not in problem.gradients:
                continue
            sums = forward.conv_flops / (share * device.fp32_flops) * 1e3
            sums += _line_milliseconds(forward, forward.channels, forward.spatial)
            moved = _PASSES * onednn.moved_bytes(forward, forward.dtype)
            total += max(sums, device.copy_milliseconds(moved))
            total += 2 * onednn.CALL * device.launch_milliseconds
            if forward.layout != "nchw":
                total += onednn.copy_milliseconds(
                    device, forward.input_elements, forward.dtype, forward.dtype
                )
        return total

    def compile(self, problem: BackwardProblem, device: Device) -> BackwardPlan:
        return _GradientsPlan(self.name, problem)


def kernels() -> list[Kernel]:
    return [DirectGradients()]
