"""The small files that wherry's writer puts next to the arrays, and the notes in them for wherry's reader."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from wherry.integrations.containers.orbax import layout
from wherry.integrations.containers.orbax.tree import PRNG, stored_name
from wherry.mover.chunk_writer import put_in_order
from wherry.target.file_map import File
from wherry.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable

    from wherry.core.keypath import KeyPath
    from wherry.core.manifest import Manifest
    from wherry.storage.location import Location

HANDLER = "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler"
WRITTEN = b"Written by wherry.\n"
MARKER = File(layout.COMMITTED, lambda: WRITTEN)  # of a save that is complete


def notes(manifest: Manifest, scalars: Iterable[KeyPath]) -> dict[str, Any]:
    """Facts that Orbax cannot store: provenance, numbers among the arrays, PRNG keys, axis names, foreign metadata.

    Args:
        manifest: the manifest of the target.
        scalars: key paths of the numbers that are stored as arrays.
    """
    tensors = manifest.tensors.items()
    noted: dict[str, Any] = {
        "version": __version__,
        "kind": manifest.kind,
        "scalars": [stored_name(path) for path in scalars],
        "prng": {
            stored_name(path): spec.tags[PRNG] for path, spec in tensors if spec.tags and PRNG in spec.tags
        },
        "axes": {stored_name(path): spec.axes for path, spec in tensors if spec.axes is not None},
        "custom": {key: value for key, value in manifest.custom.items() if key not in ("item", "checkpoint")},
    }
    return {key: value for key, value in noted.items() if value}


def checkpoint_file(handlers: str | dict[str, str], created_ns: int, manifest: Manifest) -> File:
    """`_CHECKPOINT_METADATA`.

    Args:
        handlers: the class that restores the item, or each item of a step.
        created_ns: when writing began, in nanoseconds of the Unix epoch.
        manifest: the manifest of the target.
    """
    metadata = {
        "item_handlers": handlers,
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": created_ns,
        layout.COMMIT_TIME: created_ns,
        "custom_metadata": dict(manifest.custom.get("checkpoint") or {}),
    }
    return File(layout.CHECKPOINT, lambda: json.dumps(metadata).encode())


def finish_step(folder: Location, manifest: Manifest, item: str) -> None:
    """Complete the step folder of a CheckpointManager around its one item.

    Raises:
        StorageError: the storage failed.
    """
    put_in_order(folder, [checkpoint_file({item: HANDLER}, time.time_ns(), manifest), MARKER])
