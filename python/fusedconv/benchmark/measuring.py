"""One contender in one cell: its times, its memory and its errors."""

from __future__ import annotations

import copy
import functools
import platform
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fusedconv.benchmark.cells import DTYPES, Cell, memory_format
from fusedconv.benchmark.contenders import Contender
from fusedconv.benchmark.timing import Clock
from fusedconv.models import SYSTEMS, System
from fusedconv.recording import Composition
from fusedconv.recording import record as plan_record
from fusedconv.selection import explain_problem
from fusedconv.testing import sample_error

_L2_BYTES = 128 << 20  # inputs rotate over at least this much


def device_facts(device: torch.device, index: int | None) -> dict[str, Any]:
    """The device as a record names it; ``index`` is its number in the parent's eyes."""
    if device.type != "cuda":
        name = platform.processor() or platform.machine()
        return {"index": None, "name": name, "uuid": None}
    properties = torch.cuda.get_device_properties(device)
    uuid = getattr(properties, "uuid", None)  # torch 2.6 has it on some builds only
    return {"index": index, "name": properties.name, "uuid": None if uuid is None else str(uuid)}


@contextmanager
def precision_mode(precision: str, cudnn_benchmark: bool = False) -> Iterator[None]:
    """cuDNN's switches for one contender; everything else of torch's state is left alone."""
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.benchmark
    cudnn.allow_tf32, cudnn.benchmark = precision == "tf32", cudnn_benchmark
    try:
        yield
    finally:
        cudnn.allow_tf32, cudnn.benchmark = before


def conv_flops(model: nn.Module, input_shape: tuple[int, ...]) -> int:
    conv: Any = getattr(model, "conv_transpose", None)
    if conv is None:
        return 0
    pixels = input_shape[0]
    for extent in input_shape[2:]:
        pixels *= extent
    return int(2 * pixels * conv.weight.numel())


def _poison(num_bytes: int, device: torch.device) -> None:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        block = torch.empty(min(num_bytes, free // 2) // 4, device=device)
        block.fill_(torch.nan)
        del block


def kernel_name(model: nn.Module, x: Tensor) -> str:
    """The kernels of ours that a forward pass without gradients runs."""
    with torch.no_grad(), plan_record.recording() as calls:
        model(x)
    asked = dict.fromkeys(call for call in calls if not isinstance(call, Composition))
    return "+".join(explain_problem(*call).kernel for call in asked)


@dataclass(frozen=True)
class Setup:
    """A cell's model and tensors; ``grad`` is None in the forward pass."""

    cell: Cell
    system: System
    original: nn.Module
    inputs: list[Tensor]
    output_shape: tuple[int, ...]
    grad: Tensor | None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.inputs[0].shape)

    @property
    def input_bytes(self) -> int:
        return self.inputs[0].nbytes

    @property
    def output_bytes(self) -> int:
        return torch.Size(self.output_shape).numel() * self.inputs[0].itemsize


def prepare(cell: Cell, device: torch.device, small: bool) -> Setup:
    """The same values in every process: parameters, inputs in rotation and output gradient. Runs
    none of the cell's operators on the device."""
    system = SYSTEMS[cell.workload]
    shape = system.small_input_shape if small else system.input_shape
    dtype = DTYPES[cell.precision]
    form = memory_format(len(shape), cell.layout)
    torch.manual_seed(0)
    original = system.original(*system.init_arguments)
    for parameter in original.parameters():
        if parameter.dim() == 1:
            nn.init.uniform_(parameter, -1.0, 1.0)
    with torch.no_grad():
        like = copy.deepcopy(original).to("meta")(torch.empty(shape, device="meta"))
    original = original.to(device, dtype).to(memory_format=form)  # type: ignore[call-overload]
    x = torch.rand(shape, device=device).to(dtype, memory_format=form)
    copies = min(8, max(2, -(-_L2_BYTES // x.nbytes)))
    inputs = [x, *(torch.rand_like(x) for _ in range(copies - 1))]
    grad = None
    if cell.pass_ == "forward_backward":
        grad = torch.randn(like.shape, device=device, dtype=dtype).contiguous(memory_format=form)
    return Setup(cell, system, original, inputs, tuple(like.shape), grad)


def _error(
    original: nn.Module, x: Tensor, output: Tensor, samples: list[int] | None = None
) -> float:
    # Without cudnn.benchmark, which would try every algorithm on the float64 reference.
    with precision_mode("fp32"):
        return sample_error(original, x, output, samples)


def measure(setup: Setup, contender: Contender, clock: Clock) -> dict[str, Any]:
    """The fields of a record that are measured."""
    original, inputs, grad = setup.original, setup.inputs, setup.grad
    device = inputs[0].device
    result: dict[str, Any] = {}
    with precision_mode(setup.cell.precision, contender.cudnn_benchmark):
        model = contender.build(setup.system, original)

        def forward(x: Tensor) -> Tensor:
            with torch.no_grad():
                output: Tensor = model(x)
            return output

        def both(x: Tensor) -> Tensor:
            model.zero_grad(set_to_none=True)
            output: Tensor = model(x.detach().requires_grad_())
            output.backward(grad)
            return output

        run = forward if grad is None else both
        result["kernel"] = kernel_name(model, inputs[0]) if contender.ours else "torch"
        run(inputs[0])
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats(device)
            model.zero_grad(set_to_none=True)
            before = torch.cuda.memory_allocated(device)
            run(inputs[0])
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated(device)
            result["peak_extra_bytes"] = peak - before - setup.output_bytes
        else:
            result["peak_extra_bytes"] = None
        model.zero_grad(set_to_none=True)
        _poison(setup.output_bytes, device)
        result["error_fp64"] = _error(original, inputs[0], run(inputs[0]))
        times, host = clock.measure([functools.partial(run, x) for x in inputs])
        # The same model with other weights, changed behind autograd's version counter too.
        changed = copy.deepcopy(original)
        with torch.no_grad():
            for module in (model, changed):
                for parameter in module.parameters():
                    parameter.data.mul_(0.875)
        _poison(setup.output_bytes, device)
        # A packing that is kept too long could serve ours alone; one sample shows it of a peer.
        samples = None if contender.ours else [setup.shape[0] - 1]
        x = inputs[-1]
        result["error_fp64_after"] = _error(changed, x, run(x), samples)
    deciles = (
        statistics.quantiles(times, n=10, method="inclusive") if len(times) > 1 else [times[0]] * 9
    )
    result.update(
        median_ms=statistics.median(times),
        p10_ms=deciles[0],
        p90_ms=deciles[-1],
        reps=len(times),
        host_us=host,
    )
    return result


def failed(error: str) -> dict[str, Any]:
    """What a record says in place of measurements."""
    nothing = ("median_ms", "p10_ms", "p90_ms", "peak_extra_bytes", "error_fp64")
    return {"kernel": "torch", "error": error[:500], **dict.fromkeys(nothing)}
