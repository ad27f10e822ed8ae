"""T5X's train state as an Orbax item: detecting and opening it.

Facts: the tree is that of a legacy checkpoint without its envelope, `{state, target[, flax_mutables]}`, in the item
`state` of the step folder, next to `dataset` with the iterator. Arrays are zarr folders or an OCDBT database; the
msgpack file `checkpoint` (before mid 2024) holds placeholders, and leaves that were not sharded as arrays. It has no
`version`, so T5X's own loader treats it as version 0 and refuses it (google-research/t5x#1524). Here the file, the
item, the step folder and the run folder all resolve to the same checkpoint, which is the step folder.

The step of a T5X checkpoint: its folder's name and `state/step` must match. T5X itself does not check this.

The companions of a T5X checkpoint: the dataset iterator, and files that users added.

Facts: a legacy checkpoint stores the iterator of its dataset in `train_ds-<iii>-of-<nnn>*` next to the arrays, an Orbax
checkpoint in `dataset/`. Both are opaque and are copied unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace

from wherry.core.account import OTHERS, ignored_file
from wherry.core.detection import Detection, Evidence
from wherry.core.keypath import KeyPath
from wherry.core.manifest import Value
from wherry.core.steps import step_number
from wherry.core.tensorspec import TensorSpec
from wherry.errors import CorruptError, WherryError
from wherry.formats.format import HEAD_BYTES, Glimpse, Opened
from wherry.integrations.containers.flat.reader import Surroundings
from wherry.integrations.containers.orbax import layout as orbax
from wherry.integrations.containers.orbax.item import open_item
from wherry.integrations.containers.zarr.reader import ArrayReader, WithinReader
from wherry.integrations.formats.t5x import layout
from wherry.mover.read import read_array
from wherry.store.location import Location
from wherry.store.sidecar import FOLDER_NAME, SIGNATURE_NAME

ITEM = "state"
HANDLER = "t5x.checkpoints.DatasetCheckpointHandler"
_ROWS = re.compile(rb"\"\('([^'\\]*)',(?: '([^'\\]*)')?")
_FEW = 2  # leading parts of a key path to check


def holds_train_state(item: Location) -> str | None:
    """The file of an item whose first bytes show T5X's roots in the tree, or None."""
    tree, msgpack = item.join(orbax.TREE).stat(), item.join(orbax.MSGPACK).stat()
    if tree is not None:
        starts = {
            tuple(part.decode(errors="replace") for part in row if part)
            for row in _ROWS.findall(item.join(orbax.TREE).read(0, HEAD_BYTES))
        }
        return orbax.TREE if _is_train_state(starts) else None
    if msgpack is None or msgpack.is_dir:
        return None
    seen = layout.glance_at(item.join(orbax.MSGPACK), msgpack.size)
    starts = {path[:_FEW] for path in seen.paths} if seen else set[tuple[str, ...]]()
    return orbax.MSGPACK if _is_train_state(starts) else None


def _is_train_state(starts: set[tuple[str, ...]]) -> bool:
    """Whether all roots are T5X's, including parameters or T5X's optimizer state."""
    roots = {start[0] if start else "" for start in starts}  # a key may be empty
    return (
        bool(roots)
        and roots <= layout.ROOTS
        and (
            bool(roots & {layout.TARGET, layout.TRAIN_STATE}) or (layout.STATE, layout.PARAM_STATES) in starts
        )
    )


def may_hold_train_state(glimpse: Glimpse) -> bool:
    """Whether to look closer: a folder that shows a T5X train state, or has one as its item."""
    location, entries = glimpse.location, glimpse.entries
    places = [location] if orbax.TREE in entries or orbax.MSGPACK in entries else []
    places += [location.join(ITEM)] if ITEM in entries and entries[ITEM].is_dir else []
    steps = [location] if orbax.CHECKPOINT in entries else []
    steps += [location.parent] if location.name == ITEM else []
    return any(holds_train_state(place) for place in places) or any(names_handler(step) for step in steps)


def home_of(item: Location) -> Location:
    """The checkpoint folder around an item: the step folder, or the item itself if it is separate."""
    step = item.parent
    inside = item.name == ITEM and (
        step_number(step.name) is not None or step.join(orbax.CHECKPOINT).exists()
    )
    return step if inside else item


def item_of(home: Location) -> Location:
    """The item of a checkpoint folder."""
    entry = home.join(ITEM).stat()
    whole = any(home.join(name).exists() for name in (orbax.TREE, orbax.MSGPACK, orbax.MANIFEST))
    return home.join(ITEM) if entry is not None and entry.is_dir and not whole else home


