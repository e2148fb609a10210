"""What rows of compiled convolutions share: a ``Config`` made of a problem, and the steps that pack
the weight, convolve with the epilogue and merge the moments of GroupNorm."""

from __future__ import annotations

import functools
from abc import abstractmethod
from typing import Any

import torch

from fusedconv import _C
from fusedconv.activations import COMPILED
from fusedconv.device import Device
from fusedconv.kernels.compiled import (
    by_axis,
    group_norm_problem,
    readable_aligned,
    supports_extents,
    transposed_problem,
)
from fusedconv.kernels.cuda.conditions import supports_forward, supports_precision
from fusedconv.kernels.cuda.program import ForwardProgram, ProgramPlan, equal_chunk, five_strides
from fusedconv.layout import dense_strides
from fusedconv.norms import KINDS
from fusedconv.plan import ForwardKernel
from fusedconv.precision import Precision, dtype_name
from fusedconv.problem import ActNormAct, ConvTransposeGeometry, ForwardProblem, act_norm_act
from fusedconv.support import Support

#: Scratch that one chunk of samples may take.
CHUNK_BYTES = 2 << 30
#: Normalisations without groups that a step of ours behind the convolution computes.
UNGROUPED = frozenset({"layer"})


def supports_transposed(
    problem: ForwardProblem,
    device: Device,
    precision: Precision,
    ungrouped: frozenset[str],
    architecture: int | None,
) -> Support:
    """What rows ask for that compute in ``precision``, transposed convolutions as they are, with an
    affine map in the epilogue; ``ungrouped`` and ``architecture`` as ``supports_forward`` takes
    them."""
    conv = problem.conv
    if conv is None:
        return Support.no("computes convolutions; the problem has none")
    for support in (
        supports_forward(problem, device, ungrouped, architecture),
        supports_precision(problem, precision),
        supports_affine(problem),
        supports_extents(conv, problem.spatial),
    ):
        if not support:
            return support
    return Support.yes()


def supports_multiply_adds(
    row: ConvolutionRow,
    problem: ForwardProblem,
    device: Device,
    architecture: int | None = None,
) -> Support:
    """What rows ask for that compute in float32 and whose config is of the problem alone;
    ``architecture`` as ``supports_forward`` takes it."""
    conv = problem.conv
    if conv is None:
        return Support.no("computes convolutions; the problem has none")
    for support in (
        supports_forward(problem, device, row.ungrouped, architecture),
        _supports_float32(problem, row.precision),
        supports_extents(conv, problem.spatial),
    ):
        if not support:
            return support
    return Support.of(row.config(problem, device).support)


def _supports_float32(problem: ForwardProblem, precision: Precision) -> Support:
    # Products in float32 are what strict fp32 asks for, and more than TF32 does.
    served = ("fp32", "tf32") if precision == "fp32" else (precision,)
    if problem.precision not in served:
        return Support.no(f"computes in {precision}, {problem.precision} is asked for")
    return Support.yes()


def filter_source(conv: ConvTransposeGeometry) -> Any:
    """A convolution's weight as kernels read it."""
    return _C.FilterSource(
        c=conv.in_channels,
        k=conv.out_channels // conv.groups,
        taps=by_axis(conv.kernel_size),
        strides=five_strides(conv.weight_strides),
    )


@functools.lru_cache(maxsize=4096)
def _reading_config(
    room: Any,
    row: int,
    conv: ConvTransposeGeometry,
    spatial: tuple[int, ...],
    layout: str,
    aligned: bool,
    device: Device,
) -> Any:
    return room.Config(
        room.rows()[row],
        problem=transposed_problem(conv, spatial, layout, aligned),
        source=filter_source(conv),
        device=device.compiled,
    )


def reading_config(room: Any, row: int, problem: ForwardProblem, device: Device) -> Any:
    """How a row of ``room`` that reads the weight as it lies serves a problem with a
    convolution."""
    assert problem.conv is not None
    aligned = readable_aligned(problem)
    layout = problem.output_layout
    return _reading_config(room, row, problem.conv, problem.spatial, layout, aligned, device)


def weight_gradient(conv: ConvTransposeGeometry) -> Any:
    """A weight's gradient as kernels write it."""
    return _C.FilterSource(
        c=conv.in_channels,
        k=conv.out_channels // conv.groups,
        taps=by_axis(conv.kernel_size),
        strides=five_strides(dense_strides(conv.weight_shape, conv.weight_layout)),
    )


