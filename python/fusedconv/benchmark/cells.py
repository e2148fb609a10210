"""The cells of the benchmark: a workload, a pass, a precision and a layout each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from fusedconv import precision
from fusedconv.benchmark.workloads import WORKLOADS
from fusedconv.models import SYSTEMS

#: float64 is what the others are held against.
DTYPES: dict[str, torch.dtype] = {
    name: dtype for name, dtype in precision.DTYPES.items() if name != "fp64"
}
PRECISIONS = tuple(DTYPES)
#: Precisions in which tensors are float32 and the forward pass is called under autocast: which of
#: ``PRECISIONS`` that lowers to.
AUTOCAST = {"autocast_bf16": "bf16", "autocast_fp16": "fp16"}
#: All that a cell may have.
ALL_PRECISIONS = (*PRECISIONS, *AUTOCAST)
LAYOUTS = ("nchw", "nhwc")
PASSES = ("forward", "forward_backward")


@dataclass(frozen=True)
class Cell:
    """What one record is about, apart from the contender."""

    workload: str
    precision: str
    layout: str
    pass_: str

    @property
    def convolves(self) -> bool:
        return WORKLOADS[self.workload].convolves

    @property
    def has_layouts(self) -> bool:
        """Whether torch has channels last for the input: with two spatial axes or three."""
        return len(WORKLOADS[self.workload].shape("full")) > 3

    @property
    def dtype(self) -> torch.dtype:
        """Of parameters and inputs."""
        return torch.float32 if self.precision in AUTOCAST else DTYPES[self.precision]

    def lowering(self, device: str) -> AbstractContextManager[Any]:
        """What the forward pass is called in, on devices of a type."""
        if self.precision not in AUTOCAST:
            return contextlib.nullcontext()
        return torch.autocast(device, DTYPES[AUTOCAST[self.precision]])

    @property
    def title(self) -> str:
        return f"{self.workload} {self.pass_} {self.precision} {self.layout}"

    def fields(self) -> dict[str, str]:
        """As a record names it."""
        return {
            "workload": self.workload,
            "pass": self.pass_,
            "dtype": str(self.dtype).removeprefix("torch."),
            "precision": self.precision,
            "layout": self.layout,
        }

    @classmethod
    def of(cls, fields: dict[str, str]) -> Cell:
        """The cell that ``fields`` name."""
        return cls(fields["workload"], fields["precision"], fields["layout"], fields["pass"])


def check_names(argument: str, values: Iterable[str], known: Iterable[str]) -> None:
    """Raises ValueError for a value that is not known."""
    known = tuple(known)
    for value in values:
        if value not in known:
            raise ValueError(f"{argument}: got {value!r}, expected one of {', '.join(known)}")


def select_cells(
    workloads: Iterable[str] = tuple(SYSTEMS),
    precisions: Iterable[str] = PRECISIONS,
    layouts: Iterable[str] = LAYOUTS,
    passes: Iterable[str] = PASSES,
    device: str = "cuda",
) -> list[Cell]:
    """All combinations; TF32 is left out without a convolution and on any ``device`` (its type)
    but CUDA, where it is the same as fp32, and channels last where the input has no such layout.

    Raises ValueError for an unknown name, and where all that was chosen is left out.
    """
    workloads, precisions = tuple(workloads), tuple(precisions)
    layouts, passes = tuple(layouts), tuple(passes)
    check_names("workloads", workloads, WORKLOADS)
    check_names("precisions", precisions, ALL_PRECISIONS)
    check_names("layouts", layouts, LAYOUTS)
    check_names("passes", passes, PASSES)
    every = [
        Cell(workload, precision, layout, pass_)
        for workload in workloads
        for precision in precisions
        for layout in layouts
        for pass_ in passes
    ]
    precise = [
        cell for cell in every if cell.precision != "tf32" or (cell.convolves and device == "cuda")
    ]
    cells = [cell for cell in precise if cell.layout == "nchw" or cell.has_layouts]
    if every and not precise:
        raise ValueError(
            "precisions: got tf32, expected another one, as convolutions on CUDA alone have it"
        )
    if precise and not cells:
        raise ValueError("layouts: got nhwc, expected nchw, as no chosen input has channels last")
    return cells


def memory_format(axes: int, layout: str) -> torch.memory_format:
    if layout == "nchw":
        return torch.contiguous_format
    return torch.channels_last if axes == 4 else torch.channels_last_3d
