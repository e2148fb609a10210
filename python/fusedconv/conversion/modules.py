"""What converted modules compute: their class's forward by our functions, where these serve it."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

from torch import Tensor, nn

from fusedconv import functional
from fusedconv.composing import hooked, is_replaced
from fusedconv.conversion.classes import Converted, original_type
from fusedconv.conversion.stages import (
    CONVOLUTIONS,
    Stage,
    activation_and_order,
    activation_of,
    conv_keywords,
    described,
    examined,
    follows,
    group_norm_stage,
    is_stage,
    is_transparent,
    norm_of,
    reason_against,
    takes,
)


def _convolved(conv: Any, input: Tensor, stages: list[Stage], output_size: Any = None) -> Tensor:
    """A convolution's output through ``stages``, in one call."""
    output_padding = conv.output_padding
    if output_size is not None:
        axes = len(conv.kernel_size)
        output_padding = conv._output_padding(
            input, output_size, conv.stride, conv.padding, conv.kernel_size, axes, conv.dilation
        )
    return functional.conv_transpose_act_norm(
        input,
        conv.weight,
        conv.bias,
        conv.stride,
        conv.padding,
        output_padding,
        conv.groups,
        conv.dilation,
        **conv_keywords(stages),
    )


def _normalised(stages: list[Stage], input: Tensor) -> Tensor:
    """A GroupNorm's output, with an activation in front or behind if there is one."""
    norm = norm_of(stages)
    assert norm is not None and norm.num_groups is not None
    activation, order = activation_and_order(stages)
    return functional.group_norm(
        input,
        norm.num_groups,
        norm.weight,
        norm.bias,
        norm.eps,
        activation=activation,
        order=order,
    )


class ConvertedConvTranspose(Converted):
    """A transposed convolution by our kernels."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """As the original's."""
        dims = CONVOLUTIONS[self._fusedconv_original] + 2
        if (
            takes(input)
            and dims - 1 <= input.dim() <= dims
            and not is_replaced(self._fusedconv_original)
        ):
            return _convolved(self, input, [], output_size)
        result: Tensor = super().forward(input, output_size)
        return result


class ConvertedGroupNorm(Converted):
    """A GroupNorm by our kernels."""

    def forward(self, input: Tensor) -> Tensor:
        """As the original's."""
        if takes(input) and input.dim() >= 2 and not is_replaced(self._fusedconv_original):
            return _normalised([group_norm_stage(self)], input)
        result: Tensor = super().forward(input)
        return result


# ---- sequences -----------------------------------------------------------------------------------


class Chain(NamedTuple):
    """A part of a sequence: modules that one call computes where there is more than one.
    ``stages`` are those behind a convolution, or a GroupNorm and its activation. ``next`` is a
    stage's module behind them that is not among them, if there is one, and ``reason`` why."""

    modules: list[Any]
    stages: list[Stage]
    next: nn.Module | None = None
    reason: str = ""

    @property
    def has_convolution(self) -> bool:
        return original_type(self.modules[0]) in CONVOLUTIONS

    @property
    def may_join(self) -> bool:
        """Whether one call may compute more than one of the modules, now or when they change."""
        return len(self.modules) > 1 or self.next is not None

    def __str__(self) -> str:
        head = [original_type(self.modules[0]).__name__] if self.has_convolution else []
        return described(*head, *self.stages)


def is_sequence(module: nn.Module) -> bool:
    """Whether ``module`` is of a class whose forward calls its children in order, no more."""
    kind = original_type(module)
    return (
        issubclass(kind, nn.Sequential)
        and kind.forward is nn.Sequential.forward
        and kind.__iter__ is nn.Sequential.__iter__
        and not is_replaced(nn.Sequential)
    )


def flattened(sequence: nn.Module) -> Iterator[nn.Module]:
    """The modules that a sequence calls in order. Those of sequences within it stand for these,
    unless a call of one does more than to call its children."""
    for child in sequence._modules.values():
        assert child is not None
        is_plain = type(child).__call__ is nn.Module.__call__ and hooked("", child) is None
        if is_plain and is_sequence(child):
            yield from flattened(child)
        else:
            yield child


def chains(sequence: nn.Module) -> Iterator[Chain]:
    """The modules of a sequence in order, joined as far as one call computes them."""
    modules = list(flattened(sequence))
    while modules:
        chain = _first_chain(modules)
        yield chain
        # torch.compile of torch 2.6 follows no deletion of a slice.
        modules = modules[len(chain.modules) :]


def _first_chain(modules: list[nn.Module]) -> Chain:
    head: Any = modules[0]
    kind = original_type(head)
    if kind in CONVOLUTIONS:
        return _behind(modules, head, head.out_channels, CONVOLUTIONS[kind])
    if kind is nn.GroupNorm:
        return _behind(modules, head, head.num_channels, 0)
    if activation_of(head) and len(modules) > 1 and original_type(modules[1]) is nn.GroupNorm:
        return _in_front(head, modules[1])
    return Chain(modules[:1], [])


def _behind(modules: list[nn.Module], head: Any, channels: int, axes: int) -> Chain:
    """The chain that begins with a convolution of ``axes``, or with a GroupNorm where they are
    0."""
    stages: list[Stage] = []
    reason = reason_against(head)
    if not axes:
        stages.append(group_norm_stage(head))
    count = 1
    for position, module in enumerate(modules[1:], 1):
        if is_transparent(module):
            continue
        if not is_stage(module):
            break
        stage = None
        if reason is None:
            stage, reason = examined(module, channels, axes)
        if stage is None or not follows(stages, stage):
            if axes or activation_of(module):
                reason = reason or f"{type(module).__name__} is one stage too many"
                return Chain(modules[:count], stages, module, reason)
            break
        stages.append(stage)
        count = position + 1
    return Chain(modules[:count], stages)


def _in_front(activation: Any, norm: Any) -> Chain:
    """The chain of an activation and a GroupNorm."""
    stages: list[Stage] = []
    reason: str | None = "it writes to its input" if getattr(activation, "inplace", False) else None
    for module in (activation, norm):
        stage = None
        if reason is None:
            stage, reason = examined(module, norm.num_channels, 0)
        if stage is None:
            return Chain([activation], [], norm, reason or "")
        stages.append(stage)
    return Chain([activation, norm], stages)


class ConvertedSequential(Converted):
    """A sequence that calls our functions for the chains in it, and its children for the rest.

    What its children are is looked at in each call: those that are replaced or carry hooks are
    called."""

    def forward(self, input: Any) -> Any:
        """As the original's."""
        if is_replaced(nn.Sequential):
            return super().forward(input)
        for chain in chains(self):
            head = chain.modules[0]
            if len(chain.modules) == 1:
                input = head(input)
            elif chain.has_convolution and _takes_batch(head, input):
                output = _convolved(head, input, chain.stages)
                input = _called(chain, input) if _is_refused(chain.stages, output) else output
            elif not chain.has_convolution and takes(input) and input.dim() >= 2:
                input = _normalised(chain.stages, input)
            else:
                input = _called(chain, input)
        return input


def _called(chain: Chain, input: Any) -> Any:
    for module in chain.modules:
        input = module(input)
    return input


def _is_refused(stages: list[Stage], output: Tensor) -> bool:
    """Whether torch's modules raise an error: of one value an instance has no variance."""
    norm = norm_of(stages)
    return norm is not None and norm.kind == "instance" and prod(output.shape[2:]) == 1


def _takes_batch(conv: Any, input: Any) -> bool:
    """Whether an input has a batch: without one the channels would be a norm's batch."""
    return takes(input) and input.dim() == len(conv.kernel_size) + 2
