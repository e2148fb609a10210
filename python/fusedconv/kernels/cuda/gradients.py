"""Gradients through activation and GroupNorm on CUDA: one pass on chip, or two over memory."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from fusedconv import _C
from fusedconv.device import Device
from fusedconv.kernels.compiled import CONTIGUOUS_STEP, group_norm_problem, supports_compiled
from fusedconv.kernels.cuda.conditions import supports_device
from fusedconv.kernels.cuda.gradient_tensors import begin_apart
from fusedconv.kernels.cuda.program import allocator, run_program
from fusedconv.layout import dense, dense_strides, line_pitch, line_strides
from fusedconv.norms import KINDS
from fusedconv.plan import BackwardKernel, BackwardPlan, BackwardTensors, Gradients, Kernel
from fusedconv.precision import COMPILED_DTYPES
from fusedconv.problem import ActNormAct, BackwardProblem, ForwardProblem, act_norm_act
from fusedconv.support import Support

# Slots of the pointers that a program of gradients gets, in this order.
(
    INPUT,
    GRAD_OUTPUT,
    MEAN,
    RSTD,
    NORM_WEIGHT,
    NORM_BIAS,
    GRAD_INPUT,
    GRAD_NORM_WEIGHT,
    GRAD_NORM_BIAS,
    GRAD_BIAS,
) = range(10)


@functools.lru_cache(maxsize=1024)
def compiled_problem(problem: BackwardProblem) -> Any:
    """What the epilogue computes, over tensors in the forward output's layout and input's dtype,
    the output's gradient in its own. An activation alone stands behind, where more kernels have it
    compiled in."""
    forward = problem.forward
    form = act_norm_act(forward.epilogue, frozenset(KINDS))
    assert isinstance(form, ActNormAct)
    if form.norm is None:
        form = ActNormAct(form.bias, "identity", None, form.before)
    return group_norm_problem(
        forward,
        form,
        batch=forward.batch,
        input_layout=forward.output_layout,
        output_layout=forward.output_layout,
        output_dtype=problem.grad_dtype,
    )


def wants_input(problem: BackwardProblem) -> bool:
    """Whether the gradient of what the epilogue reads is asked for, not weight and bias alone."""
    return bool(problem.gradients & {"conv_output", "input"})


def supports_epilogue(
    problem: BackwardProblem, device: Device, computes: str, ungrouped: frozenset[str] | None = None
) -> Support:
    """The conditions of every kernel that computes gradients through a normalisation, with the
    bias's beside them. ``computes`` names the normalisations, for messages; ``ungrouped`` are
    their kinds, None for those whose statistics are per group of channels. Kernels of the former
    take an activation alone too."""
    support = supports_device(device)
    if not support:
        return support
    forward = problem.forward
    norm = forward.norm
    if norm is None:
        served = ungrouped is not None and bool(forward.activations)
    else:
        served = ungrouped is None or norm.kind in ungrouped
    if not served:
        return Support.no(f"computes gradients of {computes}; the problem has {norm or 'none'}")
    if "epilogue" not in problem.parts:
        return Support.no("sums the bias's gradient beside the epilogue's only")
    if "residual" in problem.gradients:
        return Support.no("computes no gradient of a residual")
    # Autocast has the outputs of normalisations in float32.
    if problem.grad_dtype not in (forward.dtype, torch.float32):
        return Support.no(
            f"the output's gradient is {problem.grad_dtype}, the input {forward.dtype}"
        )
    return supports_compiled(problem.forward, ungrouped or frozenset())


class GroupNormBackward(BackwardKernel):
    """What both ways have in common."""

    provider = "groupnorm_cuda"
    computes = frozenset({"epilogue", "bias"})

    def _config(self, problem: BackwardProblem, device: Device, **lines: int) -> Any:
        """How the sums are taken; its ``support`` says why they cannot. ``columns`` and ``pitch``
        of the ``lines`` that the input's gradient goes to, where it goes to such."""
        raise NotImplementedError

    def _add_steps(self, program: Any, config: Any, operands: dict[str, Any], merges: bool) -> None:
        """Appends what leaves the gradient of the input, in ``lines`` where the operands have any,
        and where it ``merges`` the sums by channel."""
        raise NotImplementedError

    def supports(self, problem: BackwardProblem, device: Device) -> Support:
        support = supports_epilogue(problem, device, "GroupNorm")
        if support and "bias" in problem.gradients and not wants_input(problem):
            return Support.no(
                "sums the bias's gradient on the way to the convolution's output's, which is not "
                "asked for"
            )
        return support and Support.of(self._config(problem, device).support)

    def compile(self, problem: BackwardProblem, device: Device) -> GroupNormBackwardPlan:
        return GroupNormBackwardPlan(self, problem, device)

    def build(
        self, problem: BackwardProblem, device: Device, *, padded_lines: bool = False
    ) -> _C.Program:
        """The program over tensors in the order of the slots."""
        forward = problem.forward
        program = _C.Program(device.index, forward.batch, 0)
        compiled = compiled_problem(problem)
        norm = forward.norm
        assert norm is not None
        elements = forward.output_channels * math.prod(forward.output_spatial)
        sample = elements * forward.dtype.itemsize
        grad_sample = elements * problem.grad_dtype.itemsize
        groups = 4 * norm.groups(forward.output_channels)
        absent = _C.Operand()
        lines: dict[str, Any] = {}
        sums_bias = "bias" in problem.gradients
        if padded_lines or (sums_bias and forward.output_layout == "nchw"):
            columns = forward.output_spatial[-1]
            pitch = line_pitch(columns, forward.dtype) if padded_lines else columns
            lines = {"columns": columns, "pitch": pitch}
        config = self._config(problem, device, **lines)
        totals = _C.layout.ChannelSums(
            batch=forward.batch,
            channels=forward.output_channels,
            parts=config.channel_sums,
            dtype=COMPILED_DTYPES[forward.dtype],
        )
        if sums_bias:
            lines["sums"] = program.scratch(0, totals.bytes)
        partials = program.scratch(0, config.partial_bytes)
        sums = program.scratch(0, config.sum_bytes)
        terms = program.scratch(0, config.term_bytes)
        weight = program.tensor(NORM_WEIGHT, 0)
        wanted = problem.gradients

        def target(slot: int, name: str) -> Any:
            return program.tensor(slot, 0) if name in wanted else absent

        affine = {
            "grad_weight": target(GRAD_NORM_WEIGHT, "norm_weight"),
            "grad_bias": target(GRAD_NORM_BIAS, "norm_bias"),
        }
        has_affine = any(each.present for each in affine.values())
        self._add_steps(
            program,
            config,
            {
                "problem": compiled,
                "input": program.tensor(INPUT, sample),
                "grad_output": program.tensor(GRAD_OUTPUT, grad_sample),
                "mean": program.tensor(MEAN, groups),
                "rstd": program.tensor(RSTD, groups),
                "weight": weight,
                "bias": program.tensor(NORM_BIAS, 0),
                "partials": partials,
                "sums": sums,
                "terms": terms,
                "grad_input": program.tensor(GRAD_INPUT, sample)
                if wants_input(problem)
                else absent,
                "lines": lines,
            },
            has_affine,
        )
        if has_affine:
            if sums_bias:
                affine["channel_sums"] = lines["sums"]
                affine["parts"] = config.channel_sums
                affine["grad_conv_bias"] = program.tensor(GRAD_BIAS, 0)
            program.per_chunk(_C.group_norm.AffineGradients(problem=compiled, sums=sums, **affine))
        elif sums_bias:
            program.per_chunk(
                _C.layout.AddSums(
                    "gradient of bias",
                    problem=totals,
                    sums=lines["sums"],
                    totals=program.tensor(GRAD_BIAS, 0),
                )
            )
        return program


