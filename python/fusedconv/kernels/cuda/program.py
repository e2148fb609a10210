"""What the CUDA providers share: building the GroupNorm passes, and plans that run a program."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusedconv import _C
from fusedconv.plan import Outputs, Plan
from fusedconv.problem import (
    ACTIVATION_CODES,
    DTYPE_CODES,
    LAYOUT_CODES,
    Problem,
    dtype_name,
)
from fusedconv.registry import Kernel, Support

# Slots of the pointers that run() gets, in this order.
INPUT, WEIGHT, BIAS, NORM_WEIGHT, NORM_BIAS, OUTPUT, CONV_OUTPUT, MEAN, RSTD = range(9)

HAS_CUDA: bool = bool(_C.build["cuda"])

try:
    # The stream's address without building a Stream object; private, so the public way stays.
    from torch._C import _cuda_getCurrentRawStream as _raw_stream
except ImportError:

    def _raw_stream(device: int) -> int:
        return int(torch.cuda.current_stream(device).cuda_stream)


#: Bytes a second that a copy moves, reads and writes together, by compute capability; an unknown
#: device is taken for the newest. Only ratios decide between kernels.
_COPY_RATE = {80: 1.7e12, 90: 4.3e12}

#: Of one kernel of a program, where the GPU waits for the processor.
LAUNCH_MILLISECONDS = 0.004

#: What a plan says first of an input that no kernel reads as it lies.
CONTIGUOUS_STEP = "torch copy of the strided input to contiguous NCHW"


def copy_milliseconds(num_bytes: float, architecture: int) -> float:
    return num_bytes / _COPY_RATE.get(architecture, 4.3e12) * 1e3


def supports_cuda(problem: Problem) -> Support:
    """The conditions that every CUDA kernel of ours has in common."""
    if not HAS_CUDA:
        return Support.no("fusedconv was built without CUDA (see `fusedconv info`)")
    if problem.device != "cuda":
        return Support.no(f"runs on CUDA, the input is on {problem.device}")
    if problem.architecture < 80:
        return Support.no(f"needs compute capability 8.0, the device has {problem.architecture}")
    if problem.dtype not in DTYPE_CODES:
        return Support.no(f"dtype is {dtype_name(problem.dtype)}, not float32/float16/bfloat16")
    if problem.output_dtype not in (problem.dtype, torch.float32):
        return Support.no(f"output dtype is {dtype_name(problem.output_dtype)}")
    if problem.input_elements == 0 or problem.output_elements == 0:
        return Support.no("the input is empty")
    norm = problem.norm
    if norm is not None and norm.affine_dtype is not None and norm.affine_dtype not in DTYPE_CODES:
        return Support.no(f"affine dtype is {dtype_name(norm.affine_dtype)}")
    return Support.yes()


def supports_precision(problem: Problem, precision: str) -> Support:
    """Whether a convolution computed in ``precision`` is what a problem asks for.

    Strict fp32 is more than TF32 asks for, and small problems take it at no cost: eager's own small
    convolutions are not in TF32 either.
    """
    if precision == problem.precision or (precision, problem.precision) == ("fp32", "tf32"):
        return Support.yes()
    return Support.no(f"computes in {precision}, {problem.precision} is asked for")


def group_norm_passes(
    problem: Problem,
    *,
    layout: str,
    row_channels: int,
    activation_before: str,
    copy: bool = False,
) -> _C.GroupNormPasses:
    """The moments and normalising passes of a problem over a tensor of the given layout; with
    ``copy`` a pass that only changes the layout."""
    norm = None if copy else problem.norm
    return _C.GroupNormPasses(
        channels=problem.output_channels,
        pixels=math.prod(problem.output_spatial),
        groups=1 if norm is None else norm.num_groups,
        eps=0.0 if norm is None else norm.eps,
        layout=LAYOUT_CODES[layout],
        dtype=DTYPE_CODES[problem.dtype],
        affine_dtype=DTYPE_CODES[(norm.affine_dtype if norm else None) or torch.float32],
        activation_before=ACTIVATION_CODES[activation_before],
        activation_after=ACTIVATION_CODES["identity" if copy else problem.activation_after],
        row_channels=row_channels,
        output_layout=LAYOUT_CODES[problem.output_layout],
        output_dtype=DTYPE_CODES[problem.dtype if copy else problem.output_dtype],
    )


def statistics_operands(program: _C.Program, problem: Problem) -> dict[str, _C.Operand]:
    """What a moments step fills, by its arguments' names: ``statistics`` for the normalising step,
    and the ``mean`` and ``rstd`` that are saved. Absent without a GroupNorm or where not saved."""
    absent = _C.Operand()
    if problem.norm is None:
        return {"statistics": absent, "mean": absent, "rstd": absent}
    size = 4 * problem.norm.num_groups
    return {
        "statistics": program.statistics_scratch(problem.norm.num_groups),
        "mean": program.tensor(MEAN, size) if problem.save else absent,
        "rstd": program.tensor(RSTD, size) if problem.save else absent,
    }


def five_strides(strides: tuple[int, ...]) -> tuple[int, ...]:
    """A weight's strides [C, K, *kernel] with zeros for the leading axes that it lacks."""
    return (*strides[:2], *(0,) * (5 - len(strides)), *strides[2:])


