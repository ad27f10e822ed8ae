"""Opens the arrays of a folder: reads the zarr metadata of stored names from one listing of the store.

Every system that keeps arrays under names in a folder (Orbax, T5X, PaxML, MaxText) opens them here, whether the
folder is an OCDBT database or has one folder per array. Arrays without metadata are returned and do not raise, because
only the caller knows whether the metadata may be elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from wherry.integrations.containers.zarr import metadata as zarr
from wherry.integrations.containers.zarr.reader import StoredArray

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wherry.core.keypath import KeyPath
    from wherry.integrations.containers.zarr.listing import Listing
    from wherry.storage.location import Location


@dataclass(frozen=True, slots=True)
class Arrays:
    """The requested arrays of a folder.

    Attributes:
        found: key path → the array, for those that have metadata.
        without: key path → stored name, for those that have no metadata.
        listing: the contents of the store; None if no array was requested.
    """

    found: dict[KeyPath, StoredArray] = field(default_factory=dict["KeyPath", StoredArray])
    without: dict[KeyPath, str] = field(default_factory=dict["KeyPath", str])
    listing: Listing | None = None


def open_arrays(
    location: Location, names: Mapping[KeyPath, str], *, ocdbt: bool, listed: Listing | None = None
) -> Arrays:
    """Open arrays.

    Args:
        location: the folder.
        names: key path → stored name; without OCDBT the name of a folder.
        ocdbt: whether the folder is an OCDBT database.
        listed: the contents of the store, if the folder itself does not list them.

    Raises:
        IncompleteError: the manifest or a node of the database is missing.
        CorruptError: metadata is invalid.
        UnsupportedError: a dtype, codec or storage is not supported.
        HostileError: a name points outside the folder, or a size exceeds its limit.
    """
    if not names:
        return Arrays()
    from wherry.integrations.containers.zarr import listing

    if listed is None:
        listed = listing.list_ocdbt(location) if ocdbt else listing.list_files(location)
    arrays = Arrays(listing=listed)
    for path, name in names.items():
        if name and not ocdbt:
            location.member(name)
        metadata = array_metadata(listed, name, f"{location.uri}/{name}")
        if metadata is None:
            arrays.without[path] = name
        else:
            arrays.found[path] = StoredArray(name, metadata)
    return arrays


def array_metadata(listing: Listing, name: str, uri: str) -> zarr.ZarrArray | None:
    """The metadata of one array, zarr 2 or 3; None if there is none.

    Raises: what `open_arrays` does.
    """
    for version, file in zarr.METADATA_NAMES.items():
        data = listing.read(f"{name}/{file}" if name else file)
        if data is not None:
            return zarr.parse(data, version, uri)
    return None