def supports_partials(problem: ForwardProblem, config: Any) -> Support:
    """Whether the partial moments that a config's convolution leaves of a group can be merged."""
    if not problem.norm_groups:
        return Support.yes()
    partials = config.partial_slots * (problem.output_channels // problem.norm_groups)
    most = _C.group_norm.most_partials
    if partials > most:
        return Support.no(f"a group leaves {partials} partial moments, at most {most} are merged")
    return Support.yes()


def packed_filter(
    room: Any, program: Any, config: Any, source: Any, *, reads_weight: bool = False
) -> Any:
    """Appends the step of a room that packs a program's weight, which lies as ``source`` says; the
    filter that convolutions take: where a config ``reads_weight``, that as it lies."""
    filter = program.scratch(0, config.filter_bytes)
    program.compiled.before(
        room.PackFilter(config, source=source, weight=program.weight, filter=filter)
    )
    if not reads_weight:
        return filter
    return _C.FilterOperand(filter, weight=program.weight, source=source)


class ConvolutionRow(ForwardKernel):
    """A row of ``room.rows()``, whose ``Config`` and steps the room has too."""

    def __init__(self, room: Any, index: int, row: Any) -> None:
        self.room = room
        self.index = index
        self.row = row
        self.name = row.name
        self.precision: Precision = _C.math_traits(row.math).precision

    @property
    def ungrouped(self) -> frozenset[str]:
        """Normalisations without groups that it serves."""
        return frozenset()

    @abstractmethod
    def config(self, problem: ForwardProblem, device: Device) -> Any:
        """How the row serves a problem of any batch size; whether it does is its ``support``."""

    def takes_moments(self, problem: ForwardProblem, config: Any) -> bool:
        """Whether its convolution takes GroupNorm's moments, and may store what it was before the
        activation; else passes over its output do."""
        takes: bool = self.room.takes_moments
        return takes

    def reads_weight(self, problem: ForwardProblem, config: Any) -> bool:
        """Whether its convolution reads the weight as it lies, unless that begins at no multiple of
        16 bytes."""
        return False

    def pack_filter(self, program: ForwardProgram, config: Any) -> Any:
        """Appends the step that packs the weight; the filter that convolutions take."""
        conv = program.problem.conv
        assert conv is not None
        reads_weight = self.reads_weight(program.problem, config)
        return packed_filter(
            self.room, program, config, filter_source(conv), reads_weight=reads_weight
        )

    def convolve(
        self,
        program: ForwardProgram,
        config: Any,
        output: Any,
        filter: Any | None = None,
        saved: Any | None = None,
    ) -> Any:
        """Appends the steps that pack the weight, unless a packed ``filter`` is given, and convolve
        into ``output``: activated, or where the problem saves, before the activation, unless that
        goes to ``saved``; where partial moments of activated values lie."""
        if filter is None:
            filter = self.pack_filter(program, config)
        partials = program.absent
        takes_moments = self.takes_moments(program.problem, config)
        if program.groups and takes_moments:
            partials = program.scratch(config.partial_bytes_per_sample)
        saves_apart = saved is not None
        activates = takes_moments or saves_apart or not program.problem.saves_conv_output
        activation, beside = program.form.before if activates else "identity", {}
        if scales_in_epilogue(program.problem, saves_apart):
            activation = program.form.after
            beside = {"scale": program.norm_weight, "shift": program.norm_bias}
        if saves_apart:
            beside["saved"] = saved
        program.compiled.per_chunk(
            self.room.Convolve(
                config,
                activation=COMPILED[activation],
                activates_output=not (takes_moments and program.problem.saves_conv_output),
                input=program.input,
                filter=filter,
                bias=program.bias,
                output=output,
                partials=partials,
                **beside,
                channels=program.problem.output_channels if program.conv_row_channels else 0,
            )
        )
        return partials

    def convolve_plainly(
        self, program: ForwardProgram, config: Any, filter: Any, output: Any, partials: Any
    ) -> None:
        """Appends the convolution without an activation, of which ``output`` or ``partials`` may
        be absent."""
        program.compiled.per_chunk(
            self.room.Convolve(
                config,
                activation=COMPILED["identity"],
                activates_output=True,
                input=program.input,
                filter=filter,
                bias=program.bias,
                output=output,
                partials=partials,
            )
        )

    def behind(self, program: ForwardProgram, batch: int = 0) -> Any:
        """The problem from the convolution's output on; ``batch`` 0 leaves it to the program."""
        problem, form = program.problem, program.form
        # A saved convolution output is kept as it is before the activation, which then is applied
        # once for the moments and once more behind them.
        before = form.before if problem.saves_conv_output else "identity"
        return group_norm_problem(
            problem,
            ActNormAct(False, before, form.norm, form.after),
            input_layout=program.conv_layout,
            output_layout=problem.output_layout,
            batch=batch,
        )

    def statistics(self, program: ForwardProgram, config: Any, partials: Any) -> tuple[Any, Any]:
        """Appends the step that merges partial moments, if any. What a pass behind takes: the
        problem from the convolution's output on, and where statistics lie."""
        norm = self.behind(program)
        statistics = program.statistics()
        if program.groups:
            program.compiled.per_chunk(
                self.room.MergeMoments(
                    config,
                    problem=norm,
                    partials=partials,
                    statistics=statistics,
                    mean=program.mean,
                    rstd=program.rstd,
                )
            )
        return norm, statistics


class InPlaceRow(ConvolutionRow):
    """One that stores a tensor's order: what normalises goes over it in place, unless a saved
    convolution output, another dtype or another layout asks for a second tensor."""

    @property
    def ungrouped(self) -> frozenset[str]:
        return UNGROUPED | {"affine"} if self.room.scales else UNGROUPED

    @abstractmethod
    def most_samples(self, problem: ForwardProblem, config: Any) -> int:
        """Of one launch."""

    def scratch_bytes(self, problem: ForwardProblem, config: Any) -> int:
        """Of a sample."""
        moments = problem.norm_groups > 0 and self.takes_moments(problem, config)
        scratch = int(config.partial_bytes_per_sample) if moments else 0
        if goes_through_scratch(problem):
            scratch += problem.output_elements // problem.batch * problem.dtype.itemsize
        return scratch

    def chunk(self, problem: ForwardProblem, config: Any) -> int:
        """Samples per pass over the steps: what fits the scratch limit, one at least."""
        scratch = self.scratch_bytes(problem, config)
        most = min(CHUNK_BYTES // max(1, scratch), self.most_samples(problem, config))
        return equal_chunk(problem.batch, most)

    def milliseconds_beside(
        self, problem: ForwardProblem, device: Device, chunks: int, passes: int | None = None
    ) -> float:
        """What all but the convolution itself is estimated to take; ``passes`` None is as many as
        there are."""
        if passes is None:
            passes = self.passes(problem, device)
        output = problem.output_elements
        moved = passes * output * (problem.dtype.itemsize + problem.output_dtype.itemsize)
        if problem.layout == "strided":
            moved += 2 * problem.input_elements * problem.dtype.itemsize
        launches = (1 + chunks * (1 + passes + (problem.norm_groups > 0))) if chunks else 0
        return device.copy_milliseconds(moved) + device.launch_milliseconds * launches

    def passes(self, problem: ForwardProblem, device: Device) -> int:
        """Passes over the convolution's output: one, unless what that stores is the result, its
        layout apart."""
        form = act_norm_act(problem.epilogue, frozenset(KINDS))
        assert isinstance(form, ActNormAct)
        if scales_in_epilogue(problem):
            return 0
        done = form.norm is None and form.after == "identity" and not problem.saves_conv_output
        return 0 if done and problem.output_dtype == problem.dtype else 1

    def compile(self, problem: ForwardProblem, device: Device) -> ProgramPlan:
        config = self.config(problem, device)
        program = ForwardProgram(problem, device, self.chunk(problem, config))
        if problem.saves_conv_output:
            output = program.conv_output
        elif goes_through_scratch(problem):
            size = problem.output_elements // problem.batch * problem.dtype.itemsize
            output = program.scratch(size)
        else:
            output = program.output
        partials = self.convolve(program, config, output)
        if self.passes(problem, device):
            self.finish(program, config, output, partials)
        return program.plan(self.name)

    def finish(self, program: ForwardProgram, config: Any, input: Any, partials: Any) -> None:
        """Appends the steps from the convolution's output to the result."""
        stage = program.form.norm
        if stage is not None and stage.kind == "layer":
            program.compiled.per_chunk(
                _C.layer_norm.Normalize(
                    problem=self.behind(program),
                    input=input,
                    weight=program.norm_weight,
                    bias=program.norm_bias,
                    output=program.output,
                )
            )
            return
        if not self.takes_moments(program.problem, config):
            before = program.form.before if program.problem.saves_conv_output else "identity"
            program.normalise(
                input,
                input_layout=program.conv_layout,
                before=before,
                row_channels=program.conv_row_channels,
            )
            return
        norm, statistics = self.statistics(program, config, partials)
        program.compiled.per_chunk(
            _C.group_norm.Normalize(
                problem=norm,
                input=input,
                statistics=statistics,
                weight=program.norm_weight,
                bias=program.norm_bias,
                output=program.output,
                name=program.affine_name,
            )
        )


def supports_affine(problem: ForwardProblem) -> Support:
    """Whether a row that scales and shifts in its epilogue has the problem's affine map, if any."""
    form = act_norm_act(problem.epilogue, frozenset(KINDS))
    if isinstance(form, Support) or not _is_affine(form):
        return Support.yes()
    assert form.norm is not None
    if form.norm.affine_dtype not in (None, torch.float32):
        return Support.no(f"affine dtype is {dtype_name(form.norm.affine_dtype)}, not float32")
    if form.before != "identity":
        return Support.no(f"{form.before} is in front of the affine map")
    if goes_through_scratch(problem):
        return Support.no("an affine map in another dtype than the convolution's is torch's")
    return Support.yes()


def scales_in_epilogue(problem: ForwardProblem, saves_apart: bool = False) -> bool:
    """Whether the convolution's epilogue has the problem's affine map: not where what it stores is
    the convolution's output that is saved, unless it ``saves_apart``."""
    form = act_norm_act(problem.epilogue, frozenset(KINDS))
    stores_result = saves_apart or not problem.saves_conv_output
    return stores_result and isinstance(form, ActNormAct) and _is_affine(form)


def _is_affine(form: ActNormAct) -> bool:
    return form.norm is not None and form.norm.kind == "affine"


def goes_through_scratch(problem: ForwardProblem) -> bool:
    """Whether the convolution's output is of another dtype than the result."""
    return not problem.saves_conv_output and problem.output_dtype != problem.dtype
