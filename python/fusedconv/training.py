"""Whether a training step is autograd's to follow through torch's operators, or a node of ours.

A node of autograd in Python, and what runs its plans, keep a processor for longer than torch's own
nodes: kernels that save less than that are slower, whatever they take by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusedconv.device import Device
from fusedconv.errors import NoKernelError
from fusedconv.kernels.torch import TorchForward, followed_milliseconds
from fusedconv.problem import BackwardProblem, ForwardProblem, Problem
from fusedconv.selection import Choice, choose, forced_kernels, winner_of

#: What a node of ours takes on a processor beside its kernels, in launches: 0.25 ms forward and 0.3
#: backward were measured around layers of 3 to 7 ms, which leave Python cold caches, 0.1 ms around
#: tensors of a few bytes.
PROCESSOR_NODE = 550.0
#: By how much a step of ours must promise to be faster, by no more than a node takes. Most of it
#: are products that a library computes in either, and estimates of the rest are no closer.
LEAST_GAIN = 1.05

#: The reason that the log tells of pass by pass.
EVERY_PART = "torch's operators serve every part of both passes"


def reason_to_follow(
    forward: ForwardProblem, backward: BackwardProblem, device: Device
) -> str | None:
    """Why autograd had better follow torch's operators, None where kernels serve the step better or
    FUSEDCONV_KERNEL names them. Estimates are compared, or times where both passes are tuned."""
    forced = forced_kernels()
    passes: tuple[Problem, ...] = (forward, backward)
    try:
        chosen = [choose(each, device, forced) for each in passes]
    except NoKernelError:
        return None  # the backward pass says why, where there is one
    if all(
        candidate.kernel.provider == TorchForward.provider
        for choice in chosen
        for _, candidate in choice.chosen
    ):
        return EVERY_PART
    if forced or len({choice.by for choice in chosen}) > 1:
        return None
    if device.type == "cuda":
        return None  # there a node of ours, its launches repeated at once, takes no longer
    if forward.layout == "nhwc" and forward.norm_groups:
        return None  # torch's operators are composed with copies to channels first around the norm
    composed = [in_torch(each, device) for each in passes]
    estimated = chosen[0].by == "cost"
    ours, theirs = (
        _milliseconds(passes, each, None if estimated else device) for each in (chosen, composed)
    )
    if ours is None or theirs is None:
        return None
    if estimated:
        theirs = followed_milliseconds(forward, device, theirs)
    node = PROCESSOR_NODE * device.launch_milliseconds
    ours += node
    if ours + min((LEAST_GAIN - 1.0) * ours, node) < theirs:
        return None
    how = "estimates" if estimated else "times"
    return (
        f"by {how} and what the host takes, a training step takes {theirs:.4g} ms so, and "
        f"{ours:.4g} ms by kernels in a node of autograd of their own; a gain of less than "
        f"{LEAST_GAIN - 1.0:.0%} is not counted on"
    )


def in_torch(problem: Problem, device: Device) -> Choice:
    """Torch's operators for every part of a problem."""
    return choose(problem, device, TorchForward.provider, tuned=False)


def _milliseconds(
    passes: Sequence[Problem], choices: Sequence[Choice], tuned_on: Device | None
) -> float | None:
    """Of both passes: estimated, or measured where they were tuned on a device; None where a time
    is missing."""
    total = 0.0
    for problem, choice in zip(passes, choices, strict=True):
        winner = None if tuned_on is None else winner_of(problem, tuned_on)
        for piece, candidate in choice.chosen:
            if winner is None:
                total += candidate.cost or 0.0
                continue
            time = winner.times.get((piece.parts, candidate.kernel.name))
            if time is None:
                return None
            total += time
    return total
