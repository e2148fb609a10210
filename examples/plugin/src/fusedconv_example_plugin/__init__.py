"""One kernel for fusedconv: GroupNorm without an activation, on the processor, in float64."""

from __future__ import annotations

import torch

from fusedconv import Device, ForwardKernel, ForwardPlan, ForwardProblem, Outputs, Registry, Support


class Float64GroupNormPlan(ForwardPlan):
    """Moments by torch.var_mean, then elementwise operators."""

    kernel = "example_float64_group_norm"

    def __init__(self, problem: ForwardProblem) -> None:
        assert problem.norm is not None
        self.problem = problem
        self.groups = problem.norm.num_groups
        self.eps = problem.norm.eps
        steps = ["torch.var_mean of each group", "subtract, scale and shift, a torch operator each"]
        if problem.layout == "strided":
            steps.insert(0, "torch copy of the strided input to contiguous NCHW")
        self.steps = tuple(steps)

    def run(
        self,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        norm_weight: torch.Tensor | None,
        norm_bias: torch.Tensor | None,
        residual: torch.Tensor | None = None,
    ) -> Outputs:
        if self.problem.layout == "strided":
            input = input.contiguous()
        batch, channels = input.shape[:2]
        # Splitting the channel axis is a view in either dense layout.
        grouped = input.unflatten(1, (self.groups, channels // self.groups))
        axes = tuple(range(2, grouped.dim()))
        variance, mean = torch.var_mean(grouped, dim=axes, correction=0)
        rstd = torch.rsqrt(variance + self.eps)

        def per_channel(values: torch.Tensor) -> torch.Tensor:
            """[N, num_groups] to what broadcasts against the input."""
            each = values.repeat_interleave(channels // self.groups, dim=1)
            return each.reshape(batch, channels, *(1,) * (input.dim() - 2))

        # The mean is subtracted first: folding it into a shift would cancel where it is large.
        output = (input - per_channel(mean)) * per_channel(rstd)
        per_sample = (1, channels, *(1,) * (input.dim() - 2))
        if norm_weight is not None:
            output *= norm_weight.reshape(per_sample)
        if norm_bias is not None:
            output += norm_bias.reshape(per_sample)
        if not self.problem.save:
            return Outputs(output, None, None, None)
        return Outputs(output, None, mean, rstd)


class Float64GroupNorm(ForwardKernel):
    name = "example_float64_group_norm"
    provider = "example"

    def supports(self, problem: ForwardProblem, device: Device) -> Support:
        if problem.conv is not None:
            return Support.no("normalises only; the problem has a convolution")
        if problem.norm is None or problem.norm.kind != "group":
            return Support.no("the problem has no GroupNorm")
        if device.type != "cpu":
            return Support.no(f"runs on the processor, the input is on {device.type}")
        if problem.dtype != torch.float64 or problem.output_dtype != torch.float64:
            return Support.no(f"dtype is {problem.dtype}, only torch.float64 is served")
        if problem.norm.affine_dtype not in (None, torch.float64):
            return Support.no(f"affine dtype is {problem.norm.affine_dtype}, not torch.float64")
        others = [str(stage) for stage in problem.epilogue if stage is not problem.norm]
        if others:
            return Support.no(f"beside the normalisation there is {', '.join(others)}")
        if problem.input_elements == 0:
            return Support.no("the input is empty")
        return Support.yes()

    def cost(self, problem: ForwardProblem, device: Device) -> float:
        # Two reads and a write; a strided input is read and written once more.
        trips = 3 if problem.layout != "strided" else 5
        return device.copy_milliseconds(trips * problem.input_elements * problem.dtype.itemsize)

    def compile(self, problem: ForwardProblem, device: Device) -> Float64GroupNormPlan:
        return Float64GroupNormPlan(problem)


def register(registry: Registry) -> None:
    registry.register(Float64GroupNorm())
