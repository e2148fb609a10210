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
from torch.nn import functional as F

__all__ = ["AtScripting", "activate", "conv_transpose_act_norm", "group_norm", "is_scripting"]


class AtScripting:
    """An attribute computed when it is read; a name in ``__constants__`` is read once, when
    ``torch.jit.script`` compiles. (It would compile a property's code instead of reading it.)"""

    def __init__(self, function: Callable[[Any], bool]) -> None:
        self._function = function

    def __get__(self, instance: object | None, owner: type) -> Any:
        return self if instance is None else self._function(instance)


def activate(x: Tensor, activation: str | None) -> Tensor:
    """torch's operator for an activation's name."""
    if activation is None or activation == "identity":
        return x
    elif activation == "relu":
        return F.relu(x)
    elif activation == "gelu":
        return F.gelu(x)
    elif activation == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    elif activation == "silu":
        return F.silu(x)
    else:
        raise ValueError(f"activation: got {activation}, expected the name of one")


def any_requires_grad(tensors: list[Tensor | None]) -> bool:
    """Whether a gradient follows from a call on these tensors."""
    needed = False
    for tensor in tensors:
        if tensor is not None:
            needed = needed or tensor.requires_grad
    return needed and torch.is_grad_enabled()


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
) -> Tensor:
    """The operator; ``num_groups`` 0 leaves the GroupNorm out."""
    save = any_requires_grad([input, weight, bias, norm_weight, norm_bias])
    return torch.ops.fusedconv.conv_transpose_act_norm(
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
        save,
    )[0]


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
