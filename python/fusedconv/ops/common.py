"""What the operators share: the layouts and dtypes they promise, and how they differentiate."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._library.autograd import make_autograd_impl
from torch.autograd import forward_ad, profiler

from fusedconv.errors import KernelError
from fusedconv.layout import Layout, dense, owning, result_layout_of
from fusedconv.norms import statistics_dtype
from fusedconv.ops.planning import gradient_plan
from fusedconv.ops.repeating import repeated
from fusedconv.ops.saving import Lying, as_saved, lying
from fusedconv.ops.seen import PLAIN
from fusedconv.ops.watching import functorch_level, is_watched
from fusedconv.plan import BackwardPlan, BackwardTensors, ForwardPlan, Outputs
from fusedconv.precision import conv_fp32_precision
from fusedconv.problem import ForwardProblem
from fusedconv.recording import Call, Composition, record
from fusedconv.reference import compose
from fusedconv.selection import log_once, run, run_backward

#: Holds the registrations that torch.library has no function for.
LIBRARY = torch.library.Library("fusedconv", "FRAGMENT")

#: Input, weight, bias, norm_weight, norm_bias.
Tensors = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def gradient_layout(gradient: str, tensor: Tensor) -> Layout:
    """The dense layout of a tensor's gradient, by what a problem calls that: input and weight have
    theirs as they lie, since autograd copies a parameter's gradient that lies otherwise; others
    have one axis."""
    return result_layout_of(tensor) if gradient in ("input", "weight") else "nchw"


def computed_gradients(
    plan: BackwardPlan,
    names: tuple[str, ...],
    gradient_names: tuple[str, ...],
    given: Callable[..., Tensors],
    tensors: Sequence[Tensor | None],
    grad: Tensor,
    saved: tuple[Tensor | None, Tensor | None, Tensor | None],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """A plan's gradients of an operator's tensors, as it promises them: dense, of its tensor's
    dtype; None where there is no need of one. ``names`` are those of the tensors,
    ``gradient_names`` what a problem calls their gradients, ``given(*tensors)`` what a plan takes;
    ``saved`` are conv_output, mean and rstd.

    Raises KernelError where a kernel did not compute one, or one in another shape that does not say
    its gradients are exact.
    """
    input, weight, _, norm_weight, norm_bias = given(*tensors)
    found = run_backward(plan, BackwardTensors(grad, input, weight, *saved, norm_weight, norm_bias))
    gradients: list[Tensor | None] = []
    result: Tensor | None
    if plan.is_exact:
        for place, tensor in enumerate(tensors):
            result = None
            if tensor is not None and needs[place]:
                result = getattr(found, gradient_names[place])
                if result is None:
                    raise _missing(plan, names[place], tensor, None)
            gradients.append(result)
        return gradients
    for place, tensor in enumerate(tensors):
        if tensor is None or not needs[place]:
            gradients.append(None)
            continue
        gradient = gradient_names[place]
        result = getattr(found, gradient)
        if result is None or result.shape != tensor.shape:
            raise _missing(plan, names[place], tensor, result)
        result = dense(result, gradient_layout(gradient, tensor))
        gradients.append(result if result.dtype == tensor.dtype else result.to(tensor.dtype))
    return gradients


def _missing(plan: BackwardPlan, name: str, tensor: Tensor, found: Tensor | None) -> Exception:
    got = "none" if found is None else f"shape {tuple(found.shape)}"
    return KernelError(
        f"{plan.kernel}: got {got} for the gradient of {name}, expected shape {tuple(tensor.shape)}"
    )


def present(gradients: Sequence[Tensor | None], input: Tensor) -> tuple[Tensor, ...]:
    """Gradients as the dispatcher takes them, which has no None: empty where there is no need."""
    return tuple(input.new_empty((0,)) if each is None else each for each in gradients)


def _base(tensor: Tensor) -> Tensor:
    """The tensor that one is a view of, itself where it is none."""
    return tensor if tensor._base is None else tensor._base


def _apart(input: Tensor, outputs: Outputs) -> Outputs:
    """A plan's outputs, dense, none sharing memory: else writing to the output in place would
    change what is saved."""
    output, conv_output, mean, rstd = outputs
    layout = result_layout_of(input)
    output = dense(output, layout)
    if conv_output is not None:
        conv_output = dense(conv_output, layout)
        if _base(output) is _base(conv_output):
            output = output.clone()
    return Outputs(output, conv_output, mean, rstd)


def operator_outputs(input: Tensor, outputs: Outputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A plan's outputs as the dispatcher takes them: the same, empty for None."""
    output, conv_output, mean, rstd = _apart(input, outputs)
    statistics = statistics_dtype(input)
    return (
        output,
        input.new_empty((0,)) if conv_output is None else conv_output,
        input.new_empty((0,), dtype=statistics) if mean is None else mean,
        input.new_empty((0,), dtype=statistics) if rstd is None else rstd,
    )


