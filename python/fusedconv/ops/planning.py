"""From the tensors and arguments of a call to its problem and plan."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedconv import validation
from fusedconv.plan import Plan, cached, plan_for
from fusedconv.problem import (
    ConvTransposeGeometry,
    NormGeometry,
    Problem,
    device_properties,
    layout_of,
    resolve_precision,
)
from fusedconv.recording import record
from fusedconv.registry import forced_kernels


def problem_of(
    input: Tensor,
    activation: str,
    order: str,
    precision: str | None,
    output_dtype: torch.dtype | None,
    save: bool,
    conv: ConvTransposeGeometry | None,
    norm: NormGeometry | None,
    aligned: bool,
) -> Problem:
    device = input.device
    index = device.index or 0
    architecture, multiprocessors = (0, 0)
    if device.type == "cuda":
        architecture, multiprocessors = device_properties(index)
    return Problem(
        device=device.type,
        device_index=index,
        architecture=architecture,
        multiprocessors=multiprocessors,
        dtype=input.dtype,
        output_dtype=output_dtype or input.dtype,
        precision=resolve_precision(input.dtype, device.type, precision),
        layout=layout_of(tuple(input.shape), input.stride()),
        aligned=aligned,
        batch=input.shape[0],
        channels=input.shape[1],
        spatial=tuple(input.shape[2:]),
        activation=activation,
        order="act_norm" if order == "act_norm" else "norm_act",
        conv=conv,
        norm=norm,
        save=save,
    )


def _signature(tensor: Tensor | None) -> object:
    if tensor is None:
        return None
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def conv_geometries(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    activation: str,
    order: str,
    num_groups: int,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    precision: str | None,
) -> tuple[ConvTransposeGeometry, NormGeometry | None]:
    """Every check of a call of the convolution; TypeError or ValueError names what is wrong."""
    validation.check_input(input)
    validation.check_choices(activation, order)
    conv = validation.conv_geometry(
        input,
        weight,
        bias,
        tuple(stride),
        tuple(padding),
        tuple(output_padding),
        tuple(dilation),
        groups,
    )
    resolve_precision(input.dtype, input.device.type, precision)
    norm = None
    if num_groups:
        norm = validation.norm_geometry(
            input,
            conv.out_channels,
            num_groups,
            norm_weight,
            norm_bias,
            eps,
            ("norm_weight", "norm_bias"),
        )
    return conv, norm


def conv_plan(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    output_padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    activation: str,
    order: str,
    num_groups: int,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    precision: str | None,
    output_dtype: torch.dtype | None,
    save: bool,
) -> Plan:
    """The plan of a call; arguments are validated when their combination is seen first.

    The key compares by value, where 1, 1.0 and True are equal: callers pass exact ints and floats.
    """
    if input.layout is not torch.strided:
        validation.check_input(input)
    if input.dtype is torch.float32:
        precision = resolve_precision(torch.float32, input.device.type, precision)
    aligned = input.data_ptr() & 15 == 0
    key = (
        input.shape,
        input.stride(),
        input.dtype,
        input.device,
        aligned,
        _signature(weight),
        _signature(bias),
        stride,
        padding,
        output_padding,
        dilation,
        groups,
        activation,
        order,
        num_groups,
        _signature(norm_weight),
        _signature(norm_bias),
        eps,
        precision,
        output_dtype,
        save,
        forced_kernels(),
    )
    plan = cached(key)
    if plan is None or record.active:
        conv, norm = conv_geometries(
            input,
            weight,
            bias,
            stride,
            padding,
            output_padding,
            dilation,
            groups,
            activation,
            order,
            num_groups,
            norm_weight,
            norm_bias,
            eps,
            precision,
        )
        problem = problem_of(
            input, activation, order, precision, output_dtype, save, conv, norm, aligned
        )
        plan = plan_for(problem, key)
        record.note(problem)
    return plan


def group_norm_geometry(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str,
    order: str,
) -> NormGeometry:
    """Every check of a call of GroupNorm; TypeError or ValueError names what is wrong."""
    validation.check_input(input)
    validation.check_choices(activation, order)
    return validation.norm_geometry(
        input, input.shape[1], num_groups, weight, bias, eps, ("weight", "bias")
    )


def group_norm_plan(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str,
    order: str,
    output_dtype: torch.dtype | None,
    save: bool,
) -> Plan:
    """The plan of a GroupNorm call; arguments are validated when seen first, as in conv_plan."""
    if input.layout is not torch.strided:
        validation.check_input(input)
    aligned = input.data_ptr() & 15 == 0
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
    plan = cached(key)
    if plan is None or record.active:
        norm = group_norm_geometry(input, num_groups, weight, bias, eps, activation, order)
        problem = problem_of(
            input, activation, order, None, output_dtype, save, None, norm, aligned
        )
        plan = plan_for(problem, key)
        record.note(problem)
    return plan
