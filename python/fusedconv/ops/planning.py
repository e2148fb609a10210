"""From the tensors and arguments of a call to its problem and plan."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedconv import validation
from fusedconv.activations import KEEP_RESULT
from fusedconv.device import device_record
from fusedconv.kernels.torch import FollowedPlan, gradients_plan
from fusedconv.layout import layout_of
from fusedconv.norms import Norm
from fusedconv.ops.watching import is_watched
from fusedconv.plan import BackwardPlan, ForwardPlan, JoinedPlan
from fusedconv.precision import resolve_precision
from fusedconv.problem import (
    BackwardProblem,
    ConvTransposeGeometry,
    ForwardProblem,
    Problem,
    epilogue,
    need_what_they_read,
)
from fusedconv.recording import record
from fusedconv.selection import cached, forced_kernels, log_once, plan_for
from fusedconv.training import EVERY_PART, reason_to_follow
from fusedconv.tuning import tune_call


class ConvCall(NamedTuple):
    """The arguments of ``fusedconv::conv_transpose_act_norm``, in the order of its schema."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    stride: Sequence[int]
    padding: Sequence[int]
    output_padding: Sequence[int]
    dilation: Sequence[int]
    groups: int
    activation: str
    order: str
    num_groups: int
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    eps: float
    precision: str | None
    output_dtype: torch.dtype | None
    norm: str | None = None  # a key of fusedconv.norms.KINDS; None for "group", or none without any
    recompute: bool = False

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Input, weight, bias, norm_weight, norm_bias."""
        return self.input, self.weight, self.bias, self.norm_weight, self.norm_bias

    def without_tensors(self) -> ConvCall:
        """The call for a context that saves the tensors by themselves."""
        none: Any = None
        return self._replace(input=none, weight=none, bias=None, norm_weight=None, norm_bias=None)

    def geometries(self) -> tuple[ConvTransposeGeometry, Norm | None]:
        """Every check of the call; TypeError or ValueError names what is wrong."""
        input = self.input
        validation.check_input(input)
        validation.check_choices(self.activation, self.order)
        conv = validation.conv_geometry(
            input,
            self.weight,
            self.bias,
            tuple(self.stride),
            tuple(self.padding),
            tuple(self.output_padding),
            tuple(self.dilation),
            self.groups,
        )
        resolve_precision(input.dtype, input.device.type, self.precision)
        norm = None
        if self.num_groups or self.norm is not None:
            norm = validation.norm_geometry(
                input,
                conv.out_channels,
                self.num_groups,
                self.norm_weight,
                self.norm_bias,
                self.eps,
                ("norm_weight", "norm_bias"),
                self.norm or "group",
            )
        return conv, norm

    def problem(self, save: bool, aligned: bool = True) -> ForwardProblem:
        """The problem of the call, every argument checked."""
        conv, norm = self.geometries()
        return _problem(
            self.input,
            self.activation,
            self.order,
            self.precision,
            self.output_dtype,
            save,
            aligned,
            norm,
            conv,
            self.bias is not None,
            self.recompute,
        )

    @property
    def reads_result(self) -> bool:
        """Whether the backward pass reads the result in place of the convolution's output: what
        ``need_what_they_read`` says of a ReLU."""
        alone = self.num_groups == 0 and self.norm is None and self.output_dtype is None
        return alone and self.activation in KEEP_RESULT

    def convolution(self) -> ConvCall:
        """The convolution with its bias alone, whose output is what a forward pass saves."""
        return self._replace(
            activation="identity",
            order="act_norm",
            num_groups=0,
            norm_weight=None,
            norm_bias=None,
            output_dtype=None,
            norm=None,
            recompute=False,
        )


class NormCall(NamedTuple):
    """The arguments of ``fusedconv::group_norm``, in the order of its schema."""

    input: Tensor
    num_groups: int
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    activation: str
    order: str
    output_dtype: torch.dtype | None

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Input, weight, bias."""
        return self.input, self.weight, self.bias

    @property
    def reads_result(self) -> bool:
        """The backward pass reads the input."""
        return False

    def without_tensors(self) -> NormCall:
        """The call for a context that saves the tensors by themselves."""
        none: Any = None
        return self._replace(input=none, weight=None, bias=None)

    def geometry(self) -> Norm:
        """Every check of the call; TypeError or ValueError names what is wrong."""
        input = self.input
        validation.check_input(input)
        validation.check_choices(self.activation, self.order)
        return validation.norm_geometry(
            input,
            input.shape[1],
            self.num_groups,
            self.weight,
            self.bias,
            self.eps,
            ("weight", "bias"),
        )

    def problem(self, save: bool, aligned: bool = True) -> ForwardProblem:
        """The problem of the call, every argument checked."""
        norm = self.geometry()
        return _problem(
            self.input, self.activation, self.order, None, self.output_dtype, save, aligned, norm
        )


