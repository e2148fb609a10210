"""What a cell of the benchmark asks of the kernels."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from fusedconv.benchmark.cells import Cell
from fusedconv.benchmark.contenders import CONTENDERS
from fusedconv.benchmark.measuring import precision_mode, prepare
from fusedconv.problem import Problem
from fusedconv.recording import Composition, record
from fusedconv.tuning import autotune


def cell_problems(
    cell: Cell, device: torch.device, size: str, tuned: bool = False
) -> list[Problem]:
    """The problems of a cell's call, found by making it, ``tuned`` within ``autotune``; ``size`` is
    one of ``models.SIZES``."""
    setup = prepare(cell, device, size)
    model = CONTENDERS["fusedconv"].build(setup.workload, setup.original)
    x = setup.inputs[0].requires_grad_(setup.grad is not None)
    with (
        precision_mode(cell.precision),
        autotune() if tuned else nullcontext(),
        record.recording() as calls,
    ):
        with torch.set_grad_enabled(setup.grad is not None), setup.lowering():
            output = model(x)
        if setup.grad is not None:
            output.backward(setup.grad)
    asked = [call.problem for call in calls if not isinstance(call, Composition)]
    return list(dict.fromkeys(asked))
