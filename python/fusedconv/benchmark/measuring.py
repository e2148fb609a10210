"""One contender in one cell: its times, its memory and its errors."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedconv.benchmark.cells import AUTOCAST, Cell, memory_format
from fusedconv.benchmark.contenders import Contender
from fusedconv.benchmark.workloads import WORKLOADS, Workload
from fusedconv.device import processor_name
from fusedconv.explaining import Explanation, explain_problem
from fusedconv.recording import Call, Composition
from fusedconv.recording import record as plan_record
from fusedconv.testing import sample_errors
from fusedconv.timing import CACHE_BYTES, Clock, Prepared


def device_facts(device: torch.device, index: int | None) -> dict[str, Any]:
    """The device as a record names it; ``index`` is its number in the parent's eyes. A processor
    is told with the threads and the instruction set that torch works with."""
    if device.type != "cuda":
        return {
            "index": None,
            "name": processor_name(),
            "uuid": None,
            "threads": torch.get_num_threads(),
            "instruction_set": torch.backends.cpu.get_cpu_capability(),
        }
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


def _explained(calls: Iterable[Call | Composition]) -> list[Explanation]:
    """Of the different problems of a recording."""
    asked = dict.fromkeys(call for call in calls if not isinstance(call, Composition))
    return [explain_problem(*call) for call in asked]


def kernel_name(model: nn.Module, x: Tensor) -> str:
    """The kernels of ours that a forward pass without gradients runs."""
    with torch.no_grad(), plan_record.recording() as calls:
        model(x)
    return "+".join(explanation.kernel for explanation in _explained(calls))


@dataclass(frozen=True)
class Setup:
    """A cell's model and tensors; ``grad`` is None in the forward pass."""

    cell: Cell
    workload: Workload
    original: nn.Module
    inputs: list[Tensor]
    output_shape: tuple[int, ...]
    output_dtype: torch.dtype
    grad: Tensor | None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.inputs[0].shape)

    @property
    def input_bytes(self) -> int:
        return self.inputs[0].nbytes

    @property
    def output_bytes(self) -> int:
        return torch.Size(self.output_shape).numel() * self.output_dtype.itemsize

    def lowering(self) -> AbstractContextManager[Any]:
        return self.cell.lowering(self.inputs[0].device.type)


def _output_dtype(cell: Cell, device: torch.device, shape: tuple[int, ...]) -> torch.dtype:
    """Of the output of an input of that ``shape``, found without computing it."""
    if cell.precision not in AUTOCAST:
        return cell.dtype
    workload = WORKLOADS[cell.workload]
    with FakeTensorMode(), torch.device(device), torch.no_grad(), cell.lowering(device.type):
        output: Tensor = workload.original(*workload.init_arguments)(torch.empty(shape))
        return output.dtype


