"""Gradients of a transposed convolution on Hopper (sm_90a).

The input's gradient is a convolution of the output's gradient with the filter read backwards and
its channel axes swapped, which the rows of ``sm90_runs`` and ``strips_sm90`` compute. The weight's
gradient is a sum over positions (``sm90_weight``). Both read tensors whose lines begin at multiples
of 16 bytes; others are padded first, and the bias's gradient is summed on the way. All of them
share one padded output gradient. Where there is a stride, it is split into planes of the stride's
phases, as ``phase_planes`` has it, and all else is as with stride 1. Channels last is transposed to
channels first, and back.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fusedconv import _C
from fusedconv.device import Device
from fusedconv.kernels.compiled import CONTIGUOUS_STEP
from fusedconv.kernels.cuda.conditions import (
    FAMILIES,
    SHORTEST_STRICT_SUM,
    NotBuiltBackward,
    supports_forward,
    supports_precision,
)
from fusedconv.kernels.cuda.gradient_tensors import (
    GradForm,
    asks_for_lines,
    comes_in_lines,
    copies_to_channels_last,
    grad_form,
    grad_layout,
    pads_grad,
    pads_input,
    read_spatial,
    reads_channels_last,
    sample_bytes,
    splits_grad,
    transposed_elements,
    writes_channels_last,
)
from fusedconv.kernels.cuda.phase_planes import (
    Summed,
    holds_all,
    input_convolution,
    is_strided,
    pack_phases,
    split,
    split_milliseconds,
)
from fusedconv.kernels.cuda.program import (
    INPUT,
    OUTPUT,
    WEIGHT,
    ForwardProgram,
    allocator,
    lines_problem,
    run_program,
)
from fusedconv.kernels.cuda.sm90_runs import COSTS as RUN_COSTS
from fusedconv.kernels.cuda.sm90_runs import CostConstants as RunCostConstants
from fusedconv.kernels.cuda.sm90_runs import RunsSm90
from fusedconv.kernels.cuda.sm90_weight import WeightSm90
from fusedconv.kernels.cuda.strips_sm90 import StripsSm90
from fusedconv.kernels.cuda.transposing import (
    has_whole_vectors,
    transpose_to_channels_last,
    transposed_to_channels_first,
)
from fusedconv.layout import (
    LINE_BYTES,
    dense,
    dense_strides,
    layout_of,
    lies_in_lines,
    line_pitch,
    line_strides,
)
from fusedconv.plan import BackwardKernel, BackwardPlan, BackwardTensors, Gradients, Kernel
from fusedconv.problem import BackwardProblem, ForwardProblem
from fusedconv.support import Support

# Slots of a program's pointers beside those of a forward pass: the convolution of the output's
# gradient takes INPUT, WEIGHT and OUTPUT.
CONV_INPUT, GRAD_WEIGHT, GRAD_BIAS = range(9, 12)

#: Taps of a filter for planes, most of them zeros, over the weight's: sums of fewer products are
#: added more often than eager adds them, which strict fp32 shows.
MOST_STRICT_ZEROS = 2.5
#: Positions that the weight's gradient sums from which on strict fp32 is as exact as eager. What
#: the tensor core drops leaves an error of up to 1.4e-7, in sums of 12 to 2048 alike; eager's
#: grows with their length: where ours was furthest above it, it was 0.5e-7 to 0.9e-7 in sums of up
#: to 512, 1e-7 beyond.
SHORTEST_STRICT_POSITIONS = 512

#: For a person.
_GRAD_NAME = "the output's gradient"


@dataclass(frozen=True)
class CostConstants:
    """What the estimate of the gradients multiplies."""

    #: An element of the weight and of its gradient, which are not read and written in order, in
    #: cycles of a multiprocessor.
    scattered: float
    #: Transposing a tensor between the layouts, times what copying it takes.
    transposing: float


#: Measured on an H200: both systems' convolutions, planes of 14 to 56 squared, and 18 strided
#: layers, most of them of real models.
COSTS = CostConstants(scattered=4.0, transposing=1.4)
#: What a copy by torch takes of the host beside its pass over memory, in launches: it is an
#: operator by itself, and what is around it no longer is one launch when it is repeated.
COPY_HOST = 8.0
#: Of the register runs over planes of a stride's phases, whose bytes all multiprocessors get faster
#: than the forward pass's: from the same layers.
PLANE_COSTS = dataclasses.replace(RUN_COSTS, crowded_byte=0.053)


def _run_costs(problem: BackwardProblem) -> RunCostConstants:
    """Of the convolution of the output's gradient, or of its planes."""
    return PLANE_COSTS if splits_grad(problem) else RUN_COSTS


