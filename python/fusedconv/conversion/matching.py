"""What the nodes of a graph are: convolutions, normalisations and activations, whoever wrote it.

Graphs come from torch.compile and torch.fx.symbolic_trace (torch's functions and methods) or from
torch.export (operators of aten). A node whose arguments are not understood is no match.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn import functional as F

from fusedconv.conversion.stages import Normalization, Stage, described

aten = torch.ops.aten
_fusedconv = torch.ops.fusedconv

#: A target's parameters in order, with their defaults.
_Signature = tuple[tuple[str, Any], ...]
_NEEDED = object()


def _signature(text: str, **defaults: Any) -> _Signature:
    return tuple((name, defaults.get(name, _NEEDED)) for name in text.split())


def _bound(node: Node, signature: _Signature) -> dict[str, Any] | None:
    """A node's arguments by name; None where they are not what the signature says."""
    names = [name for name, _ in signature]
    if len(node.args) > len(names) or not set(node.kwargs) <= set(names):
        return None
    values = {**dict(signature), **dict(zip(names, node.args, strict=False)), **node.kwargs}
    return None if any(value is _NEEDED for value in values.values()) else values


# ---- convolutions --------------------------------------------------------------------------------

_CONV = _signature(
    "input weight bias stride padding output_padding groups dilation",
    bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1,
)  # fmt: skip
_CONVOLUTION = _signature(
    "input weight bias stride padding dilation transposed output_padding groups"
)
_FUSED = _signature(
    "input weight bias stride padding output_padding dilation groups activation order num_groups "
    "norm_weight norm_bias eps precision output_dtype norm save recompute", recompute=False,
)  # fmt: skip
_TRACED = tuple(pair for pair in _FUSED if pair[0] != "save")
_CONV_TARGETS: dict[Any, _Signature] = {
    torch.conv_transpose1d: _CONV,
    torch.conv_transpose2d: _CONV,
    torch.conv_transpose3d: _CONV,
    aten.conv_transpose1d.default: _CONV,
    aten.conv_transpose2d.input: _CONV,
    aten.conv_transpose3d.input: _CONV,
    aten.convolution.default: _CONVOLUTION,
    _fusedconv.conv_transpose_act_norm: _FUSED,
    _fusedconv.conv_transpose_act_norm.default: _FUSED,
    _fusedconv.conv_transpose_act_norm_traced: _TRACED,
    _fusedconv.conv_transpose_act_norm_traced.default: _TRACED,
}
#: The arguments of ``functional.conv_transpose_act_norm`` that say what is convolved.
CONV_ARGUMENTS = tuple(name for name, _ in _CONV)
#: Those that say how.
OPTIONS = ("precision", "recompute")


class Convolution(NamedTuple):
    """A transposed convolution: ``arguments`` are CONV_ARGUMENTS and OPTIONS, ``output`` is the
    node of its result. ``stages`` are those that it has already, where it is a call of ours."""

    arguments: dict[str, Any]
    output: Node
    stages: list[Stage]


def convolution(node: Node) -> Convolution | None:
    if node.op != "call_function" or node.target not in _CONV_TARGETS:
        return None
    found = _bound(node, _CONV_TARGETS[node.target])
    if found is None or not found.get("transposed", True):
        return None
    output: Node | None = node
    stages: list[Stage] = []
    if is_ours(node):
        if found["output_dtype"] is not None:
            return None
        output = _first_output(node) if "save" in found else node
        groups = found["num_groups"] or None
        kind = found["norm"] or ("group" if groups else None)
        norm = (found["norm_weight"], found["norm_bias"], found["eps"], groups)
        stages = _stages_of(found, None if kind is None else Normalization(kind, *norm))
    arguments = {name: found[name] for name in CONV_ARGUMENTS}
    # Extents that are computed are left to those who compute them.
    geometry = [found[name] for name in CONV_ARGUMENTS[3:]]
    if output is None or _holds_nodes(geometry):
        return None
    options = {"precision": found.get("precision"), "recompute": found.get("recompute", False)}
    return Convolution({**arguments, **options}, output, stages)


