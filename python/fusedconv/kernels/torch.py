"""The reference provider: torch's own operators. Serves everything torch serves."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from torch import Tensor

from fusedconv.device import Device
from fusedconv.kernels import onednn
from fusedconv.norms import KINDS, Norm
from fusedconv.plan import (
    BackwardKernel,
    BackwardPlan,
    BackwardTensors,
    ForwardKernel,
    ForwardPlan,
    Gradients,
    JoinedPlan,
    Kernel,
    Outputs,
)
from fusedconv.problem import (
    Activation,
    BackwardProblem,
    Bias,
    ConvTransposeGeometry,
    ForwardProblem,
    Residual,
)
from fusedconv.reference import (
    compose,
    convolution_gradients,
    epilogue_gradients,
    precision_scope,
)
from fusedconv.support import Support

# ---- what torch's operators cost -----------------------------------------------------------------


@dataclass(frozen=True)
class OperatorCost:
    """Time of a vendor's operator: ``start`` launches, ``flops`` times its products at the tensor
    cores' full rate, ``passes`` times its input and output at copy rate."""

    start: float
    flops: float
    passes: float

    def milliseconds(
        self, device: Device, precision: str, num_flops: float, num_bytes: float
    ) -> float:
        products = num_flops / device.tensor_flops(precision) * 1e3  # type: ignore[arg-type]
        return (
            self.start * device.launch_milliseconds
            + self.flops * products
            + self.passes * device.copy_milliseconds(num_bytes)
        )


@dataclass(frozen=True)
class CostConstants:
    """What torch's operators cost on a GPU, by operator."""

    #: By "forward" or gradient, strict fp32 or a precision of the tensor cores, spatial axes (two
    #: stand for one too).
    convolution: dict[tuple[str, bool, int], OperatorCost]
    #: Of one read of the output: the sum of its gradient, and an activation.
    bias: OperatorCost
    activation: OperatorCost
    #: By layout, of one read of the output in float32: in 16 bits it takes as long.
    norm: dict[str, OperatorCost]
    norm_backward: dict[str, OperatorCost]
    #: The same read for the statistics, where there are as many groups as multiprocessors: each
    #: group is one block's, so that fewer take longer.
    few_groups: float
    #: What the caller's thread takes to prepare an operator's call, in launches.
    call: float


#: Fitted by ``benchmarks/cost_model.py`` to operators timed on 120 problems on an H200; not so
#: ``call``, and the normalisation of channels last, which lies between those and a far larger one.
COSTS = CostConstants(
    convolution={
        ("forward", False, 2): OperatorCost(3.74, 1.41, 5.95),
        ("forward", False, 3): OperatorCost(5.31, 7.3, 4.31),
        ("forward", True, 2): OperatorCost(4.01, 5.96, 10.3),
        ("forward", True, 3): OperatorCost(5.19, 4.87, 43.5),
        ("input", False, 2): OperatorCost(3.07, 2.7, 2.72),
        ("input", False, 3): OperatorCost(4.48, 8.46, 0.289),
        ("input", True, 2): OperatorCost(3.77, 7.86, 0.548),
        ("input", True, 3): OperatorCost(5.52, 7.82, 0.0),
        ("weight", False, 2): OperatorCost(3.54, 3.23, 5.45),
        ("weight", False, 3): OperatorCost(3.99, 10.5, 3.89),
        ("weight", True, 2): OperatorCost(4.34, 1.46, 22.0),
        ("weight", True, 3): OperatorCost(3.91, 0.0, 162.0),
    },
    bias=OperatorCost(1.4, 0.0, 4.43),
    activation=OperatorCost(0.445, 0.0, 1.81),
    norm={"nchw": OperatorCost(1.46, 0.0, 4.0), "nhwc": OperatorCost(2.53, 0.0, 14.5)},
    norm_backward={"nchw": OperatorCost(2.59, 0.0, 10.2), "nhwc": OperatorCost(3.68, 0.0, 24.2)},
    few_groups=3.458,
    call=4.5,
)


