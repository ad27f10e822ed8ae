"""account: what became of each entry of a checkpoint: ignored by a named rule, or changed within a bound.

An entry is a tensor, a value, an empty node, or a file or folder beside them. What a format finds next to the tensors
and does not read, what the target cannot hold and what the user leaves out are all entries of this one kind, in plans,
receipts and in what is printed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from wherry.core.keypath import parse, render
from wherry.core.units import plural

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from wherry.core.keypath import KeyPath

OTHERS = "others"  # the rule for weights that the checkpoint as it is read does not include
COMPANIONS = "companions"  # the rule for companion files
ITEMS = "items"  # the rule for the other items of a step
TRAINING_STATE = "training state"  # the rule for what a trainer saves beside the weights
FILES = "files"  # the rule for files and folders without weights
_MOST = 8  # entries of one node that are listed one by one
_NODE = re.compile(r"[/.]")


@dataclass(frozen=True, slots=True)
class IgnoredEntry:
    """A source entry that is not converted.

    Attributes:
        path: its key path, or the parts of its file name relative to the checkpoint.
        rule: the rule that ignores it.
        reason: why, for people.
        what: what it is, for people.
        weights: whether it holds weights that nothing else of the checkpoint has, as far as names say: it may stay
            behind only if the user asks for it.
    """

    path: KeyPath
    rule: str
    reason: str
    what: str = "tensor"
    weights: bool = False

    @property
    def name(self) -> str:
        """Its printed path."""
        return render(self.path)

    def to_json(self) -> dict[str, str]:
        """As plans and receipts list it."""
        return {"path": self.name, "rule": self.rule, "what": self.what, "reason": self.reason}


def ignored_file(name: str, rule: str, what: str, reason: str, *, weights: bool = False) -> IgnoredEntry:
    """The entry of a file or folder, by its name relative to the checkpoint."""
    return IgnoredEntry(tuple(name.split("/")), rule, reason, what, weights)


def fold_entries(entries: Iterable[IgnoredEntry]) -> list[IgnoredEntry]:
    """The entries as they are printed and recorded: many of one node that are ignored alike are one row."""
    groups: dict[tuple[str, ...], list[IgnoredEntry]] = {}
    for one in entries:
        key = (one.rule, one.reason, one.what, _NODE.split(one.name, maxsplit=1)[0])
        groups.setdefault(key, []).append(one)
    return [row for rows in groups.values() for row in (rows if len(rows) <= _MOST else [_one_row(rows)])]


def _one_row(rows: Sequence[IgnoredEntry]) -> IgnoredEntry:
    names = [one.name for one in rows]
    first, last = min(names), max(names)
    same = next(
        (at for at, letters in enumerate(zip(first, last, strict=False)) if len({*letters}) > 1), len(first)
    )
    start = first[:same].rstrip("~")  # no half of an escape
    return replace(rows[0], path=parse(f"{start}…"), what=plural(len(rows), rows[0].what))


class Bound(NamedTuple):
    """Limit of a round trip: |restored - value| ≤ relative × |value| + absolute, without overflow or underflow.

    `block` is a share of the largest magnitude of the block of values that a scale belongs to, and is added.
    """

    relative: float = 0.0
    absolute: float = 0.0
    block: float = 0.0


def bound_to_json(bound: Bound) -> dict[str, float]:
    """As plans list it."""
    return {
        "relative": bound.relative,
        "absolute": bound.absolute,
        **({"block": bound.block} if bound.block else {}),
    }
