"""Plans the layout of a new DCP checkpoint, and emits its `.metadata`.

Every tensor is one chunk and one item; objects come first, in the first file. Files are named `__<k>_0.distcp` like
those of rank k, so that any number of ranks can load them. Every torch from 2.3 on can read the metadata (2.14 and
older cannot read torch 2.15's own): properties of five fields, no `storage_meta`, no transforms. With the profile `2.3`
the properties have their names from before torch 2.3, which still exist, so that torch 2.0 to 2.15 can read them: files
written by the same rules were loaded by 2.0.1, 2.2.2, 2.3.1, 2.4.1, 2.6.0, 2.9.1, 2.13.0 and 2.15.0 (the tests here
load with the installed torch).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from wherry.core.tensorspec import TensorSpec
from wherry.errors import UnrepresentableError
from wherry.integrations.containers.pickle.writer import PickleWriter
from wherry.integrations.containers.torch.objects import alike, build
from wherry.integrations.containers.torch.writer import place_archives
from wherry.integrations.formats.dcp import rules as names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from wherry.core.manifest import Manifest
    from wherry.integrations.containers.zip.write import ArchivePlan

VERSION = "torch.distributed.checkpoint"
NESTED = "planner_data"  # key of the nested paths in a manifest's `custom`
WIDEST = "2.3"
FORMAT = "1.0.0"


@dataclass(frozen=True, slots=True)
class ItemPlan:
    """One item to write: a tensor or an object.

    Attributes:
        name: its flat name.
        content: TensorSpec, or the object.
        file: the file that will hold it.
        plan: its archive in that file.
    """

    name: str
    content: Any
    file: str
    plan: ArchivePlan


@dataclass(frozen=True, slots=True)
class DcpLayout:
    """The layout of a checkpoint to write.

    Attributes:
        items: objects, then tensors.
        files: name → archives in it, and its size.
    """

    items: tuple[ItemPlan, ...]
    files: dict[str, tuple[list[ArchivePlan], int]]


def lay_out(manifest: Manifest, shard_size: int, uri: str) -> DcpLayout:
    """Plan the file and offset of every tensor and object.

    Args:
        manifest: the contents to write; key paths of tensors have one part.
        shard_size: bytes of tensors in one file, unless a single tensor is larger.
        uri: the target, for errors.

    Raises:
        UnrepresentableError: a key path without parts, or a name that is a tensor and an object at once.
    """
    root = build(manifest, uri)
    if not isinstance(root, dict) or () in manifest.lists:
        raise UnrepresentableError(
            "DCP requires a dict at the root of the checkpoint",
            uri=uri,
            cure="choose the target format torch-zip",
        )
    objects = {name: node for name, node in root.items() if not isinstance(node, TensorSpec)}
    tensors = {name: node for name, node in root.items() if isinstance(node, TensorSpec)}
    groups = _groups(tensors, shard_size)
    groups[0] = {**objects, **groups[0]}
    items: list[ItemPlan] = []
    files: dict[str, tuple[list[ArchivePlan], int]] = {}
    for number, group in enumerate(groups):
        file = f"__{number}_0.distcp"
        files[file] = place_archives(map(alike, group.values()))
        items += [
            ItemPlan(name, node, file, plan)
            for (name, node), plan in zip(group.items(), files[file][0], strict=True)
        ]
    return DcpLayout(tuple(items), files)


def _groups(tensors: Mapping[str, TensorSpec], most: int) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = [{}]
    filled = 0
    for name, spec in tensors.items():
        if groups[-1] and filled + spec.nbytes > most:
            groups.append({})
            filled = 0
        groups[-1][name] = spec
        filled += spec.nbytes
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
    items = sorted(layout.items, key=lambda item: item.name)
    fields: dict[str, Callable[[], None]] = {
        "planner_data": lambda: out.mapping(
            (partial(out.word, item.name), partial(_path, out, item.name, nested)) for item in items
        ),
        "state_dict_metadata": lambda: out.mapping(
            (partial(out.word, item.name), partial(_describe, out, item, profile)) for item in items
        ),
        "storage_data": lambda: out.mapping(
            (partial(_key, out, item), partial(_info, out, item)) for item in items
        ),
        "storage_meta": lambda: out.value(None),
        "version": lambda: out.value(FORMAT),
    }
    out.state(names.METADATA, "Metadata", fields.items())
    return out.done()


def _path(out: PickleWriter, name: str, nested: Mapping[str, Any]) -> None:
    parts = tuple(nested.get(name) or ())
    if len(parts) > 1 and ".".join(map(str, parts)) == name:
        out.tuple_of(parts)
    else:
        out.word(name)
        out.raw(b"\x85")


def _describe(out: PickleWriter, item: ItemPlan, profile: str) -> None:
    spec = item.content
    if not isinstance(spec, TensorSpec):
        out.state(names.METADATA, "BytesStorageMetadata", ())
        return
    out.copied((spec.dtype, spec.shape), lambda: _tensor(out, spec, profile))


def _tensor(out: PickleWriter, spec: TensorSpec, profile: str) -> None:
    """A tensor of one chunk; tensors of one dtype or shape share what describes it."""
    chunk, old_names = ("chunk", spec.shape), profile == WIDEST
    fields: Iterable[tuple[str, Callable[[], None]]] = (
        ("chunks", lambda: out.sequence([lambda: out.shared(chunk, lambda: _chunk(out, spec.shape))])),
        (
            "properties",
            lambda: out.shared(
                ("properties", spec.dtype), lambda: properties(out, spec.dtype, old_names=old_names)
            ),
        ),
        ("size", lambda: size(out, spec.shape)),
    )
    out.state(names.METADATA, "TensorStorageMetadata", fields)


def _chunk(out: PickleWriter, shape: tuple[int, ...]) -> None:
    fields: Iterable[tuple[str, Callable[[], None]]] = (
        ("offsets", lambda: size(out, (0,) * len(shape))),
        ("sizes", lambda: size(out, shape)),
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


def _key(out: PickleWriter, item: ItemPlan) -> None:
    spec = item.content
    fields: list[tuple[str, Callable[[], None]]] = [("fqn", lambda: out.word(item.name))]
    if isinstance(spec, TensorSpec):
        fields += [
            ("index", lambda: out.value(0)),
            ("offset", lambda: size(out, (0,) * len(spec.shape))),
        ]
    out.state(names.METADATA, "MetadataIndex", fields)


def _info(out: PickleWriter, item: ItemPlan) -> None:
    fields: Iterable[tuple[str, Callable[[], None]]] = (
        ("length", lambda: out.value(item.plan.length)),
        ("offset", lambda: out.value(item.plan.start)),
        ("relative_path", lambda: out.word(item.file)),
    )
    out.state(names.FILESYSTEM, "_StorageInfo", fields)
