"""Which values a zarr store holds, and where their bytes lie, without reading them.

Two layouts, one answer: a mapping from key to `Value`. With one file per key it is the folder's listing. In OCDBT
it is the B-tree itself: small values lie inside a node, larger ones are references
`value:<base>:<file>:<offset>:<length>` into data files (of `ocdbt.process_<id>/d/`, after Orbax's merge). The
references are what makes raw reads possible, and what shows that a data file is missing or too short.

Names in references are data: they are checked before any file is opened by them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from wherry.errors import CorruptError, IncompleteError
from wherry.integrations.containers.kvstore import open_store, store_spec, translated
from wherry.integrations.containers.zarr import METADATA_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator

    import tensorstore as ts

    from wherry.location import Location

_METADATA_SUFFIXES = tuple(METADATA_NAMES.values())
_MAX_HEIGHT = 16
MANIFEST = "manifest.ocdbt"


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


@dataclass(slots=True)
class Listing:
    """The values of one store.

    Attributes:
        location: the folder of the store.
        values: key → value.
    """

    location: Location
    values: dict[str, Value]
    _sizes: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])

    def lack(self, key: str) -> str | None:
        """Why a value cannot be read, or None where its bytes are there."""
        value = self.values.get(key)
        if value is None:
            return "absent"
        if value.file is None:
            return None
        size = self._size(value.file)
        if size is None:
            return f"data file {value.file} is missing"
        if size < value.offset + value.length:
            return f"data file {value.file} ends at {size}, {value.offset + value.length} bytes are needed"
        return None

    def read(self, key: str) -> bytes | None:
        """Bytes of a small value; None where there is no such key.

        Raises:
            IncompleteError: its data file is missing or too short.
        """
        value = self.values.get(key)
        if value is None or value.inline is not None:
            return value and value.inline
        reason = self.lack(key)
        if reason or value.file is None:
            raise IncompleteError(f"{key} cannot be read: {reason}", uri=self.location.uri)
        return self.location.member(value.file).read(value.offset, value.offset + value.length)

    def _size(self, file: str) -> int | None:
        folder, _, name = file.rpartition("/")
        if folder not in self._sizes:
            place = self.location.member(folder) if folder else self.location
            self._sizes[folder] = {entry.name: entry.size for entry in place.entries() if not entry.is_dir}
        return self._sizes[folder].get(name)


def list_files(location: Location) -> Listing:
    """The values of a store with one file per key."""
    seen: set[str] = set()
    return Listing(location, {name: Value(size, name) for name, size in _files(location, "", seen)})


def list_ocdbt(location: Location, using: ts.Context) -> Listing:
    """The values of an OCDBT database.

    Raises:
        IncompleteError: its manifest or a node of its tree is missing.
        CorruptError: a node contradicts itself.
        HostileError: a reference points outside the folder.
    """
    import tensorstore

    base = open_store(store_spec(location, ocdbt=False), using, location.uri)
    listing = Listing(location, {})
    try:
        versions = tensorstore.ocdbt.dump(base).result()["versions"]
    except (ValueError, OSError) as error:
        raise translated(error, location.join(MANIFEST).uri) from error
    root = versions[-1]["root"] if versions else {}
    if root.get("location"):
        _walk(listing, base, root["location"], b"", _MAX_HEIGHT)
    return listing


def _walk(listing: Listing, base: ts.KvStore, reference: str, prefix: bytes, height: int) -> None:
    import tensorstore

    _require_node(listing, reference)
    try:
        node: dict[str, Any] = tensorstore.ocdbt.dump(base, node=reference).result()
    except (ValueError, OSError) as error:
        raise translated(error, listing.location.uri) from error
    if not 0 <= node["height"] < height:
        raise CorruptError(f"an OCDBT tree whose heights do not fall: {reference}", uri=listing.location.uri)
    for entry in node["entries"]:
        if node["height"]:
            inner = prefix + _bytes(entry["subtree_common_prefix"])
            _walk(listing, base, entry["location"], inner, node["height"])
        else:
            name = (prefix + _bytes(entry["key"])).decode("utf-8", "surrogateescape")
            listing.values[name] = _value(listing, name, entry)


def _value(listing: Listing, name: str, entry: dict[str, Any]) -> Value:
    if "inline_value" in entry:
        data = _bytes(entry["inline_value"])
        return Value(len(data), inline=data if name.endswith(_METADATA_SUFFIXES) else None)
    file, offset, length = _parts(listing, entry["indirect_value"])
    return Value(length, file, offset)


def _require_node(listing: Listing, reference: str) -> None:
    file, offset, length = _parts(listing, reference)
    listing.values[file] = Value(length, file, offset)
    reason = listing.lack(file)
    del listing.values[file]
    if reason:
        raise IncompleteError(
            f"a node of the OCDBT tree cannot be read: {reason}",
            uri=listing.location.uri,
            cure="copy the checkpoint again, or use another step",
        )


def _parts(listing: Listing, reference: str) -> tuple[str, int, int]:
    """File, offset and length of a reference `<kind>:<base>:<file>:<offset>:<length>`, percent-encoded."""
    try:
        _kind, folder, name, offset, length = reference.split(":")
        file, first, count = unquote(folder) + unquote(name), int(offset), int(length)
    except ValueError as error:
        raise CorruptError(f"not an OCDBT reference: {reference!r}", uri=listing.location.uri) from error
    listing.location.member(file)
    return file, first, count


def _bytes(value: bytes | str) -> bytes:
    return value if isinstance(value, bytes) else value.encode()


def _files(location: Location, prefix: str, seen: set[str]) -> Iterator[tuple[str, int]]:
    """Every file below with its size; a folder that a link leads back to is entered once."""
    real = os.path.realpath(location.path) if location.store.capabilities.local else location.path
    if real in seen:
        return
    seen.add(real)
    for entry in location.entries():
        if entry.is_dir:
            yield from _files(location.join(entry.name), f"{prefix}{entry.name}/", seen)
        elif entry.size >= 0:
            yield f"{prefix}{entry.name}", entry.size