def _problem(
    input: Tensor,
    activation: str,
    order: str,
    precision: str | None,
    output_dtype: torch.dtype | None,
    save: bool,
    aligned: bool,
    norm: Norm | None,
    conv: ConvTransposeGeometry | None = None,
    bias: bool = False,
    recompute: bool = False,
) -> ForwardProblem:
    stages = epilogue(bias, activation, order, norm)
    save = save and need_what_they_read(stages, output_dtype is not None)
    return ForwardProblem(
        dtype=input.dtype,
        output_dtype=output_dtype or input.dtype,
        precision=resolve_precision(input.dtype, input.device.type, precision),
        layout=layout_of(input.shape, input.stride()),
        aligned=aligned,
        batch=input.shape[0],
        channels=input.shape[1],
        spatial=tuple(input.shape[2:]),
        conv=conv,
        epilogue=stages,
        save=save,
        recompute=recompute and save,
    )


def _is_aligned(tensor: Tensor) -> bool:
    return tensor.data_ptr() & 15 == 0


def _signature(tensor: Tensor | None) -> object:
    if tensor is None:
        return None
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def _hashable(value: object) -> object:
    if isinstance(value, Tensor):
        return _signature(value)
    return tuple(value) if isinstance(value, list) else value


def _planned(problem: Problem, device: torch.device, key: Hashable) -> Any:
    """The plan of a problem, kept under the key of its call and noted where somebody records."""
    where = device_record(device)
    if not is_watched():
        tune_call(problem, device)
    plan = plan_for(problem, where, key)
    record.note(problem, where)
    return plan


def conv_plan(call: ConvCall, save: bool) -> ForwardPlan:
    """The plan of a call; arguments are validated when their combination is seen first.

    The key compares by value, where 1, 1.0 and True are equal: callers pass exact ints and floats,
    and tuples for sequences.
    """
    input, weight, bias, precision = call.input, call.weight, call.bias, call.precision
    if input.layout is not torch.strided:
        validation.check_input(input)
    if input.dtype is torch.float32:
        precision = resolve_precision(torch.float32, input.device.type, precision)
    aligned = _is_aligned(input)
    key = (
        input.shape,
        input.stride(),
        input.dtype,
        input.device,
        aligned,
        _signature(weight),
        _signature(bias),
        call[3:11],
        _signature(call.norm_weight),
        _signature(call.norm_bias),
        call.eps,
        precision,
        call.output_dtype,
        call.norm,
        call.recompute,
        save,
        forced_kernels(),
    )
    plan: Any = cached(key)
    if plan is None or record.active:
        plan = _planned(call.problem(save, aligned), input.device, key)
    return plan


def group_norm_plan(call: NormCall, save: bool) -> ForwardPlan:
    """The plan of a GroupNorm call; arguments are validated when seen first, as in conv_plan."""
    input, num_groups, weight, bias, eps, activation, order, output_dtype = call
    if input.layout is not torch.strided:
        validation.check_input(input)
    aligned = _is_aligned(input)
    key = (
        input.shape,
        input.stride(),
        input.dtype,
        input.device,
        aligned,
        num_groups,
        _signature(weight),
        _signature(bias),
        eps,
        activation,
        order,
        output_dtype,
        save,
        forced_kernels(),
    )
    plan: Any = cached(key)
    if plan is None or record.active:
        plan = _planned(call.problem(save, aligned), input.device, key)
    return plan


