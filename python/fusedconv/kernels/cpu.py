"""The processor's provider: activation and GroupNorm in one compiled pass over each group.

The convolution in front, if any, is torch's (oneDNN).
"""

from __future__ import annotations

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
from fusedconv.layout import dense, layout_of
from fusedconv.plan import ForwardKernel, ForwardPlan, Kernel, Outputs
from fusedconv.problem import ActNormAct, ForwardProblem, act_norm_act
from fusedconv.reference import conv_transpose
from fusedconv.support import Support


class CpuPlan(ForwardPlan):
    def __init__(self, kernel: str, problem: ForwardProblem, form: ActNormAct) -> None:
        assert form.norm is not None
        self.kernel = kernel
        self.problem = problem
        self.groups = form.norm.groups(problem.output_channels)
        self._compiled = {
            layout: group_norm_problem(
                problem,
                form,
                batch=problem.batch,
                input_layout=layout,
                output_layout=layout,
            )
            for layout in ("nchw", "nhwc")
        }
        steps = []
        if problem.layout == "strided" and problem.conv is None:
            steps.append(CONTIGUOUS_STEP)
        if problem.conv is not None:
            steps.append(f"torch.conv_transpose{len(problem.conv.kernel_size)}d (oneDNN)")
        fused = [form.before, "group_norm", form.after]
        steps.append(
            "fused " + " + ".join(part for part in fused if part != "identity") + " (fusedconv._C)"
        )
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
        conv_output = None
        x = input
        if problem.conv is not None:
            assert weight is not None
            # Autocast around the operator lowers torch's convolution.
            x = conv_output = conv_transpose(problem.conv, input, weight, bias).to(problem.dtype)
        layout = layout_of(x.shape, x.stride())
        if layout == "strided":
            x = x.contiguous()
            layout = "nchw"
        output = torch.empty_like(x)
        mean = rstd = None
        if problem.save:
            mean = torch.empty((problem.batch, self.groups), dtype=torch.float32)
            rstd = torch.empty_like(mean)
        norm_weight = None if norm_weight is None else norm_weight.contiguous()
        norm_bias = None if norm_bias is None else norm_bias.contiguous()
        _C.cpu.group_norm(
            self._compiled[layout],
            input=x.data_ptr(),
            output=output.data_ptr(),
            weight=address(norm_weight),
            bias=address(norm_bias),
            mean=address(mean),
            rstd=address(rstd),
            threads=torch.get_num_threads(),
        )
        return Outputs(
            dense(output, problem.output_layout), conv_output if problem.save else None, mean, rstd
        )


class CpuGroupNorm(ForwardKernel):
    name = "cpu_group_norm"
    provider = "cpu"

    def supports(self, problem: ForwardProblem, device: Device) -> Support:
        if device.type != "cpu":
            return Support.no(f"runs on the processor, the input is on {device.type}")
        if problem.norm is None:
            return Support.no("fuses activation and GroupNorm; there is no GroupNorm")
        if problem.output_dtype != problem.dtype:
            return Support.no("output dtype differs from input dtype")
        return supports_compiled(problem)

    def cost(self, problem: ForwardProblem, device: Device) -> float:
        convolution = problem.conv_flops / device.fp32_flops * 1e3
        return convolution + device.copy_milliseconds(2.0 * problem.minimal_bytes)

    def compile(self, problem: ForwardProblem, device: Device) -> CpuPlan:
        form = act_norm_act(problem.epilogue)
        assert isinstance(form, ActNormAct)
        return CpuPlan(self.name, problem, form)


def kernels() -> list[Kernel]:
    return [CpuGroupNorm()]
