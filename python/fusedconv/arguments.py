"""Checks of single arguments, each raising ``name: got ..., expected ...``.

What torch accepts is accepted: anything with ``__index__`` for an integer, one value or a sequence
of one value for all axes. A bool is no integer.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def shown(value: object) -> str:
    """A value as a message shows it: tensors by what they are, anything long cut."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _at_least(least: int | None) -> str:
    if least is None:
        return ""
    return {0: " of at least 0", 1: " of at least 1"}.get(least, f" of at least {least}")


_INT64 = 2**63  # torch's integers end before it


def _index(value: object) -> int | None:
    """The value as an int of 64 bits, None where it is none. A symbolic integer stays symbolic."""
    if isinstance(value, torch.SymInt):
        return value  # type: ignore[return-value]
    if isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool):
        return None
    if type(value).__name__ in ("bool_", "bool"):  # numpy's, whose __index__ is deprecated
        return None
    try:
        index = operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        return None
    return index if -_INT64 <= index < _INT64 else None


def integer(name: str, value: object, least: int | None = None, *, optional: bool = False) -> int:
    """``value`` as an int of at least ``least``; TypeError or ValueError where it is none."""
    if type(value) is int and (-_INT64 if least is None else least) <= value < _INT64:
        return value
    result = _index(value)
    expected = f"an integer{_at_least(least)}" + (" or None" if optional else "")
    if result is None:
        raise TypeError(f"{name}: got {shown(value)}, expected {expected}")
    if least is not None and result < least:
        raise ValueError(f"{name}: got {shown(value)}, expected {expected}")
    return result


def integers(name: str, value: object, axes: int, least: int | None = None) -> tuple[int, ...]:
    """``value``, one integer or a sequence of one or of ``axes``, as ``axes`` ints."""
    lowest = -_INT64 if least is None else least
    if type(value) is int:  # what calls mostly pass comes first
        if lowest <= value < _INT64:
            return (value,) * axes
    elif type(value) is tuple and len(value) == axes:
        for part in value:
            if type(part) is not int or not lowest <= part < _INT64:
                break
        else:
            return value
    expected = f"{axes} integer{'s' * (axes != 1)}{_at_least(least)}" + (
        " or one for all axes" if axes != 1 else ""
    )
    single = _index(value)
    if single is not None:
        parts: list[Any] = [single] * axes
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        parts = [_index(part) for part in value]
        if None in parts:
            raise TypeError(f"{name}: got {shown(value)}, expected {expected}")
        if len(parts) == 1:
            parts *= axes
    else:
        raise TypeError(f"{name}: got {shown(value)}, expected {expected}")
    if len(parts) != axes or any(part < lowest for part in parts):
        raise ValueError(f"{name}: got {shown(value)}, expected {expected}")
    return tuple(parts)


def extents(name: str, value: object) -> list[int]:
    """``value``, a sequence of integers of any length, as a list."""
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        parts = [_index(part) for part in value]
        if None not in parts:
            return parts  # type: ignore[return-value]
    raise TypeError(f"{name}: got {shown(value)}, expected a sequence of integers or None")


def finite(name: str, value: object) -> float:
    """``value`` as a finite float; TypeError or ValueError where it is none."""
    if type(value) is not float:
        if isinstance(value, (bool, str, bytes)) or not (
            hasattr(value, "__float__") or hasattr(value, "__index__")
        ):
            raise TypeError(f"{name}: got {shown(value)}, expected a finite number")
        try:
            number = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError, RuntimeError):
            raise TypeError(f"{name}: got {shown(value)}, expected a finite number") from None
        value = number
    # A compiler may stand a symbol for it; then the fake implementations check the value.
    if not torch.compiler.is_compiling() and not math.isfinite(value):
        raise ValueError(f"{name}: got {value}, expected a finite number")
    return value


def flag(name: str, value: object) -> bool:
    """``value``, which must be a bool (or 0 or 1, as torch's modules take)."""
    if isinstance(value, bool):
        return value
    if type(value) is int and value in (0, 1):
        return bool(value)
    raise TypeError(f"{name}: got {shown(value)}, expected a bool")


def choice(
    name: str, value: object, allowed: Sequence[str], *, optional: bool = False
) -> str | None:
    """``value``, which must be one of the names, or None where that is one too."""
    if value is None and optional:
        return None
    if isinstance(value, str) and value in allowed:
        return value
    names = ", ".join(map(repr, allowed))
    kind = ValueError if isinstance(value, str) else TypeError
    raise kind(
        f"{name}: got {shown(value)}, expected {'None or ' if optional else ''}one of {names}"
    )


def tensor(name: str, value: object, *, optional: bool = False) -> None:
    """Raises TypeError where ``value`` is no tensor, nor None where that may be."""
    if isinstance(value, Tensor) or (optional and value is None):
        return
    raise TypeError(
        f"{name}: got {type(value).__name__}, expected torch.Tensor{' or None' * optional}"
    )
