"""System 3: GroupNorm alone."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from fusedconv import functional, scripting
from fusedconv.arguments import integer
from fusedconv.composing import announce, departure
from fusedconv.modules import check_divides
from fusedconv.scripting import is_scripting


class Model(nn.Module):
    """The plain module that users start from: what ModelNew replaces and is measured against."""

    def __init__(self, num_features: int, num_groups: int) -> None:
        super().__init__()
        self.gn = nn.GroupNorm(num_groups=num_groups, num_channels=num_features)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.gn(x)
        return result


class ModelNew(Model):
    """``Model`` in fused kernels: arguments, parameters, random numbers and results are its own.

    A value or type that cannot be right raises ValueError or TypeError naming the argument.
    """

    __constants__: ClassVar[list[str]] = ["_fuses"]
    _fuses = scripting.AtScripting(lambda self: departure("gn", self.gn, nn.GroupNorm) is None)

    def __init__(self, num_features: int, num_groups: int) -> None:
        num_features = integer("num_features", num_features, 0)
        num_groups = integer("num_groups", num_groups, 1)
        check_divides("num_groups", num_groups, num_features, "features")
        super().__init__(num_features, num_groups)

    def forward(self, x: Tensor) -> Tensor:
        norm = self.gn
        if is_scripting():
            if self._fuses:
                return scripting.group_norm(
                    x, norm.num_groups, norm.weight, norm.bias, norm.eps, None, "act_norm"
                )
            else:
                return norm(x)
        else:
            reason = departure("gn", norm, nn.GroupNorm)
            if reason is not None:
                announce(self, reason, (("gn", norm),))
                return norm(x)
            return functional.group_norm(x, norm.num_groups, norm.weight, norm.bias, norm.eps)


#: Arguments; inputs of the full size, of fewer samples for a processor, and of a small size.
INIT_ARGUMENTS = (64, 8)
INPUT_SHAPE = (112, 64, 512, 512)
PROCESSOR_INPUT_SHAPE = (4, 64, 512, 512)
SMALL_INPUT_SHAPE = (4, 64, 128, 128)


def get_init_inputs() -> list[int]:
    return list(INIT_ARGUMENTS)


def get_inputs() -> list[Tensor]:
    return [torch.rand(INPUT_SHAPE)]
