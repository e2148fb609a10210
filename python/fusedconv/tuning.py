"""``fusedconv.autotune``: kernels chosen by their times instead of by estimates."""

from __future__ import annotations

import functools
import logging
import os
import statistics
import threading
import time
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import ContextDecorator, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedconv import selection, winners
from fusedconv.checking import compiled
from fusedconv.device import device_record
from fusedconv.kernels.torch import TorchForward
from fusedconv.layout import dense, dense_strides
from fusedconv.plan import BackwardTensors, Candidate
from fusedconv.problem import BackwardProblem, ForwardProblem, Problem, Residual
from fusedconv.support import Support
from fusedconv.timing import Call, Clock, Timing
from fusedconv.winners import Piece, Winner

logger = logging.getLogger("fusedconv")

#: "1" tunes for a whole process, as ``autotune`` does.
VARIABLE = "FUSEDCONV_AUTOTUNE"
#: Rounds of a problem: at least and at most, the latter too where the seconds are over.
LEAST, MOST, SECONDS = 5, 100, 2.0
#: Standard errors of each of two medians that they are apart by where their order is certain.
CERTAIN = 2.0
#: How long a call waits for another thread that times.
_WAIT_SECONDS = 60.0


# ---- where it is asked for -----------------------------------------------------------------------

_count_lock = threading.Lock()
_open = 0
_suspended = 0


class autotune(ContextDecorator):
    """Within it, the first call of each problem, forward or backward, times every kernel that
    serves it, torch's operators included, and the fastest is used and kept for later processes.

    A context manager and a decorator of functions; it holds for every thread of the process, as
    backward passes run in threads of their own, and may be nested. FUSEDCONV_AUTOTUNE=1 does the
    same for a whole process. A problem whose winner is known is not timed again, and nothing is
    timed where FUSEDCONV_KERNEL is set, while a CUDA graph is captured, or while torch.compile or
    another tracer looks on. Timing takes memory for tensors of the call's sizes.
    """

    def __enter__(self) -> autotune:
        global _open
        with _count_lock:
            _open += 1
            if _open == 1:
                selection.clear_cache()  # plans chosen by estimates
        return self

    def __exit__(self, *exception: object) -> None:
        global _open
        with _count_lock:
            _open -= 1


@contextmanager
def suspended() -> Iterator[None]:
    """Within it no call is tuned, in any thread, whoever asks for it."""
    global _suspended
    with _count_lock:
        _suspended += 1
    try:
        yield
    finally:
        with _count_lock:
            _suspended -= 1
            if not _suspended:
                selection.clear_cache()  # plans chosen by estimates


def is_active() -> bool:
    """Whether calls are tuned. Raises ValueError where FUSEDCONV_AUTOTUNE is neither 0 nor 1."""
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE}: got {value!r}, expected 0 or 1")
    return not _suspended and (_open > 0 or value == "1")


# ---- tensors -------------------------------------------------------------------------------------


class _Source(NamedTuple):
    """Random tensors on a device; the user's generators are left alone."""

    device: torch.device
    generator: torch.Generator

    @staticmethod
    def on(device: torch.device) -> _Source:
        return _Source(device, torch.Generator(device).manual_seed(0))

    def strided(
        self, shape: Iterable[int], strides: Iterable[int], dtype: torch.dtype, offset: int = 0
    ) -> Tensor:
        shape, strides = tuple(shape), tuple(strides)
        extent = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        values = torch.randn(
            offset + extent, generator=self.generator, dtype=wide, device=self.device
        )
        return values.to(dtype).as_strided(shape, strides, offset)

    def laid_out(
        self, shape: tuple[int, ...], layout: str, dtype: torch.dtype, aligned: bool
    ) -> Tensor:
        strides = dense_strides(shape, layout)
        if layout == "strided":
            strides = tuple(2 * stride for stride in strides)
        return self.strided(shape, strides, dtype, 0 if aligned else 1)

    def vector(self, length: int, dtype: torch.dtype) -> Tensor:
        return self.strided((length,), (1,), dtype)


