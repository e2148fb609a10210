"""Layers of published models: transposed convolutions and what follows them, at their sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fusedconv.activations import activate
from fusedconv.functional import conv_transpose_act_norm
from fusedconv.modules import (
    ConvTransposeActNorm1d,
    ConvTransposeActNorm2d,
    ConvTransposeActNorm3d,
)


class LayerNorm2d(nn.Module):
    """Normalises the channels of each pixel of [N, C, H, W], as Segment Anything writes it."""

    def __init__(self, num_channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_channels))
        self.bias = nn.Parameter(torch.zeros(num_channels))
        self.eps = eps

    def forward(self, input: Tensor) -> Tensor:
        mean = input.mean(1, keepdim=True)
        variance = (input - mean).pow(2).mean(1, keepdim=True)
        normalized = (input - mean) / torch.sqrt(variance + self.eps)
        return self.weight[:, None, None] * normalized + self.bias[:, None, None]


_CONVOLUTIONS: dict[int, type[Any]] = {
    1: nn.ConvTranspose1d,
    2: nn.ConvTranspose2d,
    3: nn.ConvTranspose3d,
}
_BATCH_NORMS: dict[int, type[Any]] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
_INSTANCE_NORMS: dict[int, type[Any]] = {
    1: nn.InstanceNorm1d,
    2: nn.InstanceNorm2d,
    3: nn.InstanceNorm3d,
}


def _batch_norm(axes: int, channels: int) -> nn.Module:
    """As inference runs it, with running statistics that are not trivial."""
    norm: nn.Module = _BATCH_NORMS[axes](channels).eval()
    nn.init.uniform_(norm.get_buffer("running_mean"), -1.0, 1.0)
    nn.init.uniform_(norm.get_buffer("running_var"), 0.5, 2.0)
    return norm


@dataclass(frozen=True)
class LayerWorkload:
    """A layer of ``title`` on [batch, in_channels, *spatial]; lengths are those of every axis.

    ``norm`` is "layer" (over the channels of a pixel), "batch" (inference), "instance" (without
    parameters), "group" (of ``num_groups``) or None; ``order`` is that of norm and ``activation``.
    """

    name: str
    title: str
    batch: int
    in_channels: int
    out_channels: int
    spatial: tuple[int, ...]
    kernel_size: int
    stride: int
    padding: int = 0
    output_padding: int = 0
    groups: int = 1
    norm: str | None = None
    num_groups: int = 0
    activation: str | None = None
    order: str = "norm_act"

    convolves = True

    @property
    def original(self) -> type[nn.Module]:
        return PlainLayer

    @property
    def model(self) -> type[nn.Module]:
        return _FUSED[self.axes]

    @property
    def init_arguments(self) -> tuple[LayerWorkload]:
        return (self,)

    @property
    def axes(self) -> int:
        return len(self.spatial)

    @property
    def convolution(self) -> tuple[int, ...]:
        """The first arguments of torch's transposed convolutions, and of ours."""
        return (
            self.in_channels,
            self.out_channels,
            self.kernel_size,
            self.stride,
            self.padding,
            self.output_padding,
            self.groups,
        )

    @property
    def statistics(self) -> int | None:
        """Groups of the GroupNorm that computes what ``norm`` does, None where none does."""
        return {"group": self.num_groups, "instance": self.out_channels}.get(self.norm or "")

    def shape(self, size: str) -> tuple[int, ...]:
        """Processors run one sample."""
        if size == "small":
            return min(self.batch, 2), self.in_channels, *(min(each, 3) for each in self.spatial)
        return 1 if size == "processor" else self.batch, self.in_channels, *self.spatial

    def norm_module(self) -> nn.Module | None:
        """torch's."""
        match self.norm:
            case "layer":
                return LayerNorm2d(self.out_channels)
            case "batch":
                return _batch_norm(self.axes, self.out_channels)
            case "instance":
                norm: nn.Module = _INSTANCE_NORMS[self.axes](self.out_channels)
                return norm
            case "group":
                return nn.GroupNorm(self.num_groups, self.out_channels)
            case _:
                return None


class PlainLayer(nn.Module):
    """A layer in torch's modules; a GroupNorm is named as our modules name theirs."""

    def __init__(self, layer: LayerWorkload) -> None:
        super().__init__()
        self.conv_transpose = _CONVOLUTIONS[layer.axes](*layer.convolution)
        norm, grouped = layer.norm_module(), layer.norm == "group"
        self.group_norm = norm if grouped else None
        self.norm = None if grouped else norm
        self.activation, self.order = layer.activation, layer.order

    def forward(self, input: Tensor) -> Tensor:
        x = self.conv_transpose(input)
        if self.order == "act_norm":
            x = activate(x, self.activation)
        if self.group_norm is not None:
            x = self.group_norm(x)
        if self.norm is not None:
            x = self.norm(x)
        return activate(x, self.activation) if self.order == "norm_act" else x


