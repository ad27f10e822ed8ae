"""Writing a MaxText step folder: `items/` as Orbax would write it, and around it what a CheckpointManager leaves.

Facts (MaxText 0.2.5 looked at): the step folder has `_CHECKPOINT_METADATA`, which names the handler of `items` and in
`custom_metadata` whether layers are scanned, and `commit_success.txt`; the item has one of its own and no
`_CHECKPOINT_METADATA`. MaxText refuses to load when the recorded `scan_layers` is not that of its config.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wherry.errors import storage_error
from wherry.formats.writer import WriterOver
from wherry.integrations.containers.orbax import layout
from wherry.integrations.containers.orbax.small_files import WRITTEN, checkpoint_json
from wherry.integrations.containers.orbax.writer import OrbaxWriter
from wherry.integrations.formats.maxtext import shape
from wherry.integrations.formats.maxtext.step import ITEM, NAME
from wherry.storage.folders import sync_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wherry.core.manifest import Manifest
    from wherry.formats.format import Options
    from wherry.storage.location import Location

_HANDLER = "orbax.checkpoint.experimental.v1._src.handlers.pytree_handler.PyTreeHandler"


class _ItemWriter(OrbaxWriter):
    """The item, which has no `_CHECKPOINT_METADATA` of its own and says that MaxText's layout was meant."""

    def _small_files(self) -> Iterator[tuple[str, str]]:
        return (row for row in super()._small_files() if row[0] != layout.CHECKPOINT)

    def _notes(self) -> dict[str, Any]:
        return {**super()._notes(), "format": NAME}


class MaxTextWriter(WriterOver):
    """Writes one step folder."""

    def __init__(self, staging: Location, manifest: Manifest, options: Options) -> None:
        self._staging = staging
        self._manifest = recorded(manifest)
        self._started = time.time_ns()
        self._finished = False
        try:
            Path(staging.path).mkdir(exist_ok=True)
        except OSError as error:
            raise storage_error(error, staging.uri) from error
        self._item = _ItemWriter(staging.join(ITEM), self._manifest, options)

    def finish(self) -> None:
        """Complete the item, then the step folder."""
        if self._finished:
            return
        self._item.finish()
        text = checkpoint_json({ITEM: _HANDLER}, self._started, self._manifest)
        self._staging.join(layout.CHECKPOINT).put(text.encode())
        self._staging.join(layout.COMMITTED).put(WRITTEN)
        try:
            sync_folder(Path(self._staging.path))
        except OSError as error:
            raise storage_error(error, self._staging.uri) from error
        self._finished = True


def scan_form(manifest: Manifest) -> bool | None:
    """Whether the layers of a tree are scanned, as MaxText will find them; None where it has none."""
    root = shape.parameter_root(manifest.tensors, confirmed=True)
    found = shape.look(manifest.tensors, root) if root is not None else None
    if found is not None and found.scanned is not None:
        return found.scanned
    value = (manifest.custom.get("checkpoint") or {}).get("scan_layers")
    return value if isinstance(value, bool) else None


def recorded(manifest: Manifest) -> Manifest:
    """The manifest with `scan_layers` among what the step's `custom_metadata` will say."""
    form = scan_form(manifest)
    if form is None:
        return manifest
    around = {**(manifest.custom.get("checkpoint") or {}), "scan_layers": form}
    return replace(manifest, custom={**manifest.custom, "checkpoint": around})
