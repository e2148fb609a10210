"""Tensors and arguments of a call held against each other: what a problem is made of.

Every shape may hold symbolic integers, so that fake implementations check what real calls check.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusedconv.activations import ACTIVATIONS
from fusedconv.arguments import choice, finite, integers
from fusedconv.norms import KINDS, Norm
from fusedconv.precision import COMPILED_DTYPES
from fusedconv.problem import ORDERS, ConvTransposeGeometry

#: What kernels or torch's operators serve.
_DTYPES = (*COMPILED_DTYPES, torch.float64)


def _check_strided(name: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided:
        raise TypeError(f"{name}: got layout {tensor.layout}, expected torch.strided")


def _check_tensor(name: str, tensor: Tensor | None, like: Tensor, shape: tuple[int, ...]) -> None:
    if tensor is None:
        return
    _check_strided(name, tensor)
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, expected {shape}")
    if tensor.device != like.device:
        raise ValueError(
            f"{name}: got device {tensor.device}, expected {like.device} as the input's"
        )


def check_input(input: Tensor) -> None:
    """Raises TypeError or ValueError where nothing serves a tensor as input."""
    if input.dtype not in _DTYPES:
        kinds = ", ".join(map(str, _DTYPES))
        raise TypeError(f"input: got dtype {input.dtype}, expected a floating-point dtype: {kinds}")
    _check_strided("input", input)
    if input.dim() < 2:
        raise ValueError(f"input: got shape {tuple(input.shape)}, expected [N, C, *spatial]")


def check_choices(activation: str, order: str) -> None:
    """Raises where an activation or order has another name."""
    choice("activation", activation, ACTIVATIONS)
    choice("order", order, ORDERS)


def check_channels(name: str, tensor: Tensor | None, input: Tensor, channels: int) -> None:
    """Raises where a normalisation of ``input`` takes no such tensor [channels]."""
    _check_tensor(name, tensor, input, (channels,))
    allowed = {input.dtype} if input.dtype == torch.float64 else set(COMPILED_DTYPES)
    if tensor is not None and tensor.dtype not in allowed:
        raise TypeError(
            f"{name}: got dtype {tensor.dtype}, expected "
            f"{' or '.join(sorted(map(str, allowed)))} for input of {input.dtype}"
        )


def check_statistics(name: str, tensor: Tensor, mean: Tensor, *, has_shape: bool) -> None:
    """Raises where ``tensor`` is none of those of a BatchNorm with a running mean ``mean``, which
    may be ``tensor``. Shapes are compared where the tensor ``has_shape``, not one that holds it for
    torch.jit.trace."""
    _check_strided(name, tensor)
    if tensor.dim() != 1:
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, expected one axis, [K]")
    if has_shape and tensor.shape != mean.shape:
        raise ValueError(
            f"{name}: got shape {tuple(tensor.shape)}, expected running_mean's {tuple(mean.shape)}"
        )
    if tensor.device != mean.device:
        raise ValueError(
            f"{name}: got device {tensor.device}, expected {mean.device} as running_mean's"
        )
    allowed = _DTYPES
    if tensor is not mean:
        wide = mean.dtype == torch.float64
        allowed = tuple(each for each in _DTYPES if (each == torch.float64) == wide)
    if tensor.dtype not in allowed:
        kinds = " or ".join(map(str, allowed))
        where = "" if tensor is mean else f" beside running_mean's {mean.dtype}"
        raise TypeError(f"{name}: got dtype {tensor.dtype}, expected {kinds}{where}")


def norm_geometry(
    input: Tensor,
    channels: int,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    names: tuple[str, str],
    kind: str = "group",
) -> Norm:
    """The normalisation's part of a problem; ``names`` are what messages call weight and bias.
    ``num_groups`` is 0 unless ``kind`` is "group"."""
    choice("norm", kind, tuple(KINDS))
    if kind != "group":
        if num_groups:
            raise ValueError(f"num_groups: got {num_groups} for norm {kind!r}, expected 0")
    elif num_groups < 1 or channels % num_groups:
        raise ValueError(
            f"num_groups: got {num_groups}, expected a positive divisor of {channels} channels"
        )
    eps = finite("eps", eps)
    for name, tensor in zip(names, (weight, bias), strict=True):
        check_channels(name, tensor, input, channels)
    if weight is not None and bias is not None and weight.dtype != bias.dtype:
        raise TypeError(
            f"{names[1]}: got dtype {bias.dtype}, expected {weight.dtype} as {names[0]}'s"
        )
    dtypes = [tensor.dtype for tensor in (weight, bias) if tensor is not None]
    return Norm(
        kind,
        num_groups,
        eps,
        weight is not None,
        bias is not None,
        dtypes[0] if dtypes else None,
    )


def check_axes(weight: Tensor) -> None:
    """Raises where a weight has other than one, two or three spatial axes."""
    if weight.dim() not in (3, 4, 5):
        raise ValueError(
            f"weight: got shape {tuple(weight.shape)}, expected [C, K / groups, *kernel_size] with "
            "one, two or three spatial axes"
        )


def conv_geometry(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    output_padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
) -> ConvTransposeGeometry:
    """The transposed convolution's part of a problem."""
    check_axes(weight)
    axes = weight.dim() - 2
    _check_strided("weight", weight)
    if any(extent < 1 for extent in weight.shape):
        raise ValueError(f"weight: got shape {tuple(weight.shape)}, expected extents of at least 1")
    if input.dim() != axes + 2:
        raise ValueError(
            f"input: got shape {tuple(input.shape)}, expected {axes + 2} axes, [N, C, *spatial], "
            f"for a weight of shape {tuple(weight.shape)}"
        )
    if weight.dtype != input.dtype:
        raise TypeError(f"weight: got dtype {weight.dtype}, expected {input.dtype} as the input's")
    if bias is not None and bias.dtype != input.dtype:
        raise TypeError(f"bias: got dtype {bias.dtype}, expected {input.dtype} as the input's")
    if weight.device != input.device:
        raise ValueError(
            f"weight: got device {weight.device}, expected {input.device} as the input's"
        )
    channels = input.shape[1]
    if weight.shape[0] != channels:
        raise ValueError(
            f"input: got {channels} channels, expected {weight.shape[0]} for a weight of shape "
            f"{tuple(weight.shape)}"
        )
    if groups < 1 or channels % groups:
        raise ValueError(
            f"groups: got {groups}, expected a positive divisor of {channels} input channels"
        )
    stride = integers("stride", stride, axes, 1)
    padding = integers("padding", padding, axes, 0)
    output_padding = integers("output_padding", output_padding, axes, 0)
    dilation = integers("dilation", dilation, axes, 1)
    for extra, step, dilated in zip(output_padding, stride, dilation, strict=True):
        if extra >= max(step, dilated):
            raise ValueError(
                f"output_padding: got {output_padding}, expected each smaller than stride {stride} "
                f"or dilation {dilation}"
            )
    geometry = ConvTransposeGeometry(
        in_channels=channels,
        out_channels=weight.shape[1] * groups,
        kernel_size=tuple(weight.shape[2:]),
        stride=stride,
        padding=padding,
        output_padding=output_padding,
        dilation=dilation,
        groups=groups,
        weight_strides=tuple(weight.stride()),
    )
    _check_tensor("bias", bias, input, (geometry.out_channels,))
    spatial = tuple(input.shape[2:])
    if any(extent < 1 for extent in spatial):
        raise ValueError(f"input: got spatial extents {spatial}, expected at least 1 each")
    output = geometry.output_spatial(spatial)
    if any(extent < 1 for extent in output):
        raise ValueError(
            f"input: got spatial extents {spatial}, which give an output of {output}; expected at "
            "least 1 each"
        )
    elements = input.shape[0] * geometry.out_channels * math.prod(output)
    if type(elements) is int and elements >= 2**60:
        raise ValueError(
            f"stride, dilation, padding: got {stride}, {dilation}, {padding}, which give an output "
            f"of {elements} elements; expected fewer than 2**60"
        )
    return geometry
