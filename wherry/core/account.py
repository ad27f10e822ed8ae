"""account: what became of each entry of a checkpoint: ignored by a named rule, or changed within a bound.

An entry is a tensor, a value, an empty node, or a file or folder next to them. What a format finds next to the tensors
and does not read, what the target cannot hold and what the user leaves out are all entries of this one kind, in plans,
receipts and in what is printed.

A `Tally` sums what was counted of the values that one thread computes while a block of code runs. Whoever makes a move
opens a tally around it; what computes values adds to the open one (`wherry.layout.losses`). So the readers between them
need not know of it. Without an open tally nothing is counted.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import NamedTuple

from wherry.core.keypath import KeyPath, parse, render
from wherry.core.lazy_dataclass import dataclass
from wherry.core.units import plural

OTHERS = "others"  # the rule for weights that the checkpoint as it is read does not include
COMPANIONS = "companions"  # the rule for companion files
ITEMS = "items"  # the rule for the other items of a step
TRAINING_STATE = "training state"  # the rule for what a trainer saves in addition to the weights
FILES = "files"  # the rule for files and folders without weights
_MOST = 8  # entries of one node that are listed one by one
_NAMED = 3  # tensors that a sentence names
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
        """The entry's printed key path."""
        return render(self.path)

    def to_json(self) -> dict[str, str]:
        """The JSON form of an entry in plans and receipts."""
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
    """Limit of a round trip: |restored - value| ≤ relative × |value| + absolute, unless the stored value overflows.

    `block` is a share of the largest magnitude of the block of values that a scale belongs to, and is added.
    """

    relative: float = 0.0
    absolute: float = 0.0
    block: float = 0.0

    @property
    def exact(self) -> bool:
        """Whether every value comes back that neither over- nor underflows; `absolute` is for those that underflow."""
        return not (self.relative or self.block)

    def joined(self, other: Bound) -> Bound:
        """The least bound that covers both."""
        return Bound(*map(max, self, other))


def bound_to_json(bound: Bound) -> dict[str, float]:
    """The JSON form of a bound in plans."""
    return {
        "relative": bound.relative,
        "absolute": bound.absolute,
        **({"block": bound.block} if bound.block else {}),
    }


@dataclass(frozen=True, slots=True)
class Losses:
    """What a change of values did to them; counts of several parts of a tensor add up, in any order.

    A scale whose stored values lose nothing has an error of 0, and no value of it became infinite.

    Attributes:
        infinite: finite values that became infinite, or NaN in a type without infinities.
        zero: other values that became zero and do not come back.
        subnormal: values that became subnormal: they have fewer bits, and some processors read them as zero.
        nan: values that were NaN before.
        error: the largest |restored - value| of the values that are finite before and after.
    """

    infinite: int = 0
    zero: int = 0
    subnormal: int = 0
    nan: int = 0
    error: float = 0.0

    def __add__(self, other: Losses) -> Losses:
        """The losses of both parts."""
        return Losses(
            self.infinite + other.infinite,
            self.zero + other.zero,
            self.subnormal + other.subnormal,
            self.nan + other.nan,
            max(self.error, other.error),
        )

    def __bool__(self) -> bool:
        return self != Losses()

    @property
    def exact(self) -> bool:
        """Whether every value comes back."""
        return not (self.infinite or self.error)


NO_LOSSES = Losses()


def losses_notes(losses: Mapping[KeyPath, Losses]) -> list[str]:
    """A sentence for each kind of loss but rounding, for people: how many values, and of which tensors."""
    kinds = (
        ("infinite", "value", "became infinite"), ("zero", "value", "became zero"),
        ("subnormal", "value", "became subnormal"), ("nan", "NaN", "in the source"),
    )  # fmt: skip
    notes: list[str] = []
    for name, noun, words in kinds:
        counts = {path: getattr(one, name) for path, one in losses.items() if getattr(one, name)}
        if counts:
            notes.append(f"{plural(sum(counts.values()), noun)} {words}: {some_names(counts)}")
    return notes


def some_names(paths: Iterable[KeyPath]) -> str:
    """The first key paths, and how many more there are."""
    names = [render(path) for path in sorted(paths)]
    rest = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + rest


@dataclass(slots=True)
class Tally:
    """Counts what values have lost, while a move is carried out."""

    losses: Losses = NO_LOSSES


_OPEN: ContextVar[Tally | None] = ContextVar("tally", default=None)


@contextmanager
def counting() -> Generator[Tally]:
    """Around the making of one move: the tally of the values that this thread computes meanwhile."""
    tally = Tally()
    token = _OPEN.set(tally)
    try:
        yield tally
    finally:
        _OPEN.reset(token)


def open_tally() -> Tally | None:
    """The tally of the innermost block that runs; None if there is none."""
    return _OPEN.get()
