"""The three systems, each a module with ``Model`` (the original) and ``ModelNew`` (its drop-in)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from fusedconv.models import conv_transpose2d_gelu_group_norm as system1
from fusedconv.models import conv_transpose3d_relu_group_norm as system2
from fusedconv.models import group_norm as system3
from fusedconv.modules import FusedConvTranspose

ConvTranspose2dGELUGroupNorm = system1.ModelNew
ConvTranspose3dReLUGroupNorm = system2.ModelNew
GroupNormModel = system3.ModelNew


#: Of inputs: what GPUs are measured at, what processors are, and what runs in moments anywhere.
SIZES = ("full", "processor", "small")


@dataclass(frozen=True)
class System:
    """One of the three systems: original, drop-in, arguments, and inputs of three sizes."""

    name: str
    title: str
    original: type[nn.Module]
    model: type[nn.Module]
    init_arguments: tuple[Any, ...]
    input_shape: tuple[int, ...]
    processor_input_shape: tuple[int, ...]
    small_input_shape: tuple[int, ...]

    @property
    def convolves(self) -> bool:
        return issubclass(self.model, FusedConvTranspose)

    def shape(self, size: str) -> tuple[int, ...]:
        """The input's, by its entry of ``SIZES``."""
        shapes = (self.input_shape, self.processor_input_shape, self.small_input_shape)
        return dict(zip(SIZES, shapes, strict=True))[size]


def _system(name: str, title: str, module: Any) -> System:
    return System(
        name,
        title,
        module.Model,
        module.ModelNew,
        module.INIT_ARGUMENTS,
        module.INPUT_SHAPE,
        module.PROCESSOR_INPUT_SHAPE,
        module.SMALL_INPUT_SHAPE,
    )


#: By the names that benchmarks use.
SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        _system("system1", "ConvTranspose2d -> GELU -> GroupNorm", system1),
        _system("system2", "ConvTranspose3d -> ReLU -> GroupNorm", system2),
        _system("system3", "GroupNorm", system3),
    )
}

__all__ = [
    "SIZES",
    "SYSTEMS",
    "ConvTranspose2dGELUGroupNorm",
    "ConvTranspose3dReLUGroupNorm",
    "GroupNormModel",
    "System",
    "system1",
    "system2",
    "system3",
]