class GradientsSm90(BackwardKernel):
    """One way to form products: rows that convolve the output's gradient, and how the weight's
    gradient is summed."""

    provider = "gradients_sm90"
    computes = frozenset({"input", "weight", "bias"})

    def __init__(self, math: Any, input_rows: list[RunsSm90]) -> None:
        traits = _C.math_traits(math)
        self.name = f"sm90_gradients_{traits.name}"
        self.precision: str = traits.precision
        self._input_rows = input_rows
        self._weight = WeightSm90(math)

    def input_row(self, problem: BackwardProblem, device: Device) -> RunsSm90 | Support:
        """The row that computes the input's gradient: of those that do, the one that is estimated
        to take least."""
        convolution = input_convolution(problem.forward)
        if isinstance(convolution, Support):
            return convolution
        strided = is_strided(problem.forward)
        support = Support.no("no row convolves the output's gradient")
        served, fits = [], True
        for row in self._input_rows:
            if strided and not row.packs_phases:
                continue
            support = row.supports(convolution, device)
            if not support:
                continue
            if row.chunk(convolution, row.config(convolution, device)) < problem.forward.batch:
                fits = False
                continue
            served.append(row)
        if not served and not fits:
            return Support.no("the batch has more tiles than one launch takes")
        if not served:
            return support
        costs = _run_costs(problem)
        return min(served, key=lambda row: row.estimate(convolution, device, costs))

    def supports(self, problem: BackwardProblem, device: Device) -> Support:
        convolution = input_convolution(problem.forward)
        if isinstance(convolution, Support):
            return convolution
        for support in (
            supports_forward(convolution, device, architecture=90),
            supports_precision(convolution, self.precision),
        ):
            if not support:
                return support
        conv = problem.forward.conv
        assert conv is not None and convolution.conv is not None
        if conv.groups != 1:
            return Support.no(f"groups is {conv.groups}, only 1 is served")
        if "input" in problem.gradients:
            products = conv.out_channels * math.prod(conv.kernel_size)
            padded = convolution.channels * math.prod(convolution.conv.kernel_size)
            if self.precision == "fp32" and padded > MOST_STRICT_ZEROS * products:
                return Support.no(
                    f"planes' filters have {padded} taps for {products}; sums are as exact as "
                    f"eager's up to {MOST_STRICT_ZEROS} times as many in strict fp32"
                )
            row = self._strict_sum(products, SHORTEST_STRICT_SUM) and self.input_row(
                problem, device
            )
            if isinstance(row, Support):
                return row
        if "weight" in problem.gradients:
            positions = problem.forward.batch * math.prod(problem.forward.spatial)
            support = self._strict_sum(positions, SHORTEST_STRICT_POSITIONS)
            return support and self._weight.supports(problem.forward, device)
        return Support.yes()

    def _strict_sum(self, products: int, shortest: int) -> Support:
        """Whether a gradient that sums so many products is as exact as strict fp32 asks for."""
        if self.precision == "fp32" and products < shortest:
            return Support.no(
                f"a gradient sums {products} products, 3xTF32 is as exact as fp32 from {shortest} "
                "on"
            )
        return Support.yes()

    def cost(self, problem: BackwardProblem, device: Device) -> float:
        return self.estimate(problem, device, COSTS)

    def estimate(self, problem: BackwardProblem, device: Device, costs: CostConstants) -> float:
        """Milliseconds of a supported problem, were the constants these."""
        forward, gradients = problem.forward, problem.gradients
        size = forward.dtype.itemsize
        assert forward.conv is not None
        conv = forward.conv
        weights = conv.in_channels * conv.out_channels * math.prod(conv.kernel_size)
        cycles = weights * costs.scattered / max(1, device.multiprocessors)
        scattered = cycles * 1e3 / device.clock_hertz
        total = device.launch_milliseconds  # of one plan, however many parts it computes
        splits = splits_grad(problem)
        pads = pads_grad(problem) and not comes_in_lines(problem)
        for elements, by_torch in transposed_elements(problem):
            total += device.copy_milliseconds(costs.transposing * 2 * elements * size)
            total += (COPY_HOST if by_torch else 1.0) * device.launch_milliseconds
        if splits:
            total += split_milliseconds(forward, device) + device.launch_milliseconds
        if pads or ("bias" in gradients and not (splits and holds_all(forward))):
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
            total += row.estimate(convolution, device, _run_costs(problem))
        if "weight" in gradients:
            total += self._weight.milliseconds(forward, device)
        return total + scattered * len(gradients & {"input", "weight"})

    def compile(self, problem: BackwardProblem, device: Device) -> GradientsSm90Plan:
        return GradientsSm90Plan(self, problem, device)

    def build(self, problem: BackwardProblem, device: Device, grad_form: GradForm) -> _C.Program:
        """The program over tensors in the order of the slots. The output's gradient lies in padded
        lines, or is dense and transposed and padded where that is needed."""
        forward, gradients = problem.forward, problem.gradients
        convolution = input_convolution(forward)
        assert isinstance(convolution, ForwardProblem)
        program = ForwardProgram(convolution, device)
        compiled = program.compiled
        sample = forward.output_elements // forward.batch * forward.dtype.itemsize
        grad = compiled.tensor(INPUT, sample)
        in_lines = grad_form == "lines"
        columns = forward.output_spatial[-1]
        pitch = line_pitch(columns, forward.dtype) if in_lines else columns
        if grad_form == "nhwc":
            grad = program.input = transposed_to_channels_first(
                program, grad, forward.output_channels, forward.output_spatial, _GRAD_NAME
            )
        pads, sums = pads_grad(problem) and not in_lines, "bias" in gradients
        summed = None
        if splits_grad(problem):
            summed = split(program, _GRAD_NAME, forward, grad, pitch, sums=sums)
        if pads or (sums and summed is None):
            summed = _pad(program, forward, grad, pitch, pads=pads, sums=sums)
        if summed is not None:
            sums_problem, parts = summed
            compiled.per_chunk(
                _C.layout.AddSums(
                    "gradient of bias",
                    problem=sums_problem,
                    sums=parts,
                    totals=compiled.tensor(GRAD_BIAS, 0),
                )
            )
        if "input" in gradients:
            row = self.input_row(problem, device)
            assert isinstance(row, RunsSm90)
            config = row.config(convolution, device)
            filter = None
            if forward.conv is not None and is_strided(forward):
                filter = pack_phases(program, row.room, config, forward.conv)
            transposes = writes_channels_last(forward)
            output = program.scratch(sample_bytes(forward)) if transposes else program.output
            row.convolve(program, config, output, filter)
            if transposes:
                transpose_to_channels_last(
                    program, output, program.output, forward.channels, forward.spatial
                )
        if "weight" in gradients:
            self._add_weight_steps(program, problem, device)
        return compiled

    def _add_weight_steps(
        self, program: ForwardProgram, problem: BackwardProblem, device: Device
    ) -> None:
        """Appends what computes the weight's gradient from the program's input, the output's
        gradient or its planes with padded lines."""
        forward, compiled = problem.forward, program.compiled
        spatial = read_spatial(forward)
        given = compiled.tensor(CONV_INPUT, sample_bytes(forward))
        if reads_channels_last(forward):
            given = transposed_to_channels_first(
                program, given, forward.channels, forward.spatial, "the input"
            )
        if pads_input(problem):
            given = program.padded_input(given, forward.channels, spatial)
        self._weight.append(program, forward, device, given, compiled.tensor(GRAD_WEIGHT, 0))


