"""System 2: ConvTranspose3d, ReLU, GroupNorm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fusedconv.arguments import flag, integer, integers
from fusedconv.composing import departure
from fusedconv.modules import FusedConvTranspose, check_divides
from fusedconv.scripting import is_scripting


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


class ModelNew(FusedConvTranspose, Model):
    """``Model`` in fused kernels: arguments, parameters, random numbers and results are its own.

    [N, in_channels, D, H, W] to [N, out_channels, D + kernel_size - 1, ...]. A value or type that
    cannot be right raises ValueError or TypeError naming the argument.
    """

    activation = "relu"
    order = "act_norm"
    precision = None
    _conv_type = nn.ConvTranspose3d

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        groups: int,
        bias: bool = False,
    ) -> None:
        channels = integer("out_channels", out_channels, 1)
        groups = integer("groups", groups, 1)
        check_divides("groups", groups, channels, "output channels")
        kernel: Any = integers("kernel_size", kernel_size, 3, 1)
        super().__init__(
            integer("in_channels", in_channels, 1),
            channels,
            kernel,
            groups,
            flag("bias", bias),
        )

    def forward(self, x: Tensor) -> Tensor:
        if is_scripting():
            return self._scripted(x)
        else:
            return self._run(x)

    def _departure(self, conv: Any, norm: Any) -> str | None:
        return super()._departure(conv, norm) or departure("relu", self.relu, nn.ReLU)

    def _activate(self, x: Tensor) -> Tensor:
        return self.relu(x)

    def _steps(self) -> tuple[tuple[str, object], ...]:
        return tuple(
            (name, self.relu if name == "relu" else part) for name, part in super()._steps()
        )


#: Arguments; inputs of the full size, of fewer samples for a processor, and of a small size.
INIT_ARGUMENTS = (64, 128, 3, 8, False)
INPUT_SHAPE = (16, 64, 32, 32, 32)
PROCESSOR_INPUT_SHAPE = (1, 64, 32, 32, 32)
SMALL_INPUT_SHAPE = (1, 64, 12, 12, 12)


def get_init_inputs() -> list[int | bool]:
    return list(INIT_ARGUMENTS)


def get_inputs() -> list[Tensor]:
    return [torch.rand(INPUT_SHAPE)]
