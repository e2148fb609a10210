"""What is to be computed, apart from how: frozen, hashable descriptions of one call.

Convolution letters, here and in C++: N batch, C input channels, K output channels; D H W input,
Z P Q output and T R S filter extents along depth, height and width.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

import torch

Layout = Literal["nchw", "nhwc", "strided"]
Precision = Literal["tf32", "fp32", "fp16", "bf16", "fp64"]
Order = Literal["act_norm", "norm_act"]

#: Names of activations, in the order of the codes that C++ uses.
ACTIVATIONS = ("identity", "relu", "gelu", "gelu_tanh", "silu")
ACTIVATION_CODES = {name: code for code, name in enumerate(ACTIVATIONS)}
DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
LAYOUT_CODES = {"nchw": 0, "nhwc": 1}
ORDERS = ("act_norm", "norm_act")
PRECISIONS = ("tf32", "fp32", "fp16", "bf16", "fp64")

_PRECISION_OF_DTYPE: dict[torch.dtype, Precision] = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float64: "fp64",
}


@functools.cache
def device_properties(index: int) -> tuple[int, int]:
    """Compute capability times ten and multiprocessors of a CUDA device."""
    properties = torch.cuda.get_device_properties(index)
    return properties.major * 10 + properties.minor, properties.multi_processor_count


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class ConvTransposeGeometry:
    """A transposed convolution: ``weight`` is [C, K / groups, *kernel_size] as in torch."""

    in_channels: int
    out_channels: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    output_padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    bias: bool
    weight_strides: tuple[int, ...]

    def output_spatial(self, spatial: tuple[int, ...]) -> tuple[int, ...]:
        """Output extents: (in - 1) stride - 2 padding + dilation (kernel - 1) + output_padding + 1
        (the formula of torch.nn.ConvTranspose2d)."""
        return tuple(
            (size - 1) * stride - 2 * pad + dilation * (kernel - 1) + extra + 1
            for size, kernel, stride, pad, extra, dilation in zip(
                spatial,
                self.kernel_size,
                self.stride,
                self.padding,
                self.output_padding,
                self.dilation,
                strict=True,
            )
        )


@dataclass(frozen=True)
class NormGeometry:
    """GroupNorm: which of weight and bias are given, and their dtype (None where neither is)."""

    num_groups: int
    eps: float
    weight: bool
    bias: bool
    affine_dtype: torch.dtype | None


@dataclass(frozen=True)
class Problem:
    """One call: an optional transposed convolution, an activation, an optional GroupNorm.

    ``device`` is a torch device type, ``device_index`` its ordinal and ``architecture`` its compute
    capability times ten (both 0 off CUDA). ``layout`` is the input's: "nchw" dense channels first,
    "nhwc" dense channels last, "strided" anything else. ``aligned`` says that the input's address
    is a multiple of 16 bytes. ``save`` asks for the tensors that a backward pass needs.
    """

    device: str
    device_index: int
    architecture: int
    multiprocessors: int
    dtype: torch.dtype
    output_dtype: torch.dtype
    precision: Precision
    layout: Layout
    aligned: bool
    batch: int
    channels: int
    spatial: tuple[int, ...]
    activation: str
    order: Order
    conv: ConvTransposeGeometry | None = None
    norm: NormGeometry | None = None
    save: bool = False

    @property
    def output_channels(self) -> int:
        return self.channels if self.conv is None else self.conv.out_channels

    @property
    def output_spatial(self) -> tuple[int, ...]:
        return self.spatial if self.conv is None else self.conv.output_spatial(self.spatial)

    @property
    def output_layout(self) -> Layout:
        return "nhwc" if self.layout == "nhwc" else "nchw"

    @property
    def activation_before(self) -> str:
        """The activation in front of the normalisation, or the only one."""
        return "identity" if self.norm is not None and self.order == "norm_act" else self.activation

    @property
    def activation_after(self) -> str:
        return self.activation if self.norm is not None and self.order == "norm_act" else "identity"

    @property
    def input_elements(self) -> int:
        return self.batch * self.channels * math.prod(self.spatial)

    @property
    def output_elements(self) -> int:
        return self.batch * self.output_channels * math.prod(self.output_spatial)

    @property
    def conv_flops(self) -> int:
        """Multiplications and additions of the convolution: every tap at every input pixel."""
        if self.conv is None:
            return 0
        conv = self.conv
        taps = math.prod(conv.kernel_size) * conv.out_channels // conv.groups
        return 2 * self.input_elements * taps

    @property
    def minimal_bytes(self) -> int:
        """Input read once and output written once."""
        return (
            self.input_elements * self.dtype.itemsize
            + self.output_elements * self.output_dtype.itemsize
        )

    def __str__(self) -> str:
        size = "x".join(str(extent) for extent in (self.batch, self.channels, *self.spatial))
        parts = []
        if self.conv is not None:
            conv = self.conv
            kernel = "x".join(map(str, conv.kernel_size))
            parts.append(
                f"conv_transpose{len(conv.kernel_size)}d {conv.in_channels}->{conv.out_channels} "
                f"k{kernel} s{'x'.join(map(str, conv.stride))} "
                f"p{'x'.join(map(str, conv.padding))}"
                + (f" d{'x'.join(map(str, conv.dilation))}" if set(conv.dilation) != {1} else "")
                + (f" groups {conv.groups}" if conv.groups != 1 else "")
                + (" +bias" if conv.bias else "")
            )
        if self.activation_before != "identity":
            parts.append(self.activation_before)
        if self.norm is not None:
            parts.append(f"group_norm {self.norm.num_groups}")
        if self.activation_after != "identity":
            parts.append(self.activation_after)
        where = self.device + (f" sm_{self.architecture}" if self.architecture else "")
        what = " -> ".join(parts) or "identity"
        mode = f"{dtype_name(self.dtype)} ({self.precision})"
        saving = ", saving for backward" if self.save else ""
        return f"{what} on {size}, {mode}, {self.layout}, {where}{saving}"


def conv_fp32_precision() -> Precision:
    """The precision torch's own switches ask of an fp32 convolution on CUDA: "tf32" or "fp32"."""
    getter = getattr(torch._C, "_get_fp32_precision_getter", None)
    if getter is not None:
        setting = getter("cuda", "conv")
        if setting == "tf32":
            return "tf32"
        if setting == "ieee":
            return "fp32"
    try:
        # "none": only the older switch says anything.
        return "tf32" if torch._C._get_cudnn_allow_tf32() else "fp32"
    except RuntimeError:
        # torch refuses to read the older switch once the newer ones disagree with it; none of them
        # allowed TF32, or the getter above had said so.
        return "fp32"


