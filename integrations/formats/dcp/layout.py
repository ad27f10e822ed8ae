"""Plans the layout of a new DCP checkpoint, and emits its `.metadata`.

A tensor is one chunk and one item; one that is larger than a file may be is cut into chunks of rows, each an item in a
file of its own, as ranks save it. Objects come first, in the first file. Files are named `__<k>_0.distcp` like those of
rank k, so that any number of ranks can load them. Every torch from 2.3 on can read the metadata (2.14 and
older cannot read torch 2.15's own): properties of five fields, no `storage_meta`, no transforms. With the profile `2.3`
the properties have their names from before torch 2.3, which still exist, so that torch 2.0 to 2.15 can read them: files
written by the same rules were loaded by 2.0.1, 2.2.2, 2.3.1, 2.4.1, 2.6.0, 2.9.1, 2.13.0 and 2.15.0 (the tests here
load with the installed torch).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from wherry.core import dtypes
from wherry.core.tensorspec import TensorSpec
from wherry.errors import UnrepresentableError
from wherry.integrations.containers.pickle.writer import PickleWriter
from wherry.integrations.containers.torch.objects import alike, build
from wherry.integrations.containers.torch.writer import place_archives
from wherry.integrations.formats.dcp import rules as names
from wherry.integrations.formats.dcp.chunks import cut_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from wherry.core.keypath import KeyPath
    from wherry.core.manifest import Manifest
    from wherry.integrations.containers.zip.write import ArchivePlan
    from wherry.integrations.formats.dcp.metadata import Chunk

VERSION = "torch.distributed.checkpoint"
NESTED = "planner_data"  # key of the nested paths in a manifest's `custom`
WIDEST = "2.3"
FORMAT = "1.0.0"
_ENDS = b"ub"  # the last opcodes of an object with attributes
LEAST_CHUNK = 64 << 10  # bytes to which a tensor is cut at most: each chunk takes 1 KB beside its data


class ItemPlan(NamedTuple):
    """One item to write: a chunk of a tensor, or an object.

    Attributes:
        name: its flat name.
        content: TensorSpec of the whole tensor, or the object.
        file: the file that will hold it.
        plan: its archive in that file.
        chunk: the part of the tensor; None for an object.
    """

    name: str
    content: Any
    file: str
    plan: ArchivePlan
    chunk: Chunk | None = None


@dataclass(frozen=True, slots=True)
class DcpLayout:
    """The layout of a checkpoint to write.

    Attributes:
        items: objects, then tensors; the chunks of a tensor follow one another.
        files: name → archives in it, and its size.
        cuts: key path of each tensor of several chunks → these, as tensors that the archives hold.
    """

    items: tuple[ItemPlan, ...]
    files: dict[str, tuple[list[ArchivePlan], int]]
    cuts: Mapping[KeyPath, Sequence[TensorSpec]]


class _DcpItem(NamedTuple):
    """What becomes one item: `content` and `chunk` are those of ItemPlan, `stored` is what its archive holds."""

    name: str
    content: Any
    stored: Any
    chunk: Chunk | None = None


def lay_out(manifest: Manifest, shard_size: int, uri: str) -> DcpLayout:
    """Plan the file and offset of every tensor and object.

    Args:
        manifest: the contents to write; key paths of tensors have one part.
        shard_size: bytes of tensors in one file; a larger tensor is cut.
        uri: the target, for errors.

    Raises:
        UnrepresentableError: a key path without parts, or a name that is a tensor and an object at once.
    """
    root = _root(manifest, uri)
    if not isinstance(root, dict) or () in manifest.lists:
        raise UnrepresentableError(
            "DCP requires a dict at the root of the checkpoint",
            uri=uri,
            cure="choose the target format torch-zip",
        )
    objects = [_DcpItem(name, node, node) for name, node in root.items() if not isinstance(node, TensorSpec)]
    tensors = {name: node for name, node in root.items() if isinstance(node, TensorSpec)}
    groups = _groups(
        (one for name, spec in tensors.items() for one in _pieces(name, spec, shard_size)), shard_size
    )
    groups[0] = [*objects, *groups[0]]
    cuts: dict[KeyPath, list[TensorSpec]] = {}
    items: list[ItemPlan] = []
    files: dict[str, tuple[list[ArchivePlan], int]] = {}
    for number, group in enumerate(groups):
        file = f"__{number}_0.distcp"
        files[file] = place_archives((alike(piece.stored) for piece in group), file)
        items += [
            ItemPlan(piece.name, piece.content, file, plan, piece.chunk)
            for piece, plan in zip(group, files[file][0], strict=True)
        ]
        for piece in group:
            if piece.stored is not piece.content:
                cuts.setdefault(piece.content.path, []).append(piece.stored)
    return DcpLayout(tuple(items), files, cuts)


def _root(manifest: Manifest, uri: str) -> Any:
    """The object to save. Tensors lie in its root, where no tree has to be built of a hundred thousand of them."""
    noted = manifest.custom.get("pickle")
    if not noted and all(len(path) == 1 for path in manifest.tensors):
        rest = build(replace(manifest, tensors={}), uri) if manifest.values or manifest.empties else {}
        names = {path[0]: spec for path, spec in manifest.tensors.items()}
        if isinstance(rest, dict) and rest.keys().isdisjoint(names):
            return {**names, **rest}
    return build(manifest, uri)


def _pieces(name: str, spec: TensorSpec, most: int) -> Iterator[_DcpItem]:
    """The chunks of a tensor; one of several is stored as a tensor whose key path is below that of the tensor."""
    chunks = _cut(spec.shape, spec.dtype, max(most, LEAST_CHUNK))
    if len(chunks) == 1:
        yield _DcpItem(name, spec, spec, chunks[0])
        return
    for number, chunk in enumerate(chunks):
        yield _DcpItem(name, spec, TensorSpec((*spec.path, str(number)), chunk.sizes, spec.dtype), chunk)


@lru_cache(1 << 12)
def _cut(shape: tuple[int, ...], dtype: str, most: int) -> tuple[Chunk, ...]:
    """The chunks of all tensors of one dtype and shape, of which a large model has thousands."""
    return tuple(cut_rows(shape, dtypes.bits(dtype) // 8, most))


def _groups(pieces: Iterable[_DcpItem], most: int) -> list[list[_DcpItem]]:
    groups: list[list[_DcpItem]] = [[]]
    filled = 0
    for piece in pieces:
        if groups[-1] and filled + piece.stored.nbytes > most:
            groups.append([])
            filled = 0
        groups[-1].append(piece)
        filled += piece.stored.nbytes
    return groups


def metadata(layout: DcpLayout, nested: Mapping[str, Any], profile: str) -> bytes:
    """Emit the bytes of `.metadata`.

    Args:
        layout: the layout of the checkpoint.
        nested: flat name → parts of the nested path, from the source's own metadata if it had one; used if the parts
            still join to the name.
        profile: `default` or `2.3`.
    """
    out = PickleWriter()
    items = sorted(layout.items, key=attrgetter("name"))
    fields: dict[str, Callable[[], None]] = {
        "planner_data": lambda: out.group(_paths(out, items, nested)),
        "state_dict_metadata": lambda: out.group(_descriptions(out, items, profile)),
        "storage_data": lambda: out.group(_places(out, items)),
        "storage_meta": lambda: out.value(None),
        "version": lambda: out.value(FORMAT),
    }
    out.state(names.METADATA, "Metadata", fields.items())
    return out.done()


def _by_name(items: Iterable[ItemPlan]) -> Iterator[tuple[str, list[ItemPlan]]]:
    """Each name with its items: the chunks of a tensor, or an object; a large model has 100,000 names."""
    return ((name, list(rows)) for name, rows in groupby(items, attrgetter("name")))


def _paths(out: PickleWriter, items: Iterable[ItemPlan], nested: Mapping[str, Any]) -> Iterator[None]:
    """Each name with its nested path."""
    for name, _rows in _by_name(items):
        out.word(name)
        yield _path(out, name, nested)


def _descriptions(out: PickleWriter, items: Iterable[ItemPlan], profile: str) -> Iterator[None]:
    """Each name with what it is."""
    for name, rows in _by_name(items):
        out.word(name)
        yield _describe(out, rows, profile)


def _places(out: PickleWriter, items: Iterable[ItemPlan]) -> Iterator[None]:
    """Each chunk or object with its place."""
    for _name, rows in _by_name(items):
        for number, item in enumerate(rows):
            _key(out, item, number)
            yield _info(out, item)


def _path(out: PickleWriter, name: str, nested: Mapping[str, Any]) -> None:
    parts = tuple(nested.get(name) or ()) if nested else ()
    if len(parts) > 1 and ".".join(map(str, parts)) == name:
        out.tuple_of(parts)
    else:
        out.word(name)
        out.raw(b"\x85")


def _describe(out: PickleWriter, items: Sequence[ItemPlan], profile: str) -> None:
    spec = items[0].content
    if not isinstance(spec, TensorSpec):
        out.state(names.METADATA, "BytesStorageMetadata", ())
        return
    out.copied((spec.dtype, spec.shape), partial(_tensor, out, spec, items, profile))


def _tensor(out: PickleWriter, spec: TensorSpec, items: Iterable[ItemPlan], profile: str) -> None:
    """A tensor and its chunks; tensors of one dtype or shape are cut alike, and share what describes them."""
    old_names = profile == WIDEST
    chunks = [item.chunk for item in items if item.chunk is not None]
    fields: Iterable[tuple[str, Callable[[], None]]] = (
        (
            "chunks",
            lambda: out.sequence(
                [partial(out.shared, ("chunk", *chunk), partial(_chunk, out, chunk)) for chunk in chunks]
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
    out.state(names.METADATA, "TensorStorageMetadata", fields)


def _chunk(out: PickleWriter, chunk: Chunk) -> None:
    fields: Iterable[tuple[str, Callable[[], None]]] = (
        ("offsets", lambda: size(out, chunk.offsets)),
        ("sizes", lambda: size(out, chunk.sizes)),
    )
    out.state(names.METADATA, "ChunkStorageMetadata", fields)


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
    module = names.OLD_PROPERTIES if old_names else names.METADATA
    out.name(module, "TensorProperties")
    out.raw(b")\x81(")
    out.name("torch", dtype)
    out.name("torch.serialization", "_get_layout")
    out.word(names.STRIDED)
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


def _key(out: PickleWriter, item: ItemPlan, number: int) -> None:
    """The key of an item: the number is that of the chunk among those of its tensor."""
    out.copied(_key_begins, partial(_key_begins, out))
    out.word(item.name)
    chunk = item.chunk
    if chunk is not None:
        out.copied((_key, number, chunk.offsets), partial(_chunk_number, out, number, chunk.offsets))
    out.raw(_ENDS)


def _key_begins(out: PickleWriter) -> None:
    out.begin_state(names.METADATA, "MetadataIndex")
    out.word("fqn")


def _chunk_number(out: PickleWriter, number: int, offsets: tuple[int, ...]) -> None:
    out.word("index")
    out.value(number)
    out.word("offset")
    size(out, offsets)


def _info(out: PickleWriter, item: ItemPlan) -> None:
    plan, file = item.plan, item.file
    out.copied((_info, plan.length), partial(_length, out, plan.length))
    out.value(plan.start)
    out.copied((_info, file), partial(_file, out, file))


def _length(out: PickleWriter, length: int) -> None:
    out.begin_state(names.FILESYSTEM, "_StorageInfo")
    out.word("length")
    out.value(length)
    out.word("offset")


def _file(out: PickleWriter, file: str) -> None:
    out.word("relative_path")
    out.word(file)
    out.raw(_ENDS)
