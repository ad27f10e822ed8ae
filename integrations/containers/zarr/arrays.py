"""The arrays of a folder: stored names become zarr metadata, by one listing of the store.

Every system that keeps arrays under names in a folder (Orbax, T5X, PaxML, MaxText) opens them here, whether the
folder is an OCDBT database or has one folder per array. What lacks its metadata is returned, not raised: only the
caller knows whether another place may have it.
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
    """What a folder has of the arrays that were asked for.

    Attributes:
        found: key path → the array.
        without: key path → stored name of those that have no metadata.
        listing: what the store holds; None where no array was asked for.
    """

    found: dict[KeyPath, StoredArray] = field(default_factory=dict["KeyPath", StoredArray])
    without: dict[KeyPath, str] = field(default_factory=dict["KeyPath", str])
    listing: Listing | None = None


def open_arrays(
    location: Location, names: Mapping[KeyPath, str], *, ocdbt: bool, listed: Listing | None = None
) -> Arrays:
    """Look the arrays up.

    Args:
        location: the folder.
        names: key path → stored name; without OCDBT the name of a folder.
        ocdbt: whether the folder is an OCDBT database.
        listed: what the store holds, where the folder itself does not say it.

    Raises:
        IncompleteError: the database lacks its manifest or a node.
        CorruptError: metadata contradicts itself.
        UnsupportedError: a dtype, codec or storage that is not read.
        HostileError: a name points outside, or a size is absurd.
    """
    if not names:
        return Arrays()
    from wherry.integrations.containers.zarr import kvstore, listing

    kvstore.base_spec(location)
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
    """The metadata of one array, zarr 2 or 3; None where there is none.

    Raises: what `open_arrays` does.
    """
    for version, file in zarr.METADATA_NAMES.items():
        data = listing.read(f"{name}/{file}" if name else file)
        if data is not None:
            return zarr.parse(data, version, uri)
    return None
