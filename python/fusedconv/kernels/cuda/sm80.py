"""Transposed convolution on tensor cores through CUTLASS's mma.sync kernels (sm_80 and later).

A transposed convolution of stride 1 is lowered to a forward convolution on channels-last data; bias
and activation are the convolution's epilogue; the way back to the caller's layout is part of the
normalising pass. The batch is served in chunks, which bounds the memory between the steps.
"""

from __future__ import annotations

import math
from typing import Any

from fusedconv import _C
from fusedconv.activations import COMPILED
from fusedconv.device import Device
from fusedconv.kernels.compiled import conv_problem
from fusedconv.kernels.cuda.conditions import (
    FAMILIES,
    NotBuiltForward,
    supports_forward,
    supports_precision,
)
from fusedconv.kernels.cuda.program import (
    ForwardProgram,
    ProgramPlan,
    equal_chunk,
    five_strides,
    launched_chunks,
)
from fusedconv.lowering import Phase, lower
from fusedconv.plan import ForwardKernel, Kernel
from fusedconv.precision import COMPILED_DTYPES
from fusedconv.problem import ForwardProblem
from fusedconv.support import Support

#: Scratch that one chunk of samples may take. Measured on an H200: chunks small enough to stay in
#: L2 gain less than their short launches lose; chunks this large lose nothing and bound the memory.
CHUNK_BYTES = 2 << 30

#: What a block alone on its multiprocessor takes, in waves, by spatial axes; measured on an H200.
_ALONE = {2: 1.5, 3: 2.6}


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def conv_dimensions(problem: ForwardProblem) -> int:
    """Spatial axes of the kernels that serve a problem: 1D runs as 2D with height 1."""
    return max(2, len(problem.spatial))


