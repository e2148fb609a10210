"""Times of what the cost models estimate: every kernel that serves a problem, on this GPU.

``call_ms`` is the median of CUDA events around one run of a plan each, the processor's part
included; ``graph_ms`` is the time per run inside a CUDA graph. One input, so that a small one stays
in L2; at least five repetitions, until the middle half lies within two percent.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable

import torch
from cost_problems import Shape
from torch import Tensor

from fusedconv.device import Device, device_record
from fusedconv.kernels.torch import TorchForward
from fusedconv.layout import dense
from fusedconv.plan import BackwardKernel, BackwardTensors, ForwardKernel, Kernel
from fusedconv.problem import BackwardProblem, ForwardProblem, Problem
from fusedconv.registry import registry

Times = dict[str, dict[str, dict[str, float]]]


def _milliseconds(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    call()
    last.record()
    last.synchronize()
    return first.elapsed_time(last)


def _median(call: Callable[[], object], most: int = 20) -> float:
    """Stops once the middle half lies within two percent."""
    times: list[float] = []
    while len(times) < most:
        times.append(_milliseconds(call))
        if len(times) >= 5:
            quarters = statistics.quantiles(times, n=4)
            if quarters[2] - quarters[0] < 0.02 * quarters[1]:
                break
    return statistics.median(times)


def _in_graph(call: Callable[[], object], milliseconds: float) -> float:
    """Time per call of a graph of about a fifth of a millisecond."""
    repeats = max(1, min(20, round(0.2 / milliseconds)))
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    # torch.cuda.graph() would collect garbage each time, which takes longer than all the rest.
    with torch.cuda.stream(stream):
        graph.capture_begin()
        for _ in range(repeats):
            call()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    graph.replay()
    return _median(graph.replay) / repeats


def times_of(call: Callable[[], object]) -> dict[str, float]:
    call()
    call()
    milliseconds = _median(call)
    return {"call_ms": milliseconds, "graph_ms": _in_graph(call, milliseconds)}


# ---- plans on random tensors ---------------------------------------------------------------------

#: Input, weight, bias, norm_weight, norm_bias.
Inputs = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def inputs(problem: ForwardProblem, device: torch.device) -> Inputs:
    """Random tensors for a problem of dense layouts; norm weight and bias have its dtype."""

    def values(*extents: int) -> Tensor:
        return torch.randn(extents, device=device).to(problem.dtype)

    conv, norm = problem.conv, problem.norm
    weight = None
    if conv is not None:
        weight = values(conv.in_channels, conv.out_channels // conv.groups, *conv.kernel_size)
    channels = problem.output_channels
    return (
        dense(values(*problem.input_shape), problem.layout),
        weight,
        values(channels) if problem.bias else None,
        values(channels) if norm is not None and norm.weight else None,
        values(channels) if norm is not None and norm.bias else None,
    )


def saved(problem: ForwardProblem, device: torch.device) -> BackwardTensors:
    """What a backward pass through a problem reads, of torch's forward pass."""
    x, weight, bias, norm_weight, norm_bias = inputs(problem, device)
    plan = TorchForward().compile(problem, device_record(device))
    outputs = plan.run(x, weight, bias, norm_weight, norm_bias)
    conv_output = outputs.conv_output
    return BackwardTensors(
        grad_output=torch.randn_like(outputs.output),
        input=x,
        weight=weight,
        conv_output=conv_output,
        mean=outputs.mean,
        rstd=outputs.rstd,
        norm_weight=norm_weight,
        norm_bias=norm_bias,
        grad_conv_output=None if conv_output is None else torch.randn_like(conv_output),
    )


def serving(problem: Problem, device: Device) -> list[Kernel]:
    """The kernels that serve a problem."""
    return [c.kernel for c in registry().candidates(problem, device) if c.support]


def runner(
    kernel: Kernel, problem: Problem, device: torch.device, tensors: Inputs | BackwardTensors
) -> Callable[[], object]:
    """A plan's run on tensors of ``inputs`` or ``saved``, as the problem is."""
    record = device_record(device)
    if isinstance(problem, ForwardProblem):
        assert isinstance(kernel, ForwardKernel)
        return functools.partial(kernel.compile(problem, record).run, *tensors)
    assert isinstance(kernel, BackwardKernel) and isinstance(tensors, BackwardTensors)
    return functools.partial(kernel.compile(problem, record).run, tensors)


def times_by_kernel(shape: Shape, device: torch.device) -> Times:
    """By pass or operator, then by kernel. A pass is timed on every kernel that serves it, an
    operator on torch's alone."""
    result: Times = {}
    passes = shape.passes()
    # One set of tensors for all parts of the backward pass.
    backward = {
        name: problem for name, problem in passes.items() if isinstance(problem, BackwardProblem)
    }
    tensors_of_parts = saved(next(iter(backward.values())).forward, device)
    for name, problem in [*passes.items(), *shape.operators().items()]:
        tensors: Inputs | BackwardTensors = tensors_of_parts
        if isinstance(problem, ForwardProblem):
            tensors = inputs(problem, device)
        elif name not in backward:
            tensors = saved(problem.forward, device)
        result[name] = {
            kernel.name: times_of(runner(kernel, problem, device, tensors))
            for kernel in serving(problem, device_record(device))
            if name in passes or kernel.provider == "torch"
        }
    return result
