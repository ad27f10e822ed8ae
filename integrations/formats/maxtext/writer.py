"""Writes a MaxText step folder: `items/` as Orbax would write it, with the files of a CheckpointManager around it.

Facts (MaxText 0.2.5): the step folder has `_CHECKPOINT_METADATA`, which names the handler of `items` and states in
`custom_metadata` whether layers are scanned, and `commit_success.txt`; the item has another `commit_success.txt` and no
`_CHECKPOINT_METADATA`. MaxText refuses to load if the recorded `scan_layers` differs from its config.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wherry.integrations.containers.orbax import layout
from wherry.integrations.containers.orbax.small_files import WRITTEN, checkpoint_json
from wherry.integrations.containers.orbax.step import StepWriter
from wherry.integrations.containers.orbax.writer import OrbaxWriter
from wherry.integrations.formats.maxtext import shape
from wherry.integrations.formats.maxtext.step import ITEM, NAME

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wherry.core.manifest import Manifest
    from wherry.formats.format import Options
    from wherry.storage.location import Location

_HANDLER = "orbax.checkpoint.experimental.v1._src.handlers.pytree_handler.PyTreeHandler"


class _ItemWriter(OrbaxWriter):
    """The item, which has no separate `_CHECKPOINT_METADATA` and records that it is in MaxText's layout."""

    def _small_files(self) -> Iterator[tuple[str, str]]:
        return (row for row in super()._small_files() if row[0] != layout.CHECKPOINT)

    def _notes(self) -> dict[str, Any]:
        return {**super()._notes(), "format": NAME}


class MaxTextWriter(StepWriter):
    """Writes one step folder."""

    def __init__(self, staging: Location, manifest: Manifest, options: Options) -> None:
        super().__init__(staging, record_scan(manifest))
        self._item = _ItemWriter(staging.join(ITEM), self._manifest, options)

    def _around(self) -> Iterator[tuple[str, bytes]]:
        yield layout.CHECKPOINT, checkpoint_json({ITEM: _HANDLER}, self._started, self._manifest).encode()
        yield layout.COMMITTED, WRITTEN


def scan_form(manifest: Manifest) -> bool | None:
    """Whether the layers of a tree are scanned, as MaxText determines it; None without layers."""
    root = shape.parameter_root(manifest.tensors, confirmed=True)
    found = shape.look(manifest.tensors, root) if root is not None else None
    if found is not None and found.scanned is not None:
        return found.scanned
    value = (manifest.custom.get("checkpoint") or {}).get("scan_layers")
    return value if isinstance(value, bool) else None


def record_scan(manifest: Manifest) -> Manifest:
    """The manifest with `scan_layers` added to the step's `custom_metadata`."""
    form = scan_form(manifest)
    if form is None:
        return manifest
    around = {**(manifest.custom.get("checkpoint") or {}), "scan_layers": form}
    return replace(manifest, custom={**manifest.custom, "checkpoint": around})
