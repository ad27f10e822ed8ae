"""Writes a DCP checkpoint: archives in `.distcp` files, and `.metadata` last, which commits it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from wherry.errors import storage_error
from wherry.integrations.containers.torch.writer import ArchivesWriter
from wherry.integrations.formats.dcp.folder import METADATA
from wherry.storage.folders import sync_folder

if TYPE_CHECKING:
    from wherry.integrations.formats.dcp.layout import DcpLayout
    from wherry.storage.stores import Location


class DcpWriter(ArchivesWriter):
    """A writer of the engine's protocol over the files of one folder."""

    def __init__(self, folder: Location, layout: DcpLayout, metadata: bytes) -> None:
        """Create the files; see ArchivesWriter.

        Args:
            folder: an existing local folder.
            layout: the layout of the checkpoint.
            metadata: the bytes of `.metadata`.
        """
        super().__init__(folder, layout.files)
        self._metadata = metadata
        self._place = folder.join(METADATA)

    def finish(self) -> None:
        """Complete the files; write the metadata when everything else is durable."""
        super().finish()
        try:
            self._place.store.put(self._place.path, self._metadata)
            if self._place.store.capabilities.local:
                sync_folder(Path(self._place.parent.path))
        except OSError as error:
            raise storage_error(error, self._place.uri) from error
