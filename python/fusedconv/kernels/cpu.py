"""The processor's provider: activation and GroupNorm in one compiled pass over each group.

The convolution in front, if any, is torch's (oneDNN).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedconv import _C
from fusedconv.kernels.torch_reference import conv_transpose, dense
from fusedconv.plan import Outputs, Plan
from fusedconv.problem import (
    ACTIVATION_CODES,
    DTYPE_CODES,
    LAYOUT_CODES,
    Problem,
    dtype_name,
    layout_of,
)
from fusedconv.registry import Kernel, Registry, Support


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class CpuPlan(Plan):
    def __init__(self, kernel: str, problem: Problem) -> None:
        self.kernel = kernel
        self.problem = problem
        steps = []
        if problem.layout == "strided" and problem.conv is None:
            steps.append("torch copy of the strided input to contiguous NCHW")
        if problem.conv is not None:
            steps.append(f"torch.conv_transpose{len(problem.conv.kernel_size)}d (oneDNN)")
        fused = [problem.activation_before, "group_norm", problem.activation_after]
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
    ) -> Outputs:
        problem = self.problem
        norm = problem.norm
        assert norm is not None
        conv_output = None
        x = input
        if problem.conv is not None:
            assert weight is not None
            x = conv_output = conv_transpose(problem.conv, input, weight, bias)
        layout = layout_of(tuple(x.shape), x.stride())
        if layout == "strided":
            x = x.contiguous()
            layout = "nchw"
        batch, channels = x.shape[:2]
        pixels = x.numel() // (batch * channels)
        output = torch.empty_like(x)
        mean = rstd = None
        if problem.save:
            mean = torch.empty((batch, norm.num_groups), dtype=torch.float32)
            rstd = torch.empty_like(mean)
        norm_weight = None if norm_weight is None else norm_weight.contiguous()
        norm_bias = None if norm_bias is None else norm_bias.contiguous()
        _C.cpu_group_norm(
            x.data_ptr(),
            output.data_ptr(),
            _address(norm_weight),
            _address(norm_bias),
            _address(mean),
            _address(rstd),
            batch=batch,
            channels=channels,
            pixels=pixels,
            groups=norm.num_groups,
            eps=norm.eps,
            layout=LAYOUT_CODES[layout],
            dtype=DTYPE_CODES[x.dtype],
            affine_dtype=DTYPE_CODES[norm.affine_dtype or x.dtype],
            activation_before=ACTIVATION_CODES[problem.activation_before],
            activation_after=ACTIVATION_CODES[problem.activation_after],
            threads=torch.get_num_threads(),
        )
        return Outputs(
            dense(output, problem.output_layout), conv_output if problem.save else None, mean, rstd
        )


class CpuGroupNorm(Kernel):
    name = "cpu_group_norm"
    provider = "cpu"

    def supports(self, problem: Problem) -> Support:
        if problem.device != "cpu":
            return Support.no(f"runs on the processor, the input is on {problem.device}")
        if problem.norm is None:
            return Support.no("fuses activation and GroupNorm; there is no GroupNorm")
        if problem.dtype not in DTYPE_CODES:
            return Support.no(f"dtype is {dtype_name(problem.dtype)}, not float32/float16/bfloat16")
        if problem.output_dtype != problem.dtype:
            return Support.no("output dtype differs from input dtype")
        if problem.norm.affine_dtype is not None and problem.norm.affine_dtype not in DTYPE_CODES:
            return Support.no(f"affine dtype is {dtype_name(problem.norm.affine_dtype)}")
        if problem.input_elements == 0 or problem.output_elements == 0:
            return Support.no("the input is empty")
        return Support.yes()

    def cost(self, problem: Problem) -> float:
        return problem.conv_flops / 1e8 + 2.0 * problem.minimal_bytes / 1e7

    def compile(self, problem: Problem) -> Plan:
        return CpuPlan(self.name, problem)


def register(registry: Registry) -> None:
    registry.register(CpuGroupNorm())
