"""Writes Penzai arrays: an Orbax item, with labels and axis names in `_METADATA` and in a separate file."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from wherry.integrations.containers.orbax.writer import OrbaxWriter
from wherry.integrations.formats.penzai import names

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wherry.core.manifest import Manifest
    from wherry.formats.format import Options
    from wherry.integrations.containers.orbax.layout import JsonObject
    from wherry.storage.location import Location


class PenzaiWriter(OrbaxWriter):
    """Writes one item into a local staging folder; see Writer."""

    def __init__(self, staging: Location, manifest: Manifest, options: Options) -> None:
        """Start the item; raises the errors of `OrbaxWriter`, and an error if two arrays have the same label."""
        self._rows = names.rows_of(manifest, staging.uri)
        super().__init__(staging, _with_names(manifest, self._rows), options)

    def _small_files(self) -> Iterator[tuple[str, str]]:
        yield names.FILE, names.file_text(self._rows)
        yield from super()._small_files()


def _with_names(manifest: Manifest, rows: JsonObject) -> Manifest:
    """The manifest with the rows in `custom_metadata`, which Orbax itself restores."""
    item = {**(manifest.custom.get("item") or {}), names.FIELD: rows}
    return replace(manifest, custom={**manifest.custom, "item": item})
