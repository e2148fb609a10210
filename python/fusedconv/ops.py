"""torch.library operators, their fake implementations and gradients, and the way to a plan.

``fusedconv::conv_transpose_act_norm`` and ``fusedconv::group_norm`` are what torch.compile and
autograd see; ``fusedconv.functional`` calls the plan directly where neither is involved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from fusedconv.kernels import cuda_program, torch_reference
from fusedconv.plan import Plan, cached, plan_for
from fusedconv.problem import (
    ACTIVATIONS,
    DTYPE_CODES,
    ORDERS,
    ConvTransposeGeometry,
    NormGeometry,
    Problem,
    layout_of,
    resolve_precision,
)
from fusedconv.recording import record
from fusedconv.registry import forced_kernels

Saved = tuple[Tensor, Tensor, Tensor, Tensor]


# ---- from tensors to a plan ----------------------------------------------------------------------


@cache
def _device_properties(index: int) -> tuple[int, int]:
    properties = torch.cuda.get_device_properties(index)
    return properties.major * 10 + properties.minor, properties.multi_processor_count


def _check_tensor(name: str, tensor: Tensor | None, like: Tensor, shape: tuple[int, ...]) -> None:
    if tensor is None:
        return
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, expected {shape}")
    if tensor.device != like.device:
        raise ValueError(
            f"{name}: got device {tensor.device}, expected {like.device} as the input's"
        )


def _check_input(input: Tensor) -> None:
    if not input.dtype.is_floating_point:
        raise TypeError(f"input: got dtype {input.dtype}, expected a floating-point dtype")
    if input.layout != torch.strided:
        raise TypeError(f"input: got layout {input.layout}, expected torch.strided")
    if input.dim() < 2:
        raise ValueError(f"input: got shape {tuple(input.shape)}, expected [N, C, *spatial]")


def _check_choice(activation: str, order: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"activation: got {activation!r}, expected one of {', '.join(ACTIVATIONS)}"
        )
    if order not in ORDERS:
        raise ValueError(f"order: got {order!r}, expected one of {', '.join(ORDERS)}")


def _norm_geometry(
    input: Tensor,
    channels: int,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    names: tuple[str, str],
) -> NormGeometry:
    if num_groups < 1 or channels % num_groups:
        raise ValueError(
            f"num_groups: got {num_groups}, expected a positive divisor of {channels} channels"
        )
    if not math.isfinite(eps):
        raise ValueError(f"eps: got {eps}, expected a finite number")
    allowed = {input.dtype} if input.dtype == torch.float64 else set(DTYPE_CODES)
    for name, tensor in zip(names, (weight, bias), strict=True):
        _check_tensor(name, tensor, input, (channels,))
        if tensor is not None and tensor.dtype not in allowed:
            raise TypeError(
                f"{name}: got dtype {tensor.dtype}, expected "
                f"{' or '.join(sorted(map(str, allowed)))} for input of {input.dtype}"
            )
    if weight is not None and bias is not None and weight.dtype != bias.dtype:
        raise TypeError(
            f"{names[1]}: got dtype {bias.dtype}, expected {weight.dtype} as {names[0]}'s"
        )
    dtypes = [tensor.dtype for tensor in (weight, bias) if tensor is not None]
    return NormGeometry(
        num_groups, eps, weight is not None, bias is not None, dtypes[0] if dtypes else None
    )


def _conv_geometry(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    output_padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
) -> ConvTransposeGeometry:
    axes = weight.dim() - 2
    if axes not in (1, 2, 3):
        raise ValueError(
            f"weight: got shape {tuple(weight.shape)}, expected [C, K / groups, *kernel_size] with "
            "one, two or three spatial axes"
        )
    if input.dim() != axes + 2:
        raise ValueError(
            f"input: got shape {tuple(input.shape)}, expected {axes + 2} axes, [N, C, *spatial], "
            f"for a weight of shape {tuple(weight.shape)}"
        )
    if weight.dtype != input.dtype:
        raise TypeError(f"weight: got dtype {weight.dtype}, expected {input.dtype} as the input's")
    if bias is not None and bias.dtype != input.dtype:
        raise TypeError(f"bias: got dtype {bias.dtype}, expected {input.dtype} as the input's")
    if weight.device != input.device:
        raise ValueError(
            f"weight: got device {weight.device}, expected {input.device} as the input's"
        )
    channels = int(input.shape[1])
    if weight.shape[0] != channels:
        raise ValueError(
            f"input: got {channels} channels, expected {weight.shape[0]} for a weight of shape "
            f"{tuple(weight.shape)}"
        )
    if groups < 1 or channels % groups:
        raise ValueError(
            f"groups: got {groups}, expected a positive divisor of {channels} input channels"
        )
    for name, values, least in (
        ("stride", stride, 1),
        ("padding", padding, 0),
        ("output_padding", output_padding, 0),
        ("dilation", dilation, 1),
    ):
        integers = all(isinstance(value, int) for value in values)
        if len(values) != axes or not integers or min(values) < least:
            raise ValueError(f"{name}: got {values}, expected {axes} integers of at least {least}")
    for extra, step, dilated in zip(output_padding, stride, dilation, strict=True):
        if extra >= max(step, dilated):
            raise ValueError(
                f"output_padding: got {output_padding}, expected each smaller than stride {stride} "
                f"or dilation {dilation}"
            )
    geometry = ConvTransposeGeometry(
        in_channels=channels,
        out_channels=int(weight.shape[1]) * groups,
        kernel_size=tuple(weight.shape[2:]),
        stride=stride,
        padding=padding,
        output_padding=output_padding,
        dilation=dilation,
        groups=groups,
        bias=bias is not None,
        weight_strides=tuple(weight.stride()),
    )
    _check_tensor("bias", bias, input, (geometry.out_channels,))
    spatial = tuple(input.shape[2:])
    if spatial and min(spatial) < 1:
        raise ValueError(f"input: got spatial extents {spatial}, expected at least 1 each")
    output = geometry.output_spatial(spatial)
    if min(output) < 1:
        raise ValueError(
            f"input: got spatial extents {spatial}, which give an output of {output}; expected at "
            "least 1 each"
        )
    return geometry


def _problem(
    input: Tensor,
    activation: str,
    order: str,
    precision: str | None,
    output_dtype: torch.dtype | None,
    save: bool,
    conv: ConvTransposeGeometry | None,
    norm: NormGeometry | None,
) -> Problem:
    _check_choice(activation, order)
    device = input.device
    index = device.index or 0
    architecture, multiprocessors = (0, 0)
    if device.type == "cuda":
        architecture, multiprocessors = _device_properties(index)
    return Problem(
        device=device.type,
        device_index=index,
        architecture=architecture,
        multiprocessors=multiprocessors,
        dtype=input.dtype,
        output_dtype=output_dtype or input.dtype,
        precision=resolve_precision(input.dtype, device.type, precision),
        layout=layout_of(tuple(input.shape), input.stride()),
        aligned=input.data_ptr() % 16 == 0,
        batch=int(input.shape[0]),
        channels=int(input.shape[1]),
        spatial=tuple(input.shape[2:]),
        activation=activation,
        order="act_norm" if order == "act_norm" else "norm_act",
        conv=conv,
        norm=norm,
        save=save,
    )


def _signature(tensor: Tensor | None) -> object:
    if tensor is None:
        return None
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def conv_plan(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    output_padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    activation: str,
    order: str,
    num_groups: int,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    precision: str | None,
    output_dtype: torch.dtype | None,
    save: bool,
) -> Plan:
    """The plan of a call; arguments are validated when their combination is seen first."""
    if input.layout is not torch.strided:
        _check_input(input)
    if input.dtype is torch.float32:
        precision = resolve_precision(torch.float32, input.device.type, precision)
    key = (
        input.shape,
        input.stride(),
        input.dtype,
        input.device,
        input.data_ptr() & 15 == 0,
        _signature(weight),
        _signature(bias),
        stride,
        padding,
        output_padding,
        dilation,
        groups,
        activation,
        order,
        num_groups,
        _signature(norm_weight),
        _signature(norm_bias),
        eps,
        precision,
        output_dtype,
        save,
        forced_kernels(),
    )
    plan = cached(key)
    if plan is None or record.active:
        _check_input(input)
        conv = _conv_geometry(
            input, weight, bias, stride, padding, output_padding, dilation, groups
        )
        norm = None
        if num_groups:
            norm = _norm_geometry(
                input,
                conv.out_channels,
                num_groups,
                norm_weight,
                norm_bias,
                eps,
                ("norm_weight", "norm_bias"),
            )
        problem = _problem(input, activation, order, precision, output_dtype, save, conv, norm)
        plan = plan_for(problem, key)
        record.note(problem)
    return plan


def group_norm_plan(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str,
    order: str,
    output_dtype: torch.dtype | None,
    save: bool,
) -> Plan:
    """The plan of a GroupNorm call; arguments are validated when seen first."""
    if input.layout is not torch.strided:
        _check_input(input)
    key = (
        input.shape,
        input.stride(),
        input.dtype,
        input.device,
        input.data_ptr() & 15 == 0,
        num_groups,
        _signature(weight),
        _signature(bias),
        eps,
        activation,
        order,
        output_dtype,
        save,
        forced_kernels(),
    )
    plan = cached(key)
    if plan is None or record.active:
        _check_input(input)
        norm = _norm_geometry(
            input, int(input.shape[1]), num_groups, weight, bias, eps, ("weight", "bias")
        )
        problem = _problem(input, activation, order, None, output_dtype, save, None, norm)
        plan = plan_for(problem, key)
        record.note(problem)
    return plan


# ---- layouts that operators promise --------------------------------------------------------------


def _output_layout(input: Tensor) -> str:
    return "nhwc" if layout_of(tuple(input.shape), input.stride()) == "nhwc" else "nchw"


def _empty(input: Tensor, shape: Sequence[int], layout: str, dtype: torch.dtype) -> Tensor:
    axes = len(shape)
    if layout != "nhwc":
        return input.new_empty(shape, dtype=dtype)
    physical = [shape[0], *shape[2:], shape[1]]
    return input.new_empty(physical, dtype=dtype).permute(0, axes - 1, *range(1, axes - 1))


def _promised(
    input: Tensor,
    result: Tensor | None,
    like: Tensor | None,
    needed: bool,
    layout: str = "nchw",
) -> Tensor:
    """A gradient as an operator promises it: dense, of its tensor's dtype; empty if not needed."""
    if not needed or result is None or like is None:
        return input.new_empty((0,))
    return torch_reference.dense(result, layout).to(like.dtype)


