"""companions_view: a source whose tree does not change, with a config and companion files that the user states.

A tree without a family keeps its names in a Hugging Face folder. What the user states of the model (`--config`,
`--assets`) is put next to it, so that the result can be loaded. Whether the names are those of the model is not proved.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from wherry.core.manifest import Companion
from wherry.core.request import LayoutRequest
from wherry.families.companions import asset_files, model_folder
from wherry.formats.checkpoint import Checkpoint
from wherry.formats.companions import CompanionsReader
from wherry.formats.contents import Contents
from wherry.formats.format import Opened
from wherry.view.model import CONFIG, config_of
from wherry.view.stated_config import replaced_attributes, require_model

_NO_CONFIG = "no config.json: transformers cannot load the folder; pass the model's with --config"
_NOT_PROVED = "no family: the names of the tensors are kept, and were not compared with those of the model"


class CompanionsView(Checkpoint):
    """A source with new companion files; it must stay open while the view is used."""

    def __init__(
        self,
        source: Checkpoint,
        files: Mapping[str, bytes],
        notes: tuple[str, ...],
        uses_in_files: frozenset[str],
    ) -> None:
        """Create a view; nothing is read yet.

        Args:
            source: the source.
            files: new companion files, by name; they replace those of the source.
            notes: messages for the plan.
            uses_in_files: the options that the files are made by.
        """
        self._source, self._files_by_name = source, files
        kept = [one for one in source.manifest.companions if one.name not in files]
        new = [Companion(name, len(data)) for name, data in files.items()]
        manifest = replace(source.manifest, companions=(*kept, *new))
        super().__init__(
            Opened(source.detection, manifest, self.reader_over(source.original.reader), source.ignored)
        )
        self.bounds, self.notes = source.bounds, (*source.notes, *notes)
        self.is_view, self.parts = source.is_view, source.parts
        self.uses, self.uses_in_files = source.uses, source.uses_in_files | uses_in_files

    @property
    def original(self) -> Checkpoint:
        """The stored checkpoint."""
        return self._source.original

    def reader_over(self, reader: Contents) -> Contents:
        """A reader of the view over one of the stored checkpoint."""
        return CompanionsReader(self._source.reader_over(reader), self._files_by_name)


def with_companions(checkpoint: Checkpoint, layout: LayoutRequest, *, proved: bool = False) -> Checkpoint:
    """A source whose names are kept, with the config and the files that the user states or that the trainer saved.

    Args:
        checkpoint: the source.
        layout: the config and the assets.
        proved: whether the names are those of the target's system.

    Raises:
        NotFoundError, UsageError: a stated file cannot be read.
    """
    carried = CONFIG in {one.name for one in checkpoint.manifest.companions} and not layout.config
    config = require_model(layout.config) if layout.config else config_of(checkpoint)
    files = asset_files(layout.assets) if layout.assets else asset_files(model_folder(checkpoint))
    if config is not None and not carried:
        files[CONFIG] = (json.dumps(config, indent=2) + "\n").encode()
    differences = replaced_attributes(checkpoint, layout.config, config) if layout.config and config else ()
    notes = (*differences, *(() if proved else (_NOT_PROVED,)), *(() if config else (_NO_CONFIG,)))
    stated = {"--config": layout.config, "--assets": layout.assets}
    uses = frozenset(name for name, value in stated.items() if value)
    return CompanionsView(checkpoint, files, notes, uses)
