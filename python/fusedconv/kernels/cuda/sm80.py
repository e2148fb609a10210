"""Transposed convolution on tensor cores through CUTLASS's mma.sync kernels (sm_80 and later).

A transposed convolution of stride 1 is lowered to a forward convolution on channels-last data; bias
and activation are the convolution's epilogue; the way back to the caller's layout is part of the
normalising pass. The batch is served in chunks, which bounds the memory between the steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fusedconv import _C
from fusedconv.kernels.cuda_program import (
    BIAS,
    CONTIGUOUS_STEP,
    CONV_OUTPUT,
    HAS_CUDA,
    INPUT,
    LAUNCH_MILLISECONDS,
    OUTPUT,
    WEIGHT,
    NotCompiled,
    ProgramPlan,
    add_conv_output_copy,
    add_group_norm,
    copy_milliseconds,
    five_strides,
    supports_cuda,
    supports_precision,
)
from fusedconv.lowering import ForwardConv, lower_unit_stride
from fusedconv.plan import Plan
from fusedconv.problem import ACTIVATION_CODES, DTYPE_CODES, LAYOUT_CODES, Problem
from fusedconv.registry import Kernel, Registry, Support

# The codes of fusedconv::conv::Math.
_TF32, _TF32_ROUNDED, _TF32X3, _F16, _BF16 = range(5)
_PRECISION_OF_MATH = {
    _TF32: "tf32",
    _TF32_ROUNDED: "tf32",
    _TF32X3: "fp32",
    _F16: "fp16",
    _BF16: "bf16",
}

#: Scratch that one chunk of samples may take. Measured on an H200: chunks small enough to stay in
#: L2 gain less than their short launches lose; chunks this large lose nothing and bound the memory.
CHUNK_BYTES = 2 << 30


@dataclass(frozen=True)
class _Row:
    """A compiled kernel's metadata, as ``_C.conv_rows()`` gives it."""

    index: int
    name: str
    family: str
    architecture: int
    dimensions: int
    math: int
    dtype: int
    tile: tuple[int, int, int]
    warps: int
    stages: int
    alignment: int
    shared_bytes: int
    max_filter_extent: int
    max_tensor_bytes: int
    #: Per second, of a full H200 on a large problem with bias and GELU. Other devices scale with
    #: their multiprocessors; only ratios decide.
    teraflops: int
    longest_sum: int
    most_parts: int


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def conv_dimensions(problem: Problem) -> int:
    """Spatial axes of the kernels that serve a problem: 1D runs as 2D with height 1."""
    return max(2, len(problem.spatial))