def names_handler(home: Location) -> bool:
    """Whether the step folder's metadata names T5X's own handler."""
    try:
        handlers = orbax.read_json(home.join(orbax.CHECKPOINT)).get("item_handlers")
    except OSError:
        raise
    except WherryError:
        return False  # absent, or Orbax's own detection of the item reports the error
    return isinstance(handlers, dict) and HANDLER in handlers.values()


STEP = (layout.STATE, "step")
_STEPS = (STEP, (layout.TRAIN_STATE, *STEP))


def checked_step(
    location: Location,
    tensors: Mapping[KeyPath, TensorSpec],
    values: Mapping[KeyPath, Value],
    reader: ArrayReader,
) -> int | None:
    """The step that the checkpoint states, else the step in its name; None if neither is known.

    Raises:
        CorruptError: the step in the name differs from the step that the checkpoint states.
    """
    place = next((path for path in _STEPS if path in tensors or path in values), STEP)
    inside, spec = values.get(place), tensors.get(place)
    if spec is not None and "int" in spec.dtype and spec.size == 1:
        array, listing = reader.arrays.get(spec.path), reader.listing
        lacks = (
            array is not None and listing is not None and any(listing.lack(key) for key in array.chunk_keys())
        )
        if not lacks:
            inside = int(read_array(reader, spec, spec.whole).reshape(()).item())
    stated = layout.stated_step(location.name)
    if type(inside) is not int:
        return stated
    if stated is not None and stated != inside:
        raise CorruptError(
            f"step mismatch: {stated} in the folder's name, {inside} in state/step",
            uri=location.uri,
            cure=f"rename the folder to checkpoint_{inside}, or use another step",
        )
    return inside


_ARRAY_METADATA = (".zarray", "zarr.json", ".zgroup")
_OWN = frozenset(
    {
        layout.MSGPACK,
        layout.PINNED,
        FOLDER_NAME,
        SIGNATURE_NAME,
        orbax.COMMITTED,
        orbax.CHECKPOINT,
        orbax.V1_MARKER,
        orbax.MANIFEST,
    }
)
_NOT_NAMED = "the train state does not name it"
_OWN_FOLDERS = frozenset({"d", "descriptor"})


def extra_files(home: Location, arrays: Collection[str]) -> Surroundings:
    """The files in a folder that belong neither to the format nor to arrays, with paths relative to the folder.

    Args:
        home: the folder.
        arrays: names of its folders with arrays or items.
    """
    found = Surroundings()
    for entry in home.entries():
        if not entry.is_dir:
            found.companions += [entry] if entry.name not in _OWN and entry.size >= 0 else []
        elif not (
            entry.name in arrays
            or entry.name in _OWN_FOLDERS
            or entry.name.startswith((orbax.PROCESS_PREFIX, *layout.ARRAY_FOLDER_PREFIXES))
            or orbax.is_uncommitted(entry.name)
        ):
            inside = list(home.join(entry.name).walk(f"{entry.name}/"))
            if any(one.name.rsplit("/", 1)[-1] in _ARRAY_METADATA for one in inside):
                what = "a folder with other arrays"
                found.ignored.append(ignored_file(entry.name, OTHERS, what, _NOT_NAMED, weights=True))
            else:
                found.companions += [one for one in inside if not one.name.endswith(f"/{orbax.COMMITTED}")]
    return found


def open_train_state(location: Location, detection: Detection) -> Opened:
    """Open a checkpoint.

    Args:
        location: the step folder, or the item if it is separate.
        detection: the detection from names and first bytes.

    Raises:
        DamagedError, UnsupportedError, HostileError: see `open_item`.
        CorruptError: the folder's step differs from the step inside.
    """
    item = item_of(location)
    opened = open_item(item, detection, partial=True)
    inner: ArrayReader = opened.reader  # pyright: ignore[reportAssignmentType]  open_item makes no other
    step = checked_step(location, opened.manifest.tensors, opened.manifest.values, inner)
    step = opened.manifest.step if step is None else step
    if item != location:
        extra = extra_files(location, {ITEM})
        companions = extra.listed
    else:  # for a separate item, the files in its folder for companions
        extra, own = Surroundings(), opened.manifest.companions
        companions = tuple(replace(one, name=f"{orbax.ASSETS}/{one.name}") for one in own)
    manifest = replace(opened.manifest, step=step, companions=companions)
    if location.join(layout.PINNED).exists():
        manifest = replace(manifest, origin={**manifest.origin, "pinned": True})
        opened = replace(opened, detection=opened.detection.seen(Evidence(layout.PINNED, layout.LOCK)))
    around = location, [one.name for one in companions]
    reader = WithinReader(inner, {"": location}, manifest.tensors, companions=around)
    return Opened(replace(opened.detection, step=step), manifest, reader, tuple(extra.ignored))