def _merge(program: Any, config: Any, operands: dict[str, Any]) -> None:
    """Appends the sums by channel and the groups' terms."""
    names = ("problem", "weight", "partials", "sums", "terms")
    program.per_chunk(
        _C.group_norm.MergeGradientSums(config, **{name: operands[name] for name in names})
    )


def _wide(problem: BackwardProblem) -> float:
    """Times the input's bytes, those of the output's gradient."""
    return problem.grad_dtype.itemsize / problem.forward.dtype.itemsize


def _passes_milliseconds(problem: BackwardProblem, device: Device, passes: float) -> float:
    """``passes`` over the tensor."""
    forward = problem.forward
    return device.copy_milliseconds(passes * forward.output_elements * forward.dtype.itemsize)


def _cycles_milliseconds(problem: BackwardProblem, device: Device, cycles: float) -> float:
    """``cycles`` of a multiprocessor for each element."""
    rate = max(1, device.multiprocessors) * device.clock_hertz
    return problem.forward.output_elements * cycles / rate * 1e3


def _milliseconds(
    problem: BackwardProblem,
    device: Device,
    launches: float,
    passes: float,
    cycles: float,
) -> float:
    """``launches``, then the slower of ``passes`` over the tensor and, where an activation's slope
    is computed, ``cycles`` of a multiprocessor for an element; measured on an H200."""
    work = _passes_milliseconds(problem, device, passes)
    if problem.forward.activations:
        work = max(work, _cycles_milliseconds(problem, device, cycles))
    return launches * device.launch_milliseconds + work


