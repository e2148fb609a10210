"""Transposed convolutions and their gradients as one matrix product a tap, for those that torch
leaves to loops of its own on processors.

Those loops spread the products of all taps out in memory and add them up element by element. Here
the input stands among zeros on a grid whose positions are the rows of a matrix: a tap of a phase of
the stride (``fusedconv.lowering``) reads all of them shifted by the same number of rows, and each
product adds to the ones before. Rows that belong to no position of the phase are computed too, and
not read. Sums run over the channels of one tap at a time, as those of torch's loops do.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedconv.device import Device
from fusedconv.kernels import onednn
from fusedconv.kernels.cpu.conv_gradients import supports_gradients
from fusedconv.kernels.cpu.convolution import (
    PROVIDER,
    Convolution,
    Form,
    computing_dtype,
    supports_form,
)
from fusedconv.kernels.cpu.matrix_product import summed_over_positions
from fusedconv.layout import Layout, empty, result_layout
from fusedconv.lowering import Phase, lower
from fusedconv.plan import BackwardKernel, BackwardPlan, BackwardTensors, Gradients, Kernel
from fusedconv.precision import dtype_name
from fusedconv.problem import BackwardProblem, ConvTransposeGeometry, ForwardProblem
from fusedconv.support import Support

#: What preparing and starting a tap's product takes, and moving a phase's positions, in launches.
_PRODUCT, _MOVE = 30.0, 12.0
#: Fewest channels on either side: products with fewer are not summed apart from what they are added
#: to, so that each of them rounds the sum.
_LEAST_CHANNELS = 16
#: Channels below which products reach a smaller share of the processor's rate.
_FULL_RATE = 64


def _supports_taps(problem: ForwardProblem, device: Device) -> Support:
    conv = problem.conv
    assert conv is not None
    if conv.groups != 1:
        return Support.no(f"groups are {conv.groups}; one matrix product a tap has none")
    dtype = computing_dtype(problem, device)
    if dtype != torch.float32:
        return Support.no(f"sums of several taps would be rounded to {dtype_name(dtype)} each")
    if not onednn.in_plain_loops(problem, device, dtype):
        return Support.no("oneDNN computes it, and torch's own loops do not")
    return Support.yes()


# ---- the grid ------------------------------------------------------------------------------------


class _Tap(NamedTuple):
    """The weight's tap ``at`` reads ``offset`` rows further on."""

    at: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _ShiftedPhase:
    """A phase of the stride: its taps, its outputs' extents, and where those are among all."""

    taps: tuple[_Tap, ...]
    extents: tuple[int, ...]
    places: tuple[Any, ...]


@dataclass(frozen=True)
class _Grid:
    """Positions with zeros around, ``front`` of them in front of each axis; the last axis's are
    rows side by side. ``phases`` reads them shifted."""

    front: tuple[int, ...]
    extents: tuple[int, ...]
    phases: tuple[_ShiftedPhase, ...]

    @property
    def num_products(self) -> int:
        return sum(len(phase.taps) for phase in self.phases)

    def used_rows(self, batch: int, extents: Sequence[int]) -> int:
        """Up to the last position of boxes that begin at each sample's first."""
        last = _row([extent - 1 for extent in extents], self.extents)
        return (batch - 1) * math.prod(self.extents) + last + 1


def _row(position: Sequence[int], extents: Sequence[int]) -> int:
    row = 0
    for at, extent in zip(position, extents, strict=True):
        row = row * extent + at
    return row


def _grid(
    conv: ConvTransposeGeometry,
    spatial: tuple[int, ...],
    *,
    of_output: bool,
) -> _Grid:
    """For the phases of the output's gradient where ``of_output``, which the input's positions
    read, and else for the input, which each phase's positions read."""
    axes = len(spatial)
    phases = list(lower(conv, spatial))
    met = [phase for phase in phases if min(phase.taps)] or phases[:1]
    front, extents = [], []
    for axis in range(3 - axes, 3):
        size = spatial[axis - 3]
        reach = [(p.taps[axis] - 1) * p.dilation[axis] - p.lower_padding[axis] for p in met]
        lower_padding = [p.lower_padding[axis] for p in met]
        outputs = [p.output[axis] for p in met]
        if of_output:
            before = max(0, *reach)
            after = max(*outputs, *(size + padding for padding in lower_padding))
        else:
            before = max(0, *lower_padding)
            after = max(size, *(n + r for n, r in zip(outputs, reach, strict=True)))
        front.append(before)
        extents.append(before + after)

    def shifted(phase: Phase) -> _ShiftedPhase:
        taps = []
        for tap in itertools.product(*map(range, phase.taps)):
            index = tuple(
                first + step * t
                for first, step, t in zip(phase.first_tap, phase.tap_step, tap, strict=True)
            )
            at = [
                t * dilation - padding
                for t, dilation, padding in zip(
                    tap, phase.dilation, phase.lower_padding, strict=True
                )
            ][-axes:]
            sign = -1 if of_output else 1
            position = [before + sign * shift for before, shift in zip(front, at, strict=True)]
            taps.append(_Tap(index[-axes:], _row(position, extents)))
        every = zip(phase.output_offset, phase.output_step, strict=True)
        places = tuple(slice(offset, None, step) for offset, step in every)
        return _ShiftedPhase(tuple(taps), phase.output[-axes:], (..., *places[-axes:]))

    return _Grid(tuple(front), tuple(extents), tuple(map(shifted, phases)))


