"""The layout of arrays in a folder: one file for each chunk, or the data files of an OCDBT database."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from wherry.core import dtypes
from wherry.core.digest import sha256_of
from wherry.integrations.containers.ocdbt.read import MANIFEST
from wherry.integrations.containers.ocdbt.write import Reference, Value, encode_database
from wherry.integrations.containers.zarr import metadata as zarr
from wherry.integrations.containers.zarr import new
from wherry.integrations.containers.zarr.encode import ChunkEncoder, array_of
from wherry.integrations.containers.zarr.places import DATA, ChunkPlaces, data_file, number_of_data_file
from wherry.target.file_map import Chunks, File, PackedChunks, PlacedChunks, SeparateChunks
from wherry.target.grids import ChunkPlace, Grids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import TensorSpec
    from wherry.integrations.containers.zarr.new import Compression

SCALARS: dict[type, str] = {bool: "bool", int: "int64", float: "float64"}


@dataclass(frozen=True, slots=True)
class ArrayForm:
    """How arrays are stored.

    Attributes:
        version: of zarr.
        compression: of chunks.
        file_bytes: most bytes of a data file of an OCDBT database; None for a file for each chunk.
    """

    version: int
    compression: Compression
    file_bytes: int | None = None


def lay_out(
    specs: Iterable[TensorSpec],
    form: ArrayForm,
    name: Callable[[KeyPath], str],
    scalars: Mapping[KeyPath, Any],
    created_ns: int,
) -> Chunks | None:
    """The files of arrays.

    Args:
        specs: the tensors, with their grids.
        form: how they are stored.
        name: the name of an array, from its key path.
        scalars: numbers that are stored as arrays of rank 0, by their key paths.
        created_ns: when a database was made, in nanoseconds of the Unix epoch.

    Returns:
        The files; None if there are no arrays.
    """
    arrays = _Arrays(Grids(specs), form, name, scalars)
    grids, codec = arrays.grids, ChunkEncoder(form.compression, form.version)
    if not grids.specs and not scalars:
        return None
    if form.file_bytes is None:
        return SeparateChunks(grids, codec, arrays.key, lambda _place: arrays.files())
    index = partial(_database, arrays, created_ns)
    if codec.plain:
        places = ChunkPlaces(grids.specs, form.file_bytes)
        return PlacedChunks(grids, codec, arrays.key, index, place=places.at, sizes=places.ends)
    return PackedChunks(
        grids,
        codec,
        arrays.key,
        index,
        file=data_file,
        number_of=number_of_data_file,
        file_bytes=form.file_bytes,
    )


@dataclass(frozen=True, slots=True)
class _Arrays:
    """The arrays of a folder, under keys; see `lay_out`."""

    grids: Grids
    form: ArrayForm
    name: Callable[[KeyPath], str]
    scalars: Mapping[KeyPath, Any]

    def key(self, number: int) -> str:
        """The key of a chunk."""
        spec, cell = self.grids[number]
        array = array_of(spec.dtype, spec.shape, spec.chunks or (), self.form.version, self.form.compression)
        return f"{self._prefix(spec.path)}{array.key(cell)}"

    def files(self) -> Iterator[File]:
        """The values next to the chunks, as files."""
        for key, data in self.values():
            yield File(key, lambda data=data: data)

    def values(self) -> Iterator[tuple[str, bytes]]:
        """The values next to the chunks: metadata of the arrays, and numbers as arrays of rank 0."""
        import numpy  # noqa: ICN001

        form = self.form
        metadata = zarr.METADATA_NAMES[form.version]
        for spec in self.grids.specs:
            text = new.text(spec.dtype, spec.shape, spec.chunks or (), form.version, form.compression)
            yield f"{self._prefix(spec.path)}{metadata}", text
        for path, value in self.scalars.items():
            dtype, prefix = SCALARS[type(value)], self._prefix(path)
            yield f"{prefix}{metadata}", new.text(dtype, (), (), form.version, "none")
            data = numpy.asarray(value, dtypes.numpy_dtype(dtype)).tobytes()
            yield f"{prefix}{array_of(dtype, (), (), form.version, 'none').key(())}", data

    def _prefix(self, path: KeyPath) -> str:
        name = self.name(path)
        return f"{name}/" if name else ""


def _database(arrays: _Arrays, created_ns: int, place: Callable[[int], ChunkPlace]) -> Iterable[File]:
    """The tree over values and chunks, then the manifest."""
    keys = [key for key, _data in arrays.values()] + [
        arrays.key(number) for number in range(len(arrays.grids))
    ]
    # With a random name, as in tensorstore, two conversions of a checkpoint would differ.
    name = sha256_of("ocdbt", sorted(keys))[:32]
    nodes = f"{DATA}/{name}"

    @cache
    def encoded() -> tuple[bytes, bytes]:
        values: dict[str, Value] = {}
        for number in range(len(arrays.grids)):
            file, offset, nbytes, _stop = place(number)
            values[arrays.key(number)] = Reference(file, offset, nbytes)
        values |= arrays.values()
        return encode_database(values, nodes, bytes.fromhex(name), created_ns)

    return (File(nodes, lambda: encoded()[0]), File(MANIFEST, lambda: encoded()[1]))
