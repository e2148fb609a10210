"""What is to be computed, apart from how and where: frozen, hashable descriptions of one pass.

Convolution letters, here and in C++: N batch, C input channels, K output channels; D H W input,
Z P Q output and T R S filter extents along depth, height and width.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch

from fusedconv.activations import KEEP_RESULT, NAMES, UNFUSED
from fusedconv.arguments import finite
from fusedconv.layout import Layout, layout_of, result_layout
from fusedconv.norms import KINDS, Norm
from fusedconv.precision import Precision, dtype_name
from fusedconv.support import Support

#: Where functions and modules put their activation: in front of the normalisation or behind it.
ORDERS = ("act_norm", "norm_act")


# ---- the epilogue --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bias:
    """Adds the convolution's bias [K]; the first stage where there is one."""

    def __str__(self) -> str:
        return "bias"


@dataclass(frozen=True)
class Residual:
    """Adds a tensor of the output's shape and the input's dtype."""

    def __str__(self) -> str:
        return "residual"


@dataclass(frozen=True)
class Activation:
    """``name`` is one of ``fusedconv.activations.NAMES`` without "identity"; ``parameter`` is the
    one that some of UNFUSED have, such as a slope, None for its default. Raises ValueError where
    ``name`` is another, or has no parameter or not a finite one."""

    name: str
    parameter: float | None = None

    def __post_init__(self) -> None:
        names = [name for name in NAMES if name != "identity"]
        if self.name not in names:
            raise ValueError(f"name: got {self.name!r}, expected one of {', '.join(names)}")
        if self.parameter is not None:
            if UNFUSED.get(self.name) is None:
                raise ValueError(f"parameter: got {self.parameter} for {self.name}, expected None")
            finite("parameter", self.parameter)

    def __str__(self) -> str:
        return self.name if self.parameter is None else f"{self.name}({self.parameter:g})"


Stage = Bias | Residual | Activation | Norm
Epilogue = tuple[Stage, ...]


@dataclass(frozen=True)
class ActNormAct:
    """The epilogues that fused kernels have: [bias], [activation], [normalisation], [activation].
    Activations are names, "identity" where there is none."""

    bias: bool
    before: str
    norm: Norm | None
    after: str


def epilogue(bias: bool, activation: str, order: str, norm: Norm | None) -> Epilogue:
    """The stages of a function's arguments; ``activation`` "identity" is none."""
    stages: list[Stage] = [Bias()] if bias else []
    acts = [Activation(activation)] if activation != "identity" else []
    norms = [norm] if norm is not None else []
    return (*stages, *(norms + acts if order == "norm_act" else acts + norms))


def need_what_they_read(stages: Epilogue, converted: bool) -> bool:
    """Whether gradients through stages need what these were computed from. Through a bias alone
    they do not; through a ReLU alone (``activations.KEEP_RESULT``) the result does, which whoever
    goes on from it keeps anyway, unless it is ``converted`` to another dtype."""
    rest = [stage for stage in stages if not isinstance(stage, Bias)]
    if len(rest) == 1 and isinstance(rest[0], Activation) and rest[0].name in KEEP_RESULT:
        return converted
    return bool(rest)


@lru_cache(maxsize=4096)
def act_norm_act(stages: Epilogue, ungrouped: frozenset[str] = frozenset()) -> ActNormAct | Support:
    """An epilogue as the fused kernels take it, or why they do not. ``ungrouped`` are the kinds of
    normalisation that the asking kernel has beside those of groups of channels."""
    rest = list(stages)
    bias = bool(rest) and isinstance(rest[0], Bias)
    if bias:
        del rest[0]
    named = [stage for stage in rest if isinstance(stage, Activation)]
    for activation in named:
        if activation.name in UNFUSED:
            return Support.no(f"no fused kernel has the activation {activation}")
    norms = [stage for stage in rest if isinstance(stage, Norm)]
    for norm in norms:
        if KINDS[norm.kind].groups(norm, 1) == 0 and norm.kind not in ungrouped:
            return Support.no(f"no fused kernel has the normalisation {norm}")
    for stage in rest:
        if not isinstance(stage, Activation | Norm):
            return Support.no(f"no fused kernel has the stage {stage}")
    position = rest.index(norms[0]) if norms else len(rest)
    before, after = rest[:position], rest[position + 1 :]
    if len(norms) > 1 or len(before) > 1 or len(after) > 1:
        order = " -> ".join(map(str, rest))
        return Support.no(
            f"stages are {order}; fused kernels have an activation, a normalisation and an "
            "activation at most"
        )

    def name(stage: list[Stage]) -> str:
        return stage[0].name if stage and isinstance(stage[0], Activation) else "identity"

    return ActNormAct(bias, name(before), norms[0] if norms else None, name(after))


