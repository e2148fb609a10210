"""``fusedconv::conv_transpose_act_norm``: the operator, its fake implementation and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedconv.errors import NoKernelError
from fusedconv.kernels.torch import TorchPlan
from fusedconv.layout import dense, empty, owning, result_layout_of
from fusedconv.norms import statistics_dtype
from fusedconv.ops.common import (
    DirectOperator,
    Kept,
    any_requires_grad,
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
from fusedconv.ops.planning import ConvCall, backward_plan, conv_plan, torch_backward_plan
from fusedconv.ops.saving import as_saved, lying
from fusedconv.plan import BackwardPlan, ForwardPlan
from fusedconv.precision import resolve_precision
from fusedconv.problem import epilogue, need_what_they_read
from fusedconv.recording import record
from fusedconv.reference import conv_transpose
from fusedconv.selection import run

Saved = tuple[Tensor, Tensor, Tensor, Tensor]

_NAME = "conv_transpose_act_norm"
_CONV = f"fusedconv::{_NAME}"
#: The fields of ConvCall but the last, which came later and has a default.
_ARGUMENTS = (
    "Tensor input, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] output_padding, "
    "int[] dilation, int groups, str activation, str order, int num_groups, Tensor? norm_weight, "
    "Tensor? norm_bias, float eps, str? precision, ScalarType? output_dtype, str? norm"
)
_RECOMPUTE = "bool recompute=False"
torch.library.define(
    _CONV, f"({_ARGUMENTS}, bool save, {_RECOMPUTE}) -> (Tensor, Tensor, Tensor, Tensor)"
)
torch.library.define(
    f"{_CONV}_backward",
    "(Tensor grad, Tensor conv_output, Tensor mean, Tensor rstd, bool[] output_mask, "
    f"{_ARGUMENTS}, {_RECOMPUTE}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)

#: The arguments that have gradients, in the order of ``output_mask``, and their places in a call.
_DIFFERENTIABLE = ("input", "weight", "bias", "norm_weight", "norm_bias")
#: What a problem calls them.
GRADIENTS = _DIFFERENTIABLE
_PLACES = tuple(ConvCall._fields.index(name) for name in _DIFFERENTIABLE)


def _call_and_save(arguments: Sequence[Any]) -> tuple[ConvCall, bool]:
    """Of the operator's arguments, from which the dispatcher leaves out a last one that has its
    default."""
    required = len(ConvCall._fields) - 1
    save, *recompute = arguments[required:]
    return ConvCall(*arguments[:required], *recompute), save


def operator_arguments(call: ConvCall, save: bool) -> tuple[Any, ...]:
    """A call as the operator takes it."""
    return (*call[:-1], save, call.recompute)


def _given(*tensors: Any) -> Any:
    """What a plan takes, of the tensors that have gradients."""
    return tensors


def _exact(call: ConvCall) -> ConvCall:
    """With tuples, which a plan's key takes, for the schema's lists."""
    return call._replace(
        stride=tuple(call.stride),
        padding=tuple(call.padding),
        output_padding=tuple(call.output_padding),
        dilation=tuple(call.dilation),
    )


def _forward(*arguments: Any) -> Saved:
    call, save = _call_and_save(arguments)
    plan = conv_plan(_exact(call), save)
    output, conv_output, mean, rstd = operator_outputs(call.input, run(plan, *call.tensors))
    return owning(output), conv_output, mean, rstd


torch.library.impl(_CONV, "default", _forward)


@torch.library.register_fake(_CONV)
def _forward_fake(*arguments: Any) -> Saved:
    call, save = _call_and_save(arguments)
    input = call.input
    conv, norm = call.geometries()
    shape = [input.shape[0], conv.out_channels, *conv.output_spatial(tuple(input.shape[2:]))]
    layout = result_layout_of(input)
    output = empty(input, shape, layout, call.output_dtype or input.dtype)
    statistics = statistics_dtype(input)
    groups = 0 if norm is None else norm.groups(conv.out_channels)
    stages = epilogue(False, call.activation, call.order, norm)
    save = save and need_what_they_read(stages, call.output_dtype is not None)
    statistics_shape = [shape[0], groups] if save and groups else [0]
    saves_conv = save and not call.recompute
    conv_output = empty(input, shape, layout, input.dtype) if saves_conv else input.new_empty([0])
    return (
        output,
        conv_output,
        input.new_empty(statistics_shape, dtype=statistics),
        input.new_empty(statistics_shape, dtype=statistics),
    )


def _backward(
    grad: Tensor,
    conv_output: Tensor,
    mean: Tensor,
    rstd: Tensor,
    output_mask: Sequence[bool],
    *arguments: Any,
) -> tuple[Tensor, ...]:
    call = ConvCall(*arguments)
    anew = recomputed(call)
    conv_output = conv_output if anew is None else anew
    plan = backward_plan(call, grad, conv_output, _DIFFERENTIABLE, output_mask)
    return _computed(plan, call, grad, (conv_output, mean, rstd), output_mask)


def recomputed(call: ConvCall) -> Tensor | None:
    """The convolution's output with its bias, where a call that saved has left it out."""
    if not call.recompute:
        return None
    alone = _exact(call.convolution())
    # Autocast around the backward pass says nothing of the forward pass.
    with torch.autocast(call.input.device.type, enabled=False):
        plan: ForwardPlan
        try:
            plan = conv_plan(alone, False)
        except NoKernelError:  # FUSEDCONV_KERNEL names one that serves more than a convolution
            plan = TorchPlan(alone.problem(False))
        output = run(plan, *alone.tensors).output
    return dense(output, result_layout_of(call.input))