def _statistics_dtype(input: Tensor) -> torch.dtype:
    return torch.float64 if input.dtype == torch.float64 else torch.float32


# ---- convolution ---------------------------------------------------------------------------------

_CONV = "fusedconv::conv_transpose_act_norm"
_CONV_ARGUMENTS = (
    "Tensor input, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] output_padding, "
    "int[] dilation, int groups, str activation, str order, int num_groups, Tensor? norm_weight, "
    "Tensor? norm_bias, float eps, str? precision, ScalarType? output_dtype"
)
torch.library.define(_CONV, f"({_CONV_ARGUMENTS}, bool save) -> (Tensor, Tensor, Tensor, Tensor)")
torch.library.define(
    f"{_CONV}_backward",
    "(Tensor grad, Tensor input, Tensor weight, Tensor conv_output, Tensor mean, Tensor rstd, "
    "Tensor? norm_weight, Tensor? norm_bias, int[] stride, int[] padding, int[] output_padding, "
    "int[] dilation, int groups, str activation, str order, int num_groups, str precision, "
    "bool[] needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@torch.library.impl(_CONV, ("cpu", "cuda"))
def _conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    activation: str,
    order: str,
    num_groups: int,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    precision: str | None,
    output_dtype: torch.dtype | None,
    save: bool,
) -> Saved:
    plan = conv_plan(
        input,
        weight,
        bias,
        tuple(stride),
        tuple(padding),
        tuple(output_padding),
        tuple(dilation),
        groups,
        activation,
        order,
        num_groups,
        norm_weight,
        norm_bias,
        eps,
        precision,
        output_dtype,
        save,
    )
    output, conv_output, mean, rstd = plan.run(input, weight, bias, norm_weight, norm_bias)
    output = torch_reference.dense(output, _output_layout(input))
    if conv_output is not None and output.data_ptr() == conv_output.data_ptr():
        output = output.clone()  # an operator's outputs must not share memory
    nothing = (0,)
    if conv_output is None:
        conv_output = input.new_empty(nothing)
    else:
        conv_output = torch_reference.dense(conv_output, _output_layout(input))
    statistics = _statistics_dtype(input)
    return (
        output,
        conv_output,
        input.new_empty(nothing, dtype=statistics) if mean is None else mean,
        input.new_empty(nothing, dtype=statistics) if rstd is None else rstd,
    )


