"""What the tests hold results against: torch's operators, composed, and bounds on errors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fusedconv import testing

#: What an argument ``activation`` may be, and torch's operator for it.
ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}
ORDERS = ("act_norm", "norm_act")
CONVOLUTIONS = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}

#: Added to 1.1 times torch's own error: a rounding or less of the dtype, for results that torch has
#: exact or nearly so.
FLOOR = {
    torch.float64: 1e-14,
    torch.float32: 4e-8,
    torch.float16: 1e-5,
    torch.bfloat16: 1e-4,
}
#: The same for gradients of small problems: terms cancel in the sums over a group, so that what two
#: correct ways round differently shows in every element of the group.
GRADIENT_FLOOR = {
    torch.float64: 1e-14,
    torch.float32: 4e-7,
    torch.float16: 1e-4,
    torch.bfloat16: 1e-3,
}

#: For tests of what makes torch import modules of its own that use torch.jit, which it deprecates:
#: inductor and forward-mode derivatives. The second is inductor's of torch 2.6.
TORCH_SCRIPTS = pytest.mark.filterwarnings(
    "ignore:`torch.jit", "ignore:Skipping serialization of skipfiles"
)


def double(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.double()


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: str | None = None,
    order: str = "act_norm",
) -> Tensor:
    """The composition of torch's operators that fusedconv.functional.group_norm stands for."""
    act = ACTIVATIONS[activation]
    if order == "act_norm":
        return F.group_norm(act(x), num_groups, weight, bias, eps)
    return act(F.group_norm(x, num_groups, weight, bias, eps))


def normalised(
    norm: str,
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    num_groups: int | None = None,
) -> Tensor:
    """The normalisation that a value of the functions' argument ``norm`` stands for."""
    if norm == "group":
        return F.group_norm(x, num_groups, weight, bias, eps)
    if norm == "instance":
        return F.instance_norm(x, None, None, weight, bias, eps=eps)
    last = x.movedim(1, -1)
    if norm == "layer":
        last = F.layer_norm(last, last.shape[-1:], weight, bias, eps)
    else:
        last = last * weight + bias
    return last.movedim(-1, 1)


def conv_transpose_act_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *conv_arguments: object,
    activation: str | None = None,
    order: str = "act_norm",
    num_groups: int | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
    norm: str | None = None,
    **conv_keywords: object,
) -> Tensor:
    """The composition that fusedconv.functional.conv_transpose_act_norm stands for."""
    conv = CONVOLUTIONS[weight.dim() - 2]
    x = conv(x, weight, bias, *conv_arguments, **conv_keywords)
    act = ACTIVATIONS[activation]
    if num_groups is None and norm is None:
        return act(x)
    given = (norm_weight, norm_bias, eps, num_groups)
    if order == "act_norm":
        return normalised(norm or "group", act(x), *given)
    return act(normalised(norm or "group", x, *given))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The norm of the difference relative to the expected norm, in fp64; shapes must be equal."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    return testing.relative_error(actual, expected)


def cotangent(output: Tensor) -> Tensor:
    """A gradient for an output that is not constant: constant ones hide mistakes of GroupNorm's."""
    values = torch.linspace(-1, 2, output.numel(), dtype=torch.float64, device=output.device)
    return values.reshape(output.shape).to(output.dtype)


def assert_as_accurate_as_torch(
    actual: Tensor, torchs: Tensor, exact: Tensor, floor: float | None = None
) -> None:
    """Error against ``exact`` (fp64) at most 1.1 times torch's own in the same dtype, plus a floor.

    Also: shape and dtype are torch's, and no value is NaN where the exact one is not.
    """
    assert actual.shape == torchs.shape
    assert actual.dtype == torchs.dtype
    error, torch_error = relative_error(actual, exact), relative_error(torchs, exact)
    limit = 1.1 * torch_error + (FLOOR[actual.dtype] if floor is None else floor)
    assert error <= limit, f"error {error:.3g}, torch's {torch_error:.3g}, limit {limit:.3g}"


def channels_last(x: Tensor) -> Tensor:
    """The same values with channels innermost, for any number of spatial axes."""
    if x.dim() < 3:
        return x
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def is_channels_last(x: Tensor) -> bool:
    return x.movedim(1, -1).is_contiguous()


def strided(x: Tensor) -> Tensor:
    """The same values in memory that is neither dense layout: every other element along axis -1."""
    wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan)
    view = wide[..., ::2]
    view.copy_(x)
    return view


def memory_at(x: Tensor, remainder: int) -> Tensor:
    """The same values, contiguous, at an address that is ``remainder`` bytes past 16 of them."""
    memory = torch.full((x.numel() + 16,), torch.nan, dtype=x.dtype)
    start = next(i for i in range(16) if memory[i:].data_ptr() % 16 == remainder)
    view = memory[start : start + x.numel()].view(x.shape)
    view.copy_(x)
    return view


def misaligned(x: Tensor) -> Tensor:
    """The same values, contiguous, at an address that is no multiple of 16 bytes."""
    return memory_at(x, x.element_size())


#: Functions that put an input's values into memory of each layout.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "nchw": lambda x: x,
    "nhwc": channels_last,
    "strided": strided,
}
