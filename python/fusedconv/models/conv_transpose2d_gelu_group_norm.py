"""System 1: ConvTranspose2d, exact GELU, GroupNorm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusedconv.arguments import integer, integers
from fusedconv.modules import FusedConvTranspose, check_divides
from fusedconv.scripting import is_scripting


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


class ModelNew(FusedConvTranspose, Model):
    """``Model`` in fused kernels: arguments, parameters, random numbers and results are its own.

    [N, in_channels, H, W] to [N, out_channels, (H - 1) stride + kernel_size, ...]. A value or type
    that cannot be right raises ValueError or TypeError naming the argument.
    """

    activation = "gelu"
    order = "act_norm"
    precision = None
    _conv_type = nn.ConvTranspose2d

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int],
        groups: int,
        num_groups: int,
    ) -> None:
        channels = integer("out_channels", out_channels, 1)
        num_groups = integer("num_groups", num_groups, 1)
        check_divides("num_groups", num_groups, channels, "output channels")
        kernel: Any = integers("kernel_size", kernel_size, 2, 1)
        step: Any = integers("stride", stride, 2, 1)
        super().__init__(
            integer("in_channels", in_channels, 1),
            channels,
            kernel,
            step,
            groups,
            num_groups,
        )

    def forward(self, x: Tensor) -> Tensor:
        if is_scripting():
            return self._scripted(x)
        else:
            return self._run(x)


#: Arguments; inputs of the full size, of fewer samples for a processor, and of a small size.
INIT_ARGUMENTS = (64, 64, 3, 1, 8, 8)
INPUT_SHAPE = (128, 64, 256, 256)
PROCESSOR_INPUT_SHAPE = (2, 64, 256, 256)
SMALL_INPUT_SHAPE = (2, 64, 64, 64)


def get_init_inputs() -> list[int]:
    return list(INIT_ARGUMENTS)


def get_inputs() -> list[Tensor]:
    return [torch.rand(INPUT_SHAPE)]
