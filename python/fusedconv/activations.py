"""Activations by name, in torch's operators: what they compute and how they differentiate.

A new one is a name here with its two operators, and a struct in
cpp/include/fusedconv/activation.hpp where compiled kernels are to know it. Until they do, torch's
operators compute it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from fusedconv import _C

#: "gelu" is the exact one, by erf; "identity" stands for none, which calls write as None.
ACTIVATIONS = ("identity", "relu", "gelu", "gelu_tanh", "silu")

#: Those with a parameter: torch's operator and the parameter's default. Stages of problems take
#: them; functions, modules and compiled kernels do not.
PARAMETRIC: dict[str, tuple[Callable[[Tensor, float], Tensor], float]] = {
    "leaky_relu": (F.leaky_relu, 0.01),
    "elu": (F.elu, 1.0),
}

#: Those that compiled kernels compute.
COMPILED = {member.name: member for member in _C.Activation}


def activate(x: Tensor, activation: str | None) -> Tensor:
    """torch's operator for an activation's name. TorchScript compiles it too."""
    if activation is None or activation == "identity":
        return x
    elif activation == "relu":
        return F.relu(x)
    elif activation == "gelu":
        return F.gelu(x)
    elif activation == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    elif activation == "silu":
        return F.silu(x)
    else:
        raise ValueError(f"activation: got {activation}, expected the name of one")


def activate_by(x: Tensor, activation: str, parameter: float | None) -> Tensor:
    """The same for those with a parameter too, None for its default."""
    if activation in PARAMETRIC:
        function, default = PARAMETRIC[activation]
        return function(x, default if parameter is None else parameter)
    return activate(x, activation)


def activation_gradient(grad: Tensor, x: Tensor, activation: str) -> Tensor:
    """``grad`` times the activation's slope at ``x``."""
    aten = torch.ops.aten
    match activation:
        case "relu":
            result = aten.threshold_backward(grad, x, 0)
        case "gelu":
            result = aten.gelu_backward(grad, x)
        case "gelu_tanh":
            result = aten.gelu_backward(grad, x, approximate="tanh")
        case "silu":
            result = aten.silu_backward(grad, x)
        case _:
            result = grad
    return result
