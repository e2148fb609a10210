"""How torch's transposed convolution is kept from adding a bias slowly on processors."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from fusedconv.device import Device
from fusedconv.kernels import onednn
from fusedconv.layout import Layout
from fusedconv.problem import ForwardProblem


@dataclass(frozen=True)
class QuickBias:
    """How torch's transposed convolution is kept from adding a bias slowly: in float32 a compiled
    pass adds it ``apart``. In 16 bits that would round twice; where a stride does not divide the
    output, a larger one is computed, by ``output_padding``, and cut."""

    apart: bool
    output_padding: tuple[int, ...]


def quick_bias(
    problem: ForwardProblem, device: Device, dtype: torch.dtype, layout: Layout
) -> QuickBias | None:
    """None where it adds the bias quickly, or nothing keeps it from adding it slowly."""
    conv = problem.conv
    assert conv is not None
    if not onednn.adds_bias_slowly(problem, device, dtype, layout):
        return None
    if dtype == torch.float32:
        return QuickBias(True, conv.output_padding)
    grown = tuple(
        extra + -size % step
        for extra, size, step in zip(
            conv.output_padding, problem.output_spatial, conv.stride, strict=True
        )
    )
    most = map(max, conv.stride, conv.dilation)
    if any(extra >= limit for extra, limit in zip(grown, most, strict=True)):
        return None
    larger = dataclasses.replace(problem, conv=dataclasses.replace(conv, output_padding=grown))
    if onednn.adds_bias_slowly(larger, device, dtype, layout):
        return None
    return QuickBias(False, grown)
