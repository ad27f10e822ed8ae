"""Lists the values of a zarr store and the positions of their bytes, without reading them.

Both layouts give a mapping from key to `Value`. With one file per key it is the folder's listing. In OCDBT it comes
from the B+tree: small values are stored inside a node, larger ones are references
`value:<base>:<file>:<offset>:<length>` into data files (of `ocdbt.process_<id>/d/`, after Orbax's merge). The
references make raw reads possible, and show whether a data file is missing or truncated.

File names in references are untrusted; they are checked before any file is opened.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, NamedTuple

from wherry.core.lazy_dataclass import dataclass
from wherry.errors import HostileError, IncompleteError
from wherry.integrations.containers.ocdbt.read import read_database
from wherry.integrations.containers.ocdbt.write import Reference
from wherry.integrations.containers.zarr.metadata import METADATA_NAMES

if TYPE_CHECKING:
    from wherry.store.location import Location
    from wherry.store.store import Entry

_MOST_VALUE = 256 << 20  # bytes
_METADATA_SUFFIXES = tuple(METADATA_NAMES.values())
_MOST_INLINE = (
    8 << 20
)  # bytes of values inside nodes that are kept; further ones are read through tensorstore


class Value(NamedTuple):
    """One stored value.

    Attributes:
        length: its size in bytes.
        file: the file that holds it, relative to the store; None for a value inside a node.
        offset: its offset in that file.
        inline: the bytes themselves, of array metadata and of other values while they are few.
    """

    length: int
    file: str | None = None
    offset: int = 0
    inline: bytes | None = None


ASSETS = "assets"  # folder of the companion files next to arrays, in checkpoints that wherry wrote


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
    _places: dict[str, Location] = field(default_factory=dict[str, "Location"])
    _sizes: dict[str, int] = field(default_factory=dict[str, int])

    def lack(self, key: str) -> str | None:
        """Why a value cannot be read, or None if its bytes exist."""
        value = self.values.get(key)
        if value is None:
            return "absent"
        if value.file is None:
            return None
        size = self.size(value.file)
        if size is None:
            return f"data file not found: {value.file}"
        if size < value.offset + value.length:
            return f"data file {value.file} is truncated: expected {value.offset + value.length} bytes, got {size}"
        return None

    def read(self, key: str) -> bytes | None:
        """Bytes of a small value; None if the key does not exist.

        Raises:
            IncompleteError: its data file is missing or truncated.
            HostileError: it exceeds the limit for array metadata.
        """
        value = self.values.get(key)
        if value is None or value.inline is not None:
            return value and value.inline
        if value.length > _MOST_VALUE:
            raise HostileError(
                f"array metadata {key} of {value.length:,} bytes exceeds the limit of {_MOST_VALUE:,}",
                uri=self.location.uri,
                cure="do not use this checkpoint",
            )
        reason = self.lack(key)
        if reason or value.file is None:
            raise IncompleteError(f"cannot read {key}: {reason}", uri=self.location.uri)
        return self.place(value.file).read(value.offset, value.offset + value.length)

    def place(self, file: str) -> Location:
        """The location of a file.

        Raises:
            HostileError: its name points outside the folder.
        """
        place = self._places.get(file)
        if place is None:
            place = self._places[file] = self.location.member(file)
        return place

    def size(self, file: str) -> int | None:
        """Size of a file in bytes; None if it is missing.

        Raises:
            HostileError: the file must not be opened.
        """
        if file in self._sizes:
            return self._sizes[file]
        folder, _, name = file.rpartition("/")
        place = self.location.member(folder) if folder else self.location
        if folder not in self._entries:
            self._entries[folder] = {entry.name: entry for entry in place.entries() if not entry.is_dir}
        entry = self._entries[folder].get(name)
        if entry is None:
            return None
        place.require_open(entry)
        self._sizes[file] = entry.size
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
        CorruptError: a node is invalid.
        HostileError: a reference points outside the folder.
    """
    listing, room = Listing(location, {}), _MOST_INLINE
    for key, value in read_database(location, lambda node: _require_node(listing, node)):
        name = key.decode("utf-8", "surrogateescape")
        if isinstance(value, Reference):
            listing.place(value.file)
            listing.values[name] = Value(value.length, value.file, value.offset)
        else:
            own = name.endswith(_METADATA_SUFFIXES)
            room -= 0 if own else len(value)
            listing.values[name] = Value(len(value), inline=value if own or room >= 0 else None)
    return listing


def _require_node(listing: Listing, node: Reference) -> None:
    listing.location.member(node.file)
    size = listing.size(node.file)
    if size is None or size < node.offset + node.length:
        reason = (
            f"expected {node.offset + node.length} bytes, got {size}" if size is not None else "not found"
        )
        raise IncompleteError(
            f"cannot read a node of the OCDBT tree: data file {node.file}: {reason}",
            uri=listing.location.uri,
            cure="copy the checkpoint again, or use another step",
        )
