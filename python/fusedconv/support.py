"""The one form of a refusal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Support:
    """Whether a kernel serves a problem; true or false, with a reason where false."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok

    @staticmethod
    def yes() -> Support:
        return Support(True)

    @staticmethod
    def no(reason: str) -> Support:
        return Support(False, reason)

    @staticmethod
    def of(compiled: Any) -> Support:
        """What a compiled configuration says of itself."""
        return Support(bool(compiled), compiled.reason)
