"""Gradients of the convolution in other forms than torch's own call."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from fusedconv import _C
from fusedconv.device import Device
from fusedconv.kernels import onednn
from fusedconv.kernels.compiled import group_norm_problem
from fusedconv.kernels.cpu.convolution import (
    PROVIDER,
    as_stored,
    computing_dtype,
    conversion_milliseconds,
    is_widened,
    planar,
)
from fusedconv.kernels.cpu.matrix_product import (
    chains,
    interleaved,
    products,
    summed_over_positions,
    tiles_last,
    tiles_output,
)
from fusedconv.layout import Layout, dense, layout_of, result_layout
from fusedconv.plan import BackwardKernel, BackwardPlan, BackwardTensors, Gradients, Kernel
from fusedconv.precision import COMPILED_DTYPES, dtype_name
from fusedconv.problem import ActNormAct, BackwardProblem, ForwardProblem
from fusedconv.reference import convolution_gradients
from fusedconv.support import Support

_NAMES = ("input", "weight", "bias")


def supports_gradients(problem: BackwardProblem, device: Device) -> Support:
    """What every form asks of a problem."""
    forward = problem.forward
    if device.type != "cpu":
        return Support.no(f"runs on the processor, the input is on {device.type}")
    if forward.conv is None:
        return Support.no("there is no convolution")
    if forward.dtype not in COMPILED_DTYPES:
        return Support.no(f"dtype is {dtype_name(forward.dtype)}, which torch's call computes in")
    if forward.input_elements == 0 or forward.output_elements == 0:
        return Support.no("the input is empty")
    return Support.yes()


def _conversion_milliseconds(
    problem: BackwardProblem, device: Device, dtype: torch.dtype, layout: str
) -> float:
    """Of input, weight and output gradient; behind an epilogue the last is in float32."""
    forward = problem.forward
    total = conversion_milliseconds(forward, device, dtype, layout)
    source = torch.float32 if "epilogue" in problem.parts else problem.grad_dtype
    if source != dtype:
        total += onednn.copy_milliseconds(device, forward.output_elements, source, dtype)
    return total


# ---- torch's operator on other tensors -----------------------------------------------------------


#: Along an axis, that are gone through.
_MOST_TAPS = 4096


def _supports_weight(forward: ForwardProblem) -> Support:
    """Whether oneDNN's gradient to the weight, which comes with the bias's, is sound on channels
    last. With more padding than keeps extents it wrote beyond its memory or left garbage, and where
    a tap meets no output, what its memory held: 8,000 random problems without either were right."""
    conv = forward.conv
    assert conv is not None
    axes = zip(
        forward.spatial,
        forward.output_spatial,
        conv.kernel_size,
        conv.stride,
        conv.padding,
        conv.dilation,
        strict=True,
    )
    for extent, output, kernel, stride, padding, dilation in axes:
        if kernel > _MOST_TAPS:
            return Support.no(
                f"a filter of {kernel} taps along an axis, up to {_MOST_TAPS} are seen"
            )
        if 2 * padding > dilation * (kernel - 1):
            return Support.no(
                f"padding is {padding} of {kernel} taps: oneDNN's gradient to the weight is not "
                "sound there"
            )
        for tap in range(kernel):
            # The first input pixel whose output is not in front of the first.
            first = max(0, -(-(padding - dilation * tap) // stride))
            if first >= extent or stride * first - padding + dilation * tap >= output:
                return Support.no(
                    f"tap {tap} of {kernel} meets no output: oneDNN's gradient to the weight is "
                    "not sound there"
                )
    return Support.yes()


class _WidenedPlan(BackwardPlan):
    def __init__(self, kernel: str, problem: BackwardProblem, dtype: torch.dtype) -> None:
        forward = problem.forward
        conv = forward.conv
        assert conv is not None
        self.kernel = kernel
        self.as_planes = len(forward.spatial) == 1
        if self.as_planes:
            spatial = (1, *forward.spatial)
            forward = dataclasses.replace(forward, conv=planar(conv), spatial=spatial)
        self.dtype = dtype
        self.layout = result_layout(forward.layout)
        self.problem = dataclasses.replace(
            problem, forward=dataclasses.replace(forward, dtype=dtype)
        )
        asked = ", ".join(name for name in _NAMES if name in problem.gradients)
        order = "channels last" if self.layout == "nhwc" else "channels first"
        self.steps = (
            f"torch.ops.aten.convolution_backward for {asked}, {dtype_name(dtype)}, {order}",
        )

    def run(self, tensors: BackwardTensors) -> Gradients:
        assert tensors.weight is not None

        def prepared(tensor: Tensor, layout: Layout) -> Tensor:
            stored = as_stored(tensor, layout, self.dtype)
            return stored.unsqueeze(2) if self.as_planes else stored

        grad = prepared(tensors.of_convolution, self.layout)
        found = convolution_gradients(
            self.problem,
            tensors._replace(
                grad_output=grad,
                grad_conv_output=None,
                input=prepared(tensors.input, self.layout),
                weight=prepared(tensors.weight, "nchw"),
            ),
        )
        if not self.as_planes:
            return found

        def line(gradient: Tensor | None) -> Tensor | None:
            return None if gradient is None else gradient.squeeze(2)

        return found._replace(input=line(found.input), weight=line(found.weight))


class WidenedGradients(BackwardKernel):
    """torch's operator in float32 where the processor multiplies that faster, and on lines of
    channels last as planes of one line, which torch would copy to channels first."""

    name = f"{PROVIDER}_convolution_backward"
    provider = PROVIDER
    computes = frozenset(_NAMES)

    def supports(self, problem: BackwardProblem, device: Device) -> Support:
        forward = problem.forward
        support = supports_gradients(problem, device)
        if not support:
            return support
        if not is_widened(forward, device):
            if len(forward.spatial) != 1 or forward.layout != "nhwc":
                return Support.no("torch's own call is this form already")
            if forward.dtype == torch.float32 and "input" in problem.gradients:
                return Support.no("its float32 sums for the input are less exact than torch's")
            assert forward.conv is not None
            if forward.dtype == torch.float32 and forward.conv.groups > 1:
                return Support.no("its float32 sums of groups are less exact than torch's")
        if problem.gradients & {"weight", "bias"}:
            return _supports_weight(forward)
        return support

    def cost(self, problem: BackwardProblem, device: Device) -> float:
        forward = problem.forward
        dtype = computing_dtype(forward, device)
        layout = result_layout(forward.layout)
        total = _conversion_milliseconds(problem, device, dtype, layout)
        if len(forward.spatial) == 1:
            assert forward.conv is not None
            spatial = (1, *forward.spatial)
            forward = dataclasses.replace(forward, conv=planar(forward.conv), spatial=spatial)
        parts = problem.parts
        return total + onednn.gradients_milliseconds(forward, device, dtype, layout, parts)

    def compile(self, problem: BackwardProblem, device: Device) -> BackwardPlan:
        return _WidenedPlan(self.name, problem, computing_dtype(problem.forward, device))


# ---- matrix products -----------------------------------------------------------------------------


class _MatrixProductPlan(BackwardPlan):
    def __init__(self, kernel: str, problem: BackwardProblem, dtype: torch.dtype) -> None:
        assert problem.forward.conv is not None
        self.kernel = kernel
        self.gradients = problem.gradients
        self.tile = problem.forward.conv.kernel_size
        self.dtype = dtype
        self.layout = result_layout(problem.forward.layout)
        asked = [name for name in ("input", "weight") if name in problem.gradients]
        order = "channels last" if self.layout == "nhwc" else "channels first"
        self.steps = tuple(
            f"torch matrix product for {name}, {dtype_name(dtype)}, {order}" for name in asked
        )

    def run(self, tensors: BackwardTensors) -> Gradients:
        assert tensors.weight is not None
        grad = as_stored(tensors.of_convolution, self.layout, self.dtype)
        input = as_stored(tensors.input, self.layout, self.dtype)
        compute = self._channels_last if self.layout == "nhwc" else self._channels_first
        return compute(grad, input, tensors.weight.to(self.dtype))

    def _channels_last(self, grad: Tensor, input: Tensor, weight: Tensor) -> Gradients:
        axes = len(self.tile)
        order, back = (0, *range(2, axes + 2), 1), (0, axes + 1, *range(1, axes + 1))
        tiles = tiles_last(grad, self.tile)
        channels = input.shape[1]
        found = Gradients()
        if "input" in self.gradients:
            product = tiles @ weight.permute(order).reshape(channels, -1).t()
            pixels = product.view(input.shape[0], *input.shape[2:], channels)
            found = found._replace(input=pixels.permute(back))
        if "weight" in self.gradients:
            pixels = input.permute(order).reshape(1, -1, channels)
            product = summed_over_positions(pixels, tiles.unsqueeze(0))
            taps = product.view(channels, *self.tile, weight.shape[1])
            found = found._replace(weight=taps.permute(back))
        return found

    def _channels_first(self, grad: Tensor, input: Tensor, weight: Tensor) -> Gradients:
        axes = len(self.tile)
        batch, channels, *spatial = input.shape
        split = grad.reshape(batch, grad.shape[1], *interleaved(spatial, self.tile))
        order = (0, 1, *range(3, 2 * axes + 2, 2), *range(2, 2 * axes + 2, 2))
        tiles = split.permute(order).reshape(batch, weight[0].numel(), math.prod(spatial))
        found = Gradients()
        if "input" in self.gradients:
            matrix = weight.reshape(channels, -1).t().expand(batch, -1, -1)
            found = found._replace(input=products(matrix, tiles).view(input.shape))
        if "weight" in self.gradients:
            pixels = input.reshape(batch, channels, -1)
            product = summed_over_positions(pixels.transpose(1, 2), tiles.transpose(1, 2))
            found = found._replace(weight=product.view(weight.shape))
        return found


class MatrixProductGradients(BackwardKernel):
    """Matrix products of tiles of the output's gradient, where each input pixel has one to
    itself."""

    name = f"{PROVIDER}_matrix_product_backward"
    provider = PROVIDER
    computes = frozenset({"input", "weight"})

    def supports(self, problem: BackwardProblem, device: Device) -> Support:
        forward = problem.forward
        support = supports_gradients(problem, device)
        if not support:
            return support
        assert forward.conv is not None
        support = tiles_output(forward.conv)
        if not support or forward.dtype != torch.float32:
            return support
        taps = math.prod(forward.conv.kernel_size)
        columns, positions = taps * forward.output_channels, math.prod(forward.spatial)
        lengths = {"input": (positions, columns), "weight": (columns, positions)}
        for name in ("input", "weight"):
            chained = name in problem.gradients and chains(
                forward, forward.channels, *lengths[name]
            )
            if chained and result_layout(forward.layout) == "nchw":
                return Support.no(
                    f"its float32 sums of few channels for the {name} are less exact than torch's"
                )
        if "input" not in problem.gradients:
            return support
        if taps > 1 and not onednn.in_plain_loops(forward, device, forward.dtype):
            return Support.no("its float32 sums for the input are less exact than torch's")
        return support

    def cost(self, problem: BackwardProblem, device: Device) -> float:
        forward = problem.forward
        assert forward.conv is not None
        dtype = computing_dtype(forward, device)
        layout = result_layout(forward.layout)
        total = _conversion_milliseconds(problem, device, dtype, layout)
        if math.prod(forward.conv.kernel_size) > 1:
            total += onednn.copy_milliseconds(device, forward.output_elements, dtype, dtype)
        # The taps may have to be brought in front of the weight's channels, or back. Products of
        # channels first, a batch at a time, took twice as long as torch's with large weights.
        reorders = (layout == "nhwc") != onednn.weight_lies_last(forward)
        passes = 3.0 if reorders else 2.0 if layout == "nchw" else 1.0
        products = onednn.matrix_milliseconds(forward, device, dtype) + device.copy_milliseconds(
            onednn.moved_bytes(forward, dtype)
            + passes * onednn.weight_elements(forward) * dtype.itemsize
        )
        return total + len(problem.parts) * (products + onednn.CALL * device.launch_milliseconds)

    def compile(self, problem: BackwardProblem, device: Device) -> BackwardPlan:
        return _MatrixProductPlan(self.name, problem, computing_dtype(problem.forward, device))


# ---- the bias ------------------------------------------------------------------------------------


class _BiasPlan(BackwardPlan):
    steps = ("fused sums of each channel for bias (fusedconv._C)",)

    def __init__(self, kernel: str, problem: BackwardProblem) -> None:
        self.kernel = kernel
        self.channels = problem.forward.output_channels
        self.layout = result_layout(problem.forward.layout)
        sums = dataclasses.replace(problem.forward, epilogue=(), save=False)
        form = ActNormAct(False, "identity", None, "identity")
        # Behind an epilogue the gradient is in float32, whatever the problem's dtype.
        self.compiled = {
            (dtype, layout): group_norm_problem(
                sums,
                form,
                batch=sums.batch,
                input_layout=layout,
                output_layout=layout,
                dtype=dtype,
                output_dtype=dtype,
            )
            for dtype in {problem.forward.dtype, torch.float32}
            for layout in ("nchw", "nhwc")
        }

    def run(self, tensors: BackwardTensors) -> Gradients:
        grad = tensors.of_convolution
        layout = layout_of(grad.shape, grad.stride())
        if layout == "strided":
            layout = self.layout
            grad = dense(grad, layout)
        compiled = self.compiled.get((grad.dtype, layout))
        if compiled is None:
            grad = grad.float()
            compiled = self.compiled[torch.float32, layout]
        sums = grad.new_empty(self.channels, dtype=torch.float32)
        threads = torch.get_num_threads()
        _C.cpu.channel_sums(compiled, grad.data_ptr(), sums.data_ptr(), threads)
        return Gradients(bias=sums)


class BiasGradient(BackwardKernel):
    """One pass over the output's gradient. oneDNN computes the bias's with the weight's, and on
    channels last takes longer for it than for the products."""

    name = f"{PROVIDER}_bias_backward"
    provider = PROVIDER
    computes = frozenset({"bias"})

    def supports(self, problem: BackwardProblem, device: Device) -> Support:
        return supports_gradients(problem, device)

    def cost(self, problem: BackwardProblem, device: Device) -> float:
        size = problem.forward.output_elements * problem.grad_dtype.itemsize
        return device.launch_milliseconds + device.copy_milliseconds(size)

    def compile(self, problem: BackwardProblem, device: Device) -> BackwardPlan:
        return _BiasPlan(self.name, problem)


def kernels() -> list[Kernel]:
    return [WidenedGradients(), MatrixProductGradients(), BiasGradient()]
