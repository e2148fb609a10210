"""Forward passes whose convolution runs in another form than torch's own call."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from fusedconv.device import Device
from fusedconv.kernels.compiled import supports_compiled
from fusedconv.kernels.cpu.biases import quick_bias
from fusedconv.kernels.cpu.convolution import (
    PROVIDER,
    AsTorch,
    ChannelsLast,
    Convolution,
    Form,
    OrdinaryConvolution,
)
from fusedconv.kernels.cpu.direct import Direct
from fusedconv.kernels.cpu.group_norm import UNGROUPED, Stages, converts
from fusedconv.kernels.cpu.matrix_product import MatrixProduct
from fusedconv.kernels.cpu.pixel_shuffle import PixelShuffle
from fusedconv.kernels.cpu.shifted import ShiftedProducts
from fusedconv.kernels.torch import TorchForward, TorchPlan
from fusedconv.layout import dense
from fusedconv.plan import ForwardKernel, ForwardPlan, Kernel, Outputs
from fusedconv.precision import dtype_name
from fusedconv.problem import (
    ActNormAct,
    Bias,
    ForwardProblem,
    Stage,
    act_norm_act,
)
from fusedconv.support import Support

#: In which a convolution is computed.
FORMS: tuple[Form, ...] = (
    AsTorch(), ChannelsLast(), OrdinaryConvolution(), MatrixProduct(), PixelShuffle(), Direct(),
    ShiftedProducts(),
)  # fmt: skip
#: Passes over a tensor of a compiled pass that reads one and writes another, and of one that
#: normalises in between.
_PASSES, _NORM_PASSES = 2.0, 4.0
#: How much longer a compiled pass takes whose output lies in the other layout: whole layers that
#: save the convolution's output took as long in both layouts at that, channels first, in float32
#: and bfloat16 on two cores with AVX-512. In the convolution's own layout nothing is risked.
_OTHER_LAYOUT = 3.0
#: Passes in which torch copies a tensor to the other layout.
_RELAYOUT_PASSES = 4.0
#: What other forms than torch's own call take beside it where caches are cold, in launches, but no
#: larger a share of the estimate: small problems of estimates closer than that took up to 1.3 times
#: as long as torch's call.
_COLD, _COLD_SHARE = 200.0, 0.25


def _form(problem: ForwardProblem, dtype: torch.dtype) -> ActNormAct | Support:
    """The stages as a compiled pass over a convolution's output of this dtype takes them; a refusal
    where none does."""
    support = supports_compiled(problem, UNGROUPED) and converts(dtype, problem.output_dtype)
    return act_norm_act(problem.epilogue, UNGROUPED) if support else support


def _stages_in_torch(problem: ForwardProblem, dtype: torch.dtype) -> ForwardProblem:
    """What is behind the convolution and its bias as a problem of its own."""
    return dataclasses.replace(
        problem,
        dtype=dtype,
        output_dtype=dtype if dtype != problem.dtype else problem.output_dtype,
        precision=problem.precision if dtype == problem.dtype else "fp32",
        layout=problem.output_layout,
        aligned=True,
        channels=problem.output_channels,
        spatial=problem.output_spatial,
        conv=None,
        epilogue=tuple(stage for stage in problem.epilogue if not isinstance(stage, Bias)),
    )


def _stages_behind(problem: ForwardProblem, convolution: Convolution) -> list[Stage]:
    """What is behind the convolution, its bias and an activation that it computes."""
    if convolution.activates:
        return []
    return [stage for stage in problem.epilogue if not isinstance(stage, Bias)]


class ConvTransposePlan(ForwardPlan):
    """A form's convolution, then a compiled pass for the stages behind it, the layout and the
    dtype; torch's operators for stages that no compiled pass has."""

    def __init__(self, kernel: str, problem: ForwardProblem, convolution: Convolution) -> None:
        self.kernel = kernel
        self.problem = problem
        self.convolution = convolution
        layout, dtype = convolution.layout, convolution.dtype
        lies = layout == problem.output_layout
        stages = _stages_behind(problem, convolution)
        steps = list(convolution.steps)
        #: Brings the convolution's output into what is saved, or into what torch's stages take.
        self.stored: Stages | None = None
        self.fused: Stages | None = None
        self.in_torch: TorchPlan | None = None
        form = _form(problem, dtype)
        rest = dataclasses.replace(problem, epilogue=(), output_dtype=problem.dtype, save=False)
        if isinstance(form, ActNormAct) and (stages or not lies or dtype != problem.output_dtype):
            self.fused = Stages(problem, form, layout, dtype)
        if problem.saves_conv_output and not (lies and dtype == problem.dtype):
            self.stored = Stages(
                rest, ActNormAct(False, "identity", None, "identity"), layout, dtype
            )
            steps.append(f"the convolution's output for the backward pass: {self.stored.step}")
        if self.fused is not None:
            steps.append(self.fused.step)
        elif stages:
            anew = _stages_in_torch(problem, dtype)
            self.in_torch = TorchPlan(anew)
            if not lies:
                steps.append(f"torch copy to {problem.output_layout.upper()}")
            steps += self.in_torch.steps
            if anew.output_dtype != problem.output_dtype:
                steps.append(f"torch copy of the output to {dtype_name(problem.output_dtype)}")
        self.steps = tuple(steps)

    def run(
        self,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        residual: Tensor | None = None,
    ) -> Outputs:
        problem = self.problem
        assert weight is not None
        x = self.convolution.run(input, weight, bias)
        conv_output = None
        if problem.saves_conv_output:
            conv_output = x if self.stored is None else self.stored.run(x, None, None)[0]
        if self.fused is not None:
            # New memory takes longer to come by than to write.
            fresh = conv_output is not x
            output, mean, rstd = self.fused.run(x, norm_weight, norm_bias, in_place=fresh)
            return Outputs(output, conv_output, mean, rstd)
        output, mean, rstd = dense(x, problem.output_layout), None, None
        if self.in_torch is not None:
            output, _, mean, rstd = self.in_torch.run(
                output, None, None, norm_weight, norm_bias, residual
            )
        return Outputs(output.to(problem.output_dtype), conv_output, mean, rstd)


