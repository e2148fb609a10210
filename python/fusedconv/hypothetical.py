"""Problems of calls that nobody makes, on a device that need not be there.

They pass the checks of a real call, on tensors without memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedconv import validation
from fusedconv.arguments import integers
from fusedconv.layout import layout_of
from fusedconv.norms import statistics_dtype
from fusedconv.precision import resolve_precision
from fusedconv.problem import ForwardProblem, epilogue, need_what_they_read


def _empty(name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    try:
        return torch.empty(tuple(shape), dtype=dtype, device="meta")
    except (RuntimeError, TypeError, OverflowError):
        raise ValueError(
            f"{name}: got shape {tuple(shape)}, expected a size that torch counts"
        ) from None


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
) -> ForwardProblem:
    """The problem of ``fusedconv.functional``'s call with these arguments and dense tensors.

    ``device`` is "cuda" or "cpu", ``layout`` "nchw" or "nhwc".
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
        if groups < 1 or out_channels % groups:
            raise ValueError(
                f"groups: got {groups}, expected a positive divisor of {out_channels} output "
                "channels"
            )
        axes = len(spatial)
        kernel = integers("kernel_size", kernel_size, axes, 1)
        conv = validation.conv_geometry(
            input,
            _empty("weight", (channels, out_channels // groups, *kernel), dtype),
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