# ---- geometry ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConvTransposeGeometry:
    """A transposed convolution: ``weight`` is [C, K / groups, *kernel_size] as in torch."""

    in_channels: int
    out_channels: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    output_padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    weight_strides: tuple[int, ...]

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.in_channels, self.out_channels // self.groups, *self.kernel_size)

    @property
    def weight_layout(self) -> Layout:
        """The dense layout of the weight's gradient."""
        return result_layout(layout_of(self.weight_shape, self.weight_strides))

    def output_spatial(self, spatial: tuple[int, ...]) -> tuple[int, ...]:
        """Output extents: (in - 1) stride - 2 padding + dilation (kernel - 1) + output_padding + 1
        (the formula of torch.nn.ConvTranspose2d)."""
        return tuple(
            (size - 1) * stride - 2 * pad + dilation * (kernel - 1) + extra + 1
            for size, kernel, stride, pad, extra, dilation in zip(
                spatial,
                self.kernel_size,
                self.stride,
                self.padding,
                self.output_padding,
                self.dilation,
                strict=True,
            )
        )

    def __str__(self) -> str:
        def extents(values: Iterable[int]) -> str:
            return "x".join(map(str, values))

        return (
            f"conv_transpose{len(self.kernel_size)}d {self.in_channels}->{self.out_channels} "
            f"k{extents(self.kernel_size)} s{extents(self.stride)} p{extents(self.padding)}"
            + (f" d{extents(self.dilation)}" if set(self.dilation) != {1} else "")
            + (f" groups {self.groups}" if self.groups != 1 else "")
        )


# ---- passes --------------------------------------------------------------------------------------


#: What a backward pass may be asked for. "conv_output" is the gradient of the convolution's output,
#: which the gradients of input, weight and bias are computed from.
GRADIENTS = ("conv_output", "input", "weight", "bias", "norm_weight", "norm_bias", "residual")


@dataclass(frozen=True)
class ForwardProblem:
    """One forward pass: an optional transposed convolution and an epilogue of ordered stages.

    ``layout`` is the input's: "nchw" dense channels first, "nhwc" dense channels last, "strided"
    anything else. ``aligned`` says that the input's address is a multiple of 16 bytes. ``save``
    asks for the tensors that a backward pass needs; with ``recompute`` the convolution's output is
    not among them: that pass computes it anew.

    Raises ValueError where the stages cannot be: more than one bias, residual or normalisation, a
    bias that is not the first, or one without a convolution.
    """

    dtype: torch.dtype
    output_dtype: torch.dtype
    precision: Precision
    layout: Layout
    aligned: bool
    batch: int
    channels: int
    spatial: tuple[int, ...]
    conv: ConvTransposeGeometry | None = None
    epilogue: Epilogue = ()
    save: bool = False
    recompute: bool = False

    def __post_init__(self) -> None:
        for kind in (Bias, Residual, Norm):
            count = sum(isinstance(stage, kind) for stage in self.epilogue)
            if count > 1:
                raise ValueError(f"epilogue: got {count} of {kind.__name__}, expected at most one")
        for index, stage in enumerate(self.epilogue):
            if isinstance(stage, Bias) and (index or self.conv is None):
                raise ValueError("epilogue: got a bias elsewhere than behind a convolution")

    @property
    def parts(self) -> tuple[str, ...]:
        """What kernels divide among themselves; a forward pass is one part."""
        return ("forward",)

    @property
    def output_channels(self) -> int:
        return self.channels if self.conv is None else self.conv.out_channels

    @property
    def output_spatial(self) -> tuple[int, ...]:
        return self.spatial if self.conv is None else self.conv.output_spatial(self.spatial)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (self.batch, self.channels, *self.spatial)

    @property
    def output_shape(self) -> tuple[int, ...]:
        return (self.batch, self.output_channels, *self.output_spatial)

    @property
    def output_layout(self) -> Layout:
        return result_layout(self.layout)

    @property
    def bias(self) -> bool:
        return Bias() in self.epilogue

    @property
    def norm(self) -> Norm | None:
        return next((stage for stage in self.epilogue if isinstance(stage, Norm)), None)

    @property
    def norm_groups(self) -> int:
        """Groups of channels that a sample's statistics are of; 0 without such a normalisation."""
        return 0 if self.norm is None else self.norm.groups(self.output_channels)

    @property
    def saves_conv_output(self) -> bool:
        return self.save and self.conv is not None and not self.recompute

    @property
    def activations(self) -> tuple[Activation, ...]:
        return tuple(stage for stage in self.epilogue if isinstance(stage, Activation))

    @property
    def input_elements(self) -> int:
        return math.prod(self.input_shape)

    @property
    def output_elements(self) -> int:
        return math.prod(self.output_shape)

    @property
    def gradients(self) -> tuple[str, ...]:
        """Those of GRADIENTS that it has."""
        conv, norm = self.conv is not None, self.norm
        has = {
            "conv_output": conv,
            "input": True,
            "weight": conv,
            "bias": self.bias,
            "norm_weight": norm is not None and norm.weight,
            "norm_bias": norm is not None and norm.bias,
            "residual": Residual() in self.epilogue,
        }
        return tuple(name for name in GRADIENTS if has[name])

    @property
    def conv_flops(self) -> int:
        """Multiplications and additions of the convolution: every tap at every input pixel."""
        if self.conv is None:
            return 0
        conv = self.conv
        taps = math.prod(conv.kernel_size) * conv.out_channels // conv.groups
        return 2 * self.input_elements * taps

    @property
    def minimal_bytes(self) -> int:
        """Input read once and output written once."""
        return (
            self.input_elements * self.dtype.itemsize
            + self.output_elements * self.output_dtype.itemsize
        )

    def __str__(self) -> str:
        size = "x".join(map(str, self.input_shape))
        stages = list(map(str, self.epilogue))
        if self.conv is not None:
            head = str(self.conv)
            if self.bias:
                head += " +bias"
                del stages[0]
            stages.insert(0, head)
        what = " -> ".join(stages) or "identity"
        mode = f"{dtype_name(self.dtype)} ({self.precision})"
        saving = ", saving for backward" if self.save else ""
        if self.save and self.recompute:
            saving += " without the convolution's output"
        return f"{what} on {size}, {mode}, {self.layout}{saving}"


