"""What stands behind a convolution or a GroupNorm in a chain that one call of ours computes.

A chain is a head and its stages: activations by name, and normalisations. Modules give stages of
tensors (``examined``), graphs stages of nodes; what may follow what is the same for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusedconv.composing import departure, is_replaced, watch
from fusedconv.conversion.classes import converted_type, original_type
from fusedconv.problem import ORDERS

#: Types by their number of spatial axes.
CONVOLUTIONS: dict[type[nn.Module], int] = {
    nn.ConvTranspose1d: 1,
    nn.ConvTranspose2d: 2,
    nn.ConvTranspose3d: 3,
}
_INSTANCE_NORMS: dict[type[nn.Module], int] = {
    nn.InstanceNorm1d: 1,
    nn.InstanceNorm2d: 2,
    nn.InstanceNorm3d: 3,
}
_BATCH_NORMS: dict[type[nn.Module], int] = {
    nn.BatchNorm1d: 1,
    nn.BatchNorm2d: 2,
    nn.BatchNorm3d: 3,
}
_ACTIVATIONS: tuple[type[nn.Module], ...] = (nn.ReLU, nn.GELU, nn.SiLU)
#: What returns its input, the dropouts where they drop nothing.
_TRANSPARENT: tuple[type[nn.Module], ...] = (
    nn.Identity,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
)

watch(nn.Sequential, *_ACTIVATIONS, *_TRANSPARENT, *_INSTANCE_NORMS, *_BATCH_NORMS)


class Normalization(NamedTuple):
    """A stage: ``kind`` is a key of ``fusedconv.norms.KINDS``. ``weight``, ``bias``,
    ``running_mean`` and ``running_var`` are tensors or a graph's nodes; the last two are a
    BatchNorm's, of kind "affine", and None where weight and bias are folded with them."""

    kind: str
    weight: Any
    bias: Any
    eps: float
    num_groups: int | None = None
    running_mean: Any = None
    running_var: Any = None

    @property
    def title(self) -> str:
        return "batch_norm" if self.kind == "affine" else f"{self.kind}_norm"


#: An activation's name, or a normalisation.
Stage = str | Normalization


def follows(stages: Sequence[Stage], stage: Stage) -> bool:
    """Whether one call computes ``stages`` and ``stage`` behind them: one of each sort."""
    return all(isinstance(each, str) != isinstance(stage, str) for each in stages)


def joins(stages: Sequence[Stage], behind: Sequence[Stage]) -> bool:
    """The same of several stages behind."""
    return all(follows([*stages, *behind[:count]], stage) for count, stage in enumerate(behind))


def activation_and_order(stages: Sequence[Stage]) -> tuple[str | None, str]:
    """The functions' arguments that say which activation there is, and where."""
    activation = None
    for stage in stages:  # torch.compile follows this, and that of torch 2.6 no next(..., None)
        if isinstance(stage, str):
            activation = stage
    act_norm, norm_act = ORDERS
    behind = len(stages) == 2 and isinstance(stages[1], str)
    return activation, norm_act if behind else act_norm


def norm_of(stages: Sequence[Stage]) -> Normalization | None:
    for stage in stages:
        if isinstance(stage, Normalization):
            return stage
    return None


def described(*parts: Stage) -> str:
    """A chain as reports and logs show it."""
    return " -> ".join(part if isinstance(part, str) else part.title for part in parts)


# ---- modules -------------------------------------------------------------------------------------


def reason_against(module: nn.Module) -> str | None:
    """Why a call of ``module`` may do more than its class, one that ``watch`` has seen; None where
    it does not."""
    kind = converted_type(module)
    original = original_type(module)
    if kind is None:
        return departure(type(module).__name__, module, original)
    if is_replaced(original):
        return f"torch.nn.{original.__name__}.forward has been replaced"
    return departure(original.__name__, module, kind)


def is_transparent(module: nn.Module) -> bool:
    """Whether a call of ``module`` returns its input and does nothing else."""
    if type(module) not in _TRANSPARENT or reason_against(module) is not None:
        return False
    return isinstance(module, nn.Identity) or not module.training or getattr(module, "p", 1) == 0


def activation_of(module: nn.Module) -> str | None:
    """The name of the activation that ``module`` is, where the functions have it."""
    kind = type(module)
    if kind is nn.ReLU:
        return "relu"
    if kind is nn.SiLU:
        return "silu"
    if isinstance(module, nn.GELU) and kind is nn.GELU:
        return "gelu_tanh" if module.approximate == "tanh" else "gelu"
    return None


def is_stage(module: nn.Module) -> bool:
    """Whether ``module`` is of a class that may be a stage, as ``examined`` finds."""
    kind = original_type(module)
    norms = (nn.GroupNorm, *_INSTANCE_NORMS, *_BATCH_NORMS)
    return kind in norms or activation_of(module) is not None


def group_norm_stage(norm: Any) -> Normalization:
    """The stage of a torch.nn.GroupNorm."""
    return Normalization("group", norm.weight, norm.bias, norm.eps, norm.num_groups)


def examined(module: Any, channels: int, axes: int) -> tuple[Stage | None, str | None]:
    """The stage that ``module`` is for a tensor of ``channels`` and ``axes`` spatial axes, 0 where
    only GroupNorm is asked for; or None and why it is none. ``is_stage`` holds for ``module``."""
    activation = activation_of(module)
    reason = reason_against(module)
    if reason is not None:
        return None, reason
    if activation is not None:
        return activation, None
    kind = original_type(module)
    own = module.num_channels if kind is nn.GroupNorm else module.num_features
    if own != channels:
        return None, f"{kind.__name__} has {own} channels, expected {channels}"
    if kind is nn.GroupNorm:
        return group_norm_stage(module), None
    if _INSTANCE_NORMS.get(kind, _BATCH_NORMS.get(kind)) != axes:
        return None, f"{kind.__name__} is not for {axes} spatial axes"
    if kind in _INSTANCE_NORMS:
        if module.running_mean is not None:
            return None, f"{kind.__name__} has running statistics"
        return Normalization("instance", module.weight, module.bias, module.eps), None
    if module.training:
        return None, f"{kind.__name__} is in training mode, and fused in evaluation mode only"
    if module.running_mean is None:
        return None, f"{kind.__name__} has no running statistics"
    running = (module.running_mean, module.running_var)
    return Normalization("affine", module.weight, module.bias, module.eps, None, *running), None


# ---- what the functions serve --------------------------------------------------------------------


def conv_keywords(stages: Sequence[Stage]) -> dict[str, Any]:
    """The keywords of ``functional.conv_transpose_act_norm`` for stages of tensors or of a graph's
    nodes."""
    activation, order = activation_and_order(stages)
    keywords: dict[str, Any] = {"activation": activation, "order": order}
    norm = norm_of(stages)
    if norm is not None:
        keywords.update(
            norm=norm.kind if norm.running_mean is None else "batch",
            num_groups=norm.num_groups,
            norm_weight=norm.weight,
            norm_bias=norm.bias,
            eps=norm.eps,
            running_mean=norm.running_mean,
            running_var=norm.running_var,
        )
    return keywords


#: Of tensors that the functions take.
SERVED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def takes(input: object) -> bool:
    """Whether the functions serve a module's input by its type: any other, a tracer's proxy too,
    is the original's to serve or to refuse."""
    return (
        isinstance(input, Tensor) and input.dtype in SERVED_DTYPES and input.layout == torch.strided
    )
