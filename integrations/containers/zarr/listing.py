"""Which values a zarr store holds, and where their bytes lie, without reading them.

Two layouts, one answer: a mapping from key to `Value`. With one file per key it is the folder's listing. In OCDBT
it is the B-tree itself: small values lie inside a node, larger ones are references
`value:<base>:<file>:<offset>:<length>` into data files (of `ocdbt.process_<id>/d/`, after Orbax's merge). The
references are what makes raw reads possible, and what shows that a data file is missing or too short.

Names in references are data: they are checked before any file is opened by them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from wherry.errors import HostileError, IncompleteError
from wherry.integrations.containers.ocdbt.read import read_database
from wherry.integrations.containers.ocdbt.write import Reference
from wherry.integrations.containers.zarr.metadata import METADATA_NAMES

if TYPE_CHECKING:
    from wherry.storage.location import Entry, Location

_MOST_VALUE = 256 << 20  # bytes
_METADATA_SUFFIXES = tuple(METADATA_NAMES.values())


class Value(NamedTuple):
    """One stored value.

    Attributes:
        length: its bytes.
        file: where they lie, relative to the store; None for a value inside a node.
        offset: where in that file.
        inline: the bytes themselves, kept for array metadata only.
    """

    length: int
    file: str | None = None
    offset: int = 0
    inline: bytes | None = None


ASSETS = "assets"  # folder of the companion files beside arrays, as our writers make it


@dataclass(slots=True)
class Listing:
    """The values of one store.

    Attributes:
        location: the folder of the store.
        values: key → value.
    """

    location: Location
    values: dict[str, Value]
    _entries: dict[str, dict[str, Entry]] = field(default_factory=dict[str, dict[str, "Entry"]])

    def lack(self, key: str) -> str | None:
        """Why a value cannot be read, or None where its bytes are there."""
        value = self.values.get(key)
        if value is None:
            return "absent"
        if value.file is None:
            return None
        size = self.size(value.file)
        if size is None:
            return f"data file {value.file} is missing"
        if size < value.offset + value.length:
            return f"data file {value.file} ends at {size}, {value.offset + value.length} bytes are needed"
        return None

    def read(self, key: str) -> bytes | None:
        """Bytes of a small value; None where there is no such key.

        Raises:
            IncompleteError: its data file is missing or too short.
            HostileError: it is larger than any value that is read so.
        """
        value = self.values.get(key)
        if value is None or value.inline is not None:
            return value and value.inline
        if value.length > _MOST_VALUE:
            raise HostileError(
                f"{key} has {value.length:,} bytes; at most {_MOST_VALUE:,} of array metadata are read",
                uri=self.location.uri,
                cure="restore the checkpoint",
            )
        reason = self.lack(key)
        if reason or value.file is None:
            raise IncompleteError(f"{key} cannot be read: {reason}", uri=self.location.uri)
        return self.location.member(value.file).read(value.offset, value.offset + value.length)

    def size(self, file: str) -> int | None:
        """Bytes of a file; None where it is missing.

        Raises:
            HostileError: it must not be opened.
        """
        folder, _, name = file.rpartition("/")
        place = self.location.member(folder) if folder else self.location
        if folder not in self._entries:
            self._entries[folder] = {entry.name: entry for entry in place.entries() if not entry.is_dir}
        entry = self._entries[folder].get(name)
        if entry is None:
            return None
        place.require_open(entry)
        return entry.size


def list_files(location: Location) -> Listing:
    """The values of a store with one file per key, all of which tensorstore may open.

    Raises:
        HostileError: something in it must not be opened.
    """
    return Listing(
        location, {one.name: Value(one.size, one.name) for one in location.walk() if one.size >= 0}
    )


def list_ocdbt(location: Location) -> Listing:
    """The values of an OCDBT database.

    Raises:
        IncompleteError: its manifest or a node of its tree is missing.
        CorruptError: a node contradicts itself.
        HostileError: a reference points outside the folder.
    """
    listing = Listing(location, {})
    for key, value in read_database(location, lambda node: _require_node(listing, node)):
        name = key.decode("utf-8", "surrogateescape")
        if isinstance(value, Reference):
            location.member(value.file)
            listing.values[name] = Value(value.length, value.file, value.offset)
        else:
            kept = value if name.endswith(_METADATA_SUFFIXES) else None
            listing.values[name] = Value(len(value), inline=kept)
    return listing


def _require_node(listing: Listing, node: Reference) -> None:
    listing.location.member(node.file)
    size = listing.size(node.file)
    if size is None or size < node.offset + node.length:
        reason = f"data file {node.file} {'is missing' if size is None else f'ends at {size}'}"
        raise IncompleteError(
            f"a node of the OCDBT tree cannot be read: {reason}",
            uri=listing.location.uri,
            cure="copy the checkpoint again, or use another step",
        )