def _pad(
    program: ForwardProgram,
    forward: ForwardProblem,
    grad: Any,
    pitch: int,
    *,
    pads: bool,
    sums: bool,
) -> Summed | None:
    """Appends what pads the lines of the output's gradient to the program's input, sums them by
    channel, or both."""
    lines = lines_problem(
        forward.batch, forward.output_channels, forward.output_spatial, forward.dtype, pitch
    )
    if pads:
        program.input = program.scratch(lines.sample_bytes)
    summed = lines.sums()
    parts = program.scratch(0, summed.bytes) if sums else program.absent
    program.compiled.per_chunk(
        _C.layout.PadLines(
            _GRAD_NAME,
            problem=lines,
            input=grad,
            output=program.input if pads else program.absent,
            sums=parts,
        )
    )
    return (summed, parts) if sums else None


class GradientsSm90Plan(BackwardPlan):
    """A program for each form in which an output gradient comes; what comes in none of them, or is
    channels last of channels that the program does not transpose, torch copies to NCHW first."""

    only_launches = True

    def __init__(self, kernel: GradientsSm90, problem: BackwardProblem, device: Device) -> None:
        conv = problem.forward.conv
        assert conv is not None
        self.kernel = kernel.name
        self.problem = problem
        self._kernel = kernel
        self._device = device
        self._programs: dict[GradForm, _C.Program] = {}
        self.pads_lines = asks_for_lines(problem)
        forward = problem.forward
        self._transposes = has_whole_vectors(conv.out_channels, forward.dtype)
        self._line_strides = line_strides(forward.output_shape, forward.dtype)
        # Each with the strides that it is allocated with.
        written = "nhwc" if writes_channels_last(forward) else "nchw"
        self._input = forward.input_shape, dense_strides(forward.input_shape, written)
        self._weight = conv.weight_shape, dense_strides(conv.weight_shape, conv.weight_layout)
        self._input_layout = "nhwc" if reads_channels_last(forward) else "nchw"
        self._copies_back = copies_to_channels_last(forward)
        self._describe(grad_form(problem))
        # Where the filter is read from, in elements: with stride 1 backwards.
        self._first_read = 0
        if not is_strided(forward):
            self._first_read = sum(
                (extent - 1) * stride
                for extent, stride in zip(conv.kernel_size, conv.weight_strides[2:], strict=True)
            )

    def _program(self, form: GradForm) -> _C.Program:
        if form not in self._programs:
            self._programs[form] = self._kernel.build(self.problem, self._device, form)
        return self._programs[form]

    def _describe(self, form: GradForm) -> None:
        problem = self.problem
        forward, wanted = problem.forward, problem.gradients
        copies = []
        if form == "nchw" and grad_layout(problem) != "nchw":
            copies.append(f"torch copy of {_GRAD_NAME} to nchw")
        if "weight" in wanted and forward.layout != "nchw" and not reads_channels_last(forward):
            copies.append(CONTIGUOUS_STEP)
        behind = []
        if "input" in wanted and copies_to_channels_last(forward):
            behind.append("torch copy of the input's gradient to nhwc")
        self.steps = (*copies, *self._program(form).steps, *behind)

    def take_padded_lines(self) -> None:
        self._describe("lines")

    def _form_of(self, grad: Tensor) -> GradForm | None:
        """The form in which a gradient lies; None where it is to be copied."""
        if lies_in_lines(grad, self._line_strides):
            return "lines"
        if grad.data_ptr() % LINE_BYTES == 0 and self._transposes:
            return "nhwc" if layout_of(grad.shape, grad.stride()) == "nhwc" else None
        return None

    def run(self, tensors: BackwardTensors) -> Gradients:
        forward, wanted = self.problem.forward, self.problem.gradients
        grad = tensors.of_convolution.to(forward.dtype)
        form = self._form_of(grad)
        if form is None:
            grad = dense(grad, "nchw")
            form = "lines" if lies_in_lines(grad, self._line_strides) else "nchw"
        weight = tensors.weight
        assert weight is not None
        empty = allocator(grad.device)
        grad_input = grad_weight = grad_bias = x = filter = None
        if "input" in wanted:
            filter = weight
            if self._first_read:
                filter = weight.as_strided((), (), weight.storage_offset() + self._first_read)
            grad_input = empty(*self._input, grad.dtype)
        if "weight" in wanted:
            x = dense(tensors.input, self._input_layout)
            if x.data_ptr() % LINE_BYTES:  # read by tensor maps or in whole vectors
                x = x.clone()
            grad_weight = empty(*self._weight, grad.dtype)
        if "bias" in wanted:
            grad_bias = empty((forward.output_channels,), (1,), grad.dtype)
        slots: list[Tensor | None] = [None] * (GRAD_BIAS + 1)
        slots[INPUT], slots[WEIGHT], slots[OUTPUT] = grad, filter, grad_input
        slots[CONV_INPUT], slots[GRAD_WEIGHT], slots[GRAD_BIAS] = x, grad_weight, grad_bias
        run_program(self._program(form), grad.device, slots)
        if grad_input is not None and self._copies_back:
            grad_input = dense(grad_input, "nhwc")
        return Gradients(input=grad_input, weight=grad_weight, bias=grad_bias)


def kernels() -> list[Kernel]:
    if "sm90" not in FAMILIES:
        return [NotBuiltBackward("sm90_gradients", GradientsSm90.provider)]
    runs, strips = _C.sm90.runs, _C.sm90.strips
    # Why runs refuse is told where none of either serves a problem.
    rows: list[RunsSm90] = [
        StripsSm90(strips, index, row, padded_lines=True) for index, row in enumerate(strips.rows())
    ]
    rows += [
        RunsSm90(runs, index, row, padded_lines=True)
        for index, row in enumerate(runs.rows())
        if not row.interleaves
    ]
    maths = dict.fromkeys(row.math for row in runs.rows())
    return [GradientsSm90(math, [row for row in rows if row.row.math == math]) for math in maths]
