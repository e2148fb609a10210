"""What the CUDA providers share: plans that are one compiled program of steps."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from fusedconv import _C
from fusedconv.device import Device
from fusedconv.kernels.compiled import (
    CONTIGUOUS_STEP,
    address,
    group_norm_problem,
)
from fusedconv.layout import dense_strides
from fusedconv.norms import KINDS
from fusedconv.noting import Notes, current, note_run
from fusedconv.plan import ForwardPlan, Outputs
from fusedconv.precision import COMPILED_DTYPES
from fusedconv.problem import (
    ActNormAct,
    ForwardProblem,
    act_norm_act,
)

logger = logging.getLogger("fusedconv")

try:
    # The stream's address without building a Stream object; private, so the public way stays.
    from torch._C import _cuda_getCurrentRawStream

    raw_stream: Callable[[int], int] = _cuda_getCurrentRawStream
except ImportError:

    def raw_stream(device: int) -> int:
        return int(torch.cuda.current_stream(device).cuda_stream)


_empty_on_current: Any = None
try:
    from torch._C import _cuda_getDevice as _current_device
    from torch._C._dynamo import guards as _compiler

    # What torch.compile's code allocates with, in half the time of torch.empty_strided.
    _empty_on_current = getattr(_compiler, "_empty_strided_cuda", None)
except ImportError:  # private names, which may move
    pass


def allocator(device: torch.device) -> Callable[..., Tensor]:
    """``torch.empty_strided`` of shape, strides and dtype, on a CUDA device that has an index."""
    notes = current.notes
    if notes is None:
        return _allocator(device)
    return _noted(_allocator(device), notes)


def _noted(empty: Callable[..., Tensor], notes: Notes) -> Callable[..., Tensor]:
    def noted(*how: Any) -> Tensor:
        tensor = empty(*how)
        notes.allocated.append(tensor)
        return tensor

    return noted


def _allocator(device: torch.device) -> Callable[..., Tensor]:
    if _empty_on_current is not None and _current_device() == device.index:
        current: Callable[..., Tensor] = _empty_on_current
        return current

    def empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    return empty


# Slots of the pointers that a forward program's run() gets, in this order.
INPUT, WEIGHT, BIAS, NORM_WEIGHT, NORM_BIAS, OUTPUT, CONV_OUTPUT, MEAN, RSTD = range(9)


def equal_chunk(batch: int, most: int) -> int:
    """Samples of a batch chunk, at most ``most`` but one at least; chunks are of equal size, as a
    short last one would leave the device half empty."""
    largest = max(1, min(batch, most))
    return -(-batch // -(-batch // largest))


def launched_chunks(batch: int, chunk: int) -> list[tuple[int, int]]:
    """(samples, how many chunks of that size)."""
    full, rest = divmod(batch, chunk)
    return [(size, n) for size, n in ((chunk, full), (rest, 1 if rest else 0)) if n]


def five_strides(strides: tuple[int, ...]) -> tuple[int, ...]:
    """A weight's strides [C, K, *kernel] with zeros for the leading axes that it lacks."""
    return (*strides[:2], *(0,) * (5 - len(strides)), *strides[2:])


def lines_problem(
    batch: int, channels: int, spatial: tuple[int, ...], dtype: torch.dtype, pitch: int
) -> Any:
    """A tensor [batch, channels, *spatial] as lines along its last axis, ``pitch`` elements from
    each to the next."""
    return _C.layout.LinesProblem(
        batch=batch,
        channels=channels,
        lines=math.prod(spatial[:-1]),
        columns=spatial[-1],
        pitch=pitch,
        dtype=COMPILED_DTYPES[dtype],
    )