def _box(extents: Sequence[int], front: Sequence[int] | None = None) -> tuple[Any, ...]:
    """What picks a box of the last axes, ``front`` positions behind the first."""
    begins = [0] * len(extents) if front is None else front
    return (..., *(slice(at, at + n) for at, n in zip(begins, extents, strict=True)))


class _Rows(NamedTuple):
    """A matrix [rows, channels] in float32 and the same memory as [N, C, *grid]."""

    matrix: Tensor
    tensor: Tensor

    @staticmethod
    def of(like: Tensor, batch: int, channels: int, extents: tuple[int, ...], layout: str) -> _Rows:
        """Uninitialised; a row's channels side by side where the layout is channels last."""
        if layout == "nhwc":
            memory = like.new_empty(batch, *extents, channels, dtype=torch.float32)
            return _Rows(memory.view(-1, channels), memory.movedim(-1, 1))
        memory = like.new_empty(channels, batch, *extents, dtype=torch.float32)
        return _Rows(memory.view(channels, -1).t(), memory.transpose(0, 1))

    @staticmethod
    def among_zeros(
        tensor: Tensor, extents: tuple[int, ...], front: Sequence[int], layout: str
    ) -> _Rows:
        """A tensor [N, C, *box] that begins ``front`` positions behind the grid's first."""
        rows = _Rows.of(tensor, tensor.shape[0], tensor.shape[1], extents, layout)
        rows.matrix.zero_()
        rows.tensor[_box(tensor.shape[2:], front)].copy_(tensor)
        return rows


def _taps_first(weight: Tensor) -> Tensor:
    """The weight as matrices [C, K], one a tap."""
    return weight.to(torch.float32).permute(*range(2, weight.dim()), 0, 1).contiguous()


# ---- costs ---------------------------------------------------------------------------------------


def _products_milliseconds(problem: ForwardProblem, device: Device, grid: _Grid) -> float:
    """Of every tap with every row once."""
    conv = problem.conv
    assert conv is not None
    more = math.prod(grid.extents) / math.prod(problem.spatial)
    share = min(1.0, min(conv.in_channels, conv.out_channels) / _FULL_RATE)
    products = onednn.matrix_milliseconds(problem, device, torch.float32) * more / share
    started = _PRODUCT * grid.num_products * device.launch_milliseconds
    # The weight is brought into another order.
    weight = onednn.copy_milliseconds(
        device, onednn.weight_elements(problem), problem.dtype, torch.float32
    )
    return products + started + weight


def _moving_milliseconds(problem: ForwardProblem, device: Device, grid: _Grid) -> float:
    """Of the output's phases put in their places or taken from there, and of the input."""
    moved = problem.dtype.itemsize + torch.float32.itemsize
    elements = problem.input_elements + problem.output_elements
    moves = (1 + len(grid.phases)) * _MOVE * device.launch_milliseconds
    return moves + device.copy_milliseconds(elements * moved)


# ---- forward -------------------------------------------------------------------------------------


