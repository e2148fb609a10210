"""BatchNorm of inference on CUDA: its tensors as an affine map of channels, in one launch."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from fusedconv import _C
from fusedconv.device import device_record
from fusedconv.kernels.cuda.program import allocator, run_program
from fusedconv.precision import COMPILED_DTYPES

# Slots of the program's pointers.
MEAN, VARIANCE, WEIGHT, BIAS, SCALE, SHIFT = range(6)


@functools.lru_cache(maxsize=1024)
def _program(
    index: int,
    channels: int,
    eps: float,
    statistics: torch.dtype,
    affine: torch.dtype,
    weight: bool,
    bias: bool,
) -> _C.Program:
    program = _C.Program(index, 1, 0)
    absent = _C.Operand()
    program.before(
        _C.batch_norm.Fold(
            channels=channels,
            eps=eps,
            statistics_dtype=COMPILED_DTYPES[statistics],
            affine_dtype=COMPILED_DTYPES[affine],
            mean=program.tensor(MEAN, 0),
            variance=program.tensor(VARIANCE, 0),
            weight=program.tensor(WEIGHT, 0) if weight else absent,
            bias=program.tensor(BIAS, 0) if bias else absent,
            scale=program.tensor(SCALE, 0),
            shift=program.tensor(SHIFT, 0),
        )
    )
    return program


def fold(
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """As ``kernels.batch_norm.fold``."""
    device = device_record(running_mean.device)
    channels = running_mean.numel()
    given = weight if weight is not None else bias
    program = _program(
        device.index,
        channels,
        eps,
        running_mean.dtype,
        torch.float32 if given is None else given.dtype,
        weight is not None,
        bias is not None,
    )
    empty = allocator(running_mean.device)
    scale = empty((channels,), (1,), torch.float32)
    shift = empty((channels,), (1,), torch.float32)
    run_program(
        program, running_mean.device, (running_mean, running_var, weight, bias, scale, shift)
    )
    return scale, shift


# Slots of the gradients' program: the statistics' are as above.
GRAD_SCALE, GRAD_SHIFT, GRAD_WEIGHT, GRAD_BIAS = range(2, 6)


@functools.lru_cache(maxsize=1024)
def _gradients_program(
    index: int, channels: int, eps: float, statistics: torch.dtype, affine: torch.dtype
) -> _C.Program:
    program = _C.Program(index, 1, 0)
    program.before(
        _C.batch_norm.GradientsOfFold(
            channels=channels,
            eps=eps,
            statistics_dtype=COMPILED_DTYPES[statistics],
            affine_dtype=COMPILED_DTYPES[affine],
            mean=program.tensor(MEAN, 0),
            variance=program.tensor(VARIANCE, 0),
            grad_scale=program.tensor(GRAD_SCALE, 0),
            grad_shift=program.tensor(GRAD_SHIFT, 0),
            grad_weight=program.tensor(GRAD_WEIGHT, 0),
            grad_bias=program.tensor(GRAD_BIAS, 0),
        )
    )
    return program


def fold_gradients(
    running_mean: Tensor,
    running_var: Tensor,
    grad_scale: Tensor | None,
    grad_shift: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """As ``kernels.batch_norm.fold_gradients``."""
    device = device_record(running_mean.device)
    channels = running_mean.numel()
    program = _gradients_program(device.index, channels, eps, running_mean.dtype, dtype)
    empty = allocator(running_mean.device)
    found = [empty((channels,), (1,), dtype) if want else None for want in wanted]
    run_program(
        program, running_mean.device, (running_mean, running_var, grad_scale, grad_shift, *found)
    )
    return found
