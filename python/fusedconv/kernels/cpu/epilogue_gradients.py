"""Gradients of what is behind a convolution, or of a GroupNorm alone, in compiled passes."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod

import torch
from torch import Tensor

from fusedconv import _C
from fusedconv.device import Device
from fusedconv.kernels.compiled import (
    CONTIGUOUS_STEP,
    address,
    group_norm_problem,
    supports_compiled,
)
from fusedconv.kernels.cpu.convolution import PROVIDER, as_stored, computing_dtype
from fusedconv.kernels.cpu.group_norm import UNGROUPED
from fusedconv.layout import Layout, empty, result_layout
from fusedconv.plan import BackwardKernel, BackwardPlan, BackwardTensors, Gradients, Kernel
from fusedconv.precision import dtype_name
from fusedconv.problem import ActNormAct, BackwardProblem, act_norm_act
from fusedconv.support import Support

#: Passes over a tensor of the output's size: of GroupNorm, which reads twice what it writes once;
#: of what has no statistics of groups; of LayerNorm over channels, whose arithmetic shows.
_GROUP_NORM_PASSES, _PASSES, _LAYER_NORM_PASSES = 4.0, 3.0, 5.0


def _form(problem: BackwardProblem, ungrouped: frozenset[str]) -> ActNormAct | Support:
    """The stages as compiled passes take them, an activation alone behind no map."""
    form = act_norm_act(problem.forward.epilogue, ungrouped)
    if isinstance(form, ActNormAct) and form.norm is None:
        return dataclasses.replace(form, before="identity", after=form.before)
    return form


class EpilogueGradientsPlan(BackwardPlan):
    """One compiled pass; ``dtype`` is that of the gradient of what the stages were computed
    from."""

    def __init__(
        self, kernel: str, problem: BackwardProblem, form: ActNormAct, dtype: torch.dtype
    ) -> None:
        forward = problem.forward
        self.kernel = kernel
        self.problem = problem
        self.kind = form.norm.kind if form.norm else None
        self.channels = forward.output_channels
        # Gradients of another dtype than what was saved: all in float32.
        mixed = problem.grad_dtype != forward.dtype
        self.read = torch.float32 if mixed else forward.dtype
        self.dtype = torch.float32 if mixed else dtype
        # What has no convolution in front was saved as it was given.
        self.layout: Layout = result_layout(forward.layout)
        self.compiled = group_norm_problem(
            forward,
            form,
            batch=forward.batch,
            input_layout=self.layout,
            output_layout=self.layout,
            dtype=self.read,
            output_dtype=self.dtype,
        )
        copies = []
        if mixed:
            copies.append(f"torch copy of saved tensor or gradient to {dtype_name(self.read)}")
        if problem.grad_layout != self.layout:
            copies.append(f"torch copy of the output's gradient to {self.layout.upper()}")
        if forward.conv is None and forward.layout == "strided":
            copies.append(CONTIGUOUS_STEP)
        self.copies = bool(copies)
        named = {None: "identity", "layer": "layer_norm over channels", "affine": "affine map"}
        fused = [form.after, named.get(self.kind, "group_norm"), form.before]
        names = " + ".join(part for part in fused if part != "identity")
        beside = " and bias" if "bias" in problem.gradients else ""
        self.steps = (*copies, f"fused gradients of {names}{beside} (fusedconv._C)")

    def run(self, tensors: BackwardTensors) -> Gradients:
        wanted = self.problem.gradients
        x, grad = tensors.of_epilogue, tensors.grad_output
        if self.copies:
            x = as_stored(x, self.layout, self.read)
            grad = as_stored(grad, self.layout, self.read)
        grad_input = None
        if wanted & {"conv_output", "input", "bias"}:  # the last is the sum of the first
            if self.dtype == self.read:
                grad_input = torch.empty_like(x)
            else:
                grad_input = empty(x, x.shape, self.layout, self.dtype)

        def per_channel(name: str) -> Tensor | None:
            return torch.empty(self.channels, dtype=torch.float32) if name in wanted else None

        grad_weight, grad_bias = per_channel("norm_weight"), per_channel("norm_bias")
        front_bias = per_channel("bias")
        self._call(tensors, x, grad, (grad_input, grad_weight, grad_bias, front_bias))
        return Gradients.of_epilogue(
            self.problem, grad_input, grad_weight, grad_bias, bias=front_bias
        )

    def _call(
        self, tensors: BackwardTensors, x: Tensor, grad: Tensor, results: tuple[Tensor | None, ...]
    ) -> None:
        weight, bias = tensors.norm_weight, tensors.norm_bias
        # Kept by name until the call returns: they may be copies.
        weight = None if weight is None else weight.contiguous()
        bias = None if bias is None else bias.contiguous()
        threads = torch.get_num_threads()
        affine = address(weight), address(bias)
        if self.kind is None or self.kind in UNGROUPED:
            run = _C.cpu.layer_norm_gradients if self.kind == "layer" else _C.cpu.map_gradients
            run(
                self.compiled,
                grad.data_ptr(),
                x.data_ptr(),
                *affine,
                *map(address, results),
                threads,
            )
            return
        assert tensors.mean is not None and tensors.rstd is not None
        _C.cpu.group_norm_gradients(
            self.compiled,
            grad.data_ptr(),
            x.data_ptr(),
            tensors.mean.data_ptr(),
            tensors.rstd.data_ptr(),
            *affine,
            *map(address, results[:3]),
            threads,
        )


class EpilogueBackward(BackwardKernel):
    """Gradients of the stages behind a convolution or of an input. Where the convolution's
    gradients are computed in float32, it leaves them what they need unrounded."""

    provider = PROVIDER
    #: Kinds of normalisations without groups that it has beside those with.
    ungrouped: frozenset[str] = frozenset()

    @abstractmethod
    def _has(self, problem: BackwardProblem) -> Support:
        """Whether the kernel is the one for the problem's normalisation."""

    def supports(self, problem: BackwardProblem, device: Device) -> Support:
        forward = problem.forward
        if device.type != "cpu":
            return Support.no(f"runs on the processor, the input is on {device.type}")
        support = self._has(problem) and supports_compiled(forward, self.ungrouped)
        if not support:
            return support
        if "epilogue" not in problem.parts:
            return Support.no("sums the bias's gradient beside the epilogue's only")
        if "residual" in problem.gradients:
            return Support.no("there is a residual")
        if problem.grad_dtype not in (forward.dtype, torch.float32):
            return Support.no(f"dtype of the output's gradient is {dtype_name(problem.grad_dtype)}")
        form = _form(problem, self.ungrouped)
        assert isinstance(form, ActNormAct)
        layer = form.norm is not None and form.norm.kind == "layer"
        if "identity" not in (form.before, form.after) and not layer:
            return Support.no(
                f"there are activations in front of the {form.norm} and behind it; one is served"
            )
        return Support.yes()

    def compile(self, problem: BackwardProblem, device: Device) -> EpilogueGradientsPlan:
        forward = problem.forward
        form = _form(problem, self.ungrouped)
        assert isinstance(form, ActNormAct)
        dtype = forward.dtype if forward.conv is None else computing_dtype(forward, device)
        return EpilogueGradientsPlan(self.name, problem, form, dtype)


