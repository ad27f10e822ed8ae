"""Staging for what cannot be written straight into a store of objects: a local folder, which the commit uploads.

Every format of wherry streams into a store that takes parts, and so does a copy. A format of a plug-in that does not
stream is made whole in a temporary folder. The commit sends its files in parts, reads each object back and compares it
with its file, and makes the commit member appear last, under the same lease as any other target in a store.

A store of which only the file system of fsspec is known takes no parts and replaces nothing in a known state. There is
no lease then, and each file is put whole; the commit member is last and create-only.

The Hub takes files by their SHA-256, so each must be whole before it is sent. Neither a lease nor a journal is there:
of two runs, the slower one is refused by the Hub, because the head of the branch is another one; and a run that follows
a killed one makes its files again, but does not send again what the Hub has.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from wherry.errors import MismatchError, TargetExistsError, storage_errors
from wherry.objects.hub_commit import HubCommit
from wherry.objects.stores import object_store
from wherry.staging.hub_repository import CARD, card, inside, require_path
from wherry.staging.janitor import forget, note
from wherry.staging.object_staging import ObjectStaging
from wherry.staging.staging import Staging
from wherry.storage.folders import remove_leftover
from wherry.storage.fsspec_store import FsspecStore
from wherry.storage.location import Location
from wherry.storage.open_file import opened_regular
from wherry.storage.ranges import read_ranges
from wherry.storage.sidecar import read_sidecar, sidecar_name
from wherry.storage.stores import local_location
from wherry.upload.uploaded_file import PART_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from wherry.errors import WherryError


class CopiedStaging:
    """A staging area on a local disk for a target in a store of objects; see Staging.

    Attributes:
        target: where the checkpoint will appear.
        location: where it is written until then.
        journal: the file that records which parts of it are done; no later run finds it.
        spill: a folder for temporary files of decoded bytes.
        folder: a temporary folder around all of them.
    """

    def __init__(self, target: Location, members: tuple[str, ...]) -> None:
        """Choose the names.

        Args:
            target: what will be committed.
            members: names of commit members, relative to the target.
        """
        self.target = target
        self.folder = Path(tempfile.gettempdir()) / f"wherry-upload-{secrets.token_hex(8)}"
        self._local = Staging(local_location(str(self.folder / target.name)), "0" * 8, resume=False)
        self.location, self.journal, self.spill = (
            self._local.location,
            self._local.journal,
            self._local.spill,
        )
        identity = os.urandom(4).hex()  # what is uploaded is never continued: the next run stages other bytes
        takes_parts = object_store(target.store) is not None
        self._members = members
        self._remote = ObjectStaging(target, identity, {}, members, 0, resume=False) if takes_parts else None

    def __enter__(self) -> Self:
        note(self.folder)
        try:
            self.folder.mkdir(mode=0o700)
            if self._remote is not None:
                self._remote.__enter__()
            try:
                self._local.__enter__()
            except BaseException as error:
                if self._remote is not None:
                    self._remote.__exit__(type(error), error, None)
                raise
        except BaseException:
            remove_leftover(self.folder)
            forget(self.folder)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._local.__exit__(kind, error, trace)
        finally:
            remove_leftover(self.folder)
            forget(self.folder)
            if self._remote is not None:
                self._remote.__exit__(kind, error, trace)

    @property
    def discarded(self) -> str | None:
        """Why what an earlier run left was not resumed."""
        return None if self._remote is None else self._remote.discarded

    def require_held(self) -> None:
        """See Staging."""
        if self._remote is not None:
            self._remote.require_held()

    def failed(self, error: WherryError) -> WherryError:
        """See Staging."""
        return error if self._remote is None else self._remote.failed(error)

    def clear(self) -> None:
        """See Staging."""
        self._local.clear()

    def sync_names(self) -> None:
        """See Staging."""

    def commit(self, beside: bytes | None = None) -> None:
        """Upload the staged files, compare them, and make the target appear; see Staging.

        Args:
            beside: contents of the sidecar of a single file.

        Raises:
            MismatchError: the store has other bytes.
            TargetExistsError, TargetInUseError, StorageError: see Staging.
        """
        if self._remote is None:
            self._put(beside)
            return
        run = self._remote.run
        files = dict(self._files())
        for path, file in files.items():
            uploaded = run.file(path, file.stat().st_size)
            for offset, data in _pieces(file):
                uploaded.write(offset, memoryview(data))
            uploaded.complete()
        run.finish()
        for path, file in files.items():
            require_same(Location(self._remote.location.store, path), file)
        self._remote.commit(beside)

    def _put(self, beside: bytes | None) -> None:
        """Put each file whole, the commit member last."""
        target = self.target
        if target.exists():
            raise _appeared_error(target)
        if beside is not None:
            target.parent.join(sidecar_name(target.name)).put(beside)
        files = dict(self._files())
        names = [path[len(target.path) :].strip("/") for path in files]
        marker = next((name for name in self._members if name in names), "")
        with storage_errors(target.uri):
            for name, (path, file) in sorted(
                zip(names, files.items(), strict=True), key=lambda row: row[0] == marker
            ):
                try:
                    target.store.put(path, file.read_bytes(), create_only=name in ("", marker))
                except FileExistsError as error:
                    raise _appeared_error(target) from error

    def _files(self) -> Iterator[tuple[str, Path]]:
        """The path in the store of each staged file."""
        staged = Path(self.location.path)
        if staged.is_file():
            yield self.target.path, staged
            return
        for entry in self.location.walk():
            yield self.target.join(entry.name).path, staged / entry.name


class HubStaging(CopiedStaging):
    """The staging of one target in a repository of the Hub; see Staging."""

    def __init__(self, target: Location, identity: str) -> None:
        """Choose the names.

        Args:
            target: what will be committed.
            identity: eight hex digits of the conversion.

        Raises:
            UsageError: the target names no repository.
        """
        place = require_path(target)
        super().__init__(target, ())
        self._place, self._identity = place, identity

    def commit(self, beside: bytes | None = None) -> None:
        """Send the staged files, read them back, and let them appear in one commit; see Staging.

        Args:
            beside: contents of the sidecar of a single file.

        Raises:
            MismatchError: the Hub has other bytes.
            NotFoundError: the repository does not exist.
            TargetExistsError, StorageError: see Staging.
        """
        store = self.target.store
        assert isinstance(store, FsspecStore), "hf:// has no other"
        files = {inside(path): file for path, file in self._files()}
        if beside is not None:
            files[inside(self.target.parent.join(sidecar_name(self.target.name)).path)] = self._keep_file(
                beside
            )
        elif not self._place.path and not self.location.join(CARD).exists():
            self._add_card(files)
        with storage_errors(self.target.uri), HubCommit(store, self._place, files, self._identity) as commit:
            root = commit.stage()
            for name, file in files.items():
                require_same(Location(store, replace(root, path=name).text), file)
            commit.publish()

    def _add_card(self, files: dict[str, Path]) -> None:
        """Describe the checkpoint on the page of its repository, unless that has one."""
        if not self.target.join(CARD).exists():
            files[CARD] = self._keep_file(card(read_sidecar(self.location)).encode())

    def _keep_file(self, data: bytes) -> Path:
        """A file of the temporary folder with some bytes."""
        path = self.folder / f"wherry-{len(list(self.folder.iterdir()))}"
        path.write_bytes(data)
        return path


def open_staging(
    target: Location, identity: str, members: tuple[str, ...], *, resume: bool = True
) -> Staging | CopiedStaging:
    """The staging area of a target whose files are written on a local disk; use it in a `with` statement.

    Args:
        target: what will be committed.
        identity: eight hex digits of the conversion.
        members: names of commit members, relative to the target; one of them is put last into a store of objects.
        resume: whether to resume the area of an earlier run.

    Raises:
        UsageError: the target's storage is read-only.
    """
    capabilities = target.store.capabilities
    if capabilities.one_commit:
        return HubStaging(target, identity)
    if capabilities.local or not capabilities.create_only_put:
        return Staging(target, identity, resume=resume)
    return CopiedStaging(target, members)


def require_same(place: Location, file: Path) -> None:
    """Read an object back and compare it with a file.

    Raises:
        MismatchError: they differ.
        NotFoundError, StorageError: it cannot be read.
    """
    with opened_regular(str(file)) as descriptor:
        for part in read_ranges(place, [(0, file.stat().st_size)]):
            if memoryview(os.pread(descriptor, len(part.data), part.offset)) != part.data:
                raise MismatchError(
                    "read-back differs from what was written",
                    uri=place.uri,
                    cure="check the storage; nothing was committed",
                )


def _appeared_error(target: Location) -> TargetExistsError:
    return TargetExistsError(
        "target already exists; it was created during the conversion",
        uri=target.uri,
        cure="choose another target",
    )


def _pieces(file: Path) -> Iterator[tuple[int, bytes]]:
    with opened_regular(str(file)) as descriptor:
        offset = 0
        while data := os.pread(descriptor, PART_BYTES, offset):
            yield offset, data
            offset += len(data)
