"""Gradients through LayerNorm over channels and affine maps of channels on CUDA, activations
included, and through an activation alone: one pass over what they were computed from and the
output's gradient. The sums by channel of a convolution's output gradient, its bias's."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from fusedconv import _C
from fusedconv.device import Device
from fusedconv.kernels.compiled import supports_compiled
from fusedconv.kernels.cuda.conditions import supports_device
from fusedconv.kernels.cuda.gradient_tensors import grad_layout
from fusedconv.kernels.cuda.gradients import compiled_problem, supports_epilogue, wants_input
from fusedconv.kernels.cuda.program import allocator, run_program
from fusedconv.layout import dense, dense_strides
from fusedconv.plan import BackwardKernel, BackwardPlan, BackwardTensors, Gradients, Kernel
from fusedconv.problem import BackwardProblem, Bias
from fusedconv.support import Support

# Slots of the pointers that the program gets, in this order.
INPUT, GRAD_OUTPUT, NORM_WEIGHT, NORM_BIAS, GRAD_INPUT, GRAD_WEIGHT, GRAD_BIAS, GRAD_CONV_BIAS = (
    range(8)
)

#: Kinds of ``fusedconv.norms.KINDS`` that the kernel has.
KINDS = frozenset({"layer", "affine"})
#: Of LayerNorm, times what moving the bytes takes at copy rate, by layout and bytes of an element:
#: measured on an H200 with 64 and 384 channels.
_LAYER_NORM_OVER_COPY = {("nchw", 2): 2.7, ("nchw", 4): 1.75, ("nhwc", 2): 1.9, ("nhwc", 4): 1.3}
#: Of all others, in both layouts.
_OVER_COPY = 1.06
#: Of planes: a block of a short one, of which a multiprocessor runs so many at a time.
_BLOCK_MILLISECONDS = 2.1e-3
_BLOCKS_AT_ONCE = 8


@functools.lru_cache(maxsize=1024)
def _config(problem: BackwardProblem) -> Any:
    """How sums are left; its ``support`` says why it cannot be."""
    norm = problem.forward.norm
    room = _C.ungrouped
    kind = "identity" if norm is None else norm.kind
    return room.gradient_config(compiled_problem(problem), getattr(room.Kind, kind))


def _milliseconds(problem: BackwardProblem, device: Device, tensors: int) -> float:
    """Two launches that read or write so many tensors of the output's size between them."""
    forward = problem.forward
    size = forward.dtype.itemsize
    passes = _OVER_COPY
    if forward.norm is not None and forward.norm.kind == "layer":
        passes = _LAYER_NORM_OVER_COPY[forward.output_layout, size]
    moved = tensors * forward.output_elements * size
    moved += 2 * _config(problem).partial_bytes
    work = passes * device.copy_milliseconds(moved)
    # What binds LayerNorm is not how wide the gradient is.
    wider = forward.output_elements * (problem.grad_dtype.itemsize - size)
    work += _OVER_COPY * device.copy_milliseconds(wider)
    if forward.output_layout == "nchw":  # a block for each plane at least
        planes = forward.batch * forward.output_channels
        at_once = _BLOCKS_AT_ONCE * max(1, device.multiprocessors)
        work = max(work, planes / at_once * _BLOCK_MILLISECONDS)
    return 2 * device.launch_milliseconds + work


class UngroupedBackward(BackwardKernel):
    name = "ungrouped_backward"
    provider = "ungrouped_cuda"
    computes = frozenset({"epilogue", "bias"})

    def supports(self, problem: BackwardProblem, device: Device) -> Support:
        computes = "LayerNorm over channels, of affine maps and of an activation alone"
        support = supports_epilogue(problem, device, computes, KINDS)
        return support and Support.of(_config(problem).support)

    def cost(self, problem: BackwardProblem, device: Device) -> float:
        return _milliseconds(problem, device, 2 + wants_input(problem))

    def compile(self, problem: BackwardProblem, device: Device) -> UngroupedBackwardPlan:
        return UngroupedBackwardPlan(problem, device)


class UngroupedBias(BackwardKernel):
    """Sums the gradient of the convolution's output, where nothing else does on its way over it."""

    name = "ungrouped_bias"
    provider = "ungrouped_cuda"
    computes = frozenset({"bias"})

    def supports(self, problem: BackwardProblem, device: Device) -> Support:
        support = supports_device(device)
        if not support:
            return support
        if problem.parts != ("bias",):
            return Support.no("sums the bias's gradient alone")
        forward = problem.forward
        if problem.grad_dtype != forward.dtype:
            return Support.no(
                f"the output's gradient is {problem.grad_dtype}, the input {forward.dtype}"
            )
        return supports_bias_sums(problem)

    def cost(self, problem: BackwardProblem, device: Device) -> float:
        copied = 2 * (grad_layout(problem) != problem.forward.output_layout)
        return _milliseconds(_bare(problem), device, 1 + copied)

    def compile(self, problem: BackwardProblem, device: Device) -> UngroupedBiasPlan:
        return UngroupedBiasPlan(problem, device)


@functools.lru_cache(maxsize=1024)
def _bare(problem: BackwardProblem) -> BackwardProblem:
    """The problem without what its epilogue has beside the bias, and whose output's gradient is the
    convolution's."""
    forward = problem.forward
    bias = tuple(stage for stage in forward.epilogue if isinstance(stage, Bias))
    return dataclasses.replace(
        problem,
        forward=dataclasses.replace(forward, epilogue=bias, output_dtype=forward.dtype),
        grad_dtype=forward.dtype,
        grad_layout=grad_layout(problem),
    )


