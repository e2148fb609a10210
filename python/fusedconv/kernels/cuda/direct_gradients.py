"""Gradients of depthwise transposed convolutions on CUDA, by multiply-adds in float32: the input's
and the weight's in one pass over the output's gradient, of whatever stride, filter and layout."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from fusedconv import _C
from fusedconv.device import Device
from fusedconv.kernels.compiled import (
    CONTIGUOUS_STEP,
    supports_compiled,
    supports_extents,
    transposed_problem,
)
from fusedconv.kernels.cuda.conditions import FAMILIES, NotBuiltBackward, supports_device
from fusedconv.kernels.cuda.convolution import filter_source
from fusedconv.kernels.cuda.gradient_tensors import grad_layout
from fusedconv.kernels.cuda.program import allocator, run_program
from fusedconv.kernels.cuda.ungrouped_gradients import add_bias_sums, supports_bias_sums
from fusedconv.layout import dense, dense_strides
from fusedconv.norms import KINDS
from fusedconv.plan import BackwardKernel, BackwardPlan, BackwardTensors, Gradients, Kernel
from fusedconv.precision import COMPILED_DTYPES
from fusedconv.problem import BackwardProblem, ConvTransposeGeometry
from fusedconv.support import Support

# Slots of the pointers that the program gets, in this order.
INPUT, GRAD_OUTPUT, WEIGHT, GRAD_INPUT, GRAD_WEIGHT, GRAD_BIAS = range(6)

#: Instructions of a tap at a position, and what is reached of memory's copy rate: guesses, no GPU
#: has timed them.
_TAP_INSTRUCTIONS = 8.0
COPY_SHARE = 0.6
#: Threads of which a multiprocessor starts an instruction in a cycle.
_LANES = 128


@functools.lru_cache(maxsize=1024)
def _config(problem: BackwardProblem) -> Any:
    """How the sums are cut; its ``support`` says why they cannot be."""
    forward = problem.forward
    assert forward.conv is not None
    return _C.direct.gradient_config(
        transposed_problem(forward.conv, forward.spatial, forward.output_layout, problem.aligned),
        dtype=COMPILED_DTYPES[forward.dtype],
        batch=forward.batch,
    )


def supports_direct_bias(problem: BackwardProblem) -> Support:
    """Whether the bias's gradient is served, where it is asked for."""
    return supports_bias_sums(problem) if "bias" in problem.gradients else Support.yes()


def bias_milliseconds(problem: BackwardProblem, device: Device) -> float:
    """What the bias's gradient is estimated to take where it is asked for."""
    if "bias" not in problem.gradients:
        return 0.0
    forward = problem.forward
    read = forward.output_elements * forward.dtype.itemsize
    return device.copy_milliseconds(read) + 2 * device.launch_milliseconds


class DirectGradients(BackwardKernel):
    name = "direct_gradients"
    provider = "direct_gradients"
    computes = frozenset({"input", "weight", "bias"})

    def supports(self, problem: BackwardProblem, device: Device) -> Support:
        forward = problem.forward
        conv = forward.conv
        if conv is None:
            return Support.no("computes gradients of convolutions; the problem has none")
        if conv.in_channels != conv.groups or conv.out_channels != conv.groups:
            return Support.no(
                f"groups is {conv.groups} of {conv.in_channels} and {conv.out_channels} channels, "
                "only depthwise convolutions are served"
            )
        for support in (
            supports_device(device),
            supports_compiled(forward, frozenset(KINDS)),
            supports_extents(conv, forward.spatial),
        ):
            if not support:
                return support
        support = Support.of(_config(problem).support)
        return support and supports_direct_bias(problem)

    def cost(self, problem: BackwardProblem, device: Device) -> float:
        forward, gradients = problem.forward, problem.gradients
        config = _config(problem)
        size = forward.dtype.itemsize
        inputs = ("input" in gradients) + ("weight" in gradients)
        passes = inputs * forward.input_elements + (inputs > 0) * forward.output_elements
        taps = (inputs > 0) * forward.input_elements * config.taps * _TAP_INSTRUCTIONS
        cycles = taps / (_LANES * max(1, device.multiprocessors))
        total = max(
            device.copy_milliseconds(passes * size) / COPY_SHARE,
            cycles * 1e3 / device.clock_hertz,
        )
        launches = (inputs > 0) + ("weight" in gradients)
        if "weight" in gradients:
            total += device.copy_milliseconds(2 * config.partial_bytes)
        return total + launches * device.launch_milliseconds + bias_milliseconds(problem, device)

    def compile(self, problem: BackwardProblem, device: Device) -> DirectGradientsPlan:
        return DirectGradientsPlan(problem, device)


