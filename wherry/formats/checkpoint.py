"""Checkpoint: an opened, read-only checkpoint, its fingerprint, and the pin of its files.

A checkpoint has a URI, a Detection, a Manifest and Contents. Opening reads metadata only. Nothing is ever unpickled,
and the source is never changed.

A fingerprint is the cheap answer to "has this stored checkpoint changed?": SHA-256 over the names, sizes and change
marks (mtime_ns, ETag or generation) of its files, without reading any of them. If the fingerprint is unchanged, a rerun
has nothing to do and a journal can be trusted. It proves nothing about the content; digests do.

A `Pin` is the state of a source's files at planning time, so that no target of a changed source is committed. A target
must be the image of one state of its source. Flat files are read through one descriptor each (`PinnedStore`), but a
file can be changed in place, other libraries open files by name, and a checkpoint of many files can be replaced file by
file. So before each commit every member is compared with its earlier state: inode, size, modification time and change
time of a local file, ETag or generation of an object; and no member may have been added.

A file that was modified less than two seconds before it was read could be modified again without any trace in its
times. `settled_checkpoint` waits until the file is older, and opens the source again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field, replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self, TypedDict

from wherry.core import dtypes
from wherry.core.digest import sha256_of
from wherry.core.keypath import KeyPath, parse, render
from wherry.core.lazy_dataclass import dataclass
from wherry.core.manifest import Manifest
from wherry.core.request import SourceRequest
from wherry.core.services import service
from wherry.core.tensorspec import Region, TensorSpec, checked_region
from wherry.cures import Command, Cure
from wherry.errors import CorruptError, MismatchError, NotFoundError, UsageError, WherryError
from wherry.formats.lazy_tensor import LazyTensor
from wherry.formats.shortage import Shortage, shortage
from wherry.store.folders import is_staging
from wherry.store.local_store import CHANGED_CURE, LocalStore, PinnedStore, is_live, locate
from wherry.store.location import Location
from wherry.store.object_view import ObjectView
from wherry.store.sidecar import OWN_NAMES
from wherry.store.store import NAMED_STATES, Entry
from wherry.store.waits import waiting

if TYPE_CHECKING:
    import numpy as np

    from wherry.core.account import Bound, IgnoredEntry
    from wherry.core.detection import Detection
    from wherry.formats.format import Contents, Opened


class JoinedPart(NamedTuple):
    """One of several checkpoints that are read as one.

    Attributes:
        prefix: what stands in front of its key paths in the whole.
        checkpoint: the stored checkpoint.
    """

    prefix: KeyPath
    checkpoint: Checkpoint


class Checkpoint:
    """One opened checkpoint; close it, or use it in a `with` statement.

    Attributes:
        detection: what it is and why.
        manifest: what it holds.
        reader: the format's reader, through which the mover reads bytes.
        ignored: what is next to it and is not read; of a view also the entries of the source that it omits.
        opaque: names of the pickle classes that were read as opaque values.
        bounds: key path → limit of what the values of a view's tensor lose in a round trip, if they can change.
        notes: what a view could not carry, as text.
        snippet: code that loads a view in its target software.
        is_view: whether it is a view of another checkpoint.
        laid_out: whether it is a view in the layout of the target's system.
        uses: options of the request on which names, values or metadata of a view depend: `--config`, or the name of a
            `--set`.
        uses_in_files: options on which only its companion files depend.
        parts: the stored checkpoints that are read as one; empty for one that is stored itself.
    """

    ignored: tuple[IgnoredEntry, ...] = ()
    bounds: Mapping[KeyPath, Bound] = {}
    opaque: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    snippet: str = ""
    is_view: bool = False
    laid_out: bool = False
    uses: frozenset[str] = frozenset()
    uses_in_files: frozenset[str] = frozenset()
    parts: tuple[JoinedPart, ...] = ()

    def __init__(
        self,
        opened: Opened,
        files: PinnedStore | ObjectView | None = None,
        opaque: Collection[str] = (),
        place: Location | None = None,
    ) -> None:
        """Create a checkpoint from what a format opened.

        Args:
            opened: detection, manifest and reader.
            files: the store of its files; closed with the checkpoint.
            opaque: names of the pickle classes that were read as opaque values.
            place: where it was opened; by default where its URI leads.

        Raises:
            CorruptError: two leaves have one key path.
        """
        tensors, values, empties = opened.manifest.tensors, opened.manifest.values, opened.manifest.empties
        both = (
            tensors.keys() & values.keys()
            or tensors.keys() & empties.keys()
            or values.keys() & empties.keys()
        )
        for path in both:
            raise CorruptError(
                f"two leaves have the key path {render(path)}",
                uri=opened.detection.uri,
                cure="restore the checkpoint from a backup; its metadata contradicts itself",
            )
        self._files = files
        self._place = place
        self.opaque = tuple(opaque)
        self.detection: Detection = opened.detection
        self.manifest: Manifest = opened.manifest
        self.reader: Contents = opened.reader
        self.ignored = opened.ignored

    @property
    def original(self) -> Checkpoint:
        """The stored checkpoint: itself, or the checkpoint of which it is a view."""
        return self

    @property
    def parameters(self) -> int:
        """The number of elements of its tensors; of a view those of its source."""
        return self.manifest.parameters

    @property
    def lossy(self) -> dict[KeyPath, Bound]:
        """The bounds of tensors whose values change even where none of them over- or underflows."""
        return {path: bound for path, bound in self.bounds.items() if not bound.exact}

    @property
    def shortages(self) -> list[tuple[str, Shortage]]:
        """The missing weights of the stored checkpoint, or of those that are read as one, with their URIs."""
        stored = [part.checkpoint for part in self.original.parts] or [self.original]
        found = [(one.uri, shortage(one.manifest)) for one in stored]
        return [(uri, one) for uri, one in found if one is not None]

    def made_of(self, path: KeyPath) -> Collection[KeyPath]:
        """The tensors of `original` that a tensor is made of."""
        return (path,)

    def reader_over(self, reader: Contents) -> Contents:
        """The checkpoint's reader, on top of another reader of `original`."""
        return reader

    def first_seen(self, location: Location) -> Entry | None:
        """The entry of a local file at its first read, of an object when it was first seen; None if it never was."""
        return self._files.first_seen(location.path) if self._files is not None else None

    @property
    def uri(self) -> str:
        """The URI of the checkpoint."""
        return self.detection.uri

    @property
    def location(self) -> Location:
        """The present location, in the folder that was opened, for names and files that the reader has not read."""
        if self.original is not self:
            return self.original.location
        if self.parts:
            return self.parts[0].checkpoint.location
        return locate(self.uri) if self._place is None else self._place

    def spec(self, path: KeyPath | str) -> TensorSpec:
        """The TensorSpec of a key path, given as a tuple or printed.

        Raises:
            NotFoundError: the checkpoint has no tensor at this key path.
        """
        key = parse(path) if isinstance(path, str) else tuple(path)
        if key not in self.manifest.tensors:
            raise NotFoundError(
                "tensor not found",
                uri=self.uri,
                path=render(key),
                cure=Cure("run {} to list all key paths", Command("inspect")),
            )
        return self.manifest.tensors[key]

    def __getitem__(self, path: KeyPath | str) -> LazyTensor:
        """A tensor by its key path, printed or as a tuple; indexing it reads that part: `checkpoint["a/w"][:8]`.

        Raises:
            NotFoundError: the checkpoint has no tensor at this key path.
        """
        spec = self.spec(path)
        return LazyTensor(spec, partial(self.read, spec.path))

    def __iter__(self) -> Iterator[KeyPath]:
        """The key paths of the tensors."""
        return iter(self.manifest.tensors)

    def __contains__(self, path: object) -> bool:
        """Whether there is a tensor at a key path, printed or as a tuple."""
        return (parse(path) if isinstance(path, str) else path) in self.manifest.tensors

    def __repr__(self) -> str:
        return f"<Checkpoint {self.uri!r}: {self.detection.format}, {self.manifest.summary}>"

    def _repr_html_(self) -> str:
        return self.manifest.to_html(repr(self))

    def read(self, path: KeyPath | str, region: Region | None = None) -> np.ndarray:
        """Elements of a tensor.

        Args:
            path: key path, as a tuple or printed.
            region: one step-1 slice per dimension; by default the whole tensor.

        Returns:
            A new C-order little-endian array of the region's shape (an ml_dtypes dtype where needed).

        Raises:
            NotFoundError: the checkpoint has no tensor at this key path.
            UsageError: the region does not fit, or numpy does not support the dtype (use `read_bytes`).
            DamagedError: bytes are missing or inconsistent.
        """
        spec = self.spec(path)
        if dtypes.opaque(spec.dtype):
            raise UsageError(
                f"numpy does not support dtype {spec.dtype}", path=spec.name, cure="use read_bytes"
            )
        return service("read").read_array(self.reader, spec, checked_region(spec, region))

    def read_bytes(self, path: KeyPath | str) -> bytes:
        """Canonical bytes of a whole tensor; the only way to read dtypes that numpy does not support."""
        return service("read").read_bytes(self.reader, self.spec(path))

    def close(self) -> None:
        """Close the reader and the files."""
        self.reader.close()
        if self._files is not None:
            self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_source(source: SourceRequest) -> Checkpoint:
    """Open the checkpoint that a request names.

    Raises:
        NotFoundError, NotACheckpointError, UnsupportedError, AmbiguousError: the URI does not name one checkpoint.
        DamagedError: metadata is missing or inconsistent. A checkpoint with missing chunks can be opened; `absent`
            of the reader and `verify` report them.
        HostileError: the checkpoint tries to reach outside its folder or to run code.
    """
    from wherry.formats.detect import resolve_source  # detect opens checkpoints too
    from wherry.formats.registry import find_format

    location, detection = resolve_source(source)
    store = location.store
    files = PinnedStore(store.root) if isinstance(store, LocalStore) else None
    if isinstance(store, ObjectView):
        files = store
    place = replace(location, store=files or store)
    stored = location if isinstance(store, LocalStore) else None
    return Checkpoint(
        find_format(detection.format).open(place, detection), files, source.allow_opaque, stored
    )


