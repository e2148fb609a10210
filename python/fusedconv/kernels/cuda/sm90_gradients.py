"""Gradients of a transposed convolution of stride 1 on Hopper (sm_90a), channels first.

The input's gradient is a convolution of the output's gradient with the filter read backwards and
its channel axes swapped, which the rows of ``sm90_runs`` compute. The weight's gradient is a sum
over positions, in a fixed number of parts that are added in a fixed order: the same bits on every
device. Both read tensors whose lines begin at multiples of 16 bytes; others are padded first, and
the bias's gradient is summed on the way. All of them share one padded output gradient.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusedconv import _C
from fusedconv.device import Device
from fusedconv.kernels.compiled import CONTIGUOUS_STEP, conv_problem
from fusedconv.kernels.cuda.program import (
    FAMILIES,
    INPUT,
    OUTPUT,
    WEIGHT,
    ForwardProgram,
    NotBuiltBackward,
    run_program,
    supports_forward,
    supports_only,
    supports_precision,
)
from fusedconv.kernels.cuda.sm90 import only_phase
from fusedconv.kernels.cuda.sm90_runs import RunsSm90
from fusedconv.layout import LINE_BYTES, dense, lies_in_lines, line_pitch
from fusedconv.plan import BackwardKernel, BackwardPlan, BackwardTensors, Gradients, Kernel
from fusedconv.precision import COMPILED_DTYPES
from fusedconv.problem import BackwardProblem, Bias, ConvTransposeGeometry, ForwardProblem
from fusedconv.support import Support

# Slots of a program's pointers beside those of a forward pass: the convolution of the output's
# gradient takes INPUT, WEIGHT and OUTPUT.
CONV_INPUT, GRAD_WEIGHT, GRAD_BIAS = range(9, 12)


@dataclass(frozen=True)
class CostConstants:
    """What the estimate of the weight's gradient multiplies, in cycles of a multiprocessor."""

    #: A line of a whole strip for one filter tap, on the tensor cores.
    tap: float
    #: A byte that lands in shared memory, where products take less.
    staged_byte: float
    #: What a block costs beside its lines, in lines.
    block_lines: float


#: Measured on an H200: both systems' convolutions, and planes of 14 to 56 squared.
COSTS = CostConstants(tap=174.0, staged_byte=0.07, block_lines=20.0)


@functools.lru_cache(maxsize=1024)
def input_convolution(forward: ForwardProblem) -> ForwardProblem | Support:
    """The transposed convolution that takes the output's gradient to the input's, over dense NCHW;
    its weight strides are those of the filter read backwards, from its last tap. Refuses what is
    no such convolution."""
    conv = forward.conv
    assert conv is not None
    if set(conv.stride) != {1}:
        return Support.no(f"stride is {conv.stride}, only 1 is served")
    if forward.output_layout != "nchw":
        return Support.no("reads NCHW; the input is channels last")
    padding = tuple(
        dilation * (kernel - 1) - pad
        for kernel, pad, dilation in zip(conv.kernel_size, conv.padding, conv.dilation, strict=True)
    )
    if min(padding) < 0:
        return Support.no(f"padding {conv.padding} exceeds dilation (kernel - 1)")
    inputs, outputs, *taps = conv.weight_strides
    backwards = ConvTransposeGeometry(
        in_channels=conv.out_channels,
        out_channels=conv.in_channels,
        kernel_size=conv.kernel_size,
        stride=conv.stride,
        padding=padding,
        output_padding=(0,) * len(padding),
        dilation=conv.dilation,
        groups=conv.groups,
        weight_strides=(outputs, inputs, *(-stride for stride in taps)),
    )
    return ForwardProblem(
        dtype=forward.dtype,
        output_dtype=forward.dtype,
        precision=forward.precision,
        layout="nchw",
        aligned=True,
        batch=forward.batch,
        channels=conv.out_channels,
        spatial=forward.output_spatial,
        conv=backwards,
    )