class DirectGradientsPlan(BackwardPlan):
    """One program; tensors of another layout than the forward output's are copied to it first."""

    is_exact = True
    reads_dense = True
    only_launches = True

    kernel = DirectGradients.name

    def __init__(self, problem: BackwardProblem, device: Device) -> None:
        forward = problem.forward
        conv = forward.conv
        assert conv is not None
        self.problem = problem
        self._device = device
        self._wanted = problem.gradients
        self._layout = forward.output_layout
        self._input = forward.input_shape, dense_strides(forward.input_shape, self._layout)
        self._weight = conv.weight_shape, self._weight_strides(conv)
        self._bias = (conv.out_channels,), (1,)
        self._program = self._build()
        copies = []
        if grad_layout(problem) != self._layout:
            copies.append(f"torch copy of the output's gradient to {self._layout}")
        if "weight" in self._wanted and forward.layout == "strided":
            copies.append(CONTIGUOUS_STEP)
        self.steps = (*copies, *self._program.steps)

    @staticmethod
    def _weight_strides(conv: ConvTransposeGeometry) -> tuple[int, ...]:
        """Of the weight's gradient, as the program writes it."""
        return dense_strides(conv.weight_shape, "nchw")

    def _add_steps(self, program: _C.Program) -> None:
        """Appends those of the gradients of input and weight."""
        conv = self.problem.forward.conv
        assert conv is not None
        config = _config(self.problem)
        absent = _C.Operand()
        grad = program.tensor(GRAD_OUTPUT, 0)
        weighs = "weight" in self._wanted
        partials = program.scratch(0, config.partial_bytes) if weighs else absent
        both = [name for name in ("input", "weight") if name in self._wanted]
        for names in [both] if both and config.known else [[name] for name in both]:
            program.per_chunk(
                _C.direct.Gradients(
                    config,
                    source=filter_source(conv),
                    input=program.tensor(INPUT, 0) if "weight" in names else absent,
                    grad_output=grad,
                    weight=program.tensor(WEIGHT, 0),
                    grad_input=program.tensor(GRAD_INPUT, 0) if "input" in names else absent,
                    partials=partials if "weight" in names else absent,
                )
            )
        if weighs:
            program.per_chunk(
                _C.direct.AddWeightParts(
                    config, partials=partials, grad_weight=program.tensor(GRAD_WEIGHT, 0)
                )
            )

    def _build(self) -> _C.Program:
        forward = self.problem.forward
        program = _C.Program(self._device.index, forward.batch, 0)
        self._add_steps(program)
        if "bias" in self._wanted:
            grad, bias = program.tensor(GRAD_OUTPUT, 0), program.tensor(GRAD_BIAS, 0)
            add_bias_sums(program, self.problem, grad, bias)
        return program

    def run(self, tensors: BackwardTensors) -> Gradients:
        wanted = self._wanted
        grad = dense(tensors.of_convolution.to(self.problem.forward.dtype), self._layout)
        empty = allocator(grad.device)
        x = dense(tensors.input, self._layout) if "weight" in wanted else None

        def made(name: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor | None:
            return empty(shape, strides, grad.dtype) if name in wanted else None

        grad_input = made("input", *self._input)
        grad_weight = made("weight", *self._weight)
        grad_bias = made("bias", *self._bias)
        if self._program.steps:
            run_program(
                self._program,
                grad.device,
                (x, grad, tensors.weight, grad_input, grad_weight, grad_bias),
            )
        return Gradients(input=grad_input, weight=grad_weight, bias=grad_bias)


def kernels() -> list[Kernel]:
    if "direct" not in FAMILIES:
        return [NotBuiltBackward(DirectGradients.name, DirectGradients.provider)]
    return [DirectGradients()]