def _stages_of(found: dict[str, Any], norm: Normalization | None) -> list[Stage]:
    """The stages of a call of ours."""
    name = found["activation"]
    activations: list[Stage] = [] if name == "identity" else [name]
    norms: list[Stage] = [] if norm is None else [norm]
    return norms + activations if found["order"] == "norm_act" else activations + norms


def is_ours(node: Node) -> bool:
    """Whether a node calls one of our operators already."""
    return "fusedconv" in str(node.target)


def _holds_nodes(values: Any) -> bool:
    if isinstance(values, list | tuple):
        return any(map(_holds_nodes, values))
    return isinstance(values, Node)


def _first_output(node: Node) -> Node | None:
    """The result of an operator with several outputs of which the first is read, and once."""
    read = [user for user in node.users if user.users]
    if len(read) == 1 and read[0].target is operator.getitem and read[0].args == (node, 0):
        return read[0]
    return None


# ---- normalisations ------------------------------------------------------------------------------

_GROUP = _signature(
    "input num_groups weight bias eps cudnn_enabled", weight=None, bias=None, eps=1e-5,
    cudnn_enabled=True,
)  # fmt: skip
_FUSED_GROUP = _signature("input num_groups weight bias eps activation order output_dtype")
_INSTANCE = _signature(
    "input running_mean running_var weight bias use_input_stats momentum eps",
    running_mean=None, running_var=None, weight=None, bias=None, use_input_stats=True,
    momentum=0.1, eps=1e-5,
)  # fmt: skip
_INSTANCE_OPERATOR = _signature(
    "input weight bias running_mean running_var use_input_stats momentum eps cudnn_enabled"
)
_BATCH = _signature(
    "input running_mean running_var weight bias training momentum eps",
    weight=None, bias=None, training=False, momentum=0.1, eps=1e-5,
)  # fmt: skip
_BATCH_OPERATOR = _signature(
    "input weight bias running_mean running_var training momentum eps cudnn_enabled"
)
_LAYER = _signature(
    "input normalized_shape weight bias eps cudnn_enable",
    weight=None, bias=None, eps=1e-5, cudnn_enable=True,
)  # fmt: skip
_MEAN = _signature("input dim keepdim", keepdim=False)
_NORM_TARGETS: dict[Any, tuple[str, _Signature]] = {
    F.group_norm: ("group", _GROUP),
    torch.group_norm: ("group", _GROUP),
    aten.group_norm.default: ("group", _GROUP),
    _fusedconv.group_norm: ("group", _FUSED_GROUP),
    _fusedconv.group_norm.default: ("group", _FUSED_GROUP),
    F.instance_norm: ("instance", _INSTANCE),
    torch.instance_norm: ("instance", _INSTANCE_OPERATOR),
    aten.instance_norm.default: ("instance", _INSTANCE_OPERATOR),
    F.batch_norm: ("affine", _BATCH),
    torch.batch_norm: ("affine", _BATCH_OPERATOR),
    aten.batch_norm.default: ("affine", _BATCH_OPERATOR),
}
_LAYER_TARGETS = (F.layer_norm, torch.layer_norm, aten.layer_norm.default)


class Match(NamedTuple):
    """Stages: ``nodes`` from that which reads ``input`` to ``nodes[-1]``, which is the result.
    They are one, or a normalisation and an activation in a call of ours."""

    stages: list[Stage]
    nodes: list[Node]
    input: Any

    def __str__(self) -> str:
        return described(*self.stages)


