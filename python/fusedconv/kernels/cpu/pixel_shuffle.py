"""Transposed convolutions whose filter is as large as their stride, by a compiled matrix product
whose blocks go from cache to their places. Libraries would write the product to memory, and another
pass bring it from there to its places.

Everything is summed in float32, whatever the dtype; in float32 an activation alone behind the
convolution is part of it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusedconv import _C
from fusedconv.activations import COMPILED
from fusedconv.device import AVX512_BYTES, Device
from fusedconv.kernels import onednn
from fusedconv.kernels.compiled import address, supports_extents, transposed_problem
from fusedconv.kernels.cpu.convolution import (
    Convolution,
    Form,
    conversion_milliseconds,
    supports_form,
)
from fusedconv.kernels.cpu.matrix_product import tiles_output
from fusedconv.layout import empty, result_layout
from fusedconv.precision import COMPILED_DTYPES
from fusedconv.problem import ForwardProblem, act_norm_act
from fusedconv.support import Support

#: Taps of a line of the filter, whose sums are held together.
_MOST_TAPS = 64
#: Rows of a block of the product.
_ROWS = 6
#: The share of the processor's float32 rate that the products reach, and passes over input and
#: output beside them, which mostly run while others multiply. Measured on two cores with AVX-512.
_SHARE = 0.9
_PASSES = {"nchw": 1.0, "nhwc": 0.35}


def _activation(problem: ForwardProblem) -> str:
    """The activation that the products end in; "identity" where a pass behind them has it: in 16
    bits, that a call has the same bits where the convolution's output is rounded to be saved."""
    form = act_norm_act(problem.epilogue)
    plain = not problem.save and problem.dtype == problem.output_dtype == torch.float32
    if not plain or isinstance(form, Support) or form.norm is not None:
        return "identity"
    return form.before


def _rounding(problem: ForwardProblem, device: Device) -> float:
    """How many products whole blocks have for each one asked for."""
    conv = problem.conv
    assert conv is not None
    block = 64 if device.vector_bytes >= AVX512_BYTES else 16
    lanes, pixels = conv.out_channels * conv.kernel_size[-1], math.prod(problem.spatial)
    rows, columns = (lanes, pixels) if result_layout(problem.layout) == "nchw" else (pixels, lanes)
    whole = -(-rows // _ROWS) * _ROWS * -(-columns // block) * block
    return whole / (rows * columns)


class _PixelShuffle(Convolution):
    def __init__(self, problem: ForwardProblem) -> None:
        layout = result_layout(problem.layout)
        name = _activation(problem)
        step = f"matrix product to its places{'' if name == 'identity' else f', {name}'}"
        super().__init__(problem, problem.dtype, layout, f"{step} (fusedconv._C)")
        self.activates = name != "identity"
        self._activation = COMPILED[name]
        self._problem = transposed_problem(self.conv, problem.spatial, layout, True)
        self._shape = problem.output_shape
        # Of the leading axes that the weight lacks.
        self._leading = (0,) * (3 - len(problem.spatial))

    def compute(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        output = empty(input, self._shape, self.layout, self.dtype)
        weight = weight.to(torch.float32)
        bias = None if bias is None else bias.to(torch.float32).contiguous()
        channels, outputs, *taps = weight.stride()
        _C.cpu.pixel_shuffle(
            self._problem,
            COMPILED_DTYPES[self.dtype],
            input.shape[0],
            self._activation,
            input.data_ptr(),
            weight.data_ptr(),
            [channels, outputs, *self._leading, *taps],
            address(bias),
            output.data_ptr(),
            torch.get_num_threads(),
        )
        return output


class PixelShuffle(Form):
    """Input pixels times the filter, where each pixel has a tile of the output to itself, in both
    layouts as they lie."""

    name = "pixel_shuffle"

    def supports(self, problem: ForwardProblem, device: Device) -> Support:
        conv = problem.conv
        assert conv is not None
        for support in (
            supports_form(problem),
            tiles_output(conv),
            supports_extents(conv, problem.spatial),
        ):
            if not support:
                return support
        if conv.kernel_size[-1] > _MOST_TAPS:
            return Support.no(
                f"a line of the filter has {conv.kernel_size[-1]} taps, up to {_MOST_TAPS} are "
                "served"
            )
        return Support.yes()

    def cost(self, problem: ForwardProblem, device: Device) -> float:
        layout = result_layout(problem.layout)
        products = onednn.product_milliseconds(problem, device, torch.float32) / _SHARE
        products *= _rounding(problem, device)
        weight = onednn.copy_milliseconds(
            device, onednn.weight_elements(problem), problem.dtype, torch.float32
        )
        moved = _PASSES[layout] * onednn.moved_bytes(problem, problem.dtype)
        return (
            conversion_milliseconds(problem, device, problem.dtype, layout)
            + products
            + weight
            + device.copy_milliseconds(moved)
            + onednn.CALL * device.launch_milliseconds
        )

    def compile(self, problem: ForwardProblem, device: Device) -> Convolution:
        return _PixelShuffle(problem)
