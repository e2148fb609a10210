"""Problems, stages and geometries for the tests, and what explain says without printing it."""

from __future__ import annotations

import io
from typing import Any

import torch

import fusedconv
from fusedconv import BackwardProblem, ConvTransposeGeometry, ForwardProblem, Norm
from fusedconv.benchmark import DTYPES
from fusedconv.device import AVX512_BYTES, PROCESSOR
from fusedconv.problem import epilogue

#: Where a processor's ordinary convolution refuses float32, and why a test is skipped there.
NARROW_VECTORS = PROCESSOR.vector_bytes < AVX512_BYTES
NEEDS_WIDE_VECTORS = "without AVX-512, ordinary convolutions in float32 are torch's transposed ones"


def conv_geometry(**changes: Any) -> ConvTransposeGeometry:
    """A geometry whose fields all differ from their defaults, changed."""
    fields = {
        "in_channels": 4,
        "out_channels": 6,
        "kernel_size": (3, 2),
        "stride": (2, 1),
        "padding": (1, 0),
        "output_padding": (1, 0),
        "dilation": (1, 2),
        "groups": 2,
        "weight_strides": (18, 6, 2, 1),
    }
    return ConvTransposeGeometry(**{**fields, **changes})


def geometry_of(weight: torch.Tensor, **changes: Any) -> ConvTransposeGeometry:
    """The geometry of a call with this weight and defaults besides, changed."""
    axes = weight.dim() - 2
    fields = {
        "in_channels": weight.shape[0],
        "out_channels": weight.shape[1],
        "kernel_size": tuple(weight.shape[2:]),
        "stride": (1,) * axes,
        "padding": (0,) * axes,
        "output_padding": (0,) * axes,
        "dilation": (1,) * axes,
        "groups": 1,
        "weight_strides": weight.stride(),
    }
    return ConvTransposeGeometry(**{**fields, **changes})


def system_1(precision: str, **changes: Any) -> ForwardProblem:
    """Of the full size, changed."""
    dtype = DTYPES.get(precision, torch.float32)
    fields = {
        "dtype": dtype,
        "output_dtype": dtype,
        "precision": precision,
        "batch": 128,
        "channels": 64,
        "spatial": (256, 256),
        "conv": geometry_of(torch.empty(64, 64, 3, 3)),
        "norm": group_norm_stage(8),
    }
    return problem(**{**fields, **changes})


def group_norm_stage(num_groups: int = 2, **changes: Any) -> Norm:
    """A GroupNorm with weight and bias in float32, changed."""
    fields = {
        "kind": "group",
        "num_groups": num_groups,
        "eps": 1e-5,
        "weight": True,
        "bias": True,
        "affine_dtype": torch.float32,
    }
    return Norm(**{**fields, **changes})


GROUP_NORM = group_norm_stage()


def problem(
    *,
    activation: str = "gelu",
    order: str = "act_norm",
    norm: Norm | None = GROUP_NORM,
    bias: bool | None = None,
    **changes: Any,
) -> ForwardProblem:
    """A convolution with bias, activation and normalisation in float32, changed.

    Without an ``epilogue`` of its own it has the one of a function's arguments; ``bias`` None is
    one where there is a convolution.
    """
    fields = {
        "dtype": torch.float32,
        "output_dtype": torch.float32,
        "precision": "fp32",
        "layout": "nchw",
        "aligned": True,
        "batch": 3,
        "channels": 4,
        "spatial": (5, 7),
        "conv": conv_geometry(),
        **changes,
    }
    has_bias = fields["conv"] is not None if bias is None else bias
    fields.setdefault("epilogue", epilogue(has_bias, activation, order, norm))
    return ForwardProblem(**fields)


def upsampled_line(precision: str, **changes: Any) -> ForwardProblem:
    """A vocoder's upsampling by eight, channels first, changed: ``out``, ``taps``, ``stride``,
    ``padding``, ``extra`` and ``dilation`` of each axis, or what problem() takes."""
    out, taps = changes.pop("out", 128), changes.pop("taps", 16)
    stride, padding = changes.pop("stride", 8), changes.pop("padding", 4)
    extra, dilation = changes.pop("extra", 0), changes.pop("dilation", 1)
    spatial = changes.get("spatial", (4096,))
    axes, channels = len(spatial), changes.get("channels", 256)
    weight = torch.empty(channels, out, *(taps,) * axes, device="meta")
    fields = {
        "batch": 8,
        "channels": channels,
        "spatial": spatial,
        "dtype": DTYPES[precision],
        "output_dtype": DTYPES[precision],
        "precision": precision,
        "activation": "identity",
        "norm": None,
        "conv": geometry_of(
            weight,
            stride=(stride,) * axes,
            padding=(padding,) * axes,
            output_padding=(extra,) * axes,
            dilation=(dilation,) * axes,
        ),
    }
    return problem(**{**fields, **changes})


def backward_problem(
    forward: ForwardProblem | None = None, *gradients: str, **changes: Any
) -> BackwardProblem:
    """A backward pass of a problem that saves, of the gradients named or of all that it has."""
    forward = forward or problem(save=True)
    if not gradients:
        gradients = tuple(name for name in forward.gradients if name != "conv_output")
    fields = {
        "grad_dtype": forward.output_dtype,
        "grad_layout": forward.output_layout,
        "aligned": True,
        "gradients": gradients,
    }
    return BackwardProblem.of(forward, **{**fields, **changes})


def explained(target: Any, *args: Any, **kwargs: Any) -> list[Any]:
    """What explain returns; what it prints goes nowhere."""
    return fusedconv.explain(target, *args, file=io.StringIO(), **kwargs)
