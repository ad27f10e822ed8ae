"""The layout of a DCP checkpoint: archives in `.distcp` files, and `.metadata` last, which commits it.

A tensor is one chunk and one item; one that is larger than a file may be is cut into chunks of rows, each an item in a
file of its own, as ranks save it. Objects come first, in the first file. Files are named `__<k>_0.distcp` like those of
rank k, so that any number of ranks can load them. Every torch from 2.3 on can read the metadata (2.14 and
older cannot read torch 2.15's own): properties of five fields, no `storage_meta`, no transforms. With the profile `2.3`
the properties have their names from before torch 2.3, which still exist, so that torch 2.0 to 2.15 can read them: files
written by the same rules were loaded by 2.0.1, 2.2.2, 2.3.1, 2.4.1, 2.6.0, 2.9.1, 2.13.0 and 2.15.0 (the tests here
load with the installed torch).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain, groupby
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

from isal import isal_zlib

from wherry.core import dtypes
from wherry.core.keypath import KeyPath
from wherry.core.lazy_dataclass import dataclass
from wherry.core.manifest import Manifest
from wherry.core.tensorspec import TensorSpec
from wherry.errors import UnrepresentableError
from wherry.integrations.containers.pickle.writer import PickleWriter, integer
from wherry.integrations.containers.torch.layout import Archives, alike, archives_map, build
from wherry.integrations.formats.dcp.folder import METADATA
from wherry.integrations.formats.dcp.metadata import (
    FILESYSTEM_MODULE,
    METADATA_MODULE,
    OLD_PROPERTIES,
    STRIDED,
    Chunk,
    cut_rows,
)
from wherry.target.file_map import File, FileMap

_Row: TypeAlias = tuple[str, "ItemPlan", "ItemPlace"]  # its name, and where it is

VERSION = "torch.distributed.checkpoint"
NESTED = "planner_data"  # key of the nested paths in a manifest's `custom`
WIDEST = "2.3"
FORMAT = "1.0.0"
_NAME = itemgetter(0)  # of a row
_ENDS = b"ub"  # the last opcodes of an object with attributes
LEAST_CHUNK = 64 << 10  # bytes; no chunk is smaller, as each takes 1 KB in addition to its data


class ItemPlan(NamedTuple):
    """One item to write: a chunk of a tensor, or an object.

    Attributes:
        name: its flat name.
        content: TensorSpec of the whole tensor, or the object.
        stored: what its archive holds.
        chunk: the part of the tensor; None for an object.
    """

    name: str
    content: Any
    stored: Any
    chunk: Chunk | None = None


class ItemPlace(NamedTuple):
    """Where the archive of an item is."""

    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class DcpLayout:
    """The layout of a checkpoint to write.

    Attributes:
        items: objects, then tensors; the chunks of a tensor follow one another.
        files: name → archives in it; all archives are those of the items, in this order.
        chunks: key path of a chunk as its archive holds it → the whole tensor, and the first byte of the chunk in it.
    """

    items: Sequence[ItemPlan]
    files: Mapping[str, Archives]
    chunks: Mapping[KeyPath, tuple[TensorSpec, int]]

    def places(self) -> list[ItemPlace]:
        """Where each item is, in their order."""
        return [
            ItemPlace(file, start, form.length)
            for file, archives in self.files.items()
            for form, start in zip(archives.forms, archives.starts(), strict=True)
        ]

    def file_map(self, nested: Mapping[str, Any], profile: str, late: Sequence[File] = ()) -> FileMap:
        """The files with the items, `.metadata`, then others.

        Args:
            nested, profile: see `metadata`.
            late: the others.
        """
        # That of very many tensors is large, and waits for long; the items, which are larger, do not.
        text = isal_zlib.compress(metadata(self, nested, profile), 1)
        files = (File(METADATA, partial(isal_zlib.decompress, text)), *late)
        return archives_map(self.files, files, self.chunks)


def lay_out(manifest: Manifest, shard_size: int) -> DcpLayout:
    """Plan the file and offset of every tensor and object.

    Args:
        manifest: the contents to write; key paths of tensors have one part.
        shard_size: bytes of tensors in one file; a larger tensor is cut.

    Raises:
        UnrepresentableError: a key path without parts, or a name that is a tensor and an object at once.
    """
    files: dict[str, Archives] = {}
    chunks: dict[KeyPath, tuple[TensorSpec, int]] = {}
    start = 0
    groups = _groups(manifest, shard_size)
    for number, group in enumerate(groups):
        files[f"__{number}_0.distcp"] = Archives(alike(item.stored) for item in group)
        for item in group:
            if item.stored is not item.content and item.chunk is not None:
                start = start if any(item.chunk.offsets) else 0
                chunks[item.stored.path] = item.content, start
                start += item.stored.nbytes
    return DcpLayout(list(chain.from_iterable(groups)), files, chunks)


def _groups(manifest: Manifest, most: int) -> list[list[ItemPlan]]:
    """The items of each file: objects in the first one, before its tensors."""
    root = _root(manifest)
    if not isinstance(root, dict) or () in manifest.lists:
        raise UnrepresentableError(
            "DCP requires a dict at the root of the checkpoint", cure="choose the target format torch-zip"
        )
    groups: list[list[ItemPlan]] = [
        [ItemPlan(name, node, node) for name, node in root.items() if not isinstance(node, TensorSpec)]
    ]
    filled = count = 0  # bytes and number of the tensors in the last group
    for name, spec in root.items():
        for piece in _pieces(name, spec, most) if isinstance(spec, TensorSpec) else ():
            nbytes = piece.stored.nbytes
            if count and filled + nbytes > most:
                groups.append([])
                filled = count = 0
            groups[-1].append(piece)
            filled, count = filled + nbytes, count + 1
    return groups


def _root(manifest: Manifest) -> Any:
    """The object to save. Tensors lie in its root, where no tree has to be built of a hundred thousand of them."""
    noted = manifest.custom.get("pickle")
    if not noted and all(len(path) == 1 for path in manifest.tensors):
        rest = build(replace(manifest, tensors={})) if manifest.values or manifest.empties else {}
        names = {path[0]: spec for path, spec in manifest.tensors.items()}
        if isinstance(rest, dict) and rest.keys().isdisjoint(names):
            return {**names, **rest}
    return build(manifest)


def _pieces(name: str, spec: TensorSpec, most: int) -> list[ItemPlan]:
    """The chunks of a tensor; one of several is stored as a tensor whose key path is below that of the tensor."""
    chunks = _cut(spec.shape, spec.dtype, max(most, LEAST_CHUNK))
    if len(chunks) == 1:
        return [ItemPlan(name, spec, spec, chunks[0])]
    stored = [TensorSpec((*spec.path, str(at)), one.sizes, spec.dtype) for at, one in enumerate(chunks)]
    return [ItemPlan(name, spec, part, chunk) for part, chunk in zip(stored, chunks, strict=True)]


@lru_cache(1 << 12)
def _cut(shape: tuple[int, ...], dtype: str, most: int) -> tuple[Chunk, ...]:
    """The chunks of all tensors of one dtype and shape, of which a large model has thousands."""
    return tuple(cut_rows(shape, dtypes.bits(dtype) // 8, most))


def metadata(layout: DcpLayout, nested: Mapping[str, Any], profile: str) -> bytes:
    """Emit the bytes of `.metadata`.

    Args:
        layout: the layout of the checkpoint.
        nested: flat name → parts of the nested path, from the source's own metadata if it had one; used if the parts
            still join to the name.
        profile: `default` or `2.3`.
    """
    out = PickleWriter()
    rows = [(item.name, item, place) for item, place in zip(layout.items, layout.places(), strict=True)]
    rows.sort(key=_NAME)
    fields: dict[str, Callable[[], None]] = {
        "planner_data": lambda: out.group(_paths(out, rows, nested)),
        "state_dict_metadata": lambda: out.group(_descriptions(out, rows, profile)),
        "storage_data": lambda: out.group(_places(out, rows)),
        "storage_meta": lambda: out.value(None),
        "version": lambda: out.value(FORMAT),
    }
    out.state(METADATA_MODULE, "Metadata", fields.items())
    return out.done()


def _paths(out: PickleWriter, rows: Iterable[_Row], nested: Mapping[str, Any]) -> Iterator[None]:
    """Each name with its nested path."""
    for name, _same in groupby(rows, _NAME):
        first, parts = out.stored(name), tuple(nested.get(name) or ()) if nested else ()
        if len(parts) > 1 and ".".join(map(str, parts)) == name:
            out.raw(first)
            yield out.tuple_of(parts)
        else:
            yield out.raw(first + out.stored(name) + b"\x85")


def _descriptions(out: PickleWriter, rows: Iterable[_Row], profile: str) -> Iterator[None]:
    """Each name with what it is; tensors of one dtype and shape are cut alike."""
    for name, same in groupby(rows, _NAME):
        items, key = [item for _name, item, _place in same], (out.stored(name),)
        spec = items[0].content
        if isinstance(spec, TensorSpec):
            yield out.like((spec.dtype, spec.shape), key, partial(_tensor, out, items, profile))
        else:
            out.raw(*key)
            yield out.state(METADATA_MODULE, "BytesStorageMetadata", ())


def _places(out: PickleWriter, rows: Iterable[_Row]) -> Iterator[None]:
    """Each chunk or object with its place."""
    before, number = "", 0
    for name, item, plan in rows:
        chunk = item.chunk
        number = number + 1 if name == before else 0
        before = name
        form = (number, chunk and chunk.offsets, plan.length, plan.file)
        yield out.like(form, (out.stored(name), integer(plan.start)), partial(_place, out, *form))


def _tensor(out: PickleWriter, items: Sequence[ItemPlan], profile: str) -> None:
    """A name, its tensor and the chunks of that, which share what describes them."""
    old_names, spec = profile == WIDEST, items[0].content
    chunks = [item.chunk for item in items if item.chunk is not None]
    out.gap()
    fields: Iterable[tuple[str, Callable[[], None]]] = (
        (
            "chunks",
            lambda: out.sequence(
                [
                    partial(out.shared, ("chunk", *chunk), partial(chunk_record, out, chunk))
                    for chunk in chunks
                ]
            ),
        ),
        (
            "properties",
            lambda: out.shared(
                ("properties", spec.dtype), lambda: properties(out, spec.dtype, old_names=old_names)
            ),
        ),
        ("size", lambda: size(out, spec.shape)),
    )
    out.state(METADATA_MODULE, "TensorStorageMetadata", fields)


def chunk_record(out: PickleWriter, chunk: Chunk) -> None:
    """A `ChunkStorageMetadata`."""
    fields: Iterable[tuple[str, Callable[[], None]]] = (
        ("offsets", lambda: size(out, chunk.offsets)),
        ("sizes", lambda: size(out, chunk.sizes)),
    )
    out.state(METADATA_MODULE, "ChunkStorageMetadata", fields)


def properties(
    out: PickleWriter,
    dtype: str,
    *,
    old_names: bool,
    requires_grad: bool = False,
    memory_format: int = 0,
    pinned: bool = False,
) -> None:
    """Emit a `TensorProperties` of five fields.

    Args:
        out: the pickle.
        dtype: torch's name of the dtype.
        old_names: whether to use the names that the class had until torch 2.2.
        requires_grad, pinned: the tensor's attributes of these names.
        memory_format: 0 is contiguous.
    """
    module = OLD_PROPERTIES if old_names else METADATA_MODULE
    out.name(module, "TensorProperties")
    out.raw(b")\x81(")
    out.name("torch", dtype)
    out.name("torch.serialization", "_get_layout")
    out.word(STRIDED)
    out.raw(b"\x85R")
    out.value(requires_grad)
    out.name(module, "MEM_FORMAT_ENCODING" if old_names else "_MEM_FORMAT_ENCODING")
    out.value(memory_format)
    out.raw(b"\x85R")
    out.value(pinned)
    out.raw(b"tb")


def size(out: PickleWriter, extents: tuple[int, ...]) -> None:
    """A `torch.Size`; equal ones are one object."""
    out.shared(("size", extents), lambda: _size(out, extents))


def _size(out: PickleWriter, extents: tuple[int, ...]) -> None:
    out.name("torch", "Size")
    out.tuple_of(extents)
    out.raw(b"\x85R")


def _place(out: PickleWriter, number: int, offsets: tuple[int, ...] | None, length: int, file: str) -> None:
    """The key of an item and where it is: the number is that of the chunk among those of its tensor."""
    out.begin_state(METADATA_MODULE, "MetadataIndex")
    out.word("fqn")
    out.gap()
    if offsets is not None:
        out.word("index")
        out.value(number)
        out.word("offset")
        size(out, offsets)
    out.raw(_ENDS)
    out.begin_state(FILESYSTEM_MODULE, "_StorageInfo")
    out.word("length")
    out.value(length)
    out.word("offset")
    out.gap()
    out.word("relative_path")
    out.word(file)
    out.raw(_ENDS)
