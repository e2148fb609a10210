"""BatchNorm of inference: folded into an affine map, alone or in one node of autograd with
the convolution in front of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedconv.kernels import batch_norm
from fusedconv.kernels.torch import FollowedPlan
from fusedconv.norms import folded_batch_norm
from fusedconv.ops.common import (
    Kept,
    any_requires_grad,
    differentiates_gradients,
    goes_direct,
    gradients_by_composition,
    is_batched,
    undispatched,
)
from fusedconv.ops.conv_transpose import OPERATOR
from fusedconv.ops.repeating import repeated
from fusedconv.ops.saving import as_saved, lying
from fusedconv.ops.seen import Seen
from fusedconv.plan import ForwardPlan
from fusedconv.selection import run


def _in_torch(
    mean: Tensor, variance: Tensor, scale: Tensor | None, shift: Tensor | None, eps: float
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of weight and bias by torch's operators, which have every derivative."""
    given = scale if scale is not None else shift
    if given is None:
        return None, None
    inner = torch.zeros_like(given) if scale is None else scale
    if shift is not None:
        inner = inner - mean.float() * shift
    return inner * torch.rsqrt(variance.float() + eps), shift


def _gradients_in_torch(
    mean: Tensor,
    variance: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """As ``batch_norm.fold_gradients``."""
    return [
        gradient.to(dtype) if gradient is not None and want else None
        for gradient, want in zip(_in_torch(mean, variance, scale, shift, eps), wanted, strict=True)
    ]


class _Fold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mean: Tensor, variance: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        weight, bias, eps = given
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(mean, variance)
        ctx.lies = lying((mean, variance))
        ctx.eps = eps
        ctx.dtype = next(each.dtype for each in (weight, bias) if each is not None)
        return batch_norm.fold(mean, variance, weight, bias, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        mean, variance = as_saved(ctx.saved_tensors, ctx.lies)
        wanted = ctx.needs_input_grad[2:4]
        scale, shift = grads
        given = [each for each in grads if each is not None]
        direct = given and goes_direct(mean, (mean, variance, *given))
        through: Callable[..., list[Tensor | None]] = _gradients_in_torch
        if direct and not any(differentiates_gradients(each) or is_batched(each) for each in given):
            scale, shift = (each if each is None else each.float().contiguous() for each in grads)
            through = batch_norm.fold_gradients
        found = through(mean, variance, scale, shift, ctx.eps, ctx.dtype, wanted)
        return None, None, *found, None


#: ``functional.fold_batch_norm`` of running mean and variance, weight, bias and eps that
#: ``kernels.batch_norm.folds`` says yes to, with gradients of weight and bias.
fold_with_gradients: Callable[..., tuple[Tensor, Tensor]] = _Fold.apply


# ---- behind a convolution ------------------------------------------------------------------------


def _folded_outputs(
    plan: ForwardPlan, eps: float, tensors: Sequence[Any], *, save: bool
) -> Sequence[Tensor | None]:
    """A plan's outputs and, where it saves, scale and shift; ``tensors`` as ``direct`` takes
    them."""
    input, weight, bias, norm_weight, norm_bias, mean, variance = tensors

    def computed() -> Sequence[Tensor | None]:
        folded = batch_norm.fold(mean, variance, norm_weight, norm_bias, eps)
        if save:
            return (*OPERATOR.outputs(plan, (input, weight, bias, *folded)), *folded)
        return (run(plan, input, weight, bias, *folded).output,)

    return repeated(plan, ("batch_norm", eps), tensors, computed)


def folds_directly(input: Tensor, tensors: Sequence[Tensor | None]) -> bool:
    """Whether ``direct`` serves a call's tensors: nobody else wants to see it, and running
    statistics that need no gradient are a kernel's to fold."""
    *_, norm_weight, norm_bias, mean, variance = tensors
    return (
        goes_direct(input, tensors)
        and not any_requires_grad((mean, variance))
        # There torch's operators are composed, which autograd follows into what is folded.
        and not (input.is_cpu and torch.is_autocast_enabled("cpu"))
        and batch_norm.folds(mean, variance, norm_weight, norm_bias)
    )


def _composed(template: Any, tensors: Sequence[Any]) -> Tensor:
    """The output by torch's operators."""
    input, weight, bias, norm_weight, norm_bias, mean, variance = tensors
    folded = folded_batch_norm(mean, variance, norm_weight, norm_bias, template.eps)
    return OPERATOR.in_torch(OPERATOR.call(template, (input, weight, bias, *folded)))


class DirectBatchNorm(torch.autograd.Function):
    """``conv_transpose.direct`` of norm weight and bias that are ``folded`` from four tensors."""

    @staticmethod
    def forward(
        ctx: Any, kept: Kept, folded: tuple[Tensor, Tensor] | None, *tensors: Any
    ) -> Tensor:
        if folded is None:
            *outputs, scale, shift = _folded_outputs(
                kept.plan, kept.template.eps, tensors, save=True
            )
        else:
            scale, shift = folded
            outputs = [*OPERATOR.outputs(kept.plan, (*tensors[:3], *folded))]
        # First gradients are of what is folded and take the statistics, second ones take all.
        of_convolution = (*tensors[:3], scale, shift)
        return OPERATOR.keep(ctx, kept, outputs, of_convolution, *tensors[3:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 9
        kept: Kept = ctx.kept
        saved, needs = ctx.saved_tensors, ctx.needs_input_grad[2:]
        if kept.lies is not None:
            saved = as_saved(saved, kept.lies)
        if differentiates_gradients(grad):
            return (None, None, *_composed_gradients(kept.template, saved, needs, grad))
        found: Sequence[Tensor | None]
        if kept.recording is None:
            key = ("batch_norm", needs, kept.template.eps)
            tensors = (grad, *saved)
            found = repeated(kept.plan, key, tensors, _gradients, kept, grad, saved, needs)
        else:
            found = _gradients(kept, grad, saved, needs)
        return (None, None, *found, None, None)


def _composed_gradients(
    template: Any, saved: Sequence[Any], needs: Sequence[bool], grad: Tensor
) -> list[Tensor | None]:
    """Gradients of ``direct``'s tensors that can be differentiated."""
    tensors = (*saved[:3], *saved[-4:])
    return gradients_by_composition(lambda *views: _composed(template, views), tensors, needs, grad)


def _gradients(
    kept: Kept, grad: Tensor, saved: Sequence[Any], needs: tuple[bool, ...]
) -> list[Tensor | None]:
    """First gradients of input, weight, bias, norm_weight and norm_bias."""
    norm_weight, norm_bias, mean, variance = saved[-4:]
    wanted = needs[3:5]
    # The weight's is a sum of both, the bias's is that of shift.
    of_shift = wanted[0] or wanted[1]
    found, direct = OPERATOR.gradients(kept, grad, saved, (*needs[:3], wanted[0], of_shift))
    if of_shift:
        dtype = (norm_bias if norm_weight is None else norm_weight).dtype
        through = batch_norm.fold_gradients if direct else _gradients_in_torch
        scale, shift = found[3:]
        found[3:] = through(mean, variance, scale, shift, kept.template.eps, dtype, wanted)
    return found


#: A call's ``Kept``, what is folded where that is known, and what ``folds_directly`` holds of:
#: input, weight, bias, norm_weight, norm_bias, running_mean and running_var.
direct: Callable[..., Tensor] = DirectBatchNorm.apply
#: The same for calls that are known again.
_direct_again = undispatched(DirectBatchNorm)


def followed(plan: FollowedPlan, eps: float, *tensors: Any) -> Tensor:
    """The output by torch's operators, which autograd follows to the weight and bias of the norm
    too; ``tensors`` as ``direct`` takes them."""
    input, weight, bias, norm_weight, norm_bias, mean, variance = tensors
    dtypes = {each.dtype for each in (norm_weight, norm_bias, mean, variance) if each is not None}
    if len(dtypes) == 1 and dtypes <= {input.dtype, torch.float32}:
        return plan.run_batch_norm(*tensors)
    # torch's BatchNorm refuses a mixture.
    folded = folded_batch_norm(mean, variance, norm_weight, norm_bias, eps)
    return plan.run(input, weight, bias, *folded).output


def again(known: Seen, tensors: Sequence[Any]) -> Tensor:
    """The output of a call that is known."""
    if isinstance(known.plan, FollowedPlan):
        return followed(known.plan, known.kept.template.eps, *tensors)
    if known.save:
        return _direct_again(known.kept, None, *tensors)
    output = _folded_outputs(known.plan, known.kept.template.eps, tensors, save=False)[0]
    assert output is not None
    return output