#: Of strided transposed convolutions, by what ``CostConstants.convolution`` is. Fitted to times of
#: layers on an H200, most of them of real models: forward of 30, NCHW and channels last, gradients
#: of 18, NCHW.
STRIDED = {
    ("forward", False, 2): OperatorCost(8.91, 2.11, 6.87),
    ("forward", False, 3): OperatorCost(7.05, 0.0, 8.92),
    ("forward", True, 2): OperatorCost(11.6, 3.72, 13.6),
    ("forward", True, 3): OperatorCost(13.5, 0.0, 28.2),
    ("input", False, 2): OperatorCost(9.19, 0.949, 3.13),
    ("input", False, 3): OperatorCost(6.44, 5.22, 1.99),
    ("weight", False, 2): OperatorCost(7.95, 1.94, 3.71),
    ("weight", False, 3): OperatorCost(6.2, 5.57, 3.13),
}
#: Of those with a channel to a group, of its tensors in float32: in 16 bits it takes as long. From
#: two layers on the same device.
DEPTHWISE = OperatorCost(3.7, 0.0, 28.0)


#: Channels of an ungrouped convolution below which a vendor's library has no kernel of its own: its
#: tiles are of more, and most of their products are of zeros.
FEW_CHANNELS = 8
#: How much longer than the estimate its gradients then take with a stride, in 16 bits and in TF32,
#: by layout: 2.43 for 0.74 ms and 4.13 for 1.42 in NCHW, 0.96 and 3.75 channels last. From one
#: layer on the same device, of 3 to 16 channels in three dimensions.
FEW_CHANNELS_16_BITS = {"nchw": 3.3, "nhwc": 1.3}
FEW_CHANNELS_TF32 = {"nchw": 2.9, "nhwc": 2.6}


def _few_channels_factor(problem: ForwardProblem) -> float:
    conv = problem.conv
    assert conv is not None
    few = conv.groups == 1 and min(conv.in_channels, conv.out_channels) < FEW_CHANNELS
    if not few or max(conv.stride) == 1 or problem.precision in ("fp32", "fp64"):
        return 1.0
    factors = FEW_CHANNELS_TF32 if problem.precision == "tf32" else FEW_CHANNELS_16_BITS
    return factors[problem.output_layout]


def _convolution_milliseconds(
    what: str, problem: ForwardProblem, device: Device, costs: CostConstants
) -> float:
    conv = problem.conv
    assert conv is not None
    strict, axes = problem.precision in ("fp32", "fp64"), max(2, len(problem.spatial))
    elements = problem.input_elements + problem.output_elements
    moved = elements * problem.dtype.itemsize
    cost = costs.convolution[what, strict, axes]
    if what == "forward" and conv.groups == conv.in_channels > 1:
        cost, moved = DEPTHWISE, 4 * elements
    elif max(conv.stride) > 1:
        cost = STRIDED.get((what, strict, axes), cost)
    factor = 1.0 if what == "forward" else _few_channels_factor(problem)
    return factor * cost.milliseconds(device, problem.precision, problem.conv_flops, moved)


def _processor_passes(problem: ForwardProblem) -> tuple[float, float]:
    """Bytes that the operators behind a convolution, or without one, move on a processor, forward
    and backward."""
    stages = len([stage for stage in problem.epilogue if not isinstance(stage, Bias)])
    norms = problem.norm is not None
    written = problem.output_elements * problem.dtype.itemsize
    forward = 2.0 * (2.0 + stages + norms) * written if stages or problem.conv is None else 0.0
    return forward, 3.0 * (stages + norms) * written


#: Up to so many bytes of a tensor, a processor's caches and the memory that was used just before
#: serve passes of torch's operators in so large a share of the estimates, where these follow each
#: other as in eager: 1 to 16 MB of GroupNorm with and without SiLU, on two cores.
_SMALL_BYTES = 8 << 20
_SMALL_SHARE = 0.55


def followed_milliseconds(problem: ForwardProblem, device: Device, estimated: float) -> float:
    """What ``estimated`` milliseconds of torch's operators, one by one in both passes, are where
    autograd follows them."""
    small = problem.output_elements * problem.dtype.itemsize <= _SMALL_BYTES
    if not small:
        return estimated
    moved = sum(_processor_passes(problem))
    return estimated - (1.0 - _SMALL_SHARE) * device.copy_milliseconds(moved)


# ---- forward -------------------------------------------------------------------------------------


