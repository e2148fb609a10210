"""What the providers of compiled kernels share: problems as ``fusedconv._C`` takes them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusedconv import _C
from fusedconv.activations import COMPILED
from fusedconv.lowering import Phase
from fusedconv.precision import COMPILED_DTYPES, dtype_name
from fusedconv.problem import ActNormAct, ConvTransposeGeometry, ForwardProblem, act_norm_act
from fusedconv.support import Support

#: What a plan says first of an input that no kernel reads as it lies.
CONTIGUOUS_STEP = "torch copy of the strided input to contiguous NCHW"

#: What positions along an axis and pixels of a sample are counted to, and taps of a filter.
MOST_PIXELS = 1 << 30
MOST_TAPS = 1 << 20


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def supports_compiled(problem: ForwardProblem, ungrouped: frozenset[str] = frozenset()) -> Support:
    """The conditions that every compiled kernel has in common: dtypes, stages (``ungrouped`` as
    ``act_norm_act`` takes it), a size."""
    if problem.dtype not in COMPILED_DTYPES:
        known = "/".join(map(dtype_name, COMPILED_DTYPES))
        return Support.no(f"dtype is {dtype_name(problem.dtype)}, not {known}")
    form = act_norm_act(problem.epilogue, ungrouped)
    if isinstance(form, Support):
        return form
    for activation in (form.before, form.after):
        if activation not in COMPILED:
            return Support.no(f"no fused kernel has the activation {activation}")
    norm = form.norm
    if norm is not None and norm.affine_dtype not in (None, *COMPILED_DTYPES):
        assert norm.affine_dtype is not None
        return Support.no(f"affine dtype is {dtype_name(norm.affine_dtype)}")
    if problem.input_elements == 0 or problem.output_elements == 0:
        return Support.no("the input is empty")
    return Support.yes()


def by_axis(values: tuple[int, ...], filler: int = 1) -> tuple[int, int, int]:
    """By depth, height and width, with ``filler`` for the leading axes that a problem lacks."""
    one, two, three = (*(filler,) * (3 - len(values)), *values)
    return one, two, three


def supports_extents(conv: ConvTransposeGeometry, spatial: tuple[int, ...]) -> Support:
    """Whether positions, pixels and taps can be counted in 32 bits."""
    output = conv.output_spatial(spatial)
    # Before the output is cropped by the padding.
    whole = (n + 2 * p for n, p in zip(output, conv.padding, strict=True))
    steps = (*conv.stride, *conv.dilation)
    if max(*whole, *steps, math.prod(spatial), math.prod(output)) >= MOST_PIXELS:
        return Support.no(
            f"a sample of {spatial} makes {output} by stride {conv.stride} and dilation "
            f"{conv.dilation}; pixels and positions along an axis are counted to {MOST_PIXELS}"
        )
    taps = math.prod(conv.kernel_size)
    if taps >= MOST_TAPS:
        return Support.no(f"a filter of {taps} taps, they are counted to {MOST_TAPS}")
    return Support.yes()


def transposed_problem(
    conv: ConvTransposeGeometry, spatial: tuple[int, ...], layout: str, aligned: bool
) -> _C.TransposedProblem:
    """A transposed convolution whose tensors a kernel meets in ``layout``, at addresses that are
    multiples of 16 bytes if ``aligned``."""
    return _C.TransposedProblem(
        channels=conv.in_channels // conv.groups,
        output_channels=conv.out_channels // conv.groups,
        groups=conv.groups,
        input=by_axis(spatial),
        output=by_axis(conv.output_spatial(spatial)),
        kernel=by_axis(conv.kernel_size),
        stride=by_axis(conv.stride),
        padding=by_axis(conv.padding, 0),
        dilation=by_axis(conv.dilation),
        layout=_C.Layout[layout],
        aligned=aligned,
    )


def conv_problem(phase: Phase, channels: int, output_channels: int) -> _C.ConvProblem:
    """The forward convolution that a transposed one lowers to, for any batch size."""
    return _C.ConvProblem(
        c=channels,
        k=output_channels,
        input=phase.input,
        output=phase.output,
        taps=phase.taps,
        lower_padding=phase.lower_padding,
        dilation=phase.dilation,
    )


def group_norm_problem(
    problem: ForwardProblem,
    form: ActNormAct,
    *,
    input_layout: str,
    output_layout: str,
    batch: int = 0,
    row_channels: int = 0,
    dtype: torch.dtype | None = None,
    output_dtype: torch.dtype | None = None,
) -> _C.GroupNormProblem:
    """The part of a problem behind its convolution, over a tensor of the given layout.

    ``batch`` 0 leaves it to the program; ``row_channels`` is how many channels a channels-last
    pixel of the input has, 0 for the problem's. Dtypes are the problem's where they are not given.
    """
    norm = form.norm
    channels = problem.output_channels
    return _C.GroupNormProblem(
        batch=batch,
        channels=channels,
        pixels=math.prod(problem.output_spatial),
        groups=(norm.groups(channels) if norm else 0) or 1,
        eps=norm.eps if norm else 0.0,
        input_layout=_C.Layout[input_layout],
        output_layout=_C.Layout[output_layout],
        dtype=COMPILED_DTYPES[dtype or problem.dtype],
        output_dtype=COMPILED_DTYPES[output_dtype or problem.output_dtype],
        affine_dtype=COMPILED_DTYPES[(norm.affine_dtype if norm else None) or torch.float32],
        activation_before=COMPILED[form.before],
        activation_after=COMPILED[form.after],
        row_channels=row_channels,
        tf32=problem.conv is not None and problem.precision == "tf32",
    )


def readable_aligned(problem: ForwardProblem) -> bool:
    """Whether kernels see 16-byte alignment: a copy of a strided input is a fresh tensor."""
    return problem.aligned or problem.layout == "strided"