def _inputs(problem: ForwardProblem, source: _Source) -> tuple[Tensor | None, ...]:
    """What a forward plan takes."""
    conv, norm, channels = problem.conv, problem.norm, problem.output_channels
    weight = None
    if conv is not None:
        shape = (conv.in_channels, conv.out_channels // conv.groups, *conv.kernel_size)
        weight = source.strided(shape, conv.weight_strides, problem.dtype)
    affine = problem.dtype if norm is None or norm.affine_dtype is None else norm.affine_dtype
    residual = None
    if Residual() in problem.epilogue:
        residual = source.laid_out(problem.output_shape, problem.output_layout, problem.dtype, True)
    return (
        source.laid_out(problem.input_shape, problem.layout, problem.dtype, problem.aligned),
        weight,
        source.vector(channels, problem.dtype) if problem.bias else None,
        source.vector(channels, affine) if norm is not None and norm.weight else None,
        source.vector(channels, affine) if norm is not None and norm.bias else None,
        residual,
    )


def _saved(problem: BackwardProblem, source: _Source) -> BackwardTensors:
    """What a backward plan reads."""
    forward = problem.forward
    given: Any = _inputs(forward, source)
    input, weight, _, norm_weight, norm_bias, residual = given
    outputs = TorchForward().compile(forward, device_record(source.device)).run(*given)
    conv_output = outputs.conv_output
    if conv_output is None and forward.conv is not None and forward.activations:
        conv_output = outputs.output  # a ReLU's, which its gradient reads
    if conv_output is not None:
        conv_output = dense(conv_output, forward.output_layout)
    shape, layout = forward.output_shape, forward.output_layout
    grad_conv_output = None
    if "conv_output" in problem.gradients:
        grad_conv_output = source.laid_out(shape, layout, forward.dtype, True)
    return BackwardTensors(
        source.laid_out(shape, problem.grad_layout, problem.grad_dtype, problem.aligned),
        input,
        weight,
        conv_output,
        outputs.mean,
        outputs.rstd,
        norm_weight,
        norm_bias,
        residual,
        grad_conv_output,
    )


def _run(candidate: Candidate, problem: Problem, device: torch.device, tensors: Any) -> Call:
    plan = compiled(candidate.kernel, problem, device_record(device))
    if isinstance(problem, ForwardProblem):
        return functools.partial(plan.run, *tensors)
    return functools.partial(plan.run, tensors)


class Calls(NamedTuple):
    """By pieces: a call of each kernel that ran, and why the others did not run."""

    ready: dict[Piece, Call]
    failed: dict[Piece, str]


def calls(problem: Problem, device: torch.device, names: Container[str] | None = None) -> Calls:
    """A call for each kernel that serves the problem or parts of it, run once on tensors of the
    problem's description; ``names`` leaves those of such names or providers. To be called and run
    within ``undisturbed``."""
    source = _Source.on(device)
    tensors: Any = (
        _inputs(problem, source) if isinstance(problem, ForwardProblem) else _saved(problem, source)
    )
    result = Calls({}, {})
    for parts, (piece, candidates) in selection.pieces(problem, device_record(device)).items():
        for candidate in candidates:
            kernel = candidate.kernel
            if not candidate.support or (names is not None and not kernel.is_named(names)):
                continue
            name = kernel.name
            try:
                call = _run(candidate, piece, device, tensors)
                call()
            except RuntimeError as error:
                logger.info("%s is not timed for %s: %s", name, piece, error)
                result.failed[parts, name] = str(error)
            else:
                result.ready[parts, name] = call
    return result


# ---- times ---------------------------------------------------------------------------------------


def _error(times: list[float]) -> float:
    """The standard error of a median."""
    # Of a normal distribution: quartiles are 1.349 deviations apart, and the median's error is
    # 1.253 times the mean's.
    low, _, high = statistics.quantiles(times, n=4)
    return float((high - low) / 1.349 * 1.253 / len(times) ** 0.5)


def cheapest(parts: tuple[str, ...], costs: Mapping[Piece, float]) -> tuple[Piece, ...]:
    """The pieces that compute all parts at the lowest cost; none where they do not."""
    best: dict[tuple[str, ...], Piece] = {}
    for piece in sorted(costs, key=costs.__getitem__):
        best.setdefault(piece[0], piece)
    divided = selection.division(parts, {each: costs[piece] for each, piece in best.items()})
    return () if divided is None else tuple(best[each] for each in divided)


def _undecided(parts: tuple[str, ...], timings: Mapping[Piece, Timing]) -> list[Piece]:
    """The pieces that were the fastest and those that may yet be; none where that is certain."""
    medians = _medians(timings)
    best = cheapest(parts, medians)
    errors = {piece: CERTAIN * _error(timings[piece].milliseconds) for piece in timings}
    doubted = {p: medians[p] + (errors[p] if p in best else -errors[p]) for p in timings}
    rival = cheapest(parts, doubted)
    return [] if rival == best else list(dict.fromkeys(best + rival))


def _medians(timings: Mapping[Piece, Timing]) -> dict[Piece, float]:
    return {piece: statistics.median(timing.milliseconds) for piece, timing in timings.items()}


def _times(parts: tuple[str, ...], calls: dict[Piece, Call], clock: Clock) -> dict[Piece, float]:
    """Medians in milliseconds of calls taken in turns, until it is certain which are the fastest:
    after the first rounds only those go on between which it is not."""
    timings = {piece: Timing([], []) for piece in calls}
    pieces, number, start = list(calls), 0, time.perf_counter()
    while pieces and number < MOST:
        clock.play(number, [[calls[p]] for p in pieces], [timings[p] for p in pieces])
        number += 1
        if number >= LEAST:
            if time.perf_counter() - start > SECONDS:
                break
            pieces = _undecided(parts, timings)
    return _medians(timings)


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Plans run on the device, and in none of torch's modes."""
    with (
        torch.cuda.device(device) if device.type == "cuda" else nullcontext(),
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        yield


def measure(problem: Problem, device: torch.device) -> Winner | None:
    """Times every kernel that serves a problem or parts of it, on tensors of its description; None
    where none could be run. Nothing is kept."""
    with undisturbed(device):
        clock = Clock(device, SECONDS, LEAST, MOST, flushes=True)
        times = _times(problem.parts, calls(problem, device).ready, clock)
        pieces = cheapest(problem.parts, times)
        return Winner(pieces, times) if pieces else None


# ---- calls ---------------------------------------------------------------------------------------

_timing = threading.RLock()
_is_timing = False


def _can_be_timed(problem: Problem, device: torch.device) -> Support:
    forward = problem if isinstance(problem, ForwardProblem) else problem.forward
    if not forward.input_elements or not forward.output_elements:
        return Support.no("its tensors are empty")
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return Support.no("a CUDA graph is captured")
    if device.type not in ("cuda", "cpu"):
        return Support.no(f"kernels are timed on CUDA and on processors, not on {device.type}")
    return Support.yes()


def tune_problem(problem: Problem, device: torch.device) -> Support:
    """Times a problem's kernels, uses the fastest from then on and keeps it, unless a winner is
    known. Whether one is then, or why none could be timed; the log says where memory does not
    suffice."""
    global _is_timing
    record = device_record(device)
    timeable = _can_be_timed(problem, device)
    if not timeable or selection.is_tuned(problem, record):
        return timeable
    # A thread that computes a backward pass may be what the timing one waits for.
    if not _timing.acquire(timeout=_WAIT_SECONDS):
        return Support.no(f"another thread was timing for {_WAIT_SECONDS:.0f} seconds")
    try:
        # Another thread was there first, or a kernel being timed calls an operator.
        if selection.is_tuned(problem, record):
            return Support.yes()
        if _is_timing:
            return Support.no("a kernel that is timed asks for it")
        _is_timing = True
        try:
            winner = measure(problem, device)
        except RuntimeError as error:
            logger.info("%s is not tuned: %s", problem, error)
            return Support.no(str(error))
        finally:
            _is_timing = False
        if winner is None:
            return Support.no("no kernel that serves it could be run")
        selection.keep_winner(problem, record, winner)
        winners.store(problem, record, winner)
        return Support.yes()
    finally:
        _timing.release()


def tune_call(problem: Problem, device: torch.device) -> None:
    """``tune_problem`` for a call that is made, where calls are tuned and none is forced."""
    if is_active() and not selection.forced_kernels():
        tune_problem(problem, device)
