"""``fusedconv::conv_transpose_act_norm``: the operator, its fake implementation and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedconv.gradients import activation_gradient, norm_gradients
from fusedconv.kernels import torch_reference
from fusedconv.kernels.torch_reference import output_layout, statistics_dtype
from fusedconv.ops.common import (
    any_requires_grad,
    composed,
    differentiates_gradients,
    empty,
    gradients_by_composition,
    operator_outputs,
    promised,
    refuse_second_derivatives,
    register_batching,
    register_gradients,
)
from fusedconv.ops.planning import conv_geometries, conv_plan, problem_of
from fusedconv.plan import run
from fusedconv.problem import resolve_precision

Saved = tuple[Tensor, Tensor, Tensor, Tensor]

_NAME = "conv_transpose_act_norm"
_CONV = f"fusedconv::{_NAME}"
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


@torch.library.impl(_CONV, "default")
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
    return operator_outputs(input, run(plan, input, weight, bias, norm_weight, norm_bias))


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
    conv, _ = conv_geometries(
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
        eps,
        precision,
    )
    shape = [input.shape[0], conv.out_channels, *conv.output_spatial(tuple(input.shape[2:]))]
    layout = output_layout(input)
    output = empty(input, shape, layout, output_dtype or input.dtype)
    statistics = statistics_dtype(input)
    normed = save and num_groups
    statistics_shape = [shape[0], num_groups] if normed else [0]
    conv_output = input.new_empty([0]) if not save else empty(input, shape, layout, input.dtype)
    return (
        output,
        conv_output,
        input.new_empty(statistics_shape, dtype=statistics),
        input.new_empty(statistics_shape, dtype=statistics),
    )


@torch.library.impl(f"{_CONV}_backward", "default")
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
        grad_conv, grad_norm_weight, grad_norm_bias = norm_gradients(
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
        grad_conv = activation_gradient(grad.to(conv_output.dtype), conv_output, activation)
    assert grad_conv is not None
    grad_input = grad_weight = grad_bias = None
    # Of what is not rounded yet the sum is taken here.
    sums = needs_bias and grad_conv.dtype != conv_output.dtype
    if sums:
        grad_bias = grad_conv.sum((0, *range(2, grad_conv.dim())))
    asked = [needs_input, needs_weight, needs_bias and not sums]
    if any(asked):
        with torch_reference.precision_scope(precision):
            grad_input, grad_weight, bias_sum = torch.ops.aten.convolution_backward(
                grad_conv.to(conv_output.dtype),
                input,
                weight,
                [weight.shape[1] * groups],
                list(stride),
                list(padding),
                list(dilation),
                True,
                list(output_padding),
                groups,
                asked,
            )
        grad_bias = grad_bias if sums else bias_sum

    return (
        promised(input, grad_input, input, needs_input, output_layout(input)),
        promised(input, grad_weight, weight, needs_weight),
        promised(input, grad_bias, weight, needs_bias),
        promised(input, grad_norm_weight, norm_weight, needs_norm_weight),
        promised(input, grad_norm_bias, norm_bias, needs_norm_bias),
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
        empty(input, input.shape, output_layout(input), input.dtype)
        if needs[0]
        else input.new_empty([0]),
        promised(needs[1], weight.shape, weight),
        promised(needs[2], [channels], weight),
        promised(needs[3], [channels], norm_weight),
        promised(needs[4], [channels], norm_bias),
    )


def _conv_composed(
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
    """The operator in torch's own, which differentiate in every way."""
    conv, norm = conv_geometries(
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
        eps,
        precision,
    )
    problem = problem_of(
        input, activation, order, precision, output_dtype, save, conv, norm, aligned=True
    )
    tensors = (input, weight, bias, norm_weight, norm_bias)
    return operator_outputs(input, composed(_NAME, problem, precision, tensors))


def _conv_setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    input, weight, bias, *geometry = inputs[:8]
    activation, order, num_groups, norm_weight, norm_bias, eps, precision, dtype, save = inputs[8:]
    _, conv_output, mean, rstd = output
    ctx.mark_non_differentiable(conv_output, mean, rstd)
    ctx.set_materialize_grads(False)
    ctx.saved = save
    # The bias serves second derivatives alone.
    ctx.save_for_backward(input, weight, bias, conv_output, mean, rstd, norm_weight, norm_bias)
    ctx.geometry = geometry
    ctx.stages = (activation, order, num_groups)
    ctx.numerics = (eps, precision, dtype)
    ctx.precision = resolve_precision(input.dtype, input.device.type, precision)


def _conv_gradients(ctx, grad, *_):  # type: ignore[no-untyped-def]
    if not ctx.saved:
        raise RuntimeError(
            f"{_CONV}: called with save=False, expected True where a gradient follows"
        )
    result: list[Tensor | None] = [None] * 17
    if grad is None:
        return tuple(result)
    input, weight, bias, conv_output, mean, rstd, norm_weight, norm_bias = ctx.saved_tensors
    positions = (0, 1, 2, 11, 12)
    needs = [ctx.needs_input_grad[position] for position in positions]
    if differentiates_gradients(grad):
        leaves = (input, weight, bias, norm_weight, norm_bias)

        def output(
            input: Tensor,
            weight: Tensor,
            bias: Tensor | None,
            norm_weight: Tensor | None,
            norm_bias: Tensor | None,
        ) -> Tensor:
            conv = (input, weight, bias, *ctx.geometry)
            arguments = (*conv, *ctx.stages, norm_weight, norm_bias, *ctx.numerics, False)
            return _conv_composed(*arguments)[0]

        gradients = gradients_by_composition(output, leaves, needs, grad)
    else:
        gradients = torch.ops.fusedconv.conv_transpose_act_norm_backward(
            grad,
            input,
            weight,
            conv_output,
            mean,
            rstd,
            norm_weight,
            norm_bias,
            *ctx.geometry,
            *ctx.stages,
            ctx.precision,
            needs,
        )
    for position, gradient, needed in zip(positions, gradients, needs, strict=True):
        result[position] = gradient if needed else None
    return tuple(result)


# ---- what a trace holds --------------------------------------------------------------------------

torch.library.define(f"{_CONV}_traced", f"({_CONV_ARGUMENTS}) -> Tensor")


@torch.library.impl(f"{_CONV}_traced", "CompositeImplicitAutograd")
def _conv_traced(*arguments: Any) -> Tensor:
    """The operator's output. Whether a backward pass can follow is asked at each call: a trace that
    held the answer as a constant would serve either training or inference."""
    result: Tensor = torch.ops.fusedconv.conv_transpose_act_norm(
        *arguments, any_requires_grad(arguments)
    )[0]
    return result


register_gradients(_NAME, _conv_gradients, _conv_setup_context, _conv_composed)
register_batching(_NAME)
refuse_second_derivatives(f"{_NAME}_backward")
