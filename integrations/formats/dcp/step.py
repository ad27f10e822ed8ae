"""The steps of accelerate's FSDP runs: the model and its optimizers as DCP folders, with the state of the trainer.

Facts: with sharded state dicts `save_state`, and transformers' Trainer, put each model into `pytorch_model_fsdp_<i>`
and each optimizer into `optimizer_<i>`; keys start with `model.` and `optimizer.`. Schedules, random states and the
like are files next to them. So these folders are the items of one step, and the model is the one that is meant unless
an item is named. (A full state dict is the file `pytorch_model_fsdp.bin`, which the format `huggingface` reads.)
Source: accelerate/utils/fsdp_utils.py of 1.12.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from wherry.core.account import FILES, ITEMS, TRAINING_STATE, IgnoredEntry, ignored_file
from wherry.core.detection import Evidence
from wherry.core.steps import step_number
from wherry.errors import AmbiguousError, IncompleteError
from wherry.formats.file_names import fsdp_item
from wherry.integrations.formats.dcp.folder import SUFFIX, metadata_names
from wherry.integrations.formats.huggingface.surroundings import ignored_companion
from wherry.integrations.formats.huggingface.weights import find_weights
from wherry.storage.sidecar import OWN_NAMES

if TYPE_CHECKING:
    from wherry.formats.format import Glimpse
    from wherry.storage.location import Location
    from wherry.store.store import Entry

_NOT_READ = "one item of a step is converted"
_NOT_OF_ITEM = "a file of the step, which the item does not include"


def model_of_step(glimpse: Glimpse) -> str | None:
    """The item of a step that is meant if none is named; None if the folder is no such step.

    Raises:
        AmbiguousError: the step has several models.
        IncompleteError: it has only optimizers.
    """
    if not glimpse.is_dir or find_weights(glimpse.entries) is not None:
        return None
    named = [name for name, entry in glimpse.entries.items() if entry.is_dir and fsdp_item(name)]
    items = [name for name in named if _is_folder_of_torch(glimpse.location.join(name))]
    models = [name for name in items if fsdp_item(name) == "model"]
    if len(models) > 1:
        raise AmbiguousError(
            f"the step has several models: {', '.join(models)}",
            uri=glimpse.location.uri,
            cure=f"pass --item {shlex.quote(models[0])}",
        )
    if items and not models:
        raise IncompleteError(
            f"folder not found: pytorch_model_fsdp_0; the step has only {', '.join(items)}",
            uri=glimpse.location.uri,
            cure=f"use another step, or pass --item {shlex.quote(items[0])} for the optimizer",
        )
    return models[0] if models else None


def _is_folder_of_torch(place: Location) -> bool:
    names = {entry.name: entry for entry in place.entries()}
    return bool(metadata_names(names)) or any(name.endswith(SUFFIX) for name in names)


def item_evidence(item: str) -> Evidence:
    """The evidence that an item of a step was chosen."""
    return Evidence(f"../{item}", "the model of a step of accelerate's FSDP")


def step_around(location: Location) -> int | None:
    """The step in the name of the folder around an item; None for a folder that is no item."""
    return step_number(location.parent.name) if fsdp_item(location.name) else None


def ignored_of_step(location: Location) -> list[IgnoredEntry]:
    """What the step around an item holds besides it; nothing for a folder that is no item."""
    if not fsdp_item(location.name):
        return []
    others = [entry for entry in location.parent.entries() if entry.name not in (location.name, *OWN_NAMES)]
    rows = [_entry(entry) for entry in others if not entry.name.startswith(".")]
    return [row for row in rows if row is not None]


def _entry(entry: Entry) -> IgnoredEntry | None:
    """A file or item of the step; None for folders of which accelerate knows nothing."""
    name = f"../{entry.name}"
    if entry.is_dir:
        kind = fsdp_item(entry.name)
        if kind == "model":
            return ignored_file(name, ITEMS, "another model of the step", _NOT_READ, weights=True)
        return ignored_file(name, TRAINING_STATE, "optimizer state", _NOT_READ) if kind else None
    return ignored_companion(name, _NOT_READ) or ignored_file(name, FILES, "a file", _NOT_OF_ITEM)
