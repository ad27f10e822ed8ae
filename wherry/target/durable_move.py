"""DurableMove: a move whose bytes are durable, as a journal and the receipts of units record it.

Moves of small tensors, of which a large model has a hundred thousand, are recorded as columns.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple
from typing import Any, NamedTuple, Protocol, TypeAlias

from wherry.core.account import NO_LOSSES, Losses
from wherry.core.digest import LEAF
from wherry.core.keypath import KeyPath, parse, render
from wherry.core.tensorspec import Span

# Start, stop and checksum of pieces of a tensor.
Checks: TypeAlias = Sequence[tuple[int, int, int]]


class DurableMove(NamedTuple):
    """A move whose bytes are durable.

    Attributes:
        source: key path of the tensor in the source.
        span: canonical bytes that were written.
        leaves: number of each leaf that it touches → raw hashes; see `LeafHasher.leaves`.
        checks: start, stop and checksum of pieces, where the writer needs them; see `MapWriter.checks`.
        losses: what was counted of its values.
    """

    source: KeyPath
    span: Span
    leaves: Mapping[int, bytes]
    checks: tuple[tuple[int, int, int], ...] = ()
    losses: Losses = NO_LOSSES


class MoveLog(Protocol):
    """Where durable moves are noted, and which of them are done already."""

    @property
    def done(self) -> tuple[DurableMove, ...]:
        """What earlier runs finished."""
        ...

    def has(self, source: KeyPath, span: Span) -> bool:
        """Whether a move is done, or is not to be made here."""
        ...

    def record(self, moves: Iterable[DurableMove]) -> None:
        """Note finished moves, whose data must already be durable, or in parts that were noted."""


def encode(row: DurableMove) -> list[Any]:
    """A move as a part of a line."""
    leaves = base64.b64encode(b"".join(row.leaves.values())).decode()
    rest = [list(row.checks), list(astuple(row.losses))] if row.checks or row.losses else []
    return [render(row.source), *row.span, list(row.leaves), leaves, *rest]


def decode(row: list[Any]) -> DurableMove:
    """The inverse of `encode`; raises ValueError, KeyError or TypeError."""
    path, start, stop, numbers, text, *rest = row
    checks, losses = rest or ((), ())
    if not all(isinstance(number, int) for number in (start, stop, *numbers)):
        raise TypeError("bytes and leaves are counted by integers")
    if not all(start < (number + 1) * LEAF and number * LEAF < stop for number in numbers):
        raise ValueError("a leaf is outside the bytes that were moved")
    raw = base64.b64decode(text, validate=True)
    width = len(raw) // len(numbers) if numbers else 0
    leaves = {number: raw[place * width : (place + 1) * width] for place, number in enumerate(numbers)}
    pieces = tuple((int(first), int(last), int(value)) for first, last, value in checks)
    *counts, error = losses or (0, 0.0)
    counted = Losses(*map(int, counts), error=float(error))
    return DurableMove(parse(path), Span(start, stop), leaves, pieces, counted)


def encode_all(rows: Iterable[DurableMove]) -> dict[str, Any]:
    """Moves as a line: those of small tensors, of which there are the most, as columns."""
    done: list[list[Any]] = []
    paths: list[str] = []
    sizes: list[int] = []
    leaves: list[bytes] = []
    for row in rows:
        source, (start, stop), known, checks, losses = row
        if start or stop > LEAF or len(known) != 1 or checks or losses is not NO_LOSSES:
            done.append(encode(row))
        else:
            paths.append(render(source))
            sizes.append(stop)
            leaves.append(known[0])
    text = base64.b64encode(b"".join(leaves)).decode()
    return {"done": done, "small": {"paths": paths, "sizes": sizes, "leaves": text}}


def decode_all(line: Mapping[str, Any]) -> Iterator[DurableMove]:
    """The inverse of `encode_all`; raises ValueError, KeyError or TypeError."""
    yield from map(decode, line["done"])
    small = line["small"]
    paths, sizes, raw = small["paths"], small["sizes"], base64.b64decode(small["leaves"], validate=True)
    if not all(type(size) is int and 0 < size <= LEAF for size in sizes):
        raise TypeError("a small tensor has one leaf")
    width = len(raw) // len(paths) if paths else 0
    for number, (path, size) in enumerate(zip(paths, sizes, strict=True)):
        yield DurableMove(parse(path), Span(0, size), {0: raw[number * width : (number + 1) * width]})