class _FusedLayer(nn.Module):
    """One of our modules, and a norm that it has none of by the function: LayerNorm2d over
    channels, BatchNorm of inference."""

    def __init__(self, layer: LayerWorkload) -> None:
        whole = layer.norm != "batch"
        super().__init__(
            *layer.convolution,
            num_groups=layer.statistics,
            affine=layer.norm == "group",
            activation=layer.activation if whole else None,
            order=layer.order,
        )
        own = layer.norm is None or layer.statistics is not None
        self.norm = None if own else layer.norm_module()
        self.activation_behind = None if whole else layer.activation

    def forward(self, input: Tensor) -> Tensor:
        norm: Any = self.norm
        if norm is None:
            result: Tensor = super().forward(input)
            return result
        layer = isinstance(norm, LayerNorm2d)
        conv: Any = self.conv_transpose
        activation: Any = self.activation if layer else self.activation_behind
        order: Any = self.order
        return conv_transpose_act_norm(
            input,
            conv.weight,
            conv.bias,
            conv.stride,
            conv.padding,
            conv.output_padding,
            conv.groups,
            conv.dilation,
            activation=activation,
            order=order,
            norm="layer" if layer else "batch",
            norm_weight=norm.weight,
            norm_bias=norm.bias,
            eps=norm.eps,
            running_mean=None if layer else norm.running_mean,
            running_var=None if layer else norm.running_var,
        )


class FusedLayer1d(_FusedLayer, ConvTransposeActNorm1d):  # type: ignore[misc]
    """``PlainLayer`` along one axis by our module."""


class FusedLayer2d(_FusedLayer, ConvTransposeActNorm2d):  # type: ignore[misc]
    """``PlainLayer`` along two axes by our module."""


class FusedLayer3d(_FusedLayer, ConvTransposeActNorm3d):  # type: ignore[misc]
    """``PlainLayer`` along three axes by our module."""


_FUSED: dict[int, type[nn.Module]] = {1: FusedLayer1d, 2: FusedLayer2d, 3: FusedLayer3d}

#: By name. Sizes follow from the models' default configurations.
LAYERS: dict[str, LayerWorkload] = {
    layer.name: layer
    for layer in (
        LayerWorkload(
            "sam1", "Segment Anything, mask decoder", 64, 256, 64, (64, 64), 2, 2,
            norm="layer", activation="gelu",
        ),
        LayerWorkload(
            "sam2", "Segment Anything, mask decoder", 64, 64, 32, (128, 128), 2, 2,
            activation="gelu",
        ),
        LayerWorkload(
            "vitdet", "ViTDet, feature pyramid", 4, 768, 384, (64, 64), 2, 2,
            norm="layer", activation="gelu",
        ),
        LayerWorkload("dpt4", "Depth Anything V2, DPT head", 4, 256, 256, (37, 37), 4, 4),
        LayerWorkload(
            "mrcnn", "Mask R-CNN, mask head", 256, 256, 256, (14, 14), 2, 2, activation="relu"
        ),
        LayerWorkload("keypoint", "Keypoint R-CNN, head", 64, 512, 17, (14, 14), 4, 2, 1),
        LayerWorkload(
            "vitpose", "ViTPose, head", 64, 256, 256, (32, 24), 4, 2, 1,
            norm="batch", activation="relu",
        ),
        LayerWorkload(
            "centernet", "CenterNet on ResNet-18, last upsampling", 16, 256, 256, (64, 64), 4, 2, 1,
            norm="batch", activation="relu",
        ),
        LayerWorkload(
            "lama", "LaMa, second upsampling", 4, 256, 128, (64, 64), 3, 2, 1, 1,
            norm="batch", activation="relu",
        ),
        LayerWorkload(
            "dcgan", "DCGAN, generator", 128, 256, 128, (16, 16), 4, 2, 1,
            norm="batch", activation="relu",
        ),
        LayerWorkload("nnunet", "nnU-Net 3D, decoder", 2, 128, 64, (32, 32, 32), 2, 2),
        LayerWorkload("nnunet_last", "nnU-Net 3D, decoder", 2, 64, 32, (64, 64, 64), 2, 2),
        LayerWorkload("swinunetr", "SwinUNETR, first upsampling", 1, 768, 384, (3, 3, 3), 2, 2),
        LayerWorkload(
            "vista3d", "VISTA3D, point head", 1, 48, 48, (64, 64, 64), 3, 2, 1, 1,
            norm="instance", activation="gelu",
        ),
        LayerWorkload(
            "mednext_dw", "MedNeXt, upsampling block", 2, 128, 128, (32, 32, 32), 3, 2, 1,
            groups=128, norm="group", num_groups=128,
        ),
        LayerWorkload(
            "psmnet", "PSMNet, hourglass", 1, 64, 64, (12, 16, 32), 3, 2, 1, 1, norm="batch"
        ),
        LayerWorkload("hifigan8", "HiFi-GAN, upsampling by 8", 8, 256, 128, (4096,), 16, 8, 4),
        LayerWorkload("dac2", "Descript Audio Codec, decoder", 8, 192, 96, (40000,), 4, 2, 1),
        LayerWorkload(
            "hdemucs1d", "HDemucs, time decoder", 4, 768, 384, (5000,), 8, 4, 2,
            norm="group", num_groups=4, activation="gelu",
        ),
        LayerWorkload(
            "dw2d", "CenterNet on DLA, upsampling", 8, 128, 128, (64, 64), 4, 2, 1, groups=128
        ),
        LayerWorkload(
            "l2_60", "KernelBench, level 2, problem 60, less its HardSwish",
            128, 3, 16, (16, 32, 32), 3, 2, 1,
            norm="group", num_groups=4, activation="silu", order="act_norm",
        ),
        LayerWorkload(
            "small1", "a small plane", 1, 64, 64, (32, 32), 3, 1, 1,
            norm="group", num_groups=8, activation="gelu", order="act_norm",
        ),
        LayerWorkload(
            "small2", "a small plane of many channels", 1, 512, 256, (14, 14), 3, 1, 1,
            norm="group", num_groups=8, activation="gelu", order="act_norm",
        ),
    )
}  # fmt: skip
