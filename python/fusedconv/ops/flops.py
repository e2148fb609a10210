"""What torch.utils.flop_counter counts of the operators: the convolution's products.

As torch counts its own: a multiplication and an addition are two, bias, activation and
normalisation are none; but of a grouped convolution's weight gradient torch counts each group's
products as often as there are groups.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import flop_counter

from fusedconv.ops.planning import ConvCall


def _forward(input: list[int], weight: list[int], *arguments: Any, **keywords: Any) -> int:
    return flop_counter.conv_flop_count(input, weight, [], transposed=True)


def _backward(
    grad: list[int],
    conv_output: list[int],
    mean: list[int],
    rstd: list[int],
    output_mask: list[bool],
    input: list[int],
    weight: list[int],
    *arguments: Any,
    **keywords: Any,
) -> int:
    # Of a call's fields, the last of which has a default.
    recompute = len(arguments) + 2 == len(ConvCall._fields) and bool(arguments[-1])
    return _forward(input, weight) * (sum(output_mask[:2]) + recompute)


def _none(*arguments: Any, **keywords: Any) -> int:
    return 0


def register() -> None:
    """Registers the formulas; the operators must be defined."""
    operators = torch.ops.fusedconv
    count = flop_counter.register_flop_formula
    count(operators.conv_transpose_act_norm)(_forward)
    count(operators.conv_transpose_act_norm_backward)(_backward)
    count([operators.group_norm, operators.group_norm_backward])(_none)