def resolve_precision(dtype: torch.dtype, device: str, requested: str | None) -> Precision:
    """The arithmetic of the convolution: the argument, else torch's switches, else the dtype's."""
    fixed = _PRECISION_OF_DTYPE.get(dtype)
    if fixed is not None:
        if requested is not None and requested != fixed:
            raise ValueError(
                f"precision: got {requested!r} for input of {dtype_name(dtype)}, expected "
                f"{fixed!r} or None"
            )
        return fixed
    if requested is None:
        return conv_fp32_precision() if device == "cuda" else "fp32"
    if requested == "tf32" or requested == "fp32":
        return requested  # type: ignore[return-value]
    raise ValueError(
        f"precision: got {requested!r} for input of float32, expected 'tf32', 'fp32' or None"
    )


def layout_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> Layout:
    """Which dense layout the strides are, of [N, C, *spatial]; axes of extent 1 do not matter."""

    def dense(order: list[int]) -> bool:
        expected = 1
        for axis in order:
            if shape[axis] != 1 and strides[axis] != expected:
                return False
            expected *= shape[axis]
        return True

    axes = len(shape)
    if dense(list(range(axes - 1, -1, -1))):
        return "nchw"
    if dense([1, *range(axes - 1, 1, -1), 0]):
        return "nhwc"
    return "strided"
