"""GroupNorm alone on CUDA, activations fused: one pass where groups fit on chip, else two.

Costs, in launches and in passes over memory, were measured on an H200.
"""

from __future__ import annotations

from typing import Any

from fusedconv import _C
from fusedconv.device import Device
from fusedconv.kernels.compiled import group_norm_problem, readable_aligned
from fusedconv.kernels.cuda.conditions import supports_forward
from fusedconv.kernels.cuda.program import ForwardProgram, ProgramPlan
from fusedconv.plan import ForwardKernel, Kernel
from fusedconv.problem import ActNormAct, ForwardProblem, act_norm_act
from fusedconv.support import Support


def supports_norm_alone(problem: ForwardProblem, device: Device) -> Support:
    """The conditions that all kernels share."""
    if problem.conv is not None:
        return Support.no("normalises only; the problem has a convolution")
    if problem.norm is None:
        return Support.no("the problem has no GroupNorm")
    return supports_forward(problem, device)


def compiled_problem(problem: ForwardProblem) -> Any:
    """What is behind a convolution, if there is one, over a dense tensor in the output's layout; a
    strided input is copied to channels first before."""
    form = act_norm_act(problem.epilogue)
    assert isinstance(form, ActNormAct)
    layout = problem.output_layout
    return group_norm_problem(
        problem, form, batch=problem.batch, input_layout=layout, output_layout=layout
    )


def normalise_in_one_pass(
    program: ForwardProgram, step: str, config: Any, problem: Any, input: Any
) -> None:
    """Appends the step of ``_C.group_norm`` that takes the moments of ``input``, activated, and
    normalises it into the output, which may be where it is."""
    program.compiled.per_chunk(
        getattr(_C.group_norm, step)(
            config,
            problem=problem,
            input=input,
            mean=program.mean,
            rstd=program.rstd,
            weight=program.norm_weight,
            bias=program.norm_bias,
            output=program.output,
        )
    )


class GroupNormOnePass(ForwardKernel):
    """What the kernels that read each element once have in common."""

    provider = "groupnorm_cuda"

    def _config(self, problem: ForwardProblem, device: Device) -> Any:
        """How groups stay on chip; its ``support`` says why they cannot."""
        raise NotImplementedError

    #: The step's class in ``_C.group_norm``.
    _step: str

    def supports(self, problem: ForwardProblem, device: Device) -> Support:
        common = supports_norm_alone(problem, device)
        return common and Support.of(self._config(problem, device).support)

    def compile(self, problem: ForwardProblem, device: Device) -> ProgramPlan:
        program = ForwardProgram(problem, device)
        config, norm = self._config(problem, device), compiled_problem(problem)
        normalise_in_one_pass(program, self._step, config, norm, program.input)
        return program.plan(self.name)


class GroupNormResident(GroupNormOnePass):
    """A group stays in the registers of one block, or of one warp."""

    name = "groupnorm_resident"
    _step = "NormalizeResident"

    def _config(self, problem: ForwardProblem, device: Device) -> Any:
        return _C.group_norm.resident_config(
            compiled_problem(problem), aligned=readable_aligned(problem)
        )

    def cost(self, problem: ForwardProblem, device: Device) -> float:
        assert problem.norm is not None
        passes = 2.0 if problem.layout != "strided" else 4.0
        groups = problem.norm.groups(problem.channels)
        row = problem.channels // groups * problem.dtype.itemsize
        if problem.layout == "nhwc" and row < 32:
            passes = 3.3  # DRAM moves more than the group's part of a pixel
        trip = problem.input_elements * problem.dtype.itemsize
        return 0.75 * device.launch_milliseconds + device.copy_milliseconds(passes * trip)


class GroupNormStreamed(GroupNormOnePass):
    """The shared memory of all multiprocessors together holds the groups at work."""

    name = "groupnorm_streamed"
    _step = "NormalizeStreamed"

    def _config(self, problem: ForwardProblem, device: Device) -> Any:
        return _C.group_norm.streamed_config(
            compiled_problem(problem),
            aligned=readable_aligned(problem),
            device=device.compiled,
            saves=problem.save,
        )

    def cost(self, problem: ForwardProblem, device: Device) -> float:
        passes = 2.1 if problem.layout != "strided" else 4.1
        trip = problem.input_elements * problem.dtype.itemsize
        # More than the launch: the first groups arrive, and the last ones leave, without overlap.
        return 4.0 * device.launch_milliseconds + device.copy_milliseconds(passes * trip)


class GroupNormTwoPass(ForwardKernel):
    name = "groupnorm_two_pass"
    provider = "groupnorm_cuda"

    def supports(self, problem: ForwardProblem, device: Device) -> Support:
        return supports_norm_alone(problem, device)

    def cost(self, problem: ForwardProblem, device: Device) -> float:
        passes = 3 if problem.layout != "strided" else 5
        half_trip = problem.input_elements * problem.dtype.itemsize
        return 2.25 * device.launch_milliseconds + device.copy_milliseconds(passes * half_trip)

    def compile(self, problem: ForwardProblem, device: Device) -> ProgramPlan:
        program = ForwardProgram(problem, device)
        program.normalise(
            program.input, input_layout=problem.output_layout, before=program.form.before
        )
        return program.plan(self.name)


def kernels() -> list[Kernel]:
    return [GroupNormResident(), GroupNormStreamed(), GroupNormTwoPass()]
