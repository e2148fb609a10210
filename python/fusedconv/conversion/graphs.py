"""Chains in the graphs of torch.fx, torch.compile and torch.export, replaced by calls of ours."""

from __future__ import annotations

import logging
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from fusedconv import functional
from fusedconv.arguments import shown
from fusedconv.conversion.matching import (
    CONV_ARGUMENTS,
    OPTIONS,
    Convolution,
    Match,
    Refusal,
    activation,
    convolution,
    example,
    is_ours,
    normalization,
    writes_to_input,
)
from fusedconv.conversion.stages import (
    SERVED_DTYPES,
    Stage,
    activation_and_order,
    conv_keywords,
    described,
    joins,
    norm_of,
)

logger = logging.getLogger("fusedconv")

Backend = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]


def compile_pass(graph_module: GraphModule) -> GraphModule:
    """Replaces the chains of a graph by calls of our functions, in place, and returns it.

    What is replaced: transposed convolutions with the normalisation and activation behind them (in
    either order), and GroupNorms with the activation in front or behind, where nothing else reads
    what is between them. Normalisations are GroupNorm, InstanceNorm without running statistics,
    BatchNorm of inference, and LayerNorm of channels, between the two permutations that put them
    last and back or written out in arithmetic as Segment Anything has it. The graph is one that
    torch.compile hands to a backend, or the module of an exported program; its nodes know what
    tensors they compute (``example_value`` or ``val`` in their meta), else convolutions and
    GroupNorms are not recognised for what they are and stay. Each chain is logged (logger
    ``fusedconv``, level DEBUG).

    Raises TypeError where ``graph_module`` is no torch.fx.GraphModule.
    """
    rewrite(graph_module)
    return graph_module


class Found(NamedTuple):
    """A chain of a graph, or why something behind one is not in it, as text; ``place`` is the
    module that its first operation is in, by its name in the module that was called, "" for that
    itself."""

    place: str
    text: str


class Rewriting(NamedTuple):
    """What was done to a graph: the chains that calls of ours replace, and what was refused."""

    replaced: list[Found]
    refused: list[Found]


def rewrite(graph_module: GraphModule) -> Rewriting:
    """``compile_pass``, and what it did. Where it raises, the graph is as it was."""
    if not isinstance(graph_module, GraphModule):
        raise TypeError(
            f"graph_module: got {shown(graph_module)}, expected a GraphModule, as program.module() "
            "of an exported program"
        )
    before = _copied(graph_module.graph)
    try:
        done = _rewritten(graph_module.graph)
        if done.replaced:
            graph_module.graph.lint()
            graph_module.recompile()
    except BaseException:
        graph_module.graph = before
        raise
    return done


def _copied(graph: Graph) -> Graph:
    copied = Graph(tracer_cls=graph._tracer_cls)
    result: Any = copied.graph_copy(graph, {}, return_output_node=True)
    if result is not None:
        value, output = result
        copied.output(value, output.type).meta = dict(output.meta)
    copied.set_codegen(graph._codegen)
    return copied


def _rewritten(graph: Graph) -> Rewriting:
    done = Rewriting([], [])
    for node in list(graph.nodes):
        if node._erased:
            continue
        chain = _chain_from(node)
        if chain is None:
            continue
        if chain.refusal is not None:
            refusal = f"{chain}, not fused with {chain.refusal}"
            done.refused.append(Found(chain.place, refusal))
        if chain.is_new:
            done.replaced.append(Found(chain.place, str(chain)))
            logger.debug("compile_pass: %s", chain)
            chain.replace(graph)
    return done


