"""File ranges: where a map puts the bytes of tensors, by names of files; nothing is opened.

So the work on a target is divided among processes, and found again where they have put it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from wherry.core import dtypes
from wherry.core.keypath import KeyPath
from wherry.core.tensorspec import Region, Span, TensorSpec, region_shape
from wherry.target.file_map import FileMap, PlacedChunks, Segments


class FileRange(NamedTuple):
    """Bytes [start, stop) of a file.

    Attributes:
        file: its name, relative to the target; `.` for a target that is one file.
        start, stop: the bytes.
    """

    file: str
    start: int
    stop: int

    @property
    def name(self) -> str:
        """The name of the range among the files of a target that are divided."""
        return f"{self.file}[{self.start}:{self.stop}]"

    @property
    def span(self) -> Span:
        """The range as a span of the file."""
        return Span(self.start, self.stop)


def ranges_of(file_map: FileMap, path: KeyPath, where: Region | Span) -> tuple[FileRange, ...] | None:
    """The byte ranges that hold the canonical bytes of a span or of a chunk, in order.

    None if the bytes are encoded, or have padding between them.
    """
    chunks = file_map.chunks
    if chunks is not None and path in chunks.grids:
        spec = chunks.grids.spec(path)
        if isinstance(where, Span) or not chunks.codec.unchanged(where, spec):
            return None
        place = chunks.known_place(chunks.grids.number(path, where))
        assert place is not None, "chunks that are stored as they are have known places"
        stop = place.offset + dtypes.canonical_size(spec.dtype, math.prod(region_shape(where)))
        return (FileRange(chunks.name_in_target(place.file), place.offset, stop),)
    if not isinstance(where, Span) or path in file_map.codecs:
        return None
    files = file_map.files
    return tuple(
        [
            FileRange(files[file].name, start, stop)
            for file, _segment, start, stop in file_map.places(path, where)
        ]
    )


def lengths_of(file_map: FileMap, spec: TensorSpec) -> list[int]:
    """Bytes of each byte range of a tensor, in order; none of one that is encoded or written on a grid."""
    return [found.stop - found.start for found in ranges_of(file_map, spec.path, Span(0, spec.nbytes)) or ()]


def file_of(file_map: FileMap, path: KeyPath, where: Region | Span) -> str | None:
    """The name of the only file that gets the bytes of a span or of a chunk; None if sizes of chunks decide it."""
    chunks = file_map.chunks
    if chunks is not None and path in chunks.grids and not isinstance(where, Span):
        place = chunks.known_place(chunks.grids.number(path, where))
        return None if place is None else chunks.name_in_target(place.file)
    names = {found.file for found in ranges_of(file_map, path, where) or ()}
    return next(iter(names)) if len(names) == 1 else None


def file_sizes(file_map: FileMap) -> dict[str, int] | None:
    """The bytes of each file that holds tensors, in the order of the map; None if they are not known in advance."""
    found = {file.name: file.body.nbytes for file in file_map.files if isinstance(file.body, Segments)}
    chunks = file_map.chunks
    if chunks is None:
        return found
    if not chunks.codec.plain:
        return None
    if isinstance(chunks, PlacedChunks):
        return found | {chunks.name_in_target(name): size for name, size in chunks.sizes.items()}
    for number in range(len(chunks.grids)):
        place = chunks.known_place(number)
        assert place is not None, "chunks that are stored as they are have known places"
        found[chunks.name_in_target(place.file)] = place.nbytes
    return found
