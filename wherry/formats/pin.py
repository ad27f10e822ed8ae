"""Pin: the state of a source's files at planning time, so that no target of a changed source is committed.

A target must be the image of one state of its source. Flat files are read through one descriptor each (`PinnedStore`),
but a file can be changed in place, other libraries open files by name, and a checkpoint of many files can be replaced
file by file. So before each commit every member is compared with its earlier state: inode, size, modification time and
change time of a local file, ETag or generation of an object; and no member may have been added.

A file that was modified less than two seconds before it was read could be modified again without any trace in its
times. `settled_checkpoint` waits until the file is older, and opens the source again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypedDict

from wherry.core.digest import sha256_of
from wherry.errors import MismatchError, UsageError, WherryError
from wherry.formats.checkpoint import Checkpoint, open_again, present_fingerprint
from wherry.remote.waits import waiting
from wherry.storage.folders import is_staging
from wherry.storage.location import Location
from wherry.storage.sidecar import OWN_NAMES
from wherry.storage.stores import CHANGED_CURE, LocalStore, is_live
from wherry.store.store import NAMED_STATES, Entry

SETTLE_VARIABLE = "WHERRY_SETTLE_SECONDS"
_SETTLE_SECONDS = 2.0  # the coarsest modification times: FAT
_MOST_SETTLE_SECONDS = 86_400.0
_MOST_LOOKS = 30


class _Observation(TypedDict):
    members: Mapping[str, Entry]
    around: frozenset[str]


@dataclass(frozen=True, slots=True)
class Pin:
    """The files of a checkpoint at one moment.

    Attributes:
        uri: the checkpoint.
        base: the folder that the members' names are relative to.
        members: name → its entry in the store.
        around: every name in the folders that belong to the checkpoint.
    """

    uri: str
    base: Location
    members: Mapping[str, Entry]
    around: frozenset[str] = field(default_factory=frozenset[str])

    @property
    def digest(self) -> str:
        """Identifies the state of the files; the same on every machine that sees the same storage."""
        rows = [[name, one.size, one.mark, one.changed] for name, one in sorted(self.members.items())]
        return sha256_of("pin", rows)

    def require_unchanged(self, checkpoint: Checkpoint) -> None:
        """Compare the files with their current state.

        Args:
            checkpoint: the opened checkpoint.

        Raises:
            MismatchError: a member was replaced, modified, added or removed; it is named.
        """
        now = _look(self.base, self.members, whole=self.base.uri == self.uri)
        for name, then in self.members.items():
            place, entry = self.base.join(name), now["members"].get(name)
            if entry is None:
                raise _change_error("a file of the source was removed", place)
            if then.inode != entry.inode:
                raise _change_error("a file of the source was replaced", place)
            if then != entry:
                raise _change_error("a file of the source was modified", place)
        if now["around"] - self.around:
            self._require_no_more(checkpoint)

    def _require_no_more(self, checkpoint: Checkpoint) -> None:
        """Files appeared in the checkpoint's folders: none of them may belong to it."""
        try:
            with open_again(checkpoint) as again:
                new = sorted(_names(again) - set(self.members))
        except WherryError as error:  # the new files damage it, or it opens only in another way
            raise _change_error("files were added to the source", self.base) from error
        if new:
            raise _change_error("a file was added to the source", self.base.join(new[0]))


@dataclass(frozen=True, slots=True)
class JoinedPin:
    """The files of several checkpoints that are read as one.

    Attributes:
        pins: one for each, in the order of the parts.
    """

    pins: tuple[Pin, ...]

    @property
    def digest(self) -> str:
        """Identifies the state of all files."""
        return sha256_of("pins", [pin.digest for pin in self.pins])

    def require_unchanged(self, checkpoint: Checkpoint) -> None:
        """See Pin, for each part of a checkpoint."""
        for pin, part in zip(self.pins, checkpoint.parts, strict=True):
            pin.require_unchanged(part.checkpoint)


def take_pins(checkpoint: Checkpoint) -> Pin | JoinedPin:
    """The files of a source, or of each of several that are read as one; see `take_pin`."""
    parts = checkpoint.original.parts
    return JoinedPin(tuple(take_pin(part.checkpoint) for part in parts)) if parts else take_pin(checkpoint)


def take_pin(checkpoint: Checkpoint) -> Pin:
    """The files of an opened checkpoint in the state in which they were opened; a live training state has none."""
    location = checkpoint.location
    if is_live(checkpoint.uri):
        return Pin(checkpoint.uri, location, {})
    entry = location.stat()
    base = location if entry is not None and entry.is_dir else location.parent
    pin = Pin(checkpoint.uri, base, **_look(base, _names(checkpoint), whole=base is location))
    first = {name: checkpoint.first_seen(base.join(name)) or one for name, one in pin.members.items()}
    return replace(pin, members=first)