class Refusal(NamedTuple):
    """What may not be a stage, and why."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def normalization(node: Node, axes: int) -> Match | Refusal | None:
    """The normalisation that begins with ``node``, None where it is none. ``axes`` is the number of
    spatial axes."""
    if node.op == "call_function" and node.target in _NORM_TARGETS:
        kind, signature = _NORM_TARGETS[node.target]
        found = _bound(node, signature)
        name = "batch_norm" if kind == "affine" else f"{kind}_norm"
        match = _normalization(node, kind, found) if found else "its arguments are not understood"
        return match if isinstance(match, Match) else Refusal(name, match)
    order = _permutation(node)
    if order == (0, *range(2, axes + 2), 1):
        return _layer_norm(node, axes)
    return _written_layer_norm(node, axes)


def _normalization(node: Node, kind: str, found: dict[str, Any]) -> Match | str:
    weight, bias, eps = found["weight"], found["bias"], _number(found["eps"])
    if eps is None or _holds_nodes(found.get("num_groups")):
        return "its eps or its groups are computed"
    if kind == "group":
        norm = Normalization(kind, weight, bias, eps, found["num_groups"])
        if not is_ours(node):
            return Match([norm], [node], found["input"])
        output = _first_output(node)
        if output is None or found["output_dtype"] is not None:
            return "its statistics are read, or its dtype is not the input's"
        return Match(_stages_of(found, norm), [node, output], found["input"])
    mean, var = found["running_mean"], found["running_var"]
    if kind == "instance":
        if mean is not None or found["use_input_stats"] is not True:
            return "it has running statistics"
        norm = Normalization(kind, weight, bias, eps)
        return Match([norm], [node], found["input"])
    if found["training"] is not False:
        return "it is in training mode, and fused in evaluation mode only"
    norm = Normalization(kind, weight, bias, eps, None, mean, var)
    return Match([norm], [node], found["input"])


def _layer_norm(node: Node, axes: int) -> Match | None:
    """A LayerNorm of channels, between a permutation that puts them last and one that undoes it."""
    norm = _only_user(node)
    back = None if norm is None else _only_user(norm)
    if norm is None or back is None or norm.target not in _LAYER_TARGETS:
        return None
    found = _bound(norm, _LAYER)
    if found is None or found["input"] is not node:
        return None
    eps = _number(found["eps"])
    if len(found["normalized_shape"]) != 1 or eps is None:
        return None
    if _permutation(back) != (0, axes + 1, *range(1, axes + 1)):
        return None
    stage = Normalization("layer", found["weight"], found["bias"], eps)
    return Match([stage], [node, norm, back], node.args[0])


def _written_layer_norm(mean: Node, axes: int) -> Match | None:
    """The same written out in arithmetic, as Segment Anything's code has it: centred over the root
    of the squares' mean plus eps, times weight plus bias."""
    averaged = _mean(mean)
    if averaged is None or len(mean.users) != 2:
        return None
    first, second = mean.users
    x = averaged["input"]
    for centred, divided in ((first, second), (second, first)):
        nodes: list[Node | None] = [mean, centred, divided]
        for matches in (
            _is_square,
            _is_mean,
            _is_sum,
            _is_root,
            _is_quotient,
            _is_product,
            _is_sum,
        ):
            last = nodes[-1] if len(nodes) > 3 else centred
            user = None if last is None else _only_user(last)
            nodes.append(user if user is not None and matches(user) else None)
        found = [node for node in nodes if node is not None]
        if len(found) < len(nodes):
            continue
        *_, variance, plus_eps, root, quotient, scaled, output = found
        eps = _number(_other(plus_eps, variance))
        weight = _of_channels(_other(scaled, quotient), axes)
        bias = _of_channels(_other(output, scaled), axes)
        if (
            centred.target is operator.sub
            and divided.target is operator.sub
            and centred.args == divided.args == (x, mean)
            and quotient.args == (divided, root)
            and len(divided.users) == 1
            and eps is not None
            and weight is not None
            and bias is not None
        ):
            return Match([Normalization("layer", weight, bias, eps)], found, x)
    return None


def _mean(node: Node) -> dict[str, Any] | None:
    """The arguments of a mean over channels."""
    is_method = node.op == "call_method" and node.target == "mean"
    found = _bound(node, _MEAN) if is_method or node.target is torch.mean else None
    if found is None or found["dim"] not in (1, (1,), [1]) or found["keepdim"] is not True:
        return None
    return found


