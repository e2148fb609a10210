"""What a GPU does with a BatchNorm of inference, done by a processor, so that the node of autograd
that serves it there is tested here."""

from __future__ import annotations

import pytest
import torch

from fusedconv.kernels.cuda import batch_norm
from fusedconv.norms import folded_batch_norm
from fusedconv.ops.batch_norm import _gradients_in_torch


def fold_here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the functions of ``kernels.cuda.batch_norm`` as they are called from now on."""
    called: list[str] = []

    def fold(*arguments):
        called.append("fold")
        with torch.no_grad():
            return folded_batch_norm(*arguments)

    def fold_gradients(mean, variance, scale, shift, eps, dtype, wanted):
        called.append("fold_gradients")
        for each in (scale, shift):
            assert each is None or (each.dtype == torch.float32 and each.is_contiguous())
        return _gradients_in_torch(mean, variance, scale, shift, eps, dtype, wanted)

    monkeypatch.setattr(batch_norm, "folds", lambda *tensors: True)
    monkeypatch.setattr(batch_norm, "fold", fold)
    monkeypatch.setattr(batch_norm, "fold_gradients", fold_gradients)
    return called