def object_pin(checkpoint: Checkpoint) -> Pin | None:
    """The pin of objects whose states the store gives; None for other files, whose times can be set."""
    named = checkpoint.location.store.capabilities.version in NAMED_STATES
    return take_pin(checkpoint) if named else None


def state_read(pin: Pin | None, checkpoint: Checkpoint) -> str:
    """What identifies the objects whose bytes were read, after all of them were.

    Args:
        pin: an `object_pin`, taken before the first byte was read.
        checkpoint: the opened checkpoint.

    Returns:
        The fingerprint of the files, marks included; empty without a pin, or where a file has changed meanwhile.
    """
    if pin is None:
        return ""
    try:
        pin.require_unchanged(checkpoint)
    except MismatchError:
        return ""
    return present_fingerprint(checkpoint)


@contextmanager
def blaming_changes(pin: Pin | JoinedPin, checkpoint: Checkpoint) -> Generator[None]:
    """Report an error in reading a source that has changed meanwhile as that change.

    Raises:
        MismatchError: an error occurred, and the source has changed.
        WherryError: the error itself, if the source has not changed.
    """
    try:
        yield
    except WherryError:
        pin.require_unchanged(checkpoint)
        raise


def _real_path(checkpoint: Checkpoint) -> str:
    """Where a local checkpoint is, with the links in its path resolved; empty elsewhere."""
    store = checkpoint.location.store
    return store.root.real if isinstance(store, LocalStore) and store.root is not None else ""


def settled_checkpoint(open_it: Callable[[], Checkpoint]) -> Checkpoint:
    """Open a source whose files have not been modified for two seconds (`WHERRY_SETTLE_SECONDS`).

    Args:
        open_it: opens it.

    Raises:
        MismatchError: the source is continuously being written, or its path leads elsewhere meanwhile.
        WherryError: the error of opening it.
    """
    settle, checkpoint = _settle_seconds(), open_it()
    pin = take_pin(checkpoint)
    if (rest := settle - _age(pin)) <= 0:
        return checkpoint
    with waiting(checkpoint.uri, what=f"its files to stay unchanged for {settle:g} s"):
        for _ in range(_MOST_LOOKS):
            checkpoint.close()
            time.sleep(min(rest, settle))
            before, real, checkpoint = pin, _real_path(checkpoint), open_it()
            if checkpoint.uri == before.uri and _real_path(checkpoint) != real:
                checkpoint.close()
                raise _change_error("the folder of the source was replaced", checkpoint.location)
            pin = take_pin(checkpoint)
            if pin.members == before.members or (rest := settle - _age(pin)) <= 0:
                return checkpoint
    checkpoint.close()
    raise MismatchError(
        "the source is still being written", uri=checkpoint.uri, cure=CHANGED_CURE, retryable=True
    )


def _names(checkpoint: Checkpoint) -> set[str]:
    return {entry.name for entry in checkpoint.reader.members()} - set(OWN_NAMES)


def _look(base: Location, names: Iterable[str], *, whole: bool) -> _Observation:
    """The entries of members, and the names around them.

    Args:
        base: the folder that the names are relative to.
        names: the members.
        whole: whether that folder belongs to the checkpoint alone; otherwise it may hold other things too.
    """
    members: dict[str, Entry] = {}
    around: set[str] = set()
    by_folder: dict[str, list[str]] = {}
    for path in names:
        folder, _, name = path.rpartition("/")
        by_folder.setdefault(folder, []).append(name)
    for folder, wanted in by_folder.items():
        place, prefix = (base.join(folder), f"{folder}/") if folder else (base, "")
        own = whole or bool(folder)
        listed = {one.name: one for one in place.entries()} if own else _looked_up(place, wanted)
        members |= {prefix + name: listed[name] for name in wanted if name in listed}
        around |= {prefix + name for name in listed if own and not (name in OWN_NAMES or is_staging(name))}
    return {"members": members, "around": frozenset(around)}


def _looked_up(place: Location, names: Iterable[str]) -> dict[str, Entry]:
    found = ((name, place.join(name).stat()) for name in names)
    return {name: entry for name, entry in found if entry is not None}


def _change_error(what: str, location: Location) -> MismatchError:
    return MismatchError(f"{what} during the conversion", uri=location.uri, cure=CHANGED_CURE)


def _age(pin: Pin) -> float:
    """Seconds since the last change of a local file; a time in the future counts as now."""
    stamps = [max(int(one.mark or 0), one.changed) for one in pin.members.values() if one.changed]
    return max(time.time() - max(stamps) / 1e9, 0.0) if stamps else float("inf")


def _settle_seconds() -> float:
    text = os.environ.get(SETTLE_VARIABLE, "")
    try:
        seconds = float(text) if text else _SETTLE_SECONDS
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= _MOST_SETTLE_SECONDS:
        raise UsageError(
            f"invalid value for {SETTLE_VARIABLE}: {text!r}; expected seconds from 0 to 86400",
            cure=f"set a number of seconds, for example {SETTLE_VARIABLE}=2",
        )
    return seconds
