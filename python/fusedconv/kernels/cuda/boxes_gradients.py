"""Gradients of a transposed convolution by tensor copies, on compute capability 9.0.

The input's gradient gathers: it is an ordinary convolution of the output's gradient with the
transposed one's stride, computed by the rows of ``boxes_sm90``; each tap reads the pixels of one
phase of the stride, and a weight that is channels last is read as it lies. The weight's gradient
multiplies boxes of the input by the same boxes of the output's gradient, summed over positions; in
TF32 the input is packed first, or transposed on its way to the products; in 16 bits, where planes
of the filter have three by three taps, a box of the gradient has what all of these read. Where the
filter is as large as its stride, the bias's is summed on the way. Both read and write channels
last, pixels of whole 16 bytes: tensors in NCHW, and those of other channels, are transposed and
padded with zeros in front, and cut behind. Nothing is split into planes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from fusedconv import _C
from fusedconv.activations import COMPILED
from fusedconv.device import Device
from fusedconv.kernels.compiled import supports_extents
from fusedconv.kernels.cuda import boxes_costs
from fusedconv.kernels.cuda.boxes_gradient_costs import (
    COSTS,
    CostConstants,
    bytes_milliseconds,
    input_cycles,
    weight_milliseconds,
)
from fusedconv.kernels.cuda.boxes_gradient_problems import (
    filter_source,
    grad_weight_filter,
    input_config,
    reads_weight,
    rewrites_back,
    rewrites_grad,
    rewrites_input,
    weight_config,
    writes_weight,
)
from fusedconv.kernels.cuda.conditions import FAMILIES, NotBuiltBackward, supports_device
from fusedconv.kernels.cuda.convolution import CHUNK_BYTES, packed_filter
from fusedconv.kernels.cuda.gradient_tensors import grad_layout
from fusedconv.kernels.cuda.program import (
    INPUT,
    OUTPUT,
    WEIGHT,
    ForwardProgram,
    allocator,
    run_program,
)
from fusedconv.kernels.cuda.transposing import (
    padded_elements,
    transposed_to_channels_last,
    whole_channels,
)
from fusedconv.layout import LINE_BYTES, dense, dense_strides, result_layout
from fusedconv.plan import BackwardKernel, BackwardPlan, BackwardTensors, Gradients, Kernel
from fusedconv.precision import COMPILED_DTYPES
from fusedconv.problem import BackwardProblem, ForwardProblem
from fusedconv.support import Support

# Slots of a program's pointers beside INPUT, the output's gradient, WEIGHT and OUTPUT, the input's
# gradient.
CONV_INPUT, GRAD_WEIGHT, GRAD_BIAS = range(9, 12)

#: Boxes by blocks of columns in a launch, and samples, are counted to.
MOST_ITEMS = (1 << 30) - 1
MOST_SAMPLES = (1 << 31) - 128


def _quickest(served: list[tuple[Any, Any]], time: Callable[[Any, Any], float]) -> tuple[Any, Any]:
    """Of configs and their rows the one of the least time; the first where none is supported, for
    its reason."""
    supported = [pair for pair in served if pair[0].support]
    return min(supported, key=lambda pair: time(*pair)) if supported else served[0]


class BoxesGradients(BackwardKernel):
    """One way to form products."""

    provider = "boxes_gradients_sm90"
    computes = frozenset({"input", "weight", "bias"})
    beside = frozenset({"bias"})

    def __init__(self, math: Any) -> None:
        traits = _C.math_traits(math)
        self.name = f"sm90_boxes_gradients_{traits.name}"
        self.precision: str = traits.precision
        room = _C.sm90.boxes
        #: Of ``_C.sm90.boxes.rows()``.
        self.input_rows = [
            index
            for index, row in enumerate(room.rows())
            if row.math == math and row.segments == 1 and not row.planes
        ]
        #: Of ``_C.sm90.boxes.weight.rows()``.
        self.weight_rows = [
            index for index, row in enumerate(room.weight.rows()) if row.math == math
        ]

    def supports(self, problem: BackwardProblem, device: Device) -> Support:
        forward, wanted = problem.forward, problem.gradients
        conv = forward.conv
        if conv is None:
            return Support.no("computes gradients of convolutions; the problem has none")
        for support in (
            supports_device(device, architecture=90),
            self._supports_precision(forward),
            supports_extents(conv, forward.spatial),
        ):
            if not support:
                return support
        if not 0 < forward.batch <= MOST_SAMPLES:
            return Support.no(f"batch is {forward.batch}, 1 to {MOST_SAMPLES} are served")
        if "weight" in wanted:
            config, _ = self._weight(problem, device)
            if not config.support:
                return Support.of(config.support)
            if "bias" in wanted and not config.sums_bias:
                return Support.no(
                    "sums the bias's gradient where the filter is as large as its stride, without "
                    f"padding and dilation; it is {conv.kernel_size}, the stride {conv.stride}, "
                    f"padding {conv.padding} and {conv.output_padding}, dilation {conv.dilation}"
                )
        elif "bias" in wanted:
            return Support.no("sums the bias's gradient beside the weight's only")
        if "input" in wanted:
            config = self._input(problem, device)[0]
            if not config.support:
                return Support.of(config.support)
            # Tiles are pairs of boxes, which are what is counted.
            items = 2 * config.launch_tiles(forward.batch) * config.blocks
            if items > MOST_ITEMS:
                return Support.no(f"{items} boxes are more than are counted, {MOST_ITEMS}")
        return self._supports_padding(forward)

    def _supports_padding(self, forward: ForwardProblem) -> Support:
        """The padded copies are of whole batches."""
        padded = sum(
            padded_elements(shape, forward.dtype) - math.prod(shape)
            for shape in (forward.input_shape, forward.output_shape)
        )
        extra = padded * forward.dtype.itemsize
        if extra > CHUNK_BYTES:
            return Support.no(f"zeros beside its channels take {extra} bytes beyond {CHUNK_BYTES}")
        return Support.yes()

    def _supports_precision(self, forward: ForwardProblem) -> Support:
        if forward.precision != self.precision:
            return Support.no(f"computes in {self.precision}, {forward.precision} is asked for")
        return Support.yes()

    def _input(self, problem: BackwardProblem, device: Device) -> tuple[Any, Any]:
        """The config and row for the input's gradient: the quickest by its estimate."""
        forward = problem.forward
        assert forward.conv is not None
        aligned = problem.aligned or rewrites_grad(problem)
        served = forward.conv, forward.spatial, aligned, forward.dtype, device
        rows = _C.sm90.boxes.rows()
        return _quickest(
            [(input_config(index, *served), rows[index]) for index in self.input_rows],
            lambda config, row: input_cycles(config, row, forward, device, COSTS),
        )

    def _weight(self, problem: BackwardProblem, device: Device) -> tuple[Any, Any]:
        """The config and row for the weight's gradient, likewise."""
        forward = problem.forward
        assert forward.conv is not None
        aligned = problem.aligned or rewrites_grad(problem)
        served = forward.conv, forward.spatial, aligned, forward.dtype, forward.batch, device
        rows = _C.sm90.boxes.weight.rows()
        pairs = [(weight_config(index, *served), rows[index]) for index in self.weight_rows]
        if "bias" in problem.gradients:
            pairs = [pair for pair in pairs if pair[0].sums_bias] or pairs
        return _quickest(
            pairs,
            lambda config, row: weight_milliseconds(
                config, row, forward, device, COSTS, writes=writes_weight(config, forward)
            ),
        )

    def cost(self, problem: BackwardProblem, device: Device) -> float:
        return self.estimate(problem, device, COSTS)

    def estimate(self, problem: BackwardProblem, device: Device, costs: CostConstants) -> float:
        """Milliseconds of a supported problem, were the constants these."""
        forward, wanted = problem.forward, problem.gradients
        size = forward.dtype.itemsize
        padded_input = padded_elements(forward.input_shape, forward.dtype)
        padded_output = padded_elements(forward.output_shape, forward.dtype)
        total, launches = 0.0, 1  # of one plan, however many parts it computes
        rewritten = 0  # elements that are read and written
        if rewrites_grad(problem):
            rewritten += forward.output_elements + padded_output
            launches += 1
        if "input" in wanted:
            config, row = self._input(problem, device)
            cycles = input_cycles(config, row, forward, device, costs)
            bytes_bound = bytes_milliseconds(forward, device, costs)
            total += max(cycles * 1e3 / device.clock_hertz, bytes_bound)
            launches += 1
            if not reads_weight(config, forward):
                total += config.filter_bytes / size * boxes_costs.COSTS.pack * 1e3
                launches += 1
            if rewrites_back(forward):
                rewritten += forward.input_elements + padded_input
                launches += 1
        if "weight" in wanted:
            config, row = self._weight(problem, device)
            writes = writes_weight(config, forward)
            total += weight_milliseconds(config, row, forward, device, costs, writes=writes)
            launches += 2 - writes + (config.packed_bytes > 0) + ("bias" in wanted)
            if rewrites_input(forward):
                rewritten += forward.input_elements + padded_input
                launches += 1
        total += costs.transposed * device.copy_milliseconds(rewritten * size)
        return total + launches * device.launch_milliseconds

    def compile(self, problem: BackwardProblem, device: Device) -> BoxesGradientsPlan:
        return BoxesGradientsPlan(self, problem, device)

    def build(self, problem: BackwardProblem, device: Device) -> _C.Program:
        """The program over tensors in the order of the slots."""
        forward, wanted = problem.forward, problem.gradients
        conv = forward.conv
        assert conv is not None
        size = forward.dtype.itemsize
        # Its output is the input's gradient.
        gathered = dataclasses.replace(
            forward, conv=None, epilogue=(), save=False, output_dtype=forward.dtype
        )
        program = ForwardProgram(gathered, device)
        compiled = program.compiled
        grad = compiled.tensor(INPUT, forward.output_elements // forward.batch * size)
        if rewrites_grad(problem):
            grad = transposed_to_channels_last(
                program,
                grad,
                forward.output_channels,
                forward.output_spatial,
                "the output's gradient",
                layout=result_layout(grad_layout(problem)),
            )
        if "input" in wanted:
            self._add_input_steps(program, problem, device, grad)
        if "weight" in wanted:
            config, _ = self._weight(problem, device)
            room = _C.sm90.boxes.weight
            sample = forward.channels * math.prod(forward.spatial) * size
            given = compiled.tensor(CONV_INPUT, sample)
            if rewrites_input(forward):
                given = transposed_to_channels_last(
                    program,
                    given,
                    forward.channels,
                    forward.spatial,
                    "the input",
                    layout=forward.output_layout,
                )
            if config.packed_bytes:
                packed = program.scratch(0, config.packed_bytes)
                compiled.per_chunk(room.PackInput(config, input=given, packed=packed))
                given = packed
            writes = writes_weight(config, forward)
            partials = program.absent if writes else program.scratch(0, config.partial_bytes)
            grad_weight = compiled.tensor(GRAD_WEIGHT, 0)
            target = grad_weight_filter(conv)
            totals = _C.layout.ChannelSums(
                batch=1,
                channels=conv.out_channels,
                parts=config.bias_parts,
                dtype=COMPILED_DTYPES[forward.dtype],
            )
            sums_bias = "bias" in wanted
            sums = program.scratch(0, totals.bytes) if sums_bias else program.absent
            compiled.per_chunk(
                room.SumProducts(
                    config,
                    input=given,
                    grad_output=grad,
                    partials=partials,
                    target=target,
                    grad_weight=grad_weight if writes else program.absent,
                    bias_sums=sums,
                    bias_channels=conv.out_channels,
                )
            )
            if not writes:
                compiled.per_chunk(
                    room.AddPartials(
                        config, target=target, partials=partials, grad_weight=grad_weight
                    )
                )
            if sums_bias:
                compiled.per_chunk(
                    _C.layout.AddSums(
                        "gradient of bias",
                        problem=totals,
                        sums=sums,
                        totals=compiled.tensor(GRAD_BIAS, 0),
                        samples=forward.batch,
                    )
                )
        return compiled

    def _add_input_steps(
        self, program: ForwardProgram, problem: BackwardProblem, device: Device, grad: Any
    ) -> None:
        forward = problem.forward
        conv = forward.conv
        assert conv is not None
        room, (config, _) = _C.sm90.boxes, self._input(problem, device)
        source = filter_source(conv, conv.weight_strides)
        output = program.output
        if rewrites_back(forward):
            channels = whole_channels(forward.channels, forward.dtype)
            sample = channels * math.prod(forward.spatial) * forward.dtype.itemsize
            output = program.scratch(sample)
        filter = packed_filter(
            room, program, config, source, reads_weight=reads_weight(config, forward)
        )
        program.compiled.per_chunk(
            room.Convolve(
                config,
                activation=COMPILED["identity"],
                activates_output=True,
                input=grad,
                filter=filter,
                bias=program.absent,
                output=output,
                partials=program.absent,
            )
        )
        if rewrites_back(forward):
            verb = "cut" if forward.output_layout == "nhwc" else "transpose"
            program.transpose(
                output,
                program.output,
                row_channels=channels,
                name=f"{verb} the input's gradient",
            )


class BoxesGradientsPlan(BackwardPlan):
    """One program; tensors of another layout than it takes are copied first."""

    is_exact = True
    reads_dense = True
    only_launches = True

    def __init__(self, kernel: BoxesGradients, problem: BackwardProblem, device: Device) -> None:
        forward = problem.forward
        conv = forward.conv
        assert conv is not None
        self.kernel = kernel.name
        self.problem = problem
        self._program = kernel.build(problem, device)
        self._grad_layout = result_layout(grad_layout(problem))
        self._input_layout = result_layout(forward.layout)
        # Each with the strides that it is allocated with.
        self._input = forward.input_shape, dense_strides(forward.input_shape, forward.output_layout)
        self._weight = conv.weight_shape, dense_strides(conv.weight_shape, conv.weight_layout)
        copies = []
        if grad_layout(problem) == "strided":
            copies.append("torch copy of the output's gradient to nchw")
        if "weight" in problem.gradients and forward.layout == "strided":
            copies.append("torch copy of the input to nchw")
        self.steps = (*copies, *self._program.steps)

    def run(self, tensors: BackwardTensors) -> Gradients:
        forward, wanted = self.problem.forward, self.problem.gradients
        grad = dense(tensors.of_convolution.to(forward.dtype), self._grad_layout)
        if grad.data_ptr() % LINE_BYTES:  # what tensor copies and whole vectors begin at
            grad = grad.clone()
        empty = allocator(grad.device)
        slots: list[Any] = [None] * (GRAD_BIAS + 1)
        slots[INPUT] = grad
        grad_input = grad_weight = grad_bias = None
        if "input" in wanted:
            slots[WEIGHT] = tensors.weight
            slots[OUTPUT] = grad_input = empty(*self._input, grad.dtype)
        if "weight" in wanted:
            x = dense(tensors.input, self._input_layout)
            if x.data_ptr() % LINE_BYTES:
                x = x.clone()
            slots[CONV_INPUT] = x
            slots[GRAD_WEIGHT] = grad_weight = empty(*self._weight, grad.dtype)
        if "bias" in wanted:
            channels = self._weight[0][1]  # of the only group
            slots[GRAD_BIAS] = grad_bias = empty((channels,), (1,), grad.dtype)
        run_program(self._program, grad.device, slots)
        return Gradients(input=grad_input, weight=grad_weight, bias=grad_bias)


def kernels() -> list[Kernel]:
    if "sm90" not in FAMILIES:
        return [NotBuiltBackward("sm90_boxes_gradients", BoxesGradients.provider)]
    maths = dict.fromkeys(row.math for row in _C.sm90.boxes.rows())
    return [BoxesGradients(math) for math in maths]
