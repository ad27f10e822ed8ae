"""account: what became of each entry of a checkpoint: ignored by a named rule, or changed within a bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from wherry.core.keypath import KeyPath


@dataclass(frozen=True, slots=True)
class IgnoredEntry:
    """A source entry that is not converted.

    Attributes:
        path: its key path (a companion's name as one part).
        rule: the rule that ignores it.
        reason: why, for people.
    """

    path: KeyPath
    rule: str
    reason: str


class Bound(NamedTuple):
    """Limit of a round trip: |restored - value| ≤ relative × |value| + absolute, without overflow or underflow."""

    relative: float = 0.0
    absolute: float = 0.0
