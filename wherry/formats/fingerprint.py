"""Fingerprint: the cheap answer to "has this stored checkpoint changed?".

SHA-256 over the names, sizes and change marks (mtime_ns, etag or generation) of its files. No byte is read.
Equal fingerprints let a rerun do nothing and a journal be trusted; they prove nothing about content, digests do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherry.core.digest import sha256_of
from wherry.storage.sidecar import OWN_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from wherry.storage.location import Entry, Location


def fingerprint(members: Iterable[Entry], location: Location, *, marks: bool = True) -> str:
    """Hex fingerprint of a checkpoint's files.

    Args:
        members: its files, as its reader lists them.
        location: where it lies. A single file counts under the name `.`, so that the fingerprint taken in the
            staging area holds after the commit.
        marks: whether change marks count; not for a target on an object store, which gives them on upload.
    """
    rows = [
        ["." if entry.name == location.name else entry.name, entry.size, entry.mark if marks else ""]
        for entry in members
        if entry.name not in OWN_NAMES
    ]
    return sha256_of("fingerprint", sorted(rows))
