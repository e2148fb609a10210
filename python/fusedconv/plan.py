"""What kernels are and make: plans, ready to run, of one pass or of parts of one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from fusedconv.device import Device
from fusedconv.problem import BackwardProblem, ForwardProblem
from fusedconv.support import Support


class Outputs(NamedTuple):
    """What a forward plan returns. The last three are None unless the problem asks to save them.

    ``conv_output`` is the convolution with bias, before the rest of the epilogue. ``mean`` and
    ``rstd`` are [N, groups] in float32 (float64 for float64 input), None for a normalisation that
    has no statistics per sample and group.
    """

    output: Tensor
    conv_output: Tensor | None
    mean: Tensor | None
    rstd: Tensor | None


class BackwardTensors(NamedTuple):
    """What a backward plan reads: the output's gradient, the forward pass's tensors, and what it
    saved. ``grad_conv_output`` is what the part "epilogue" has found; where it has nothing to do,
    None: the output's gradient is the convolution's then; it is the last field. Without a
    convolution ``conv_output`` is None, and the epilogue reads ``input``.
    """

    grad_output: Tensor
    input: Tensor
    weight: Tensor | None
    conv_output: Tensor | None
    mean: Tensor | None
    rstd: Tensor | None
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    residual: Tensor | None = None
    grad_conv_output: Tensor | None = None

    @property
    def of_convolution(self) -> Tensor:
        """The gradient of the convolution's output."""
        return self.grad_output if self.grad_conv_output is None else self.grad_conv_output

    @property
    def of_epilogue(self) -> Tensor:
        """What the epilogue was computed from."""
        return self.input if self.conv_output is None else self.conv_output


