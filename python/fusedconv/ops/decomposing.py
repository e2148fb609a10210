"""The operators in torch's own, for programs that run where this package is not installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fusedconv.ops import conv_transpose, group_norm
from fusedconv.ops.planning import ConvCall


def _traced(*arguments: Any) -> Tensor:
    """What TorchScript's graphs hold has the output only."""
    call = ConvCall(*arguments)
    return conv_transpose.in_torch(*conv_transpose.operator_arguments(call, False))[0]


def decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """Each operator of ``torch.ops.fusedconv`` with a function that computes it by torch's own.

    For ``torch.export.ExportedProgram.run_decompositions``, alone or beside torch's table::

        program = program.run_decompositions(fusedconv.decompositions())

        table = torch.export.default_decompositions()
        table.update(fusedconv.decompositions())
        program = program.run_decompositions(table)  # Core ATen

    What comes of it loads, compiles ahead of time and converts to ONNX without this package, and
    computes convolutions as torch's switches say where it runs. The functions raise
    NotImplementedError for float32 on CUDA where a ``precision`` that was asked for is another than
    the switches say.
    """
    operators = torch.ops.fusedconv
    return {
        operators.conv_transpose_act_norm.default: conv_transpose.in_torch,
        operators.conv_transpose_act_norm_traced.default: _traced,
        operators.conv_transpose_act_norm_backward.default: conv_transpose.backward_in_torch,
        operators.group_norm.default: group_norm.in_torch,
        operators.group_norm_backward.default: group_norm.backward_in_torch,
    }