def _moved_milliseconds(problem: BackwardProblem, device: Device, passes: float) -> float:
    forward = problem.forward
    return device.copy_milliseconds(passes * forward.output_elements * forward.dtype.itemsize)


class CpuGroupNormBackward(EpilogueBackward):
    name = f"{PROVIDER}_group_norm_backward"
    computes = frozenset({"epilogue"})

    def _has(self, problem: BackwardProblem) -> Support:
        norm = problem.forward.norm
        if norm is None:
            return Support.no("fuses activation and GroupNorm; there is no GroupNorm")
        return Support.yes()

    def cost(self, problem: BackwardProblem, device: Device) -> float:
        return _moved_milliseconds(problem, device, _GROUP_NORM_PASSES)


class CpuUngroupedBackward(EpilogueBackward):
    """Through LayerNorm over channels, affine maps of channels and an activation alone, with the
    gradient of the convolution's bias from the same pass."""

    name = f"{PROVIDER}_ungrouped_backward"
    computes = frozenset({"epilogue", "bias"})
    ungrouped = UNGROUPED

    def _has(self, problem: BackwardProblem) -> Support:
        forward = problem.forward
        norm = forward.norm
        if norm is None and forward.conv is not None and forward.activations:
            return Support.yes()
        if norm is not None and norm.kind in UNGROUPED:
            return Support.yes()
        return Support.no(
            "computes gradients of LayerNorm over channels, of affine maps and of an activation "
            f"behind a convolution; the problem has {norm or 'none of them'}"
        )

    def cost(self, problem: BackwardProblem, device: Device) -> float:
        norm = problem.forward.norm
        layer = norm is not None and norm.kind == "layer"
        passes = _LAYER_NORM_PASSES if layer else _PASSES
        return device.launch_milliseconds + _moved_milliseconds(problem, device, passes)


def kernels() -> list[Kernel]:
    return [CpuGroupNormBackward(), CpuUngroupedBackward()]
