"""What is measured by default on a kind of device, and how."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fusedconv.benchmark.cells import PRECISIONS
from fusedconv.benchmark.contenders import CONTENDERS
from fusedconv.benchmark.workloads import WORKLOADS
from fusedconv.models import SYSTEMS


@dataclass(frozen=True)
class Suite:
    """The default choice of cells, contenders and repetitions.

    ``size`` is one of ``models.SIZES``. ``interleaved`` contenders take turns in one process;
    others have processes of their own. ``seconds`` of timing a record, between ``least`` and
    ``most`` repetitions.
    """

    workloads: tuple[str, ...]
    precisions: tuple[str, ...]
    contenders: tuple[str, ...]
    size: str
    interleaved: bool
    seconds: float
    least: int
    most: int


#: By the type of torch's device.
SUITES: dict[str, Suite] = {
    "cuda": Suite(
        workloads=tuple(SYSTEMS),
        precisions=PRECISIONS,
        contenders=tuple(CONTENDERS),
        size="full",
        interleaved=False,
        seconds=0.5,
        least=10,
        most=200,
    ),
    "cpu": Suite(
        workloads=tuple(WORKLOADS),
        precisions=("fp32", "bf16"),
        contenders=("fusedconv", "eager", "compile"),
        size="processor",
        interleaved=True,
        seconds=0.3,
        least=7,
        most=2000,
    ),
}


def default_device() -> torch.device:
    """CUDA where there is a GPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
