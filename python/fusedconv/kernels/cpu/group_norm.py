"""GroupNorm with an activation in one compiled pass over each group."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedconv import _C
from fusedconv.device import Device
from fusedconv.kernels.compiled import (
    CONTIGUOUS_STEP,
    group_norm_problem,
    supports_compiled,
)
from fusedconv.kernels.cpu.convolution import PROVIDER
from fusedconv.layout import Layout, empty, result_layout
from fusedconv.plan import ForwardKernel, ForwardPlan, Kernel, Outputs
from fusedconv.precision import COMPILED_DTYPES, dtype_name
from fusedconv.problem import ActNormAct, ForwardProblem, act_norm_act
from fusedconv.support import Support

#: Normalisations without groups that compiled passes have behind a convolution.
UNGROUPED = frozenset({"layer", "affine"})
#: Passes over a tensor that a compiled pass over two tensors takes.
_PASSES = 2.0


class Stages:
    """The compiled stages of a problem, from dense tensors of one layout and dtype to the problem's
    output: activations and, where the problem has it, the normalisation between them."""

    def __init__(
        self, problem: ForwardProblem, form: ActNormAct, layout: Layout, dtype: torch.dtype
    ) -> None:
        self.compiled = group_norm_problem(
            problem,
            form,
            batch=problem.batch,
            input_layout=layout,
            output_layout=problem.output_layout,
            dtype=dtype,
        )
        self.kind = form.norm.kind if form.norm else None
        self.save = problem.save and form.norm is not None and self.kind not in UNGROUPED
        self.keeps = layout == problem.output_layout and dtype == problem.output_dtype
        self.layout, self.dtype = problem.output_layout, problem.output_dtype
        self.statistics = (
            problem.batch,
            form.norm.groups(problem.output_channels) if form.norm else 0,
        )
        named = {None: "identity", "layer": "layer_norm over channels", "affine": "affine map"}
        fused = [form.before, named.get(self.kind, "group_norm"), form.after]
        parts = [part for part in fused if part != "identity"]
        name = f"fused {' + '.join(parts)}" if parts else "copy"
        changes = []
        if layout != problem.output_layout:
            changes.append(f"{layout.upper()} to {problem.output_layout.upper()}")
        if dtype != problem.output_dtype:
            changes.append(f"{dtype_name(dtype)} to {dtype_name(problem.output_dtype)}")
        self.step = f"{name}{', ' if changes else ''}{', '.join(changes)} (fusedconv._C)"

    def run(
        self,
        x: Tensor,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        in_place: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Output, and mean and rstd where they are saved. ``in_place`` gives ``x`` away, which is
        overwritten where layout and dtype are the output's."""
        if self.keeps:
            output = x if in_place else torch.empty_like(x)
        else:
            output = empty(x, x.shape, self.layout, self.dtype)
        threads = torch.get_num_threads()
        # Written out: on a small tensor the calls of helpers would take as long as the kernel.
        if norm_weight is not None:
            norm_weight = norm_weight.contiguous()
        if norm_bias is not None:
            norm_bias = norm_bias.contiguous()
        if self.kind is None or self.kind in UNGROUPED:
            run = _C.cpu.layer_norm if self.kind == "layer" else _C.cpu.activate
            run(
                self.compiled,
                x.data_ptr(),
                output.data_ptr(),
                0 if norm_weight is None else norm_weight.data_ptr(),
                0 if norm_bias is None else norm_bias.data_ptr(),
                threads,
            )
            return output, None, None
        mean = rstd = None
        if self.save:
            mean = torch.empty(self.statistics, dtype=torch.float32)
            rstd = torch.empty(self.statistics, dtype=torch.float32)
        _C.cpu.group_norm(
            self.compiled,
            x.data_ptr(),
            output.data_ptr(),
            0 if norm_weight is None else norm_weight.data_ptr(),
            0 if norm_bias is None else norm_bias.data_ptr(),
            0 if mean is None else mean.data_ptr(),
            0 if rstd is None else rstd.data_ptr(),
            threads,
        )
        return output, mean, rstd


def converts(dtype: torch.dtype, output_dtype: torch.dtype) -> Support:
    """Whether compiled passes read the one and write the other."""
    known = dtype in COMPILED_DTYPES and output_dtype in COMPILED_DTYPES
    if known and (dtype == output_dtype or torch.float32 in (dtype, output_dtype)):
        return Support.yes()
    return Support.no(
        f"output dtype is {dtype_name(output_dtype)}, the input's {dtype_name(dtype)}"
    )


class GroupNormPlan(ForwardPlan):
    def __init__(self, kernel: str, problem: ForwardProblem, form: ActNormAct) -> None:
        self.kernel = kernel
        self.problem = problem
        self.strided = problem.layout == "strided"
        self.stages = Stages(problem, form, result_layout(problem.layout), problem.dtype)
        self.steps = ((CONTIGUOUS_STEP,) if self.strided else ()) + (self.stages.step,)

    def run(
        self,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        residual: Tensor | None = None,
    ) -> Outputs:
        x = input.contiguous() if self.strided else input
        output, mean, rstd = self.stages.run(x, norm_weight, norm_bias)
        return Outputs(output, None, mean, rstd)


class CpuGroupNorm(ForwardKernel):
    name = f"{PROVIDER}_group_norm"
    provider = PROVIDER

    def supports(self, problem: ForwardProblem, device: Device) -> Support:
        if device.type != "cpu":
            return Support.no(f"runs on the processor, the input is on {device.type}")
        if problem.conv is not None:
            return Support.no("there is a convolution")
        if problem.norm is None:
            return Support.no("fuses activation and GroupNorm; there is no GroupNorm")
        return supports_compiled(problem) and converts(problem.dtype, problem.output_dtype)

    def cost(self, problem: ForwardProblem, device: Device) -> float:
        return device.copy_milliseconds(_PASSES * problem.minimal_bytes)

    def compile(self, problem: ForwardProblem, device: Device) -> GroupNormPlan:
        form = act_norm_act(problem.epilogue)
        assert isinstance(form, ActNormAct)
        return GroupNormPlan(self.name, problem, form)


def kernels() -> list[Kernel]:
    return [CpuGroupNorm()]
