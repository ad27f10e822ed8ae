"""The sidecar: what wherry leaves beside a checkpoint that it wrote.

`wherry.json` in a folder, `<file>.wherry.json` beside a file: the manifest with a digest per tensor, the leaf
digests (so that a mismatch can name the damaged 4 MiB), the checkpoint as lineage knows it, and the receipt of
the conversion that made it. From these alone conversions and edges can be rebuilt when every database is lost.
An orphan sidecar (its file is gone) means nothing.

Beside a file with a step's name it is `.<file>.wherry.json`: flax takes every file whose name begins like a step's
for a step, so it would restore from it, and delete it as the oldest.
"""

from __future__ import annotations

import base64
import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from wherry.core import receipt as receipts
from wherry.core.keypath import KeyPath, parse, render
from wherry.core.manifest import Manifest, from_json
from wherry.core.receipt import CheckpointRef, Receipt
from wherry.core.steps import step_number
from wherry.errors import CorruptError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wherry.storage.location import Location

FOLDER_NAME = "wherry.json"
SIGNATURE_NAME = "wherry.sig"
OWN_NAMES = frozenset(
    {FOLDER_NAME, SIGNATURE_NAME}
)  # what wherry puts into a folder is no part of a checkpoint
SCHEMA = 1
MOST_SIDECAR = 1 << 30  # bytes; that of 100,000 tensors has 60 MB
_SHA256_BYTES = 32


@dataclass(frozen=True, slots=True)
class Sidecar:
    """Contents of a sidecar.

    Attributes:
        manifest: what the checkpoint held when it was committed, digests included.
        checkpoint: the node of the lineage.
        receipt: the conversion that made it; None where it was only taken stock of.
        leaves: key path → raw SHA-256 of each leaf.
    """

    manifest: Manifest
    checkpoint: CheckpointRef
    receipt: Receipt | None = None
    leaves: Mapping[KeyPath, tuple[bytes, ...]] = field(default_factory=dict[KeyPath, tuple[bytes, ...]])


def sidecar_location(location: Location) -> Location:
    """Where the sidecar of a checkpoint lies."""
    entry = location.entry
    if entry is not None and entry.is_dir:
        return location.join(FOLDER_NAME)
    return location.parent.join(sidecar_name(location.name))


def sidecar_name(file: str) -> str:
    """The name of the sidecar beside a file."""
    return f"{'.' if step_number(file) is not None else ''}{file}.{FOLDER_NAME}"


def signature_location(location: Location) -> Location:
    """Where the signature of a checkpoint lies: beside its sidecar."""
    entry = location.entry
    if entry is not None and entry.is_dir:
        return location.join(SIGNATURE_NAME)
    return location.parent.join(signature_name(location.name))


def signature_name(file: str) -> str:
    """The name of the signature beside a file."""
    return f"{'.' if step_number(file) is not None else ''}{file}.{SIGNATURE_NAME}"


def read_sidecar(location: Location) -> Sidecar | None:
    """The sidecar of a checkpoint, or None where it has none.

    Raises:
        CorruptError: it is there and is not one.
    """
    place = sidecar_location(location)
    try:
        data = json.loads(place.read_whole(MOST_SIDECAR))
    except NotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise CorruptError(
            f"invalid JSON in the sidecar: {error}",
            uri=place.uri,
            cure="restore the sidecar from a backup, or delete it",
        ) from error
    return _decode(data, place.uri)


def unrecorded(sidecar: Sidecar, found: Manifest) -> list[str]:
    """Companion files that are there now and were not when it was recorded; a signature belongs to it."""
    known = {companion.name for companion in sidecar.manifest.companions}
    return sorted({companion.name for companion in found.companions} - known - {SIGNATURE_NAME})


def encode(sidecar: Sidecar) -> bytes:
    """The text that lies on disk; the inverse of what `read_sidecar` does."""
    data = {
        "schema": SCHEMA,
        "checkpoint": asdict(sidecar.checkpoint),
        "receipt": sidecar.receipt.to_json() if sidecar.receipt else None,
        "manifest": sidecar.manifest.to_json(),
        "leaves": {
            render(path): base64.b64encode(b"".join(raw)).decode() for path, raw in sidecar.leaves.items()
        },
    }
    return (json.dumps(data, indent=1) + "\n").encode()


def _decode(data: dict[str, Any], uri: str) -> Sidecar:
    try:
        if data["schema"] > SCHEMA:
            raise CorruptError(f"unsupported sidecar schema {data['schema']}", uri=uri, cure="upgrade wherry")
        return Sidecar(
            manifest=from_json(data["manifest"], uri),
            checkpoint=CheckpointRef(**data["checkpoint"]),
            receipt=receipts.from_json(data["receipt"], uri) if data["receipt"] else None,
            leaves={parse(path): _leaves(text) for path, text in data["leaves"].items()},
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, CorruptError):
            raise
        raise CorruptError(
            f"invalid sidecar: {error!r}", uri=uri, cure="restore the sidecar from a backup, or delete it"
        ) from error


def _leaves(text: str) -> tuple[bytes, ...]:
    raw = base64.b64decode(text, validate=True)
    return tuple(raw[start : start + _SHA256_BYTES] for start in range(0, len(raw), _SHA256_BYTES))
