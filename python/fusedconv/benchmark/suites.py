"""What is measured by default on a kind of device, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fusedconv.benchmark.cells import PASSES, PRECISIONS
from fusedconv.benchmark.contenders import CONTENDERS, Contender
from fusedconv.benchmark.layers import LAYERS
from fusedconv.benchmark.records import INTERLEAVED_METHOD, LAYERS_METHOD, METHOD
from fusedconv.benchmark.workloads import NORMS
from fusedconv.models import SYSTEMS


@dataclass(frozen=True)
class Suite:
    """The default choice of cells, contenders and repetitions, and how they are measured.

    ``size`` is one of ``models.SIZES``, ``method`` what headers of results say. ``seconds`` of
    timing a record, between ``least`` and ``most`` repetitions; ``flushes`` as ``timing.Clock``
    takes it. ``compiles_ahead`` lets parallel processes do torch.compile's work before the timing:
    for many cells whose tensors fit on a device a processor's core. ``together`` lets those that
    may share a process do so, and take turns of ``in_a_row`` calls, as ``timing.Clock`` takes it:
    for cells in which the host decides.
    """

    workloads: tuple[str, ...]
    precisions: tuple[str, ...]
    contenders: tuple[str, ...]
    size: str
    seconds: float
    least: int
    most: int
    method: str
    passes: tuple[str, ...] = PASSES
    flushes: bool = False
    compiles_ahead: bool = False
    together: bool = False
    in_a_row: int = 1


_ON_PROCESSORS = ("fusedconv", "eager", "compile")

#: By name and by the type of torch's device.
SUITES: dict[str, dict[str, Suite]] = {
    "systems": {
        "cuda": Suite(
            workloads=tuple(SYSTEMS),
            precisions=PRECISIONS,
            contenders=tuple(CONTENDERS),
            size="full",
            seconds=0.5,
            least=10,
            most=200,
            method=METHOD,
        ),
        "cpu": Suite(
            workloads=(*SYSTEMS, *NORMS),
            precisions=("fp32", "bf16"),
            contenders=_ON_PROCESSORS,
            size="processor",
            seconds=0.3,
            least=7,
            most=2000,
            method=INTERLEAVED_METHOD,
        ),
    },
    "layers": {
        "cuda": Suite(
            workloads=tuple(LAYERS),
            precisions=("tf32", "bf16"),
            contenders=("fusedconv", "eager", "eager_cudnn_benchmark", "compile"),
            size="full",
            seconds=0.15,
            least=10,
            most=200,
            method=LAYERS_METHOD,
            passes=("forward",),
            flushes=True,
            compiles_ahead=True,
            together=True,
            in_a_row=12,
        ),
        "cpu": Suite(
            workloads=tuple(LAYERS),
            precisions=("fp32", "bf16"),
            contenders=_ON_PROCESSORS,
            size="processor",
            seconds=0.3,
            least=3,
            most=200,
            method=INTERLEAVED_METHOD,
            passes=("forward",),
        ),
    },
}
DEFAULT_SUITE = "systems"


def sharing(
    contenders: Sequence[Contender], kind: str, together: bool
) -> list[tuple[Contender, ...]]:
    """Who takes turns in a process on devices of a ``kind``, by torch's type of it: on processors
    all. On GPUs torch keeps the cuDNN plan that a convolution got first: there each is alone, or
    ``together`` those with cudnn.benchmark on, and ours, for which it is on beside them."""
    if kind != "cuda":
        return [tuple(contenders)]
    sharers = tuple(each for each in contenders if each.ours or each.cudnn_benchmark)
    if not together or all(each.ours for each in sharers):
        return [(each,) for each in contenders]
    return [sharers, *((each,) for each in contenders if each not in sharers)]


def default_device() -> torch.device:
    """CUDA where there is a GPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
