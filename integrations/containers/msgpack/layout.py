"""Lays out a flax-style msgpack file before any byte of a tensor is written: the manifest determines every offset.

Heads are those of msgpack-python with `use_bin_type`, arrays those of flax (ext 1, or 3 for a numpy scalar; above
2**30 bytes a map of flat chunks of that size), so that `flax.serialization.msgpack_restore` restores the tree.
Lists become maps with keys from "0", as in flax. The information that this loses is kept in heads that are longer
than necessary, which readers ignore; `contents.py` documents these marks.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any

from wherry.core import dtypes
from wherry.core.keypath import KeyPath, render
from wherry.core.lazy_dataclass import dataclass
from wherry.core.tensorspec import TensorSpec
from wherry.cures import Argument, Cure
from wherry.errors import UnrepresentableError
from wherry.integrations.containers.msgpack.contents import LIST_MARK, ROOT_MARKS, SCALAR_TAG
from wherry.integrations.containers.msgpack.heads import (
    array_head,
    bin_head,
    empty,
    ext_head,
    integer,
    map_head,
    scalar,
    text,
)
from wherry.integrations.containers.msgpack.index import CHUNKED, DEEPEST, NDARRAY, SCALAR
from wherry.target.file_map import File, FileMap, Literal, Segment, Segments, TensorSegments

if TYPE_CHECKING:
    from wherry.core.manifest import Manifest

CHUNK_LIMIT = 1 << 30
# flax looks up a dtype by name in numpy and ml_dtypes; four-bit types take a byte per element, as in digests.
WRITABLE = dtypes.NUMPY
_LONGEST_KEY = 0xFFFF
_ROOTS = {kind: width for width, kind in ROOT_MARKS.items()}
_INTS = range(-(1 << 63), 1 << 64)


@dataclass(frozen=True, slots=True)
class _ValueLeaf:
    """A leaf that is not a tensor: a value, an empty node, or bytes that the caller encoded."""

    value: Any
    empty: str | None = None
    data: bytes | None = None


@dataclass(slots=True)
class _TreeNode:
    children: dict[str, _TreeNode | _ValueLeaf | TensorSpec] = field(default_factory=dict[str, Any])


def lay_out(
    files: Mapping[str, Manifest],
    index: tuple[str, Callable[[], bytes]] | None = None,
    encoded: Mapping[KeyPath, bytes] | None = None,
) -> FileMap:
    """Assign a place to every byte.

    Args:
        files: name → the tree in a file.
        index: name and contents of the index, which names the other files.
        encoded: further leaves of each file, as msgpack; they come first.

    Raises:
        UnrepresentableError: a leaf is below another leaf, or msgpack or flax cannot hold a key or value.
    """
    bodies: list[Segments] = []
    tensors = TensorSegments(bodies)
    for number, manifest in enumerate(files.values()):
        layout = _Layout(manifest.lists, number, tensors)
        bodies.append(layout.body)
        layout.node(_tree(manifest, encoded or {}), ())
        layout.end_run()
    found = [File(name, body) for name, body in zip(files, bodies, strict=True)]
    if index is not None:
        found.append(File(*index))
    return FileMap(found, tensors.places)


def _tree(manifest: Manifest, encoded: Mapping[KeyPath, bytes]) -> _TreeNode | _ValueLeaf | TensorSpec:
    rows: list[tuple[KeyPath, _ValueLeaf | TensorSpec]] = [
        (path, _ValueLeaf(None, data=data)) for path, data in encoded.items()
    ]
    rows += manifest.tensors.items()
    rows += [(path, _value(value, path)) for path, value in manifest.values.items()]
    rows += [(path, _ValueLeaf(None, empty)) for path, empty in manifest.empties.items()]
    if len(rows) == 1 and rows[0][0] == ():
        return rows[0][1]
    root = _TreeNode()
    for path, leaf in rows:
        _require_keys(path)
        _insert(root, path, leaf)
    return root


def _insert(root: _TreeNode, path: KeyPath, leaf: _ValueLeaf | TensorSpec) -> None:
    node = root
    for part in path[:-1]:
        child = node.children.setdefault(part, _TreeNode())
        if not isinstance(child, _TreeNode):
            raise _refusal("it is below another leaf", path)
        node = child
    if not path or path[-1] in node.children:
        raise _refusal("other leaves are below it", path)
    node.children[path[-1]] = leaf


def _require_keys(path: KeyPath) -> None:
    if len(path) > DEEPEST:
        raise _refusal(f"its key path exceeds the limit of {DEEPEST} parts", path)
    if CHUNKED in path:
        raise _refusal(f"flax reserves the key {CHUNKED!r} for chunked arrays", path)
    for part in path:
        try:
            length = len(part.encode())
        except UnicodeEncodeError:
            raise _refusal("its name cannot be encoded as UTF-8", path) from None
        if length > _LONGEST_KEY:
            raise _refusal(
                f"a part of its name has {length} bytes, more than the limit of {_LONGEST_KEY}", path
            )


def _value(value: object, path: KeyPath) -> _ValueLeaf:
    if value is None:
        return _ValueLeaf(None, "none")
    if isinstance(value, int) and value not in _INTS:
        raise _refusal(f"{value} exceeds 64 bits", path)
    if not path and not isinstance(value, str):
        raise _refusal("a single number cannot be distinguished from a tensor", path)
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise _refusal("its text cannot be encoded as UTF-8", path) from None
    return _ValueLeaf(value)


def _refusal(why: str, path: KeyPath) -> UnrepresentableError:
    return UnrepresentableError(
        f"flax msgpack cannot hold this leaf: {why}",
        path=render(path),
        cure=Cure(
            "rename it with {}, or leave out values with {}", Argument("rename"), Argument("ignore", "values")
        ),
    )


class _Layout:
    """Lays out one file: runs of heads, and the bytes of tensors between them.

    Attributes:
        body: the segments of the file.
    """

    def __init__(self, lists: Collection[KeyPath], file: int, tensors: TensorSegments) -> None:
        self._lists, self._file, self._tensors = lists, file, tensors
        self.body = Segments(self._segment)
        self._runs, self._ends = bytearray(), array("q", [0])  # all runs; where that of each segment ends
        self._run = bytearray()

    def _segment(self, number: int) -> Segment:
        if self.body.tensors[number]:
            return self._tensors.raw(self._file, number)
        return Literal(bytes(self._runs[self._ends[number] : self._ends[number + 1]]))

    def node(self, node: _TreeNode | _ValueLeaf | TensorSpec, path: KeyPath) -> None:
        """One object with everything in it."""
        if isinstance(node, TensorSpec) and node.nbytes > CHUNK_LIMIT:
            self._add_chunks(node)
        elif isinstance(node, TensorSpec):
            lone = not node.shape and dict(node.tags or {}).items() >= SCALAR_TAG.items()
            self._array(node, node.shape, 0, node.nbytes, SCALAR if lone else NDARRAY)
        elif isinstance(node, _ValueLeaf) and node.data is not None:
            self._run += node.data
        elif isinstance(node, _ValueLeaf):
            self._run += scalar(node.value) if node.empty is None else empty(node.empty)
        else:
            self._run += map_head(len(node.children))
            if path:
                width = LIST_MARK if path in self._lists else 0
            else:
                width = _ROOTS["list" if path in self._lists else "dict"]
            for key, child in node.children.items():
                self._run += text(key, width)
                self.node(child, (*path, key))
                width = 0

    def _add_chunks(self, spec: TensorSpec) -> None:
        width = dtypes.canonical_size(spec.dtype, 1)
        step = max(CHUNK_LIMIT // width, 1)
        starts = range(0, spec.size, step)
        self._run += map_head(3) + text(CHUNKED) + b"\xc3" + text("shape") + map_head(len(spec.shape))
        for axis, extent in enumerate(spec.shape):
            self._run += text(str(axis)) + integer(extent)
        self._run += text("chunks") + map_head(len(starts))
        for number, start in enumerate(starts):
            stop = min(start + step, spec.size)
            self._run += text(str(number))
            self._array(spec, (stop - start,), start * width, stop * width, NDARRAY)

    def _array(self, spec: TensorSpec, shape: Iterable[int], start: int, stop: int, code: int) -> None:
        extents = [integer(extent) for extent in shape]
        inner = (
            b"\x93" + array_head(len(extents)) + b"".join(extents) + text(spec.dtype) + bin_head(stop - start)
        )
        self._run += ext_head(code, len(inner) + stop - start) + inner
        self.end_run()
        if start < stop:
            self._tensors.add(spec, self._file, len(self.body), start)
            self.body.add(stop - start, tensor=True)
            self._ends.append(len(self._runs))

    def end_run(self) -> None:
        """End a run of heads."""
        if self._run:
            self._runs += self._run
            self._ends.append(len(self._runs))
            self.body.add(len(self._run))
            self._run = bytearray()
