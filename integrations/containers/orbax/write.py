"""The shared parts of formats that write an Orbax item: options, chunk grids, the layout, the step.

Chunk grids that match a mesh: a shard is a whole number of chunks, so that no device reads the shard of another.

Besides `auto`, `whole` and a number of MiB, the option `chunks` accepts:

    8x1                                          parts along each axis; an axis that the number does not divide, and
                                                 axes beyond the last number, stay whole
    mesh:data=4,model=2;spec:*/kernel=data,model   a mesh, and partition specs by a pattern of the printed key path:
                                                 one entry for each axis, a mesh axis, several joined with `+`, or `-`
    mesh:data=4,model=2;rules:embed=data,mlp=model  the same by the logical axis names of a tensor, if it has any

Clauses are separated by `;`, `spec:` may come several times, the first pattern that matches counts and takes precedence
over `rules:`. As in JAX a spec must not be longer than the tensor's rank, and every extent must be divisible by the
number of devices that it is split over. A shard of more than 8 MiB becomes several chunks, none of which crosses its
border; if no divisor of its extent gives 1 to 8 MiB, the next larger one is used.

Checks what Orbax can hold, and chooses chunk grids, when a conversion is planned and before any byte moves.

The small files that wherry's writer puts next to the arrays, and the notes in them for wherry's reader.

The layout of an Orbax item: its arrays, then the small files of a save, the marker `commit_success.txt` last.

Systems with other files around their arrays take some of these files, and add their own.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, TypeAlias

from wherry.core import dtypes
from wherry.core.keypath import KeyPath, joined_names, render
from wherry.core.lazy_dataclass import dataclass
from wherry.core.manifest import Manifest
from wherry.core.numbers import decimal_number
from wherry.core.tensorspec import GRID, AxisName, TensorSpec
from wherry.core.units import parse_size
from wherry.cures import Argument, Cure
from wherry.errors import UnrepresentableError, UsageError
from wherry.formats.format import Option, Options
from wherry.integrations.containers.orbax import layout, partitioning
from wherry.integrations.containers.orbax.layout import (
    DATA_FILE_SIZE,
    is_reserved,
)
from wherry.integrations.containers.orbax.partitioning import rules_only
from wherry.integrations.containers.orbax.tree import (
    PRNG,
    array_metadatas_json,
    key_data,
    shardings_json,
    stored_name,
    tree_json,
)
from wherry.integrations.containers.zarr import metadata
from wherry.integrations.containers.zarr.layout import (
    IN_STORE,
    SCALARS,
    ArrayForm,
    auto_chunks,
    chunks_in_store,
)
from wherry.integrations.containers.zarr.layout import lay_out as lay_out_arrays
from wherry.store.location import Location
from wherry.target.file_map import Chunks, File, FileMap, Scene, map_of_chunks
from wherry.target.files import put_in_order
from wherry.version import __version__

Entry: TypeAlias = tuple[str, ...]  # the mesh axes that one axis is split over

HELP = (
    "chunk size: auto (4 to 8 MiB), store (up to 32 MiB), whole, a number of MiB, parts along each axis (8x1), or a "
    "mesh with partition specs so that each shard is whole chunks (mesh:data=4,model=2;spec:*/kernel=data,model, or "
    "with logical axis names mesh:data=4;rules:embed=data)"
)
_COUNTS = re.compile(r"[1-9]\d*(x[1-9]\d*)*x?")
_MOST, _LEAST = 8 << 20, 1 << 20
_CURE = Cure(
    "write for example `{}`, or `{}`",
    Argument("set", "chunks=8x1"),
    Argument("set", "chunks=mesh:data=4,model=2;spec:*/kernel=data,model;rules:embed=data"),
)


@dataclass(frozen=True, slots=True)
class Partition:
    """A parsed option.

    Attributes:
        mesh: mesh axis → devices along it.
        specs: pattern of printed key paths → entry of each axis, in the order given.
        rules: logical axis name → mesh axes.
    """

    mesh: dict[str, int]
    specs: tuple[tuple[str, tuple[Entry, ...]], ...]
    rules: dict[str, Entry]


def is_partition(option: str) -> bool:
    """Whether an option cuts axes into parts or follows a mesh: one of the three forms at the top of this module."""
    return option.startswith("mesh:") or ("x" in option and _COUNTS.fullmatch(option) is not None)


def chunks_for(spec: TensorSpec, option: str) -> tuple[int, ...]:
    """The chunk grid of a tensor.

    Raises:
        UsageError: the option is invalid, or does not fit the tensor.
    """
    return shard_chunks(spec, parts_along(spec, option))


def parts_along(spec: TensorSpec, option: str) -> tuple[int, ...]:
    """Into how many equal parts an option cuts each axis of a tensor.

    Raises:
        UsageError: the option is invalid, or does not fit the tensor.
    """
    if option.startswith("mesh:"):
        return _parts_on_mesh(spec, parse_partition(option))
    counts = [int(count) for count in option.split("x") if count]
    counts += [1] * (len(spec.shape) - len(counts))
    return tuple(1 if extent % count else count for extent, count in zip(spec.shape, counts, strict=False))


def shard_chunks(spec: TensorSpec, parts: Sequence[int]) -> tuple[int, ...]:
    """Extents of a chunk so that each shard is whole chunks, of at most 8 MiB where its extents can be divided.

    Args:
        spec: the tensor.
        parts: equal parts along each axis; each divides its extent.
    """
    shard = tuple(extent // count for extent, count in zip(spec.shape, parts, strict=True))
    if all(count == 1 for count in parts):
        return auto_chunks(spec.shape, spec.dtype)
    return _cut(shard, tuple(count > 1 for count in parts), spec.dtype)


def _cut(shard: tuple[int, ...], split: tuple[bool, ...], dtype: str) -> tuple[int, ...]:
    """Cut along the first axes; where an axis is split over devices, only by a divisor of the shard's extent."""
    if not shard or dtypes.canonical_size(dtype, math.prod(shard)) <= _MOST:
        return tuple(max(extent, 1) for extent in shard)
    row = dtypes.canonical_size(dtype, math.prod(shard[1:]))
    if row > _MOST:
        return (1, *_cut(shard[1:], split[1:], dtype))
    if not split[0]:
        return (_MOST // row, *shard[1:])
    small = [one for one in range(1, math.isqrt(shard[0]) + 1) if shard[0] % one == 0]
    divisors = sorted({*small, *(shard[0] // one for one in small)})
    fitting = max(rows for rows in divisors if rows * row <= _MOST)
    large = next((rows for rows in divisors if rows * row >= _LEAST), shard[0])
    return (max(fitting, large), *shard[1:])


@cache
def parse_partition(option: str) -> Partition:
    """Read the `mesh:` form of the option.

    Raises:
        UsageError: it is not well formed, or names an axis that the mesh does not have.
    """
    mesh: dict[str, int] = {}
    specs: list[tuple[str, tuple[Entry, ...]]] = []
    rules: dict[str, Entry] = {}
    for clause in option.split(";"):
        kind, _, text = clause.partition(":")
        if kind == "mesh":
            mesh.update({name: _extent(size, option) for name, size in _pairs(text, option)})
        elif kind == "rules":
            rules.update({name: _entry(axes) for name, axes in _pairs(text, option)})
        elif kind == "spec" and "=" in text:
            pattern, _, entries = text.rpartition("=")
            specs.append((pattern, tuple(_entry(entry) for entry in entries.split(","))))
        else:
            raise UsageError(
                f"invalid clause {clause!r} in chunks; expected mesh:, spec: or rules:", cure=_CURE
            )
    every = [*rules.values(), *(entry for _pattern, spec in specs for entry in spec)]
    unknown = sorted({axis for entry in every for axis in entry} - mesh.keys())
    if unknown:
        raise UsageError(f"unknown mesh axis in chunks: {', '.join(unknown)}", cure=_CURE)
    if not every:
        raise UsageError("missing spec: or rules: in chunks", cure=_CURE)
    return Partition(mesh, tuple(specs), rules)


def _parts_on_mesh(spec: TensorSpec, partition: Partition) -> tuple[int, ...]:
    entries = _entries(spec, partition)
    if len(entries) > len(spec.shape):
        raise UsageError(
            f"partition spec has {len(entries)} entries, the tensor {len(spec.shape)} axes",
            path=spec.name,
            cure="add a spec: for this tensor before the pattern that matched it",
        )
    used = [axis for entry in entries for axis in entry]
    if len(used) != len(set(used)):
        raise UsageError(
            f"duplicate mesh axis in a partition spec: {', '.join(used)}", path=spec.name, cure=_CURE
        )
    entries += ((),) * (len(spec.shape) - len(entries))
    parts = tuple(math.prod(partition.mesh[axis] for axis in entry) for entry in entries)
    for extent, count in zip(spec.shape, parts, strict=True):
        if extent % count:
            raise UsageError(
                f"extent {extent} is not divisible by {count} devices",
                path=spec.name,
                cure="add a spec: for this tensor before the pattern that matched it",
            )
    return parts


def _entries(spec: TensorSpec, partition: Partition) -> tuple[Entry, ...]:
    """The partition spec of a tensor; empty if no clause matches it, and for a tensor of rank 0."""
    if not spec.shape:
        return ()
    found = next((entries for pattern, entries in partition.specs if fnmatchcase(spec.name, pattern)), None)
    if found is not None:
        return found
    return tuple(_apply_rules(axis, partition.rules) for axis in spec.axes or ())


def _apply_rules(axis: AxisName, rules: dict[str, Entry]) -> Entry:
    names = axis if isinstance(axis, tuple) else (axis,)
    return tuple(mesh_axis for name in names for mesh_axis in rules.get(str(name), ()))


def _pairs(text: str, option: str) -> list[tuple[str, str]]:
    pairs = [pair.partition("=") for pair in text.split(",")]
    if not all(name and separator and value for name, separator, value in pairs):
        raise UsageError(f"invalid value for chunks: {option!r}; expected pairs NAME=VALUE", cure=_CURE)
    return [(name.strip(), value.strip()) for name, _separator, value in pairs]


def _extent(text: str, option: str) -> int:
    extent = decimal_number(text)
    if not extent:
        raise UsageError(f"invalid number of devices {text!r} in chunks={option}", cure=_CURE)
    return extent


def _entry(text: str) -> Entry:
    return () if text.strip() in ("", "-") else tuple(axis.strip() for axis in text.split("+"))


STEP_ITEM = "default"
CHUNK_HELP = "chunk size: auto (4 to 8 MiB), store (up to 32 MiB), whole, or a number of MiB"
FILE_OPTION = Option(DATA_FILE_SIZE, "maximum size of a data file of an OCDBT database, for example 256MiB")
OPTIONS = {
    "zarr": Option("2", "zarr version", ("2", "3")),
    "ocdbt": Option(default=True, help="write one OCDBT database instead of one folder per array"),
    "compression": Option("none", "compression of chunks", ("none", "zstd")),
    "chunks": Option("auto", HELP),
    "data_file_size": FILE_OPTION,
}


def prepare(manifest: Manifest, options: Options) -> Manifest:
    """The manifest with the chunk grid that the writer will use.

    Raises:
        UnrepresentableError: Orbax cannot hold part of it.
    """
    refuse_unrepresentable(manifest, options)
    specs = {
        path: replace(spec, chunks=chunks_of(spec, options["chunks"]), sharding=rules_only(spec.sharding))
        for path, spec in manifest.tensors.items()
    }
    return replace(manifest, tensors=specs)


def in_store(options: Options) -> Options:
    """See Format: where each chunk is an object, there are fewer and larger ones; OCDBT packs them."""
    packed = options.get("ocdbt", False)
    return options if packed or options["chunks"] != "auto" else {**options, "chunks": IN_STORE}


def version(_manifest: Manifest, options: Options) -> str:
    """The format version that these options give."""
    return f"{'ocdbt' if options['ocdbt'] else 'per-array directories'} zarr{options['zarr']}"


LOCK_SUFFIX = ".__lock"  # tensorstore ignores such files, as temporary files that it has not renamed yet
_INT64 = range(-(1 << 63), 1 << 63)
_WHOLE_MIB = 1 << 20
_LONGEST_NAME = 255  # bytes of a file name
_SHOWN = 60  # characters of a name in an error
# Endings of the files by which folders of other systems are recognised.
_WEIGHTS = (".safetensors", ".index.json", ".bin", ".msgpack", ".pth", ".distcp")


def refuse_unrepresentable(
    manifest: Manifest,
    options: Options,
    uri: str = "",
    *,
    top: bool = True,
    cure: str = Cure("omit {}", Argument("set", "ocdbt=false")),
) -> None:
    """Refuse a manifest with leaves that Orbax cannot hold or would lose.

    Args:
        manifest: what will be written.
        options: of the Orbax writer.
        uri: the target, for errors.
        top: whether arrays may lie at the top of the checkpoint, where files of other systems would be.
        cure: what to do where a key path cannot be a folder.

    Raises:
        UnrepresentableError: a dtype or value, a tensor without elements, or two leaves with the same name.
        HostileError: a key path would leave the folder.
    """
    leaves = [*manifest.tensors, *(path for path, value in manifest.values.items() if value is not None)]
    names = joined_names(leaves, stored_name, uri)
    for spec in manifest.tensors.values():
        if spec.dtype not in metadata.STORABLE:
            raise UnrepresentableError(
                f"Orbax does not support dtype {spec.dtype}",
                uri=uri,
                path=spec.name,
                cure=Cure("pass {} to cast it", Argument("dtype")),
            )
        if spec.size == 0:
            raise UnrepresentableError(
                "Orbax does not support tensors without elements", uri=uri, path=spec.name
            )
    for path, value in manifest.values.items():
        if isinstance(value, int) and value not in _INT64:
            raise UnrepresentableError(f"{value} exceeds 64 bits", uri=uri, path=render(path))
    if not options["ocdbt"]:
        _refuse_file_names(names, uri, top=top, cure=cure)


def _refuse_file_names(names: dict[str, KeyPath], uri: str, *, top: bool, cure: str) -> None:
    """Without OCDBT a name is a folder: it must stay inside, fit a file system, and not contain another array.

    At the top it must be no file of Orbax, nor named like weights of another system, as which the folder would then be
    detected. A single leaf with the empty name is stored in the item folder itself.
    """
    for name, path in names.items():
        parts = name.split("/")
        inside_another = any("/".join(parts[:depth]) in names for depth in range(1, len(parts)))
        odd = any(map(unfit, parts)) or (top and parts[0].endswith(_WEIGHTS))
        alone = not name and len(names) == 1
        if not alone and (odd or inside_another or is_reserved(parts[0])):
            raise UnrepresentableError(
                f"{name[:_SHOWN]!r} cannot be the folder of an array", uri=uri, path=render(path), cure=cure
            )


def unfit(part: str) -> bool:
    """Whether a part of a name cannot be the name of a folder."""
    long = len(part.encode(errors="surrogatepass")) > _LONGEST_NAME
    return part in ("", ".", "..") or part.endswith(LOCK_SUFFIX) or "\0" in part or long


def chunks_of(spec: TensorSpec, option: str) -> tuple[int, ...]:
    """The chunk grid of a tensor under the option `chunks`, whose forms the module describes.

    Raises:
        UsageError: the option is invalid, or does not fit the tensor.
    """
    hinted = (spec.tags or {}).get(GRID)
    if option in ("auto", IN_STORE) and hinted is not None:
        return tuple(map(int, hinted.split("x")))
    if option == "auto":
        return auto_chunks(spec.shape, spec.dtype)
    if option == IN_STORE:
        return chunks_in_store(spec.shape, spec.dtype)
    if option == "whole":
        return tuple(max(extent, 1) for extent in spec.shape)
    if is_partition(option):
        return chunks_for(spec, option)
    mib = decimal_number(option)
    if not mib:
        raise UsageError(
            f"invalid value for chunks: {option!r}",
            cure="pass auto, store, whole, a number of MiB, parts along each axis (8x1), or mesh:…;spec:… for a mesh",
        )
    return auto_chunks(spec.shape, spec.dtype, mib * _WHOLE_MIB)


HANDLER = "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler"
WRITTEN = b"Written by wherry.\n"
MARKER = File(layout.COMMITTED, lambda: WRITTEN)  # of a save that is complete


def noted_facts(manifest: Manifest, name: Callable[[KeyPath], str] = stored_name) -> dict[str, Any]:
    """Facts that Orbax cannot store: provenance, numbers among the arrays, PRNG keys, axis names, foreign metadata.

    Args:
        manifest: the manifest of the target.
        name: the name of a leaf, from its key path.
    """
    tensors = manifest.tensors.items()
    noted: dict[str, Any] = {
        "version": __version__,
        "kind": manifest.kind,
        "scalars": [name(path) for path in scalars_of(manifest)],
        "prng": {name(path): spec.tags[PRNG] for path, spec in tensors if spec.tags and PRNG in spec.tags},
        "axes": {name(path): spec.axes for path, spec in tensors if spec.axes is not None},
        "custom": {key: value for key, value in manifest.custom.items() if key not in ("item", "checkpoint")},
    }
    return {key: value for key, value in noted.items() if value}


def checkpoint_file(handlers: str | dict[str, str], created_ns: int, manifest: Manifest) -> File:
    """`_CHECKPOINT_METADATA`.

    Args:
        handlers: the class that restores the item, or each item of a step.
        created_ns: when writing began, in nanoseconds of the Unix epoch.
        manifest: the manifest of the target.
    """
    metadata = {
        "item_handlers": handlers,
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": created_ns,
        layout.COMMIT_TIME: created_ns,
        "custom_metadata": dict(manifest.custom.get("checkpoint") or {}),
    }
    return File(layout.CHECKPOINT, lambda: json.dumps(metadata).encode())


def finish_step(folder: Location, manifest: Manifest) -> None:
    """Complete the step folder that a CheckpointManager reads, around its one item.

    Raises:
        StorageError: the storage failed.
    """
    put_in_order(folder, [checkpoint_file({STEP_ITEM: HANDLER}, time.time_ns(), manifest), MARKER])


_ZARR3 = 3


def lay_out(manifest: Manifest, options: Options, scene: Scene) -> FileMap:
    """The file map of a checkpoint that is one Orbax item."""
    files = [*item_files(manifest, options), checkpoint_file(HANDLER, scene.created_ns, manifest), MARKER]
    return map_of_chunks(arrays_of(manifest, options, scene), files)


def arrays_of(
    manifest: Manifest,
    options: Options,
    scene: Scene,
    name: Callable[[KeyPath], str] = stored_name,
) -> Chunks | None:
    """The arrays of a tree.

    Args:
        manifest: the tree, with grids.
        options: of the format `orbax`; not all are needed.
        scene: what else decides bytes.
        name: the name of an array, from its key path.

    Returns:
        Their files; None if there are no arrays.
    """
    size = parse_size(options.get("data_file_size", layout.DATA_FILE_SIZE)) if options["ocdbt"] else None
    form = ArrayForm(int(options["zarr"]), options["compression"], size)
    return lay_out_arrays(manifest.tensors.values(), form, name, scalars_of(manifest), scene.created_ns)


def scalars_of(manifest: Manifest) -> dict[KeyPath, Any]:
    """The values that are stored as arrays, by their key paths."""
    return {path: value for path, value in manifest.values.items() if type(value) in SCALARS}


def strings_file(manifest: Manifest, name: Callable[[KeyPath], str] = stored_name) -> Iterator[File]:
    """The file with the texts of a tree, if it has some.

    Args:
        manifest: the tree.
        name: the name of a leaf, from its key path.
    """
    strings = {name(path): value for path, value in manifest.values.items() if isinstance(value, str)}
    if strings:
        yield File(layout.STRINGS, lambda: json.dumps(strings).encode())


def item_files(
    manifest: Manifest,
    options: Options,
    noted: Mapping[str, Any] | None = None,
    *,
    typed_keys: bool = True,
    described: Callable[[Manifest], Manifest] = lambda manifest: manifest,
) -> Iterator[File]:
    """The small files of an item that describe its tree.

    Args:
        manifest: the tree, with grids.
        options: of the format `orbax`.
        noted: further facts that Orbax cannot store.
        typed_keys: whether typed PRNG keys are written as such; a system may always restore their plain data.
        described: adds what a system states of the tree in the item's own metadata.
    """
    yield from strings_file(manifest)
    keys = key_data(manifest) if typed_keys else {}
    if keys:
        specs = {path: manifest.tensors[path] for path in keys}
        yield File(layout.SHARDING, lambda: json.dumps(shardings_json(keys)).encode())
        yield File(
            f"{layout.ARRAY_METADATAS}/process_0",
            lambda: json.dumps(array_metadatas_json(keys, specs)).encode(),
        )

    def tree() -> bytes:
        known = {**noted_facts(manifest), **(noted or {})}
        custom = {**partitioning.item_metadata(described(manifest)), "wherry": known}
        is_zarr3 = int(options["zarr"]) == _ZARR3
        return json.dumps(
            tree_json(manifest, zarr3=is_zarr3, ocdbt=options["ocdbt"], custom=custom, keys=keys)
        ).encode()

    yield File(layout.TREE, tree)
