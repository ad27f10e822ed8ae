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
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from wherry.core import dtypes
from wherry.core.tensorspec import TensorSpec
from wherry.errors import UnrepresentableError
from wherry.integrations.containers.pickle.writer import PickleWriter, integer
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

    _Row: TypeAlias = tuple["ItemPlan", ArchivePlan]  # of an item

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
        stored: what its archive holds.
        chunk: the part of the tensor; None for an object.
    """

    name: str
    content: Any
    stored: Any
    chunk: Chunk | None = None


@dataclass(frozen=True, slots=True)
class DcpLayout:
    """The layout of a checkpoint to write.

    Attributes:
        items: objects, then tensors; the chunks of a tensor follow one another.
        files: name → archives in it, and its size; all archives are those of the items, in this order.
        cuts: key path of each tensor of several chunks → these, as tensors that the archives hold.
    """

    items: Sequence[ItemPlan]
    files: dict[str, tuple[list[ArchivePlan], int]]
    cuts: Mapping[KeyPath, Sequence[TensorSpec]]


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
    objects = [ItemPlan(name, node, node) for name, node in root.items() if not isinstance(node, TensorSpec)]
    tensors = {name: node for name, node in root.items() if isinstance(node, TensorSpec)}
    groups = _groups(tensors, shard_size)
    groups[0] = [*objects, *groups[0]]
    files: dict[str, tuple[list[ArchivePlan], int]] = {}
    for number, group in enumerate(groups):
        file = f"__{number}_0.distcp"
        files[file] = place_archives((alike(item.stored) for item in group), file)
    items = list(chain.from_iterable(groups))
    cuts: dict[KeyPath, list[TensorSpec]] = {}
    for item in items:
        if item.stored is not item.content:
            cuts.setdefault(item.content.path, []).append(item.stored)
    return DcpLayout(items, files, cuts)


def _root(manifest: Manifest, uri: str) -> Any:
    """The object to save. Tensors lie in its root, where no tree has to be built of a hundred thousand of them."""
    noted = manifest.custom.get("pickle")
    if not noted and all(len(path) == 1 for path in manifest.tensors):
        rest = build(replace(manifest, tensors={}), uri) if manifest.values or manifest.empties else {}
        names = {path[0]: spec for path, spec in manifest.tensors.items()}
        if isinstance(rest, dict) and rest.keys().isdisjoint(names):
            return {**names, **rest}
    return build(manifest, uri)


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


def _groups(tensors: Mapping[str, TensorSpec], most: int) -> list[list[ItemPlan]]:
    """The chunks of tensors by file."""
    groups: list[list[ItemPlan]] = [[]]
    filled = 0
    for name, spec in tensors.items():
        for piece in _pieces(name, spec, most):
            nbytes = piece.stored.nbytes
            if groups[-1] and filled + nbytes > most:
                groups.append([])
                filled = 0
            groups[-1].append(piece)
            filled += nbytes
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
    archives = chain.from_iterable(plans for plans, _size in layout.files.values())
    rows = sorted(zip(layout.items, archives, strict=True), key=_name)
    fields: dict[str, Callable[[], None]] = {
        "planner_data": lambda: out.group(_paths(out, rows, nested)),
        "state_dict_metadata": lambda: out.group(_descriptions(out, rows, profile)),
        "storage_data": lambda: out.group(_places(out, rows)),
        "storage_meta": lambda: out.value(None),
        "version": lambda: out.value(FORMAT),
    }
    out.state(names.METADATA, "Metadata", fields.items())
    return out.done()


def _name(row: _Row) -> str:
    return row[0].name


def _paths(out: PickleWriter, rows: Iterable[_Row], nested: Mapping[str, Any]) -> Iterator[None]:
    """Each name with its nested path."""
    for name, _same in groupby(rows, _name):
        first, parts = out.stored(name), tuple(nested.get(name) or ()) if nested else ()
        if len(parts) > 1 and ".".join(map(str, parts)) == name:
            out.raw(first)
            yield out.tuple_of(parts)
        else:
            yield out.raw(first + out.stored(name) + b"\x85")


def _descriptions(out: PickleWriter, rows: Iterable[_Row], profile: str) -> Iterator[None]:
    """Each name with what it is; tensors of one dtype and shape are cut alike."""
    for name, same in groupby(rows, _name):
        items, key = [item for item, _plan in same], (out.stored(name),)
        spec = items[0].content
        if isinstance(spec, TensorSpec):
            yield out.like((spec.dtype, spec.shape), key, partial(_tensor, out, items, profile))
        else:
            out.raw(*key)
            yield out.state(names.METADATA, "BytesStorageMetadata", ())


def _places(out: PickleWriter, rows: Iterable[_Row]) -> Iterator[None]:
    """Each chunk or object with its place."""
    before, number = "", 0
    for item, plan in rows:
        name, chunk = item.name, item.chunk
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


def _place(out: PickleWriter, number: int, offsets: tuple[int, ...] | None, length: int, file: str) -> None:
    """The key of an item and where it lies: the number is that of the chunk among those of its tensor."""
    out.begin_state(names.METADATA, "MetadataIndex")
    out.word("fqn")
    out.gap()
    if offsets is not None:
        out.word("index")
        out.value(number)
        out.word("offset")
        size(out, offsets)
    out.raw(_ENDS)
    out.begin_state(names.FILESYSTEM, "_StorageInfo")
    out.word("length")
    out.value(length)
    out.word("offset")
    out.gap()
    out.word("relative_path")
    out.word(file)
    out.raw(_ENDS)
