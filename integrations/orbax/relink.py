"""OCDBT databases by reference: the same values under a new tree, without a tensor byte being copied by us.

A database refers to its values by files relative to its own folder, so values of another database can be referred to
where that one lies in a folder below. Orbax merges the databases of its processes so; here the same is done with
keys renamed on the way. Data files are cloned (reflink) where the file system can, else copied.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from typing import TYPE_CHECKING, Any

from wherry.errors import UnrepresentableError
from wherry.integrations.containers import kvstore
from wherry.integrations.containers.listing import Listing, list_ocdbt

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    import tensorstore as ts

    from wherry.location import Location

_FICLONE = 0x40049409  # linux/fs.h


def link(folder: Location, databases: Iterable[str], renamed: Mapping[str, str] | None = None) -> None:
    """Make the database of a folder from databases below it, in one transaction.

    Args:
        folder: the local folder that gets `manifest.ocdbt`.
        databases: names of the folders below.
        renamed: stored name of each array → its new one; None keeps every key as it is.

    Raises:
        UnrepresentableError: the keys of one array lie among those of another.
        DamagedError, StorageError: a database cannot be read, or the storage failed.
    """
    import tensorstore

    using = kvstore.context()
    transaction = tensorstore.Transaction(atomic=True)
    pairs = [("", "")] if renamed is None else _prefixes(renamed, folder.uri)
    top = kvstore.store_spec(folder, ocdbt=True, writable=True)
    try:
        for name in databases:
            below = kvstore.store_spec(folder.join(name), ocdbt=True, writable=True)  # both sides alike
            for old, new in pairs:
                _copy_range({**below, "path": old}, {**top, "path": new}, using, transaction, folder.uri)
        transaction.commit_async().result()
    except (ValueError, OSError) as error:
        raise kvstore.translated(error, folder.uri) from error


def list_processes(folder: Location, databases: Iterable[str]) -> Listing:
    """What the databases of several processes hold together, files relative to the folder above them.

    Raises:
        DamagedError, HostileError, StorageError: see `list_ocdbt`.
    """
    merged = Listing(folder, {})
    for name in databases:
        for key, value in list_ocdbt(folder.join(name)).values.items():
            merged.values[key] = value._replace(file=value.file and f"{name}/{value.file}")
    return merged


def clone(source: Path, target: Path) -> None:
    """Copy a file or a folder tree durably, sharing the storage of its bytes where the file system can.

    Raises:
        OSError: the storage failed.
    """
    if source.is_dir():
        target.mkdir(exist_ok=True)
        for entry in sorted(source.iterdir()):
            clone(entry, target / entry.name)
        return
    with source.open("rb") as reading, target.open("xb") as writing:
        try:
            fcntl.ioctl(writing.fileno(), _FICLONE, reading.fileno())
        except OSError:  # another file system, or one that cannot share
            shutil.copyfileobj(reading, writing, 8 << 20)
        writing.flush()
        os.fsync(writing.fileno())


def _copy_range(
    old: dict[str, Any], new: dict[str, Any], using: ts.Context, transaction: ts.Transaction, uri: str
) -> None:
    source = kvstore.open_store(old, using, uri)
    target = kvstore.open_store(new, using, uri)
    source.experimental_copy_range_to(target.with_transaction(transaction)).result()


def _prefixes(renamed: Mapping[str, str], uri: str) -> list[tuple[str, str]]:
    """Key prefix of each array → its new one."""
    for name in renamed:
        parts = name.split("/")
        outer = next(
            ("/".join(parts[:n]) for n in range(1, len(parts)) if "/".join(parts[:n]) in renamed), None
        )
        if outer is not None or (not name and len(renamed) > 1):
            raise UnrepresentableError(
                f"the keys of {name!r} lie among those of {outer or ''!r}", uri=uri, cure="convert it instead"
            )
    return [(f"{old}/" if old else "", f"{new}/" if new else "") for old, new in renamed.items()]