def _is_mean(node: Node) -> bool:
    return _mean(node) is not None


def _is_square(node: Node) -> bool:
    return node.target in ("pow", torch.pow, operator.pow) and node.args[1:] == (2,)


def _is_sum(node: Node) -> bool:
    return node.target is operator.add


def _is_product(node: Node) -> bool:
    return node.target is operator.mul


def _is_root(node: Node) -> bool:
    return node.target in ("sqrt", torch.sqrt)


def _is_quotient(node: Node) -> bool:
    return node.target is operator.truediv


def _other(node: Node, known: Node) -> Any:
    """The operand of two that is not the known one."""
    left, right = node.args
    return right if left is known else left


def _of_channels(view: Any, axes: int) -> Any:
    """The tensor [K] that ``view`` is [K, 1, ...] of, None where it is not."""
    if not isinstance(view, Node) or view.target is not operator.getitem:
        return None
    tensor = example(view.args[0])
    index = (slice(None), *(None,) * axes)
    return (
        view.args[0] if view.args[1] == index and tensor is not None and tensor.dim() == 1 else None
    )


def _number(value: Any) -> float | None:
    """A float, or the value of one that torch.compile keeps symbolic, to which the graph is then
    bound by a guard; None where it is not known before the graph runs."""
    symbol = value.meta.get("example_value") if isinstance(value, Node) else value
    if not isinstance(symbol, int | float | torch.SymFloat):
        return None
    try:
        return float(symbol)
    except RuntimeError:  # of data-dependent symbols
        return None


def _only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _permutation(node: Node) -> tuple[int, ...] | None:
    is_method = node.op == "call_method" and node.target == "permute"
    is_function = node.op == "call_function" and node.target in (
        torch.permute,
        aten.permute.default,
    )
    if not (is_method or is_function) or node.kwargs:
        return None
    _, *dims = node.args
    if len(dims) == 1 and isinstance(dims[0], list | tuple):
        dims = list(dims[0])
    order = tuple(dim for dim in dims if isinstance(dim, int))
    return tuple(dim % len(order) for dim in order) if len(order) == len(dims) else None


# ---- activations ---------------------------------------------------------------------------------

_INPLACE = _signature("input inplace", inplace=False)
_APPROXIMATE = _signature("input approximate", approximate="none")


_ACTIVATION_TARGETS: dict[Any, tuple[str, _Signature]] = {
    **dict.fromkeys(
        (F.relu, F.relu_, torch.relu, torch.relu_, aten.relu.default, aten.relu_.default),
        ("relu", _INPLACE),
    ),
    **dict.fromkeys(("relu", "relu_"), ("relu", _INPLACE)),  # methods
    **dict.fromkeys((F.silu, aten.silu.default, aten.silu_.default), ("silu", _INPLACE)),
    **dict.fromkeys((F.gelu, aten.gelu.default), ("gelu", _APPROXIMATE)),
}


def activation(node: Node) -> Match | None:
    """The activation that ``node`` is."""
    if node.op not in ("call_function", "call_method") or node.target not in _ACTIVATION_TARGETS:
        return None
    name, signature = _ACTIVATION_TARGETS[node.target]
    found = _bound(node, signature)
    if found is None or found.get("approximate", "none") not in ("none", "tanh"):
        return None
    name = "gelu_tanh" if found.get("approximate") == "tanh" else name
    return Match([name], [node], found["input"])


def writes_to_input(node: Node) -> bool:
    """Whether an activation's node computes in place."""
    name = getattr(node.target, "__name__", str(node.target)).partition(".")[0]
    return name.endswith("_") or node.kwargs.get("inplace") is True or True in node.args[1:]


# ---- tensors -------------------------------------------------------------------------------------


def example(value: Any) -> Tensor | None:
    """The tensor, of no memory, that a graph's maker noted for what a node computes."""
    if not isinstance(value, Node):
        return None
    for key in ("example_value", "val"):
        if isinstance(value.meta.get(key), Tensor):
            tensor: Tensor = value.meta[key]
            return tensor
    return None
