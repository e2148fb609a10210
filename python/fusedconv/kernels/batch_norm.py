"""BatchNorm of inference as an affine map of channels, on processors and on CUDA."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedconv import _C
from fusedconv.kernels.compiled import address
from fusedconv.kernels.cuda import batch_norm as cuda
from fusedconv.kernels.cuda.conditions import HAS_CUDA
from fusedconv.precision import COMPILED_DTYPES


def folds(*tensors: Tensor | None) -> bool:
    """Whether ``fold`` serves running mean and variance, weight and bias: dense [channels] of one
    device, each pair of one dtype that is compiled."""
    given = [each for each in tensors if each is not None]
    first = given[0]
    pairs = [[each for each in pair if each is not None] for pair in (tensors[:2], tensors[2:])]
    return (
        (first.is_cpu or (HAS_CUDA and first.is_cuda))
        and first.dim() == 1
        and all(
            each.device == first.device and each.shape == first.shape and each.is_contiguous()
            for each in given
        )
        and all(each.dtype == pair[0].dtype for pair in pairs for each in pair)
        and all(each.dtype in COMPILED_DTYPES for each in given)
    )


def fold(
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Scale and shift [channels] in float32, of tensors that ``folds`` says yes to."""
    if not running_mean.is_cpu:
        return cuda.fold(running_mean, running_var, weight, bias, eps)
    channels = running_mean.numel()
    given = weight if weight is not None else bias
    scale = torch.empty(channels, dtype=torch.float32)
    shift = torch.empty(channels, dtype=torch.float32)
    _C.cpu.fold_batch_norm(
        channels,
        eps,
        COMPILED_DTYPES[running_mean.dtype],
        COMPILED_DTYPES[torch.float32 if given is None else given.dtype],
        running_mean.data_ptr(),
        running_var.data_ptr(),
        address(weight),
        address(bias),
        scale.data_ptr(),
        shift.data_ptr(),
    )
    return scale, shift


def fold_gradients(
    running_mean: Tensor,
    running_var: Tensor,
    grad_scale: Tensor | None,
    grad_shift: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of weight and bias in ``dtype``, as far as they are ``wanted``, from those of what
    ``fold`` returned: dense, float32, None for zeros."""
    if not running_mean.is_cpu:
        return cuda.fold_gradients(
            running_mean, running_var, grad_scale, grad_shift, eps, dtype, wanted
        )
    channels = running_mean.numel()
    found = [torch.empty(channels, dtype=dtype) if want else None for want in wanted]
    _C.cpu.fold_batch_norm_gradients(
        channels,
        eps,
        COMPILED_DTYPES[running_mean.dtype],
        COMPILED_DTYPES[dtype],
        running_mean.data_ptr(),
        running_var.data_ptr(),
        address(grad_scale),
        address(grad_shift),
        *map(address, found),
    )
    return found