class ForwardProgram:
    """A program under construction, with the operands that forward passes have by name."""

    def __init__(self, problem: ForwardProblem, device: Device, batch_chunk: int = 0) -> None:
        form = act_norm_act(problem.epilogue, frozenset(KINDS))
        assert isinstance(form, ActNormAct)
        self.problem = problem
        self.device = device
        self.form = form
        self.compiled = _C.Program(device.index, problem.batch, batch_chunk)
        self.absent = _C.Operand()
        self.groups = problem.norm_groups
        #: Of the convolution's output, as what comes behind reads it.
        self.conv_layout: str = problem.output_layout
        #: Channels of its pixels in memory, where they are padded; 0 for the problem's.
        self.conv_row_channels = 0
        size = problem.dtype.itemsize
        output = problem.output_channels * math.prod(problem.output_spatial)
        tensor = self.compiled.tensor
        self.input = tensor(INPUT, problem.channels * math.prod(problem.spatial) * size)
        self.weight = tensor(WEIGHT, 0)
        self.bias = tensor(BIAS, 0) if form.bias else self.absent
        self.norm_weight = tensor(NORM_WEIGHT, 0)
        self.norm_bias = tensor(NORM_BIAS, 0)
        self.output = tensor(OUTPUT, output * problem.output_dtype.itemsize)
        saves_conv = problem.saves_conv_output
        self.conv_output = tensor(CONV_OUTPUT, output * size) if saves_conv else self.absent
        saves_moments = problem.save and self.groups > 0
        self.mean = tensor(MEAN, 4 * self.groups) if saves_moments else self.absent
        self.rstd = tensor(RSTD, 4 * self.groups) if saves_moments else self.absent

    def scratch(self, bytes_per_sample: int, num_bytes: int = 0) -> _C.Operand:
        return self.compiled.scratch(bytes_per_sample, num_bytes)

    def padded_input(
        self, input: _C.Operand, channels: int, spatial: tuple[int, ...]
    ) -> _C.Operand:
        """Appends what pads the lines of a dense tensor [N, channels, *spatial], the convolution's
        input, to whole 16 bytes; where they lie."""
        lines = lines_problem(
            self.problem.batch, channels, spatial, self.problem.dtype, spatial[-1]
        )
        padded = self.scratch(lines.sample_bytes)
        self.compiled.per_chunk(
            _C.layout.PadLines(
                "the input", problem=lines, input=input, output=padded, sums=self.absent
            )
        )
        return padded

    def channels_last_input(
        self, *, padded_channels: int = 0, round_tf32: bool = False
    ) -> _C.Operand:
        """Appends what transposes the problem's input to channels last, each pixel's channels
        padded with zeros to ``padded_channels``, and rounds it to TF32 if asked; where it lies."""
        problem = self.problem
        padded = padded_channels or problem.channels
        pixels = math.prod(problem.spatial)
        transposed = self.scratch(pixels * padded * problem.dtype.itemsize)
        self.compiled.per_chunk(
            _C.layout.ToChannelsLast(
                channels=problem.channels,
                padded_channels=padded,
                pixels=pixels,
                source=_C.Layout[problem.output_layout],
                dtype=COMPILED_DTYPES[problem.dtype],
                round_tf32=round_tf32,
                input=self.input,
                output=transposed,
            )
        )
        return transposed

    def statistics(self) -> _C.Operand:
        """Scratch between a step that fills statistics and one that normalises; absent without."""
        if not self.groups:
            return self.absent
        return self.scratch(_C.group_norm.statistics_bytes(self.groups))

    def normalise(
        self, input: _C.Operand, *, input_layout: str, before: str, row_channels: int = 0
    ) -> None:
        """Appends the passes from a dense tensor to the output, ``before`` the activation in front.

        Without a normalisation only activation, layout and dtype change.
        """
        form = ActNormAct(False, before, self.form.norm, self.form.after)
        problem = group_norm_problem(
            self.problem,
            form,
            input_layout=input_layout,
            output_layout=self.problem.output_layout,
            row_channels=row_channels,
        )
        statistics = self.statistics()
        if self.groups:
            self.compiled.per_chunk(
                _C.group_norm.Moments(
                    problem=problem,
                    input=input,
                    statistics=statistics,
                    mean=self.mean,
                    rstd=self.rstd,
                )
            )
        self.compiled.per_chunk(
            _C.group_norm.Normalize(
                problem=problem,
                input=input,
                statistics=statistics,
                weight=self.norm_weight,
                bias=self.norm_bias,
                output=self.output,
                name=self.affine_name,
            )
        )

    @property
    def affine_name(self) -> str:
        """Of a step that applies an affine map of channels; "" of one that normalises by
        statistics, which names itself."""
        norm, after = self.form.norm, self.form.after
        if norm is None or self.groups:
            return ""
        return str(norm) if after == "identity" else f"{norm} + {after}"

    def save_conv_output(self, conv_output: _C.Operand, *, row_channels: int) -> None:
        """Appends the pass that saves a channels-last convolution output in the caller's layout."""
        name = "save the convolution's output"
        self.transpose(conv_output, self.conv_output, row_channels=row_channels, name=name)

    def transpose(
        self, input: _C.Operand, output: _C.Operand, *, row_channels: int, name: str = ""
    ) -> None:
        """Appends the pass that copies a channels-last convolution output to the caller's layout;
        ``name`` is the step's, for a person."""
        problem = self.problem
        self.compiled.per_chunk(
            _C.group_norm.Normalize(
                problem=group_norm_problem(
                    problem,
                    ActNormAct(False, "identity", None, "identity"),
                    input_layout="nhwc",
                    output_layout=problem.output_layout,
                    output_dtype=problem.dtype,
                    row_channels=row_channels,
                ),
                input=input,
                statistics=self.absent,
                weight=self.absent,
                bias=self.absent,
                output=output,
                name=name,
            )
        )

    def plan(self, kernel: str) -> ProgramPlan:
        return ProgramPlan(kernel, self)


