"""Every problem in torch's own operators: what kernels are held against, and what is left."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from fusedconv.activations import activate, activate_by, activation_gradient
from fusedconv.layout import dense
from fusedconv.norms import (
    KINDS,
    Norm,
    affine,
    group_norm_with_statistics,
    normalized,
    scaled,
    statistics_dtype,
)
from fusedconv.plan import BackwardTensors, Gradients, Outputs
from fusedconv.precision import conv_fp32_precision
from fusedconv.problem import (
    Activation,
    ActNormAct,
    BackwardProblem,
    Bias,
    ConvTransposeGeometry,
    ForwardProblem,
    Residual,
    act_norm_act,
)

_CONV = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def conv_transpose(
    conv: ConvTransposeGeometry, input: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """torch's transposed convolution of one, two or three spatial axes."""
    result: Tensor = _CONV[len(conv.kernel_size)](
        input,
        weight,
        bias,
        conv.stride,
        conv.padding,
        conv.output_padding,
        conv.groups,
        conv.dilation,
    )
    return result


class precision_scope:
    """torch's switch for fp32 convolutions on CUDA set to "tf32" or "fp32" for the scope, where the
    input is there."""

    # Not a generator's: calls of small tensors enter one each.
    __slots__ = ("_asked", "_restore")

    def __init__(self, precision: str, input: Tensor) -> None:
        asks = input.is_cuda and precision in ("tf32", "fp32")
        #: None where there is nothing to change.
        self._asked = precision if asks and conv_fp32_precision() != precision else None

    def __enter__(self) -> None:
        if self._asked is None:
            return
        allows = self._asked == "tf32"
        cudnn = torch.backends.cudnn
        setter = getattr(torch._C, "_set_fp32_precision_setter", None)
        if setter is None:
            self._restore = functools.partial(setattr, cudnn, "allow_tf32", cudnn.allow_tf32)
            cudnn.allow_tf32 = allows
        else:
            before = torch._C._get_fp32_precision_getter("cuda", "conv")
            self._restore = functools.partial(setter, "cuda", "conv", before)
            setter("cuda", "conv", "tf32" if allows else "ieee")

    def __exit__(self, *exception: object) -> None:
        if self._asked is not None:
            self._restore()


# ---- forward -------------------------------------------------------------------------------------


def compose(
    problem: ForwardProblem,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    residual: Tensor | None = None,
    statistics: tuple[Tensor, Tensor] | None = None,
) -> Outputs:
    """The problem in torch's operators, which autograd and torch.func follow by themselves.
    ``statistics`` are the running mean and variance of a BatchNorm, whose weight and bias are then
    given, where the problem has the affine map that it is."""
    x = input
    conv_output = None
    if problem.conv is not None:
        assert weight is not None
        # Autocast around the operator lowers torch's convolution.
        x = conv_output = conv_transpose(problem.conv, x, weight, bias).to(problem.dtype)
    output, mean, rstd = _epilogue(problem, x, norm_weight, norm_bias, residual, statistics)
    return Outputs(
        dense(output, problem.output_layout),
        conv_output if problem.saves_conv_output else None,
        mean,
        rstd,
    )


