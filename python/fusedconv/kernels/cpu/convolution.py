"""Forms in which a processor computes a transposed convolution through torch's own operators.

A form differs from torch's own call in layout, dtype or operator, and is exact to 1.1 times the
error of that call. In 16 bits it computes in float32 where the processor multiplies that faster,
and leaves the result unrounded. In float32 the order of the sums decides: channels last adds the
products of all channels of a tap one after another, which is up to four times less exact than
channels first where torch's call sums in blocks of channels. Strided convolutions sum in the same
order in both.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fusedconv import _C
from fusedconv.device import AVX512_BYTES, Device
from fusedconv.kernels import onednn
from fusedconv.kernels.compiled import group_norm_problem
from fusedconv.kernels.cpu.biases import QuickBias, quick_bias
from fusedconv.layout import Layout, dense_strides, empty, owning, result_layout
from fusedconv.lowering import Phase, lower
from fusedconv.precision import COMPILED_DTYPES, dtype_name
from fusedconv.problem import ActNormAct, ConvTransposeGeometry, ForwardProblem
from fusedconv.reference import conv_transpose
from fusedconv.support import Support

#: The provider of the kernels that run forms.
PROVIDER = "cpu"

#: Up to so many input channels an ordinary convolution's float32 sums are as exact as those of
#: torch's transposed one; 256 measured 1.1 to 1.2 times its error.
_EXACT_CHANNELS = 192

_FORWARD = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


# ---- what forms share ----------------------------------------------------------------------------


def computing_dtype(problem: ForwardProblem, device: Device) -> torch.dtype:
    """The problem's dtype, or float32 where the processor multiplies that faster."""
    if onednn.flops_rate(device, problem.dtype) < device.fp32_flops:
        return torch.float32
    return problem.dtype


def is_widened(problem: ForwardProblem, device: Device) -> bool:
    """Whether float32 stands in for the problem's dtype: no order of sums is less exact then than
    the products of 16 bits that torch rounds."""
    return computing_dtype(problem, device) != problem.dtype


def as_stored(tensor: Tensor, layout: str, dtype: torch.dtype) -> Tensor:
    """The tensor in a dense layout and a dtype, by one copy where it is not."""
    wanted = dense_strides(tensor.shape, layout)
    lies = zip(tensor.shape, tensor.stride(), wanted, strict=True)
    if tensor.dtype == dtype and all(size == 1 or stride == want for size, stride, want in lies):
        return tensor
    return empty(tensor, tensor.shape, layout, dtype).copy_(tensor)


def planar(conv: ConvTransposeGeometry) -> ConvTransposeGeometry:
    """A convolution of lines as one of planes of one line: torch has channels last of planes."""
    return dataclasses.replace(
        conv,
        kernel_size=(1, *conv.kernel_size),
        stride=(1, *conv.stride),
        padding=(0, *conv.padding),
        output_padding=(0, *conv.output_padding),
        dilation=(1, *conv.dilation),
        weight_strides=(*conv.weight_strides[:2], *conv.weight_strides[1:]),
    )


def supports_form(problem: ForwardProblem) -> Support:
    """What every form asks of a problem."""
    if problem.dtype not in COMPILED_DTYPES:
        known = "/".join(map(dtype_name, COMPILED_DTYPES))
        return Support.no(f"dtype is {dtype_name(problem.dtype)}, not {known}")
    if problem.input_elements == 0 or problem.output_elements == 0:
        return Support.no("the input is empty")
    return Support.yes()


def conversion_steps(problem: ForwardProblem, dtype: torch.dtype, layout: str) -> tuple[str, ...]:
    """The copy that brings the input into what a form computes on, if one is needed."""
    changes = []
    if layout != problem.layout:
        changes.append("channels last" if layout == "nhwc" else "channels first")
    if dtype != problem.dtype:
        changes.append(dtype_name(dtype))
    return (f"torch copy of the input to {', '.join(changes)}",) if changes else ()


