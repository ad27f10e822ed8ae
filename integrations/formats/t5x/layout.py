"""Detects T5X checkpoints and their version by names and first bytes.

Facts (T5X from 2021 to 2026, run and read in source): a legacy checkpoint is a folder `checkpoint_<step>` with the
msgpack file `checkpoint`, whose root has exactly the keys `version` and `optimizer`, and zarr arrays next to it. T5X
writes `version` first; a save that sorts keys writes it last, as the last bytes of the file. Until its rename the
folder is named `checkpoint_<step>.tmp-<seconds>`. With Orbax the same tree, without the envelope, is the item `state`
of the step folder. A file `PINNED` is a retention lock. TensorFlow writes a text file named `checkpoint`; it starts
with `model_checkpoint_path` and is not a msgpack map.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from wherry.core.lazy_dataclass import dataclass
from wherry.core.manifest import Manifest
from wherry.core.steps import step_number
from wherry.formats.format import HEAD_BYTES
from wherry.formats.systems import TreeForm
from wherry.integrations.containers.msgpack.index import Glance, glance
from wherry.integrations.containers.orbax.layout import PLACEHOLDERS
from wherry.store.location import Location
from wherry.store.store import Entry

MSGPACK = "checkpoint"
VERSION, OPTIMIZER, TRAIN_STATE = "version", "optimizer", "_optimizer"
TARGET, STATE, PARAM_STATES = "target", "state", "param_states"
DATASET = "dataset"
PINNED = "PINNED"
LOCK = "a retention lock: must not be deleted or moved"
OLDEST_VERSION, NEWEST_VERSION = 2, 3
TOO_OLD = "Checkpoint versions earlier than 2 are not supported"

# Roots of the tree of a T5X train state; `params_axes` and similar roots come from a TrainState that was saved whole.
ROOTS = frozenset(
    {STATE, TARGET, "flax_mutables", "flax_mutables_axes", "params_axes", TRAIN_STATE, "flax_optimizer_def"}
)


def _is_train_state(manifest: Manifest) -> bool:
    """Whether every root is T5X's, and parameters are below one of those that it restores."""
    roots = {path[0] for path in manifest.tensors if path}
    return roots <= ROOTS and bool(roots & {TARGET, TRAIN_STATE})


FORM = TreeForm(_is_train_state, f"a train state, with parameters below `{TARGET}`")
_SPEC_KEYS = ("driver", "kvstore", "metadata")
_UNCOMMITTED = re.compile(r"(?P<final>.+)\.tmp-\d+")
_STEP_FOLDER = re.compile(r"checkpoint_(\d{1,18})")
_TAIL = 16
_FIXINT = 0x80
_PARAMETER_PREFIXES = (f"{TARGET}.", f"{OPTIMIZER}.{TARGET}.")
ARRAY_FOLDER_PREFIXES = (*_PARAMETER_PREFIXES, f"{STATE}.", f"{OPTIMIZER}.{STATE}.")


@dataclass(frozen=True, slots=True)
class Envelope:
    """Facts from the first bytes of a legacy msgpack file.

    Attributes:
        version: the number in the file; None if the first bytes do not have it.
        versioned: whether the root has the key `version`.
        specs: whether the leaves include a tensorstore spec.
        placeholders: whether the leaves include a placeholder.
        optimizer_state: whether there is optimizer state.
    """

    version: int | None
    versioned: bool
    specs: bool
    placeholders: bool
    optimizer_state: bool


def look_at(file: Location, size: int, head: bytes | None = None) -> Envelope | None:
    """The envelope of a legacy checkpoint's msgpack file, from its first and last bytes; None for other files."""
    head = file.read(0, HEAD_BYTES) if head is None else head
    seen = glance(head, size)
    if seen is None:
        return None
    roots = [path[0] for path in seen.paths if len(path) == 1]
    tail = _version_at_end(file, size) if seen.state == "more" and OPTIMIZER in roots[:1] else None
    versioned = roots[:2] in ([VERSION, OPTIMIZER], [OPTIMIZER, VERSION]) or tail is not None
    paths, placeholders = set(seen.paths), any(text.startswith(PLACEHOLDERS) for text in seen.texts)
    specs = any(
        path[-1] == "driver" and all((*path[:-1], key) in paths for key in _SPEC_KEYS) for path in paths
    )
    if not versioned and not specs and not (placeholders and OPTIMIZER in roots[:1]):
        return None
    version = _version_at_start(head) if roots[0] == VERSION else tail
    states = any(PARAM_STATES in path for path in seen.paths)
    return Envelope(version, versioned, specs, placeholders, states)


def glance_at(file: Location, size: int) -> Glance | None:
    """A glance at the first bytes of a msgpack file."""
    return glance(file.read(0, HEAD_BYTES), size)


def is_uncommitted(name: str) -> bool:
    """Whether a folder name is that of an uncommitted legacy save."""
    return _UNCOMMITTED.fullmatch(name) is not None


def final_name(name: str) -> str:
    """The name of a folder after its commit."""
    found = _UNCOMMITTED.fullmatch(name)
    return found["final"] if found else name


def stated_step(name: str) -> int | None:
    """The step in a folder's name by T5X's own rule; None for other names."""
    found = _STEP_FOLDER.fullmatch(final_name(name))
    return int(found.group(1)) if found else None


def step_of(name: str) -> int | None:
    """The step in a folder or file name by any known rule."""
    return step_number(final_name(name))


def step_folder(step: int) -> str:
    """The name of a step folder, without leading zeros."""
    return f"checkpoint_{step}"


def array_folders(entries: Mapping[str, Entry]) -> list[str]:
    """The folders with names that only T5X gives to parameters; a file such as `target.list` is none."""
    return [name for name, entry in entries.items() if entry.is_dir and name.startswith(_PARAMETER_PREFIXES)]


def _version_at_start(head: bytes) -> int | None:
    """The number after the first key, if it is encoded in a single byte."""
    place = head.find(VERSION.encode()) + len(VERSION)
    number = head[place : place + 1]
    return number[0] if number and number[0] < _FIXINT else None


def _version_at_end(file: Location, size: int) -> int | None:
    tail = file.read(max(size - _TAIL, 0), size)
    at_end = tail[:-1].endswith(VERSION.encode()) and tail[-1] < _FIXINT
    return tail[-1] if at_end else None