class CutlassSm80(ForwardKernel):
    """A row of ``_C.sm80.rows()``."""

    provider = "cutlass_sm80"

    def __init__(self, row: Any) -> None:
        self.row = row
        self.name = row.name
        self.precision: str = _C.math_traits(row.math).precision
        #: Whether the operands must have been rounded to TF32 before.
        self.takes_rounded = row.math == _C.Math.tf32_rounded

    # ---- what it serves ----

    def _reads_input_directly(self, problem: ForwardProblem) -> bool:
        """Whether the convolution reads the caller's tensor: channels last, whole vectors."""
        return (
            problem.layout == "nhwc"
            and problem.aligned
            and problem.channels % self.row.alignment == 0
            and not self.takes_rounded
        )

    def supports(self, problem: ForwardProblem, device: Device) -> Support:
        row = self.row
        conv = problem.conv
        if conv is None:
            return Support.no("computes convolutions; the problem has none")
        common = supports_forward(problem, device)
        if not common:
            return common
        precise = supports_precision(problem, self.precision)
        if not precise:
            return precise
        if conv_dimensions(problem) != row.dimensions:
            return Support.no(f"iterates {row.dimensions} axes, not {conv_dimensions(problem)}")
        if conv.groups != 1:
            return Support.no(f"groups is {conv.groups}, only 1 is served")
        lowered = lower(conv, problem.spatial).single()
        if isinstance(lowered, Support):
            return lowered
        if max(conv.kernel_size) > row.max_filter_extent:
            return Support.no(
                f"kernel size {conv.kernel_size} exceeds {row.max_filter_extent} along an axis"
            )
        largest = max(self._sample_bytes(problem))
        filter_bytes = self._filter_elements(problem) * problem.dtype.itemsize
        if max(largest, filter_bytes) > row.max_tensor_bytes:
            return Support.no(
                f"a sample or the filter takes {max(largest, filter_bytes)} bytes, one launch "
                f"takes {row.max_tensor_bytes}"
            )
        return Support.yes()

    def _padded(self, channels: int) -> int:
        return _round_up(channels, self.row.alignment)

    def _sample_bytes(self, problem: ForwardProblem) -> tuple[int, int]:
        """Bytes of one sample of the channels-last input and of the convolution's output."""
        size = problem.dtype.itemsize
        return (
            math.prod(problem.spatial) * self._padded(problem.channels) * size,
            math.prod(problem.output_spatial) * self._padded(problem.output_channels) * size,
        )

    def _filter_elements(self, problem: ForwardProblem) -> int:
        assert problem.conv is not None
        return (
            self._padded(problem.channels)
            * self._padded(problem.output_channels)
            * math.prod(problem.conv.kernel_size)
        )

    # ---- what it costs ----

    def cost(self, problem: ForwardProblem, device: Device) -> float:
        row = self.row
        tile_m, tile_n, _ = row.tile
        assert problem.conv is not None
        chunk = self._chunk(problem)
        pixels = math.prod(problem.output_spatial)
        tiles_n = -(-self._padded(problem.output_channels) // tile_n)
        multiprocessors = max(1, device.multiprocessors)
        depth = self._padded(problem.channels) * math.prod(problem.conv.kernel_size)
        parts = self._parts(problem)
        waves = 0.0
        for samples, launches in launched_chunks(problem.batch, chunk):
            tiles = -(-samples * pixels // tile_m) * tiles_n * parts
            # Two blocks share a multiprocessor, so a last wave of half the size costs about half;
            # but one alone takes longer than half of what two take.
            waves += launches * max(
                _ALONE[row.dimensions], math.ceil(2 * tiles / multiprocessors) / 2
            )
        tile_flops = 2.0 * tile_m * tile_n * depth / parts
        # 3xTF32 counts the products that are asked for, at the rate of TF32.
        rate = device.fp16_flops if problem.dtype.itemsize == 2 else device.tf32_flops
        conv = waves * tile_flops * multiprocessors / (row.efficiency * rate) * 1e3
        launches = -(-problem.batch // chunk) * (5 if problem.norm is not None else 3)
        size = problem.dtype.itemsize
        moved = problem.minimal_bytes
        if not self._reads_input_directly(problem):
            moved += problem.input_elements * size
        # A part beyond the first reads and writes the sum so far.
        moved += 2 * problem.output_elements * size * ((problem.norm is not None) + parts - 1)
        if problem.layout == "strided":
            moved += 2 * problem.input_elements * size
        return conv + device.copy_milliseconds(moved) + device.launch_milliseconds * launches

    def _parts(self, problem: ForwardProblem) -> int:
        """Into how many the sum over taps and channels is cut."""
        assert problem.conv is not None
        channels = self._padded(problem.channels)
        depth = channels * math.prod(problem.conv.kernel_size)
        row = self.row
        return max(1, min(-(-depth // row.longest_sum), channels // row.tile[2], row.most_parts))

    # ---- how it runs ----

    def _chunk(self, problem: ForwardProblem) -> int:
        """Samples per pass over the steps: what fits the scratch limit, one at least."""
        input_bytes, output_bytes = self._sample_bytes(problem)
        scratch = output_bytes
        if not self._reads_input_directly(problem):
            scratch += input_bytes
        by_limit = self.row.max_tensor_bytes // max(input_bytes, output_bytes)
        by_scratch = CHUNK_BYTES // scratch if scratch else problem.batch
        return equal_chunk(problem.batch, min(by_limit, by_scratch))

    def compile(self, problem: ForwardProblem, device: Device) -> ProgramPlan:
        conv = problem.conv
        assert conv is not None
        lowered = lower(conv, problem.spatial).single()
        assert isinstance(lowered, Phase)
        size = problem.dtype.itemsize
        dtype = COMPILED_DTYPES[problem.dtype]
        c, k = problem.channels, problem.output_channels
        padded_c, padded_k = self._padded(c), self._padded(k)
        _, output_bytes = self._sample_bytes(problem)

        program = ForwardProgram(problem, device, self._chunk(problem))
        form = program.form
        filter = program.scratch(0, self._filter_elements(problem) * size)
        bias = program.scratch(0, padded_k * size) if form.bias else program.absent
        program.compiled.before(
            _C.layout.PackFilter(
                source=_C.FilterSource(
                    c=c, k=k, taps=lowered.taps, strides=five_strides(conv.weight_strides)
                ),
                padded_c=padded_c,
                padded_k=padded_k,
                dtype=dtype,
                round_tf32=self.takes_rounded,
                weight=program.weight,
                bias=program.bias,
                filter=filter,
                packed_bias=bias,
            )
        )
        input = program.input
        if not self._reads_input_directly(problem):
            input = program.channels_last_input(
                padded_channels=padded_c, round_tf32=self.takes_rounded
            )

        # A saved convolution output is kept as it is before the activation, which then moves into
        # the passes behind it.
        in_epilogue = "identity" if problem.saves_conv_output else form.before
        behind = form.before if problem.saves_conv_output else "identity"
        dense = problem.output_layout == "nhwc" and padded_k == k
        writes_output = (
            form.norm is None
            and not problem.saves_conv_output
            and dense
            and problem.output_dtype == problem.dtype
        )
        if writes_output:
            conv_output = program.output
        elif problem.saves_conv_output and dense:
            conv_output = program.conv_output
        else:
            conv_output = program.scratch(output_bytes)
        program.compiled.per_chunk(
            _C.sm80.Convolve(
                self.row,
                problem=conv_problem(lowered, padded_c, padded_k),
                activation=COMPILED[in_epilogue],
                input=input,
                filter=filter,
                bias=bias,
                output=conv_output,
            )
        )
        if problem.saves_conv_output and not dense:
            program.save_conv_output(conv_output, row_channels=padded_k)
        if not writes_output:
            program.normalise(
                conv_output, input_layout="nhwc", before=behind, row_channels=padded_k
            )
        return program.plan(self.name)


def kernels() -> list[Kernel]:
    if "sm80" not in FAMILIES:
        return [NotBuiltForward("sm80_conv", "cutlass_sm80")]
    return [CutlassSm80(row) for row in _C.sm80.rows()]
