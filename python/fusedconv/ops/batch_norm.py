"""``fold_batch_norm`` on CUDA as autograd follows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusedconv.kernels.cuda.batch_norm import fold, fold_gradients
from fusedconv.ops.common import differentiates_gradients, goes_direct, is_batched


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


class _Fold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mean: Tensor, variance: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        weight, bias, eps = given
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(mean, variance)
        ctx.eps = eps
        ctx.dtype = next(each.dtype for each in (weight, bias) if each is not None)
        return fold(mean, variance, weight, bias, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        mean, variance = ctx.saved_tensors
        scale, shift = grads
        wanted = ctx.needs_input_grad[2:4]
        given = [each for each in grads if each is not None]
        direct = given and goes_direct(mean, (mean, variance, *given))
        if direct and not any(differentiates_gradients(each) or is_batched(each) for each in given):
            scale, shift = (each if each is None else each.float().contiguous() for each in grads)
            found = fold_gradients(mean, variance, scale, shift, ctx.eps, ctx.dtype, wanted)
            return None, None, *found, None
        both = _in_torch(mean, variance, scale, shift, ctx.eps)
        found = [
            gradient.to(ctx.dtype) if gradient is not None and want else None
            for gradient, want in zip(both, wanted, strict=True)
        ]
        return None, None, *found, None


#: ``functional.fold_batch_norm`` of running mean and variance, weight, bias and eps that
#: ``kernels.cuda.batch_norm.folds`` says yes to, with gradients of weight and bias.
fold_with_gradients: Callable[..., tuple[Tensor, Tensor]] = _Fold.apply