def _operator(conv: ConvTransposeGeometry) -> str:
    return f"torch.conv_transpose{len(conv.kernel_size)}d"


def _stage_step(stage: Activation | Norm | Residual) -> str:
    match stage:
        case Residual():
            return "torch add residual"
        case Norm():
            return KINDS[stage.kind].operator
    return f"torch {stage}"


class TorchPlan(ForwardPlan):
    kernel = "torch"
    is_reference = True

    def __init__(self, problem: ForwardProblem) -> None:
        self.problem = problem
        steps = []
        if problem.conv is not None:
            steps.append(f"{_operator(problem.conv)} (vendor library)")
        steps += [_stage_step(stage) for stage in problem.epilogue if not isinstance(stage, Bias)]
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
        with precision_scope(self.problem.precision, input):
            return compose(self.problem, input, weight, bias, norm_weight, norm_bias, residual)


class FollowedPlan(TorchPlan):
    """The operators that autograd follows by itself: they save what they need. Both passes compute
    as torch's switch says when they come, as eager's do: a precision that is asked for is never
    followed."""

    def __init__(self, problem: ForwardProblem) -> None:
        super().__init__(dataclasses.replace(problem, save=False, recompute=False))

    def run_batch_norm(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        running_mean: Tensor,
        running_var: Tensor,
    ) -> Tensor:
        """The output of a BatchNorm by running mean and variance, whose affine map the problem
        has."""
        tensors = (input, weight, bias, norm_weight, norm_bias)
        statistics = running_mean, running_var
        return compose(self.problem, *tensors, statistics=statistics).output


class TorchForward(ForwardKernel):
    name = "torch"
    provider = "torch"

    def supports(self, problem: ForwardProblem, device: Device) -> Support:
        return Support.yes()

    def cost(self, problem: ForwardProblem, device: Device) -> float:
        return self.estimate(problem, device, COSTS)

    def estimate(self, problem: ForwardProblem, device: Device, costs: CostConstants) -> float:
        """What eager costs, were the constants these: the vendor's convolution and one operator a
        stage."""
        if device.type != "cuda":
            behind = device.copy_milliseconds(_processor_passes(problem)[0])
            if problem.conv is None:
                return behind
            return behind + onednn.forward_milliseconds(
                problem, device, problem.dtype, problem.layout
            )
        read = problem.output_elements * problem.dtype.itemsize
        calls = len(problem.epilogue) - problem.bias + (problem.conv is not None)
        total = costs.call * calls * device.launch_milliseconds
        if problem.conv is not None:
            total += _convolution_milliseconds("forward", problem, device, costs)
        for stage in problem.epilogue:
            match stage:
                case Activation():
                    total += costs.activation.milliseconds(device, problem.precision, 0, read)
                case Residual():
                    total += costs.activation.milliseconds(device, problem.precision, 0, 1.5 * read)
                case Norm():
                    cost = costs.norm[problem.output_layout]
                    wide = 4 * problem.output_elements
                    total += cost.milliseconds(device, problem.precision, 0, wide)
                    if not problem.norm_groups:
                        continue
                    blocks = max(1, problem.batch * problem.norm_groups)
                    share = device.multiprocessors / blocks
                    total += costs.few_groups * device.copy_milliseconds(wide) * share
        return total

    def compile(self, problem: ForwardProblem, device: Device) -> TorchPlan:
        return TorchPlan(problem)


# ---- backward ------------------------------------------------------------------------------------


class TorchEpiloguePlan(BackwardPlan):
    kernel = "torch_epilogue_backward"
    is_reference = True

    def __init__(self, problem: BackwardProblem) -> None:
        self.problem = problem
        stages = [stage for stage in problem.forward.epilogue if not isinstance(stage, Bias)]
        self.steps = tuple(f"gradient of {_stage_step(stage)}" for stage in reversed(stages))

    def run(self, tensors: BackwardTensors) -> Gradients:
        return epilogue_gradients(self.problem, tensors)


