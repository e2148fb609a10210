"""System 3: GroupNorm alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fusedconv.functional import group_norm


class Model(nn.Module):
    """The plain module that users start from: what ModelNew replaces and is measured against."""

    def __init__(self, num_features: int, num_groups: int) -> None:
        super().__init__()
        self.gn = nn.GroupNorm(num_groups=num_groups, num_channels=num_features)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.gn(x)
        return result


class ModelNew(Model):
    """``Model`` in fused kernels: arguments, parameters, random numbers and results are its own."""

    def forward(self, x: Tensor) -> Tensor:
        norm = self.gn
        return group_norm(x, norm.num_groups, norm.weight, norm.bias, norm.eps)


#: Arguments and input of the full size, and of one that a processor computes in moments.
INIT_ARGUMENTS = (64, 8)
INPUT_SHAPE = (112, 64, 512, 512)
SMALL_INPUT_SHAPE = (4, 64, 128, 128)


def get_init_inputs() -> list[int]:
    return list(INIT_ARGUMENTS)


def get_inputs() -> list[Tensor]:
    return [torch.rand(INPUT_SHAPE)]
