"""What rows of compute capability 9.0 share whose convolution's tensors come by tensor copies.

Copies start at whole 16 bytes: shifted by a pixel along width they read channels last. So inputs in
NCHW are transposed first, unless the filter is as large as its stride; outputs where the row stores
channels last alone. Pixels that are not whole 16 bytes are padded in front and cut behind.

Where only the result of a normalisation is asked for and products take less than memory, it is
convolved twice: for the moments, of which nothing is stored, and with the normalisation in the
epilogue.
"""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from typing import Any

from fusedconv.device import Device
from fusedconv.kernels.compiled import readable_aligned
from fusedconv.kernels.cuda.boxes_costs import COSTS, CostConstants
from fusedconv.kernels.cuda.convolution import goes_through_scratch
from fusedconv.kernels.cuda.program import ForwardProgram, ProgramPlan
from fusedconv.kernels.cuda.taps import TapsRow, taps_config
from fusedconv.kernels.cuda.transposing import (
    has_whole_vectors,
    padded_elements,
    whole_channels,
)
from fusedconv.norms import KINDS
from fusedconv.problem import ForwardProblem, act_norm_act
from fusedconv.support import Support


class CopiedRow(TapsRow):
    """A row whose room has ``ConvolveNormalizing`` beside the steps of others."""

    architecture = 90
    most_blocks = (1 << 30) - 1

    @property
    def reads_planes(self) -> bool:
        """Whether it reads channels first."""
        return False

    @property
    def stores_planes(self) -> bool:
        """Whether it can store channels first."""
        return False

    @abstractmethod
    def can_take_moments(self, problem: ForwardProblem, config: Any) -> bool:
        """Whether a convolution that stores nothing, at least, can take GroupNorm's moments."""

    def _normalises(self, problem: ForwardProblem, device: Device) -> bool:
        """Whether the convolution's epilogue normalises pixels, whose channels a block has all."""
        return False

    def _saves_apart(self, problem: ForwardProblem) -> bool:
        """Whether the convolution's epilogue stores its output, which is saved, and what becomes of
        that: an activation and an affine map, in the same layout and dtype."""
        return False

    @abstractmethod
    def _launch_milliseconds(
        self,
        problem: ForwardProblem,
        device: Device,
        costs: CostConstants,
        stored: int,
        beside: float,
    ) -> float:
        """The convolution once, each output ``stored`` so many times, 0 for moments alone; with
        something of a GroupNorm ``beside`` a column, boxes are of one sample."""

    def config(self, problem: ForwardProblem, device: Device) -> Any:
        aligned = self._rewrites_input(problem) or readable_aligned(problem)
        layout = self._conv_layout(problem)
        if self._pads_input(problem) or self._pads_output(problem):
            problem = self._padded(problem)
        return taps_config(self.room, self.index, problem, layout, aligned, device)

    def _padded(self, problem: ForwardProblem) -> ForwardProblem:
        """The problem with the channels that the convolution's tensors have in memory."""
        conv = problem.conv
        assert conv is not None
        inputs, outputs = conv.in_channels, conv.out_channels
        if self._pads_input(problem):
            inputs = whole_channels(inputs, problem.dtype)
        if self._pads_output(problem):
            outputs = whole_channels(outputs, problem.dtype)
        padded = dataclasses.replace(conv, in_channels=inputs, out_channels=outputs)
        return dataclasses.replace(problem, channels=inputs, conv=padded)

    def _pads_input(self, problem: ForwardProblem) -> bool:
        """Whether pixels of the input are padded with zeros to whole 16 bytes, as copies of pixels
        ask."""
        conv = problem.conv
        assert conv is not None
        whole = has_whole_vectors(problem.channels, problem.dtype)
        return not whole and conv.groups == 1 and not self.reads_planes

    def _pads_output(self, problem: ForwardProblem) -> bool:
        """The same of what the convolution stores, which is cut behind it."""
        conv = problem.conv
        assert conv is not None
        whole = has_whole_vectors(problem.output_channels, problem.dtype)
        return not whole and conv.groups == 1 and self._conv_layout(problem) == "nhwc"

    def _row_channels(self, problem: ForwardProblem) -> int:
        """Of a pixel that the convolution stores."""
        channels = problem.output_channels
        return whole_channels(channels, problem.dtype) if self._pads_output(problem) else channels

    def _rewrites_input(self, problem: ForwardProblem) -> bool:
        """Whether it is transposed or padded first."""
        if self.reads_planes:
            return False
        return problem.output_layout != "nhwc" or self._pads_input(problem)

    def _conv_layout(self, problem: ForwardProblem) -> str:
        """Of the convolution's output."""
        return problem.output_layout if self.stores_planes else "nhwc"

    def _rewrites_output(self, problem: ForwardProblem) -> bool:
        """Whether a pass behind the convolution transposes or cuts it."""
        return self._conv_layout(problem) != problem.output_layout or self._pads_output(problem)

    def supports(self, problem: ForwardProblem, device: Device) -> Support:
        support = super().supports(problem, device)
        if not support or not self._rewrites_output(problem):
            return support
        form = act_norm_act(problem.epilogue, frozenset(KINDS))
        norm = None if isinstance(form, Support) else form.norm
        if norm is not None and norm.kind == "layer" and not self._normalises(problem, device):
            return Support.no("the passes that transpose its output have no norm of pixels")
        return Support.yes()

    def _elements(self, problem: ForwardProblem) -> tuple[int, int]:
        """Of the tensors that the convolution reads and stores, padding counted."""
        read, written = problem.input_elements, problem.output_elements
        if self._pads_input(problem):
            read = padded_elements(problem.input_shape, problem.dtype)
        if self._pads_output(problem):
            written = padded_elements(problem.output_shape, problem.dtype)
        return read, written

    def can_compute_twice(self, problem: ForwardProblem, device: Device) -> bool:
        form = act_norm_act(problem.epilogue, frozenset(KINDS))
        return (
            not isinstance(form, Support)
            and form.before == "identity"
            and not problem.save
            and not goes_through_scratch(problem)
            and not self._rewrites_output(problem)
            and self.can_take_moments(problem, self.config(problem, device))
        )

    def computes_twice(self, problem: ForwardProblem, device: Device) -> bool:
        """Whether the convolution is computed once for moments and once more, normalised."""
        if not self.can_compute_twice(problem, device):
            return False
        twice, once = (
            self._milliseconds(problem, device, COSTS, twice=each) for each in (True, False)
        )
        return twice < once

    def scratch_bytes(self, problem: ForwardProblem, config: Any) -> int:
        elements = 0
        if self._rewrites_input(problem):
            channels = problem.channels
            if self._pads_input(problem):
                channels = whole_channels(channels, problem.dtype)
            elements += math.prod(problem.spatial) * channels
        if self._rewrites_output(problem):
            channels = self._row_channels(problem)
            # What is of another dtype than the result is counted as in scratch as it is.
            if goes_through_scratch(problem):
                channels -= problem.output_channels
            elements += math.prod(problem.output_spatial) * channels
        scratch = super().scratch_bytes(problem, config) + elements * problem.dtype.itemsize
        if self.can_take_moments(problem, config) and not self.takes_moments(problem, config):
            scratch += int(config.partial_bytes_per_sample)  # where it is computed twice
        return scratch

    def passes(self, problem: ForwardProblem, device: Device) -> int:
        return 0 if self.computes_twice(problem, device) else self._passes_of_one(problem, device)

    def _passes_of_one(self, problem: ForwardProblem, device: Device) -> int:
        """Behind a convolution that is computed once."""
        if self._normalises(problem, device) or self._saves_apart(problem):
            return 0
        return super().passes(problem, device)

    def _rewrite_input(self, program: ForwardProgram) -> None:
        """Appends what transposes or pads the input, where something does."""
        problem = program.problem
        if self._rewrites_input(problem):
            padded = whole_channels(problem.channels, problem.dtype)
            program.input = program.channels_last_input(padded_channels=padded)

    def convolve(
        self,
        program: ForwardProgram,
        config: Any,
        output: Any,
        filter: Any | None = None,
        saved: Any | None = None,
    ) -> Any:
        problem = program.problem
        self._rewrite_input(program)
        if not self._normalises(problem, program.device):
            return super().convolve(program, config, output, filter, saved)
        if filter is None:
            filter = self.pack_filter(program, config)
        norm = self.behind(program)
        self._convolve_normalising(program, config, output, filter, norm, program.absent)
        return program.absent

    def _convolve_normalising(
        self,
        program: ForwardProgram,
        config: Any,
        output: Any,
        filter: Any,
        norm: Any,
        statistics: Any,
    ) -> None:
        """Appends what normalises in its epilogue: pixels where there are no statistics."""
        program.compiled.per_chunk(
            self.room.ConvolveNormalizing(
                config,
                norm=norm,
                input=program.input,
                filter=filter,
                bias=program.bias,
                statistics=statistics,
                weight=program.norm_weight,
                norm_bias=program.norm_bias,
                output=output,
            )
        )

    def compile(self, problem: ForwardProblem, device: Device) -> ProgramPlan:
        config = self.config(problem, device)
        program = ForwardProgram(problem, device, self.chunk(problem, config))
        if self._saves_apart(problem):
            self.convolve(program, config, program.output, saved=program.conv_output)
            return program.plan(self.name)
        if self.computes_twice(problem, device):
            self._rewrite_input(program)
            filter = self.pack_filter(program, config)
            partials = program.scratch(config.partial_bytes_per_sample)
            self.convolve_plainly(program, config, filter, program.absent, partials)
            norm, statistics = self.statistics(program, config, partials)
            self._convolve_normalising(program, config, program.output, filter, norm, statistics)
            return program.plan(self.name)
        if not self._rewrites_output(problem):
            return super().compile(problem, device)
        row_channels = self._row_channels(problem)
        pixels = math.prod(problem.output_spatial)
        output = program.scratch(pixels * row_channels * problem.dtype.itemsize)
        program.conv_layout, program.conv_row_channels = "nhwc", row_channels
        partials = self.convolve(program, config, output)
        if problem.saves_conv_output:
            program.save_conv_output(output, row_channels=row_channels)
        if self.passes(problem, device) == 0:
            program.transpose(output, program.output, row_channels=row_channels)
        else:
            self.finish(program, config, output, partials)
        return program.plan(self.name)

    def cost(self, problem: ForwardProblem, device: Device) -> float:
        return self.estimate(problem, device, COSTS)

    def estimate(self, problem: ForwardProblem, device: Device, costs: CostConstants) -> float:
        """Milliseconds of a supported problem, were the constants these."""
        twice = self.computes_twice(problem, device)
        return self._milliseconds(problem, device, costs, twice)

    def _milliseconds(
        self, problem: ForwardProblem, device: Device, costs: CostConstants, twice: bool
    ) -> float:
        config = self.config(problem, device)
        size = problem.dtype.itemsize
        takes_moments = twice or self.takes_moments(problem, config)
        read, written = self._elements(problem)
        packs = not self.reads_weight(problem, config)
        packed = config.filter_bytes / size * costs.pack * 1e3 if packs else 0.0
        chunks = -(-problem.batch // self.chunk(problem, config))
        if twice:
            milliseconds = self._launch_milliseconds(problem, device, costs, 0, costs.moments[size])
            milliseconds += self._launch_milliseconds(problem, device, costs, 1, costs.normalised)
            launches = packs + 3 * chunks
            moved = 2 * problem.input_elements * size if problem.layout == "strided" else 0
            beside = device.copy_milliseconds(moved) + launches * device.launch_milliseconds
        else:
            stored = 1 + self._saves_apart(problem)
            moments = costs.moments[size] if takes_moments else 0.0
            milliseconds = self._launch_milliseconds(problem, device, costs, stored, moments)
            passes = self._passes_of_one(problem, device)
            beside = self.milliseconds_beside(problem, device, chunks, passes)
            if chunks and not packs:
                beside -= device.launch_milliseconds
        if chunks and not packs and not self._rewrites_input(problem):
            milliseconds -= costs.behind_pass * 1e3 / device.clock_hertz
        if takes_moments:
            # Partial moments, read as sectors of which a group may have a part.
            partials = 2 * problem.batch * config.partial_bytes_per_sample
            beside += device.copy_milliseconds(partials)
        elif problem.norm_groups:
            # A pass takes the moments, in two launches where one merges what the convolution left.
            beside += device.copy_milliseconds(problem.output_elements * size)
            beside += chunks * device.launch_milliseconds
        if self._rewrites_input(problem):
            rewritten = device.copy_milliseconds((problem.input_elements + read) * size)
            beside += rewritten * costs.transposed
            beside += chunks * device.launch_milliseconds
        if self._rewrites_output(problem):
            # What normalises transposes as well, more slowly than it would go over planes.
            stores_result = self._passes_of_one(problem, device) == 0
            trips = costs.transposed if stores_result else costs.transposed - 1.0
            rewritten = device.copy_milliseconds((problem.output_elements + written) * size)
            beside += rewritten * trips
            beside += chunks * device.launch_milliseconds
        return milliseconds + packed + beside