def compile_backend(inner: str | Backend = "inductor") -> Backend:
    """A backend for torch.compile: ``compile_pass``, then the backend ``inner``.

    ``torch.compile(model, backend=fusedconv.compile_backend())`` serves chains of code that nobody
    may edit; ``inner`` is a name that torch.compile takes, or a backend. Raises torch's errors
    where it knows no backend of that name.
    """
    from torch._dynamo.backends.registry import lookup_backend

    lower: Any = lookup_backend(inner) if isinstance(inner, str) else inner
    if not callable(lower):
        raise TypeError(f"inner: got {shown(inner)}, expected a backend's name or a callable")

    def backend(
        graph_module: GraphModule,
        inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> Any:
        compile_pass(graph_module)
        if inner == "inductor":
            # Which torch.compile does itself where it knows that this is the backend.
            modes = {} if mode in (None, "default") else torch._inductor.list_mode_options(mode)
            patches = {**modes, **(options or {})}
            return lower(graph_module, inputs, config_patches=patches)
        given = {"mode": mode, "options": options}
        return lower(graph_module, inputs, **{k: v for k, v in given.items() if v is not None})

    return backend


# ---- chains --------------------------------------------------------------------------------------


class _Chain:
    """Nodes that one call replaces: ``nodes`` in order, the last is the result."""

    def __init__(
        self, input: Any, conv: Convolution | None, nodes: list[Node], stages: list[Stage]
    ) -> None:
        self.input = input
        self.conv = conv
        self.nodes = nodes
        self.stages = stages
        self.refusal: Refusal | None = None
        self._head = len(nodes)

    @property
    def is_new(self) -> bool:
        """Whether its nodes are more than one call of ours."""
        return len(self.nodes) > self._head or not is_ours(self.nodes[0])

    @property
    def place(self) -> str:
        """See ``Found``."""
        stack = list(self.nodes[0].meta.get("nn_module_stack", {}).values())
        path: str = stack[-1][0] if stack else ""
        # torch.compile writes L['self'] for the module that it was called with.
        return re.sub(r"^L\['\w+'\]\.?", "", path)

    def __str__(self) -> str:
        head = []
        if self.conv is not None:
            output = example(self.conv.output)
            head = ["conv_transpose" if output is None else f"conv_transpose{output.dim() - 2}d"]
        return described(*head, *self.stages)

    def add(self, match: Match) -> None:
        self.stages += match.stages
        self.nodes += match.nodes

    def replace(self, graph: Graph) -> None:
        last = self.nodes[-1]
        with graph.inserting_after(last):
            call = self._call(graph)
        call.meta = dict(last.meta)
        last.replace_all_uses_with(call)
        for node in reversed(self.nodes):
            for user in list(node.users):
                graph.erase_node(user)  # outputs that nobody reads
            graph.erase_node(node)

    def _call(self, graph: Graph) -> Node:
        if self.conv is None:
            norm = norm_of(self.stages)
            assert norm is not None
            name, order = activation_and_order(self.stages)
            arguments = (self.input, norm.num_groups, norm.weight, norm.bias, norm.eps)
            keywords: dict[str, Any] = {"activation": name, "order": order}
            return graph.call_function(functional.group_norm, arguments, keywords)
        keywords = conv_keywords(self.stages)
        keywords |= {name: self.conv.arguments[name] for name in OPTIONS}
        arguments = tuple(self.conv.arguments[name] for name in CONV_ARGUMENTS)
        return graph.call_function(functional.conv_transpose_act_norm, arguments, keywords)


def _served(value: Any) -> Any:
    """A node's tensor where our functions take one of its dtype, else None."""
    tensor = example(value)
    return tensor if tensor is not None and tensor.dtype in SERVED_DTYPES else None


def _chain_from(node: Node) -> _Chain | None:
    """The chain that begins with ``node``, as long as it can be."""
    conv = convolution(node)
    if conv is not None:
        input = conv.arguments["input"]
        tensor = _served(input)
        if tensor is None:
            return None
        weight = example(conv.arguments["weight"])
        axes = 0 if weight is None else weight.dim() - 2
        nodes = [node] if conv.output is node else [node, conv.output]
        chain = _Chain(input, conv, nodes, conv.stages)
        # Without a batch the channels would be a norm's batch.
        _extend(chain, axes if tensor.dim() == axes + 2 else 0)
        return chain
    match = normalization(node, 0)
    if isinstance(match, Match):
        return _normalised(match)
    first = activation(node)
    if first is not None and not writes_to_input(node):
        user = _sole_reader(node)
        match = None if user is None else normalization(user, 0)
        if isinstance(match, Match) and len(match.stages) == 1 and _reads(match, node):
            return _normalised(first, match)
    return None


def _normalised(head: Match, *behind: Match) -> _Chain | None:
    """A chain without a convolution, which only GroupNorms make."""
    stages = [stage for match in (head, *behind) for stage in match.stages]
    input = head.input
    norm, tensor = norm_of(stages), _served(input)
    if norm is None or norm.kind != "group" or tensor is None or tensor.dim() < 2:
        return None
    chain = _Chain(input, None, head.nodes, head.stages)
    for match in behind:
        chain.add(match)
    _extend(chain, 0)
    return chain


def _extend(chain: _Chain, axes: int) -> None:
    """Adds the stages behind a chain that nothing else reads; norms where there are ``axes``.
    Notes why the next is none."""
    while True:
        end = chain.nodes[-1]
        found = {user: _stage(user, axes) for user in end.users}
        user, match = next(
            ((user, match) for user, match in found.items() if match is not None), (None, None)
        )
        if user is None or match is None:
            return
        reason = ""
        if isinstance(match, Refusal):
            chain.refusal = match
            return
        if any(reader not in match.nodes for reader in end.users):
            reason = f"its input is read {len(end.users)} times"
        elif not joins(chain.stages, match.stages):
            reason = "it is one stage too many"
        elif not _reads(match, end) or not _adjacent(end, match.nodes):
            reason = "other operations stand in between"
        if reason:
            chain.refusal = Refusal(str(match), reason)
            return
        chain.add(match)


def _stage(node: Node, axes: int) -> Match | Refusal | None:
    """The stage that begins with ``node``, or why it is none."""
    match = activation(node)
    return match if match is not None or not axes else normalization(node, axes)


def _sole_reader(node: Node) -> Node | None:
    """The node that alone reads ``node``. Nothing is computed between them, which might write to
    what either reads."""
    if len(node.users) != 1:
        return None
    (user,) = node.users
    return user if _adjacent(node, [user]) else None


def _reads(match: Match, node: Node) -> bool:
    """Whether stages take ``node`` for their input, and for nothing else."""
    first = match.nodes[0]
    read = [argument is node for argument in (*first.args, *first.kwargs.values())]
    return match.input is node and sum(read) == 1


def _adjacent(node: Node, nodes: list[Node]) -> bool:
    """Whether ``nodes`` come behind ``node`` in order, with nothing among them that computes
    tensors."""
    ends = set(nodes)
    while ends:
        node = node.next
        if node in ends:
            ends.remove(node)
        elif not (
            node.op in ("placeholder", "get_attr")
            or node.target is operator.getitem
            or (node.op == "call_method" and node.target == "item")
        ):
            return False
    return True
