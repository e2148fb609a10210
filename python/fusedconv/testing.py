"""Error against float64, in pieces that fit beside large tensors."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

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
    (error,) = sample_errors(original, input, [actual], samples)
    return error


def sample_errors(
    original: nn.Module,
    input: Tensor,
    actuals: Sequence[Tensor],
    samples: Iterable[int] | None = None,
) -> list[float]:
    """``sample_error`` of each of ``actuals``, for one computation in float64."""
    batch = input.shape[0]
    chosen = sorted({0, batch // 2, batch - 1} if samples is None else set(samples))
    reference_model = copy.deepcopy(original).double()
    differences, total = [0.0] * len(actuals), 0.0
    with torch.no_grad():
        for index in chosen:
            reference = reference_model(input[index : index + 1].double())
            for number, actual in enumerate(actuals):
                delta = actual[index : index + 1].double() - reference
                differences[number] += float(delta.square().sum())
            total += float(reference.square().sum())
    return [float((difference / max(total, 1e-300)) ** 0.5) for difference in differences]