def followed(
    plan: ForwardPlan,
    call: ConvCall | NormCall,
    names: tuple[str, ...],
    tensors: Sequence[Tensor | None],
) -> ForwardPlan | None:
    """Torch's operators, where autograd had better follow them than differentiate a call by the
    plan that ``conv_plan`` or ``group_norm_plan`` just gave for it, which saves. ``names`` are what
    a problem calls the gradients of ``tensors``."""
    needs = tuple([each is not None and each.requires_grad for each in tensors])
    known = plan.followed
    if known is None:
        known = plan.followed = {}
    if needs not in known or record.active:
        device = call.input.device
        forward = call.problem(True, _is_aligned(call.input))
        backward = BackwardProblem.of(
            forward,
            grad_dtype=forward.output_dtype,
            grad_layout=forward.output_layout,
            aligned=True,
            gradients=[name for name, need in zip(names, needs, strict=True) if need],
        )
        where = device_record(device)
        # Now, so that no later call of the step weighs otherwise than the first: a checkpoint's
        # second one must save what its first has saved.
        tune_call(backward, device)
        reason = reason_to_follow(forward, backward, where)
        if reason is not None:
            record.note_followed(forward, backward, where, reason)
            if reason != EVERY_PART:
                message = "autograd follows torch's operators for %s on %s: %s"
                log_once((forward, where, "followed"), message, forward, where, reason)
        found = known[needs] = None if reason is None else FollowedPlan(forward)
        return found
    return known[needs]


def _wanted(call: ConvCall | NormCall, names: tuple[str, ...], needs: Sequence[bool]) -> list[str]:
    """Which gradients ``needs`` asks for; ``names`` are what a problem calls the gradients of the
    call's tensors."""
    return [
        name
        for name, need, tensor in zip(names, needs, call.tensors, strict=True)
        if need and tensor is not None
    ]


def torch_backward_plan(
    call: ConvCall | NormCall, grad: Tensor, names: tuple[str, ...], needs: Sequence[bool]
) -> BackwardPlan:
    """As ``backward_plan``, of torch's operators, for tensors that may have no memory."""
    wanted = _wanted(call, names, needs)
    if not wanted:
        return JoinedPlan(())
    forward = call.problem(True)
    problem = BackwardProblem.of(
        dataclasses.replace(forward, recompute=False),
        grad_dtype=grad.dtype,
        grad_layout=layout_of(grad.shape, grad.stride()),
        aligned=True,
        gradients=wanted,
    )
    return gradients_plan(problem)


def backward_plan(
    call: ConvCall | NormCall,
    grad: Tensor,
    conv_output: Tensor | None,
    names: tuple[str, ...],
    needs: Sequence[bool],
) -> BackwardPlan:
    """The plan of the gradients that ``needs`` asks for, of a call that saved; ``names`` are what
    a problem calls the gradients of the call's tensors."""
    wanted = _wanted(call, names, needs)
    if not wanted:
        return JoinedPlan(())
    if isinstance(call, ConvCall) and call.precision is None:
        resolved = resolve_precision(call.input.dtype, call.input.device.type, None)
        call = call._replace(precision=resolved)
    if isinstance(call, ConvCall) and call.recompute:
        call = call._replace(recompute=False)  # which by now has been done
    saved = call.input if conv_output is None else conv_output
    aligned = _is_aligned(grad), _is_aligned(saved)
    arguments = tuple(_hashable(value) for value in call)
    key = (
        grad.stride(),
        grad.dtype,
        grad.device,
        None if conv_output is None else conv_output.stride(),
        aligned,
        tuple(wanted),
        arguments,
        forced_kernels(),
    )
    plan: Any = cached(key)
    if plan is None or record.active:
        grad_layout = layout_of(grad.shape, grad.stride())
        # What is neither dense layout is copied to memory that is.
        copied = grad_layout == "strided", layout_of(saved.shape, saved.stride()) == "strided"
        problem = BackwardProblem.of(
            call.problem(True),
            grad_dtype=grad.dtype,
            grad_layout=grad_layout,
            aligned=all(map(operator.or_, aligned, copied)),
            gradients=wanted,
        )
        plan = _planned(problem, call.input.device, key)
    return plan


def gradient_plan(
    forward: ForwardPlan,
    call: Callable[[], ConvCall | NormCall],
    grad: Tensor,
    conv_output: Tensor | None,
    names: tuple[str, ...],
    needs: tuple[bool, ...],
) -> BackwardPlan:
    """As ``backward_plan``, where the plan of the forward pass is at hand: its problem tells apart
    what the call would."""
    key = (
        needs,
        grad.stride(),
        grad.dtype,
        _is_aligned(grad),
        conv_output is None or _is_aligned(conv_output),
        forced_kernels(),
    )
    known = forward.backward_plans
    if known is None:
        known = forward.backward_plans = {}
    plan = known.get(key)
    if plan is None or record.active:
        plan = known[key] = backward_plan(call(), grad, conv_output, names, needs)
    return plan
