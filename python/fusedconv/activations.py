"""Activations by name, in torch's operators: what they compute and how they differentiate.

A new one is a name here with its operator. Compiled kernels know those that have a struct in
cpp/include/fusedconv/activation.hpp; the functions call the others between kernels.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor
from torch.nn import functional as F

from fusedconv import _C
from fusedconv.arguments import choice

#: Those that calls of kernels have; "gelu" is the exact one, by erf; "identity" stands for none,
#: which callers write as None.
ACTIVATIONS = ("identity", "relu", "gelu", "gelu_tanh", "silu")


#: The others, which torch's operators compute behind calls of kernels or between them, with the
#: default of the parameter that they have, None where they have none.
UNFUSED: dict[str, float | None] = {
    "leaky_relu": 0.01,
    "elu": 1.0,
    "tanh": None,
    "sigmoid": None,
    "hardswish": None,
    "mish": None,
}

#: Those whose result says what their gradient needs to know: nobody has to keep what they read.
KEEP_RESULT = frozenset({"relu"})

#: Every name that functions and modules take beside None.
NAMES = (*ACTIVATIONS, *UNFUSED)

#: Those that compiled kernels compute.
COMPILED = {member.name: member for member in _C.Activation}

_WITH_PARAMETER = re.compile(r"(\w+)\(([^()]*)\)")


def parsed(activation: str | None) -> tuple[str, float | None]:
    """The name and the parameter of an argument ``activation``: "identity" for None; the parameter
    of "leaky_relu" and "elu", which may follow in brackets ("leaky_relu(0.2)"), or their default.
    Raises ValueError or TypeError."""
    if isinstance(activation, str) and (match := _WITH_PARAMETER.fullmatch(activation)):
        name, text = match.groups()
        if name in UNFUSED and UNFUSED[name] is not None:
            try:
                parameter = float(text)
            except ValueError:
                parameter = float("nan")
            if parameter - parameter != 0:
                raise ValueError(
                    f"activation: got {activation!r}, expected a finite number in the brackets"
                )
            return name, parameter
    name = choice("activation", activation, NAMES, optional=True) or "identity"
    return name, UNFUSED.get(name)


def activate(x: Tensor, activation: str | None, parameter: float = 0.0) -> Tensor:
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
    elif activation == "leaky_relu":
        return F.leaky_relu(x, parameter)
    elif activation == "elu":
        return F.elu(x, parameter)
    elif activation == "tanh":
        return torch.tanh(x)
    elif activation == "sigmoid":
        return torch.sigmoid(x)
    elif activation == "hardswish":
        return F.hardswish(x)
    elif activation == "mish":
        return F.mish(x)
    else:
        raise ValueError(f"activation: got {activation}, expected the name of one")


def activate_by(x: Tensor, activation: str, parameter: float | None) -> Tensor:
    """The same, a parameter of None being the default."""
    if parameter is None:
        parameter = UNFUSED.get(activation)
    return activate(x, activation, 0.0 if parameter is None else parameter)


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
