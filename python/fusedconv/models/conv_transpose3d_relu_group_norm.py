"""System 2: ConvTranspose3d, ReLU, GroupNorm."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from fusedconv.functional import conv_transpose_act_norm


class Model(nn.Module):
    """The plain composition that users start from: what ModelNew replaces and is measured against.

    ``groups`` is the GroupNorm's.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        groups: int,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.conv_transpose = nn.ConvTranspose3d(in_channels, out_channels, kernel_size, bias=bias)
        self.relu = nn.ReLU()
        self.group_norm = nn.GroupNorm(num_groups=groups, num_channels=out_channels)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_transpose(x)
        x = self.relu(x)
        result: Tensor = self.group_norm(x)
        return result


class ModelNew(Model):
    """``Model`` in fused kernels: arguments, parameters, random numbers and results are its own.

    [N, in_channels, D, H, W] to [N, out_channels, D + kernel_size - 1, ...].
    """

    def forward(self, x: Tensor) -> Tensor:
        conv, norm = self.conv_transpose, self.group_norm
        return conv_transpose_act_norm(
            x,
            conv.weight,
            conv.bias,
            conv.stride,
            cast(tuple[int, ...], conv.padding),
            conv.output_padding,
            conv.groups,
            conv.dilation,
            activation="relu",
            num_groups=norm.num_groups,
            norm_weight=norm.weight,
            norm_bias=norm.bias,
            eps=norm.eps,
        )


#: Arguments and input of the full size, and of one that a processor computes in moments.
INIT_ARGUMENTS = (64, 128, 3, 8, False)
INPUT_SHAPE = (16, 64, 32, 32, 32)
SMALL_INPUT_SHAPE = (1, 64, 12, 12, 12)


def get_init_inputs() -> list[int | bool]:
    return list(INIT_ARGUMENTS)


def get_inputs() -> list[Tensor]:
    return [torch.rand(INPUT_SHAPE)]
