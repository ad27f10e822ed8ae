"""discover: find the checkpoints below a root, one at a time.

A folder that a format recognises is one checkpoint and is not entered, so data folders are never listed and a step is
not reported again as its item; only step folders in it are looked at. Only names and first bytes are read; `detect`
says whether a checkpoint is complete. Everything that is skipped (staging areas, unfinished saves, unreadable folders)
is passed to `on_skip` with the reason.

Systems that write in place (DCP, Hugging Face, plain files) do not mark a save in progress. With `min_age` a
checkpoint counts only if its files have not changed for that long, or if its commit member or sidecar exists and no
file is newer, which proves that it was written last.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from wherry.core.detection import Detection
from wherry.core.lazy_dataclass import dataclass
from wherry.core.steps import step_number, steps_among, unfinished_reason
from wherry.core.units import show_seconds
from wherry.errors import AmbiguousError, DamagedError, HostileError, NotFoundError, StorageError, WherryError
from wherry.formats.detect import examine, locate_near, look
from wherry.formats.file_names import unsupported_form
from wherry.formats.format import Format, Glimpse
from wherry.formats.registry import formats
from wherry.store.folders import is_staging
from wherry.store.local_store import locate, with_open_root
from wherry.store.location import Location
from wherry.store.object_view import view_for_walk
from wherry.store.sidecar import OWN_NAMES
from wherry.store.store import Entry

# A commit member that holds the tensors themselves exists from the first byte on, and proves nothing.
_HOLD_TENSORS = (".safetensors", ".bin", ".pt", ".pth")
_NANOSECONDS = 1_000_000_000
_DAMAGED = ("incomplete", "corrupt", "malicious")  # verdicts
DEEPEST = 100  # nested folders below the root; each level is a call within the one above

NEWER_STEP = "a newer step of this run is complete"  # the only reason that the caller chooses, with `newest`


class SkippedPath(NamedTuple):
    """A path below the root that is not reported as a checkpoint.

    Attributes:
        uri: the path.
        reason: why.
        error: the error because of which nothing is known about it; None if it is known not to be one.
        damaged: whether it is a checkpoint that cannot be read as it is, and that nobody has written for `min_age`: a
            save or a copy in progress looks the same.
    """

    uri: str
    reason: str
    error: StorageError | None = None
    damaged: bool = False


def discover(
    root: str | os.PathLike[str],
    *,
    on_skip: Callable[[SkippedPath], None] | None = None,
    min_age: float = 0.0,
    newest: bool = False,
) -> Iterator[Detection]:
    """Find the checkpoints below a root.

    Args:
        root: a folder, or one checkpoint.
        on_skip: called for everything that is skipped.
        min_age: seconds for which the files of a checkpoint must be unchanged if nothing proves that it is
            committed; local files only.
        newest: report only the newest complete step of each run; this opens the metadata of steps.

    Yields:
        A detection for each, as it is found, in the order of names. Verdicts rest on names and first bytes only.

    Raises:
        NotFoundError: the root does not exist.
    """
    return walk(locate(root), on_skip, min_age, newest=newest)


def walk(
    location: Location, on_skip: Callable[[SkippedPath], None] | None, min_age: float, *, newest: bool
) -> Iterator[Detection]:
    """The checkpoints below a location; see `discover`."""
    location = with_open_root(view_for_walk(location))
    if location.entry is None:
        raise NotFoundError("file or folder not found", uri=location.uri, cure="check the path")
    top = location.path.count("/")
    return _Walk(formats(), on_skip or _ignore, min_age, newest=newest, top=top).below(Glimpse(location))


def is_folder_link(place: Location, entry: Entry) -> bool:
    """Whether a child of a folder is a link to a folder; no walk enters one, since its target has its own path."""
    return place.store.capabilities.local and entry.is_dir and Path(place.path).is_symlink()


@dataclass(frozen=True, slots=True)
class _Walk:
    """The state of one walk."""

    rows: Mapping[str, Format]
    on_skip: Callable[[SkippedPath], None]
    min_age: float
    newest: bool
    top: int = 0  # parts of the root's path

    def below(self, glimpse: Glimpse) -> Iterator[Detection]:
        """The checkpoint at this location, or the checkpoints below it."""
        if glimpse.location.path.count("/") - self.top > DEEPEST:
            self._skip(glimpse.location, f"folders are nested more than {DEEPEST} levels deep")
            return
        try:
            found = look(glimpse, self.rows)
            children = glimpse.entries if found is None else {}
        except AmbiguousError as error:
            yield from self._items(glimpse, error)
            return
        except HostileError as error:
            # What a link in a folder reaches says nothing about the runs next to it.
            self._skip(glimpse.location, error.what, error)
            yield from self._among(
                glimpse, {name: one for name, one in glimpse.entries.items() if one.is_dir}
            )
            return
        except WherryError as error:  # one bad folder does not end the walk
            self._skip(glimpse.location, error.what, error)
            return
        if found is not None:
            reason = self._unsettled_reason(glimpse, found)
            if reason is None:
                yield found
            elif found.verdict != "ok":
                self._skip_unusable(glimpse.location, found)
            else:
                self._skip(glimpse.location, reason)
            yield from self._steps_within(glimpse)
        elif children:
            form = unsupported_form(glimpse)
            if form is not None and form.ranks:
                self._skip(glimpse.location, f"{form.name}, which wherry does not read")
            else:
                yield from self._among(glimpse, children)

    def _among(self, glimpse: Glimpse, children: Mapping[str, Entry]) -> Iterator[Detection]:
        kept = [entry for entry in children.values() if self._keep(glimpse, entry)]
        steps = steps_among([entry.name for entry in kept if entry.is_dir]) if self.newest else []
        yield from self._newest(glimpse.location, [step.name for step in steps])
        rest = {entry.name for entry in kept} - {step.name for step in steps}
        for name in sorted(rest):
            yield from self.below(Glimpse(glimpse.location.join(name)))

    def _newest(self, run: Location, steps: Iterable[str]) -> Iterator[Detection]:
        """The newest complete step of a run; checkpoints below steps that are not checkpoints are found too."""
        done = False
        for name in steps:
            if done:
                self._skip(run.join(name), NEWER_STEP)
                continue
            for found in self.below(Glimpse(run.join(name))):
                verdict = examine(locate_near(run, found.uri), found)
                done = done or verdict.verdict == "ok"
                if verdict.verdict == "ok":
                    yield found
                else:
                    self._skip_unusable(run.join(name), verdict)

    def _steps_within(self, glimpse: Glimpse) -> Iterator[Detection]:
        """Steps inside a checkpoint: the Hugging Face trainer saves the last model next to its `checkpoint-<n>`."""
        children = glimpse.entries.values() if glimpse.is_dir else ()
        named = [entry for entry in children if entry.is_dir and not entry.name.isdecimal()]
        steps = [
            entry for entry in named if step_number(entry.name) is not None and self._keep(glimpse, entry)
        ]
        places = [Glimpse(glimpse.location.join(entry.name)) for entry in steps]
        claimed = {place.location.name: place for place in places if self._is_claimed(place)}
        if self.newest:
            yield from self._newest(glimpse.location, [step.name for step in steps_among(list(claimed))])
            return
        for place in claimed.values():
            yield from self.below(place)

    def _is_claimed(self, glimpse: Glimpse) -> bool:
        try:
            return look(glimpse, self.rows) is not None
        except WherryError:
            return False  # it belongs to the outer checkpoint

    def _items(self, glimpse: Glimpse, error: AmbiguousError) -> Iterator[Detection]:
        """The items of a step that has several; none if several formats recognise the same folder."""
        found = False
        for entry in glimpse.entries.values():
            item = Glimpse(glimpse.location.join(entry.name))
            if self._keep(glimpse, entry) and self._is_claimed(item):
                found = True
                yield from self.below(item)
        if not found:
            self._skip(glimpse.location, error.what)

    def _keep(self, folder: Glimpse, entry: Entry) -> bool:
        place = folder.location.join(entry.name)
        reason = _passed_over(folder, place, entry)
        if reason:
            self._skip(place, reason)
        return reason is None and (entry.is_dir or entry.size > 0)

    def _unsettled_reason(self, glimpse: Glimpse, found: Detection) -> str | None:
        """Why a checkpoint does not count, from its names and the times of its files."""
        if found.verdict != "ok":
            return found.reason or found.verdict
        if self.min_age <= 0 or not glimpse.location.store.capabilities.local:
            return None
        entry = glimpse.location.entry
        times = {name: int(one.mark) for name, one in glimpse.entries.items() if one.mark}
        if entry is not None and not times:
            times = {entry.name: int(entry.mark)}
        last = max(times.values(), default=0)
        age = time.time() - last / _NANOSECONDS
        if age >= self.min_age or self._is_proved(times, last, self.rows[found.format]):
            return None
        wait = math.ceil(self.min_age - max(age, 0))
        return (
            f"not settled: changed {max(age, 0):.0f} s ago, and no commit member proves that it is complete; it is "
            f"settled in {show_seconds(wait)} if nothing changes, or at once with min_age = 0"
        )

    def _is_proved(self, times: Mapping[str, int], last: int, row: Format) -> bool:
        markers = [name for name in row.commit_members if not name.endswith(_HOLD_TENSORS)]
        return any(times.get(name) == last for name in (*markers, *OWN_NAMES))

    def _skip(self, location: Location, reason: str, error: WherryError | None = None) -> None:
        unknown = error if isinstance(error, StorageError) else None
        bad = isinstance(error, DamagedError | HostileError) and self._is_at_rest(location)
        self.on_skip(SkippedPath(location.uri, reason, unknown, damaged=bad))

    def _skip_unusable(self, location: Location, found: Detection) -> None:
        """Skip a checkpoint with another verdict than `ok`."""
        # In a store, objects appear whole: what is there may lack others that are still to come, but is not cut off.
        bad = found.verdict in _DAMAGED and (
            self._is_at_rest(location) if location.store.capabilities.local else found.verdict != "incomplete"
        )
        self.on_skip(SkippedPath(location.uri, found.reason or found.verdict, damaged=bad))

    def _is_at_rest(self, location: Location) -> bool:
        """Whether nothing below a location has changed for `min_age`; where times are unknown, yes."""
        if self.min_age <= 0 or not location.store.capabilities.local:
            return True
        top = Path(location.path)
        last = 0.0
        for path in (top, *top.rglob("*")) if top.is_dir() else (top,):
            with suppress(OSError):
                last = max(last, path.lstat().st_mtime)
        return time.time() - last >= self.min_age


def _passed_over(folder: Glimpse, place: Location, entry: Entry) -> str | None:
    if entry.barred:
        return entry.barred
    if is_staging(entry.name):
        return "staging area of an unfinished conversion"
    if entry.is_dir and entry.name.startswith("."):
        return "hidden folder"
    if entry.is_dir and entry.name == "blobs" and "snapshots" in folder.entries:
        return "blobs of a Hugging Face cache; its snapshots link to them"
    if is_folder_link(place, entry):
        return "symbolic link to a folder; its target is found at its own path"
    return unfinished_reason(entry.name)


def _ignore(_skipped: SkippedPath) -> None:
    """The default `on_skip`."""
