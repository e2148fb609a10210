"""Modules: transposed convolution, activation and GroupNorm in one, and GroupNorm with activation.

Parameters live in ordinary torch submodules (``conv_transpose``, ``group_norm``), created in that
order, so that state dicts and random numbers are those of the plain composition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fusedconv import functional
from fusedconv.problem import ACTIVATIONS, ORDERS


def _check_choices(activation: str | None, order: str) -> None:
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(
            f"activation: got {activation!r}, expected None or one of {', '.join(ACTIVATIONS)}"
        )
    if order not in ORDERS:
        raise ValueError(f"order: got {order!r}, expected one of {', '.join(ORDERS)}")


class _ConvTransposeActNorm(nn.Module):
    """See ConvTransposeActNorm2d."""

    _conv_type: ClassVar[type[Any]]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: int | tuple[int, ...] = 0,
        output_padding: int | tuple[int, ...] = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: int | tuple[int, ...] = 1,
        padding_mode: str = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_groups: int | None = None,
        eps: float = 1e-5,
        affine: bool = True,
        activation: str | None = None,
        order: str = "act_norm",
        precision: str | None = None,
    ) -> None:
        super().__init__()
        _check_choices(activation, order)
        self.conv_transpose = self._conv_type(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            output_padding,
            groups,
            bias,
            dilation,
            padding_mode,
            device,
            dtype,
        )
        self.group_norm = (
            None
            if num_groups is None
            else nn.GroupNorm(num_groups, out_channels, eps, affine, device, dtype)
        )
        self.activation = activation
        self.order = order
        self.precision = precision

    def forward(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        """[N, C, *spatial] to [N, K, *output spatial].

        ``output_size`` picks among the sizes that a stride allows, as in torch's module.
        """
        conv = self.conv_transpose
        norm = self.group_norm
        output_padding = conv.output_padding
        if output_size is not None:
            output_padding = tuple(
                conv._output_padding(
                    input,
                    list(output_size),
                    conv.stride,
                    conv.padding,
                    conv.kernel_size,
                    len(conv.kernel_size),
                    conv.dilation,
                )
            )
        return functional.conv_transpose_act_norm(
            input,
            conv.weight,
            conv.bias,
            conv.stride,
            conv.padding,
            output_padding,
            conv.groups,
            conv.dilation,
            activation=self.activation,
            order=self.order,
            num_groups=None if norm is None else norm.num_groups,
            norm_weight=None if norm is None else norm.weight,
            norm_bias=None if norm is None else norm.bias,
            eps=1e-5 if norm is None else norm.eps,
            precision=self.precision,
        )

    def extra_repr(self) -> str:
        precision = "" if self.precision is None else f", precision={self.precision!r}"
        return f"activation={self.activation!r}, order={self.order!r}{precision}"


class ConvTransposeActNorm1d(_ConvTransposeActNorm):
    """ConvTransposeActNorm2d along one axis: input [N, C, L]."""

    _conv_type = nn.ConvTranspose1d


class ConvTransposeActNorm2d(_ConvTransposeActNorm):
    """Transposed convolution, activation and GroupNorm of [N, C, H, W].

    The positional arguments are ``torch.nn.ConvTranspose2d``'s. ``num_groups``, ``eps`` and
    ``affine`` are ``torch.nn.GroupNorm``'s; ``num_groups`` None leaves the normalisation out.
    ``activation`` is None, "relu", "gelu", "gelu_tanh" or "silu"; ``order`` is "act_norm" or
    "norm_act". ``precision`` ("tf32", "fp32" or None for torch's switches) applies to float32.

    Parameters: ``conv_transpose.weight``, ``conv_transpose.bias``, ``group_norm.weight``,
    ``group_norm.bias``. Raises ValueError for a choice that does not exist and what torch's modules
    raise for theirs.
    """

    _conv_type = nn.ConvTranspose2d


class ConvTransposeActNorm3d(_ConvTransposeActNorm):
    """ConvTransposeActNorm2d along three axes: input [N, C, D, H, W]."""

    _conv_type = nn.ConvTranspose3d


class GroupNorm(nn.GroupNorm):
    """``torch.nn.GroupNorm`` with an optional activation in front ("act_norm") or behind.

    Input [N, C, *], output of the same shape and dtype, channels last where the input is.
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str | None = None,
        order: str = "act_norm",
    ) -> None:
        super().__init__(num_groups, num_channels, eps, affine, device, dtype)
        _check_choices(activation, order)
        self.activation = activation
        self.order = order

    def forward(self, input: Tensor) -> Tensor:
        return functional.group_norm(
            input,
            self.num_groups,
            self.weight,
            self.bias,
            self.eps,
            activation=self.activation,
            order=self.order,
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation!r}, order={self.order!r}"
