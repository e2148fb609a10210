"""The modules that tests build: the three systems, small, and the general ones beside torch's."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TypeVar

import reference
import torch
from torch import nn

from fusedconv import ConvTransposeActNorm1d, ConvTransposeActNorm2d, ConvTransposeActNorm3d
from fusedconv.models import SYSTEMS

AnyModule = TypeVar("AnyModule", bound=nn.Module)

#: Arguments and an input's shape for each system: small enough for gradients in moments.
SMALL = {
    "system1": ((6, 16, 3, 1, 8, 4), (2, 6, 9, 7)),
    "system2": ((4, 8, 3, 2, False), (2, 4, 5, 4, 6)),
    "system3": ((12, 4), (3, 12, 9, 10)),
}


#: The general modules and an input's extents, by the number of spatial axes.
MODULES = {1: ConvTransposeActNorm1d, 2: ConvTransposeActNorm2d, 3: ConvTransposeActNorm3d}
SPATIAL = {1: (11,), 2: (6, 7), 3: (4, 3, 5)}


def seeded(make: Callable[..., AnyModule], *arguments: object, **keywords: object) -> AnyModule:
    """A module, built after torch's generator is set to the same seed."""
    torch.manual_seed(1)
    return make(*arguments, **keywords)


def perturbed(module: AnyModule) -> AnyModule:
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


def composition(
    module: nn.Module,
    x: torch.Tensor,
    dtype: torch.dtype,
    output_padding: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """torch's operators with a module's parameters, in ``dtype``."""
    conv, norm = module.conv_transpose, module.group_norm
    cast = {
        key: None if value is None else value.detach().to(dtype)
        for key, value in {
            "weight": conv.weight,
            "bias": conv.bias,
            "norm_weight": None if norm is None else norm.weight,
            "norm_bias": None if norm is None else norm.bias,
        }.items()
    }
    return reference.conv_transpose_act_norm(
        x.to(dtype),
        cast["weight"],
        cast["bias"],
        conv.stride,
        conv.padding,
        conv.output_padding if output_padding is None else output_padding,
        conv.groups,
        conv.dilation,
        activation=module.activation,
        order=module.order,
        num_groups=None if norm is None else norm.num_groups,
        norm_weight=cast["norm_weight"],
        norm_bias=cast["norm_bias"],
        eps=1e-5 if norm is None else norm.eps,
    )


def saved_and_loaded(scripted: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    """A module of TorchScript as a file gives it back."""
    file = io.BytesIO()
    torch.jit.save(scripted, file)
    file.seek(0)
    return torch.jit.load(file)
