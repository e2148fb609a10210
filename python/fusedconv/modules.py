"""Modules: transposed convolution, activation and GroupNorm in one, and GroupNorm with activation.

Parameters live in ordinary torch submodules (``conv_transpose``, ``group_norm``), created in that
order, so that state dicts and random numbers are those of the plain composition. Where a submodule
is replaced or carries hooks the modules call it, as the plain composition does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from fusedconv import arguments, functional, scripting
from fusedconv.activations import UNFUSED, activate, activate_by, parsed
from fusedconv.composing import announce, departure
from fusedconv.precision import PRECISIONS, resolve_precision
from fusedconv.problem import ORDERS
from fusedconv.scripting import is_scripting


class FusedConvTranspose(nn.Module):
    """What every module with the children ``conv_transpose`` and ``group_norm`` computes by.

    A subclass says which convolution it has and has ``activation``, ``order`` and ``precision``;
    ``recompute`` is the function's, and may be set at any time.
    """

    if TYPE_CHECKING:  # torch.jit.script would read annotations that exist at run time
        conv_transpose: Any
        group_norm: Any
        activation: str | None
        order: str
        precision: str | None
        recompute: bool

    recompute = False
    _conv_type: ClassVar[type[Any]]
    __constants__: ClassVar[list[str]] = [
        "activation", "order", "precision", "recompute", "_fuses", "_resizes", "_activation",
        "_parameter",
    ]  # fmt: skip

    def _departure(self, conv: Any, norm: Any) -> str | None:
        """Why the children must be called, None where reading their parameters does the same."""
        reason = departure("conv_transpose", conv, self._conv_type)
        if reason is None and norm is not None:
            reason = departure("group_norm", norm, nn.GroupNorm)
        return reason

    _fuses = scripting.AtScripting(
        lambda self: (
            self._departure(self.conv_transpose, self.group_norm) is None
            and parsed(self.activation)[0] not in UNFUSED
        )
    )
    _activation = scripting.AtScripting(lambda self: parsed(self.activation)[0])
    _parameter = scripting.AtScripting(lambda self: parsed(self.activation)[1] or 0.0)
    #: Whether TorchScript finds an ``output_size`` among the arguments of ``conv_transpose``.
    _resizes = scripting.AtScripting(lambda self: isinstance(self.conv_transpose, _ConvTransposeNd))

    def _run(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Eager's way: fused where the children are torch's own, composed where they are not."""
        conv, norm = self.conv_transpose, self.group_norm
        reason = self._departure(conv, norm)
        if reason is not None:
            announce(self, reason, self._steps())
            return self._compose(input, output_size)
        output_padding = conv.output_padding
        if output_size is not None:
            arguments.tensor("input", input)
            output_padding = _output_padding(conv, input, output_size)
        weight, bias = _weight_and_bias(conv)
        norm_weight, norm_bias = (None, None) if norm is None else _weight_and_bias(norm)
        return functional.conv_transpose_act_norm(
            input,
            weight,
            bias,
            conv.stride,
            conv.padding,
            output_padding,
            conv.groups,
            conv.dilation,
            activation=self.activation,
            order=self.order,
            num_groups=None if norm is None else norm.num_groups,
            norm_weight=norm_weight,
            norm_bias=norm_bias,
            eps=1e-5 if norm is None else norm.eps,
            precision=self.precision,
            recompute=self.recompute,
        )

    def _scripted(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """TorchScript's way; ``_fuses`` is a constant there."""
        if self._fuses:
            conv = self.conv_transpose
            norm = self.group_norm
            axes = len(conv.kernel_size)
            # Without a batch, and under autocast, the children know what to do.
            if input.dim() == axes + 2 and input.dtype == conv.weight.dtype:
                output_padding = conv._output_padding(
                    input,
                    output_size,
                    conv.stride,
                    conv.padding,
                    conv.kernel_size,
                    axes,
                    conv.dilation,
                )
                return scripting.conv_transpose_act_norm(
                    input,
                    conv.weight,
                    conv.bias,
                    conv.stride,
                    conv.padding,
                    output_padding,
                    conv.dilation,
                    conv.groups,
                    self.activation,
                    self.order,
                    0 if norm is None else norm.num_groups,
                    None if norm is None else norm.weight,
                    None if norm is None else norm.bias,
                    1e-5 if norm is None else norm.eps,
                    self.precision,
                    None,
                    self.recompute,
                )
        return self._compose(input, output_size)

    def _compose(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """The plain composition, in TorchScript too."""
        if is_scripting():
            if self._resizes:
                x = self.conv_transpose(input, output_size)
            elif output_size is None:
                x = self.conv_transpose(input)
            else:
                raise ValueError(
                    "output_size: got a size, expected None as conv_transpose has none"
                )
        elif output_size is None:
            x = self.conv_transpose(input)
        else:
            x = self.conv_transpose(input, output_size)
        norm = self.group_norm
        if norm is None:
            return self._activate(x)
        elif self.order == "act_norm":
            return norm(self._activate(x))
        else:
            return self._activate(norm(x))

    def _activate(self, x: Tensor) -> Tensor:
        if is_scripting():
            return activate(x, self._activation, self._parameter)
        else:  # torch.compile of torch 2.6 knows no descriptors of a class
            return activate_by(x, *parsed(self.activation))

    def _steps(self) -> tuple[tuple[str, object], ...]:
        """What ``_compose`` calls: names, and children or None for functions."""
        activation = ((self.activation, None),) if self.activation else ()
        norm = (("group_norm", self.group_norm),) if self.group_norm is not None else ()
        after = norm + activation if self.order == "norm_act" else activation + norm
        return (("conv_transpose", self.conv_transpose), *after)


def _weight_and_bias(child: Any) -> tuple[Any, Any]:
    """A child's ``weight`` and ``bias``; of a type known to compute neither, from where nn.Module
    keeps them, as it looks there last for an attribute."""
    if torch.compiler.is_compiling() or type(child) not in _PLAIN:
        return child.weight, child.bias
    attributes, own = child.__dict__, child._parameters
    if "weight" in attributes or "bias" in attributes or "weight" not in own or "bias" not in own:
        return child.weight, child.bias
    return own["weight"], own["bias"]


def _output_padding(conv: Any, input: Tensor, output_size: object) -> Any:
    """What an ``output_size`` means to a convolution, as its own method has it, whose errors name
    no argument."""
    size = arguments.extents("output_size", output_size)
    axes = len(conv.kernel_size)
    others = input.dim() - axes
    if others not in (1, 2):
        return conv.output_padding  # the function refuses the input
    if len(size) not in (axes, axes + others):
        raise ValueError(
            f"output_size: got {size}, expected {axes} extents or {axes + others} for input of "
            f"shape {tuple(input.shape)}"
        )
    size = size[-axes:]
    geometry = zip(
        input.shape[others:],
        conv.stride,
        conv.padding,
        conv.dilation,
        conv.kernel_size,
        strict=True,
    )
    least = [(n - 1) * s - 2 * p + d * (k - 1) + 1 for n, s, p, d, k in geometry]
    most = [extent + stride - 1 for extent, stride in zip(least, conv.stride, strict=True)]
    for extent, low, high in zip(size, least, most, strict=True):
        if extent < low or extent > high:
            raise ValueError(
                f"output_size: got {size}, expected from {least} to {most} for input of shape "
                f"{tuple(input.shape)}"
            )
    return [extent - low for extent, low in zip(size, least, strict=True)]


def _check_activation(activation: str | None, order: str) -> None:
    parsed(activation)
    arguments.choice("order", order, ORDERS)


def _check_factory(device: object, dtype: object) -> None:
    """``device`` and ``dtype`` of parameters, as torch's modules take them."""
    if device is not None:
        expected = "a device, its name, its index or None"
        try:
            torch.device(device)  # type: ignore[call-overload]
        except TypeError:
            raise TypeError(f"device: got {arguments.shown(device)}, expected {expected}") from None
        except RuntimeError:
            raise ValueError(
                f"device: got {arguments.shown(device)}, expected {expected}"
            ) from None
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(
            f"dtype: got {arguments.shown(dtype)}, expected a floating-point dtype or None"
        )


def check_divides(name: str, value: int, channels: int, what: str) -> None:
    """Raises ValueError where ``value`` groups do not share ``channels`` evenly."""
    if channels % value:
        raise ValueError(f"{name}: got {value}, expected a positive divisor of {channels} {what}")


class _ConvTransposeActNorm(FusedConvTranspose):
    """See ConvTransposeActNorm2d."""

    _axes: ClassVar[int]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        output_padding: int | Sequence[int] = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: int | Sequence[int] = 1,
        padding_mode: str = "zeros",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_groups: int | None = None,
        eps: float = 1e-5,
        affine: bool = True,
        activation: str | None = None,
        order: str = "act_norm",
        precision: str | None = None,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        axes = self._axes
        in_channels = arguments.integer("in_channels", in_channels, 1)
        out_channels = arguments.integer("out_channels", out_channels, 1)
        kernel_size = arguments.integers("kernel_size", kernel_size, axes, 1)
        stride = arguments.integers("stride", stride, axes, 1)
        padding = arguments.integers("padding", padding, axes, 0)
        output_padding = arguments.integers("output_padding", output_padding, axes, 0)
        dilation = arguments.integers("dilation", dilation, axes, 1)
        for extra, step, dilated in zip(output_padding, stride, dilation, strict=True):
            if extra >= max(step, dilated):
                raise ValueError(
                    f"output_padding: got {output_padding}, expected each smaller than stride "
                    f"{stride} or dilation {dilation}"
                )
        groups = arguments.integer("groups", groups, 1)
        check_divides("groups", groups, in_channels, "input channels")
        check_divides("groups", groups, out_channels, "output channels")
        bias = arguments.flag("bias", bias)
        arguments.choice("padding_mode", padding_mode, ("zeros",))
        _check_factory(device, dtype)
        if num_groups is not None:
            num_groups = arguments.integer("num_groups", num_groups, 1, optional=True)
            check_divides("num_groups", num_groups, out_channels, "output channels")
        eps = arguments.finite("eps", eps)
        affine = arguments.flag("affine", affine)
        _check_activation(activation, order)
        arguments.choice("precision", precision, PRECISIONS, optional=True)
        if dtype is not None:
            resolve_precision(dtype, "cpu", precision)
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
        self.recompute = arguments.flag("recompute", recompute)

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """``input`` and ``output_size`` as in ``torch.nn.ConvTranspose2d``."""
        if is_scripting():
            return self._scripted(input, output_size)
        else:
            return self._run(input, output_size)

    def extra_repr(self) -> str:
        precision = "" if self.precision is None else f", precision={self.precision!r}"
        recompute = ", recompute=True" if self.recompute else ""
        return f"activation={self.activation!r}, order={self.order!r}{precision}{recompute}"


class ConvTransposeActNorm1d(_ConvTransposeActNorm):
    """ConvTransposeActNorm2d along one axis: input [N, C, L]."""

    _conv_type = nn.ConvTranspose1d
    _axes = 1


class ConvTransposeActNorm2d(_ConvTransposeActNorm):
    """Transposed convolution, activation and GroupNorm of [N, C, H, W].

    The positional arguments are ``torch.nn.ConvTranspose2d``'s. ``num_groups``, ``eps`` and
    ``affine`` are ``torch.nn.GroupNorm``'s; ``num_groups`` None leaves the normalisation out.
    ``activation`` is None or a name in ``fusedconv.activations.NAMES``, of which the functions say
    more; ``order`` is "act_norm" or "norm_act". ``precision`` ("tf32", "fp32" or None for torch's
    switches) applies to float32. With ``recompute`` training keeps no output of the convolution,
    which the backward pass computes once more.

    Parameters: ``conv_transpose.weight``, ``conv_transpose.bias``, ``group_norm.weight``,
    ``group_norm.bias``. A value or type that cannot be right raises ValueError or TypeError naming
    the argument. ``torch.jit.script`` compiles the module, to the operators.
    """

    _conv_type = nn.ConvTranspose2d
    _axes = 2


class ConvTransposeActNorm3d(_ConvTransposeActNorm):
    """ConvTransposeActNorm2d along three axes: input [N, C, D, H, W]."""

    _conv_type = nn.ConvTranspose3d
    _axes = 3


class GroupNorm(nn.GroupNorm):
    """``torch.nn.GroupNorm`` with an optional activation in front ("act_norm") or behind.

    Input [N, C, *], output of the same shape and dtype, channels last where the input is. A value
    or type that cannot be right raises ValueError or TypeError naming the argument.
    """

    # torch declares it an instance's, which ClassVar may not override.
    __constants__ = [  # noqa: RUF012
        *nn.GroupNorm.__constants__, "activation", "order", "_fuses", "_activation", "_parameter",
    ]  # fmt: skip

    _fuses = scripting.AtScripting(lambda self: parsed(self.activation)[0] not in UNFUSED)
    _activation = scripting.AtScripting(lambda self: parsed(self.activation)[0])
    _parameter = scripting.AtScripting(lambda self: parsed(self.activation)[1] or 0.0)

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str | None = None,
        order: str = "act_norm",
    ) -> None:
        num_groups = arguments.integer("num_groups", num_groups, 1)
        num_channels = arguments.integer("num_channels", num_channels, 0)
        check_divides("num_groups", num_groups, num_channels, "channels")
        eps = arguments.finite("eps", eps)
        affine = arguments.flag("affine", affine)
        _check_factory(device, dtype)
        _check_activation(activation, order)
        super().__init__(num_groups, num_channels, eps, affine, device, dtype)
        self.activation = activation
        self.order = order

    def forward(self, input: Tensor) -> Tensor:
        if is_scripting():
            x = input
            if not self._fuses and self.order == "act_norm":
                x = activate(x, self._activation, self._parameter)
            x = scripting.group_norm(
                x,
                self.num_groups,
                self.weight,
                self.bias,
                self.eps,
                self.activation if self._fuses else None,
                self.order,
            )
            if not self._fuses and self.order == "norm_act":
                x = activate(x, self._activation, self._parameter)
            return x
        else:
            weight, bias = _weight_and_bias(self)
            return functional.group_norm(
                input,
                self.num_groups,
                weight,
                bias,
                self.eps,
                activation=self.activation,
                order=self.order,
            )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation!r}, order={self.order!r}"


_PLAIN = frozenset(
    {nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.GroupNorm, GroupNorm}
)