def any_requires_grad(arguments: Iterable[object]) -> bool:
    """Whether autograd would follow a call with these arguments."""
    if torch.is_grad_enabled():
        for each in arguments:
            if isinstance(each, Tensor) and each.requires_grad:
                return True
    return False


# ---- differentiation -----------------------------------------------------------------------------

try:
    #: Of ``torch.autograd.grad(..., is_grads_batched=True)``, which no transform stands for.
    is_batched: Callable[[Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor
except AttributeError:  # a private name, which may move

    def is_batched(tensor: Tensor) -> bool:
        return False


def goes_direct(input: Tensor, tensors: Sequence[Tensor | None]) -> bool:
    """Whether no tracer, mode, transform, profiler or subclass wants to see a call, and every
    tensor's memory holds its values (a negative view's holds their opposites)."""
    if is_watched() or profiler._is_profiler_enabled:
        return False
    for each in tensors:
        if each is not None and (type(each) not in PLAIN or each.is_neg()):
            return False
    return input.is_cpu or input.is_cuda


def _has_tangent(arguments: Iterable[object]) -> bool:
    return forward_ad._current_level >= 0 and any(
        isinstance(argument, Tensor) and forward_ad.unpack_dual(argument).tangent is not None
        for argument in arguments
    )


def _composes(arguments: Iterable[object]) -> bool:
    """Whether derivatives are asked for that no kernel has: torch's operators have them all."""
    return functorch_level() is not None or _has_tangent(arguments)


def differentiates_gradients(grad: Tensor) -> bool:
    """Whether the gradients of a backward pass that begins with ``grad`` are differentiated."""
    return torch.is_grad_enabled() or (forward_ad._current_level >= 0 and _has_tangent((grad,)))


def composed(
    name: str, problem: ForwardProblem, device: str, requested: str | None, tensors: Tensors
) -> Outputs:
    """The problem in torch's operators, for derivatives beyond the first and in forward mode, and
    for programs that run without this package.

    Raises NotImplementedError where an explicit precision differs from torch's switch, which is
    what the operators would follow.
    """
    switch = conv_fp32_precision()
    is_float32_on_cuda = device == "cuda" and problem.dtype == torch.float32
    if is_float32_on_cuda and requested not in (None, switch):
        raise NotImplementedError(
            f"precision: got {requested!r} under a torch.func transform, forward-mode or second "
            f"differentiation or decomposition, expected None or {switch!r}, which torch's switch "
            "asks for"
        )
    log_once(
        (name, "composed"),
        "%s: torch's operators serve torch.func transforms, forward-mode and second derivatives, "
        "decompositions and ONNX",
        name,
    )
    outputs = compose(problem, *tensors)
    return Outputs(outputs.output, *(t if t is None else t.detach() for t in outputs[1:]))


def gradients_by_composition(
    output: Callable[..., Tensor],
    leaves: Sequence[Tensor | None],
    needs: Sequence[bool],
    grad: Tensor,
) -> list[Tensor | None]:
    """Gradients of ``output(*leaves)``, torch's operators, which differentiate them as eager's.

    Each leaf is stood for by a view of its own: a leaf that was computed from another, or that is
    given twice, must not get the other's share, which autograd adds by itself.
    """
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        views = [leaf if leaf is None else leaf.view_as(leaf) for leaf in leaves]
        wanted = [
            view for view, need in zip(views, needs, strict=True) if need and view is not None
        ]
        found = iter(
            torch.autograd.grad(output(*views), wanted, grad, create_graph=again, allow_unused=True)
        )
    return [
        next(found) if need and view is not None else None
        for view, need in zip(views, needs, strict=True)
    ]


def recorded_with(calls: list[Call | Composition] | None) -> AbstractContextManager[None]:
    """Notes into the recording of the forward pass, if there was one: autograd runs the backward
    pass in a thread of its own."""
    return contextlib.nullcontext() if calls is None else record.attached(calls)


def register_gradients(
    name: str,
    backward: Callable[..., Any],
    setup_context: Callable[..., Any],
    in_torch: Callable[..., Any],
) -> None:
    """What torch.library.register_autograd does, but that ``in_torch``, the operator in torch's
    own, stands in where a transform or a tangent asks for what ``backward`` does not give."""
    operator = getattr(torch.ops.fusedconv, name).default
    generated = make_autograd_impl(
        operator, SimpleNamespace(_backward_fn=backward, _setup_context_fn=setup_context)
    )

    def kernel(keyset: Any, *arguments: Any, **keywords: Any) -> Any:
        if _composes(arguments):
            return in_torch(*arguments, **keywords)
        return generated(keyset, *arguments, **keywords)

    LIBRARY.impl(name, kernel, "Autograd", with_keyset=True)


class Kept(NamedTuple):
    """What a node of autograd keeps of its forward pass beside tensors: the plan, the call without
    its tensors, whether the backward pass reads the result, what is recorded into, and how those
    tensors lie that are saved. Nodes of calls that are known again share one."""

    plan: ForwardPlan
    template: Any
    reads_result: bool
    recording: list[Call | Composition] | None
    lies: Lying | None = None

    @staticmethod
    def of(plan: ForwardPlan, template: Any) -> Kept:
        """Of a call that this thread makes now."""
        return Kept(plan, template, template.reads_result, record.current())


def undispatched(function: type[torch.autograd.Function]) -> Callable[..., Tensor]:
    """``function.apply`` of calls that no transform of torch.func sees, on tensors that none has
    left wrapped: what it asks and does for those takes longer than all the rest of it."""
    above: Any = super(torch.autograd.Function, function)  # where it goes on with such calls
    apply: Callable[..., Tensor] = above.apply
    return apply


class DirectOperator:
    """An operator as autograd follows it without the dispatcher, for calls that ``goes_direct``
    finds nobody else to see: the dispatcher takes longer than a small tensor.

    ``names`` are the tensors of the operator's call, ``gradient_names`` what a problem calls their
    gradients, ``given(*tensors)`` what a plan takes. ``in_torch(call)`` is the output in torch's
    operators, for second derivatives; ``dispatched(grad, conv_output, mean, rstd, needs, call)``
    are the gradients for a backward pass that somebody wants to see; ``recomputed(call)`` is the
    convolution's output where a call has left it to be computed anew, else None.

    Backward passes run in a thread of their own, whose caches hold none of this: what they need not
    do takes two or three times as long there as in the caller's.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        gradient_names: tuple[str, ...],
        given: Callable[..., Tensors],
        in_torch: Callable[[Any], Tensor],
        dispatched: Callable[..., Sequence[Tensor]],
        recomputed: Callable[[Any], Tensor | None],
    ) -> None:
        self.names = names
        self.gradient_names = gradient_names
        self.given = given
        self.in_torch = in_torch
        self.dispatched = dispatched
        self.recomputed = recomputed
        self.count = len(names)

    def call(self, template: Any, tensors: Sequence[Tensor | None]) -> Any:
        """A call of which ``template`` has everything but its tensors."""
        return template._replace(**dict(zip(self.names, tensors, strict=True)))

    def outputs(self, plan: ForwardPlan, tensors: Sequence[Tensor | None]) -> Outputs:
        """What a plan that saves computes, no two of them in the same memory."""
        outputs = run(plan, *self.given(*tensors))
        if outputs.conv_output is None or plan.only_launches:
            return outputs
        input = tensors[0]
        assert input is not None
        return _apart(input, outputs)

    def keep(
        self,
        ctx: Any,
        kept: Kept,
        outputs: Sequence[Tensor | None],
        tensors: Sequence[Tensor | None],
        *others: Tensor | None,
    ) -> Tensor:
        """The output; saves in ``ctx`` what ``gradients`` reads, and ``others`` behind."""
        output, conv_output, mean, rstd = outputs
        assert output is not None
        if not kept.plan.only_launches:
            output = owning(output)
        if conv_output is None and kept.reads_result:
            conv_output = output
        ctx.set_materialize_grads(False)
        saved = (*tensors, conv_output, mean, rstd, *others)
        ctx.save_for_backward(*saved)
        lies = lying(saved)
        ctx.kept = kept if lies is None else kept._replace(lies=lies)
        return output

    def first_gradients(
        self, kept: Kept, grad: Tensor, saved: Sequence[Tensor | None], needs: tuple[bool, ...]
    ) -> list[Tensor | None]:
        """First gradients of the call's tensors, as far as ``needs`` asks for them; ``saved`` are
        all tensors that ``keep`` saved."""
        return self.gradients(kept, grad, saved, needs)[0]

    def gradients(
        self, kept: Kept, grad: Tensor, saved: Sequence[Tensor | None], needs: tuple[bool, ...]
    ) -> tuple[list[Tensor | None], bool]:
        """``first_gradients``, and whether nobody wanted to see them computed."""
        if kept.recording is None:
            return self._gradients(kept, grad, saved, needs)
        with record.attached(kept.recording):
            return self._gradients(kept, grad, saved, needs)

    def _gradients(
        self, kept: Kept, grad: Tensor, saved: Sequence[Tensor | None], needs: tuple[bool, ...]
    ) -> tuple[list[Tensor | None], bool]:
        count = self.count
        tensors = saved[:count]
        conv_output, mean, rstd = saved[count : count + 3]
        if is_batched(grad) or not goes_direct(grad, (grad, *tensors, *saved[count + 3 :])):
            call = self.call(kept.template, tensors)
            found = self.dispatched(grad, conv_output, mean, rstd, needs, call)
            return [each if need else None for each, need in zip(found, needs, strict=True)], False
        if conv_output is None:
            conv_output = self.recomputed(self.call(kept.template, tensors))
        plan = gradient_plan(
            kept.plan,
            lambda: self.call(kept.template, tensors),
            grad,
            conv_output,
            self.gradient_names,
            needs,
        )
        gradients = computed_gradients(
            plan,
            self.names,
            self.gradient_names,
            self.given,
            tensors,
            grad,
            (conv_output, mean, rstd),
            needs,
        )
        return gradients, True

    def composed_gradients(
        self, template: Any, tensors: Sequence[Tensor | None], needs: Sequence[bool], grad: Tensor
    ) -> list[Tensor | None]:
        """Gradients of the call's tensors that can be differentiated."""
        return gradients_by_composition(
            lambda *views: self.in_torch(self.call(template, views)), tensors, needs, grad
        )

    def functions(self) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
        """Take a ``Kept`` and the call's tensors; autograd follows them. The second one is for
        calls that are known again."""
        operator, count = self, self.count
        nothing = (None,) * (2 + count)

        class Direct(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, kept: Kept, outputs: Outputs | None, *tensors: Any) -> Tensor:
                if outputs is None:
                    outputs = operator.outputs(kept.plan, tensors)
                return operator.keep(ctx, kept, outputs, tensors)

            @staticmethod
            def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
                if grad is None:
                    return nothing
                kept: Kept = ctx.kept
                saved, needs = ctx.saved_tensors, ctx.needs_input_grad[2:]
                if kept.lies is not None:
                    saved = as_saved(saved, kept.lies)
                first = operator.first_gradients
                found: Sequence[Tensor | None]
                if differentiates_gradients(grad):
                    found = operator.composed_gradients(kept.template, saved[:count], needs, grad)
                elif kept.recording is None:
                    tensors = (grad, *saved)
                    found = repeated(kept.plan, needs, tensors, first, kept, grad, saved, needs)
                else:
                    found = first(kept, grad, saved, needs)
                return (None, None, *found)

        apply_again = undispatched(Direct)

        def direct(kept: Kept, *tensors: Tensor | None) -> Tensor:
            return Direct.apply(kept, None, *tensors)

        def again(kept: Kept, *tensors: Tensor | None) -> Tensor:
            # A device begins with what only launches while autograd makes its node.
            plan = kept.plan
            outputs = operator.outputs(plan, tensors) if plan.only_launches else None
            return apply_again(kept, outputs, *tensors)

        return direct, again


def refuse_second_derivatives(name: str) -> None:
    """Makes differentiating the operator raise, where it would give a silent zero."""

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    def backward(ctx: Any, *grads: Any) -> None:
        raise RuntimeError(f"fusedconv::{name}: got a second derivative, expected first ones only")

    torch.library.register_autograd(f"fusedconv::{name}", backward, setup_context=setup_context)


def register_batching(name: str) -> None:
    """torch.vmap over the operator: samples are apart in it, so that a batched input joins them;
    where other tensors are batched, one call each."""
    operator = getattr(torch.ops.fusedconv, name).default

    def batched(info: Any, dims: Sequence[Any], *arguments: Any) -> Any:
        input, *others = arguments
        # A list of integers has a list of None.
        if dims[0] is not None and not any(isinstance(dim, int) for dim in dims[1:]):
            folded = input.movedim(dims[0], 0)
            sizes = folded.shape[:2]
            outputs = operator(folded.flatten(0, 1), *others)
            # What is not saved is empty, and the same for every call.
            return tuple(
                output if output.dim() == 1 else output.unflatten(0, sizes) for output in outputs
            ), tuple(None if output.dim() == 1 else 0 for output in outputs)
        calls = [
            operator(
                *(
                    argument.select(dim, index) if isinstance(dim, int) else argument
                    for argument, dim in zip(arguments, dims, strict=True)
                )
            )
            for index in range(info.batch_size)
        ]
        return tuple(torch.stack(outputs) for outputs in zip(*calls, strict=True)), (0,) * len(
            calls[0]
        )

    torch.library.register_vmap(f"fusedconv::{name}", batched)
