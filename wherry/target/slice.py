"""Slice: what one of several processes writes of a target."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from wherry.core.tensorspec import Span


def _no_guard() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Slice:
    """Some files of a target, or a region of one.

    Attributes:
        files: their names, relative to the target; `.` for a target that is one file.
        region: the bytes of the only file that are written; None if files are written whole.
        guard: called before bytes of a region are written; raises if somebody else has written them. Where a store
            keeps equal parts apart by itself, it does nothing.
    """

    files: frozenset[str]
    region: Span | None = None
    guard: Callable[[], None] = _no_guard

    def within(self, folder: str) -> Slice:
        """The files in a folder of the target, with their names relative to it."""
        prefix = f"{folder}/" if folder else ""
        names = (name.removeprefix(prefix) for name in self.files if name.startswith(prefix))
        return replace(self, files=frozenset(names))
