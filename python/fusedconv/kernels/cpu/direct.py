"""Transposed convolutions of few channels a group on processors, depthwise ones above all, and
their gradients: compiled sums of shifted lines. oneDNN leaves depthwise ones to loops that reach a
fiftieth of the processor's rate.

Everything is summed in float32, whatever the dtype, over channels first; other layouts are copied.
"""

from __future__ import annotations

import functools
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

#: Of a group: products of an input and an output channel, or input channels.
MOST_PRODUCTS, MOST_INPUTS = 64, 16
#: The shares of the processor's rate that the loops reach, and passes over what a pass reads and
#: writes. Measured on two cores with AVX-512.
_SHARE, _WEIGHT_SHARE, _PASSES = 0.2, 0.15, 1.5


@functools.lru_cache(maxsize=1024)
def _compiled(conv: ConvTransposeGeometry, spatial: tuple[int, ...]) -> Any:
    return transposed_problem(conv, spatial, "nchw", True)


def _float_weight(weight: Tensor) -> Tensor:
    return weight.to(torch.float32).contiguous()


def supports_channels(conv: ConvTransposeGeometry) -> Support:
    """Whether a group has as few channels as the loops are made for."""
    inputs, outputs = conv.in_channels // conv.groups, conv.out_channels // conv.groups
    if inputs * outputs <= MOST_PRODUCTS or inputs <= MOST_INPUTS:
        return Support.yes()
    return Support.no(
        f"a group has {inputs} input and {outputs} output channels, up to {MOST_INPUTS} input "
        f"channels or {MOST_PRODUCTS} pairs are served"
    )


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
            supports_channels(conv),
            supports_extents(conv, problem.spatial),
        ):
            if not support:
                return support
        return Support.yes()

    def cost(self, problem: ForwardProblem, device: Device) -> float:
        sums = problem.conv_flops / (_SHARE * device.fp32_flops) * 1e3
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
            grad_weight = torch.empty(tensors.weight.shape, dtype=torch.float32)
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
        support = supports_channels(forward.conv)
        return support and supports_extents(forward.conv, forward.spatial)

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
