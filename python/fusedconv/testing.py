"""Error against float64, in pieces that fit beside large tensors."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def relative_error(actual: Tensor, reference: Tensor) -> float:
    """||actual - reference|| / ||reference|| in float64; NaN where either has one."""
    actual, reference = actual.detach().double(), reference.detach().double()
    return float((actual - reference).norm() / reference.norm().clamp_min(1e-300))


def sample_error(
    original: nn.Module, input: Tensor, actual: Tensor, samples: Iterable[int] | None = None
) -> float:
    """Relative error of ``actual`` = model(input) against ``original`` in float64.

    ``original`` must treat samples apart, as convolutions and GroupNorm do: each of ``samples``
    (the first, a middle and the last one by default) is computed alone, so that no float64 copy of
    the batch exists.
    """
    batch = input.shape[0]
    chosen = sorted({0, batch // 2, batch - 1} if samples is None else set(samples))
    reference_model = copy.deepcopy(original).double()
    difference = total = 0.0
    with torch.no_grad():
        for index in chosen:
            reference = reference_model(input[index : index + 1].double())
            delta = actual[index : index + 1].double() - reference
            difference += float(delta.square().sum())
            total += float(reference.square().sum())
    return float((difference / max(total, 1e-300)) ** 0.5)
