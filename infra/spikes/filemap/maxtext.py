"""MaxText: a step folder around an Orbax item, whose zarr 3 arrays are compressed chunks in packs of an OCDBT database.

Packs are filled by the sizes of chunks before encoding, so which chunk is in which file follows from the manifest.
Metadata of the arrays, the tree over all chunks and the manifest of the database are Late: they need sizes only.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from functools import cache
from typing import TYPE_CHECKING, Any

import zstandard

from infra.spikes.filemap.nouns import (
    Codec,
    Copied,
    File,
    FileMap,
    Grids,
    Late,
    Literal,
    Pack,
    Range,
    Segments,
    Sizes,
    packs_of,
)
from wherry.core.digest import sha256_of
from wherry.core.tensorspec import Span
from wherry.core.units import parse_size
from wherry.integrations.containers.ocdbt.write import Reference, encode_database
from wherry.integrations.containers.orbax import layout as orbax
from wherry.integrations.containers.orbax import partitioning
from wherry.integrations.containers.orbax.small_files import WRITTEN, notes
from wherry.integrations.containers.orbax.tree import stored_name, tree_json
from wherry.integrations.containers.zarr import metadata as zarr
from wherry.integrations.containers.zarr import new
from wherry.integrations.formats.maxtext import shape, step

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from infra.spikes.filemap.nouns import Known, Scene, Segment
    from wherry.core.keypath import KeyPath
    from wherry.core.manifest import Manifest
    from wherry.core.tensorspec import Region, TensorSpec

_ITEM = f"{step.ITEM}/"
_HANDLER = "orbax.checkpoint.experimental.v1._src.handlers.pytree_handler.PyTreeHandler"
_ZARR = 3


def layout(manifest: Manifest, options: Mapping[str, Any], scene: Scene) -> FileMap:
    """The files of a step folder."""
    grids = Grids(list(manifest.tensors.values()), zstd())
    packs = packs_of(grids, parse_size(options["data_file_size"]))
    database = _Database(grids, packs, scene)
    starts = [pack.chunks.first for pack in packs]  # pyright: ignore[reportAttributeAccessIssue]

    def places(path: KeyPath, part: Region | Span) -> Iterator[Range]:
        assert not isinstance(part, Span), "arrays are written in chunks"
        spec = grids.specs[grids.paths.number(path)]
        number = grids.number(
            path, [at.start // size for at, size in zip(part, spec.chunks or (), strict=True)]
        )
        pack = bisect_right(starts, number) - 1
        yield Range(pack, number - starts[pack], number - starts[pack] + 1)

    tree = {"zarr3": True, "ocdbt": bool(options["ocdbt"]), "custom": _custom(manifest)}
    small = {
        f"{_ITEM}{orbax.TREE}": json.dumps(tree_json(manifest, **tree)).encode(),
        f"{_ITEM}{orbax.COMMITTED}": WRITTEN,
        orbax.CHECKPOINT: json.dumps(_checkpoint(manifest, scene)).encode(),
        orbax.COMMITTED: WRITTEN,
    }
    files = [
        *(File(_data_file(number), pack) for number, pack in enumerate(packs)),
        File(f"{_ITEM}{database.nodes}", Late(database.needs, database.tree)),
        File(f"{_ITEM}{orbax.MANIFEST}", Late(database.needs, database.manifest)),
        *(_copied(one.name, one.size) for one in manifest.companions),
        *(_literal(name, data) for name, data in small.items()),
    ]
    return FileMap(tuple(files), places, (orbax.COMMITTED,))


class _Database:
    """The tree over chunks and the metadata of arrays, and its manifest."""

    def __init__(self, grids: Grids, packs: Sequence[Pack], scene: Scene) -> None:
        self._grids, self._packs, self._scene = grids, packs, scene
        self.needs = tuple(Sizes(number, len(pack.chunks)) for number, pack in enumerate(packs))
        # The same keys, and so the same name, as `wherry.integrations.containers.zarr.layout`.
        self._id = sha256_of("ocdbt", sorted([*self._metadata(), *self._keys()]))[:32]
        self.nodes = f"d/{self._id}"

    def tree(self, known: Known) -> bytes:
        """The file with the nodes of the tree."""
        return self._encoded(known)[0]

    def manifest(self, known: Known) -> bytes:
        """The manifest of the database."""
        return self._encoded(known)[1]

    def _encoded(self, known: Known) -> tuple[bytes, bytes]:
        values: dict[str, Any] = dict(self._metadata())
        keys = self._keys()
        for number, need in enumerate(self.needs):
            offset, name = 0, _data_file(number).removeprefix(_ITEM)
            for size in known.sizes(need) or ():
                values[next(keys)] = Reference(name, offset, size)
                offset += size
        return encode_database(values, self.nodes, bytes.fromhex(self._id), self._scene.created_ns)

    def _metadata(self) -> dict[str, bytes]:
        """The value beside the chunks of each array."""
        return {f"{_prefix(spec)}{zarr.METADATA_NAMES[_ZARR]}": _array(spec) for spec in self._grids.specs}

    def _keys(self) -> Iterator[str]:
        """The key of each chunk, in the order of the packs."""
        for number in range(len(self._grids)):
            spec, index = self._grids.locate(number)
            yield f"{_prefix(spec)}{'/'.join(['c', *map(str, index)])}"


def _prefix(spec: TensorSpec) -> str:
    return f"{stored_name(spec.path)}/"


def _array(spec: TensorSpec) -> bytes:
    return new.text(spec.dtype, spec.shape, spec.chunks or (), _ZARR, "zstd")


def _data_file(number: int) -> str:
    return f"{_ITEM}d/{number:032x}"


def _copied(name: str, size: int) -> File:
    return _of_one(f"{_ITEM}{orbax.ASSETS}/{name}", Copied(name, Span(0, size)), size)


def _literal(name: str, data: bytes) -> File:
    return _of_one(name, Literal(data), len(data))


def _of_one(name: str, segment: Segment, nbytes: int) -> File:
    """A file of one segment."""
    segments = Segments(lambda _row, _number: segment)
    segments.add(nbytes)
    return File(name, segments)


def _custom(manifest: Manifest) -> dict[str, Any]:
    return {**partitioning.item_metadata(manifest), "wherry": {**notes(manifest, ()), "format": step.NAME}}


def _checkpoint(manifest: Manifest, scene: Scene) -> dict[str, Any]:
    """`_CHECKPOINT_METADATA`; MaxText refuses a step whose `scan_layers` is not that of its config."""
    root = shape.parameter_root(manifest.tensors, confirmed=True)
    scanned = None if root is None else shape.look(manifest.tensors, root).scanned
    return {
        "item_handlers": {step.ITEM: _HANDLER},
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": scene.created_ns,
        orbax.COMMIT_TIME: scene.created_ns,
        "custom_metadata": {} if scanned is None else {"scan_layers": scanned},
    }


@cache
def zstd() -> Codec:
    """Zstd as zarr 3 has it: level 1, with a checksum."""
    build = f"zstd {'.'.join(map(str, zstandard.ZSTD_VERSION))}, level 1"

    def encode(data: memoryview) -> bytes:
        return zstandard.ZstdCompressor(level=1, write_checksum=True).compress(data)

    def decode(data: memoryview, nbytes: int) -> memoryview:
        return memoryview(zstandard.ZstdDecompressor().decompress(data, max_output_size=nbytes))

    return Codec("zstd", build, encode, decode)
