"""Problems in JSON's types: what files of winners compare, and files of problems hold."""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
import typing
from collections.abc import Sequence
from typing import Any

import torch

from fusedconv.norms import Norm
from fusedconv.precision import DTYPES, PRECISIONS, dtype_name
from fusedconv.problem import (
    Activation,
    BackwardProblem,
    Bias,
    ConvTransposeGeometry,
    ForwardProblem,
    Problem,
    Residual,
)

_DTYPES = {dtype_name(DTYPES[precision]): DTYPES[precision] for precision in PRECISIONS}
_CLASSES: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (
        Activation, BackwardProblem, Bias, ConvTransposeGeometry, ForwardProblem, Norm, Residual,
    )
}  # fmt: skip
#: Of what a description lists: axes, stages, gradients.
_LONGEST = 64
_LARGEST = 2**63 - 1


def described(value: Any) -> Any:
    """A problem, or what it consists of, equal for equal problems in every process."""
    if dataclasses.is_dataclass(value):
        fields = {f.name: described(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"type": type(value).__name__, **fields}
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, tuple):
        return [described(each) for each in value]
    return value


def problem_of(description: object) -> Problem:
    """The problem that ``described`` has made a description of, which JSON may have been through.

    The description may be anybody's: nothing in it is evaluated, and ValueError names the field
    that does not hold. That fields fit one another is ``hypothetical.checked``'s to say.
    """
    problem: Problem = _read(Problem, description, "problem")
    return problem


def _expected(where: str, value: object, what: str) -> ValueError:
    text = repr(value)
    return ValueError(f"{where}: got {text[:80]}{'...' * (len(text) > 80)}, expected {what}")


@functools.cache
def _fields(cls: type[Any]) -> dict[str, Any]:
    """The types of a class's fields by name."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _read(kind: Any, value: Any, where: str) -> Any:
    """A value of a type, as the fields of problems have them."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _read_any(arguments, value, where)
    if origin is typing.Literal:
        if not isinstance(value, str) or value not in arguments:
            raise _expected(where, value, " or ".join(map(repr, arguments)))
        return value
    if origin in (tuple, frozenset):
        if not isinstance(value, list) or len(value) > _LONGEST:
            raise _expected(where, value, f"a list of at most {_LONGEST}")
        return origin(_read(arguments[0], each, f"{where}[{i}]") for i, each in enumerate(value))
    if kind is torch.dtype:
        if not isinstance(value, str) or value not in _DTYPES:
            raise _expected(where, value, " or ".join(map(repr, _DTYPES)))
        return _DTYPES[value]
    if kind is float:
        # An integer may be larger than floats are; nan is no smaller.
        if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
            raise _expected(where, value, "a finite number")
        return float(value)
    if kind is int:
        if type(value) is not int or not 0 <= value <= _LARGEST:
            raise _expected(where, value, f"an integer from 0 to {_LARGEST}")
        return value
    if kind in (bool, str):
        if type(value) is not kind:
            raise _expected(where, value, "true or false" if kind is bool else "a text")
        return value
    return _read_any((kind,), value, where)


def _read_any(kinds: Sequence[Any], value: Any, where: str) -> Any:
    """An object of one of several classes, which it names, or None where that is among them."""
    if value is None and type(None) in kinds:
        return None
    named = {each.__name__: each for each in kinds if each in _CLASSES.values()}
    if not named:  # a number, or None
        return _read(next(each for each in kinds if each is not type(None)), value, where)
    name = value.get("type") if isinstance(value, dict) else None
    if not isinstance(name, str) or name not in named:
        raise _expected(where, value, f"an object of type {' or '.join(named)}")
    cls = named[name]
    fields = _fields(cls)
    if set(value) != {"type", *fields}:
        raise _expected(where, sorted(map(str, value)), f"the fields type, {', '.join(fields)}")
    read = {each: _read(kind, value[each], f"{where}.{each}") for each, kind in fields.items()}
    try:
        return cls(**read)
    except ValueError as error:
        raise ValueError(f"{where}.{error}") from None