class CutlassSm80(Kernel):
    provider = "cutlass_sm80"

    def __init__(self, row: _Row) -> None:
        self.row = row
        self.name = row.name
        self.precision = _PRECISION_OF_MATH[row.math]

    # ---- what it serves ----

    def _reads_input_directly(self, problem: Problem) -> bool:
        """Whether the convolution reads the caller's tensor: channels last, whole vectors."""
        return (
            problem.layout == "nhwc"
            and problem.aligned
            and problem.channels % self.row.alignment == 0
            and self.row.math != _TF32_ROUNDED
        )

    def supports(self, problem: Problem) -> Support:
        row = self.row
        conv = problem.conv
        if conv is None:
            return Support.no("computes convolutions; the problem has none")
        common = supports_cuda(problem)
        if not common:
            return common
        precise = supports_precision(problem, self.precision)
        if not precise:
            return precise
        if conv_dimensions(problem) != row.dimensions:
            return Support.no(f"iterates {row.dimensions} axes, not {conv_dimensions(problem)}")
        if conv.groups != 1:
            return Support.no(f"groups is {conv.groups}, only 1 is served")
        lowered = lower_unit_stride(conv, problem.spatial)
        if isinstance(lowered, str):
            return Support.no(lowered)
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

    def _sample_bytes(self, problem: Problem) -> tuple[int, int]:
        """Bytes of one sample of the channels-last input and of the convolution's output."""
        size = problem.dtype.itemsize
        return (
            math.prod(problem.spatial) * self._padded(problem.channels) * size,
            math.prod(problem.output_spatial) * self._conv_row_channels(problem) * size,
        )

    def _conv_row_channels(self, problem: Problem) -> int:
        return self._padded(problem.output_channels)

    def _filter_elements(self, problem: Problem) -> int:
        assert problem.conv is not None
        return (
            self._padded(problem.channels)
            * self._padded(problem.output_channels)
            * math.prod(problem.conv.kernel_size)
        )

    # ---- what it costs ----

    def cost(self, problem: Problem) -> float:
        row = self.row
        tile_m, tile_n, _ = row.tile
        assert problem.conv is not None
        chunk = self._chunk(problem)
        pixels = math.prod(problem.output_spatial)
        tiles_n = -(-self._padded(problem.output_channels) // tile_n)
        slots = max(1, problem.multiprocessors)
        depth = self._padded(problem.channels) * math.prod(problem.conv.kernel_size)
        parts = self._parts(problem)
        waves = 0.0
        for samples, launches in _chunks(problem.batch, chunk):
            tiles = -(-samples * pixels // tile_m) * tiles_n * parts
            # Two blocks share a multiprocessor, so a last wave of half the size costs about half;
            # but one alone takes longer than half of what two take.
            waves += launches * max(_ALONE[row.dimensions], math.ceil(2 * tiles / slots) / 2)
        tile_flops = 2.0 * tile_m * tile_n * depth / parts
        conv = waves * tile_flops * _RATED_SLOTS / (row.teraflops * 1e12) * 1e3
        launches = -(-problem.batch // chunk) * (5 if problem.norm is not None else 3)
        size = problem.dtype.itemsize
        moved = problem.minimal_bytes
        if not self._reads_input_directly(problem):
            moved += problem.input_elements * size
        # A part beyond the first reads and writes the sum so far.
        moved += 2 * problem.output_elements * size * ((problem.norm is not None) + parts - 1)
        if problem.layout == "strided":
            moved += 2 * problem.input_elements * size
        return (
            conv + copy_milliseconds(moved, problem.architecture) + LAUNCH_MILLISECONDS * launches
        )

    def _parts(self, problem: Problem) -> int:
        """Into how many the sum over taps and channels is cut."""
        assert problem.conv is not None
        channels = self._padded(problem.channels)
        depth = channels * math.prod(problem.conv.kernel_size)
        row = self.row
        return max(1, min(-(-depth // row.longest_sum), channels // row.tile[2], row.most_parts))

    # ---- how it runs ----

    def _chunk(self, problem: Problem) -> int:
        """Samples per pass over the steps: what fits the scratch limit, one at least."""
        input_bytes, output_bytes = self._sample_bytes(problem)
        scratch = output_bytes
        if not self._reads_input_directly(problem):
            scratch += input_bytes
        by_limit = self.row.max_tensor_bytes // max(input_bytes, output_bytes)
        by_scratch = CHUNK_BYTES // scratch if scratch else problem.batch
        largest = max(1, min(problem.batch, by_limit, by_scratch))
        # Chunks of equal size: a short last one would leave the device half empty.
        return -(-problem.batch // -(-problem.batch // largest))

    def compile(self, problem: Problem) -> Plan:
        row = self.row
        conv = problem.conv
        assert conv is not None
        lowered = lower_unit_stride(conv, problem.spatial)
        assert isinstance(lowered, ForwardConv)
        size = problem.dtype.itemsize
        dtype = DTYPE_CODES[problem.dtype]
        rounded = row.math == _TF32_ROUNDED
        c, k = problem.channels, problem.output_channels
        padded_c, padded_k = self._padded(c), self._padded(k)
        conv_row = self._conv_row_channels(problem)
        input_bytes, output_bytes = self._sample_bytes(problem)

        program = _C.Program(problem.device_index, problem.batch, self._chunk(problem))
        steps = [CONTIGUOUS_STEP] if problem.layout == "strided" else []
        steps.append("pack filter" + (" (rounded to TF32)" if rounded else ""))
        filter = program.scratch(0, self._filter_elements(problem) * size)
        bias = program.scratch(0, padded_k * size) if conv.bias else _C.Operand()
        program.pack_filter(
            weight=program.tensor(WEIGHT, 0),
            bias=program.tensor(BIAS, 0) if conv.bias else _C.Operand(),
            filter=filter,
            packed_bias=bias,
            c=c,
            k=k,
            taps=lowered.taps,
            padded_c=padded_c,
            padded_k=padded_k,
            strides=five_strides(conv.weight_strides),
            dtype=dtype,
            round_tf32=rounded,
        )

        input = program.tensor(INPUT, c * math.prod(problem.spatial) * size)
        if not self._reads_input_directly(problem):
            source = "nhwc" if problem.layout == "nhwc" else "nchw"
            channels_last = program.scratch(input_bytes)
            program.to_channels_last(
                input=input,
                output=channels_last,
                channels=c,
                padded_channels=padded_c,
                pixels=math.prod(problem.spatial),
                source=LAYOUT_CODES[source],
                dtype=dtype,
                round_tf32=rounded,
            )
            input = channels_last
            how = "rounded to TF32" if rounded else "copied"
            steps.append(f"input {source} -> nhwc, {how}, channels {c} -> {padded_c}")

        # A saved convolution output is kept as it is before the activation, which then moves into
        # the passes behind it.
        in_epilogue = "identity" if problem.save else problem.activation_before
        behind = problem.activation_before if problem.save else "identity"
        dense = problem.output_layout == "nhwc" and padded_k == k
        writes_output = (
            problem.norm is None
            and not problem.save
            and dense
            and problem.output_dtype == problem.dtype
        )
        if writes_output:
            conv_output = program.tensor(OUTPUT, output_bytes)
        elif problem.save and dense:
            conv_output = program.tensor(CONV_OUTPUT, output_bytes)
        else:
            conv_output = program.scratch(output_bytes)
        program.convolution(
            row=row.index,
            input=input,
            filter=filter,
            bias=bias,
            output=conv_output,
            c=padded_c,
            k=padded_k,
            input_extent=lowered.input,
            output_extent=lowered.output,
            taps=lowered.taps,
            lower_padding=lowered.lower_padding,
            dilation=lowered.dilation,
            activation=ACTIVATION_CODES[in_epilogue],
        )
        epilogue = [
            part for part in ("bias" * conv.bias, in_epilogue) if part not in ("", "identity")
        ]
        steps.append(f"{row.name}" + (f" + {' + '.join(epilogue)}" if epilogue else ""))
        if problem.save and not dense:
            steps.append(add_conv_output_copy(program, problem, conv_output, row_channels=conv_row))
        if not writes_output:
            steps += add_group_norm(
                program,
                problem,
                conv_output,
                layout="nhwc",
                row_channels=conv_row,
                activation_before=behind,
            )
        if program.chunk < problem.batch:
            steps.append(f"steps after the first repeat for chunks of {program.chunk} samples")
        return ProgramPlan(
            self.name,
            tuple(steps),
            problem,
            program,
            problem.device_index,
        )


def _chunks(batch: int, chunk: int) -> list[tuple[int, int]]:
    """(samples, how many launches of that size)."""
    full, rest = divmod(batch, chunk)
    return [
        (samples, count) for samples, count in ((chunk, full), (rest, 1 if rest else 0)) if count
    ]


#: What a block alone on its multiprocessor takes, in waves, by spatial axes; measured on an H200.
_ALONE = {2: 1.5, 3: 2.6}

#: Multiprocessors of the device to which the rows' rates belong.
_RATED_SLOTS = 132


def _rows() -> list[_Row]:
    if not HAS_CUDA:
        return []
    raw: list[dict[str, Any]] = _C.conv_rows()
    return [_Row(**fields) for fields in raw if fields["family"] == "sm80"]


def register(registry: Registry) -> None:
    if not HAS_CUDA:
        registry.register(NotCompiled("sm80_conv", "cutlass_sm80"))
    for row in _rows():
        registry.register(CutlassSm80(row))
