"""Problems of calls that nobody makes here, on a device that need not be there.

They pass the checks of a real call, on tensors without memory.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from fusedconv import validation
from fusedconv.arguments import integers
from fusedconv.layout import dense_strides, layout_of
from fusedconv.norms import statistics_dtype
from fusedconv.precision import resolve_precision
from fusedconv.problem import (
    BackwardProblem,
    ConvTransposeGeometry,
    ForwardProblem,
    Problem,
    epilogue,
    need_what_they_read,
)


def _empty(name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    try:
        return torch.empty(tuple(shape), dtype=dtype, device="meta")
    except (RuntimeError, TypeError, OverflowError):
        raise ValueError(
            f"{name}: got shape {tuple(shape)}, expected a size that torch counts"
        ) from None


def _check_groups(groups: int, out_channels: int) -> None:
    if groups < 1 or out_channels % groups:
        raise ValueError(
            f"groups: got {groups}, expected a positive divisor of {out_channels} output channels"
        )


def problem(
    *,
    device: str,
    dtype: torch.dtype,
    precision: str | None,
    layout: str,
    batch: int,
    channels: int,
    spatial: Sequence[int],
    out_channels: int | None,
    kernel_size: int | Sequence[int] = 3,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    bias: bool = True,
    num_groups: int | None = None,
    eps: float = 1e-5,
    activation: str = "identity",
    order: str = "act_norm",
    save: bool = False,
    norm: str = "group",
    weight_layout: str = "nchw",
) -> ForwardProblem:
    """The problem of ``fusedconv.functional``'s call with these arguments and dense tensors.

    ``device`` is "cuda" or "cpu", ``layout``, the input's, and ``weight_layout`` "nchw" or "nhwc".
    ``out_channels`` None leaves the convolution out, ``num_groups`` None a ``norm`` of "group".
    Every normalisation has weight and bias of the input's dtype, that of "batch" those that
    ``fold_batch_norm`` returns.

    Raises ValueError or TypeError as the call does: ``name: got ..., expected ...``.
    """
    shape = (batch, channels, *spatial)
    if layout == "nhwc" and spatial:
        input = _empty("input", (batch, *spatial, channels), dtype).movedim(-1, 1)
    else:
        input = _empty("input", shape, dtype)
    validation.check_input(input)
    validation.check_choices(activation, order)
    conv = None
    if out_channels is not None:
        _check_groups(groups, out_channels)
        axes = len(spatial)
        kernel = integers("kernel_size", kernel_size, axes, 1)
        filter = (channels, out_channels // groups, *kernel)
        _empty("weight", filter, dtype)
        strides = dense_strides(filter, weight_layout)
        conv = validation.conv_geometry(
            input,
            torch.empty_strided(filter, strides, dtype=dtype, device="meta"),
            _empty("bias", (out_channels,), dtype) if bias else None,
            integers("stride", stride, axes),
            integers("padding", padding, axes),
            integers("output_padding", output_padding, axes),
            integers("dilation", dilation, axes),
            groups,
        )
    stage = None
    if num_groups is not None or norm != "group":
        features = channels if out_channels is None else out_channels
        wide = statistics_dtype(input) if norm == "batch" else dtype
        affine = _empty("weight", (features,), wide)
        kind = "affine" if norm == "batch" else norm
        stage = validation.norm_geometry(
            input, features, num_groups or 0, affine, affine, eps, ("weight", "bias"), kind
        )
    stages = epilogue(conv is not None and bias, activation, order, stage)
    return ForwardProblem(
        dtype=dtype,
        output_dtype=dtype,
        precision=resolve_precision(dtype, device, precision),
        layout=layout_of(shape, input.stride()),
        aligned=True,
        batch=batch,
        channels=channels,
        spatial=tuple(spatial),
        conv=conv,
        epilogue=stages,
        save=save and need_what_they_read(stages, False),
    )


def checked(problem: Problem, device: str) -> Problem:
    """A problem whose fields somebody has written, where a call on ``device``, "cuda" or "cpu", can
    have it. Raises ValueError or TypeError as the call does, or where the fields are none that it
    has."""
    if isinstance(problem, ForwardProblem):
        _check_forward(problem, device)
        return problem
    forward = problem.forward
    _check_forward(forward, device)
    if not forward.save and need_what_they_read(
        forward.epilogue, forward.output_dtype != forward.dtype
    ):
        raise ValueError("save: got False for a backward pass that reads what is saved")
    asked = BackwardProblem.of(
        forward,
        grad_dtype=problem.grad_dtype,
        grad_layout=problem.grad_layout,
        aligned=problem.aligned,
        gradients=problem.gradients,
    )
    if problem != asked:
        raise ValueError("gradients: got none of the convolution's output, which others need")
    return problem


def _check_forward(problem: ForwardProblem, device: str) -> None:
    """The checks of a call, on tensors of the problem's description."""
    resolve_precision(problem.dtype, device, problem.precision)
    if device != "cuda" and problem.precision == "tf32":
        raise ValueError(f"precision: got 'tf32' on {device}, expected 'fp32'")
    strided = problem.layout == "strided"
    input = _empty("input", problem.input_shape, problem.dtype)
    validation.check_input(input)
    if problem.output_dtype not in (problem.dtype, torch.float32):
        raise ValueError(
            f"output_dtype: got {problem.output_dtype}, expected {problem.dtype} or torch.float32"
        )
    if not strided and layout_of(
        problem.input_shape, dense_strides(problem.input_shape, problem.layout)
    ) != problem.layout:  # fmt: skip
        raise ValueError(
            f"layout: got {problem.layout!r}, expected 'nchw' for shape {problem.input_shape}"
        )
    if problem.conv is not None and _geometry(problem.conv, input, problem.bias) != problem.conv:
        raise ValueError(
            f"conv: got {problem.conv}, expected {problem.channels} input channels and a value for "
            "each axis"
        )
    norm = problem.norm
    if norm is not None:
        channels = problem.output_channels
        affine = _empty("norm_weight", (channels,), norm.affine_dtype or problem.dtype)
        found = validation.norm_geometry(
            input, channels, norm.num_groups, affine if norm.weight else None,
            affine if norm.bias else None, norm.eps, ("norm_weight", "norm_bias"), norm.kind,
        )  # fmt: skip
        if found != norm:
            raise ValueError(f"affine_dtype: got {norm.affine_dtype}, expected None without any")


def _geometry(conv: ConvTransposeGeometry, input: Tensor, bias: bool) -> ConvTransposeGeometry:
    """What a call with this geometry's weight has."""
    _check_groups(conv.groups, conv.out_channels)
    shape, strides = conv.weight_shape, conv.weight_strides
    _empty("weight", shape, input.dtype)
    if len(strides) != len(shape) or sum(map(operator.mul, shape, strides)) >= 2**60:
        raise ValueError(
            f"weight_strides: got {strides}, expected those of a tensor of shape {shape}"
        )
    return validation.conv_geometry(
        input,
        torch.empty_strided(shape, strides, dtype=input.dtype, device="meta"),
        _empty("bias", (conv.out_channels,), input.dtype) if bias else None,
        conv.stride,
        conv.padding,
        conv.output_padding,
        conv.dilation,
        conv.groups,
    )