def conversion_milliseconds(
    problem: ForwardProblem, device: Device, dtype: torch.dtype, layout: str
) -> float:
    """What ``conversion_steps`` and the same for the weight cost."""
    total = 0.0
    if dtype != problem.dtype or layout != problem.layout:
        total += onednn.copy_milliseconds(device, problem.input_elements, problem.dtype, dtype)
    if dtype != problem.dtype:
        total += onednn.copy_milliseconds(
            device, onednn.weight_elements(problem), problem.dtype, dtype
        )
    return total


class Convolution(ABC):
    """A transposed convolution with bias in one form, ready to run.

    ``dtype`` and ``layout`` are the result's, ``steps`` its passes in words. The input is brought
    into ``input_layout`` first.
    """

    def __init__(
        self,
        problem: ForwardProblem,
        dtype: torch.dtype,
        input_layout: Layout,
        step: str,
        layout: Layout | None = None,
        *,
        bias: QuickBias | None = None,
    ) -> None:
        assert problem.conv is not None
        self.conv = problem.conv
        self.dtype = dtype
        self.input_layout = input_layout
        self.layout = input_layout if layout is None else layout
        self.steps = (
            *conversion_steps(problem, dtype, input_layout),
            f"{step}, {dtype_name(dtype)}",
        )
        #: Whether the problem's activation, which nothing else stands behind, is computed too.
        self.activates = False
        #: Of an output that is larger than the problem's.
        self.cut: tuple[Any, ...] | None = None
        self.biased = None
        if bias is not None and not bias.apart:
            self.conv = dataclasses.replace(self.conv, output_padding=bias.output_padding)
            self.cut = (..., *(slice(size) for size in problem.output_spatial))
            self.steps += ("torch copy of the output without its last lines",)
        elif bias is not None:
            self.steps += ("bias, in place (fusedconv._C)",)
            self.biased = group_norm_problem(
                problem,
                ActNormAct(False, "identity", None, "identity"),
                batch=problem.batch,
                input_layout=self.layout,
                output_layout=self.layout,
                dtype=dtype,
                output_dtype=dtype,
            )

    def run(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The convolution of tensors of the problem's shapes and dtypes."""
        apart = self.biased is not None and bias is not None
        result = self.compute(
            as_stored(input, self.input_layout, self.dtype),
            weight.to(self.dtype),
            None if bias is None or apart else bias.to(self.dtype),
        )
        if self.cut is not None:  # memory of its own, whatever axes of one element look like
            part = result[self.cut]
            result = empty(part, part.shape, self.layout, self.dtype).copy_(part)
        # Autocast around the operator lowers torch's convolution.
        result = owning(as_stored(result, self.layout, self.dtype))
        if apart:
            assert bias is not None
            bias = bias.to(torch.float32).contiguous()
            at, threads = result.data_ptr(), torch.get_num_threads()
            _C.cpu.activate(self.biased, at, at, 0, bias.data_ptr(), threads)
        return result

    @abstractmethod
    def compute(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The same of an input in ``input_layout``, everything in ``dtype``."""


class Form(ABC):
    """One way to compute a transposed convolution on a processor."""

    name: str

    @abstractmethod
    def supports(self, problem: ForwardProblem, device: Device) -> Support:
        """Whether it serves the problem's convolution as exactly as torch's call does."""

    @abstractmethod
    def cost(self, problem: ForwardProblem, device: Device) -> float:
        """Estimated milliseconds of the convolution with bias, which the problem may not have."""

    @abstractmethod
    def compile(self, problem: ForwardProblem, device: Device) -> Convolution:
        """The convolution of a supported problem."""


# ---- torch's own call ----------------------------------------------------------------------------


class _AsTorch(Convolution):
    def __init__(self, problem: ForwardProblem, device: Device) -> None:
        layout = result_layout(problem.layout)
        super().__init__(
            problem,
            problem.dtype,
            layout,
            f"torch.conv_transpose{len(problem.spatial)}d",
            bias=quick_bias(problem, device, problem.dtype, layout),
        )

    def compute(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return conv_transpose(self.conv, input, weight, bias)


class AsTorch(Form):
    """torch's own call: alone it is the reference, with a compiled pass behind it it is not."""

    name = "conv_transpose"

    def supports(self, problem: ForwardProblem, device: Device) -> Support:
        return supports_form(problem)

    def cost(self, problem: ForwardProblem, device: Device) -> float:
        return onednn.forward_milliseconds(
            problem,
            device,
            problem.dtype,
            problem.layout,
            one_more_pass=quick_bias(problem, device, problem.dtype, problem.layout) is not None,
        )

    def compile(self, problem: ForwardProblem, device: Device) -> Convolution:
        return _AsTorch(problem, device)


# ---- channels last -------------------------------------------------------------------------------


class _ChannelsLast(Convolution):
    def __init__(self, problem: ForwardProblem, device: Device, dtype: torch.dtype) -> None:
        # torch's own loops write volumes with channels first.
        slow = len(problem.spatial) == 3 and onednn.in_plain_loops(problem, device, dtype)
        super().__init__(
            problem,
            dtype,
            "nhwc",
            f"torch.conv_transpose{max(2, len(problem.spatial))}d on channels last",
            "nchw" if slow else "nhwc",
            bias=quick_bias(problem, device, dtype, "nhwc"),
        )

    def compute(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if input.dim() > 3:
            return conv_transpose(self.conv, input, weight, bias)
        lines = input.unsqueeze(2), weight.unsqueeze(2)
        return conv_transpose(planar(self.conv), *lines, bias).squeeze(2)


class ChannelsLast(Form):
    """torch's transposed convolution on channels last: oneDNN reads and writes those as they lie,
    and brings channels first into blocks of its own and back."""

    name = "channels_last"

    def supports(self, problem: ForwardProblem, device: Device) -> Support:
        conv = problem.conv
        assert conv is not None
        if is_widened(problem, device):
            return supports_form(problem)
        if problem.layout == "nhwc" and len(problem.spatial) > 1:
            return Support.no("torch's own call is this form already")
        if problem.dtype == torch.float32 and max(conv.stride) == 1:
            return Support.no("its float32 sums are less exact than torch's where the stride is 1")
        return supports_form(problem)

    def cost(self, problem: ForwardProblem, device: Device) -> float:
        dtype = computing_dtype(problem, device)
        # Lines are run as planes.
        spatial = problem.spatial if len(problem.spatial) > 1 else (1, *problem.spatial)
        assert problem.conv is not None
        conv = problem.conv if len(problem.spatial) > 1 else planar(problem.conv)
        planes = dataclasses.replace(problem, conv=conv, spatial=spatial)
        again = quick_bias(problem, device, dtype, "nhwc") is not None
        converting = conversion_milliseconds(problem, device, dtype, "nhwc")
        return converting + onednn.forward_milliseconds(
            planes, device, dtype, "nhwc", one_more_pass=again
        )

    def compile(self, problem: ForwardProblem, device: Device) -> Convolution:
        return _ChannelsLast(problem, device, computing_dtype(problem, device))


# ---- an ordinary convolution ---------------------------------------------------------------------


def _ordinary(problem: ForwardProblem) -> Phase | Support:
    """The convolution as an ordinary one of stride 1 with the same padding on both sides."""
    conv = problem.conv
    assert conv is not None
    if conv.groups != 1:
        return Support.no(f"groups are {conv.groups}, only 1 is served")
    phase = lower(conv, problem.spatial).single()
    if isinstance(phase, Support):
        return phase
    for extent, output, taps, padding, dilation in zip(
        phase.input, phase.output, phase.taps, phase.lower_padding, phase.dilation, strict=True
    ):
        if output != extent + 2 * padding - dilation * (taps - 1):
            return Support.no("output padding asks for more zeros behind the input than in front")
    return phase


def _ordinary_layout(problem: ForwardProblem, calls_onednn: bool) -> Layout:
    if calls_onednn:
        return "nhwc"
    # torch copies lines to channels first by itself.
    return "nchw" if len(problem.spatial) == 1 else result_layout(problem.layout)


class _OrdinaryConvolution(Convolution):
    def __init__(
        self, problem: ForwardProblem, dtype: torch.dtype, phase: Phase, calls_onednn: bool
    ) -> None:
        layout = _ordinary_layout(problem, calls_onednn)
        step = f"torch.conv{len(problem.spatial)}d with the filter flipped"
        if calls_onednn:
            step = "torch.mkldnn_convolution with the filter flipped, channels last"
        super().__init__(problem, dtype, layout, step)
        axes = len(problem.spatial)
        self.padding = phase.lower_padding[-axes:]
        self.dilation = phase.dilation[-axes:]
        self.calls_onednn = calls_onednn

    def compute(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        flipped = weight.transpose(0, 1).flip(list(range(2, weight.dim())))
        stride = (1,) * len(self.padding)
        arguments = (self.padding, stride, self.dilation, 1)
        if self.calls_onednn:
            return torch.mkldnn_convolution(input, flipped, bias, *arguments)
        result: Tensor = _FORWARD[len(stride)](
            input, flipped, bias, stride, self.padding, self.dilation
        )
        return result


class OrdinaryConvolution(Form):
    """A convolution of stride 1 with the filter flipped and its channel axes swapped: oneDNN takes
    channels first there with half of the reordering. Where torch would leave a float32 convolution
    to loops of its own, oneDNN is called by name."""

    name = "ordinary_convolution"

    def supports(self, problem: ForwardProblem, device: Device) -> Support:
        phase = _ordinary(problem)
        if isinstance(phase, Support):
            return phase
        dtype = computing_dtype(problem, device)
        if not is_widened(problem, device):
            if onednn.in_plain_loops(problem, device, dtype):
                return Support.no("torch's own loops sum small float32 samples more exactly")
            # With narrower vectors oneDNN adds an output up in one chain, of three times the error.
            if problem.dtype == torch.float32 and device.vector_bytes < AVX512_BYTES:
                return Support.no("torch's call sums float32 more exactly without AVX-512")
            if problem.dtype == torch.float32 and problem.channels > _EXACT_CHANNELS:
                return Support.no(
                    f"sums {problem.channels} channels in float32, and is less exact than torch's "
                    f"call beyond {_EXACT_CHANNELS}"
                )
        return supports_form(problem)

    def _calls_onednn(self, problem: ForwardProblem, device: Device, dtype: torch.dtype) -> bool:
        return len(problem.spatial) > 1 and onednn.in_plain_loops(problem, device, dtype)

    def cost(self, problem: ForwardProblem, device: Device) -> float:
        dtype = computing_dtype(problem, device)
        calls_onednn = self._calls_onednn(problem, device, dtype)
        layout = _ordinary_layout(problem, calls_onednn)
        passes = 1.0 if layout == "nhwc" else onednn.FORWARD_PASSES
        # The filter is flipped, which walks through its memory backwards.
        weight = onednn.weight_elements(problem)
        flipped = 2 * onednn.copy_milliseconds(device, weight, dtype, dtype)
        return (
            conversion_milliseconds(problem, device, dtype, layout)
            + flipped
            + onednn.product_milliseconds(problem, device, dtype)
            + device.copy_milliseconds(passes * onednn.moved_bytes(problem, dtype))
            + onednn.CALL * device.launch_milliseconds
        )

    def compile(self, problem: ForwardProblem, device: Device) -> Convolution:
        phase = _ordinary(problem)
        assert isinstance(phase, Phase)
        dtype = computing_dtype(problem, device)
        return _OrdinaryConvolution(
            problem, dtype, phase, self._calls_onednn(problem, device, dtype)
        )
