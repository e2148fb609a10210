"""Functional forms: ``conv_transpose_act_norm`` and ``group_norm``.

Every activation is one of "relu", "gelu" (exact, erf), "gelu_tanh", "silu" or None; ``order`` is
"act_norm" (activation, then GroupNorm, as in the three systems) or "norm_act" (GroupNorm, then
activation, as in most published models).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedconv import ops
from fusedconv.kernels import torch_reference

_PLAIN = (Tensor, torch.nn.Parameter)

try:
    _dispatch_modes = torch._C._len_torch_dispatch_stack
    _function_modes = torch._C._is_torch_function_mode_enabled
    _functorch_level = torch._C._functorch.peek_interpreter_stack
except AttributeError:  # private names may move; then every call goes through the dispatcher
    _dispatch_modes = None  # type: ignore[assignment]


def _goes_direct(input: Tensor, *others: Tensor | None) -> bool:
    """Whether no tracer, mode, transform or subclass wants to see the call."""
    if torch.compiler.is_compiling() or _dispatch_modes is None:
        return False
    if _dispatch_modes() or _function_modes() or _functorch_level() is not None:
        return False
    if type(input) not in _PLAIN or input.device.type not in ("cpu", "cuda"):
        return False
    return all(other is None or type(other) in _PLAIN for other in others)


def _any_requires_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _tuple(name: str, value: int | Sequence[int], axes: int) -> tuple[int, ...]:
    if isinstance(value, tuple):
        return value
    if isinstance(value, int):
        return (value,) * axes
    if isinstance(value, Sequence):
        return tuple(value)
    raise TypeError(f"{name}: got {value!r}, expected an integer or a sequence of them")


def _check_tensors(required: dict[str, object], optional: dict[str, object]) -> None:
    for name, tensor in required.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: got {type(tensor).__name__}, expected torch.Tensor")
    for name, tensor in optional.items():
        if tensor is not None and not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: got {type(tensor).__name__}, expected torch.Tensor or None")


def conv_transpose_act_norm(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
    *,
    activation: str | None = None,
    order: str = "act_norm",
    num_groups: int | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
    precision: str | None = None,
) -> Tensor:
    """Transposed convolution (+ bias), activation and GroupNorm.

    ``input`` is [N, C, *spatial] with one, two or three spatial axes, ``weight`` is
    [C, K / groups, *kernel_size], ``bias``, ``norm_weight`` and ``norm_bias`` are [K]; the first
    eight arguments mean what they mean in ``torch.nn.functional.conv_transpose2d``. The result is
    [N, K, *output spatial], channels last where the input is and dense channels first otherwise.

    ``num_groups`` None leaves the GroupNorm out, ``activation`` None the activation. ``precision``
    is "tf32" or "fp32" for float32 input; None follows torch's switches for convolutions.

    Raises ValueError or TypeError naming the argument, its value and what is expected.
    """
    _check_tensors(
        {"input": input, "weight": weight},
        {"bias": bias, "norm_weight": norm_weight, "norm_bias": norm_bias},
    )
    axes = weight.dim() - 2
    if num_groups is None and (norm_weight is not None or norm_bias is not None):
        raise ValueError("norm_weight, norm_bias: got tensors, expected None where num_groups is")
    if num_groups is not None and num_groups < 1:
        raise ValueError(f"num_groups: got {num_groups}, expected a positive integer or None")
    if input.dim() == axes + 1 and num_groups is None:
        batched = conv_transpose_act_norm(
            input.unsqueeze(0), weight, bias, stride, padding, output_padding, groups, dilation,
            activation=activation, precision=precision,
        )  # fmt: skip
        return batched.squeeze(0)

    geometry = (
        _tuple("stride", stride, axes),
        _tuple("padding", padding, axes),
        _tuple("output_padding", output_padding, axes),
        _tuple("dilation", dilation, axes),
    )
    output_dtype: torch.dtype | None = None
    device = input.device.type
    if torch.is_autocast_enabled(device) and input.dtype != torch.float64:
        # What autocast does to eager's operators: the convolution in the low precision and, on
        # CUDA, GroupNorm in float32.
        low = torch.get_autocast_dtype(device)
        input, weight = input.to(low), weight.to(low)
        bias = None if bias is None else bias.to(low)
        if device != "cuda":
            return _composite_under_autocast(
                input, weight, bias, *geometry, groups, activation, order, num_groups, norm_weight,
                norm_bias, eps,
            )  # fmt: skip
        output_dtype = torch.float32 if num_groups is not None else None

    arguments = (
        *geometry,
        groups,
        "identity" if activation is None else activation,
        order,
        num_groups or 0,
        norm_weight,
        norm_bias,
        eps,
        precision,
        output_dtype,
    )
    save = _any_requires_grad(input, weight, bias, norm_weight, norm_bias)
    if _goes_direct(input, weight, bias, norm_weight, norm_bias):
        plan = ops.conv_plan(input, weight, bias, *arguments, save)
        if precision is None and isinstance(plan, torch_reference.TorchPlan):
            # Plain torch, gradients included. An explicit precision must hold in the backward pass
            # too, which the operator sees to.
            return torch_reference.differentiable(
                plan.problem, input, weight, bias, norm_weight, norm_bias
            )
        if not save:
            return plan.run(input, weight, bias, norm_weight, norm_bias).output
    outputs = torch.ops.fusedconv.conv_transpose_act_norm(input, weight, bias, *arguments, save)
    result: Tensor = outputs[0]
    return result


def _composite_under_autocast(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    output_padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    activation: str | None,
    order: str,
    num_groups: int | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
) -> Tensor:
    """torch's operators, each cast as autocast on the processor casts it."""
    name = "identity" if activation is None else activation
    ops._check_choice(name, order)
    conv = ops._conv_geometry(
        input, weight, bias, stride, padding, output_padding, dilation, groups
    )
    x = torch_reference.conv_transpose(conv, input, weight, bias)
    if num_groups is None:
        return torch_reference.activate(x, name)
    if order == "act_norm":
        x = torch_reference.activate(x, name)
    x = torch.nn.functional.group_norm(x, num_groups, norm_weight, norm_bias, eps)
    return torch_reference.activate(x, name) if order == "norm_act" else x


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str | None = None,
    order: str = "act_norm",
) -> Tensor:
    """GroupNorm with an optional activation in front ("act_norm") or behind ("norm_act").

    ``input`` is [N, C, *spatial] with any number of spatial axes, none included; ``weight`` and
    ``bias`` are [C]. The result has the input's shape and dtype, channels last where the input is.

    y = (x - mean) / sqrt(variance + eps) * weight + bias, statistics per sample and group with the
    biased variance (Wu and He, 2018). Raises ValueError or TypeError naming the argument.
    """
    _check_tensors({"input": input}, {"weight": weight, "bias": bias})
    if num_groups < 1:
        raise ValueError(f"num_groups: got {num_groups}, expected a positive integer")
    output_dtype: torch.dtype | None = None
    if (
        torch.is_autocast_enabled("cuda")
        and input.device.type == "cuda"
        and input.dtype in (torch.float16, torch.bfloat16)
    ):
        output_dtype = torch.float32
    name = "identity" if activation is None else activation
    save = _any_requires_grad(input, weight, bias)
    if _goes_direct(input, weight, bias):
        plan = ops.group_norm_plan(
            input, num_groups, weight, bias, eps, name, order, output_dtype, save
        )
        if isinstance(plan, torch_reference.TorchPlan):
            return torch_reference.differentiable(plan.problem, input, None, None, weight, bias)
        if not save:
            return plan.run(input, None, None, weight, bias).output
    outputs = torch.ops.fusedconv.group_norm(
        input, num_groups, weight, bias, eps, name, order, output_dtype
    )
    result: Tensor = outputs[0]
    return result


__all__ = ["conv_transpose_act_norm", "group_norm"]