class ProgramPlan(ForwardPlan):
    """A plan whose steps are one ``_C.Program``: allocate, pass addresses, launch."""

    only_launches = True

    def __init__(self, kernel: str, program: ForwardProgram) -> None:
        problem = program.problem
        compiled = program.compiled
        self.kernel = kernel
        self._contiguous_input = problem.layout == "strided"
        copies = (CONTIGUOUS_STEP,) if self._contiguous_input else ()
        self.steps = (*copies, *compiled.steps)
        # Steps and operands live as long as the program.
        self._program = compiled
        self._device = torch.device("cuda", program.device.index)
        # As an allocator takes what is returned; None for what is not.
        strides = dense_strides(problem.output_shape, problem.output_layout)
        self._output = problem.output_shape, strides, problem.output_dtype
        self._conv_output = self._statistics = None
        if problem.saves_conv_output:
            self._conv_output = problem.output_shape, strides, problem.dtype
        if problem.save and program.groups:
            self._statistics = (problem.batch, program.groups), (program.groups, 1), torch.float32

    def run(
        self,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        residual: Tensor | None = None,
    ) -> Outputs:
        empty = allocator(self._device)
        if self._contiguous_input:
            input = input.contiguous()
        if norm_weight is not None and not norm_weight.is_contiguous():
            norm_weight = norm_weight.contiguous()
        if norm_bias is not None and not norm_bias.is_contiguous():
            norm_bias = norm_bias.contiguous()
        if bias is not None and not bias.is_contiguous():
            bias = bias.contiguous()
        output = empty(*self._output)
        conv_output = mean = rstd = None
        if self._conv_output is not None:
            conv_output = empty(*self._conv_output)
        if self._statistics is not None:
            mean, rstd = empty(*self._statistics), empty(*self._statistics)
        tensors = (input, weight, bias, norm_weight, norm_bias, output, conv_output, mean, rstd)
        run_program(self._program, self._device, tensors)
        return Outputs(output, conv_output, mean, rstd)


def run_program(
    program: _C.Program, device: torch.device, tensors: Sequence[Tensor | None]
) -> None:
    """Runs a program on tensors in the order of its slots, with a workspace of its own."""
    workspace = None
    num_bytes: int = program.workspace_bytes
    if num_bytes:
        workspace = _allocator(device)((num_bytes,), (1,), torch.uint8)
    if current.notes is not None:
        note_run(program, tensors, num_bytes)
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    if profiler._is_profiler_enabled:
        _stop_replays()
    program.run(addresses, address(workspace), raw_stream(device.index))


@functools.cache
def _stop_replays() -> None:
    """For good: a process has ended in a crash where a graph of its own was launched under a later
    session of torch's profiler (CUDA 13.0), whose warm-up nothing tells of."""
    _C.stop_replays()
    logger.info("torch's profiler records: from here on no launches are replayed as CUDA graphs")
