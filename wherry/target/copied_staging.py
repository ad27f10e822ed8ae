"""Staging for stores that take whole files only: a local folder, which the commit uploads.

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
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from wherry.errors import MismatchError, TargetExistsError
from wherry.store.folders import remove_leftover
from wherry.store.hub import HubCommit
from wherry.store.local_store import local_location
from wherry.store.location import Location
from wherry.store.open_file import opened_regular
from wherry.store.ranges import read_ranges
from wherry.store.remote_store import FsspecStore
from wherry.store.sidecar import read_sidecar, sidecar_name
from wherry.target.hub_repository import CARD, card, inside, require_path
from wherry.target.janitor import forget, note
from wherry.target.journal import Header
from wherry.target.staging import FileStaging


class CopiedStaging(FileStaging):
    """A staging area on a local disk for a target in a store of whole files; see Staging.

    Attributes:
        folder: a temporary folder around the area; no later run finds it.
    """

    def __init__(self, target: Location, header: Header, members: tuple[str, ...]) -> None:
        """Choose the names.

        Args:
            target: what will be committed.
            header: what identifies the conversion, for the journal.
            members: names of commit members, relative to the target.
        """
        self.folder = Path(tempfile.gettempdir()) / f"wherry-upload-{secrets.token_hex(8)}"
        super().__init__(local_location(str(self.folder / target.name)), "0" * 8, header, resume=False)
        self.target, self._members = target, members

    def sync_names(self) -> None:
        """See Staging; no later run needs them."""

    def _begin(self) -> None:
        note(self.folder)
        try:
            self.folder.mkdir(mode=0o700)
            super()._begin()
        except BaseException:
            self._drop_folder()
            raise

    def _leave(self, error: BaseException | None, act: Callable[[], None], *, own: bool = False) -> None:
        try:
            super()._leave(error, act, own=own)
        finally:
            self._drop_folder()

    def _drop_folder(self) -> None:
        remove_leftover(self.folder)
        forget(self.folder)

    def _is_lost(self) -> bool:
        return False  # nobody else knows the folder

    def _commit(self, sidecar: bytes | None) -> None:
        """Put each file whole, the commit member last."""
        target = self.target
        if target.exists():
            raise _appeared_error(target)
        if sidecar is not None:
            target.parent.join(sidecar_name(target.name)).put(sidecar)
        files = dict(self._files())
        names = [path[len(target.path) :].strip("/") for path in files]
        marker = next((name for name in self._members if name in names), "")
        for name, (path, file) in sorted(
            zip(names, files.items(), strict=True), key=lambda row: row[0] == marker
        ):
            try:
                target.store.put(path, file.read_bytes(), create_only=name in ("", marker))
            except FileExistsError as error:
                raise _appeared_error(target) from error
        self._committed = True

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

    def __init__(self, target: Location, identity: str, header: Header) -> None:
        """Choose the names.

        Args:
            target: what will be committed.
            identity: eight hex digits of the conversion.
            header: what identifies the conversion, for the journal.

        Raises:
            UsageError: the target names no repository.
        """
        self._place, self._run = require_path(target), identity
        super().__init__(target, header, ())

    def _commit(self, sidecar: bytes | None) -> None:
        """Send the staged files, read them back, and let them appear in one commit.

        Raises:
            MismatchError: the Hub has other bytes.
            NotFoundError: the repository does not exist.
        """
        store = self.target.store
        assert isinstance(store, FsspecStore), "hf:// has no other"
        files = {inside(path): file for path, file in self._files()}
        if sidecar is not None:
            files[inside(self.target.parent.join(sidecar_name(self.target.name)).path)] = self._keep_file(
                sidecar
            )
        elif not (
            self._place.path or self.location.join(CARD).exists() or self.target.join(CARD).exists()
        ):  # its page describes the checkpoint, unless the repository has one
            files[CARD] = self._keep_file(card(read_sidecar(self.location)).encode())
        with HubCommit(store, self._place, files, self._run) as commit:
            root = commit.stage()
            for name, file in files.items():
                require_same(Location(store, replace(root, path=name).text), file)
            commit.publish()
            self._committed = True

    def _keep_file(self, data: bytes) -> Path:
        """A file of the temporary folder with some bytes."""
        path = self.folder / f"wherry-{len(list(self.folder.iterdir()))}"
        path.write_bytes(data)
        return path


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
