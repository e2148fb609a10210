"""Normalisations by kind: which statistics they have, and what they compute in torch's operators.

A new kind is an entry of KINDS. Kernels take a kind whose statistics are per sample and group of
channels as GroupNorm of so many groups, and "layer" and "affine" where their ``supports`` says so;
torch's operators compute every kind. "batch", an argument of ``functional``, is no kind: running
statistics are folded into the weight and bias of "affine".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Norm:
    """A normalisation with weight and bias per channel, where they are given.

    ``kind`` is a key of KINDS: "group" has statistics per sample and group of channels, "instance"
    per sample and channel, "layer" per sample and pixel over all channels; "affine" has none:
    weight and bias are those of a BatchNorm with its running statistics folded into them.
    ``num_groups`` is that of "group", 0 elsewhere. ``affine_dtype`` is None where neither weight
    nor bias is given. Raises ValueError where ``kind`` is another.
    """

    kind: str
    num_groups: int
    eps: float
    weight: bool
    bias: bool
    affine_dtype: torch.dtype | None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind: got {self.kind!r}, expected one of {', '.join(KINDS)}")

    def groups(self, channels: int) -> int:
        """Statistics of a sample, where they are per group of channels; 0 elsewhere."""
        return KINDS[self.kind].groups(self, channels)

    def __str__(self) -> str:
        return f"group_norm {self.num_groups}" if self.kind == "group" else f"{self.kind}_norm"


def statistics_dtype(x: Tensor) -> torch.dtype:
    """Of means and deviations, and of what is computed between roundings: float32 or wider."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def affine(
    x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Weight and bias as torch's GroupNorm of ``x`` takes them: of its dtype, or of float32 where
    it has 16 bits; and no bias without a weight, which its gradient on processors refuses."""
    given = weight if weight is not None else bias
    if given is None:
        return None, None
    dtype = given.dtype
    if dtype not in (x.dtype, torch.float32):
        dtype = torch.promote_types(x.dtype, torch.float32)
    if weight is None:
        weight = given.new_ones(given.shape)
    return weight.to(dtype), None if bias is None else bias.to(dtype)


Compute = Callable[[Norm, Tensor, Tensor | None, Tensor | None], Tensor]


class Kind(NamedTuple):
    """``groups(norm, channels)``: how many groups of channels a sample has, each normalised by its
    mean and variance as GroupNorm does; 0 of any other kind, which kernels serve that name it.
    ``compute(norm, x, weight, bias)``: torch's operators, with weight and bias as ``affine`` gives
    them. ``operator``: what a plan's step calls those."""

    groups: Callable[[Norm, int], int]
    compute: Compute
    operator: str


def _named(x: Tensor, error: RuntimeError) -> Exception:
    """What is raised for torch's refusal: of an empty input some versions say what they miss, and
    not of which argument."""
    if x.numel():
        return error
    return ValueError(
        f"input: got shape {tuple(x.shape)}, expected one that torch's GroupNorm takes: {error}"
    )


def _grouped(norm: Norm, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    try:
        # Not torch.nn.functional's, which refuses single values that a group may consist of.
        return torch.group_norm(x, norm.groups(x.shape[1]), weight, bias, norm.eps)
    except RuntimeError as error:
        raise _named(x, error) from None


def _over_channels(norm: Norm, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    last = x.movedim(1, -1)
    return F.layer_norm(last, last.shape[-1:], weight, bias, norm.eps).movedim(-1, 1)


def scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """``x`` [..., C] times weight [C] plus bias [C], where they are given."""
    if weight is not None and bias is not None:
        return torch.addcmul(bias, x, weight)  # in one pass
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _scaled(norm: Norm, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    wide = x.to(statistics_dtype(x)).movedim(1, -1)
    return scaled(wide, weight, bias).movedim(-1, 1).to(x.dtype)


KINDS: dict[str, Kind] = {
    "group": Kind(lambda norm, channels: norm.num_groups, _grouped, "torch.group_norm"),
    "instance": Kind(lambda norm, channels: channels, _grouped, "torch.group_norm"),
    "layer": Kind(lambda norm, channels: 0, _over_channels, "torch.layer_norm over channels"),
    "affine": Kind(lambda norm, channels: 0, _scaled, "torch affine map of channels"),
}


def normalized(norm: Norm, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """``x`` [N, C, *spatial] normalised by torch's operators, which autograd follows."""
    return KINDS[norm.kind].compute(norm, x, *affine(x, weight, bias))


def folded_batch_norm(
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """What ``functional.fold_batch_norm`` returns, by torch's operators."""
    wide = statistics_dtype(running_var)
    scale = torch.rsqrt(running_var.to(wide) + eps)
    if weight is not None:
        scale = scale * weight.to(wide)
    shift = -running_mean.to(wide) * scale
    return scale, shift if bias is None else shift + bias.to(wide)


def group_norm_with_statistics(
    norm: Norm, x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The same of a kind with groups, with mean and reciprocal deviation [N, groups]."""
    batch, channels, *spatial = x.shape
    weight, bias = affine(x, weight, bias)
    # torch's operator takes them for contiguous, whatever their strides.
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    if x.dtype.itemsize == 2 and x.device.type == "cpu":
        # Statistics have the dtype of weight and bias there.
        weight = x.new_ones(channels, dtype=torch.float32) if weight is None else weight.float()
        bias = None if bias is None else bias.float()
    try:
        output, mean, rstd = torch.ops.aten.native_group_norm(
            x.contiguous(),
            weight,
            bias,
            batch,
            channels,
            math.prod(spatial),
            norm.groups(channels),
            norm.eps,
        )
    except RuntimeError as error:
        raise _named(x, error) from None
    statistics = statistics_dtype(x)
    return output, mean.to(statistics), rstd.to(statistics)
