"""The three systems, small, with parameters that hide no mistake: for the tests of modules."""

from __future__ import annotations

import torch
from torch import nn

from fusedconv.models import SYSTEMS

#: Arguments and an input's shape for each system: small enough for gradients in moments.
SMALL = {
    "system1": ((6, 16, 3, 1, 8, 4), (2, 6, 9, 7)),
    "system2": ((4, 8, 3, 2, False), (2, 4, 5, 4, 6)),
    "system3": ((12, 4), (3, 12, 9, 10)),
}


def perturbed(module: nn.Module) -> nn.Module:
    """GroupNorm's ones and zeros hide mistakes: give every parameter values of its own."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return module


def pair(name: str) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """A system's drop-in and original of the same parameters, and an input."""
    system, (arguments, shape) = SYSTEMS[name], SMALL[name]
    original = perturbed(system.original(*arguments))
    model = system.model(*arguments)
    model.load_state_dict(original.state_dict())
    return model, original, torch.rand(shape)
