"""Gradients through LayerNorm over channels and affine maps of channels on CUDA, activations
included: one pass over what they were computed from and the output's gradient."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fusedconv import _C
from fusedconv.device import Device
from fusedconv.kernels.cuda.gradients import compiled_problem, supports_epilogue, wants_input
from fusedconv.kernels.cuda.program import allocator, run_program
from fusedconv.layout import dense, dense_strides
from fusedconv.plan import BackwardKernel, BackwardPlan, BackwardTensors, Gradients, Kernel
from fusedconv.problem import BackwardProblem
from fusedconv.support import Support

# Slots of the pointers that the program gets, in this order.
INPUT, GRAD_OUTPUT, NORM_WEIGHT, NORM_BIAS, GRAD_INPUT, GRAD_WEIGHT, GRAD_BIAS, GRAD_CONV_BIAS = (
    range(8)
)

#: Kinds of ``fusedconv.norms.KINDS`` that the kernel has.
KINDS = frozenset({"layer", "affine"})
#: Times what moving the bytes takes at copy rate: a guess, no GPU has timed it.
_PASSES_OVER_COPY = 1.3


@functools.lru_cache(maxsize=1024)
def _config(problem: BackwardProblem) -> Any:
    """How sums are left; its ``support`` says why it cannot be."""
    norm = problem.forward.norm
    assert norm is not None
    room = _C.ungrouped
    return room.gradient_config(compiled_problem(problem), getattr(room.Kind, norm.kind))


class UngroupedBackward(BackwardKernel):
    name = "ungrouped_backward"
    provider = "ungrouped_cuda"
    computes = frozenset({"epilogue", "bias"})

    def supports(self, problem: BackwardProblem, device: Device) -> Support:
        computes = "LayerNorm over channels and of affine maps"
        support = supports_epilogue(problem, device, computes, KINDS)
        return support and Support.of(_config(problem).support)

    def cost(self, problem: BackwardProblem, device: Device) -> float:
        forward = problem.forward
        passes = 2 + wants_input(problem)
        moved = passes * forward.output_elements * forward.dtype.itemsize
        moved += 2 * _config(problem).partial_bytes
        return 2 * device.launch_milliseconds + _PASSES_OVER_COPY * device.copy_milliseconds(moved)

    def compile(self, problem: BackwardProblem, device: Device) -> UngroupedBackwardPlan:
        return UngroupedBackwardPlan(problem, device)


class UngroupedBackwardPlan(BackwardPlan):
    """One program; tensors of another layout than the forward output's are copied to it first."""

    kernel = UngroupedBackward.name

    def __init__(self, problem: BackwardProblem, device: Device) -> None:
        forward = problem.forward
        norm = forward.norm
        assert norm is not None
        self._wanted = problem.gradients
        self.problem = problem
        self._device = device
        self._layout = forward.output_layout
        self._shape = forward.output_shape
        self._strides = dense_strides(self._shape, self._layout)
        self._channels = (forward.output_channels,), (1,)
        self._affine_dtype = norm.affine_dtype or torch.float32
        self._program = self._build()
        copies = []
        if problem.grad_layout != self._layout:
            copies.append(f"torch copy of the output's gradient to {self._layout}")
        self.steps = (*copies, *self._program.steps)

    def _build(self) -> _C.Program:
        config = _config(self.problem)
        program = _C.Program(self._device.index, self.problem.forward.batch, 0)
        absent = _C.Operand()

        def wanted(slot: int, name: str) -> Any:
            return program.tensor(slot, 0) if name in self._wanted else absent

        partials = program.scratch(0, config.partial_bytes)
        program.per_chunk(
            _C.ungrouped.Gradient(
                config,
                input=program.tensor(INPUT, 0),
                grad_output=program.tensor(GRAD_OUTPUT, 0),
                weight=program.tensor(NORM_WEIGHT, 0),
                bias=program.tensor(NORM_BIAS, 0),
                grad_input=program.tensor(GRAD_INPUT, 0) if wants_input(self.problem) else absent,
                partials=partials,
            )
        )
        if self._wanted & {"norm_weight", "norm_bias", "bias"}:
            program.per_chunk(
                _C.ungrouped.AddParts(
                    config,
                    partials=partials,
                    grad_weight=wanted(GRAD_WEIGHT, "norm_weight"),
                    grad_bias=wanted(GRAD_BIAS, "norm_bias"),
                    grad_conv_bias=wanted(GRAD_CONV_BIAS, "bias"),
                )
            )
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
            self._device,
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
            x,
        )
        return Gradients.of_epilogue(
            self.problem, grad_input, norm_weight, norm_bias, bias=conv_bias
        )


def kernels() -> list[Kernel]:
    return [UngroupedBackward()]