def _pads_lines(problem: BackwardProblem) -> bool:
    """Whether a convolution in front is likely to want the gradient's lines padded."""
    forward = problem.forward
    if forward.conv is None or forward.output_layout != "nchw":
        return False
    return begin_apart(problem, forward.output_spatial[-1])


def _is_compiled_in(forward: ForwardProblem) -> bool:
    """Whether kernels need not call what the activations are: where there is none, or one that is
    a ReLU, or GELU or SiLU in their quick forms, and what is read at a time 16 bytes. The second of
    two passes reads less of planes that are not whole 16 bytes where it pads lines, which takes
    longer than its calls."""
    if len(forward.activations) != 1:
        return not forward.activations
    if forward.output_layout == "nhwc" and forward.output_channels * forward.dtype.itemsize % 16:
        return False
    name = forward.activations[0].name
    is_tf32 = forward.conv is not None and forward.precision == "tf32"
    is_quick = forward.dtype.itemsize == 2 or is_tf32
    return name == "relu" or (is_quick and name in ("gelu", "silu"))


def _is_gelu_in_front(forward: ForwardProblem) -> bool:
    """Alone, which the kernel that streams has in its own form too."""
    form = act_norm_act(forward.epilogue, frozenset(KINDS))
    return isinstance(form, ActNormAct) and (form.before, form.after) == ("gelu", "identity")


#: Elements of a plane of padded lines are counted to less than this.
MOST_LINES = 1 << 31

_READ = ("problem", "input", "grad_output", "mean", "rstd", "weight", "bias")


class GroupNormBackwardTwoPass(GroupNormBackward):
    """Sums over the input and the output's gradient, then a second pass over both."""

    name = "groupnorm_backward_two_pass"

    def _config(self, problem: BackwardProblem, device: Device, **lines: int) -> Any:
        return _C.group_norm.gradient_sums_config(compiled_problem(problem), in_lines=bool(lines))

    def _add_steps(self, program: Any, config: Any, operands: dict[str, Any], merges: bool) -> None:
        read = {name: operands[name] for name in _READ}
        program.per_chunk(_C.group_norm.GradientSums(config, **read, partials=operands["partials"]))
        _merge(program, config, operands)
        if operands["grad_input"].present:
            program.per_chunk(
                _C.group_norm.InputGradient(
                    config,
                    **read,
                    terms=operands["terms"],
                    grad_input=operands["grad_input"],
                    **operands["lines"],
                )
            )

    def cost(self, problem: BackwardProblem, device: Device) -> float:
        forward = problem.forward
        config = self._config(problem, device)
        planes = forward.output_layout == "nchw"
        splits = config.partial_bytes // max(1, config.sum_bytes)
        blocks = forward.batch * (forward.output_channels if planes else 1) * splits
        # It takes two blocks a multiprocessor to load the memory fully.
        busy = min(1.0, blocks / max(1, 2 * device.multiprocessors))
        wide = _wide(problem)
        passes = 1.0 + wide
        if wants_input(problem):
            passes = (3.0 + 2.0 * wide) * (1.0 if planes else 1.24)
        passes /= busy
        cycles = 0.0
        if not _is_compiled_in(forward):
            cycles = 1.3 if planes else 1.8
        result = _milliseconds(problem, device, 4, passes, cycles)
        if wants_input(problem) and _pads_lines(problem):
            # Measured on an H100 with lines of 34 and 258 elements: pieces of them take so long to
            # store, where that is longer than the second pass's three trips to memory.
            stores = 0.6 + 25.0 / forward.output_spatial[-1]
            trips = _passes_milliseconds(problem, device, 2.0 + wide)
            result += max(0.0, _cycles_milliseconds(problem, device, stores) - trips)
        return result


