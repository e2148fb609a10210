"""What ``torch.jit.script`` compiles in place of the modules' Python: the operators, by name.

Everything here except ``AtScripting`` is within TorchScript's subset of Python. A scripted module
runs wherever Python has imported fusedconv, as its operators are registered there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.jit import is_scripting  # type: ignore[attr-defined]

__all__ = ["AtScripting", "conv_transpose_act_norm", "group_norm", "is_scripting"]


class AtScripting:
    """An attribute computed when it is read; a name in ``__constants__`` is read once, when
    ``torch.jit.script`` compiles. (It would compile a property's code instead of reading it.)"""

    def __init__(self, function: Callable[[Any], bool | str | float]) -> None:
        self._function = function

    def __get__(self, instance: object | None, owner: type) -> Any:
        return self if instance is None else self._function(instance)


def conv_transpose_act_norm(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    output_padding: list[int],
    dilation: list[int],
    groups: int,
    activation: str | None,
    order: str,
    num_groups: int,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    precision: str | None,
    norm: str | None,
    recompute: bool,
) -> Tensor:
    """The operator; ``norm`` None and ``num_groups`` 0 leave the normalisation out."""
    return torch.ops.fusedconv.conv_transpose_act_norm_traced(
        input,
        weight,
        bias,
        stride,
        padding,
        output_padding,
        dilation,
        groups,
        "identity" if activation is None else activation,
        order,
        num_groups,
        norm_weight,
        norm_bias,
        eps,
        precision,
        None,
        norm,
        recompute,
    )


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str | None,
    order: str,
) -> Tensor:
    """The operator."""
    return torch.ops.fusedconv.group_norm(
        input,
        num_groups,
        weight,
        bias,
        eps,
        "identity" if activation is None else activation,
        order,
        None,
    )[0]
