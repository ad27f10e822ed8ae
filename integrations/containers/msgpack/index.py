"""Indexes a flax-style msgpack message in one pass: its tree, and the extents of every array.

Only heads, keys and strings are read; arrays are records of shape, dtype and byte ranges. Memory use depends on the
number of leaves, not on the size of the file, and is limited.

    root = index_file(location)                 # or index_bytes(data)
    for path, leaf in leaves(root):             # Array, Scalar, Blob, and Table or Sequence without children
        ...

Facts (flax `serialization.py`, 0.1 to 0.12): maps with keys of str (bytes in old files; ints become decimal
strings), arrays, nil, bool, int, float, str, bin, and three ext types: 1 an ndarray, 3 a numpy scalar, both with
the payload `[shape, dtype name, bytes]`, C order, little endian; 2 a native complex, `[re, im]`. An array of more
than 2**30 bytes is the map `{"__msgpack_chunked_array__": true, "shape": {"0": …}, "chunks": {"0": ext 1, …}}`;
it becomes one Array of several pieces. Python's own numbers and bools are Scalars; `canonical` gives them the
dtype that numpy would.

The tree of a msgpack index: maps, msgpack arrays, and leaves; the data of arrays is not read.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from wherry.core import dtypes
from wherry.core.keypath import KeyPath, render
from wherry.core.lazy_dataclass import dataclass
from wherry.core.limits import exceeds, larger_factor, scale_limit
from wherry.errors import CorruptError, HostileError, UnsupportedError
from wherry.integrations.containers.msgpack.heads import Head, MessageSource, bytes_source, file_source

if TYPE_CHECKING:
    from wherry.store.location import Location


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


CHUNKED = "__msgpack_chunked_array__"
DEEPEST = 200
_MOST_NODES = 500_000  # two for each tensor and its group, at most
_MOST_TEXT = 48 << 20
_LONGEST_KEY = 1 << 20
_MOST_DIMENSIONS = 64
_LONGEST_DTYPE = 64
# Bytes of the head of a string → the longest string for which a packer would use a shorter head.
_SHORTER = {2: 0x1F, 3: 0xFF, 5: 0xFFFF}
# Dtype names of older ml_dtypes and numpy.
_RENAMED = {"float8_e4m3b11": "float8_e4m3b11fnuz", "bool_": "bool"}
_CURE = "copy the file again, or use another step"


class Walk:
    """One pass over a message.

    Attributes:
        source: the message, with the current position.
        paths: collects the key paths in order of appearance, if a list is given.
        texts: the text leaves so far; collected only with `paths`.
        arrays: the number of arrays so far.
    """

    def __init__(self, source: MessageSource, paths: list[KeyPath] | None = None) -> None:
        self.source = source
        self.paths = paths
        self.texts: list[str] = []
        self.arrays = 0
        self._nodes = 0
        self._text = 0

    def node(self, path: KeyPath, depth: int) -> Node:
        """The object at the current position, with everything in it.

        Raises:
            CorruptError, UnsupportedError, HostileError: see `index_file`.
        """
        self._nodes += 1
        if self._nodes > _MOST_NODES and exceeds(self._nodes, _MOST_NODES):
            raise self._hostile(f"{scale_limit(_MOST_NODES)} nodes", path)
        if depth > DEEPEST:
            raise self._hostile(f"{DEEPEST} levels", path)
        head = self.source.head()
        if head.kind == "map":
            return self._table(head, path, depth)
        if head.kind == "array":
            self._check_count(head.length, head.length, path)
            return Sequence(tuple(self.node((*path, str(n)), depth + 1) for n in range(head.length)))
        if head.kind == "ext":
            return self._ext(head, path)
        if head.kind in ("str", "bin"):
            return self._text_or_blob(head, path)
        return Scalar(head.value)

    def _table(self, head: Head, path: KeyPath, depth: int) -> Node:
        self._check_count(head.length, 2 * head.length, path)
        entries: dict[str, Node] = {}
        mark = 0
        for number in range(head.length):
            key, width = self._key(path)
            if key in entries:
                raise self._corrupt(f"duplicate key {key!r}", path)
            mark = mark if number else width
            below = (*path, key)
            if self.paths is not None:
                self.paths.append(below)
            entries[key] = self.node(below, depth + 1)
        if CHUNKED in entries:
            return self._join_array(entries, path)
        return Table(entries, head.width, mark)

    def _key(self, path: KeyPath) -> tuple[str, int]:
        """A key as text; and the bytes of its head, if the head is longer than a packer would write it, else 0."""
        head = self.source.head()
        if head.kind == "int":
            return str(head.value), 0
        if head.kind not in ("str", "bin"):
            raise UnsupportedError(
                f"unsupported msgpack map key of type {head.kind}", uri=self.source.uri, path=render(path)
            )
        if head.length > _LONGEST_KEY:
            raise self._hostile(f"{_LONGEST_KEY} bytes for a key: {head.length}", path)
        text = self._decode(self._keep(head.length, path))
        if text is None:
            raise self._corrupt("map key is not UTF-8", path)
        longer = head.kind == "str" and head.length <= _SHORTER.get(head.width, -1)
        return text, head.width if longer else 0

    def _text_or_blob(self, head: Head, path: KeyPath) -> Node:
        start = self.source.position
        if head.kind == "str":
            text = self._decode(self._keep(head.length, path))
            if text is not None:
                if self.paths is not None:
                    self.texts.append(text)
                return Scalar(text)
        else:
            self.source.skip(head.length)
        return Blob(BytePiece(start, head.length))

    def _keep(self, length: int, path: KeyPath) -> bytes:
        self.source.require(length)
        self._text += length
        if self._text > _MOST_TEXT and exceeds(self._text, _MOST_TEXT):
            raise self._hostile(f"{scale_limit(_MOST_TEXT)} bytes of text", path)
        return self.source.take(length)

    def _ext(self, head: Head, path: KeyPath) -> Node:
        stop = self.source.position + head.length
        self.source.require(head.length)
        if head.code in (NDARRAY, SCALAR):
            leaf: Node = self._array(head.code, stop, path)
        elif head.code == COMPLEX:
            pair = self.source.head()
            parts = [self.source.head() for _ in range(pair.length)] if pair[:2] == ("array", 2) else []
            if [part.kind for part in parts] != ["float", "float"]:
                raise self._corrupt("expected a complex number as [real, imaginary]", path)
            real, imaginary = (float(part.value or 0) for part in parts)
            leaf = Scalar(complex(real, imaginary))
        else:
            raise UnsupportedError(
                f"unsupported msgpack ext type {head.code}, which flax does not write",
                uri=self.source.uri,
                path=render(path),
            )
        if self.source.position != stop:
            raise self._corrupt(f"the content of an ext object does not fill its {head.length} bytes", path)
        return leaf

    def _array(self, code: int, stop: int, path: KeyPath) -> Array:
        outer = self.source.head()
        if outer.kind != "array" or outer.length != 3:  # noqa: PLR2004  shape, dtype, bytes
            raise self._corrupt("expected an array as [shape, dtype, bytes]", path)
        extents = self.source.head()
        if extents.kind != "array" or extents.length > _MOST_DIMENSIONS:
            raise self._corrupt("missing shape of an array", path)
        shape = tuple(self._extent(self.source.head(), path) for _ in range(extents.length))
        dtype = self._dtype(path)
        data = self.source.head()
        start = self.source.position
        if data.kind not in ("bin", "str") or start + data.length > stop:
            raise self._corrupt("missing data of an array, or data beyond its ext object", path)
        wanted = dtypes.canonical_size(dtype, math.prod(shape))
        if wanted != data.length:
            raise self._corrupt(f"expected {wanted} bytes for {dtype}{list(shape)}, got {data.length}", path)
        self.arrays += 1
        self.source.skip(data.length)
        return Array(shape, dtype, (BytePiece(start, data.length),), code)

    def _extent(self, head: Head, path: KeyPath) -> int:
        if head.kind != "int" or head.length < 0:
            raise self._corrupt("expected non-negative integers as shape", path)
        return head.length

    def _dtype(self, path: KeyPath) -> str:
        head = self.source.head()
        if head.kind not in ("str", "bin") or head.length > _LONGEST_DTYPE:
            raise self._corrupt("missing dtype name of an array", path)
        stored = self._decode(self.source.take(head.length)) or "?"
        name = _RENAMED.get(stored, stored)
        if not dtypes.is_known(name) or dtypes.opaque(name):
            raise UnsupportedError(
                f"unsupported dtype {stored!r} in msgpack",
                uri=self.source.uri,
                path=render(path),
                cure="save it again with a numpy or ml_dtypes dtype",
            )
        return name

    def _join_array(self, entries: dict[str, Node], path: KeyPath) -> Array:
        """One array from the map into which flax splits an array above its limit."""
        extents = [
            self._plain_extent(node, path) for node in self._numbered_children(entries.get("shape"), path)
        ]
        chunks = self._numbered_children(entries.get("chunks"), path)
        arrays = [chunk for chunk in chunks if isinstance(chunk, Array) and not chunk.chunked]
        if set(entries) != {CHUNKED, "shape", "chunks"} or len(arrays) != len(chunks) or not arrays:
            raise self._corrupt("missing shape or chunks of a chunked array", path)
        kinds = {array.dtype for array in arrays}
        elements = sum(math.prod(array.shape) for array in arrays)
        if len(kinds) != 1 or elements != math.prod(extents):
            found = f"{elements} elements of {'/'.join(sorted(kinds))} for the shape {extents}"
            raise self._corrupt(f"chunked array has {found}", path)
        return Array(tuple(extents), kinds.pop(), tuple(array.pieces[0] for array in arrays), chunked=True)

    def _numbered_children(self, node: Node | None, path: KeyPath) -> list[Node]:
        """The children of a list that flax turned into a map, in numeric order."""
        if isinstance(node, Sequence):
            return list(node.items)
        names = [str(number) for number in range(len(node.entries))] if isinstance(node, Table) else []
        if not isinstance(node, Table) or set(node.entries) != set(names):
            raise self._corrupt("the parts of a chunked array are not numbered from 0", path)
        return [node.entries[name] for name in names]

    def _plain_extent(self, node: Node, path: KeyPath) -> int:
        if not isinstance(node, Scalar) or type(node.value) is not int or node.value < 0:
            raise self._corrupt("expected non-negative integers as shape", path)
        return node.value

    def _check_count(self, children: int, objects: int, path: KeyPath) -> None:
        """Check the declared children before the first is read.

        Args:
            children: their number; a glance reads as far as its bytes go.
            objects: their number with that of their keys; each takes at least one byte.
            path: of the parent.
        """
        if objects > self.source.size - self.source.position:
            self.source.cut = True
            raise self._corrupt(
                f"expected {objects} objects in the remaining {self.source.size - self.source.position} bytes",
                path,
            )
        if self.paths is None and exceeds(self._nodes + children, _MOST_NODES):
            raise self._hostile(f"{scale_limit(_MOST_NODES)} nodes", path)

    @staticmethod
    def _decode(data: bytes) -> str | None:
        try:
            return data.decode()
        except UnicodeDecodeError:
            return None

    def _corrupt(self, what: str, path: KeyPath) -> CorruptError:
        return CorruptError(
            f"invalid msgpack: {what}",
            uri=self.source.uri,
            path=render(path) or None,
            cure=_CURE,
        )

    def _hostile(self, what: str, path: KeyPath) -> HostileError:
        shown = render(path[:8]) or None
        return HostileError(
            f"msgpack exceeds the limit of {what}",
            uri=self.source.uri,
            path=shown,
            cure=f"do not use this checkpoint; if you trust its origin, set WHERRY_LIMITS={larger_factor()} to raise "
            "all limits of metadata",
        )


__all__ = [
    "CHUNKED",
    "Array",
    "Blob",
    "BytePiece",
    "Glance",
    "Node",
    "Scalar",
    "Sequence",
    "State",
    "Table",
    "canonical",
    "glance",
    "index_bytes",
    "index_file",
    "leaves",
    "sequences",
]


State: TypeAlias = Literal["whole", "more", "cut", "wrong"]


class Glance(NamedTuple):
    """What the first bytes of a file show.

    Attributes:
        paths: key paths in stored order, as far as the bytes go.
        texts: the leaves among them that are text.
        arrays: how many arrays there are among them.
        state: `whole` if the bytes hold all of it, `more` if it goes on, `cut` if the file is truncated, `wrong` if it
            is invalid.
    """

    paths: tuple[KeyPath, ...]
    texts: tuple[str, ...]
    arrays: int
    state: State


def index_file(location: Location) -> Node:
    """Index a file.

    Raises:
        NotFoundError: there is no such file.
        CorruptError: it is truncated, or has trailing bytes, a duplicate key, or inconsistent sizes.
        UnsupportedError: a dtype or ext type is unknown; the error names it.
        HostileError: it exceeds the limit of levels, nodes or text.
    """
    return _whole(file_source(location))


def index_bytes(data: bytes, uri: str = "") -> Node:
    """Index a message in memory; offsets are those in `data`. Raises what `index_file` does."""
    return _whole(bytes_source(data, uri))


def glance(head: bytes, size: int) -> Glance | None:
    """Look at the first bytes of a file, without opening it.

    Args:
        head: the first bytes, for example `Glimpse.head`.
        size: bytes of the whole file.

    Returns:
        The result; None if they do not begin a msgpack map with a text key.
    """
    source = MessageSource(lambda start, stop: head[start:stop], size, "")
    walk = Walk(source, paths=[])
    assert walk.paths is not None
    state: State
    try:
        root = walk.node((), 0)
    except CorruptError:
        state = "more" if source.beyond else "cut" if source.cut else "wrong"
    except (UnsupportedError, HostileError):
        state = "more"  # valid msgpack up to something that opening will report
    else:
        state = "whole" if isinstance(root, Table) and source.position == source.size else "wrong"
    return Glance(tuple(walk.paths), tuple(walk.texts), walk.arrays, state) if walk.paths else None


def _whole(source: MessageSource) -> Node:
    root = Walk(source).node((), 0)
    if source.position != source.size:
        rest = source.size - source.position
        raise CorruptError(f"{rest} trailing bytes after the msgpack object", uri=source.uri, cure=_CURE)
    return root