def add_group_norm(
    program: _C.Program,
    problem: Problem,
    input: _C.Operand,
    *,
    layout: str,
    row_channels: int,
    activation_before: str,
) -> list[str]:
    """Appends the passes from a dense tensor to the output, and returns what they are called.

    Without a GroupNorm only activation, layout and dtype change.
    """
    norm = problem.norm
    passes = group_norm_passes(
        problem, layout=layout, row_channels=row_channels, activation_before=activation_before
    )
    steps = []
    operands = statistics_operands(program, problem)
    if norm is not None:
        program.moments(passes, input=input, **operands)
        moments = "moments" if activation_before == "identity" else f"{activation_before} + moments"
        steps.append(f"{moments} ({layout})")
    sample = problem.output_channels * math.prod(problem.output_spatial)
    program.normalize(
        passes,
        input=input,
        statistics=operands["statistics"],
        weight=program.tensor(NORM_WEIGHT, 0),
        bias=program.tensor(NORM_BIAS, 0),
        output=program.tensor(OUTPUT, sample * problem.output_dtype.itemsize),
    )
    parts = [activation_before, "normalize" if norm else "identity", problem.activation_after]
    name = " + ".join(part for part in parts if part != "identity") or "copy"
    steps.append(f"{name} ({layout} -> {problem.output_layout})")
    return steps


def add_conv_output_copy(
    program: _C.Program, problem: Problem, conv_output: _C.Operand, *, row_channels: int
) -> str:
    """Appends the pass that saves a channels-last convolution output in the caller's layout."""
    absent = _C.Operand()
    sample = problem.output_channels * math.prod(problem.output_spatial)
    program.normalize(
        group_norm_passes(
            problem,
            layout="nhwc",
            row_channels=row_channels,
            activation_before="identity",
            copy=True,
        ),
        input=conv_output,
        statistics=absent,
        weight=absent,
        bias=absent,
        output=program.tensor(CONV_OUTPUT, sample * problem.dtype.itemsize),
    )
    return f"save the convolution's output (nhwc -> {problem.output_layout})"


