"""System 1: ConvTranspose2d, exact GELU, GroupNorm."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusedconv.functional import conv_transpose_act_norm


class Model(nn.Module):
    """The plain composition that users start from: what ModelNew replaces and is measured against.

    ``groups`` is accepted and unused: the convolution is dense.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int,
        groups: int,
        num_groups: int,
    ) -> None:
        super().__init__()
        self.conv_transpose = nn.ConvTranspose2d(
            in_channels, out_channels, kernel_size, stride=stride
        )
        self.group_norm = nn.GroupNorm(num_groups=num_groups, num_channels=out_channels)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_transpose(x)
        x = F.gelu(x)
        result: Tensor = self.group_norm(x)
        return result


class ModelNew(Model):
    """``Model`` in fused kernels: arguments, parameters, random numbers and results are its own.

    [N, in_channels, H, W] to [N, out_channels, (H - 1) stride + kernel_size, ...].
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
            activation="gelu",
            num_groups=norm.num_groups,
            norm_weight=norm.weight,
            norm_bias=norm.bias,
            eps=norm.eps,
        )


#: Arguments and input of the full size, and of one that a processor computes in moments.
INIT_ARGUMENTS = (64, 64, 3, 1, 8, 8)
INPUT_SHAPE = (128, 64, 256, 256)
SMALL_INPUT_SHAPE = (2, 64, 64, 64)


def get_init_inputs() -> list[int]:
    return list(INIT_ARGUMENTS)


def get_inputs() -> list[Tensor]:
    return [torch.rand(INPUT_SHAPE)]
