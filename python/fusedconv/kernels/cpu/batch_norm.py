"""BatchNorm of inference on processors: its tensors as an affine map of channels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedconv import _C
from fusedconv.kernels.compiled import address
from fusedconv.precision import COMPILED_DTYPES


def fold(
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """As ``kernels.batch_norm.fold``."""
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
    """As ``kernels.batch_norm.fold_gradients``."""
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