def supports_bias_sums(problem: BackwardProblem) -> Support:
    """Whether ``add_bias_sums`` serves a problem."""
    bare = _bare(problem)
    support = supports_compiled(bare.forward)
    return support and Support.of(_config(bare).support)


def add_bias_sums(program: _C.Program, problem: BackwardProblem, grad: Any, bias: Any) -> None:
    """Appends what sums ``grad``, of the convolution's output and in the forward output's layout,
    by channel to ``bias``."""
    _add_passes(program, _config(_bare(problem)), grad_output=grad, grad_conv_bias=bias)


def _add_passes(program: _C.Program, config: Any, **operands: Any) -> None:
    """Appends the pass over tensors and, where it has sums to add, the one that adds them. Operands
    are absent unless given, under the names that the steps have for them."""
    absent = _C.Operand()

    def given(*names: str) -> dict[str, Any]:
        return {name: operands.get(name, absent) for name in names}

    partials = program.scratch(0, config.partial_bytes)
    read = given("input", "grad_output", "weight", "bias", "grad_input")
    program.per_chunk(_C.ungrouped.Gradient(config, **read, partials=partials))
    sums = given("grad_weight", "grad_bias", "grad_conv_bias")
    if any(each.present for each in sums.values()):
        program.per_chunk(_C.ungrouped.AddParts(config, partials=partials, **sums))


def _copies(problem: BackwardProblem) -> tuple[str, ...]:
    layout = problem.forward.output_layout
    if problem.grad_layout == layout:
        return ()
    return (f"torch copy of the output's gradient to {layout}",)


class UngroupedBackwardPlan(BackwardPlan):
    """One program; tensors of another layout than the forward output's are copied to it first."""

    is_exact = True
    only_launches = True
    kernel = UngroupedBackward.name

    def __init__(self, problem: BackwardProblem, device: Device) -> None:
        forward = problem.forward
        norm = forward.norm
        self._wanted = problem.gradients
        self.problem = problem
        self._device = device
        self._layout = forward.output_layout
        self._shape = forward.output_shape
        self._strides = dense_strides(self._shape, self._layout)
        self._channels = (forward.output_channels,), (1,)
        self._affine_dtype = (norm.affine_dtype if norm else None) or torch.float32
        self._program = self._build()
        self.steps = (*_copies(problem), *self._program.steps)

    def _build(self) -> _C.Program:
        program = _C.Program(self._device.index, self.problem.forward.batch, 0)
        slots = {
            "input": INPUT,
            "grad_output": GRAD_OUTPUT,
            "weight": NORM_WEIGHT,
            "bias": NORM_BIAS,
        }
        if wants_input(self.problem):
            slots["grad_input"] = GRAD_INPUT
        for gradient, operand, slot in (
            ("norm_weight", "grad_weight", GRAD_WEIGHT),
            ("norm_bias", "grad_bias", GRAD_BIAS),
            ("bias", "grad_conv_bias", GRAD_CONV_BIAS),
        ):
            if gradient in self._wanted:
                slots[operand] = slot
        operands = {name: program.tensor(slot, 0) for name, slot in slots.items()}
        _add_passes(program, _config(self.problem), **operands)
        return program

    def run(self, tensors: BackwardTensors) -> Gradients:
        grad = dense(tensors.grad_output, self._layout)
        x = dense(tensors.of_epilogue, self._layout)
        empty = allocator(x.device)
        grad_input = None
        if wants_input(self.problem):
            grad_input = empty(self._shape, self._strides, x.dtype)

        def per_channel(name: str, dtype: torch.dtype) -> Tensor | None:
            return empty(*self._channels, dtype) if name in self._wanted else None

        weight, bias = tensors.norm_weight, tensors.norm_bias
        norm_weight = per_channel("norm_weight", self._affine_dtype)
        norm_bias = per_channel("norm_bias", self._affine_dtype)
        conv_bias = per_channel("bias", x.dtype)
        run_program(
            self._program,
            x.device,
            (
                x,
                grad,
                None if weight is None else weight.contiguous(),
                None if bias is None else bias.contiguous(),
                grad_input,
                norm_weight,
                norm_bias,
                conv_bias,
            ),
        )
        return Gradients.of_epilogue(
            self.problem, grad_input, norm_weight, norm_bias, bias=conv_bias
        )


class UngroupedBiasPlan(BackwardPlan):
    """One program, over the convolution's output gradient in the forward output's layout."""

    is_exact = True
    reads_dense = True
    only_launches = True

    kernel = UngroupedBias.name

    def __init__(self, problem: BackwardProblem, device: Device) -> None:
        forward = problem.forward
        self.problem = problem
        self._device = device
        self._layout = forward.output_layout
        self._channels = (forward.output_channels,), (1,)
        self._program = program = _C.Program(device.index, forward.batch, 0)
        add_bias_sums(program, problem, program.tensor(0, 0), program.tensor(1, 0))
        self.steps = (*_copies(_bare(problem)), *program.steps)

    def run(self, tensors: BackwardTensors) -> Gradients:
        # Behind an epilogue of torch's it may be wider.
        grad = dense(tensors.of_convolution.to(self.problem.forward.dtype), self._layout)
        bias = allocator(grad.device)(*self._channels, grad.dtype)
        run_program(self._program, grad.device, (grad, bias))
        return Gradients(bias=bias)


def kernels() -> list[Kernel]:
    return [UngroupedBackward(), UngroupedBias()]
