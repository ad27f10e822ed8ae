"""Records: small signed files in the folder of a job, next to its target: on a file system, or in a store of objects.

A record is created on the condition that it does not exist, so of two processes one gets it. Each is signed with the
user's key (`WHERRY_KEY`, which several machines can share): what another user has put there is not believed.
"""

from __future__ import annotations

import io
import secrets
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from wherry.errors import HostileError, NotFoundError, UnsupportedError, storage_errors
from wherry.runtime import threads
from wherry.storage.folders import DRAFT, PREFIX, remove_leftover, rename_without_replacing, sync_folder
from wherry.storage.location import MOST_CONFIG, Location
from wherry.storage.stores import LocalStore
from wherry.target.key import KEY_ENV, journal_key
from wherry.target.leftovers import JOB, JOB_SUFFIX
from wherry.target.signed_log import checked_lines, sign
from wherry.workers.record import decode, encode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wherry.store.store import Store


_MOST_RECORD = 4 * MOST_CONFIG
_AT_ONCE = 16  # requests
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Records:
    """The records of one job.

    Attributes:
        folder: of the job.
        store: its store; None on a file system.
    """

    folder: Location
    store: Store | None

    def begin(self) -> None:
        """Make the folder, accessible to its user alone.

        Raises:
            StorageError: the storage failed.
        """
        if self.store is None:
            with storage_errors(self.folder.uri):
                Path(self.folder.path).mkdir(mode=0o700, parents=True, exist_ok=True)
                sync_folder(Path(self.folder.path).parent)

    def create(self, name: str, record: object, run: str) -> bool:
        """Create a record; False if it exists.

        Args:
            name: of the record.
            record: a dataclass of `wherry.workers.record`.
            run: id of the process that creates it.

        Raises:
            StorageError: the storage failed.
        """
        data = sign(encode(record), journal_key())
        if self.store is None:
            with storage_errors(self.folder.uri):
                return self._put(name, data)
        try:
            self.store.put_object(self.folder.join(name).path, data, run)
        except FileExistsError:
            return False
        return True

    def replace(self, name: str, record: object, run: str) -> bool:
        """Write a record anew; False if it no longer exists.

        Raises:
            StorageError: the storage failed.
        """
        place, data = self.folder.join(name), sign(encode(record), journal_key())
        if self.store is None:
            with storage_errors(place.uri):
                return self._renew(Path(place.path), data)
        found = self.store.head(place.path)
        if found is None:
            return False
        try:
            self.store.put_object(place.path, data, run, replaces=found.mark)
        except FileExistsError:
            return False
        return True

    def read(self, name: str, form: type[R]) -> R | None:
        """A record; None if it does not exist.

        Args:
            name: of the record.
            form: a dataclass of `wherry.workers.record`.

        Raises:
            HostileError: it was altered, or signed with another key.
            CorruptError: it has another form.
            StorageError: the storage failed.
        """
        try:
            data = self.folder.join(name).read_whole(_MOST_RECORD)
        except NotFoundError:
            return None
        lines, altered = checked_lines(io.BytesIO(data), journal_key())
        if altered or len(lines) != 1:
            raise HostileError(
                f"the record {name} was altered, or signed with another key",
                uri=self.folder.uri,
                cure=f"set the same {KEY_ENV} for every process of the job, or remove the record",
            )
        return decode(form, lines[0].text, name, self.folder.uri)

    def read_all(self, names: Sequence[str], form: type[R]) -> list[R]:
        """Those of some records that exist, several read at the same time; see `read`."""
        with threads.executor(_AT_ONCE, "wherry-records", numbers=False) as pool:
            return [found for found in pool.map(partial(self.read, form=form), names) if found]

    def names(self) -> list[str]:
        """The names of all records, sorted.

        Raises:
            StorageError: the storage failed.
        """
        return sorted(entry.name for entry in self.folder.entries() if not entry.is_dir)

    def remove(self, name: str) -> None:
        """Remove a record; nothing happens if it does not exist.

        Raises:
            StorageError: the storage failed.
        """
        place = self.folder.join(name)
        if self.store is None:
            with storage_errors(place.uri):
                Path(place.path).unlink(missing_ok=True)
        elif found := self.store.head(place.path):
            self.store.remove_object(place.path, found.mark)

    def end(self) -> None:
        """Remove the folder with everything in it, the record that names the job first.

        Raises:
            StorageError: the storage failed.
        """
        self.remove(JOB)
        if self.store is None:
            with storage_errors(self.folder.uri):
                remove_leftover(Path(self.folder.path))
            return
        for name in self.names():
            self.remove(name)

    def _put(self, name: str, data: bytes) -> bool:
        """Create a file with all of its contents; False if it exists."""
        folder = Path(self.folder.path)
        draft = _draft(folder, name, data)
        try:
            rename_without_replacing(draft, folder / name)
        except FileExistsError:
            return False
        finally:
            draft.unlink(missing_ok=True)
        sync_folder(folder)
        return True

    def _renew(self, path: Path, data: bytes) -> bool:
        draft = _draft(path.parent, path.name, data)
        if not path.exists():
            draft.unlink()
            return False
        draft.replace(path)
        return True


def job_records(target: Location) -> Records:
    """The records of the job that makes a target; nothing is read.

    Raises:
        UnsupportedError: the store of the target creates no objects under a condition.
    """
    store = target.store if target.store.capabilities.parts else None
    if store is None and not target.store.capabilities.local:
        raise UnsupportedError(
            f"{target.store.protocol}:// cannot hold the records of a job",
            uri=target.uri,
            cure="choose a target on a file system that all workers share, gs:// or s3://",
        )
    return Records(target.parent.join(f"{PREFIX}{target.name}{JOB_SUFFIX}"), store)


def target_of(place: Location) -> Location:
    """The target of a job, from the location of its folder or of the target itself."""
    named = place.name.startswith(PREFIX) and place.name.endswith(JOB_SUFFIX)
    return place.parent.join(place.name[len(PREFIX) : -len(JOB_SUFFIX)]) if named else place


def _draft(folder: Path, name: str, data: bytes) -> Path:
    path = folder / f"{PREFIX}{name}.{secrets.token_hex(4)}{DRAFT}"
    LocalStore().put(str(path), data, create_only=True)
    return path