def _computed(
    plan: BackwardPlan,
    call: ConvCall,
    grad: Tensor,
    saved: tuple[Tensor, Tensor, Tensor],
    output_mask: Sequence[bool],
) -> tuple[Tensor, ...]:
    gradients = computed_gradients(
        plan, _DIFFERENTIABLE, _DIFFERENTIABLE, _given, call.tensors, grad, saved, output_mask
    )
    return present(gradients, call.input)


torch.library.impl(f"{_CONV}_backward", "default", _backward)


@torch.library.register_fake(f"{_CONV}_backward")
def _backward_fake(
    grad: Tensor,
    conv_output: Tensor,
    mean: Tensor,
    rstd: Tensor,
    output_mask: Sequence[bool],
    *arguments: Any,
) -> tuple[Tensor, ...]:
    call = ConvCall(*arguments)
    input = call.input
    return tuple(
        empty(input, like.shape, gradient_layout(name, like), like.dtype)
        if needed and like is not None
        else input.new_empty([0])
        for name, like, needed in zip(_DIFFERENTIABLE, call.tensors, output_mask, strict=True)
    )


def in_torch(*arguments: Any) -> Saved:
    """The operator in torch's own, which differentiate in every way."""
    call, save = _call_and_save(arguments)
    device = call.input.device.type
    outputs = composed(_NAME, call.problem(save), device, call.precision, call.tensors)
    return operator_outputs(call.input, outputs)


def backward_in_torch(
    grad: Tensor,
    conv_output: Tensor,
    mean: Tensor,
    rstd: Tensor,
    output_mask: Sequence[bool],
    *arguments: Any,
) -> tuple[Tensor, ...]:
    """The gradients' operator in torch's own."""
    call = ConvCall(*arguments)
    if call.recompute:
        conv_output = conv_transpose(call.geometries()[0], call.input, call.weight, call.bias)
    plan = torch_backward_plan(call, grad, _DIFFERENTIABLE, output_mask)
    return _computed(plan, call, grad, (conv_output, mean, rstd), output_mask)


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    call, save = _call_and_save(inputs)
    result, conv_output, mean, rstd = output
    ctx.mark_non_differentiable(conv_output, mean, rstd)
    if save and call.reads_result:
        conv_output = result
    ctx.set_materialize_grads(False)
    ctx.saved = save
    saved = (*call.tensors, conv_output, mean, rstd)
    ctx.save_for_backward(*saved)
    ctx.lies = lying(saved)
    ctx.call = call.without_tensors()
    ctx.precision = resolve_precision(call.input.dtype, call.input.device.type, call.precision)
    ctx.recording = record.current()


def _gradients(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if not ctx.saved:
        raise RuntimeError(
            f"{_CONV}: called with save=False, expected True where a gradient follows"
        )
    result: list[Tensor | None] = [None] * (len(ConvCall._fields) + 1)
    if grad is None:
        return tuple(result)
    *leaves, conv_output, mean, rstd = as_saved(ctx.saved_tensors, ctx.lies)
    needs = [ctx.needs_input_grad[place] for place in _PLACES]

    def call(leaves: Sequence[Tensor | None]) -> Any:
        return ctx.call._replace(**dict(zip(_DIFFERENTIABLE, leaves, strict=True)))

    if differentiates_gradients(grad):
        gradients = gradients_by_composition(
            lambda *leaves: in_torch(*operator_arguments(call(leaves), False))[0],
            leaves,
            needs,
            grad,
        )
    else:
        values = call(leaves)._replace(precision=ctx.precision)
        with recorded_with(ctx.recording):
            gradients = torch.ops.fusedconv.conv_transpose_act_norm_backward(
                grad, conv_output, mean, rstd, needs, *values
            )
    for place, gradient, needed in zip(_PLACES, gradients, needs, strict=True):
        result[place] = gradient if needed else None
    return tuple(result)


# ---- what a trace holds --------------------------------------------------------------------------

torch.library.define(f"{_CONV}_traced", f"({_ARGUMENTS}, {_RECOMPUTE}) -> Tensor")


@torch.library.impl(f"{_CONV}_traced", "CompositeImplicitAutograd")
def _traced(*arguments: Any) -> Tensor:
    """The operator's output. Whether a backward pass can follow is asked at each call: a trace that
    held the answer as a constant would serve either training or inference."""
    call = ConvCall(*arguments)
    result: Tensor = torch.ops.fusedconv.conv_transpose_act_norm(
        *operator_arguments(call, any_requires_grad(arguments))
    )[0]
    return result


register_gradients(_NAME, _gradients, _setup_context, in_torch)


#: Of ``ConvCall``'s tensors.
OPERATOR = DirectOperator(
    _DIFFERENTIABLE,
    _DIFFERENTIABLE,
    _given,
    lambda call: in_torch(*operator_arguments(call, False))[0],
    lambda grad, conv_output, mean, rstd, needs, call: (
        torch.ops.fusedconv.conv_transpose_act_norm_backward(
            grad, conv_output, mean, rstd, needs, *call
        )
    ),
    recomputed,
)
direct, again = OPERATOR.functions()


def kept(plan: ForwardPlan, call: ConvCall) -> Kept:
    """What ``direct`` takes of a call beside its tensors. The backward pass computes in the
    precision that this call resolves to, whatever the switches say then."""
    precision = resolve_precision(call.input.dtype, call.input.device.type, call.precision)
    return Kept.of(plan, call.without_tensors()._replace(precision=precision))


register_batching(_NAME)
refuse_second_derivatives(f"{_NAME}_backward")
