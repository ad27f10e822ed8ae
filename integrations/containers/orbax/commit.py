"""Whether a save was committed: every sign that its writer leaves must say so, wherever the save was copied since.

Facts (Orbax 0.1 to 0.12.8, read and run). A save that is not finished has a name with `.orbax-checkpoint-tmp`, or in a
bucket its final name. From 0.5.16 on `_CHECKPOINT_METADATA` gets `commit_timestamp_nsecs`, null until the save is
finished; a file without this key is complete. Then `commit_success.txt` is written: before 0.12.3 only in a bucket,
since then everywhere, in the step and in each of its items (the v1 API: only in what it renames). So a missing
`commit_success.txt` says nothing alone, and much next to steps or items of the same writer that have it. A partial save
of the v1 API is a folder `NAME.partial_save` until `finalize` renames it, and `_CHECKPOINT_DELETION` names an item that
is being deleted.

Not promised: that a committed save has all its chunks; opening it and `absent` of its reader say that.
"""

from __future__ import annotations

from bisect import bisect_left
from operator import attrgetter
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from wherry.core.steps import StepFolder, step_number, steps_among
from wherry.errors import NotFoundError, WherryError
from wherry.formats.format import Glimpse
from wherry.integrations.containers.orbax import layout
from wherry.integrations.containers.orbax.tree import own_notes, read_tree

if TYPE_CHECKING:
    from wherry.store.location import Location
    from wherry.store.store import Store

_MOST_SIBLINGS = 4  # steps before and after one that are looked at
_RUNS: WeakKeyDictionary[Store, tuple[tuple[str, str], dict[str, list[StepFolder]]]] = WeakKeyDictionary()


def missing_commit(item: Location, parent: Glimpse | None = None) -> str | None:
    """Why an item does not count as committed; None if every sign says that it was.

    Args:
        item: the item folder, in a step or alone.
        parent: the folder that holds it, if the caller has listed it.

    Raises:
        DamagedError: `_CHECKPOINT_METADATA` is empty or invalid.
        StorageError: the storage failed.
    """
    step = (parent or Glimpse(item.parent)) if _is_in_step(item) else None
    if any(layout.is_uncommitted(name) for name in (item.name, item.parent.name)):
        return "not committed: the folder name has the suffix of a save in progress"
    home = item if step is None else step.location
    try:
        stated = layout.read_json(home.join(layout.CHECKPOINT))
    except NotFoundError:
        stated = {}
    if stated.get(layout.COMMIT_TIME, 0) is None:
        return f"not committed: {layout.COMMIT_TIME} is null in {layout.CHECKPOINT} of {home.name}"
    if step is not None:
        unfinished = [name for name in _folders(step) if layout.is_uncommitted(name)]
        if unfinished:
            return f"not committed: the step has {unfinished[0]}, an item of a save in progress"
        if layout.DELETION in step.entries:
            deleted = layout.read_json(home.join(layout.DELETION)).get("checkpointable_name")
            if deleted == item.name:
                return f"{layout.DELETION} says that {item.name} is being deleted"
    return _missing_marker(item, home, step)


def _is_in_step(item: Location) -> bool:
    """Whether an item is in a step folder; one with its own metadata is a checkpoint of its own."""
    if item.join(layout.CHECKPOINT).exists():
        return False
    step = item.parent
    marked = any(step.join(name).exists() for name in (layout.CHECKPOINT, layout.V1_MARKER, layout.COMMITTED))
    return marked or (step_number(step.name, any_prefix=True) is not None and step_number(item.name) is None)


def _missing_marker(item: Location, home: Location, step: Glimpse | None) -> str | None:
    """The reason if the commit member is missing where the store or the writer requires it."""
    inside, around = item.join(layout.COMMITTED).exists(), home.join(layout.COMMITTED).exists()
    protocol = item.store.protocol
    if protocol in layout.RENAMELESS:
        written_last = home.join(layout.CHECKPOINT).exists()  # by a writer that marks step and items
        if around or (inside and not written_last):
            return None
        return f"file not found: {layout.COMMITTED}, which Orbax requires on {protocol}://"
    if step is not None and not inside:
        marked = next(
            (name for name in _folders(step) if home.join(f"{name}/{layout.COMMITTED}").exists()), None
        )
        if marked is not None:
            return f"file not found: {item.name}/{layout.COMMITTED}, which {marked} of the same step has"
    if around:
        return None
    sibling = _marked_sibling(home, item, "" if step is None else item.name)
    return sibling and f"file not found: {layout.COMMITTED}, which step {sibling} of the same writer has"


def _folders(step: Glimpse) -> list[str]:
    return [name for name, entry in step.entries.items() if entry.is_dir]


def _marked_sibling(home: Location, item: Location, name: str) -> str | None:
    """The name of a step of the same run and writer that has the commit member; None if no step shows that.

    Releases up to 0.12.2 did not write it outside of buckets, and may have written the earlier steps of a run. Their
    `_METADATA` has the same fields as that of 0.12.3 from 0.11.31 on, and other fields before.
    """
    number = step_number(home.name, any_prefix=True)
    if number is None:
        return None
    run = home.parent
    steps = _steps_of(run).get(_prefix(home.name), [])  # oldest first
    place = bisect_left(steps, number, key=attrgetter("number"))
    near = steps[max(place - _MOST_SIBLINGS, 0) : place + _MOST_SIBLINGS + 1]
    marked = [
        step
        for step in near
        if step.number != number and run.join(f"{step.name}/{layout.COMMITTED}").exists()
    ]
    if not marked:
        return None
    own = _fields(item)
    if layout.USE_OCDBT in own:
        marked = [step for step in marked if step.number < number]
    return next(
        (
            step.name
            for step in reversed(marked)
            if own == _fields(run.join(step.name).join(name) if name else run.join(step.name))
        ),
        None,
    )


def _steps_of(run: Location) -> dict[str, list[StepFolder]]:
    """The steps of a run by the prefix of their names, oldest first; of the last run of a store they are kept."""
    entry = run.stat()
    state = (run.path, entry.mark if entry is not None else "")
    known, groups = _RUNS.get(run.store, (None, {}))
    if known != state:
        groups = dict[str, list[StepFolder]]()
        try:
            steps = steps_among([child.name for child in run.entries() if child.is_dir])
        except WherryError:  # too many entries, or a place above the checkpoint that must not be listed
            steps = []
        for step in reversed(steps):
            groups.setdefault(_prefix(step.name), []).append(step)
        _RUNS[run.store] = (state, groups)
    return groups


def _prefix(name: str) -> str:
    return name.rstrip("0123456789")


def _fields(item: Location) -> frozenset[str]:
    """The fields of an item's `_METADATA`, which show its writer; wherry's notes count as one."""
    try:
        metadata = read_tree(item)
    except WherryError:
        return frozenset()
    return frozenset(metadata) | ({"wherry"} if own_notes(metadata) else frozenset())