def _fake_output_shape(
    input: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> list[int]:
    spatial = [
        (size - 1) * step - 2 * pad + dilated * (kernel - 1) + extra + 1
        for size, kernel, step, pad, extra, dilated in zip(
            input.shape[2:],
            weight.shape[2:],
            stride,
            padding,
            output_padding,
            dilation,
            strict=True,
        )
    ]
    return [input.shape[0], weight.shape[1] * groups, *spatial]


@torch.library.register_fake(_CONV)
def _conv_fake(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    activation: str,
    order: str,
    num_groups: int,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    precision: str | None,
    output_dtype: torch.dtype | None,
    save: bool,
) -> Saved:
    shape = _fake_output_shape(input, weight, stride, padding, output_padding, dilation, groups)
    layout = _output_layout(input)
    output = _empty(input, shape, layout, output_dtype or input.dtype)
    statistics = _statistics_dtype(input)
    normed = save and num_groups
    statistics_shape = [shape[0], num_groups] if normed else [0]
    conv_output = input.new_empty([0]) if not save else _empty(input, shape, layout, input.dtype)
    return (
        output,
        conv_output,
        input.new_empty(statistics_shape, dtype=statistics),
        input.new_empty(statistics_shape, dtype=statistics),
    )


def _activation_gradient(grad: Tensor, x: Tensor, activation: str) -> Tensor:
    aten = torch.ops.aten
    match activation:
        case "relu":
            result = aten.threshold_backward(grad, x, 0)
        case "gelu":
            result = aten.gelu_backward(grad, x)
        case "gelu_tanh":
            result = aten.gelu_backward(grad, x, approximate="tanh")
        case "silu":
            result = aten.silu_backward(grad, x)
        case _:
            result = grad
    return result


def _norm_gradients(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    num_groups: int,
    activation: str,
    order: str,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of activation and GroupNorm, in either order.

    ``x`` is the input of both, [N, C, *spatial]. Activation and normalised value are computed anew:
    by our kernels on CUDA where the gradient has the input's dtype, else with torch's operators.
    """
    if (
        x.is_cuda
        and cuda_program.HAS_CUDA
        and grad.dtype == x.dtype
        and x.dtype in DTYPE_CODES
        and x.numel()
        and _device_properties(x.device.index or 0)[0] >= 80
    ):
        layout = _output_layout(x)
        return cuda_program.group_norm_gradients(
            torch_reference.dense(grad, layout),
            torch_reference.dense(x, layout),
            mean,
            rstd,
            weight,
            bias,
            layout,
            num_groups,
            activation if order == "act_norm" else "identity",
            activation if order == "norm_act" else "identity",
            needs,
        )
    batch, channels = x.shape[:2]
    pixels = x.numel() // max(1, batch * channels)
    before = activation if order == "act_norm" else "identity"
    after = activation if order == "norm_act" else "identity"
    activated = torch_reference.activate(x, before).to(grad.dtype).contiguous()
    if after != "identity":
        shape = (batch, num_groups, -1)
        flat = activated.reshape(shape)
        normed = ((flat - mean.to(flat.dtype)[..., None]) * rstd.to(flat.dtype)[..., None]).reshape(
            x.shape
        )
        per_channel = (1, channels, *(1,) * (x.dim() - 2))
        if weight is not None:
            normed = normed * weight.to(normed.dtype).reshape(per_channel)
        if bias is not None:
            normed = normed + bias.to(normed.dtype).reshape(per_channel)
        grad = _activation_gradient(grad, normed, after)
    if weight is not None and weight.dtype not in (grad.dtype, torch.float32):
        # A mixture that torch's operator refuses: everything in float32.
        grad, activated, weight = grad.float(), activated.float(), weight.float()
    statistics = grad.dtype if weight is None else weight.dtype
    grad_x, grad_weight, grad_bias = torch.ops.aten.native_group_norm_backward(
        grad.contiguous(),
        activated,
        mean.to(statistics),
        rstd.to(statistics),
        weight,
        batch,
        channels,
        pixels,
        num_groups,
        list(needs),
    )
    if grad_x is not None and grad_x.numel():
        grad_x = _activation_gradient(grad_x.to(x.dtype), x, before)
    return grad_x, grad_weight, grad_bias


@torch.library.impl(f"{_CONV}_backward", ("cpu", "cuda"))
def _conv_backward(
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    conv_output: Tensor,
    mean: Tensor,
    rstd: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    activation: str,
    order: str,
    num_groups: int,
    precision: str,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    needs_input, needs_weight, needs_bias, needs_norm_weight, needs_norm_bias = needs
    grad_norm_weight = grad_norm_bias = None
    if num_groups:
        grad_conv, grad_norm_weight, grad_norm_bias = _norm_gradients(
            grad,
            conv_output,
            mean,
            rstd,
            norm_weight,
            norm_bias,
            num_groups,
            activation,
            order,
            (True, needs_norm_weight, needs_norm_bias),
        )
    else:
        grad_conv = _activation_gradient(grad.to(conv_output.dtype), conv_output, activation)
    grad_input = grad_weight = grad_bias = None
    if needs_input or needs_weight or needs_bias:
        with torch_reference.precision_scope(precision):
            grad_input, grad_weight, grad_bias = torch.ops.aten.convolution_backward(
                grad_conv,
                input,
                weight,
                [weight.shape[1] * groups],
                list(stride),
                list(padding),
                list(dilation),
                True,
                list(output_padding),
                groups,
                [needs_input, needs_weight, needs_bias],
            )

    bias_like = weight if needs_bias else None
    return (
        _promised(input, grad_input, input, needs_input, _output_layout(input)),
        _promised(input, grad_weight, weight, needs_weight),
        _promised(input, grad_bias, bias_like, needs_bias),
        _promised(input, grad_norm_weight, norm_weight, needs_norm_weight),
        _promised(input, grad_norm_bias, norm_bias, needs_norm_bias),
    )


@torch.library.register_fake(f"{_CONV}_backward")
def _conv_backward_fake(
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    conv_output: Tensor,
    mean: Tensor,
    rstd: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    activation: str,
    order: str,
    num_groups: int,
    precision: str,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    channels = weight.shape[1] * groups

    def promised(needed: bool, shape: Sequence[int], like: Tensor | None) -> Tensor:
        if not needed or like is None:
            return input.new_empty([0])
        return input.new_empty(shape, dtype=like.dtype)

    return (
        _empty(input, input.shape, _output_layout(input), input.dtype)
        if needs[0]
        else input.new_empty([0]),
        promised(needs[1], weight.shape, weight),
        promised(needs[2], [channels], weight),
        promised(needs[3], [channels], norm_weight),
        promised(needs[4], [channels], norm_bias),
    )


def _conv_setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    (
        input,
        weight,
        bias,
        stride,
        padding,
        output_padding,
        dilation,
        groups,
        activation,
        order,
        num_groups,
        norm_weight,
        norm_bias,
        _eps,
        precision,
        _output_dtype,
        save,
    ) = inputs
    _, conv_output, mean, rstd = output
    ctx.mark_non_differentiable(conv_output, mean, rstd)
    ctx.set_materialize_grads(False)
    ctx.saved = save
    ctx.save_for_backward(input, weight, conv_output, mean, rstd, norm_weight, norm_bias)
    ctx.arguments = (
        list(stride),
        list(padding),
        list(output_padding),
        list(dilation),
        groups,
        activation,
        order,
        num_groups,
        resolve_precision(input.dtype, input.device.type, precision),
    )
    ctx.has_bias = bias is not None


def _conv_gradients(ctx, grad, *_):  # type: ignore[no-untyped-def]
    if not ctx.saved:
        raise RuntimeError(
            f"{_CONV}: called with save=False, expected True where a gradient follows"
        )
    nothing: list[Tensor | None] = [None] * 17
    if grad is None:
        return tuple(nothing)
    input, weight, conv_output, mean, rstd, norm_weight, norm_bias = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    needs = [wanted[0], wanted[1], wanted[2], wanted[11], wanted[12]]
    gradients = torch.ops.fusedconv.conv_transpose_act_norm_backward(
        grad,
        input,
        weight,
        conv_output,
        mean,
        rstd,
        norm_weight,
        norm_bias,
        *ctx.arguments,
        needs,
    )
    for position, gradient, needed in zip((0, 1, 2, 11, 12), gradients, needs, strict=True):
        nothing[position] = gradient if needed else None
    return tuple(nothing)


torch.library.register_autograd(_CONV, _conv_gradients, setup_context=_conv_setup_context)


# ---- GroupNorm -----------------------------------------------------------------------------------

_NORM = "fusedconv::group_norm"
torch.library.define(
    _NORM,
    "(Tensor input, int num_groups, Tensor? weight, Tensor? bias, float eps, str activation, "
    "str order, ScalarType? output_dtype) -> (Tensor, Tensor, Tensor)",
)
torch.library.define(
    f"{_NORM}_backward",
    "(Tensor grad, Tensor input, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, "
    "int num_groups, str activation, str order, bool[] needs) -> (Tensor, Tensor, Tensor)",
)


@torch.library.impl(_NORM, ("cpu", "cuda"))
def _group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str,
    order: str,
    output_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    plan = group_norm_plan(
        input, num_groups, weight, bias, eps, activation, order, output_dtype, True
    )
    output, _, mean, rstd = plan.run(input, None, None, weight, bias)
    assert mean is not None and rstd is not None
    return torch_reference.dense(output, _output_layout(input)), mean, rstd


@torch.library.register_fake(_NORM)
def _group_norm_fake(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str,
    order: str,
    output_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    output = _empty(input, input.shape, _output_layout(input), output_dtype or input.dtype)
    statistics = _statistics_dtype(input)
    shape = [input.shape[0], num_groups]
    return (
        output,
        input.new_empty(shape, dtype=statistics),
        input.new_empty(shape, dtype=statistics),
    )


@torch.library.impl(f"{_NORM}_backward", ("cpu", "cuda"))
def _group_norm_backward(
    grad: Tensor,
    input: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    num_groups: int,
    activation: str,
    order: str,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    needs_input, needs_weight, needs_bias = needs
    gradients = _norm_gradients(
        grad,
        input,
        mean,
        rstd,
        weight,
        bias,
        num_groups,
        activation,
        order,
        (needs_input, needs_weight, needs_bias),
    )

    return (
        _promised(input, gradients[0], input, needs_input, _output_layout(input)),
        _promised(input, gradients[1], weight, needs_weight),
        _promised(input, gradients[2], bias, needs_bias),
    )


@torch.library.register_fake(f"{_NORM}_backward")
def _group_norm_backward_fake(
    grad: Tensor,
    input: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    num_groups: int,
    activation: str,
    order: str,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    def promised(like: Tensor | None, needed: bool) -> Tensor:
        if not needed or like is None:
            return input.new_empty([0])
        return like.new_empty(like.shape)

    grad_input = (
        _empty(input, input.shape, _output_layout(input), input.dtype)
        if needs[0]
        else input.new_empty([0])
    )
    return grad_input, promised(weight, needs[1]), promised(bias, needs[2])


def _group_norm_setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    input, num_groups, weight, bias, _eps, activation, order, _output_dtype = inputs
    _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(input, mean, rstd, weight, bias)
    ctx.arguments = (num_groups, activation, order)


def _group_norm_gradients(ctx, grad, *_):  # type: ignore[no-untyped-def]
    result: list[Tensor | None] = [None] * 8
    if grad is None:
        return tuple(result)
    input, mean, rstd, weight, bias = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    needs = [wanted[0], wanted[2], wanted[3]]
    gradients = torch.ops.fusedconv.group_norm_backward(
        grad, input, mean, rstd, weight, bias, *ctx.arguments, needs
    )
    for position, gradient, needed in zip((0, 2, 3), gradients, needs, strict=True):
        result[position] = gradient if needed else None
    return tuple(result)


torch.library.register_autograd(
    _NORM, _group_norm_gradients, setup_context=_group_norm_setup_context
)


# ---- second derivatives --------------------------------------------------------------------------


def _refuse_second_derivatives(name: str) -> None:
    def setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
        pass

    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        raise RuntimeError(f"{name}: got a second derivative, expected first ones only")

    torch.library.register_autograd(f"{name}_backward", backward, setup_context=setup_context)


_refuse_second_derivatives(_CONV)
_refuse_second_derivatives(_NORM)