class CpuConvTranspose(ForwardKernel):
    """A transposed convolution in one form, and what is behind it."""

    provider = PROVIDER

    def __init__(self, form: Form) -> None:
        self.form = form
        self.name = f"{PROVIDER}_{form.name}"

    def supports(self, problem: ForwardProblem, device: Device) -> Support:
        if device.type != "cpu":
            return Support.no(f"runs on the processor, the input is on {device.type}")
        if problem.conv is None:
            return Support.no("there is no convolution")
        if isinstance(self.form, AsTorch):
            form = _form(problem, problem.dtype)
            if isinstance(form, Support):
                return form
            quick = quick_bias(problem, device, problem.dtype, problem.layout)
            if quick is None and all(isinstance(stage, Bias) for stage in problem.epilogue):
                return Support.no("there is nothing behind torch's own call to fuse")
        return self.form.supports(problem, device)

    def cost(self, problem: ForwardProblem, device: Device) -> float:
        convolution = self.form.compile(problem, device)
        total = self.form.cost(problem, device)
        size = problem.output_elements
        moved = size * (convolution.dtype.itemsize + problem.output_dtype.itemsize)
        lies = convolution.layout == problem.output_layout
        form = _form(problem, convolution.dtype)
        stages = bool(_stages_behind(problem, convolution))
        one_pass = device.copy_milliseconds(moved) * (1.0 if lies else _OTHER_LAYOUT)
        if isinstance(form, Support):
            if stages:
                anew = _stages_in_torch(problem, convolution.dtype)
                total += TorchForward().cost(anew, device)
            total += device.copy_milliseconds(_RELAYOUT_PASSES * moved) if not lies else 0.0
        elif form.norm is not None and form.norm.kind != "affine":
            total += device.copy_milliseconds((_NORM_PASSES - _PASSES) / 2 * moved) + one_pass
        elif stages or not lies or convolution.dtype != problem.output_dtype:
            total += one_pass
        if problem.saves_conv_output and not (lies and convolution.dtype == problem.dtype):
            total += one_pass
        if not isinstance(self.form, AsTorch):
            total += min(_COLD * device.launch_milliseconds, _COLD_SHARE * total)
        return total

    def compile(self, problem: ForwardProblem, device: Device) -> ConvTransposePlan:
        return ConvTransposePlan(self.name, problem, self.form.compile(problem, device))


def kernels() -> list[Kernel]:
    return [CpuConvTranspose(form) for form in FORMS]