class _ShiftedProducts(Convolution):
    def __init__(self, problem: ForwardProblem, layout: Layout) -> None:
        step = "torch matrix products, one a tap, of shifted rows"
        super().__init__(problem, torch.float32, layout, step)
        self.grid = _grid(self.conv, problem.spatial, of_output=False)
        self.shape = problem.output_shape

    def compute(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        grid = self.grid
        batch, channels = self.shape[:2]
        # Rows of channels multiply faster than columns, and channels first are written as fast.
        rows = _Rows.among_zeros(input, grid.extents, grid.front, "nhwc").matrix
        sums = _Rows.of(input, batch, channels, grid.extents, "nhwc")
        matrices = _taps_first(weight)
        output = empty(input, self.shape, self.layout, torch.float32)
        added = input.new_zeros(channels) if bias is None else bias
        added = added.view(-1, *(1,) * len(grid.extents))
        for phase in grid.phases:
            part = output[phase.places]
            if not phase.taps:
                part.copy_(added)
                continue
            used = grid.used_rows(batch, phase.extents)
            total = sums.matrix[:used]
            for number, (index, offset) in enumerate(phase.taps):
                shifted = rows[offset : offset + used]
                if number:
                    total.addmm_(shifted, matrices[index])
                else:
                    torch.mm(shifted, matrices[index], out=total)
            # The bias is added last, as torch's loops do: a large one would round every sum.
            torch.add(sums.tensor[_box(phase.extents)], added, out=part)
        return output


class ShiftedProducts(Form):
    """One matrix product a tap, of the input's pixels shifted, where torch's own loops would
    compute the convolution."""

    name = "shifted_products"

    def supports(self, problem: ForwardProblem, device: Device) -> Support:
        support = supports_form(problem) and _supports_taps(problem, device)
        least = min(problem.channels, problem.output_channels)
        if support and least < _LEAST_CHANNELS:
            return Support.no(
                f"there are {least} channels on one side, and sums of them are less exact than "
                f"torch's below {_LEAST_CHANNELS}"
            )
        return support

    def cost(self, problem: ForwardProblem, device: Device) -> float:
        assert problem.conv is not None
        grid = _grid(problem.conv, problem.spatial, of_output=False)
        return _products_milliseconds(problem, device, grid) + _moving_milliseconds(
            problem, device, grid
        )

    def compile(self, problem: ForwardProblem, device: Device) -> Convolution:
        return _ShiftedProducts(problem, result_layout(problem.layout))


# ---- backward ------------------------------------------------------------------------------------


class _ShiftedGradientsPlan(BackwardPlan):
    def __init__(self, kernel: str, problem: BackwardProblem) -> None:
        forward = problem.forward
        assert forward.conv is not None
        self.kernel = kernel
        self.gradients = problem.gradients
        self.layout = result_layout(forward.layout)
        self.grid = _grid(forward.conv, forward.spatial, of_output=True)
        self.spatial = forward.spatial
        asked = [name for name in ("input", "weight") if name in problem.gradients]
        self.steps = tuple(
            f"torch matrix products, one a tap, of shifted rows for {name}" for name in asked
        )

    def run(self, tensors: BackwardTensors) -> Gradients:
        assert tensors.weight is not None
        grid, grad = self.grid, tensors.of_convolution
        used = grid.used_rows(grad.shape[0], self.spatial)
        # Of a tap: its index, and the rows of its phase's gradient that the input's positions read.
        shifted = []
        for phase in grid.phases:
            if phase.taps:
                part = grad[phase.places]
                rows = _Rows.among_zeros(part, grid.extents, grid.front, self.layout).matrix
                shifted += [(tap.at, rows[tap.offset : tap.offset + used]) for tap in phase.taps]
        found = Gradients()
        if "input" in self.gradients:
            found = found._replace(input=self._of_input(tensors, shifted, used))
        if "weight" in self.gradients:
            found = found._replace(weight=self._of_weight(tensors, shifted, used))
        return found

    def _of_input(
        self, tensors: BackwardTensors, shifted: list[tuple[tuple[int, ...], Tensor]], used: int
    ) -> Tensor:
        input, weight = tensors.input, tensors.weight
        assert weight is not None
        matrices = _taps_first(weight)
        sums = _Rows.of(input, input.shape[0], input.shape[1], self.grid.extents, self.layout)
        total = sums.matrix[:used]
        for number, (index, rows) in enumerate(shifted):
            if number:
                total.addmm_(rows, matrices[index].t())
            else:
                torch.mm(rows, matrices[index].t(), out=total)
        if not shifted:
            total.zero_()
        found = empty(input, input.shape, self.layout, torch.float32)
        return found.copy_(sums.tensor[_box(self.spatial)])

    def _of_weight(
        self, tensors: BackwardTensors, shifted: list[tuple[tuple[int, ...], Tensor]], used: int
    ) -> Tensor:
        input, weight = tensors.input, tensors.weight
        assert weight is not None
        front = (0,) * len(self.spatial)
        pixels = _Rows.among_zeros(input, self.grid.extents, front, self.layout).matrix[:used]
        # Taps that meet no pixel have no product.
        every = math.prod(weight.shape[2:]) == len(shifted)
        make = input.new_empty if every else input.new_zeros
        found = make(*weight.shape[2:], *weight.shape[:2], dtype=torch.float32)
        for index, rows in shifted:
            found[index] = summed_over_positions(pixels.unsqueeze(0), rows.unsqueeze(0))
        axes = len(self.spatial)
        return found.permute(axes, axes + 1, *range(axes)).contiguous()


class ShiftedGradients(BackwardKernel):
    """One matrix product a tap, of the output gradient's phases shifted, where torch's own loops
    would compute the gradients."""

    name = f"{PROVIDER}_shifted_products_backward"
    provider = PROVIDER
    computes = frozenset({"input", "weight"})

    def supports(self, problem: BackwardProblem, device: Device) -> Support:
        return supports_gradients(problem, device) and _supports_taps(problem.forward, device)

    def cost(self, problem: BackwardProblem, device: Device) -> float:
        forward = problem.forward
        assert forward.conv is not None
        grid = _grid(forward.conv, forward.spatial, of_output=True)
        products = _products_milliseconds(forward, device, grid)
        return len(problem.parts) * products + _moving_milliseconds(forward, device, grid)

    def compile(self, problem: BackwardProblem, device: Device) -> BackwardPlan:
        return _ShiftedGradientsPlan(self.name, problem)


def kernels() -> list[Kernel]:
    return [ShiftedGradients()]
