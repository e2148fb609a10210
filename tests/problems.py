"""Problems and geometries for the tests, and what explain says of a call without printing it."""

from __future__ import annotations

import io
from typing import Any

import torch

import fusedconv
from fusedconv import ConvTransposeGeometry, NormGeometry, Problem


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
        "bias": True,
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
        "bias": False,
        "weight_strides": weight.stride(),
    }
    return ConvTransposeGeometry(**{**fields, **changes})


def problem(**changes: Any) -> Problem:
    """A convolution with a normalisation on the processor, changed."""
    fields = {
        "device": "cpu",
        "device_index": 0,
        "architecture": 0,
        "multiprocessors": 0,
        "dtype": torch.float32,
        "output_dtype": torch.float32,
        "precision": "fp32",
        "layout": "nchw",
        "aligned": True,
        "batch": 3,
        "channels": 4,
        "spatial": (5, 7),
        "activation": "gelu",
        "order": "act_norm",
        "conv": conv_geometry(),
        "norm": NormGeometry(2, 1e-5, True, True, torch.float32),
    }
    return Problem(**{**fields, **changes})


def explained(target: Any, *args: Any, **kwargs: Any) -> list[Any]:
    """What explain returns; what it prints goes nowhere."""
    return fusedconv.explain(target, *args, file=io.StringIO(), **kwargs)