@dataclass(frozen=True)
class BackwardProblem:
    """First derivatives of a forward pass that saved what they need.

    ``gradients`` are some of GRADIENTS, of what the forward pass has. ``grad_dtype`` and
    ``grad_layout`` are those of the output's gradient; ``aligned`` says that its address and those
    of the saved tensors are multiples of 16 bytes, as far as they are dense.

    Its parts: "epilogue" goes from the output's gradient to that of the convolution's output (of
    the input, where there is no convolution), norm weight, norm bias and residual; "input",
    "weight" and "bias" are the convolution's.

    Raises ValueError where none is asked for, or one that the forward pass does not have.
    """

    forward: ForwardProblem
    grad_dtype: torch.dtype
    grad_layout: Layout
    aligned: bool
    gradients: frozenset[str]

    def __post_init__(self) -> None:
        known = self.forward.gradients
        if not self.gradients or not self.gradients <= set(known):
            raise ValueError(
                f"gradients: got {sorted(self.gradients)}, expected some of {', '.join(known)}"
            )

    @staticmethod
    def of(
        forward: ForwardProblem,
        *,
        grad_dtype: torch.dtype,
        grad_layout: Layout,
        aligned: bool,
        gradients: Iterable[str],
    ) -> BackwardProblem:
        """The problem of the gradients asked for, with the one between them where it is needed."""
        wanted = frozenset(gradients)
        if forward.conv is not None and wanted & {"input", "weight", "bias"}:
            stages = [stage for stage in forward.epilogue if not isinstance(stage, Bias)]
            if stages or grad_dtype != forward.dtype:
                wanted |= {"conv_output"}
        return BackwardProblem(forward, grad_dtype, grad_layout, aligned, wanted)

    @property
    def parts(self) -> tuple[str, ...]:
        epilogue = {"conv_output", "norm_weight", "norm_bias", "residual"}
        if self.forward.conv is None:
            return ("epilogue",)
        parts = ["epilogue"] if self.gradients & epilogue else []
        parts += [name for name in ("input", "weight", "bias") if name in self.gradients]
        return tuple(parts)

    def part(self, parts: Iterable[str]) -> BackwardProblem:
        """The same problem restricted to some of its parts."""
        if self.forward.conv is None:
            return self
        convolution = {"input", "weight", "bias"}
        kept = set(parts)
        gradients = {
            name
            for name in self.gradients
            if (name in kept if name in convolution else "epilogue" in kept)
        }
        return dataclasses.replace(self, gradients=frozenset(gradients))

    @property
    def conv_flops(self) -> int:
        """Of the convolution's two gradients, as far as they are asked for."""
        return self.forward.conv_flops * len(self.gradients & {"input", "weight"})

    def __str__(self) -> str:
        names = ", ".join(name for name in GRADIENTS if name in self.gradients)
        return (
            f"gradients of {names} through {self.forward}, output gradient "
            f"{dtype_name(self.grad_dtype)} {self.grad_layout}"
        )


Problem = ForwardProblem | BackwardProblem
