"""``fusedconv::group_norm``: the operator, its fake implementation and gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedconv.gradients import norm_gradients
from fusedconv.kernels.torch_reference import output_layout, statistics_dtype
from fusedconv.ops.common import (
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
from fusedconv.ops.planning import group_norm_geometry, group_norm_plan, problem_of
from fusedconv.plan import run

_NAME = "group_norm"
_NORM = f"fusedconv::{_NAME}"
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


@torch.library.impl(_NORM, "default")
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
    output, _, mean, rstd = operator_outputs(input, run(plan, input, None, None, weight, bias))
    return output, mean, rstd


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
    group_norm_geometry(input, num_groups, weight, bias, eps, activation, order)
    output = empty(input, input.shape, output_layout(input), output_dtype or input.dtype)
    statistics = statistics_dtype(input)
    shape = [input.shape[0], num_groups]
    return (
        output,
        input.new_empty(shape, dtype=statistics),
        input.new_empty(shape, dtype=statistics),
    )


@torch.library.impl(f"{_NORM}_backward", "default")
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
    gradients = norm_gradients(
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
        promised(input, gradients[0], input, needs_input, output_layout(input)),
        promised(input, gradients[1], weight, needs_weight),
        promised(input, gradients[2], bias, needs_bias),
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
        empty(input, input.shape, output_layout(input), input.dtype)
        if needs[0]
        else input.new_empty([0])
    )
    return grad_input, promised(weight, needs[1]), promised(bias, needs[2])


def _group_norm_composed(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str,
    order: str,
    output_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The operator in torch's own, which differentiate in every way."""
    norm = group_norm_geometry(input, num_groups, weight, bias, eps, activation, order)
    problem = problem_of(
        input, activation, order, None, output_dtype, True, None, norm, aligned=True
    )
    outputs = composed(_NAME, problem, None, (input, None, None, weight, bias))
    output, _, mean, rstd = operator_outputs(input, outputs)
    return output, mean, rstd


def _group_norm_setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    input, num_groups, weight, bias, eps, activation, order, output_dtype = inputs
    _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(input, mean, rstd, weight, bias)
    ctx.arguments = (num_groups, activation, order)
    ctx.numerics = (eps, output_dtype)


def _group_norm_gradients(ctx, grad, *_):  # type: ignore[no-untyped-def]
    result: list[Tensor | None] = [None] * 8
    if grad is None:
        return tuple(result)
    input, mean, rstd, weight, bias = ctx.saved_tensors
    positions = (0, 2, 3)
    needs = [ctx.needs_input_grad[position] for position in positions]
    if differentiates_gradients(grad):

        def output(input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
            num_groups, activation, order = ctx.arguments
            eps, dtype = ctx.numerics
            return _group_norm_composed(
                input, num_groups, weight, bias, eps, activation, order, dtype
            )[0]

        gradients = gradients_by_composition(output, (input, weight, bias), needs, grad)
    else:
        gradients = torch.ops.fusedconv.group_norm_backward(
            grad, input, mean, rstd, weight, bias, *ctx.arguments, needs
        )
    for position, gradient, needed in zip(positions, gradients, needs, strict=True):
        result[position] = gradient if needed else None
    return tuple(result)


register_gradients(_NAME, _group_norm_gradients, _group_norm_setup_context, _group_norm_composed)
register_batching(_NAME)
refuse_second_derivatives(f"{_NAME}_backward")
