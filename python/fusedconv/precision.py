"""Arithmetic of convolutions: which precisions there are, their dtypes, and torch's switches."""

from __future__ import annotations

from typing import Literal

import torch

from fusedconv import _C

Precision = Literal["tf32", "fp32", "fp16", "bf16", "fp64"]

#: The dtype of the tensors that each precision computes on.
DTYPES: dict[Precision, torch.dtype] = {
    "tf32": torch.float32,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp64": torch.float64,
}
PRECISIONS: tuple[Precision, ...] = tuple(DTYPES)

#: What the compiled kernels call the dtypes that they know.
COMPILED_DTYPES: dict[torch.dtype, _C.DType] = {getattr(torch, d.name): d for d in _C.DType}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def precisions_of(dtype: torch.dtype) -> tuple[Precision, ...]:
    """The precisions that compute on a dtype, the one that asks for less first."""
    return tuple(precision for precision in PRECISIONS if DTYPES[precision] == dtype)


def conv_fp32_precision() -> Precision:
    """The precision torch's own switches ask of an fp32 convolution on CUDA: "tf32" or "fp32"."""
    getter = getattr(torch._C, "_get_fp32_precision_getter", None)
    if getter is not None:
        setting = getter("cuda", "conv")
        if setting == "tf32":
            return "tf32"
        if setting == "ieee":
            return "fp32"
    try:
        # "none": only the older switch says anything.
        return "tf32" if torch._C._get_cudnn_allow_tf32() else "fp32"
    except RuntimeError:
        # torch refuses to read the older switch once the newer ones disagree with it; none of them
        # allowed TF32, or the getter above had said so.
        return "fp32"


def resolve_precision(dtype: torch.dtype, device: str, requested: str | None) -> Precision:
    """The arithmetic of the convolution: the argument, else torch's switches, else the dtype's."""
    choices = precisions_of(dtype)
    for choice in choices:
        if requested == choice:
            return choice
    if requested is not None:
        expected = ", ".join(map(repr, choices))
        raise ValueError(
            f"precision: got {requested!r} for input of {dtype_name(dtype)}, expected "
            f"{expected} or None"
        )
    if len(choices) == 1:
        return choices[0]
    return conv_fp32_precision() if device == "cuda" else "fp32"