def _lines(
    batch: int, channels: int, spatial: tuple[int, ...], dtype: torch.dtype, pitch: int
) -> Any:
    """A tensor [batch, channels, *spatial] as lines along its last axis."""
    return _C.layout.LinesProblem(
        batch=batch,
        channels=channels,
        lines=math.prod(spatial[:-1]),
        columns=spatial[-1],
        pitch=pitch,
        dtype=COMPILED_DTYPES[dtype],
    )


@functools.lru_cache(maxsize=4096)
def _weight_config(row: int, forward: ForwardProblem, device: Device) -> Any:
    room = _C.sm90.wgrad
    return room.Config(
        room.rows()[row],
        problem=conv_problem(only_phase(forward), forward.channels, forward.output_channels),
        batch=forward.batch,
        layout=_C.Layout[forward.output_layout],
        device=device.compiled,
    )


class GradientsSm90(BackwardKernel):
    """One way to form products: rows that convolve the output's gradient, and the indices of rows
    of the weight's gradient, if it has any."""

    provider = "gradients_sm90"

    def __init__(self, math: Any, input_rows: list[RunsSm90], weight_rows: list[int]) -> None:
        traits = _C.math_traits(math)
        self.name = f"sm90_gradients_{traits.name}"
        self.precision: str = traits.precision
        self.computes = frozenset({"input", "bias"} | ({"weight"} if weight_rows else set()))
        self._input_rows = input_rows
        self._weight_rows = weight_rows

    def input_row(self, problem: BackwardProblem, device: Device) -> RunsSm90 | Support:
        """The row that computes the input's gradient."""
        convolution = input_convolution(problem.forward)
        if isinstance(convolution, Support):
            return convolution
        support = Support.no("no row convolves the output's gradient")
        for row in self._input_rows:
            support = row.supports(convolution, device)
            if not support:
                continue
            if row.chunk(convolution, row.config(convolution, device)) < problem.forward.batch:
                return Support.no("the batch has more tiles than one launch takes")
            return row
        return support

    def weight_config(self, problem: BackwardProblem, device: Device) -> Any:
        """Of the row that computes the weight's gradient, where its ``support`` says so."""
        configs = [_weight_config(row, problem.forward, device) for row in self._weight_rows]
        return next((config for config in configs if config.support), configs[-1])

    def supports(self, problem: BackwardProblem, device: Device) -> Support:
        convolution = input_convolution(problem.forward)
        if isinstance(convolution, Support):
            return convolution
        for support in (
            supports_forward(convolution, device),
            supports_only(device, 90),
            supports_precision(convolution, self.precision),
        ):
            if not support:
                return support
        assert convolution.conv is not None
        if convolution.conv.groups != 1:
            return Support.no(f"groups is {convolution.conv.groups}, only 1 is served")
        if "input" in problem.gradients:
            row = self.input_row(problem, device)
            if isinstance(row, Support):
                return row
        if "weight" in problem.gradients:
            return Support.of(self.weight_config(problem, device).support)
        return Support.yes()

    def cost(self, problem: BackwardProblem, device: Device) -> float:
        return self.estimate(problem, device, COSTS)

    def estimate(self, problem: BackwardProblem, device: Device, costs: CostConstants) -> float:
        """Milliseconds of a supported problem, were the constants these."""
        forward, gradients = problem.forward, problem.gradients
        size = forward.dtype.itemsize
        total = device.launch_milliseconds  # of one plan, however many parts it computes
        # The gradient of a normalisation comes with padded lines.
        pads = pads_grad(problem) and forward.norm is None
        if pads or "bias" in gradients:
            passes = 1 + pads
            total += device.copy_milliseconds(passes * forward.output_elements * size)
            total += 2 * device.launch_milliseconds
        if pads_input(problem):
            total += device.copy_milliseconds(2 * forward.input_elements * size)
            total += device.launch_milliseconds
        if "input" in gradients:
            row = self.input_row(problem, device)
            convolution = input_convolution(forward)
            assert isinstance(row, RunsSm90) and isinstance(convolution, ForwardProblem)
            total += row.cost(convolution, device)
        if "weight" in gradients:
            config = self.weight_config(problem, device)
            assert forward.conv is not None
            taps = math.prod(forward.conv.kernel_size[-2:])
            tap = costs.tap * config.halves / 2
            line = max(taps * tap, config.stage_bytes * costs.staged_byte)
            blocks = config.tasks * config.splits
            waves = math.ceil(blocks / max(1, device.multiprocessors))
            lines = waves * (math.ceil(config.steps / config.splits) + costs.block_lines)
            total += lines * line * 1e3 / device.clock_hertz
            total += device.copy_milliseconds(2 * config.partial_bytes)
            total += 3 * device.launch_milliseconds
        return total

    def compile(self, problem: BackwardProblem, device: Device) -> GradientsSm90Plan:
        return GradientsSm90Plan(self, problem, device)

    def build(self, problem: BackwardProblem, device: Device, *, in_lines: bool) -> _C.Program:
        """The program over tensors in the order of the slots. The output's gradient lies in padded
        lines, or is dense and padded where that is needed."""
        forward, gradients = problem.forward, problem.gradients
        convolution = input_convolution(forward)
        assert isinstance(convolution, ForwardProblem)
        program = ForwardProgram(convolution, device)
        compiled, absent = program.compiled, program.absent
        columns = forward.output_spatial[-1]
        grad_lines = _lines(
            forward.batch,
            forward.output_channels,
            forward.output_spatial,
            forward.dtype,
            line_pitch(columns, forward.dtype) if in_lines else columns,
        )
        pads = pads_grad(problem) and not in_lines
        grad = program.input
        if pads:
            program.input = program.scratch(grad_lines.sample_bytes)
        sums = absent
        if "bias" in gradients:
            sums = program.scratch(0, grad_lines.sums().bytes)
        if pads or sums.present:
            compiled.per_chunk(
                _C.layout.PadLines(
                    "the output's gradient",
                    problem=grad_lines,
                    input=grad,
                    output=program.input if pads else absent,
                    sums=sums,
                )
            )
        if sums.present:
            compiled.per_chunk(
                _C.layout.AddSums(
                    "gradient of bias",
                    problem=grad_lines.sums(),
                    sums=sums,
                    totals=compiled.tensor(GRAD_BIAS, 0),
                )
            )
        if "input" in gradients:
            row = self.input_row(problem, device)
            assert isinstance(row, RunsSm90)
            row.convolve(program, row.config(convolution, device), program.output)
        if "weight" in gradients:
            self._add_weight_steps(program, problem, device)
        return compiled

    def _add_weight_steps(
        self, program: ForwardProgram, problem: BackwardProblem, device: Device
    ) -> None:
        """Appends what computes the weight's gradient from the program's input, the output's
        gradient with padded lines."""
        forward, compiled = problem.forward, program.compiled
        sample = forward.channels * math.prod(forward.spatial) * forward.dtype.itemsize
        given = compiled.tensor(CONV_INPUT, sample)
        if pads_input(problem):
            lines = _lines(
                forward.batch,
                forward.channels,
                forward.spatial,
                forward.dtype,
                forward.spatial[-1],
            )
            padded = program.scratch(lines.sample_bytes)
            compiled.per_chunk(
                _C.layout.PadLines(
                    "the input", problem=lines, input=given, output=padded, sums=program.absent
                )
            )
            given = padded
        config = self.weight_config(problem, device)
        partials = program.scratch(0, config.partial_bytes)
        room = _C.sm90.wgrad
        compiled.per_chunk(
            room.SumProducts(config, input=given, grad_output=program.input, partials=partials)
        )
        compiled.per_chunk(
            room.AddPartials(config, partials=partials, grad_weight=compiled.tensor(GRAD_WEIGHT, 0))
        )


