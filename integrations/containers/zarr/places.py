"""Where the chunks of an OCDBT database lie in its data files, on a disk and in a store alike."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from wherry.core.digest import sha256_of
from wherry.integrations.containers.flat.blocks import BLOCK
from wherry.integrations.containers.flat.files import SMALL
from wherry.integrations.containers.ocdbt.write import Reference, encode_database

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wherry.integrations.containers.ocdbt.write import Value

DATA = "d"
FILE_BYTES = 2 << 30


class EncodedDatabase(NamedTuple):
    """The tree and the manifest of a database.

    Attributes:
        nodes: name of the data file with the tree, relative to the database.
        tree: its contents.
        manifest: contents of the manifest.
    """

    nodes: str
    tree: bytes
    manifest: bytes


def encoded_database(values: Mapping[str, Value]) -> EncodedDatabase:
    """The tree over values whose data files exist; only the time of the commit differs between two runs."""
    name = sha256_of("ocdbt", sorted(values))[:32]
    nodes = f"{DATA}/{name}"
    return EncodedDatabase(nodes, *encode_database(values, nodes, bytes.fromhex(name), time.time_ns()))


def places_of(sizes: Mapping[str, int], file_bytes: int = FILE_BYTES) -> dict[str, Reference]:
    """The places of chunks of known sizes, in their order.

    Args:
        sizes: key → size of the chunk.
        file_bytes: size of a data file; a larger chunk has a file of its own.
    """
    places: dict[str, Reference] = {}
    number = end = 0
    for key, size in sizes.items():
        start = start_after(end, size)
        if end and start + size > file_bytes:
            number, start = number + 1, 0
        places[key] = Reference(data_file(number), start, size)
        end = start + size
    return places


def start_after(end: int, nbytes: int) -> int:
    """Offset of a chunk after others: a large chunk begins on a block, for direct I/O."""
    return end if nbytes < SMALL else -(-end // BLOCK) * BLOCK


def stops_of(places: Mapping[str, Reference]) -> dict[str, int]:
    """Where the bytes after each chunk end that nobody else writes: at the next chunk, or at the end of the file."""
    ends = ends_of(places)
    following = [*list(places.values())[1:], Reference("", 0, 0)]
    return {
        key: after.offset if after.file == place.file else ends[place.file]
        for (key, place), after in zip(places.items(), following, strict=True)
    }


def ends_of(places: Mapping[str, Reference]) -> dict[str, int]:
    """The size of each data file, the first of which always exists."""
    ends = {data_file(0): 0}
    for place in places.values():
        ends[place.file] = max(ends.get(place.file, 0), place.offset + place.length)
    return ends


def data_file(number: int) -> str:
    """A deterministic name: with random names, as in tensorstore, two conversions of a checkpoint would differ."""
    return f"{DATA}/{number:032x}"
