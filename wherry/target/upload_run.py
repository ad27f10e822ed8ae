"""UploadRun: all objects that one run makes of a target, from the first byte to the commit.

Objects get their final names when they are complete, create-only, and carry the id of the run; readers do not take them
for a checkpoint before its commit member is there. A commit member and the sidecar, which says that a checkpoint is
proved, are held back: they are uploaded under staging names, and copied by the store when everything else is proved. A
target of one file whose proof are the checksums of its parts is not read back: its parts are sent under its final name,
and the commit makes them the object.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

from wherry.core.lazy_dataclass import dataclass
from wherry.cures import Argument, Cure
from wherry.errors import MismatchError, StorageError
from wherry.store.content import CRC32C
from wherry.store.folders import is_staging
from wherry.store.location import Location
from wherry.store.object_view import objects_below
from wherry.store.ranges import read_ranges
from wherry.store.sidecar import FOLDER_NAME
from wherry.store.store import StoredObject
from wherry.target.parts import OVERFLOW, StoredBytes
from wherry.target.uploaded_file import (
    PART_BYTES,
    GrowingFile,
    SentBefore,
    UploadContext,
    UploadedFile,
    agreeing,
    part_size,
    without_gaps,
)


@dataclass(slots=True)
class UploadRun:
    """The objects of one run; safe from several threads.

    Attributes:
        target: what is committed: a folder or a file of the store.
        area: path of the folder of staging objects.
        using: what the files share.
        members: names of commit members, relative to the target; the first that exists is put last.
        before: path → what earlier runs have sent.
        notes: what the writers of earlier runs have noted about bytes that were sent.
        direct: whether the target is one file, whose parts are sent under its final name.
    """

    target: Location
    area: str
    using: UploadContext
    members: tuple[str, ...] = ()
    before: Mapping[str, SentBefore] = field(default_factory=dict[str, SentBefore])
    notes: tuple[list[Any], ...] = ()
    direct: bool = False
    _noting: list[Callable[[], list[list[Any]]]] = field(
        default_factory=list["Callable[[], list[list[Any]]]"]
    )
    _files: dict[str, UploadedFile] = field(default_factory=dict[str, UploadedFile])
    # Objects of one request: what the store has, and the SHA-256 of what was put; empty for a copy.
    _small: dict[str, tuple[StoredObject, str]] = field(default_factory=dict[str, "tuple[StoredObject, str]"])
    _published: dict[str, StoredObject] = field(default_factory=dict[str, "StoredObject"])
    _names: dict[str, set[str]] = field(default_factory=dict[str, "set[str]"])
    _lock: threading.Lock = field(default_factory=threading.Lock)
    # Pieces of parts that are not complete.
    _aside: list[StoredBytes] = field(default_factory=list["StoredBytes"])
    _relieving: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.using.sender.relieve = self._relieve

    def file(self, path: str, size: int) -> UploadedFile:
        """The file at a path of the target, begun or continued.

        Args:
            path: in the store, under its final name.
            size: bytes of it.
        """
        with self._lock:
            known = self._files.get(path)
            if known is None:
                place = self.place(path)
                before = self.before.get(place)
                if before and before.found and before.found.nbytes != size:
                    self.using.store.remove_object(place, before.found.mark)
                    before = None
                waits = self.direct and not self._name(path)
                known = self._files[path] = UploadedFile(place, size, self.using, before, waits=waits)
                self._name_in_folders(path)
            return known

    def whole(self, path: str, data: Sequence[memoryview]) -> UploadedFile:
        """A file all of whose bytes are known, which is sent in the background; see `agreeing`.

        Args:
            path: in the store, under its final name.
            data: the bytes, in pieces.
        """
        place, nbytes = self.place(path), sum(map(len, data))
        with self._lock:
            before = None if path in self._files else self.before.get(place)
        if before is not None:
            kept = agreeing(before, data, part_size(nbytes, self.using.store.part_limits))
            if before.found is not None and kept.found is None:
                self.using.store.remove_object(place, before.found.mark)
            with self._lock:
                self._files.setdefault(path, UploadedFile(place, nbytes, self.using, kept))
                self._name_in_folders(path)
        file, at = self.file(path, nbytes), 0
        for piece in data:
            file.write(at, piece)
            at += len(piece)
        if not nbytes:
            file.complete()
        return file

    def growing(self, path: str, room: int) -> GrowingFile:
        """A new file at a path, to which bytes are appended.

        Args:
            path: in the store.
            room: bytes that it can have.
        """
        file = GrowingFile(path, room, self.using)
        with self._lock:
            self._files[path] = file
            self._name_in_folders(path)
        return file

    def grown(self, path: str) -> UploadedFile | None:
        """A growing file that earlier runs have begun, as far as it goes; None if nothing of it can be kept."""
        before = self.before[path]
        size, kept = without_gaps(before)
        if not size:
            if before.upload is not None:
                self.using.store.abort(before.upload)
            return None
        file = UploadedFile(path, size, self.using, kept)
        with self._lock:
            self._files[path] = file
            self._name_in_folders(path)
        return file

    def drop(self, path: str) -> None:
        """Remove a file that turned out to be useless; it is complete."""
        with self._lock:
            stored = self._files.pop(path).stored
        if stored is not None:
            self.using.store.remove_object(path, stored.mark)

    def file_at(self, path: str) -> UploadedFile:
        """The file at a path, which was begun."""
        return self._files[path]

    def complete_size(self, path: str) -> int | None:
        """Bytes of the object at a path, which never changes again; None if it is not complete or is put at once."""
        file = self._files.get(path)
        return file.size if file is not None and file.stored is not None else None

    def settle(self, path: str) -> None:
        """Wait until the object at a path is complete, if all its bytes were written."""
        file = self._files.get(path)
        if file is not None and file.stored is None:
            self.using.sender.drain()

    def put(self, path: str, data: bytes) -> None:
        """Write a whole file, in place of one that this or an earlier run has put there.

        Raises:
            TargetExistsError: an object of somebody else is there.
            StorageError: the storage failed.
        """
        if len(data) > PART_BYTES:
            self.whole(path, [memoryview(data)])
        else:
            place = self.place(path)
            mark = self._small[path][0].mark if path in self._small else _mark(self.before.get(place))
            self._small[path] = (self._put(place, data, mark), hashlib.sha256(data).hexdigest())
            with self._lock:
                self._name_in_folders(path)

    def copy(self, path: str, source: str, mark: str, *, kept: int = -1) -> int:
        """Make a file of an object of the same bucket; its bytes are not moved over the network.

        Args:
            path: in the store, under its final name.
            source: path of the object.
            mark: the state that it must have.
            kept: bytes of it, if the copy of an interrupted run may be kept.

        Returns:
            Bytes that an interrupted run has copied.

        Raises:
            MismatchError: the object was replaced or removed.
            TargetExistsError: an object of somebody else is at the path.
            StorageError: the storage failed.
        """
        place = self.place(path)
        before = self.before.get(place)
        found = before.found if before else None
        with self._lock:
            self._name_in_folders(path)
        if found is not None and found.nbytes == kept:
            self._small[path] = (found, "")
            return kept
        if found is not None:
            self.using.owned()
            self.using.store.remove_object(place, found.mark)
        self._small[path] = (self._copy(source, mark, place, path), "")
        return 0

    def place(self, path: str) -> str:
        """Where an object is until the commit."""
        return f"{self.area}/{self._name(path) or self.target.name}" if self._is_held_back(path) else path

    def note_with(self, new: Callable[[], list[list[Any]]]) -> None:
        """Let a writer record notes about sent bytes, for a later run.

        Args:
            new: returns the new notes as rows of JSON, each note once; the store already has the bytes that they
                describe.
        """
        self._noting.append(new)

    def new_notes(self) -> list[list[Any]]:
        """The new notes of all writers."""
        return [row for new in self._noting for row in new()]

    def names_in(self, folder: str) -> set[str]:
        """The names of the files and folders of this run that lie in a folder of the target."""
        with self._lock:
            return set(self._names.get(folder.rstrip("/"), ()))

    def paths(self) -> Iterator[str]:
        """The files of this run, by their final names."""
        yield from {**self._files, **self._small}

    def finish(self) -> None:
        """Send the remaining parts, and wait until every object is complete.

        Raises:
            WherryError: sending failed.
        """
        for file in list(self._files.values()):
            file.complete()
        self.using.sender.drain()
        odd = next(
            (file for file in self._files.values() if not (file.is_sent if file.waits else file.stored)), None
        )
        if odd is not None:
            raise StorageError(
                "the object was not completed", uri=self.using.uri(odd.path), cure="run the conversion again"
            )

    def prove_small(self) -> None:
        """Read the objects back that are not read as tensors, and compare them with what was put.

        Raises:
            MismatchError: they differ.
            StorageError: the storage failed.
        """
        for path, (found, digest) in self._small.items():
            if not digest:
                continue  # a copy; the caller reads its tensors
            seen = hashlib.sha256()
            place = Location(self.target.store, self.place(path))
            for part in read_ranges(place, [(0, found.nbytes)]):
                seen.update(part.data)
            if seen.hexdigest() != digest:
                raise MismatchError(
                    "read-back differs from what was written",
                    uri=self.using.uri(path),
                    cure="check the storage; nothing was committed",
                )

    def compare_checksums(self) -> str:
        """Compare what the store has computed of every object with the bytes that were sent; the algorithm.

        Raises:
            MismatchError: they differ, or the store has computed nothing.
        """
        for file in self._files.values():
            if not file.proved:
                raise MismatchError(
                    "the store has not confirmed the checksum of every part",
                    uri=self.using.uri(file.path),
                    cure=Cure("choose {}, which reads the target back", Argument("verify", "digest")),
                )
        return ", ".join(sorted({file.proved for file in self._files.values()})) or CRC32C

    def commit(self) -> None:
        """Give the sidecar and the commit members their final names, what marks the checkpoint as complete last.

        Raises:
            TargetExistsError: somebody else has created one of them.
            StorageError: the storage failed.
        """
        self.finish()
        self._require_own()
        last = ["", *self.members]  # backwards
        rank = {name: -number for number, name in enumerate(last)}
        held = filter(self._is_held_back, self.paths())
        for path in sorted(held, key=lambda path: rank.get(self._name(path), -len(last))):
            self._publish(path)
        for file in self._files.values():
            if file.waits and file.stored is None:
                self.using.owned()
                file.assemble()

    def abort(self, *, committed: bool = False) -> None:
        """Remove every object and every upload of this run and of those that it continues.

        Args:
            committed: whether one of those has committed the target meanwhile, so that its objects are the target's.

        Raises:
            StorageError: the storage failed.
        """
        self.drop_overflow()
        for file in self._files.values():
            file.abort()
        for before in self.before.values():
            if before.upload is not None:
                self.using.store.abort(before.upload)
        made = {file.path: file.stored for file in self._files.values()}
        made |= {path: before.found for path, before in self.before.items() if not made.get(path)}
        made |= {self.place(path): found for path, (found, _digest) in self._small.items()} | self._published
        for path, found in made.items():
            kept = committed and f"{path}/".startswith(f"{self.target.path}/")
            if found is not None and not kept:
                self.using.store.remove_object(path, found.mark)

    def drop_overflow(self) -> None:
        """Remove the objects with pieces of parts that this run does not complete.

        Raises:
            StorageError: the storage failed.
        """
        for one in self._aside:
            one.drop()

    def drop_staged(self) -> None:
        """Remove the staging objects of what the commit has copied."""
        for path in filter(self._is_held_back, self.paths()):
            self.using.store.remove_object(self.place(path), self._stored_object(path).mark)

    def _relieve(self) -> bool:
        """Put pieces of the fullest incomplete parts aside, until they are as many bytes as a part has.

        The pieces of a single part are left: it is complete before anything else can be.
        """
        with self._relieving:
            with self._lock:
                files = list(self._files.values())
            parts = [
                (nbytes, number, file) for file in files for nbytes, number in file.open_parts() if nbytes
            ]
            if len(parts) <= 1:
                return False
            # Workers of one job share the folder.
            path = f"{self.area}/{OVERFLOW}{self.using.run}-{len(self._aside):06d}"
            whole = StoredBytes(path, self.using.store, self.using.run)
            self._aside.append(whole)
            for _nbytes, number, file in sorted(parts, key=lambda row: -row[0]):
                file.move_out(number, whole)
                if whole.nbytes >= PART_BYTES:
                    break
            if whole.nbytes:
                self.using.sender.send(whole.nbytes, whole.put)
            return whole.nbytes > 0

    def _publish(self, path: str) -> None:
        before = self.before.get(path)  # of a run that was killed in its commit
        if before and before.found:
            self.using.owned()
            self.using.store.remove_object(path, before.found.mark)
        self._published[path] = self._copy(self.place(path), self._stored_object(path).mark, path, path)

    def _copy(self, source: str, mark: str, place: str, path: str) -> StoredObject:
        """Let the store copy an object to a place, where it is not visible yet or is the file at a path."""
        try:
            return self.using.store.copy_object(source, mark, place, self.using.run, self.using.owned)
        except FileExistsError as error:
            raise self.using.occupied(path) from error
        except FileNotFoundError as error:
            raise MismatchError(
                "the object was changed or removed during the conversion",
                uri=self.using.uri(source),
                cure="run the conversion again",
            ) from error

    def _stored_object(self, path: str) -> StoredObject:
        found = self._small[path][0] if path in self._small else self._files[path].stored
        assert found is not None, "`finish` has checked"
        return found

    def _require_own(self) -> None:
        """Refuse to commit a folder in which somebody else has put objects meanwhile, or which is committed.

        A run that was stopped in its commit may have gone on, after this run has taken the target over.
        """
        own = {path for path in self.paths() if path in self.before or not self._is_held_back(path)}
        for entry in objects_below(self.target):
            path = self.target.join(entry.name).path
            if path in own or is_inner(entry.name):
                continue
            if entry.name in self.members or not self.using.drop_stale(path):
                raise self.using.occupied(path)

    def _put(self, path: str, data: bytes, mark: str) -> StoredObject:
        self.using.owned()
        try:
            return self.using.store.put_object(path, data, self.using.run, replaces=mark)
        except FileExistsError as error:
            if not self.using.drop_stale(path):
                raise self.using.occupied(path) from error
            return self._put(path, data, "")

    def _name_in_folders(self, path: str) -> None:
        """Note a path in each folder above it; the caller has the lock."""
        folder, slash, name = path.rpartition("/")
        while slash and name not in self._names.setdefault(folder, set()):
            self._names[folder].add(name)
            folder, slash, name = folder.rpartition("/")

    def _name(self, path: str) -> str:
        return path[len(self.target.path) :].strip("/")

    def _is_held_back(self, path: str) -> bool:
        name = self._name(path)
        if not name:
            return not self.direct
        return name in self.members or name.rpartition("/")[2] == FOLDER_NAME


def is_inner(name: str) -> bool:
    """Whether a relative name is that of something of wherry itself, such as parts that the store keeps as objects."""
    return any(is_staging(part) for part in name.split("/"))


def _mark(before: SentBefore | None) -> str:
    return before.found.mark if before and before.found else ""