class GroupNormBackwardStreamed(GroupNormBackward):
    """The shared memory of all multiprocessors together holds the groups at work."""

    name = "groupnorm_backward_streamed"

    def _config(self, problem: BackwardProblem, device: Device, **lines: int) -> Any:
        return _C.group_norm.streamed_gradient_config(
            compiled_problem(problem), aligned=problem.aligned, **lines, device=device.compiled
        )

    def supports(self, problem: BackwardProblem, device: Device) -> Support:
        if not wants_input(problem):
            return Support.no("computes the input's gradient, which is not asked for")
        return super().supports(problem, device)

    def _add_steps(self, program: Any, config: Any, operands: dict[str, Any], merges: bool) -> None:
        program.per_chunk(
            _C.group_norm.StreamedGradients(
                config,
                **{name: operands[name] for name in _READ},
                grad_input=operands["grad_input"],
                **operands["lines"],
                partials=operands["partials"],
            )
        )
        if merges:
            _merge(program, config, operands)

    def cost(self, problem: BackwardProblem, device: Device) -> float:
        forward = problem.forward
        is_known = _is_compiled_in(forward) or _is_gelu_in_front(forward)
        cycles = 0.8 if is_known else 1.7
        return _milliseconds(problem, device, 7, 3.5 * (2.0 + _wide(problem)) / 3.0, cycles)


class GroupNormBackwardPlan(BackwardPlan):
    """One program; tensors of another layout than the forward output's are copied to it first."""

    is_exact = True
    only_launches = True

    def __init__(self, kernel: GroupNormBackward, problem: BackwardProblem, device: Device) -> None:
        forward = problem.forward
        self.kernel = kernel.name
        self.problem = problem
        self._kernel = kernel
        self._device = device
        self._layout = forward.output_layout
        self._shape = forward.output_shape
        self._channels = forward.output_channels
        assert forward.norm is not None
        self._affine_dtype = forward.norm.affine_dtype or torch.float32
        self._build(padded_lines=False)

    def _build(self, *, padded_lines: bool) -> None:
        forward = self.problem.forward
        self._program = self._kernel.build(self.problem, self._device, padded_lines=padded_lines)
        copies = []
        if self.problem.grad_layout != self._layout:
            copies.append(f"torch copy of the output's gradient to {self._layout}")
        if forward.conv is None and forward.layout == "strided":
            copies.append(CONTIGUOUS_STEP)
        self.steps = (*copies, *self._program.steps)
        self._strides = None
        if wants_input(self.problem):
            if padded_lines:
                self._strides = line_strides(self._shape, forward.dtype)
            else:
                self._strides = dense_strides(self._shape, self._layout)

    def give_padded_lines(self) -> bool:
        columns = self._shape[-1]
        pitch = line_pitch(columns, self.problem.forward.dtype)
        plane = math.prod(self._shape[2:]) // columns * pitch
        gives = wants_input(self.problem) and plane < MOST_LINES
        if gives:
            self._build(padded_lines=True)
        return gives

    def run(self, tensors: BackwardTensors) -> Gradients:
        grad = dense(tensors.grad_output, self._layout)
        x = dense(tensors.of_epilogue, self._layout)
        wanted = self.problem.gradients
        empty = allocator(x.device)
        grad_input = None
        if self._strides is not None:
            grad_input = empty(self._shape, self._strides, x.dtype)

        def per_channel(name: str, dtype: torch.dtype) -> Tensor | None:
            return empty((self._channels,), (1,), dtype) if name in wanted else None

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
                tensors.mean,
                tensors.rstd,
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


def kernels() -> list[Kernel]:
    return [GroupNormBackwardTwoPass(), GroupNormBackwardStreamed()]
