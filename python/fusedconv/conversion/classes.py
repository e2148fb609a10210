"""Classes of converted modules: a mixin of ours in front of the module's own class.

A module is converted where it is, by its ``__class__``: parameters, buffers, hooks and children
stay its own, so that state dict keys, optimizers and references to it stay valid, and
``isinstance`` holds as before. Nothing is written into it, which makes copies and replicas
converted too.
"""

from __future__ import annotations

import copyreg
from typing import Any, ClassVar, NoReturn, TypeGuard
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.utils import parametrize

from fusedconv.composing import watch


class Converted(nn.Module):
    """What mixins derive from; ``_fusedconv_original`` is the class that the module had, and
    ``_fusedconv_class`` the converted one itself. Names are those that no module has for a
    parameter, buffer or child, which attributes of classes hide."""

    _fusedconv_class: ClassVar[type[Any]]
    _fusedconv_original: ClassVar[type[nn.Module]]
    _fusedconv_mixin: ClassVar[type[Any]]

    @classmethod
    def _fusedconv_members(cls, original: type[nn.Module]) -> dict[str, Any]:
        """What a converted ``original`` has beside what the mixin has."""
        return {}

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class was made while the program ran: pickles name what it was made of.
        reduced: Any = super().__reduce_ex__(protocol)
        make, arguments, *rest = reduced
        if make is copyreg.__newobj__ and is_converted(type(self)):  # type: ignore[attr-defined]
            return (_blank, (self._fusedconv_mixin, self._fusedconv_original), *rest)
        return (make, arguments, *rest)

    def __prepare_scriptable__(self) -> NoReturn:
        raise NotImplementedError(
            f"torch.jit.script: got a converted {self._fusedconv_original.__name__}, expected "
            "the original; fusedconv.revert restores it"
        )


_made: dict[tuple[type[Converted], type[nn.Module]], type[Converted]] = {}


def converted_class(mixin: type[Converted], original: type[nn.Module]) -> type[Converted]:
    """``mixin`` in front of ``original``; the same class each time."""
    made = _made.get((mixin, original))
    if made is None:
        own = {
            "_fusedconv_original": original,
            "_fusedconv_mixin": mixin,
            "__module__": mixin.__module__,
        }
        made = type(
            f"Converted{original.__name__}",
            (mixin, original),
            {**own, **mixin._fusedconv_members(original)},
        )
        made._fusedconv_class = made
        watch(made)
        _made[mixin, original] = made
    return made


def _blank(mixin: type[Converted], original: type[nn.Module]) -> nn.Module:
    cls: Any = converted_class(mixin, original)
    module: nn.Module = cls.__new__(cls)
    return module


def is_converted(kind: type[nn.Module]) -> TypeGuard[type[Converted]]:
    """Whether a class is one of ``converted_class``; what others derive from these is not."""
    # Not by vars(), which torch.compile of torch 2.6 does not follow.
    return getattr(kind, "_fusedconv_class", None) is kind


def converted_type(module: nn.Module) -> type[Converted] | None:
    """The class of ours that a module has, parametrised or not; None where it has none."""
    kind = type(module)
    if not is_converted(kind) and parametrize.is_parametrized(module):
        kind = kind.__bases__[0]
    return kind if is_converted(kind) else None


def original_type(module: nn.Module) -> type[nn.Module]:
    """The class that a module had before it was converted or parametrised, in either order."""
    kind = _unconverted(type(module))
    if parametrize.is_parametrized(module):
        kind = _unconverted(kind.__bases__[0])
    return kind


def _unconverted(kind: type[nn.Module]) -> type[nn.Module]:
    return kind._fusedconv_original if is_converted(kind) else kind


def convert_class(module: nn.Module, mixin: type[Converted]) -> None:
    module.__class__ = converted_class(mixin, type(module))


def revert_class(module: nn.Module) -> None:
    """Gives ``module`` the class that it had, where it was converted."""
    kind = reverted_type(type(module))
    if kind is not type(module):
        module.__class__ = kind


#: By what others have made of classes of ours.
_reverted: WeakKeyDictionary[type[Any], type[Any]] = WeakKeyDictionary()


def reverted_type(kind: type[Any]) -> type[Any]:
    """The class without ours among its bases: ``kind`` itself where there is none. One that was
    made from ours, as parametrisations and FSDP2 do, is made anew from the original.

    Raises TypeError where code refers to the class that is to be made anew.
    """
    if not issubclass(kind, Converted):
        return kind
    if is_converted(kind):
        return kind._fusedconv_original
    made = _reverted.get(kind)
    if made is None:
        if any(map(_refers_to_class, vars(kind).values())):
            raise TypeError(
                f"got {kind.__qualname__}, a class with code of its own made from a converted one, "
                "expected a converted class"
            )
        bases = tuple(map(reverted_type, kind.__bases__))
        name = kind.__name__
        for base, original in zip(kind.__bases__, bases, strict=True):
            name = name.replace(base.__name__, original.__name__)
        metaclass: Any = type(kind)
        made = _reverted[kind] = metaclass(name, bases, dict(vars(kind)))
    return made


def _refers_to_class(member: object) -> bool:
    """Whether a member of a class calls ``super()``, say, by which it is bound to that class."""
    functions = (
        (member.fget, member.fset, member.fdel)
        if isinstance(member, property)
        else (getattr(member, "__func__", member),)
    )
    codes = (getattr(each, "__code__", None) for each in functions)
    return any("__class__" in code.co_freevars for code in codes if code is not None)
