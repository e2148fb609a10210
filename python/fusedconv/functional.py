"""Functional forms: ``conv_transpose_act_norm`` and ``group_norm``.

Every activation is a name in ``fusedconv.activations.NAMES`` or None, "leaky_relu" and "elu" with
their parameter in brackets ("leaky_relu(0.2)") or its default. Kernels compute those in
``ACTIVATIONS``; the others are torch's operators behind the kernels or between them. ``order`` is
"act_norm" (activation, then GroupNorm, as in the three systems) or "norm_act" (the other way round,
as in most published models). Integers are what torch takes for integers (numpy's too, no bool); a
value per axis is an integer, or a sequence of one or of all.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from fusedconv import ops, validation
from fusedconv.activations import KEEP_RESULT, UNFUSED, activate, activate_by, parsed
from fusedconv.arguments import choice, finite, flag, integer, integers, shown, tensor
from fusedconv.kernels import batch_norm
from fusedconv.kernels.torch import FollowedPlan
from fusedconv.norms import KINDS, Norm, folded_batch_norm, normalized
from fusedconv.plan import ForwardPlan
from fusedconv.precision import PRECISIONS
from fusedconv.problem import ORDERS
from fusedconv.reference import conv_transpose
from fusedconv.selection import run

_is_tracing = torch.jit.is_tracing  # type: ignore[attr-defined]


def _under_autocast(device: str) -> bool:
    # torch refuses the question for devices that it has no autocast for, meta among them.
    return device in ("cpu", "cuda") and torch.is_autocast_enabled(device)


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
    norm: str | None = None,
    recompute: bool = False,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
) -> Tensor:
    """Transposed convolution (+ bias), activation and normalisation.

    ``input`` is [N, C, *spatial] with one, two or three spatial axes, ``weight`` is
    [C, K / groups, *kernel_size], ``bias``, ``norm_weight`` and ``norm_bias`` are [K]; the first
    eight arguments mean what they mean in ``torch.nn.functional.conv_transpose2d``. The result is
    [N, K, *output spatial], channels last where the input is and dense channels first otherwise.

    ``norm`` is "group" (GroupNorm of ``num_groups``), "instance" (statistics of each sample and
    channel), "layer" (of each sample and pixel over the channels, as LayerNorm2d of Segment
    Anything), "batch" (BatchNorm of inference: those of ``running_mean`` and ``running_var`` [K],
    which no other norm takes) or "affine" (none: times ``norm_weight`` plus ``norm_bias``, which
    ``fold_batch_norm`` makes of a BatchNorm's tensors). None is "group" where ``num_groups`` is
    given and leaves the normalisation out where it is not; ``activation`` None leaves the
    activation out.

    Without a normalisation the input may lack the batch, as torch's convolution allows; with one it
    may not, as a sample's channels would be taken for a batch. ``precision``
    is "tf32" or "fp32" for float32 input; None follows torch's switches for convolutions, and where
    autocast lowers the input it says nothing.

    ``recompute`` keeps no output of the convolution for the backward pass, which computes it once
    more instead: a training step then needs less memory by a tensor of the output's size, and takes
    longer by a convolution. Gradients are the same but for rounding. It says nothing where torch's
    operators are composed: under autocast on processors, and of an activation that no kernel has in
    front of a normalisation.

    Raises ValueError or TypeError naming the argument, its value and what is expected.
    """
    tensors: tuple[Tensor | None, ...] = (input, weight, bias, norm_weight, norm_bias)
    if running_mean is not None:
        tensors = (*tensors, running_mean, running_var)
    if has_torch_function(tensors):
        return handle_torch_function(
            conv_transpose_act_norm, tensors, input, weight, bias, stride, padding, output_padding,
            groups, dilation, activation=activation, order=order, num_groups=num_groups,
            norm_weight=norm_weight, norm_bias=norm_bias, eps=eps, precision=precision, norm=norm,
            recompute=recompute, running_mean=running_mean, running_var=running_var,
        )  # fmt: skip
    arguments = (
        stride, padding, output_padding, groups, dilation, activation, order, num_groups, eps,
        precision, norm, recompute,
    )  # fmt: skip
    seen = ops.recall(tensors, arguments)
    if seen is not None:
        if running_mean is not None:
            return ops.batch_norm.again(seen, tensors)
        if seen.save:
            return ops.conv_transpose.again(seen.kept, *tensors)
        return seen.plan.run(input, weight, bias, norm_weight, norm_bias).output
    tensor("input", input)
    tensor("weight", weight)
    tensor("bias", bias, optional=True)
    tensor("norm_weight", norm_weight, optional=True)
    tensor("norm_bias", norm_bias, optional=True)
    tensor("running_mean", running_mean, optional=True)
    tensor("running_var", running_var, optional=True)
    axes = weight.dim() - 2
    validation.check_axes(weight)
    name, parameter = parsed(activation)
    choice("order", order, ORDERS)
    choice("precision", precision, PRECISIONS, optional=True)
    eps = finite("eps", eps)
    groups = integer("groups", groups)
    recompute = flag("recompute", recompute)
    kind = choice("norm", norm, (*KINDS, "batch"), optional=True)
    if kind not in (None, "group"):
        if num_groups is not None:
            raise ValueError(f"num_groups: got {num_groups} for norm {kind!r}, expected None")
    elif num_groups is None:
        if kind is not None:
            raise ValueError("num_groups: got None for norm 'group', expected a positive integer")
        if norm_weight is not None or norm_bias is not None:
            raise ValueError(
                "norm_weight, norm_bias: got tensors, expected None as there is no norm"
            )
    else:
        num_groups = integer("num_groups", num_groups, optional=True)
        if num_groups < 1:
            raise ValueError(f"num_groups: got {num_groups}, expected a positive integer or None")
    geometry = (
        integers("stride", stride, axes, 1),
        integers("padding", padding, axes, 0),
        integers("output_padding", output_padding, axes, 0),
        integers("dilation", dilation, axes, 1),
    )
    for argument, each in (("running_mean", running_mean), ("running_var", running_var)):
        if (each is not None) != (kind == "batch"):
            expected = "a tensor" if each is None else "None"
            raise ValueError(
                f"{argument}: got {shown(each)} for norm {norm!r}, expected {expected}"
            )
    normalises = kind is not None or num_groups is not None
    if input.dim() == axes + 1 and not normalises:
        stride, padding, output_padding, dilation = geometry
        batched = conv_transpose_act_norm(
            input.unsqueeze(0), weight, bias, stride, padding, output_padding, groups, dilation,
            activation=activation, precision=precision, recompute=recompute,
        )  # fmt: skip
        return batched.squeeze(0)
    if running_mean is not None and running_var is not None:
        if not _is_tracing():  # which would hold the answers for constants
            channels = weight.shape[1] * groups
            validation.check_channels("running_mean", running_mean, input, channels)
            validation.check_channels("running_var", running_var, input, channels)
            validation.check_channels("norm_weight", norm_weight, input, channels)
            validation.check_channels("norm_bias", norm_bias, input, channels)
        if (name in UNFUSED and order == "act_norm") or not ops.batch_norm.folds_directly(
            input, tensors
        ):
            scale, shift = fold_batch_norm(running_mean, running_var, norm_weight, norm_bias, eps)
            return conv_transpose_act_norm(
                input, weight, bias, *geometry[:3], groups, geometry[3], activation=activation,
                order=order, norm_weight=scale, norm_bias=shift, eps=eps, precision=precision,
                norm="affine", recompute=recompute,
            )  # fmt: skip
    if name in UNFUSED:
        alone = functools.partial(
            conv_transpose_act_norm, input, weight, bias, *geometry[:3], groups, geometry[3],
            precision=precision,
        )  # fmt: skip
        if order == "norm_act" or not normalises:
            x = alone(
                num_groups=num_groups, norm_weight=norm_weight, norm_bias=norm_bias, eps=eps,
                norm=norm, recompute=recompute, running_mean=running_mean, running_var=running_var,
            )  # fmt: skip
            return activate_by(x, name, parameter)
        channels = weight.shape[1] * groups
        own = (norm_weight, norm_bias)
        if _is_tracing():  # which would hold the answers for constants
            has_weight, has_bias = norm_weight is not None, norm_bias is not None
            stage = Norm(kind or "group", num_groups or 0, eps, has_weight, has_bias, None)
        else:
            stage = validation.norm_geometry(
                input, channels, num_groups or 0, *own, eps, ("norm_weight", "norm_bias"),
                kind or "group",
            )  # fmt: skip
        x = activate_by(alone(), name, parameter)
        if stage.groups(1):  # of any number of channels, which torch.jit.trace has in a tensor
            return group_norm(x, stage.groups(channels), *own, eps)
        return normalized(stage, x, *own)

    output_dtype: torch.dtype | None = None
    device = input.device.type
    lowers = _under_autocast(device) and input.dtype != torch.float64
    if lowers:
        # What autocast does to eager's operators: the convolution in the low precision and, on
        # CUDA, GroupNorm and LayerNorm in float32.
        low = torch.get_autocast_dtype(device)
        input, weight = _lowered(input, low), _lowered(weight, low)
        bias = None if bias is None else _lowered(bias, low)
        widens = kind in ("group", "layer") or (kind is None and normalises)
        output_dtype = torch.float32 if widens else None
        if input.dtype != torch.float32 or device != "cuda":
            precision = None  # which speaks of float32 on CUDA

    own = (norm_weight, norm_bias)
    if running_mean is not None and running_var is not None:
        kind, own = "affine", batch_norm.fold(running_mean, running_var, *own, eps)
    call = ops.ConvCall(
        input,
        weight,
        bias,
        *geometry,
        groups,
        name,
        order,
        num_groups or 0,
        *own,
        eps,
        precision,
        output_dtype,
        None if kind == "group" else kind,
        recompute and (normalises or name not in ("identity", *KEEP_RESULT)),
    )
    if lowers and device != "cuda":
        return _composed_under_autocast(call)
    tensors = (input, weight, bias, *tensors[3:])
    save = ops.any_requires_grad(tensors)
    if running_mean is not None or ops.goes_direct(input, tensors):
        plan = ops.conv_plan(call, save)
        # An explicit precision must hold in the backward pass too, which the operator sees to.
        if save and precision is None and not call.recompute:
            in_torch = ops.followed(plan, call, ops.conv_transpose.GRADIENTS, tensors[:5])
            if in_torch is not None:
                plan, save = in_torch, False
        return _direct(call, plan, save, tensors, None if lowers else arguments)
    if torch.onnx.is_in_onnx_export():
        return ops.conv_transpose.in_torch(*ops.conv_transpose.operator_arguments(call, False))[0]
    result: Tensor
    if _is_tracing():
        result = torch.ops.fusedconv.conv_transpose_act_norm_traced(*call)
    else:
        arguments = ops.conv_transpose.operator_arguments(call, save)
        result = torch.ops.fusedconv.conv_transpose_act_norm(*arguments)[0]
    return result


def _direct(
    call: ops.ConvCall,
    plan: ForwardPlan,
    save: bool,
    tensors: tuple[Tensor | None, ...],
    arguments: tuple[object, ...] | None,
) -> Tensor:
    """A call by its plan, kept for ``ops.recall`` where it has ``arguments``. ``tensors`` are the
    caller's, with running statistics where norm weight and bias of ``call`` are folded."""
    is_folded = len(tensors) > len(call.tensors)
    kept = ops.conv_transpose.kept(plan, call) if save or is_folded else None
    if arguments is not None:
        ops.remember(tensors, arguments, plan, save, kept)
    if is_folded and isinstance(plan, FollowedPlan):
        return ops.batch_norm.followed(plan, call.eps, *tensors)
    if not save:
        return run(plan, *call.tensors).output
    if is_folded:
        return ops.batch_norm.direct(kept, call.tensors[3:], *tensors)
    return ops.conv_transpose.direct(kept, *tensors)


def _lowered(tensor: Tensor, low: torch.dtype) -> Tensor:
    """The tensor as autocast hands it to a convolution: integers and float64 stay what they are."""
    wide = tensor.dtype == torch.float64 or not tensor.dtype.is_floating_point
    return tensor if wide else tensor.to(low)


def _composed_under_autocast(call: ops.ConvCall) -> Tensor:
    """torch's operators, each cast as autocast on the processor casts it."""
    conv, norm = call.geometries()
    x = conv_transpose(conv, call.input, call.weight, call.bias)
    if norm is None or call.order == "act_norm":
        x = activate(x, call.activation)
    if norm is None:
        return x
    if norm.kind == "group":
        x = torch.nn.functional.group_norm(
            x, norm.num_groups, call.norm_weight, call.norm_bias, call.eps
        )
    else:
        x = normalized(norm, x, call.norm_weight, call.norm_bias)
    return activate(x, call.activation) if call.order == "norm_act" else x


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
    tensors = (input, weight, bias)
    if has_torch_function(tensors):
        return handle_torch_function(
            group_norm, tensors, input, num_groups, weight, bias, eps, activation=activation,
            order=order,
        )  # fmt: skip
    arguments = (num_groups, activation, order, eps)
    seen = ops.recall(tensors, arguments)
    if seen is not None:
        if seen.save:
            return ops.group_norm.again(seen.kept, *tensors)
        return seen.plan.run(input, None, None, weight, bias).output
    tensor("input", input)
    tensor("weight", weight, optional=True)
    tensor("bias", bias, optional=True)
    name, parameter = parsed(activation)
    choice("order", order, ORDERS)
    eps = finite("eps", eps)
    num_groups = integer("num_groups", num_groups)
    if num_groups < 1:
        raise ValueError(f"num_groups: got {num_groups}, expected a positive integer")
    if name in UNFUSED:
        if order == "act_norm":
            return group_norm(activate_by(input, name, parameter), num_groups, weight, bias, eps)
        return activate_by(group_norm(input, num_groups, weight, bias, eps), name, parameter)
    output_dtype = torch.float32 if _widens(input) else None
    call = ops.NormCall(input, num_groups, weight, bias, eps, name, order, output_dtype)
    if ops.goes_direct(input, tensors):
        save = ops.any_requires_grad(tensors)
        plan = ops.group_norm_plan(call, save)
        in_torch = ops.followed(plan, call, ops.group_norm.GRADIENTS, tensors) if save else None
        if in_torch is not None:
            plan, save = in_torch, False
        kept = ops.group_norm.kept(plan, call) if save else None
        if output_dtype is None:
            ops.remember(tensors, arguments, plan, save, kept)
        if save:
            return ops.group_norm.direct(kept, *tensors)
        return run(plan, input, None, None, weight, bias).output
    if torch.onnx.is_in_onnx_export():
        return ops.group_norm.in_torch(*call)[0]
    result: Tensor = torch.ops.fusedconv.group_norm(*call)[0]
    return result


def fold_batch_norm(
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """The weight and bias [K] of the "affine" map that a BatchNorm of inference is, from its
    tensors [K]; in float32, or in float64 where all of them are. Autograd follows it to weight and
    bias. Behind a convolution ``conv_transpose_act_norm`` of norm "batch" does it within its call.

    y = (x - running_mean) / sqrt(running_var + eps) * weight + bias (Ioffe and Szegedy, 2015).
    Raises ValueError or TypeError naming the argument, its value and what is expected.
    """
    tensors = (running_mean, running_var, weight, bias)
    if has_torch_function(tensors):
        return handle_torch_function(
            fold_batch_norm, tensors, running_mean, running_var, weight, bias, eps
        )
    tensor("running_mean", running_mean)
    tensor("running_var", running_var)
    tensor("weight", weight, optional=True)
    tensor("bias", bias, optional=True)
    names = ("running_mean", "running_var", "weight", "bias")
    for name, each in zip(names, tensors, strict=True):
        if each is not None:
            validation.check_statistics(name, each, running_mean, has_shape=not _is_tracing())
    eps = finite("eps", eps)
    statistics = (running_mean, running_var)
    if (
        ops.goes_direct(running_mean, tensors)
        and not ops.any_requires_grad(statistics)
        and batch_norm.folds(*tensors)
    ):
        if ops.any_requires_grad((weight, bias)):
            return ops.fold_with_gradients(*tensors, eps)
        return batch_norm.fold(*tensors, eps)
    return folded_batch_norm(*tensors, eps)


def _widens(input: Tensor) -> bool:
    """Whether autocast lets GroupNorm return float32 for an input of 16 bits."""
    return (
        input.is_cuda
        and torch.is_autocast_enabled("cuda")
        and input.dtype in (torch.float16, torch.bfloat16)
    )


__all__ = ["conv_transpose_act_norm", "fold_batch_norm", "group_norm"]
