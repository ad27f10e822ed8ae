"""stock: take stock of a checkpoint that wherry did not write, so that it has an identity from then on.

The sidecar that `wherry inspect --digest --write` leaves has manifest and digests and no receipt: nothing was
converted. With it the checkpoint can be verified, fetched, signed, registered and promoted like any other. No file of
the checkpoint is touched, and a sidecar that is there is never replaced.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from wherry.converter.references import reference
from wherry.core.keypath import render
from wherry.errors import IncompleteError, TargetExistsError, storage_error
from wherry.formats.checkpoint import present_fingerprint
from wherry.formats.companions import digested
from wherry.ledger.resolve import proved_digest
from wherry.staging.staging import rename_without_replacing
from wherry.storage.folders import PREFIX, sync_folder
from wherry.storage.sidecar import Sidecar, encode, read_sidecar, sidecar_location
from wherry.storage.stores import LocalStore, locate

if TYPE_CHECKING:
    from wherry.core.manifest import Manifest
    from wherry.formats.checkpoint import Checkpoint
    from wherry.formats.pin import Pin
    from wherry.mover.hashing import Hashes
    from wherry.storage.location import Location


def take_stock(checkpoint: Checkpoint, hashes: Hashes, pin: Pin) -> Manifest:
    """Write the sidecar of a checkpoint; nothing where it has one that says the same.

    Args:
        checkpoint: opened.
        hashes: of all its tensors.
        pin: its files from before they were read.

    Returns:
        The manifest that was written, companion digests included.

    Raises:
        TargetExistsError: it has a sidecar that says something else.
        MismatchError: its files changed while they were read.
        IncompleteError: not every tensor could be digested.
        StorageError: the sidecar cannot be written there.
    """
    found, uri = checkpoint.detection, checkpoint.uri
    lacking = next((path for path in checkpoint.manifest.tensors if path not in hashes.digests), None)
    if lacking is not None:
        raise IncompleteError("it has no digest of its own", uri=uri, path=render(lacking))
    companions = tuple(digested(checkpoint, one) for one in checkpoint.manifest.companions)
    mark = present_fingerprint(checkpoint)
    pin.require_unchanged(checkpoint)  # so the fingerprint is that of the files that were read
    manifest = checkpoint.manifest.with_digests(hashes.digests, companions)
    node = reference(found.uri, found.format, found.format_version, manifest, mark)
    location = locate(found.uri)
    there = read_sidecar(location)
    if there is None:
        _put_new(sidecar_location(location), encode(Sidecar(manifest, node, None, hashes.leaves)))
    elif proved_digest(there) != node.checkpoint_digest:
        raise TargetExistsError(
            "its sidecar tells of another checkpoint",
            uri=uri,
            cure="`wherry verify --level digest` says what was altered; remove the sidecar if it is out of date",
        )
    return manifest


def _put_new(place: Location, data: bytes) -> None:
    """A small file that appears whole and durable, and replaces nothing."""
    try:
        if not place.store.capabilities.local:
            place.store.put(place.path, data, create_only=True)
            return
        target = Path(place.path)
        draft = target.with_name(f"{PREFIX}{target.name}.{secrets.token_hex(4)}.sidecar")
        try:
            LocalStore().put(str(draft), data)
            rename_without_replacing(draft, target)
        finally:
            draft.unlink(missing_ok=True)
        sync_folder(target.parent)
    except FileExistsError as error:
        raise TargetExistsError("somebody else wrote its sidecar just now", uri=place.uri) from error
    except OSError as error:
        raise storage_error(error, place.uri) from error
