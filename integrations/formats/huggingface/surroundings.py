"""The files around the weights of a folder: its companions, and what is not converted, each with the reason.

Companions are the regular files down to three folders deep that are not weights in any form: config, tokenizer,
generation config, chat template, model card, code of the model. Files of a hub cache are links to blobs and are
followed. The modules that sentence-transformers runs after the model lie in folders that `modules.json` names
(`1_Pooling`, `2_Dense`); they belong to the checkpoint, so every file in them is a companion, weights included.
Source: sentence_transformers/SentenceTransformer.py of 5.1 (`_load_sbert_model`, `save`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from wherry.core.account import FILES, OTHERS, TRAINING_STATE, IgnoredEntry, ignored_file
from wherry.core.steps import step_number
from wherry.errors import IncompleteError, WherryError
from wherry.formats.file_names import fsdp_item, is_deepspeed_shard, is_weights, trainer_file, weights_words
from wherry.integrations.formats.huggingface.weights import find_weights, variant_of
from wherry.storage.sidecar import OWN_NAMES
from wherry.store.store import Entry
from wherry.text.json_document import parse_json
from wherry.text.limits import SMALL

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from wherry.storage.location import Location

_DEEPEST = 3
_MOST_NAMES = 10_000  # files that are looked at below a folder that is too deep to be entered
_LARGEST_MODULES = 1 << 20
_MODULES = "modules.json"
_DCP = ".distcp"
_ORIGINAL = (
    "original"  # folder of hub repositories for the publisher's own files, such as Meta's consolidated.NN.pth
)
_STATE = "the state of a trainer is not part of the weights that are read"


@dataclass(slots=True)
class Surroundings:
    """The files of a folder besides its weights: the companions, and what is not converted."""

    companions: list[Entry] = field(default_factory=list[Entry])
    ignored: list[IgnoredEntry] = field(default_factory=list[IgnoredEntry])


@dataclass(frozen=True, slots=True)
class _FolderWalk:
    """What a walk knows: the files of the weights, the folders of modules, and the reason of what is not read."""

    own: Collection[str]
    modules: frozenset[str]
    reason: str


def surroundings(location: Location, own: Collection[str], read: str) -> Surroundings:
    """List the files around the weights of a checkpoint: companions, and what is not converted.

    Args:
        location: its folder.
        own: names of the weights and of their index.
        read: the name of the file that is read, for the reasons.

    Raises:
        IncompleteError: a companion is a broken link.
    """
    found = Surroundings()
    walk = _FolderWalk(own, _module_folders(location), f"the tensors are read from {read}")
    _collect(location, "", walk, found)
    return found


def ignored_companion(name: str, reason: str) -> IgnoredEntry | None:
    """The entry of a file that is no companion, by its name; None for a companion.

    Args:
        name: relative to the checkpoint.
        reason: why weights of this name are not read.
    """
    last = name.rsplit("/", 1)[-1]
    trainers = trainer_file(last)
    if trainers:
        return ignored_file(name, TRAINING_STATE, trainers.what, _STATE)
    if not is_weights(last):
        return None
    variant = variant_of(last)
    what = f"weights, variant {variant}" if variant else weights_words(last)
    return ignored_file(name, OTHERS, what, reason, weights=not last.endswith(".json"))


def folder_of_weights(name: str, inside: Iterable[str], reason: str) -> IgnoredEntry:
    """The entry of a folder that holds weights.

    Args:
        name: relative to the checkpoint.
        inside: names of its files.
        reason: why it is not read.
    """
    last = name.rsplit("/", 1)[-1]
    if fsdp_item(last) == "optimizer":
        return ignored_file(name, TRAINING_STATE, "optimizer state", _STATE)
    if any(map(is_deepspeed_shard, inside)):
        what = "a folder with DeepSpeed shards of weights and optimizer state"
        return ignored_file(name, OTHERS, what, reason, weights=True)
    if step_number(last) is not None:
        return ignored_file(name, FILES, "a step of the run", "it is a checkpoint of its own")
    what = "weights in the publisher's own form" if last == _ORIGINAL else "a folder with other weights"
    return ignored_file(name, OTHERS, what, reason, weights=True)


def too_deep(folder: Location, name: str) -> IgnoredEntry:
    """The entry of a folder that is too deep to be entered, by the names below it."""
    try:
        below = islice((entry.name for entry in folder.walk()), _MOST_NAMES)
        holds = any(is_weights(one) and not trainer_file(one.rsplit("/", 1)[-1]) for one in below)
    except WherryError:
        holds = True  # a folder that cannot be listed may hold weights
    what = "a folder with other weights" if holds else "a folder"
    reason = f"it is deeper than {_DEEPEST} folders"
    return ignored_file(name, OTHERS if holds else FILES, what, reason, weights=holds)


def _collect(folder: Location, prefix: str, walk: _FolderWalk, found: Surroundings) -> None:
    for entry in folder.entries():
        name = f"{prefix}{entry.name}"
        if entry.name.startswith(".") or name in walk.own or name in OWN_NAMES:
            continue  # hidden files belong to tools (.git, .cache), sidecar and signature to wherry
        if entry.is_dir:
            _enter(folder.join(entry.name), name, walk, found)
        elif left := ignored_companion(name, walk.reason):
            found.ignored.append(left)
        else:
            found.companions.append(_companion(folder, entry, name))


def _companion(folder: Location, entry: Entry, name: str) -> Entry:
    if entry.size < 0:
        folder.require_open(entry)
        raise IncompleteError(f"broken link: {name}", uri=folder.uri, cure="download the file again")
    return Entry(name, entry.size, is_dir=False, mark=entry.mark)


def _enter(folder: Location, name: str, walk: _FolderWalk, found: Surroundings) -> None:
    if name in walk.modules:
        for entry in folder.walk():
            if not any(part.startswith(".") for part in entry.name.split("/")):
                found.companions.append(_companion(folder, entry, f"{name}/{entry.name}"))
        return
    if name.count("/") + 1 >= _DEEPEST:
        found.ignored.append(too_deep(folder, name))
        return
    names = {entry.name: entry for entry in folder.entries()}
    # A checkpoint of torch or DeepSpeed is named as a whole.
    if (
        find_weights(names)
        or any(one.endswith(_DCP) or is_deepspeed_shard(one) for one in names)
        or (folder.name == _ORIGINAL and any(map(is_weights, names)))
    ):
        found.ignored.append(folder_of_weights(name, names, walk.reason))
    else:
        _collect(folder, f"{name}/", walk, found)


def _module_folders(location: Location) -> frozenset[str]:
    """The folders that `modules.json` names; none if there is no such file, or if it is not sentence-transformers'."""
    place = location.join(_MODULES)
    if not place.exists():
        return frozenset()
    try:
        rows: Any = parse_json(place.read_whole(_LARGEST_MODULES), _MODULES, limits=SMALL)
        return frozenset(str(row["path"]).strip("/") for row in rows) - {""}
    except (ValueError, TypeError, KeyError):
        return frozenset()