class Gradients(NamedTuple):
    """What a backward plan returns, in the tensors' dtypes or wider; None where not asked for."""

    conv_output: Tensor | None = None
    input: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None
    residual: Tensor | None = None

    @staticmethod
    def of_epilogue(
        problem: BackwardProblem,
        grad: Tensor | None,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        residual: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Gradients:
        """``grad`` under the name of what the epilogue was computed from."""
        convolves = problem.forward.conv is not None
        return Gradients(
            conv_output=grad if convolves else None,
            input=None if convolves else grad,
            bias=bias,
            norm_weight=norm_weight,
            norm_bias=norm_bias,
            residual=residual,
        )

    def joined(self, other: Gradients) -> Gradients:
        return Gradients(*(a if b is None else b for a, b in zip(self, other, strict=True)))


class Plan(ABC):
    """How one pass, or a part of one, is computed: a short list of steps behind one call."""

    #: The kernel's name.
    kernel: str
    #: One line a step, in order.
    steps: tuple[str, ...]
    #: True where torch's own operators do the work; a log line then says why, once a problem.
    is_reference: bool = False
    #: Whether ``run`` does nothing but allocate and run compiled programs, the same ones on tensors
    #: that lie alike, where it calls none of torch's operators on them (``fusedconv.noting``). What
    #: it returns then is dense, in the result's layout, and no two of it share memory.
    only_launches: bool = False


class ForwardPlan(Plan):
    """A plan of a forward pass."""

    #: Plans of its backward passes, by what tells them apart; None until there is one.
    backward_plans: dict[Hashable, BackwardPlan] | None = None
    #: What autograd follows in its place, None where nothing is, by which gradients are wanted;
    #: none of it until somebody asks.
    followed: dict[tuple[bool, ...], ForwardPlan | None] | None = None
    #: Launches of calls by it and of its backward passes, by what tells them apart, or how often
    #: they have been looked at; None until there is a call.
    repeated: dict[Hashable, Any] | None = None

    @abstractmethod
    def run(
        self,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        residual: Tensor | None = None,
    ) -> Outputs:
        """Computes the problem on tensors that have its shapes, strides and dtypes."""


class BackwardPlan(Plan):
    """A plan of a backward pass or of some of its parts."""

    #: Whether it pads the lines of the convolution's output gradient, or transposes it to channels
    #: first, unless it comes so, in padded lines (``fusedconv.layout.line_strides``).
    pads_lines: bool = False
    #: Whether it reads that gradient, and no padded lines.
    reads_dense: bool = False
    #: Whether every gradient that it returns is of its tensor's shape and dtype and lies dense as
    #: an operator promises: others are looked over at each call, and copied where they are not.
    is_exact: bool = False

    def give_padded_lines(self) -> bool:
        """Asks for padded lines where the plan computes the gradient of the convolution's output;
        whether it then gives them."""
        return False

    def take_padded_lines(self) -> None:
        """Says that the gradient of the convolution's output comes with padded lines."""
        return

    @abstractmethod
    def run(self, tensors: BackwardTensors) -> Gradients:
        """Computes the problem's gradients from tensors of its shapes, strides and dtypes."""


class JoinedPlan(BackwardPlan):
    """Plans of a backward pass's parts, one after another; providers may differ."""

    def __init__(self, plans: Sequence[BackwardPlan]) -> None:
        padded = any(plan.pads_lines for plan in plans) and not any(
            plan.reads_dense for plan in plans
        )
        if padded and any(plan.give_padded_lines() for plan in plans):
            for plan in plans:
                plan.take_padded_lines()
        self.plans = tuple(plans)
        self.kernel = " + ".join(plan.kernel for plan in plans)
        self.steps = tuple(step for plan in plans for step in plan.steps)
        self.is_reference = all(plan.is_reference for plan in plans)
        self.is_exact = all(plan.is_exact for plan in plans)
        self.only_launches = all(plan.only_launches for plan in plans)

    def run(self, tensors: BackwardTensors) -> Gradients:
        found = None
        for plan in self.plans:
            gradients = plan.run(tensors)
            found = gradients if found is None else found.joined(gradients)
            if plan is not self.plans[-1] and gradients.conv_output is not None:
                tensors = BackwardTensors(*tensors[:-1], gradients.conv_output)
        return Gradients() if found is None else found


class Kernel:
    """What the registry holds: a ForwardKernel or a BackwardKernel."""

    #: Unique; what ``FUSEDCONV_KERNEL`` and ``explain`` call it.
    name: str
    #: The family it belongs to; several kernels may share one.
    provider: str
    #: The parts of a pass that it computes, any of them or all.
    computes: frozenset[str]
    #: Of these the ones that it computes beside others only, where at all: naming the kernel does
    #: not ask it for them.
    beside: frozenset[str] = frozenset()

    def is_named(self, names: Container[str]) -> bool:
        """Whether its name or its provider is among the names."""
        return self.name in names or self.provider in names


class ForwardKernel(Kernel, ABC):
    """One way to compute a forward pass. Subclass it, set the names, register an instance."""

    computes = frozenset({"forward"})

    @abstractmethod
    def supports(self, problem: ForwardProblem, device: Device) -> Support:
        """Whether it serves the problem; a reason where it does not. Touches no device."""

    @abstractmethod
    def cost(self, problem: ForwardProblem, device: Device) -> float:
        """Estimated milliseconds of a supported problem. Lower wins. Touches no device."""

    @abstractmethod
    def compile(self, problem: ForwardProblem, device: Device) -> ForwardPlan:
        """The plan of a supported problem."""


class BackwardKernel(Kernel, ABC):
    """One way to compute parts of a backward pass: of "epilogue", "input", "weight", "bias" those
    that ``computes`` names. It is asked for problems whose parts are among them."""

    @abstractmethod
    def supports(self, problem: BackwardProblem, device: Device) -> Support:
        """Whether it serves the problem; a reason where it does not. Touches no device."""

    @abstractmethod
    def cost(self, problem: BackwardProblem, device: Device) -> float:
        """Estimated milliseconds of a supported problem. Lower wins. Touches no device."""

    @abstractmethod
    def compile(self, problem: BackwardProblem, device: Device) -> BackwardPlan:
        """The plan of a supported problem."""


@dataclass(frozen=True)
class Candidate:
    """A kernel held against a problem; ``cost`` is in milliseconds, None where unsupported."""

    kernel: Kernel
    support: Support
    cost: float | None
