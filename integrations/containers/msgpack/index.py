"""An index of a flax-style msgpack message: its tree, and where the bytes of every array lie, in one pass.

Nothing but heads, keys and strings is read; arrays are records of shape, dtype and byte ranges. Memory follows the
number of leaves, never the size of the file, and is capped.

    root = index_file(location)                 # or index_bytes(data)
    for path, leaf in leaves(root):             # Array, Scalar, Blob, and Table or Sequence without children
        ...

Facts (flax `serialization.py`, 0.1 to 0.12): maps with keys of str (bytes in old files; ints become decimal
strings), arrays, nil, bool, int, float, str, bin, and three ext types: 1 an ndarray, 3 a numpy scalar, both with
the payload `[shape, dtype name, bytes]`, C order, little endian; 2 a native complex, `[re, im]`. An array of more
than 2**30 bytes is the map `{"__msgpack_chunked_array__": true, "shape": {"0": …}, "chunks": {"0": ext 1, …}}`;
it comes out as one Array of several pieces. Python's own numbers and bools are Scalars; `canonical` gives them the
dtype that numpy would.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from wherry.errors import CorruptError, HostileError, UnsupportedError
from wherry.integrations.containers.msgpack.source import Source, bytes_source, file_source
from wherry.integrations.containers.msgpack.tree import (
    Array,
    Blob,
    Node,
    Piece,
    Scalar,
    Sequence,
    Table,
    canonical,
    leaves,
    sequences,
)
from wherry.integrations.containers.msgpack.walk import CHUNKED, Walk

if TYPE_CHECKING:
    from wherry.core.keypath import KeyPath
    from wherry.storage.location import Location

__all__ = [
    "CHUNKED",
    "Array",
    "Blob",
    "Glance",
    "Node",
    "Piece",
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
_CURE = "copy the file again, or use another step"


State: TypeAlias = Literal["whole", "more", "cut", "wrong"]


class Glance(NamedTuple):
    """What the first bytes of a file tell.

    Attributes:
        paths: key paths in stored order, as far as the bytes go.
        texts: the leaves among them that are text.
        arrays: how many arrays there are among them.
        state: `whole` where the bytes hold all of it, `more` where it goes on, `cut` where the file ends too early,
            `wrong` where something in it contradicts itself.
    """

    paths: tuple[KeyPath, ...]
    texts: tuple[str, ...]
    arrays: int
    state: State


def index_file(location: Location) -> Node:
    """Index a file.

    Raises:
        NotFoundError: there is no such file.
        CorruptError: it is cut, has bytes after its end, a key twice, or sizes that contradict one another.
        UnsupportedError: a dtype or ext type that is not known; it is named.
        HostileError: it nests too deep or has more nodes or text than any checkpoint.
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
        What they tell; None where they do not begin a msgpack map with a text key.
    """
    source = Source(lambda start, stop: head[start:stop], size, "")
    walk = Walk(source, paths=[])
    assert walk.paths is not None
    state = _walked(walk)
    return Glance(tuple(walk.paths), tuple(walk.texts), walk.arrays, state) if walk.paths else None


def _walked(walk: Walk) -> State:
    source = walk.source
    try:
        root = walk.node((), 0)
    except CorruptError:
        return "more" if source.beyond else "cut" if source.cut else "wrong"
    except (UnsupportedError, HostileError):
        return "more"  # it reads as msgpack up to something that opening will name
    return "whole" if isinstance(root, Table) and source.position == source.size else "wrong"


def _whole(source: Source) -> Node:
    root = Walk(source).node((), 0)
    if source.position != source.size:
        rest = source.size - source.position
        raise CorruptError(f"{rest} bytes follow the end of the msgpack object", uri=source.uri, cure=_CURE)
    return root
