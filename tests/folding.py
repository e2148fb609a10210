"""Who folds a BatchNorm of inference."""

from __future__ import annotations

import functools

import pytest
import torch

from fusedconv.kernels import batch_norm


def watch_folding(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the functions of ``kernels.batch_norm`` as they are called from now on."""
    called: list[str] = []

    def watched(function):
        @functools.wraps(function)
        def call(mean, variance, *others):
            called.append(function.__name__)
            for each in others[:2]:
                if function.__name__ == "fold_gradients" and each is not None:
                    assert each.dtype == torch.float32
                    assert each.is_contiguous()
            return function(mean, variance, *others)

        return call

    for function in (batch_norm.fold, batch_norm.fold_gradients):
        monkeypatch.setattr(batch_norm, function.__name__, watched(function))
    return called
