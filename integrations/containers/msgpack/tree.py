"""The tree of a msgpack index: maps, msgpack arrays, and leaves; the data of arrays is not read."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from wherry.core.keypath import KeyPath

NDARRAY, COMPLEX, SCALAR = 1, 2, 3


class BytePiece(NamedTuple):
    """A byte range of the message."""

    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Array:
    """An array whose data was not read.

    Attributes:
        shape: its extents.
        dtype: numpy or ml_dtypes name.
        pieces: the byte ranges of its data, in order.
        code: 1 for an ndarray, 3 for a numpy scalar.
        chunked: whether it was stored as a chunked array.
    """

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[BytePiece, ...]
    code: int = NDARRAY
    chunked: bool = False


@dataclass(frozen=True, slots=True)
class Scalar:
    """A leaf whose value is in the tree itself: text, a number, a bool, or None for nil."""

    value: str | int | float | complex | bool | None


@dataclass(frozen=True, slots=True)
class Blob:
    """Bytes that are not text, which were not read."""

    piece: BytePiece


@dataclass(frozen=True, slots=True)
class Table:
    """A map.

    Attributes:
        entries: its children.
        width: bytes of its head: 1, 3 or 5.
        mark: bytes of the head of its first key, if a packer would have made it shorter; else 0.
    """

    entries: Mapping[str, Node]
    width: int = 1
    mark: int = 0


@dataclass(frozen=True, slots=True)
class Sequence:
    """A msgpack array."""

    items: tuple[Node, ...]


Node: TypeAlias = "Table | Sequence | Array | Scalar | Blob"


def leaves(node: Node, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Node]]:
    """Every leaf with its key path, in stored order; empty maps and arrays count as leaves."""
    if isinstance(node, Table) and node.entries:
        for key, child in node.entries.items():
            yield from leaves(child, (*path, key))
    elif isinstance(node, Sequence) and node.items:
        for number, child in enumerate(node.items):
            yield from leaves(child, (*path, str(number)))
    else:
        yield path, node


def sequences(node: Node, path: KeyPath = ()) -> Iterator[KeyPath]:
    """The paths of all msgpack arrays."""
    if isinstance(node, Table):
        for key, child in node.entries.items():
            yield from sequences(child, (*path, key))
    elif isinstance(node, Sequence):
        yield path
        for number, child in enumerate(node.items):
            yield from sequences(child, (*path, str(number)))


def canonical(value: complex | bool) -> tuple[str, bytes]:
    """The dtype and canonical bytes that numpy gives to a Python number (at most 64 bits in msgpack)."""
    if isinstance(value, bool):
        return "bool", bytes([value])
    if isinstance(value, int):
        signed = -(1 << 63) <= value < 1 << 63
        return ("int64", struct.pack("<q", value)) if signed else ("uint64", struct.pack("<Q", value))
    if isinstance(value, float):
        return "float64", struct.pack("<d", value)
    return "complex128", struct.pack("<2d", value.real, value.imag)
