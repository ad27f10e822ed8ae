"""The narrow interface through which the state machine test sees a target, and its adapters over today's staging.

`Target` is what `wherry/target/` will have: a lease, a log, a sink and a commit. Its adapters open the staging and its
journal, as `wherry.converter.job` does, and write what the mover would.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from tests.support.simulation import threads
from wherry.core.tensorspec import Span
from wherry.errors import MismatchError, storage_errors
from wherry.store.local_store import LocalStore, make_folder
from wherry.store.location import Location
from wherry.target import clean as clean_module
from wherry.target.files import UploadedFiles
from wherry.target.journal import DurableMove, Journal
from wherry.target.sinks import is_unfinished, open_staging
from wherry.target.staged_objects import run_of
from wherry.target.upload_run import UploadRun

NAME = "out"
MARKER, SIDECAR = "COMMIT", "wherry.json"
_LEAF = {0: bytes(32)}


@dataclass(frozen=True)
class Piece:
    """Bytes that are recorded together.

    Attributes:
        file: name of the file in the target; empty if the target is the file.
        offset: where they begin.
        data: the bytes.
    """

    file: str
    offset: int
    data: bytes

    @property
    def stop(self):
        return self.offset + len(self.data)


@dataclass(frozen=True)
class Conversion:
    """What a process wants to write.

    Attributes:
        name: of the conversion.
        identity: eight hex digits, the same for every run of it; of two conversions they can be the same by accident.
        pieces: all bytes.
        single: whether the target is one file.
        unread: whether the commit trusts the checksums of the store.
    """

    name: str
    identity: str
    pieces: tuple[Piece, ...]
    single: bool = False
    unread: bool = False

    @property
    def header(self):
        """What identifies it in a journal."""
        return {"plan": self.name, "target": NAME, "digest": "none"}

    @cached_property
    def files(self):
        """Name of each file of tensors → its bytes."""
        found = {}
        for piece in self.pieces:
            found[piece.file] = found.get(piece.file, b"") + piece.data
        return found

    def small_files(self, run):
        """The files that are written by each run anew: they name the run, as those with a time do."""
        return {} if self.single else {MARKER: b"done", SIDECAR: self.sidecar(run)}

    def sidecar(self, run):
        return json.dumps({"conversion": self.name, "run": run}).encode()


def conversion(name, identity, sizes, *, single=False, unread=False):
    """A conversion whose bytes nobody else writes.

    Args:
        name, identity, single, unread: see Conversion.
        sizes: file → size of each of its pieces; of one file only, if the target is one.
    """
    pieces = []
    for file, lengths in sizes.items():
        offset = 0
        for length in lengths:
            text = f"{name}{file}{offset}." * length
            pieces.append(Piece("" if single else file, offset, text[:length].encode()))
            offset += length
    return Conversion(name, identity, tuple(pieces), single, unread)


class Target(Protocol):
    """One writer's view of a target."""

    def open(self) -> frozenset[int]:
        """Take the lease, and resume; the numbers of the pieces that the log calls durable."""
        ...

    def write(self, number: int) -> None:
        """Write a piece."""
        ...

    def sync(self) -> None:
        """Make what was written durable."""
        ...

    def log(self, numbers: Iterable[int]) -> None:
        """Record pieces that are durable."""
        ...

    def finish(self) -> None:
        """Write what is known only at the end, and read back what was written."""
        ...

    def commit(self) -> None:
        """Make the target appear, whole, and never over another one."""
        ...

    def leave(self, error: BaseException | None) -> None:
        """Release the lease; keep for a later run what it can resume, else remove everything."""
        ...


def write_target(target, conversion, group=2, reading=0.0):
    """The program of a writer: everything that is not durable yet is written, in groups; then the commit.

    Args:
        target: the target, not opened.
        conversion: what is written.
        group: number of pieces that are recorded together.
        reading: seconds that it takes to read a piece from the source.
    """
    done = target.open()
    try:
        rest = [number for number in range(len(conversion.pieces)) if number not in done]
        for start in range(0, len(rest), group):
            for number in rest[start : start + group]:
                time.sleep(reading)
                target.write(number)
            target.sync()
            target.log(rest[start : start + group])
        target.finish()
        target.commit()
    except BaseException as error:
        target.leave(error)
        raise
    target.leave(None)


def staging_of(place, conversion):
    """The staging of a target, as `wherry.converter.job` opens it."""
    members = () if conversion.single else (MARKER,)
    nbytes = sum(map(len, conversion.files.values()))
    return open_staging(
        place, conversion.identity, conversion.header, members, nbytes,
        is_file=conversion.single, by_checksum=conversion.unread,
    )  # fmt: skip


