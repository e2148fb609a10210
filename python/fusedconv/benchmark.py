"""The benchmark: the three systems next to what a user could pick instead, in one process.

Each record is one contender in one cell (workload, pass, precision, layout). Times are CUDA events
around one call each, after a warm-up, medians with the 10th and 90th percentile; inputs rotate over
more memory than L2 holds. Weights arrive by load_state_dict and the affine parameters are not
trivial; after the timing the weights are changed in place and the output is checked against float64
again, so that a packing kept too long shows. Outputs start as NaN wherever the allocator reuses
memory.

Floors: the larger of operations over the matrix rate and bytes over the copy rate, both measured in
the same run. Strict fp32 on tensor cores takes three TF32 products for one. Forward: each input
element read once and each output element written once. Forward and backward: three convolutions'
operations; bytes of the forward pass, plus output gradient and input read and input gradient
written.
"""

from __future__ import annotations

import copy
import datetime
import functools
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusedconv
from fusedconv.models import SYSTEMS, System
from fusedconv.recording import record as plan_record
from fusedconv.testing import sample_error

DTYPES = {
    "tf32": torch.float32,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
PRECISIONS = tuple(DTYPES)
LAYOUTS = ("nchw", "nhwc")
PASSES = ("forward", "forward_backward")
CONTENDERS = (
    "fusedconv",
    "eager",
    "eager_cudnn_benchmark",
    "compile",
    "compile_max_autotune",
    "rewrite",
    "rewrite_compile",
)
_L2_BYTES = 128 << 20  # inputs rotate over at least this much
_KEY = ("workload", "pass", "dtype", "precision", "layout", "contender")


class Rewrite(nn.Module):
    """A system with its transposed convolution written as an ordinary one, in plain torch."""

    def __init__(self, original: nn.Module, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv_transpose = original.conv_transpose
        self.group_norm = original.group_norm
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        conv: Any = self.conv_transpose
        axes = len(conv.kernel_size)
        weight = conv.weight.flip(tuple(range(2, 2 + axes))).transpose(0, 1)
        padding = tuple(k - 1 - p for k, p in zip(conv.kernel_size, conv.padding, strict=True))
        function = F.conv2d if axes == 2 else F.conv3d
        x = function(x, weight, conv.bias, padding=padding)
        norm: Any = self.group_norm
        result: Tensor = norm(self.activation(x))
        return result


def memory_format(axes: int, layout: str) -> torch.memory_format:
    if layout == "nchw":
        return torch.contiguous_format
    return torch.channels_last if axes == 4 else torch.channels_last_3d


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


class Clock:
    """Times calls on the current CUDA stream, or on the processor where there is no GPU."""

    def __init__(self, device: torch.device, seconds: float, least: int) -> None:
        self.cuda = device.type == "cuda"
        self.seconds, self.least = seconds, least

    def once(self, call: Callable[[], object]) -> tuple[float, float]:
        """(milliseconds on the device, microseconds until the call returned)."""
        if not self.cuda:
            start = time.perf_counter()
            call()
            elapsed = time.perf_counter() - start
            return elapsed * 1e3, elapsed * 1e6
        torch.cuda.synchronize()
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        start = time.perf_counter()
        call()
        host = time.perf_counter() - start
        last.record()
        last.synchronize()
        return first.elapsed_time(last), host * 1e6

    def measure(self, calls: Sequence[Callable[[], object]]) -> tuple[list[float], float]:
        """Times of repeated calls taken in turn, and the median host time."""
        for index in range(max(3, len(calls))):
            self.once(calls[index % len(calls)])
        times: list[float] = []
        hosts: list[float] = []
        start = time.perf_counter()
        while len(times) < self.least or (
            time.perf_counter() - start < self.seconds and len(times) < 200
        ):
            milliseconds, host = self.once(calls[len(times) % len(calls)])
            times.append(milliseconds)
            hosts.append(host)
        return times, statistics.median(hosts)


def measured_rates(device: torch.device) -> dict[str, float]:
    """Copy bytes a second (reads and writes) and matrix FLOP/s by precision, of this device."""
    if device.type != "cuda":
        return {}
    clock = Clock(device, 0.3, 10)
    source = torch.rand(1 << 29, device=device)
    target = torch.empty_like(source)
    times, _ = clock.measure([lambda: target.copy_(source)])
    rates = {"copy": 2 * source.nbytes / statistics.median(times) * 1e3}
    size = 8192
    allowed = torch.backends.cuda.matmul.allow_tf32
    for precision, dtype in DTYPES.items():
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        times, _ = clock.measure([lambda a=a, b=b: a @ b])  # type: ignore[misc]
        rates[precision] = 2 * size**3 / statistics.median(times) * 1e3
    torch.backends.cuda.matmul.allow_tf32 = allowed
    return rates


def floor_ms(
    flops: int,
    input_bytes: int,
    output_bytes: int,
    precision: str,
    pass_: str,
    rates: dict[str, float],
) -> float | None:
    """The module's docstring gives the formula."""
    if not rates:
        return None
    moved = input_bytes + output_bytes
    if pass_ == "forward_backward":
        flops *= 3
        moved += output_bytes + 2 * input_bytes
    rate = rates["tf32"] / 3 if precision == "fp32" else rates[precision]
    return max(flops / rate, moved / rates["copy"]) * 1e3


def conv_flops(model: nn.Module, input_shape: tuple[int, ...]) -> int:
    conv: Any = getattr(model, "conv_transpose", None)
    if conv is None:
        return 0
    pixels = input_shape[0]
    for extent in input_shape[2:]:
        pixels *= extent
    return int(2 * pixels * conv.weight.numel())


def _build(contender: str, system: System, original: nn.Module) -> nn.Module:
    """The contender's model with the original's parameters."""
    if contender == "fusedconv":
        model = system.model(*system.init_arguments)
        first = next(original.parameters())
        model.load_state_dict(original.state_dict())
        return model.to(first.device, first.dtype)
    model = copy.deepcopy(original)
    if contender.startswith("rewrite"):
        model = Rewrite(model, F.gelu if system.name == "system1" else F.relu)
    if contender in ("compile", "rewrite_compile"):
        return torch.compile(model)  # type: ignore[return-value]
    if contender == "compile_max_autotune":
        return torch.compile(model, mode="max-autotune-no-cudagraphs")  # type: ignore[return-value]
    return model


def _kernel_name(contender: str, model: nn.Module, x: Tensor) -> str:
    if contender != "fusedconv":
        return "torch"
    with torch.no_grad(), plan_record.recording() as problems:
        model(x)
    from fusedconv.plan import explain_problem

    return "+".join(explain_problem(problem).kernel for problem in dict.fromkeys(problems))


def _poison(num_bytes: int, device: torch.device) -> None:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        block = torch.empty(min(num_bytes, free // 2) // 4, device=device)
        block.fill_(torch.nan)
        del block


def measure_cell(
    system: System,
    contender: str,
    original: nn.Module,
    inputs: list[Tensor],
    grad: Tensor | None,
    precision: str,
    clock: Clock,
) -> dict[str, Any]:
    """Times and errors of one contender on prepared inputs; ``grad`` None is the forward pass."""
    device = inputs[0].device
    model = _build(contender, system, original)
    result: dict[str, Any] = {}
    with precision_mode(precision, contender == "eager_cudnn_benchmark"):

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
        result["kernel"] = _kernel_name(contender, model, inputs[0])
        output_bytes = run(inputs[0]).nbytes
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats(device)
            model.zero_grad(set_to_none=True)
            before = torch.cuda.memory_allocated(device)
            run(inputs[0])
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated(device)
            result["peak_extra_bytes"] = peak - before - output_bytes
        else:
            result["peak_extra_bytes"] = None
        model.zero_grad(set_to_none=True)
        _poison(output_bytes, device)
        result["error_fp64"] = sample_error(original, inputs[0], run(inputs[0]))
        calls = [functools.partial(run, x) for x in inputs]
        times, host = clock.measure(calls)
        # The same model with other weights, changed behind autograd's version counter too.
        with torch.no_grad():
            for module in (model, original):
                for parameter in module.parameters():
                    parameter.data.mul_(0.875)
        _poison(output_bytes, device)
        result["error_fp64_after"] = sample_error(original, inputs[-1], run(inputs[-1]))
        with torch.no_grad():
            for parameter in original.parameters():
                parameter.data.div_(0.875)
    deciles = statistics.quantiles(times, n=10) if len(times) > 1 else [times[0]] * 9
    result.update(
        median_ms=statistics.median(times),
        p10_ms=deciles[0],
        p90_ms=deciles[-1],
        reps=len(times),
        host_us=host,
    )
    return result


def _commit() -> str:
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def header(device: torch.device, commit: str | None, rates: dict[str, float]) -> dict[str, Any]:
    """What a figure is worth nothing without."""
    return {
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else (platform.processor() or platform.machine()),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "fusedconv": fusedconv.__version__,
        "commit": commit or _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "rates": rates,
        "method": (__doc__ or "").strip(),
    }


def write(path: Path, head: dict[str, Any], records: Iterable[dict[str, Any]]) -> None:
    """Replaces the cells that were measured anew in the file, and keeps the others."""
    kept: dict[tuple[Any, ...], dict[str, Any]] = {}
    if path.exists():
        for old in json.loads(path.read_text())["records"]:
            kept[tuple(old[field] for field in _KEY)] = old
    for record in records:
        kept[tuple(record[field] for field in _KEY)] = record
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".partial")
    temporary.write_text(json.dumps({"header": head, "records": list(kept.values())}, indent=1))
    temporary.replace(path)


def run(
    output: Path | None,
    *,
    workloads: Iterable[str] = tuple(SYSTEMS),
    precisions: Iterable[str] = PRECISIONS,
    layouts: Iterable[str] = LAYOUTS,
    passes: Iterable[str] = PASSES,
    contenders: Iterable[str] = CONTENDERS,
    device: torch.device | None = None,
    seconds: float = 0.5,
    least: int = 10,
    small: bool = False,
    commit: str | None = None,
    report: Callable[[dict[str, Any]], None] = lambda record: None,
) -> list[dict[str, Any]]:
    """Measures the chosen cells, reports each record, and writes them as it goes.

    ``seconds`` of timing per contender, ``least`` repetitions at least; ``small`` takes sizes for a
    processor. A peer that fails is recorded with its error; a failure of fusedconv is raised.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rates = measured_rates(device)
    head = header(device, commit, rates)
    clock = Clock(device, seconds, least)
    records: list[dict[str, Any]] = []
    for name in workloads:
        system = SYSTEMS[name]
        shape = system.small_input_shape if small else system.input_shape
        for precision in precisions:
            if name == "system3" and precision == "tf32":
                continue  # no convolution: the same as fp32
            for layout in layouts:
                torch.manual_seed(0)
                original = system.original(*system.init_arguments)
                for parameter in original.parameters():
                    if parameter.dim() == 1:
                        nn.init.uniform_(parameter, -1.0, 1.0)
                form = memory_format(len(shape), layout)
                original = original.to(device, DTYPES[precision])
                original = original.to(memory_format=form)  # type: ignore[call-overload]
                x = torch.rand(shape, device=device).to(DTYPES[precision], memory_format=form)
                copies = min(8, max(2, -(-_L2_BYTES // x.nbytes)))
                inputs = [x, *(torch.rand_like(x) for _ in range(copies - 1))]
                with torch.no_grad():
                    like = original(x[:1])
                output_elements = like.numel() * shape[0]
                for pass_ in passes:
                    grad = None
                    if pass_ == "forward_backward":
                        grad_shape = (shape[0], *like.shape[1:])
                        grad = torch.randn(grad_shape, device=device, dtype=x.dtype)
                        grad = grad.contiguous(memory_format=form)
                    for contender in contenders:
                        if name == "system3" and contender.startswith("rewrite"):
                            continue
                        record: dict[str, Any] = {
                            "workload": name,
                            "pass": pass_,
                            "dtype": str(x.dtype).removeprefix("torch."),
                            "precision": precision,
                            "layout": layout,
                            "contender": contender,
                            "shape": list(shape),
                            "floor_ms": floor_ms(
                                conv_flops(original, shape),
                                x.nbytes,
                                output_elements * x.itemsize,
                                precision,
                                pass_,
                                rates,
                            ),
                            "run": f"{head['date']} {head['commit']}",
                        }
                        try:
                            record.update(
                                measure_cell(
                                    system, contender, original, inputs, grad, precision, clock
                                )
                            )
                        except Exception as error:
                            if contender == "fusedconv":
                                raise
                            record.update(
                                kernel="torch",
                                error=f"{type(error).__name__}: {error}"[:500],
                                median_ms=None,
                                p10_ms=None,
                                p90_ms=None,
                                peak_extra_bytes=None,
                                error_fp64=None,
                            )
                        torch.compiler.reset()
                        if device.type == "cuda":
                            torch.cuda.empty_cache()
                        records.append(record)
                        report(record)
                        if output is not None:
                            write(output, head, records)
                del inputs, x, original
    return records