def _epilogue(
    problem: ForwardProblem,
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    residual: Tensor | None,
    statistics: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The stages behind the convolution with its bias; mean and rstd where they are saved."""
    mean = rstd = None
    for stage in problem.epilogue:
        match stage:
            case Bias():
                pass  # the convolution's
            case Residual():
                if residual is None:
                    raise ValueError(f"residual: got None, expected a tensor of {tuple(x.shape)}")
                x = x + residual
            case Activation():
                x = activate_by(x, stage.name, stage.parameter)
            case Norm() if statistics is not None:
                running_mean, running_var = statistics
                x = F.batch_norm(
                    x, running_mean, running_var, norm_weight, norm_bias, eps=stage.eps
                )
            case Norm():
                x = x.to(problem.output_dtype)
                if x.device.type == "cpu" and torch.is_grad_enabled():
                    # torch's gradient for channels last on processors writes the input's gradient
                    # even where none is asked for, through a null pointer.
                    x = x.contiguous()
                if problem.save and stage.groups(problem.output_channels):
                    x, mean, rstd = group_norm_with_statistics(stage, x, norm_weight, norm_bias)
                else:
                    x = normalized(stage, x, norm_weight, norm_bias)
    return x.to(problem.output_dtype), mean, rstd


# ---- backward ------------------------------------------------------------------------------------


def epilogue_gradients(problem: BackwardProblem, tensors: BackwardTensors) -> Gradients:
    """Gradients of the part "epilogue", in float32 where the tensors have 16 bits: a slope taken at
    rounded values would be off by the rounding."""
    form = act_norm_act(problem.forward.epilogue, frozenset(KINDS))
    if not isinstance(form, ActNormAct):
        return _epilogue_gradients_by_autograd(problem, tensors)
    wanted = problem.gradients
    norm_weight = norm_bias = None
    grad: Tensor | None
    if form.norm is None:
        x = tensors.of_epilogue
        grad = activation_gradient(tensors.grad_output.to(x.dtype), x, form.before)
    else:
        needs = (
            bool(wanted & {"conv_output", "input"}),
            "norm_weight" in wanted,
            "norm_bias" in wanted,
        )
        if problem.forward.norm_groups:
            channels = problem.forward.output_channels
            grad, norm_weight, norm_bias = _norm_gradients(form, channels, tensors, needs)
        else:
            grad, norm_weight, norm_bias = _ungrouped_gradients(form, tensors, needs)
    return Gradients.of_epilogue(problem, grad, norm_weight, norm_bias)


def _norm_gradients(
    form: ActNormAct, channels: int, tensors: BackwardTensors, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    norm = form.norm
    assert norm is not None and tensors.mean is not None and tensors.rstd is not None
    x = tensors.of_epilogue
    wide = statistics_dtype(x)
    batch = x.shape[0]
    groups = norm.groups(channels)
    pixels = x.numel() // max(1, batch * channels)
    grad, x = tensors.grad_output.to(wide), x.to(wide)
    mean, rstd = tensors.mean.to(wide), tensors.rstd.to(wide)
    weight, bias = affine(x, tensors.norm_weight, tensors.norm_bias)
    # torch's operator takes the weight for contiguous, whatever its stride.
    weight = None if weight is None else weight.to(wide).contiguous()
    # Contiguous: torch's kernel for channels last on processors writes the input's gradient even
    # where none is asked for, through a null pointer.
    activated = activate(x, form.before).contiguous()
    if form.after != "identity":
        flat = activated.reshape(batch, groups, channels // groups * pixels)
        normed = ((flat - mean[..., None]) * rstd[..., None]).reshape(x.shape)
        per_channel = (1, channels, *(1,) * (x.dim() - 2))
        if weight is not None:
            normed = normed * weight.reshape(per_channel)
        if bias is not None:
            normed = normed + bias.to(wide).reshape(per_channel)
        grad = activation_gradient(grad, normed, form.after)
    grad_x, grad_weight, grad_bias = torch.ops.aten.native_group_norm_backward(
        grad.contiguous(),
        activated,
        mean,
        rstd,
        weight,
        batch,
        channels,
        pixels,
        groups,
        list(needs),
    )
    if grad_x is not None and grad_x.numel():
        grad_x = activation_gradient(grad_x, x, form.before)
    return grad_x, grad_weight, grad_bias


def _ungrouped_gradients(
    form: ActNormAct, tensors: BackwardTensors, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The same of a normalisation over channels or an affine map, with channels last."""
    norm = form.norm
    assert norm is not None
    x = tensors.of_epilogue
    wide = statistics_dtype(x)
    x = x.to(wide).movedim(1, -1)
    grad = tensors.grad_output.to(wide).movedim(1, -1)
    activated = activate(x, form.before).contiguous()
    channels = list(x.shape[-1:])
    weight, bias = affine(x, tensors.norm_weight, tensors.norm_bias)
    weight = None if weight is None else weight.to(wide).contiguous()
    bias = None if bias is None else bias.to(wide).contiguous()
    layer = norm.kind == "layer"
    if layer:
        normed, mean, rstd = torch.ops.aten.native_layer_norm(
            activated, channels, weight, bias, norm.eps
        )
    else:
        normed = scaled(activated, weight, bias)
    grad = activation_gradient(grad, normed, form.after).contiguous()
    if layer:
        grad_x, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(
            grad, activated, channels, mean, rstd, weight, bias, list(needs)
        )
    else:
        pixels = list(range(x.dim() - 1))
        grad_x = scaled(grad, weight, None) if needs[0] else None
        grad_weight = (grad * activated).sum(pixels) if needs[1] else None
        grad_bias = grad.sum(pixels) if needs[2] else None
    if grad_x is not None and needs[0]:
        grad_x = activation_gradient(grad_x, x, form.before).movedim(-1, 1)
    return grad_x, grad_weight, grad_bias


def _epilogue_gradients_by_autograd(
    problem: BackwardProblem, tensors: BackwardTensors
) -> Gradients:
    """Any stages: they are computed anew, and autograd follows them."""
    x = tensors.of_epilogue
    wide = statistics_dtype(x)
    wanted = problem.gradients
    source = "input" if problem.forward.conv is None else "conv_output"
    given = {
        source: x,
        "norm_weight": tensors.norm_weight,
        "norm_bias": tensors.norm_bias,
        "residual": tensors.residual,
    }
    leaves = {
        name: None if tensor is None else tensor.detach().to(wide).requires_grad_(name in wanted)
        for name, tensor in given.items()
    }
    anew = dataclasses.replace(problem.forward, save=False, dtype=wide, output_dtype=wide)
    followed = {name: leaf for name, leaf in leaves.items() if leaf is not None and name in wanted}
    with torch.enable_grad():
        first = leaves.pop(source)
        assert first is not None
        affine = leaves["norm_weight"], leaves["norm_bias"]
        output = _epilogue(anew, first, *affine, leaves["residual"])[0]
        found = torch.autograd.grad(
            output, list(followed.values()), tensors.grad_output.to(wide), allow_unused=True
        )
    return Gradients(**dict(zip(followed, found, strict=True)))


def convolution_gradients(problem: BackwardProblem, tensors: BackwardTensors) -> Gradients:
    """Gradients of the parts "input", "weight" and "bias", as far as they are asked for."""
    conv = problem.forward.conv
    grad, weight, dtype = tensors.of_convolution, tensors.weight, problem.forward.dtype
    assert conv is not None and weight is not None
    grad_bias = None
    # Of what is not rounded yet the sum is taken here.
    sums = "bias" in problem.gradients and grad.dtype != dtype
    if sums:
        grad_bias = grad.sum((0, *range(2, grad.dim())))
    asked = [
        "input" in problem.gradients,
        "weight" in problem.gradients,
        "bias" in problem.gradients and not sums,
    ]
    if not any(asked):
        return Gradients(bias=grad_bias)
    with precision_scope(problem.forward.precision, grad):
        found = torch.ops.aten.convolution_backward(
            grad.to(dtype),
            tensors.input,
            weight,
            [conv.out_channels],
            list(conv.stride),
            list(conv.padding),
            list(conv.dilation),
            True,
            list(conv.output_padding),
            conv.groups,
            asked,
        )
    # Some of torch's backends give what was not asked for.
    grad_input, grad_weight, bias_sum = (
        gradient if wanted else None for gradient, wanted in zip(found, asked, strict=True)
    )
    return Gradients(input=grad_input, weight=grad_weight, bias=grad_bias if sums else bias_sum)