def _begin_apart(problem: BackwardProblem, columns: int) -> bool:
    """Whether lines of a dense tensor do not all begin at multiples of 16 bytes."""
    return not problem.aligned or line_pitch(columns, problem.forward.dtype) != columns


def pads_grad(problem: BackwardProblem) -> bool:
    """Whether the lines of the output's gradient are padded first, where it is dense."""
    return bool(problem.gradients & {"input", "weight"}) and _begin_apart(
        problem, problem.forward.output_spatial[-1]
    )


def pads_input(problem: BackwardProblem) -> bool:
    """Whether the lines of the input are padded first."""
    return "weight" in problem.gradients and _begin_apart(problem, problem.forward.spatial[-1])


class GradientsSm90Plan(BackwardPlan):
    """One program for an output gradient in padded lines, and one for a dense one; what is not
    contiguous NCHW is copied to it first."""

    def __init__(self, kernel: GradientsSm90, problem: BackwardProblem, device: Device) -> None:
        conv = problem.forward.conv
        assert conv is not None
        self.kernel = kernel.name
        self.problem = problem
        self._kernel = kernel
        self._device = device
        self._programs: dict[bool, _C.Program] = {}
        self.pads_lines = pads_grad(problem)
        self._describe(in_lines=False)
        # Where reading the filter backwards begins, in elements.
        self._last_tap = sum(
            (extent - 1) * stride
            for extent, stride in zip(conv.kernel_size, conv.weight_strides[2:], strict=True)
        )

    def _program(self, in_lines: bool) -> _C.Program:
        if in_lines not in self._programs:
            program = self._kernel.build(self.problem, self._device, in_lines=in_lines)
            self._programs[in_lines] = program
        return self._programs[in_lines]

    def _describe(self, *, in_lines: bool) -> None:
        problem = self.problem
        forward = problem.forward
        behind = [stage for stage in forward.epilogue if not isinstance(stage, Bias)]
        copies = []
        if problem.grad_layout != "nchw" and not behind:
            copies.append("torch copy of the output's gradient to nchw")
        if "weight" in problem.gradients and forward.layout == "strided":
            copies.append(CONTIGUOUS_STEP)
        self.steps = (*copies, *self._program(in_lines).steps)

    def take_padded_lines(self) -> None:
        self._describe(in_lines=True)

    def run(self, tensors: BackwardTensors) -> Gradients:
        forward, wanted = self.problem.forward, self.problem.gradients
        grad = tensors.of_convolution.to(forward.dtype)
        if not lies_in_lines(grad):
            grad = dense(grad, "nchw")
        weight = tensors.weight
        assert weight is not None
        grad_input = grad_weight = grad_bias = x = last_tap = None
        if "input" in wanted:
            last_tap = weight.as_strided((), (), weight.storage_offset() + self._last_tap)
            grad_input = grad.new_empty(forward.input_shape)
        if "weight" in wanted:
            x = dense(tensors.input, "nchw")
            if x.data_ptr() % LINE_BYTES:  # tensor maps read it where it is not padded
                x = x.clone()
            grad_weight = grad.new_empty(weight.shape)
        if "bias" in wanted:
            grad_bias = grad.new_empty(forward.output_channels)
        slots: list[Tensor | None] = [None] * (GRAD_BIAS + 1)
        slots[INPUT], slots[WEIGHT], slots[OUTPUT] = grad, last_tap, grad_input
        slots[CONV_INPUT], slots[GRAD_WEIGHT], slots[GRAD_BIAS] = x, grad_weight, grad_bias
        run_program(self._program(lies_in_lines(grad)), self._device, slots, grad)
        return Gradients(input=grad_input, weight=grad_weight, bias=grad_bias)


def kernels() -> list[Kernel]:
    if "sm90" not in FAMILIES:
        return [NotBuiltBackward("sm90_gradients", GradientsSm90.provider)]
    runs, weights = _C.sm90.runs, _C.sm90.wgrad.rows()
    maths = dict.fromkeys(row.math for row in runs.rows())
    return [
        GradientsSm90(
            math,
            [
                RunsSm90(runs, index, row, padded_lines=True)
                for index, row in enumerate(runs.rows())
                if row.math == math
            ],
            [index for index, row in enumerate(weights) if row.math == math],
        )
        for math in maths
    ]