class TorchEpilogueBackward(BackwardKernel):
    name = "torch_epilogue_backward"
    provider = "torch"
    computes = frozenset({"epilogue"})

    def supports(self, problem: BackwardProblem, device: Device) -> Support:
        return Support.yes()

    def cost(self, problem: BackwardProblem, device: Device) -> float:
        return self.estimate(problem, device, COSTS)

    def estimate(self, problem: BackwardProblem, device: Device, costs: CostConstants) -> float:
        """Milliseconds, were the constants these."""
        forward = problem.forward
        read = forward.output_elements * forward.dtype.itemsize
        stages = [stage for stage in forward.epilogue if not isinstance(stage, Bias)]
        if device.type != "cuda":
            return device.copy_milliseconds(_processor_passes(forward)[1])
        # In 16 bits everything is widened first.
        wide = 2.0 if forward.dtype.itemsize == 2 else 1.0
        total = costs.call * len(stages) * device.launch_milliseconds
        for stage in stages:
            cost = costs.activation
            if isinstance(stage, Norm):
                cost = costs.norm_backward[forward.output_layout]
            # An activation is computed anew and differentiated: twice what it takes forward.
            times = 1.0 if isinstance(stage, Norm) else 2.0
            total += cost.milliseconds(device, forward.precision, 0, times * wide * read)
        return total

    def compile(self, problem: BackwardProblem, device: Device) -> TorchEpiloguePlan:
        return TorchEpiloguePlan(problem)


class TorchConvolutionPlan(BackwardPlan):
    kernel = "torch_convolution_backward"
    is_reference = True

    def __init__(self, problem: BackwardProblem) -> None:
        self.problem = problem
        assert problem.forward.conv is not None
        # Lines are channels first, which the vendor library would copy back.
        self.reads_dense = problem.forward.output_layout == "nhwc"
        asked = [name for name in ("input", "weight", "bias") if name in problem.gradients]
        self.steps = (
            f"torch.ops.aten.convolution_backward for {', '.join(asked)} (vendor library)",
        )

    def run(self, tensors: BackwardTensors) -> Gradients:
        return convolution_gradients(self.problem, tensors)


#: Launches that the vendor's gradients keep the host for, however small the problem: a call, and
#: each of them. 100 to 170 us were measured for three where a launch takes 8. Small problems wait
#: for the host in training, and a pass that calls one is not repeated launch by launch as others
#: are: a step of swinunetr takes 714 us in TF32 where this computes two gradients, channels first,
#: and 181 in bf16 where kernels do.
_CALL_HOST = 30.0
_GRADIENT_HOST = 4.0


class TorchConvolutionBackward(BackwardKernel):
    name = "torch_convolution_backward"
    provider = "torch"
    computes = frozenset({"input", "weight", "bias"})

    def supports(self, problem: BackwardProblem, device: Device) -> Support:
        return Support.yes()

    def cost(self, problem: BackwardProblem, device: Device) -> float:
        return self.estimate(problem, device, COSTS)

    def estimate(self, problem: BackwardProblem, device: Device, costs: CostConstants) -> float:
        """Milliseconds, were the constants these."""
        forward = problem.forward
        if device.type != "cuda":
            return onednn.gradients_milliseconds(
                forward, device, forward.dtype, forward.layout, problem.parts
            )
        total = costs.call * device.launch_milliseconds
        for gradient in ("input", "weight"):
            if gradient in problem.gradients:
                total += _convolution_milliseconds(gradient, forward, device, costs)
        if "bias" in problem.gradients:
            size = forward.dtype.itemsize * math.prod(forward.output_shape)
            total += costs.bias.milliseconds(device, forward.precision, 0, size)
        host = _CALL_HOST + _GRADIENT_HOST * len(problem.parts)
        return max(total, host * device.launch_milliseconds)

    def compile(self, problem: BackwardProblem, device: Device) -> TorchConvolutionPlan:
        return TorchConvolutionPlan(problem)


def gradients_plan(problem: BackwardProblem) -> BackwardPlan:
    """torch's operators for every part of a backward pass."""
    plans: list[BackwardPlan] = []
    if "epilogue" in problem.parts:
        plans.append(TorchEpiloguePlan(problem.part(["epilogue"])))
    convolution = [part for part in problem.parts if part != "epilogue"]
    if convolution:
        plans.append(TorchConvolutionPlan(problem.part(convolution)))
    return JoinedPlan(plans)


def kernels() -> list[Kernel]:
    return [TorchForward(), TorchEpilogueBackward(), TorchConvolutionBackward()]