def prepare(cell: Cell, device: torch.device, size: str) -> Setup:
    """The same values in every process: parameters, inputs in rotation and output gradient. Runs
    none of the cell's operators on the device. ``size`` is one of ``models.SIZES``."""
    workload = WORKLOADS[cell.workload]
    shape = workload.shape(size)
    dtype = cell.dtype
    form = memory_format(len(shape), cell.layout)
    torch.manual_seed(0)
    original = workload.original(*workload.init_arguments)
    for parameter in original.parameters():
        if parameter.dim() == 1:
            nn.init.uniform_(parameter, -1.0, 1.0)
    with torch.no_grad():
        like = copy.deepcopy(original).to("meta")(torch.empty(shape, device="meta"))
    output_dtype = _output_dtype(cell, device, shape)
    placed: Any = original.to(device, dtype)
    original = placed.to(memory_format=form)  # of which not every torch's stubs know
    x = torch.rand(shape, device=device).to(dtype, memory_format=form)
    # They rotate over at least so much.
    copies = min(8, max(2, -(-CACHE_BYTES // x.nbytes)))
    inputs = [x, *(torch.rand_like(x) for _ in range(copies - 1))]
    grad = None
    if cell.pass_ == "forward_backward":
        grad = torch.randn(like.shape, device=device, dtype=output_dtype)
        grad = grad.contiguous(memory_format=form)
    return Setup(cell, workload, original, inputs, tuple(like.shape), output_dtype, grad)


def _errors(
    original: nn.Module, x: Tensor, outputs: Sequence[Tensor], samples: list[int] | None = None
) -> list[float]:
    # Without cudnn.benchmark, which would try every algorithm on the float64 reference.
    with precision_mode("fp32"):
        return sample_errors(original, x, outputs, samples)


class _Runner:
    """A contender in a cell: its model, and what its record holds so far."""

    def __init__(self, setup: Setup, contender: Contender) -> None:
        self.setup, self.contender = setup, contender
        self.record: dict[str, Any] = {}
        self.model = contender.build(setup.workload, setup.original)

    def __call__(self, x: Tensor) -> Tensor:
        """The cell's pass. Gradients are recorded where the caller has not switched that off."""
        return self.run(self.prepare(x))

    def prepare(self, x: Tensor) -> Tensor:
        """What the pass begins with: of gradients none, and a leaf."""
        if self.setup.grad is None:
            return x
        self.model.zero_grad(set_to_none=True)
        return x.detach().requires_grad_()

    def run(self, x: Tensor) -> Tensor:
        """The pass alone."""
        with self.setup.lowering():
            output: Tensor = self.model(x)
        if self.setup.grad is not None:
            output.backward(self.setup.grad)
        return output

    def timed(self, x: Tensor) -> Prepared:
        return Prepared(functools.partial(self.prepare, x), self.run)

    def start(self) -> Tensor:
        """The first calls, in which a compiler works and ours are tuned where that is asked for;
        the output, of the first input."""
        setup, x = self.setup, self.setup.inputs[0]
        device = x.device
        with setup.lowering():
            # Under autocast a processor's call is torch's operators, which ask for no kernel.
            name = kernel_name(self.model, x) if self.contender.ours else ""
        self.record["kernel"] = name or "torch"
        with plan_record.recording() as calls:
            self(x)
        if self.contender.ours:
            by = dict.fromkeys(explanation.chosen_by for explanation in _explained(calls))
            self.record["chosen_by"] = "+".join(by)
        self.record["peak_extra_bytes"] = None
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats(device)
            self.model.zero_grad(set_to_none=True)
            before = torch.cuda.memory_allocated(device)
            self(x)
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated(device)
            self.record["peak_extra_bytes"] = peak - before - setup.output_bytes
        self.model.zero_grad(set_to_none=True)
        _poison(setup.output_bytes, device)
        return self(x).detach()


def _scale(model: nn.Module) -> None:
    """Changes the weights, behind autograd's version counter too."""
    for parameter in model.parameters():
        parameter.data.mul_(0.875)


def measure(
    setup: Setup, contenders: Sequence[Contender], clock: Clock
) -> dict[str, dict[str, Any]]:
    """The fields of each contender's record that are measured, by its name.

    Those of a peer that does not start say why; any other failure is raised. Several contenders
    take turns, with cudnn.benchmark on where it is for any of them: torch keeps cuDNN's plans for a
    process, so on CUDA it was never off in this one.
    """
    original, inputs = setup.original, setup.inputs
    results: dict[str, dict[str, Any]] = {}
    runners: list[_Runner] = []
    outputs: list[Tensor] = []
    benchmarks = any(contender.cudnn_benchmark for contender in contenders)
    with (
        precision_mode(setup.cell.precision, benchmarks),
        torch.set_grad_enabled(setup.grad is not None),
    ):
        for contender in contenders:
            try:
                runner = _Runner(setup, contender)
                outputs.append(runner.start())
            except Exception as error:
                if contender.ours:
                    raise
                results[contender.name] = failed(error)
            else:
                runners.append(runner)
                results[contender.name] = runner.record
        if not runners:
            return results
        errors = _errors(original, inputs[0], outputs)
        for runner, value in zip(runners, errors, strict=True):
            runner.record["error_fp64"] = value
        outputs.clear()
        timings = clock.interleave([[runner.timed(x) for x in inputs] for runner in runners])
        for runner, timing in zip(runners, timings, strict=True):
            runner.record.update(timing.fields())
        # The same models with other weights.
        changed = copy.deepcopy(original)
        _scale(changed)
        x = inputs[-1]
        for runner in runners:
            _scale(runner.model)
            _poison(setup.output_bytes, x.device)
            outputs.append(runner(x).detach())
        # A packing that is kept too long could serve ours alone; one sample shows it of peers.
        ours = any(runner.contender.ours for runner in runners)
        errors = _errors(changed, x, outputs, None if ours else [setup.shape[0] - 1])
        for runner, value in zip(runners, errors, strict=True):
            runner.record["error_fp64_after"] = value
    return results


def compile_ahead(setup: Setup, contender: Contender) -> None:
    """One call, which leaves the compiler's work in torch's cache on disk.

    Which of a kernel's configurations is the fastest is not left there: other processes may use the
    device, and the process that measures asks it alone.
    """
    from torch._inductor import config

    with (
        precision_mode(setup.cell.precision, contender.cudnn_benchmark),
        torch.set_grad_enabled(setup.grad is not None),
        config.patch(autotune_local_cache=False),
    ):
        _Runner(setup, contender)(setup.inputs[0])


def failed(error: Exception | str) -> dict[str, Any]:
    """What a record says in place of measurements."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    nothing = ("median_ms", "p10_ms", "p90_ms", "peak_extra_bytes", "error_fp64")
    return {"kernel": "torch", "error": text[:500], **dict.fromkeys(nothing)}
