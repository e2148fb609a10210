"""Conditions that the CUDA providers share, and what stands for families that a build lacks."""

from __future__ import annotations

import functools
import math
import re

import torch

from fusedconv import _C
from fusedconv.device import Device
from fusedconv.kernels.compiled import supports_compiled
from fusedconv.plan import BackwardKernel, BackwardPlan, ForwardKernel, ForwardPlan
from fusedconv.problem import BackwardProblem, ConvTransposeGeometry, ForwardProblem
from fusedconv.support import Support

HAS_CUDA: bool = bool(_C.build["cuda"])
#: Families of convolution kernels that this build holds.
FAMILIES: tuple[str, ...] = tuple(_C.build.get("families", ()))

_WITHOUT_CUDA = Support.no("fusedconv was built without CUDA (see `fusedconv info`)")


def supports_device(device: Device, architecture: int | None = None) -> Support:
    """The conditions on the device that CUDA kernels of ours have in common. ``architecture`` is
    the only compute capability, times ten, that a kernel runs on, None for 8.0 and later."""
    if not HAS_CUDA:
        return _WITHOUT_CUDA
    if device.type != "cuda":
        return Support.no(f"runs on CUDA, the input is on {device.type}")
    capability = _capability(device.architecture)
    if architecture is not None and device.architecture != architecture:
        only = _capability(architecture)
        return Support.no(f"runs on compute capability {only}, the device has {capability}")
    if device.architecture < 80:
        return Support.no(f"needs compute capability 8.0, the device has {capability}")
    compiled = _C.build["architectures"]
    if not any(runs_on(device.architecture, code) for code in compiled.split()):
        return Support.no(f"this build holds code for {compiled}, the device has {capability}")
    return Support.yes()


@functools.cache
def runs_on(architecture: int, code: str) -> bool:
    """Whether a device of that compute capability runs what an entry of
    FUSEDCONV_CUDA_ARCHITECTURES compiles. Entries that are no number may mean anything."""
    parts = re.fullmatch(r"(\d+)([af]?)(-real|-virtual)?", code)
    if parts is None:
        return True
    number, letter, kind = int(parts[1]), parts[2], parts[3]
    if letter == "a":
        return architecture == number
    if letter == "f" or kind == "-real":
        # Machine code runs on what comes later of the same generation.
        return architecture >= number and architecture // 10 == number // 10
    return architecture >= number


def _capability(architecture: int) -> str:
    return f"{architecture // 10}.{architecture % 10}"


def supports_forward(
    problem: ForwardProblem,
    device: Device,
    ungrouped: frozenset[str] = frozenset(),
    architecture: int | None = None,
) -> Support:
    """The conditions of every forward kernel on CUDA; ``ungrouped`` is ``act_norm_act``'s,
    ``architecture`` that of ``supports_device``."""
    support = supports_device(device, architecture)
    if not support:
        return support
    if problem.output_dtype not in (problem.dtype, torch.float32):
        return Support.no(f"output dtype is {problem.output_dtype}")
    return supports_compiled(problem, ungrouped)


#: Products in the sum of one output from which on strict fp32 is served by three products in TF32.
#: Splitting costs a relative error of 0.85e-7 to 1.1e-7, however short the sum; that of a chain of
#: fp32 additions grows with it: 0.65e-7 at 12 products, 0.9e-7 at 24, 1.25e-7 at 48 (normally
#: distributed operands, on an H200).
SHORTEST_STRICT_SUM = 12


def supports_precision(problem: ForwardProblem, precision: str) -> Support:
    """Whether a convolution computed in ``precision`` is what a problem asks for.

    Strict fp32 is more than TF32 asks for, and small problems take it at no cost: eager's own small
    convolutions are not in TF32 either.
    """
    if (precision, problem.precision) == ("fp32", "tf32"):
        return Support.yes()
    if precision != problem.precision:
        return Support.no(f"computes in {precision}, {problem.precision} is asked for")
    conv = problem.conv
    if precision == "fp32" and conv is not None:
        products = _products_of_an_output(conv)
        if products < SHORTEST_STRICT_SUM:
            return Support.no(
                f"an output sums {products:.3g} products, 3xTF32 is as exact as fp32 from "
                f"{SHORTEST_STRICT_SUM} on"
            )
    return Support.yes()


def _products_of_an_output(conv: ConvTransposeGeometry) -> float:
    """On average, over the outputs that any tap of the filter meets."""
    products = float(conv.in_channels // conv.groups)
    for kernel, stride, dilation in zip(conv.kernel_size, conv.stride, conv.dilation, strict=True):
        # Every so many taps one meets an output.
        products *= max(1.0, kernel * math.gcd(stride, dilation) / stride)
    return products


class _NotBuilt:
    """Says why a family that this build lacks serves nothing."""

    def __init__(self, name: str, provider: str) -> None:
        self.name = name
        self.provider = provider

    def _refusal(self) -> Support:
        if not HAS_CUDA:
            return _WITHOUT_CUDA
        return Support.no(f"this build lacks the family {self.provider} (see `fusedconv info`)")


class NotBuiltBackward(_NotBuilt, BackwardKernel):
    """Stands for a family's gradients of the convolution, so that ``explain`` can say why."""

    computes = frozenset({"input", "weight", "bias"})

    def supports(self, problem: BackwardProblem, device: Device) -> Support:
        return self._refusal()

    def cost(self, problem: BackwardProblem, device: Device) -> float:
        raise NotImplementedError("never supported")

    def compile(self, problem: BackwardProblem, device: Device) -> BackwardPlan:
        raise NotImplementedError("never supported")


class NotBuiltForward(_NotBuilt, ForwardKernel):
    """Stands for a family's rows, so that ``explain`` can say why."""

    def supports(self, problem: ForwardProblem, device: Device) -> Support:
        if problem.conv is None:
            return Support.no("computes convolutions; the problem has none")
        return self._refusal()

    def cost(self, problem: ForwardProblem, device: Device) -> float:
        raise NotImplementedError("never supported")

    def compile(self, problem: ForwardProblem, device: Device) -> ForwardPlan:
        raise NotImplementedError("never supported")
