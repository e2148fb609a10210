"""``fusedconv::group_norm``: the operator, its fake implementation and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedconv.layout import empty, result_layout_of
from fusedconv.norms import statistics_dtype
from fusedconv.ops.common import (
    DirectOperator,
    Kept,
    Tensors,
    composed,
    computed_gradients,
    differentiates_gradients,
    gradient_layout,
    gradients_by_composition,
    operator_outputs,
    present,
    recorded_with,
    refuse_second_derivatives,
    register_batching,
    register_gradients,
)
from fusedconv.ops.planning import (
    NormCall,
    backward_plan,
    group_norm_plan,
    torch_backward_plan,
)
from fusedconv.ops.saving import as_saved, lying
from fusedconv.plan import BackwardPlan, ForwardPlan
from fusedconv.recording import record
from fusedconv.selection import run

Outputs = tuple[Tensor, Tensor, Tensor]

_NAME = "group_norm"
_NORM = f"fusedconv::{_NAME}"
#: The fields of NormCall.
_ARGUMENTS = (
    "Tensor input, int num_groups, Tensor? weight, Tensor? bias, float eps, str activation, "
    "str order, ScalarType? output_dtype"
)
torch.library.define(_NORM, f"({_ARGUMENTS}) -> (Tensor, Tensor, Tensor)")
torch.library.define(
    f"{_NORM}_backward",
    f"(Tensor grad, Tensor mean, Tensor rstd, bool[] output_mask, {_ARGUMENTS})"
    " -> (Tensor, Tensor, Tensor)",
)

#: The arguments that have gradients, in the order of ``output_mask``, their places in a call, and
#: what a problem calls them.
_DIFFERENTIABLE = ("input", "weight", "bias")
_PLACES = tuple(NormCall._fields.index(name) for name in _DIFFERENTIABLE)
GRADIENTS = ("input", "norm_weight", "norm_bias")


def _given(input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensors:
    """What a plan takes, of the tensors that have gradients."""
    return input, None, None, weight, bias


def _forward(*arguments: Any) -> Outputs:
    call = NormCall(*arguments)
    plan = group_norm_plan(call, True)
    outputs = run(plan, call.input, None, None, call.weight, call.bias)
    output, _, mean, rstd = operator_outputs(call.input, outputs)
    return output, mean, rstd


torch.library.impl(_NORM, "default", _forward)


@torch.library.register_fake(_NORM)
def _forward_fake(*arguments: Any) -> Outputs:
    call = NormCall(*arguments)
    input = call.input
    call.geometry()
    output = empty(input, input.shape, result_layout_of(input), call.output_dtype or input.dtype)
    statistics = statistics_dtype(input)
    shape = [input.shape[0], call.num_groups]
    return (
        output,
        input.new_empty(shape, dtype=statistics),
        input.new_empty(shape, dtype=statistics),
    )


def _backward(
    grad: Tensor, mean: Tensor, rstd: Tensor, output_mask: Sequence[bool], *arguments: Any
) -> tuple[Tensor, ...]:
    call = NormCall(*arguments)
    plan = backward_plan(call, grad, None, GRADIENTS, output_mask)
    return _computed(plan, call, grad, (None, mean, rstd), output_mask)


def _computed(
    plan: BackwardPlan,
    call: NormCall,
    grad: Tensor,
    saved: tuple[None, Tensor, Tensor],
    output_mask: Sequence[bool],
) -> tuple[Tensor, ...]:
    gradients = computed_gradients(
        plan, _DIFFERENTIABLE, GRADIENTS, _given, call.tensors, grad, saved, output_mask
    )
    return present(gradients, call.input)


torch.library.impl(f"{_NORM}_backward", "default", _backward)


@torch.library.register_fake(f"{_NORM}_backward")
def _backward_fake(
    grad: Tensor, mean: Tensor, rstd: Tensor, output_mask: Sequence[bool], *arguments: Any
) -> tuple[Tensor, ...]:
    call = NormCall(*arguments)
    input = call.input
    return tuple(
        empty(input, like.shape, gradient_layout(gradient, like), like.dtype)
        if needed and like is not None
        else input.new_empty([0])
        for gradient, like, needed in zip(GRADIENTS, call.tensors, output_mask, strict=True)
    )


def in_torch(*arguments: Any) -> Outputs:
    """The operator in torch's own, which differentiate in every way."""
    call = NormCall(*arguments)
    tensors = (call.input, None, None, call.weight, call.bias)
    outputs = composed(_NAME, call.problem(True), call.input.device.type, None, tensors)
    output, _, mean, rstd = operator_outputs(call.input, outputs)
    return output, mean, rstd


def backward_in_torch(
    grad: Tensor, mean: Tensor, rstd: Tensor, output_mask: Sequence[bool], *arguments: Any
) -> tuple[Tensor, ...]:
    """The gradients' operator in torch's own."""
    call = NormCall(*arguments)
    plan = torch_backward_plan(call, grad, GRADIENTS, output_mask)
    return _computed(plan, call, grad, (None, mean, rstd), output_mask)


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    call = NormCall(*inputs)
    _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)
    saved = (call.input, call.weight, call.bias, mean, rstd)
    ctx.save_for_backward(*saved)
    ctx.lies = lying(saved)
    ctx.call = call.without_tensors()
    ctx.recording = record.current()


def _gradients(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    result: list[Tensor | None] = [None] * len(NormCall._fields)
    if grad is None:
        return tuple(result)
    *leaves, mean, rstd = as_saved(ctx.saved_tensors, ctx.lies)
    needs = [ctx.needs_input_grad[place] for place in _PLACES]

    def call(leaves: Sequence[Tensor | None]) -> Any:
        return ctx.call._replace(**dict(zip(_DIFFERENTIABLE, leaves, strict=True)))

    if differentiates_gradients(grad):
        gradients = gradients_by_composition(
            lambda *leaves: in_torch(*call(leaves))[0], leaves, needs, grad
        )
    else:
        with recorded_with(ctx.recording):
            gradients = torch.ops.fusedconv.group_norm_backward(
                grad, mean, rstd, needs, *call(leaves)
            )
    for place, gradient, needed in zip(_PLACES, gradients, needs, strict=True):
        result[place] = gradient if needed else None
    return tuple(result)


register_gradients(_NAME, _gradients, _setup_context, in_torch)
direct, again = DirectOperator(
    _DIFFERENTIABLE,
    GRADIENTS,
    _given,
    lambda call: in_torch(*call)[0],
    lambda grad, conv_output, mean, rstd, needs, call: torch.ops.fusedconv.group_norm_backward(
        grad, mean, rstd, needs, *call
    ),
    lambda call: None,
).functions()


def kept(plan: ForwardPlan, call: NormCall) -> Kept:
    """What ``direct`` takes of a call beside its tensors."""
    return Kept.of(plan, call.without_tensors())


register_batching(_NAME)
refuse_second_derivatives(f"{_NAME}_backward")
