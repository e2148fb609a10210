"""What is measured: the systems, layers of published models, and GroupNorm with activations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from fusedconv.activations import activate
from fusedconv.benchmark.layers import LAYERS
from fusedconv.models import SYSTEMS
from fusedconv.modules import GroupNorm


class Workload(Protocol):
    """A plain module of torch's, its drop-in, and inputs of the sizes ``models.SIZES`` names."""

    @property
    def name(self) -> str: ...

    @property
    def original(self) -> Callable[..., nn.Module]: ...

    @property
    def model(self) -> Callable[..., nn.Module]: ...

    @property
    def init_arguments(self) -> tuple[Any, ...]:
        """Of both."""

    @property
    def convolves(self) -> bool: ...

    def shape(self, size: str) -> tuple[int, ...]:
        """The input's."""


class PlainGroupNorm(nn.GroupNorm):
    """GroupNorm with an activation before or after it, in torch's operators."""

    def __init__(
        self, num_groups: int, num_channels: int, activation: str | None, order: str
    ) -> None:
        super().__init__(num_groups, num_channels)
        self.activation = activation
        self.order = order

    def forward(self, input: Tensor) -> Tensor:
        if self.order == "act_norm":
            return super().forward(activate(input, self.activation))
        return activate(super().forward(input), self.activation)


def _fused_group_norm(
    num_groups: int, num_channels: int, activation: str | None, order: str
) -> GroupNorm:
    return GroupNorm(num_groups, num_channels, activation=activation, order=order)


@dataclass(frozen=True)
class NormWorkload:
    """GroupNorm of ``input_shape`` [N, C, *spatial] with an activation in front or behind."""

    input_shape: tuple[int, ...]
    groups: int
    activation: str | None = None
    order: str = "act_norm"

    original = PlainGroupNorm
    model = staticmethod(_fused_group_norm)
    convolves = False

    @property
    def variant(self) -> str:
        """Activation and GroupNorm in their order."""
        if self.activation is None:
            return "norm"
        return self.order.replace("act", self.activation)

    @property
    def plain_name(self) -> str:
        """The name without the activation."""
        return f"group_norm_{'x'.join(map(str, self.input_shape))}_g{self.groups}"

    @property
    def name(self) -> str:
        return self.plain_name + ("" if self.activation is None else f"_{self.variant}")

    @property
    def init_arguments(self) -> tuple[Any, ...]:
        return self.groups, self.input_shape[1], self.activation, self.order

    def shape(self, size: str) -> tuple[int, ...]:
        if size != "small":
            return self.input_shape
        batch, channels, *spatial = self.input_shape
        return min(batch, 2), channels, *(min(extent, 5) for extent in spatial)


#: [N, C, *spatial] and groups, from the call's overhead to what no cache holds (56 MB in fp32).
_NORM_SHAPES: tuple[tuple[tuple[int, ...], int], ...] = (
    ((1, 64, 16, 16), 8),  # a small denoising U-Net: 64 KB in fp32
    ((4, 12, 96, 96), 3),  # channels that fill no vector
    ((2, 1280, 8, 8), 32),  # Stable Diffusion 1.5's U-Net, innermost: planes of a few vectors
    ((2, 256, 37, 37), 32),  # Depth Anything's head: odd extents
    ((16, 256, 14, 14), 32),  # a mask head
    ((4, 256, 28, 28), 32),  # ResNet-50 with GroupNorm
    ((2, 320, 64, 64), 32),  # Stable Diffusion 1.5's U-Net, outermost
    ((1, 512, 64, 64), 32),  # the decoder of latent diffusion, first
    ((1, 128, 256, 256), 32),  # and last
    ((1, 64, 24, 24, 24), 8),  # SegResNet, third level
    ((1, 16, 96, 96, 96), 8),  # and first
    ((1, 128, 16, 32, 32), 8),  # 3D U-Net, second level
)
_VARIANTS: tuple[tuple[str | None, str], ...] = (
    (None, "act_norm"),
    ("gelu", "act_norm"),
    ("relu", "act_norm"),
    ("silu", "norm_act"),
)

NORMS: dict[str, NormWorkload] = {
    workload.name: workload
    for workload in (
        NormWorkload(shape, groups, activation, order)
        for shape, groups in _NORM_SHAPES
        for activation, order in _VARIANTS
    )
}

WORKLOADS: dict[str, Workload] = {**SYSTEMS, **NORMS, **LAYERS}