def group_norm_gradients(
    grad: Tensor,
    input: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    layout: str,
    num_groups: int,
    activation_before: str,
    activation_after: str,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of activation, GroupNorm, activation for dense tensors of one layout and dtype.

    ``grad`` and ``input`` are [N, C, *spatial] on CUDA, ``mean`` and ``rstd`` float32
    [N, num_groups]. The gradients of weight and bias come in float32.
    """
    batch, channels = input.shape[:2]
    pixels = input.numel() // (batch * channels)
    codes = {"layout": LAYOUT_CODES[layout], "dtype": DTYPE_CODES[input.dtype]}
    size = {"batch": batch, "channels": channels, "pixels": pixels, "groups": num_groups}
    workspace = torch.empty(
        _C.group_norm_gradient_workspace_bytes(input.device.index, **size, **codes),
        dtype=torch.uint8,
        device=input.device,
    )
    grad_input = torch.empty_like(input) if needs[0] else None
    grad_weight, grad_bias = (
        torch.empty(channels, dtype=torch.float32, device=input.device) if needed else None
        for needed in needs[1:]
    )
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    affine = weight if weight is not None else bias
    device = input.device.index
    _C.group_norm_gradients(
        *(
            0 if tensor is None else tensor.data_ptr()
            for tensor in (
                input,
                grad,
                mean,
                rstd,
                weight,
                bias,
                grad_input,
                grad_weight,
                grad_bias,
                workspace,
            )
        ),
        device,
        _raw_stream(device),
        **size,
        **codes,
        affine_dtype=DTYPE_CODES[torch.float32 if affine is None else affine.dtype],
        activation_before=ACTIVATION_CODES[activation_before],
        activation_after=ACTIVATION_CODES[activation_after],
    )
    return grad_input, grad_weight, grad_bias


class NotCompiled(Kernel):
    """Stands for a provider's rows in a build without CUDA, so that ``explain`` can say why."""

    def __init__(self, name: str, provider: str) -> None:
        self.name = name
        self.provider = provider

    def supports(self, problem: Problem) -> Support:
        if problem.conv is None:
            return Support.no("computes convolutions; the problem has none")
        return supports_cuda(problem)

    def cost(self, problem: Problem) -> float:
        raise NotImplementedError("never supported")

    def compile(self, problem: Problem) -> Plan:
        raise NotImplementedError("never supported")


class ProgramPlan(Plan):
    """A plan whose steps are one ``_C.Program``: allocate, pass addresses, launch."""

    def __init__(
        self,
        kernel: str,
        steps: tuple[str, ...],
        problem: Problem,
        program: _C.Program,
        device: int,
    ) -> None:
        self.kernel = kernel
        self.steps = steps
        self._program = program
        self._workspace_bytes: int = program.workspace_bytes
        self._device = torch.device("cuda", device)
        self._device_index = device
        self._contiguous_input = problem.layout == "strided"
        self._output_shape = (problem.batch, problem.output_channels, *problem.output_spatial)
        self._output_strides = _dense_strides(self._output_shape, problem.output_layout)
        self._output_dtype = problem.output_dtype
        self._saves = problem.save
        self._saves_conv = problem.save and problem.conv is not None
        self._conv_dtype = problem.dtype
        self._statistics_shape = (problem.batch, problem.norm.num_groups) if problem.norm else None

    def run(
        self,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
    ) -> Outputs:
        device = self._device
        if self._contiguous_input:
            input = input.contiguous()
        if norm_weight is not None and not norm_weight.is_contiguous():
            norm_weight = norm_weight.contiguous()
        if norm_bias is not None and not norm_bias.is_contiguous():
            norm_bias = norm_bias.contiguous()
        if bias is not None and not bias.is_contiguous():
            bias = bias.contiguous()
        output = torch.empty_strided(
            self._output_shape, self._output_strides, dtype=self._output_dtype, device=device
        )
        workspace = None
        if self._workspace_bytes:
            workspace = torch.empty(self._workspace_bytes, dtype=torch.uint8, device=device)
        conv_output = mean = rstd = None
        if self._saves:
            if self._saves_conv:
                conv_output = torch.empty_strided(
                    self._output_shape, self._output_strides, dtype=self._conv_dtype, device=device
                )
            if self._statistics_shape is not None:
                mean = torch.empty(self._statistics_shape, dtype=torch.float32, device=device)
                rstd = torch.empty_like(mean)
        self._program.run(
            [
                0 if tensor is None else tensor.data_ptr()
                for tensor in (
                    input,
                    weight,
                    bias,
                    norm_weight,
                    norm_bias,
                    output,
                    conv_output,
                    mean,
                    rstd,
                )
            ],
            0 if workspace is None else workspace.data_ptr(),
            _raw_stream(self._device_index),
        )
        return Outputs(output, conv_output, mean, rstd)


def _dense_strides(shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    order = list(range(len(shape) - 1, -1, -1))
    if layout == "nhwc":
        order = [1, *range(len(shape) - 1, 1, -1), 0]
    strides = [0] * len(shape)
    expected = 1
    for axis in order:
        strides[axis] = expected
        expected *= shape[axis]
    return tuple(strides)
