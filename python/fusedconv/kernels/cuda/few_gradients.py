"""Gradients of ungrouped transposed convolutions of up to four input channels on CUDA, by
multiply-adds in float32: the input's and the weight's in one pass over the output's gradient, whose
lines a block stages in shared memory for all the taps that meet them. Channels first."""

from __future__ import annotations

import functools
import math
from typing import Any

from fusedconv import _C
from fusedconv.device import Device
from fusedconv.kernels.compiled import supports_compiled, supports_extents, transposed_problem
from fusedconv.kernels.cuda.conditions import FAMILIES, NotBuiltBackward, supports_device
from fusedconv.kernels.cuda.convolution import filter_source, weight_gradient
from fusedconv.kernels.cuda.direct_gradients import (
    COPY_SHARE,
    GRAD_INPUT,
    GRAD_OUTPUT,
    GRAD_WEIGHT,
    INPUT,
    WEIGHT,
    DirectGradientsPlan,
    bias_milliseconds,
    supports_direct_bias,
)
from fusedconv.layout import dense_strides
from fusedconv.norms import KINDS
from fusedconv.plan import BackwardKernel, Kernel
from fusedconv.precision import COMPILED_DTYPES
from fusedconv.problem import BackwardProblem, ConvTransposeGeometry
from fusedconv.support import Support

# Instructions of a warp, counted in what is compiled for a filter of three taps along width, stride
# 2 and three input channels. A line of taps, at the eight positions of each thread, beside its
# multiply-adds and the values that it reads:
_LINE_INSTRUCTIONS = 17.0
#: The same for each of the weight's numbers, whose sums are added over the warp.
_SUM_INSTRUCTIONS = 4.6
#: An element of a staged line, and what else an output channel takes.
_STAGED_INSTRUCTIONS = 5.6
_CHANNEL_INSTRUCTIONS = 300.0
#: Positions of a thread, and warps of a block, one for each of a multiprocessor's schedulers.
_POSITIONS = 8
_WARPS = 4
#: The share of the instructions that a multiprocessor could start that it does: of as many blocks
#: as it holds, and of one. Guesses, no GPU has timed them.
_FULL_SHARE = 0.65
_ALONE_SHARE = 0.3


@functools.lru_cache(maxsize=1024)
def _config(problem: BackwardProblem) -> Any:
    """How the sums are cut; its ``support`` says why they cannot be."""
    forward = problem.forward
    assert forward.conv is not None
    return _C.direct.few_config(
        transposed_problem(forward.conv, forward.spatial, forward.output_layout, problem.aligned),
        dtype=COMPILED_DTYPES[forward.dtype],
        batch=forward.batch,
    )


class FewGradients(BackwardKernel):
    name = "direct_few_gradients"
    provider = "direct_gradients"
    computes = frozenset({"input", "weight", "bias"})

    def supports(self, problem: BackwardProblem, device: Device) -> Support:
        forward = problem.forward
        conv = forward.conv
        if conv is None:
            return Support.no("computes gradients of convolutions; the problem has none")
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
        both = ("input" in gradients) + ("weight" in gradients)
        total = bias_milliseconds(problem, device)
        if both == 0:
            return total
        config, size = _config(problem), forward.dtype.itemsize
        moved = both * forward.input_elements + forward.output_elements
        cycles = self._item_cycles(problem, config) * forward.output_channels
        each = math.ceil(config.items / max(1, device.multiprocessors))
        cycles *= max(each / _FULL_SHARE, 1 / _ALONE_SHARE)
        total += max(
            device.copy_milliseconds(moved * size) / COPY_SHARE, cycles * 1e3 / device.clock_hertz
        )
        if "weight" in gradients:
            total += device.copy_milliseconds(2 * config.partial_bytes)
        launches = 1 + ("weight" in gradients)
        return total + launches * device.launch_milliseconds

    def _item_cycles(self, problem: BackwardProblem, config: Any) -> float:
        """For a tile and an output channel, did a multiprocessor start an instruction of each
        of the block's warps in each cycle."""
        conv, wanted = problem.forward.conv, problem.gradients
        assert conv is not None
        numbers = conv.kernel_size[-1] * conv.in_channels
        both = ("input" in wanted) + ("weight" in wanted)
        line = _LINE_INSTRUCTIONS + config.values + both * _POSITIONS * numbers
        if "weight" in wanted:
            line += _SUM_INSTRUCTIONS * numbers
        lines = config.taps // conv.kernel_size[-1]
        staged = config.lines / _WARPS * config.passes * _STAGED_INSTRUCTIONS
        return lines * line + staged + _CHANNEL_INSTRUCTIONS

    def compile(self, problem: BackwardProblem, device: Device) -> FewGradientsPlan:
        return FewGradientsPlan(problem, device)


class FewGradientsPlan(DirectGradientsPlan):
    kernel = FewGradients.name

    @staticmethod
    def _weight_strides(conv: ConvTransposeGeometry) -> tuple[int, ...]:
        return dense_strides(conv.weight_shape, conv.weight_layout)

    def _add_steps(self, program: _C.Program) -> None:
        conv, wanted = self.problem.forward.conv, self.problem.gradients
        assert conv is not None
        if not wanted & {"input", "weight"}:
            return
        config, absent = _config(self.problem), _C.Operand()
        gives, weighs = "input" in wanted, "weight" in wanted
        partials = program.scratch(0, config.partial_bytes) if weighs else absent
        program.per_chunk(
            _C.direct.FewGradients(
                config,
                source=filter_source(conv),
                input=program.tensor(INPUT, 0) if weighs else absent,
                grad_output=program.tensor(GRAD_OUTPUT, 0),
                weight=program.tensor(WEIGHT, 0) if gives else absent,
                grad_input=program.tensor(GRAD_INPUT, 0) if gives else absent,
                partials=partials,
            )
        )
        if weighs:
            program.per_chunk(
                _C.direct.AddFewParts(
                    config,
                    target=weight_gradient(conv),
                    partials=partials,
                    grad_weight=program.tensor(GRAD_WEIGHT, 0),
                )
            )


def kernels() -> list[Kernel]:
    if "direct" not in FAMILIES:
        return [NotBuiltBackward(FewGradients.name, FewGradients.provider)]
    return [FewGradients()]