class FilesTarget:
    """A target of the file system, over its staging and journal."""

    def __init__(self, place, conversion, run):
        self.place, self.conversion, self.run = place, conversion, run
        self._stack, self._descriptors, self._dirty = ExitStack(), {}, set()

    @property
    def area(self):
        """The path of the staging area."""
        return self.staging.location.path.rpartition("/")[0]

    def open(self):
        conversion = self.conversion
        self.staging = self._stack.enter_context(staging_of(self.place, conversion))
        try:
            self.journal = self.staging.journal()
            with storage_errors(self.place.uri):
                self._open_files()
            self.staging.sync_names()
        except BaseException as error:
            self.leave(error)
            raise
        return frozenset(
            number
            for number, piece in enumerate(conversion.pieces)
            if self.journal.has(_source(number), _span(piece))
        )

    def _open_files(self):
        staged = self.staging.location
        if not self.conversion.single:
            make_folder(staged)
        for name, data in self.conversion.files.items():
            path = staged.join(name).path if name else staged.path
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            self._descriptors[name] = descriptor
            self._stack.callback(os.close, descriptor)
            if os.fstat(descriptor).st_size != len(data):
                os.ftruncate(descriptor, len(data))

    def write(self, number):
        piece = self.conversion.pieces[number]
        with storage_errors(self.place.uri):
            os.pwrite(self._descriptors[piece.file], piece.data, piece.offset)
        self._dirty.add(piece.file)

    def sync(self):
        with storage_errors(self.place.uri):
            for name in sorted(self._dirty):
                os.fdatasync(self._descriptors[name])
        self._dirty.clear()

    def log(self, numbers):
        self.journal.record([move_of(number, self.conversion.pieces[number]) for number in numbers])

    def finish(self):
        self.sync()
        for name, data in self.conversion.small_files(self.run).items():
            self.staging.location.join(name).put(data)
        with storage_errors(self.place.uri):
            for name, data in self.conversion.files.items():
                if os.pread(self._descriptors[name], len(data) + 1, 0) != data:
                    raise MismatchError("read-back differs from what was written", uri=self.place.uri)

    def commit(self):
        self.staging.commit(self.conversion.sidecar(self.run) if self.conversion.single else None)

    def leave(self, error):
        self._stack.__exit__(type(error) if error else None, error, None)


class ObjectsTarget:
    """A target of a store of objects, over its staging and journal."""

    def __init__(self, place, conversion, run):
        self.place, self.conversion, self.run = place, conversion, run
        self._stack, self._waiting = ExitStack(), []

    @property
    def area(self):
        """The path of the folder of staging objects."""
        return f"{self.place.parent.path}/.wherry-{NAME}.{self.conversion.identity}"

    def open(self):
        conversion = self.conversion
        staging = self.staging = self._stack.enter_context(staging_of(self.place, conversion))
        try:
            self.journal = staging.journal()
            folder = self.place.parent if conversion.single else self.place
            sizes = {name or NAME: len(data) for name, data in conversion.files.items()}
            self._files = UploadedFiles(Location(staging.location.store, folder.path), sizes)
        except BaseException as error:
            self.leave(error)
            raise
        return frozenset(
            number
            for number, piece in enumerate(conversion.pieces)
            if self.journal.has(_source(number), _span(piece))
        )

    def _path(self, piece):
        return self.place.join(piece.file).path if piece.file else self.place.path

    def write(self, number):
        piece = self.conversion.pieces[number]
        self._files.write(piece.file or NAME, piece.offset, piece.data)

    def sync(self):
        self._files.sync()

    def log(self, numbers):
        """Only what the store has whole is recorded; the rest waits for later parts, as in the mover."""
        self._waiting += numbers
        pieces = self.conversion.pieces
        sent = [
            number
            for number in self._waiting
            if self._files.has_bytes(self._path(pieces[number]), pieces[number].offset, pieces[number].stop)
        ]
        self._waiting = [number for number in self._waiting if number not in sent]
        self.journal.record([move_of(number, pieces[number]) for number in sent])

    def finish(self):
        staged, run = self.staging.location, run_of(self.staging.location)
        for name, data in self.conversion.small_files(self.run).items():
            staged.join(name).put(data)
        run.finish()
        if self.conversion.unread:
            run.compare_checksums()
            if run.direct:
                return
        self.staging.prove_small()
        for name, data in self.conversion.files.items():
            place = staged.join(name) if name else staged
            if place.read(0, len(data) + 1) != data:
                raise MismatchError("read-back differs from what was written", uri=self.place.uri)

    def commit(self):
        self.staging.commit(self.conversion.sidecar(self.run) if self.conversion.single else None)

    def leave(self, error):
        self._stack.__exit__(type(error) if error else None, error, None)


def open_target(place, conversion, run):
    """The target at a place, for one process."""
    kind = FilesTarget if isinstance(place.store, LocalStore) else ObjectsTarget
    return kind(place, conversion, run)


def is_made(place, conversion):
    """Whether a conversion finds the target there, as `wherry.converter.convert.existing` does."""
    return not is_unfinished(place, () if conversion.single else (MARKER,)) and place.exists()


def clean(place):
    """`wherry clean` of the folder around the target, as users call it: nothing depends on the age of anything."""
    return clean_module._clean_below(place.parent, dry_run=False, min_age=clean_module._QUIET_SECONDS)


def with_simulated_locks(patches):
    """Give records whose locks are made by their fields locks of the simulation.

    Args:
        patches: an ExitStack of patches.
    """
    from unittest.mock import patch

    def locked(owner, method, fields):
        real = getattr(owner, method)

        def call(self, *arguments, **how):
            for name in fields:
                setattr(self, name, threads.Lock())
            return real(self, *arguments, **how)

        patches.enter_context(patch.object(owner, method, call))

    locked(Journal, "__post_init__", ("_lock", "_writing"))
    locked(UploadRun, "__post_init__", ("_lock", "_relieving"))


def _source(number):
    return (f"t{number}",)


def _span(piece):
    return Span(0, len(piece.data))


def move_of(number, piece):
    """A piece as a journal records it."""
    return DurableMove(_source(number), _span(piece), _LEAF)
