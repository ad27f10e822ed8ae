"""Staging and commit: a target appears complete, under its final name, in one step, or not at all.

A conversion holds the lease of its target while it writes into a place that no reader takes for a checkpoint. The rule
is the same wherever the target is; what differs is the sink, which has a class of its own:

- `FileStaging`, a file system: an area next to the target, and a rename that replaces nothing (`file_staging`).
- `ObjectStaging`, a store that takes parts: objects, and a create-only put of the commit members (`object_staging`).
- `CopiedStaging`, a store of whole files: a local area, whose files are copied at the commit; and `HubStaging`, where
  they become one commit of a repository (`copied_staging`).

If anything fails before the commit, nothing is left at the destination. A process that is killed, interrupted or
cancelled leaves what it has written, which `detect` calls unfinished; the same conversion resumes it, another one to
the same target discards it, and `wherry clean` removes it. If a run was stopped for so long that another run took over
its target, it ends with TargetInUseError, and does not touch what the other run writes. After the commit the target is
there, and what fails then is only a warning.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeAlias

from wherry.core.progress import OnProgress, logger
from wherry.errors import StorageError, TargetExistsError, TargetInUseError, WherryError, storage_errors

if TYPE_CHECKING:
    from wherry.storage.location import Location
    from wherry.store.store import Entry
    from wherry.target.journal import Journal
    from wherry.target.lease import Lease

# The source, its place at the location of a staging, and the source's entry.
CopiedFile: TypeAlias = "tuple[Location, Location, Entry]"
# Failures of a store that its user mends, and then goes on.
_MENDED_OUTSIDE = ("expired", "no-credentials", "refused", "forbidden", "quota", "clock")
_log = logger(__name__)


class Staging(ABC):
    """What one conversion writes of its target until the commit; use it in a `with` statement.

    Leaving the block without a commit removes it, unless the run can be resumed: it was stopped from outside (Ctrl-C, a
    cancelled flow run, an exit), or the storage failed with an error that a retry, or its user, can fix.

    Attributes:
        target: where the checkpoint will appear.
        location: where it is written until then.
        spill: a local folder for temporary files of decoded bytes; never kept for a later run.
        discarded: why what an earlier run left was not resumed; None if there was none.
    """

    location: Location
    spill: Path

    def __init__(self, target: Location, lease: Lease, area: str, *, resume: bool) -> None:
        """Choose the target.

        Args:
            target: what will be committed.
            lease: of the target.
            area: path or URI of what is written until then, for warnings.
            resume: whether a later run of the conversion can go on where this one ends.
        """
        self.target = target
        self.discarded: str | None = None
        self._lease, self._area_uri, self._resume = lease, area, resume
        self._error: BaseException | None = None
        self._committed = False

    def __enter__(self) -> Self:
        with storage_errors(self.target.uri):
            self._begin()
            try:
                self._open()
            except BaseException as error:
                self._leave(error, self._undo_open, own=True)
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        if self._committed:
            self._leave(error, self._remove_rest)
        elif self._is_resumable(self._error or error):
            self._leave(error, self._keep)
        else:
            self._leave(error, self._remove)

    @abstractmethod
    def journal(self) -> Journal:
        """The journal of the conversion, begun or continued; it is closed with the block.

        Raises:
            StorageError: the storage failed.
        """

    def require_held(self) -> None:
        """Check that this run may still write.

        Raises:
            TargetInUseError: another run has taken over the target.
            StorageError: the storage failed.
        """
        self._lease.require_held()

    def failed(self, error: WherryError) -> WherryError:
        """Declare that the target will not be committed, while others share the `with` block.

        Returns:
            The error that the run ends with; a different one if the target was taken over.
        """
        self._error = self._lease.lost() if self._is_lost() else error
        return self._error

    def sync_names(self) -> None:  # noqa: B027  objects have their names with their bytes
        """Make the names of what is written as durable as the journal, where it has names.

        Raises:
            StorageError: the storage failed.
        """

    @abstractmethod
    def copy_files(self, files: Sequence[CopiedFile], memory: int, progress: OnProgress | None) -> int:
        """Copy files as they are, and resume what an earlier run began.

        Args:
            files: source, place at `location`, and the source's entry, each.
            memory: budget in bytes.
            progress: called a few times a second.

        Returns:
            Number of bytes that were already there.

        Raises:
            IncompleteError: a source file was truncated during the copy.
            MismatchError: an object was replaced during the copy.
            UnsupportedError: the file system does not tell two of the files apart.
            TargetExistsError: an object was created at the target meanwhile.
            StorageError: the storage failed.
        """

    def prove_small(self) -> None:  # noqa: B027  a disk is read back as a whole
        """Read back what is not read as tensors, where it does not lie on a disk.

        Raises:
            MismatchError: it differs from what was written.
            StorageError: the storage failed.
        """

    def commit(self, sidecar: bytes | None = None) -> None:
        """Make the target appear.

        Args:
            sidecar: contents of the sidecar of a single file, which is written next to it just before.

        Raises:
            TargetExistsError: the target exists; it was not touched.
            TargetInUseError: another run has taken over the target.
            MismatchError: the store has other bytes than were sent; only where files are copied.
            StorageError: the storage failed.
        """
        try:
            with storage_errors(self.target.uri):
                self._commit(sidecar)
        except (StorageError, TargetExistsError) as error:
            if self._committed:
                _log.warning("%s is committed, but a loss of power may undo it: %s", self.target.uri, error)
            elif self._is_lost():
                raise self._lease.lost() from error
            else:
                raise

    def _begin(self) -> None:
        """Take the lease."""
        self._lease.__enter__()

    @abstractmethod
    def _open(self) -> None:
        """Resume what an earlier run of this conversion has left, and discard what others have; the lease is held."""

    def _undo_open(self) -> None:  # noqa: B027  objects are for the next run
        """Undo an opening that has failed."""

    def _stop(self) -> None:  # noqa: B027  see FileStaging and ObjectStaging
        """Stop what is still at work; the block has ended."""

    @abstractmethod
    def _commit(self, sidecar: bytes | None) -> None:
        """Make the target appear, and set `_committed`."""

    def _has_progress(self) -> bool:
        """Whether there is anything that a later run can go on with."""
        return True

    @abstractmethod
    def _keep(self) -> None:
        """Leave what was written for a later run."""

    @abstractmethod
    def _remove(self) -> None:
        """Remove what this run, and those that it continued, have written."""

    def _remove_rest(self) -> None:
        """Remove what is left of a run that has committed its target."""
        self._remove()

    def _forget(self) -> None:  # noqa: B027  objects have no folders
        """Remove what the run had made around the target; nothing else is left of it."""

    def _leave(self, error: BaseException | None, act: Callable[[], None], *, own: bool = False) -> None:
        """Do what is to become of what was written, unless it belongs to another run, and release the lease.

        Args:
            error: what has ended the run, if anything has.
            act: does it.
            own: whether it touches only what has the name of this owner, which no other run uses.
        """
        lost = not self._committed and self._is_lost()
        try:
            if own or not lost:
                act()
        except (
            WherryError,
            OSError,
        ) as failure:  # what ended the run counts, and a target that was committed
            _log.warning(
                "the staging area %s was not removed; `wherry clean` finds it: %s", self._area_uri, failure
            )
        finally:
            self._lease.__exit__(type(error) if error else None, error, None)
        if lost:
            if isinstance(error, Exception) and not isinstance(error, TargetInUseError):
                raise self._lease.lost() from error
        elif not self._committed:
            self._forget()

    def _is_resumable(self, cause: BaseException | None) -> bool:
        """Whether the same conversion can go on after what has ended this run; None if nothing has."""
        if cause is None or not self._resume or not self._has_progress():
            return False
        if isinstance(cause, StorageError) and cause.kind in _MENDED_OUTSIDE:
            return True
        # Else only a stop from outside: KeyboardInterrupt, SystemExit, Prefect's TerminationSignal.
        return not isinstance(cause, Exception) or (isinstance(cause, WherryError) and cause.retryable)

    def _is_lost(self) -> bool:
        try:
            return not self._lease.holds()
        except StorageError:
            return False  # a storage error does not mean that another run took over