def open_again(checkpoint: Checkpoint) -> Checkpoint:
    """Open the files that a stored checkpoint has now; of a local one in the folder that was opened.

    Raises:
        WherryError: they no longer form the checkpoint.
    """
    from wherry.formats.registry import find_format

    found, place, opaque = checkpoint.detection, checkpoint.location, checkpoint.original.opaque
    if isinstance(place.store, LocalStore):
        return Checkpoint(find_format(found.format).open(place, found), None, opaque, place)
    return open_source(SourceRequest(checkpoint.uri, found.format, allow_opaque=opaque))


def fingerprint(members: Iterable[Entry], location: Location, *, marks: bool = True) -> str:
    """Hex fingerprint of a checkpoint's files.

    Args:
        members: its files, as its reader lists them.
        location: its location. A single file counts under the name `.`, so that a fingerprint taken in the
            staging area is still valid after the commit.
        marks: whether change marks count; not for a target on an object store, which assigns them on upload.
    """
    rows = [
        ["." if entry.name == location.name else entry.name, entry.size, entry.mark if marks else ""]
        for entry in members
        if entry.name not in OWN_NAMES
    ]
    return sha256_of("fingerprint", sorted(rows))


def present_fingerprint(checkpoint: Checkpoint, *, marks: bool = True) -> str:
    """Fingerprint of the current state of an opened checkpoint."""
    return fingerprint(checkpoint.reader.members(), checkpoint.location, marks=marks)


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
    """The state of the objects whose bytes were read, taken after all of them were read.

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
        if own:
            listed = {one.name: one for one in place.entries()}
        else:
            found = ((name, place.join(name).stat()) for name in wanted)
            listed = {name: entry for name, entry in found if entry is not None}
        members |= {prefix + name: listed[name] for name in wanted if name in listed}
        around |= {prefix + name for name in listed if own and not (name in OWN_NAMES or is_staging(name))}
    return {"members": members, "around": frozenset(around)}


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
