"""Classes of converted modules: a mixin of ours in front of the module's own class.

A module is converted where it is, by its ``__class__``: parameters, buffers, hooks and children
stay its own, so that state dict keys, optimizers and references to it stay valid, and
``isinstance`` holds as before. Nothing is written into it, which makes copies and replicas
converted too.
"""

from __future__ import annotations

import copyreg
from typing import Any, ClassVar, NoReturn, TypeGuard

from torch import nn
from torch.nn.utils import parametrize

from fusedconv.composing import watch


class Converted(nn.Module):
    """What mixins derive from. ``original`` is the class that the module had."""

    original: ClassVar[type[nn.Module]]
    _mixin: ClassVar[type[Any]]

    @classmethod
    def members(cls, original: type[nn.Module]) -> dict[str, Any]:
        """What a converted ``original`` has beside what the mixin has."""
        return {}

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class was made while the program ran: pickles name what it was made of.
        reduced: Any = super().__reduce_ex__(protocol)
        make, arguments, *rest = reduced
        if make is copyreg.__newobj__:  # type: ignore[attr-defined]
            return (_blank, (self._mixin, self.original), *rest)
        return (make, arguments, *rest)

    def __prepare_scriptable__(self) -> NoReturn:
        raise NotImplementedError(
            f"torch.jit.script: got a converted {self.original.__name__}, expected the original; "
            "fusedconv.revert restores it"
        )


_made: dict[tuple[type[Converted], type[nn.Module]], type[Converted]] = {}


def converted_class(mixin: type[Converted], original: type[nn.Module]) -> type[Converted]:
    """``mixin`` in front of ``original``; the same class each time."""
    made = _made.get((mixin, original))
    if made is None:
        own = {"original": original, "_mixin": mixin, "__module__": mixin.__module__}
        made = type(
            f"Converted{original.__name__}",
            (mixin, original),
            {**own, **mixin.members(original)},
        )
        watch(made)
        _made[mixin, original] = made
    return made


def _blank(mixin: type[Converted], original: type[nn.Module]) -> nn.Module:
    cls: Any = converted_class(mixin, original)
    module: nn.Module = cls.__new__(cls)
    return module


def is_converted(kind: type[nn.Module]) -> TypeGuard[type[Converted]]:
    """Whether a class is one of ``converted_class``; what others derive from these is not."""
    return "original" in vars(kind) and issubclass(kind, Converted)


def original_type(module: nn.Module) -> type[nn.Module]:
    """The class that a module had before it was converted or parametrised."""
    kind = type(module)
    if is_converted(kind):
        return kind.original
    if parametrize.is_parametrized(module):
        return kind.__bases__[0]
    return kind


def convert_class(module: nn.Module, mixin: type[Converted]) -> None:
    module.__class__ = converted_class(mixin, type(module))


def revert_class(module: nn.Module) -> bool:
    """Whether ``module`` was converted; it has its own class again."""
    kind = type(module)
    if not is_converted(kind):
        return False
    module.__class__ = kind.original
    return True
