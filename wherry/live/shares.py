"""Shares: how the processes of one training run assemble one snapshot in a shared folder.

Each process writes its boxes into the folder, then `share-<rank>.json`, which states where every box is; rank 0 waits
for all of them, converts, and leaves `outcome.json` for the others. Nothing here is a collective operation, so it can
run in the background while training uses its communicators; only `Ticket` is broadcast while training waits. Every wait
is bounded: rank 0 waits `patience` seconds for a share, the others wait as long after the last heartbeat of rank 0,
which renews a lease in the folder. The end of a process of the same machine is noticed within seconds, by the owner's
files `here-<rank>.json`. Only rank 0 creates the folder; a process that does not find it gives up.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wherry.core.json_document import json_value
from wherry.core.keypath import KeyPath, parse, render
from wherry.core.lazy_dataclass import dataclass
from wherry.core.progress import logger
from wherry.errors import IncompleteError, MismatchError, StorageError, WherryError, storage_error
from wherry.live.snapshot import PlacedBox
from wherry.store.waits import waiting
from wherry.target.lease import MOST_BYTES, Verdict, Watch, owner_in, this_process, verdict_of_process

if TYPE_CHECKING:
    from wherry.core.tensorspec import TensorSpec

log = logger("wherry.export")
SCHEMA = 1
LEASE = "writer.lease"  # renewed by rank 0 while it works on the export
_OUTCOME = "outcome.json"
_PAUSE = 0.05
_LOOK = 1.0  # seconds between two checks that rank 0 is alive
_GOODBYE = 30.0  # seconds that rank 0 keeps the outcome for the others to read
_CURE = (
    "check the logs of the other processes; on several hosts, pass a folder that all of them share as spool="
)


@dataclass(frozen=True, slots=True)
class Ticket:
    """The message of rank 0 to the others before the snapshot is taken.

    Attributes:
        mark: unique identifier of this export.
        folder: the folder of the shares; None if one process has everything.
        stop: why nothing is done, if the plan was refused or the target already exists.
    """

    mark: str
    folder: str | None = None
    stop: str | None = None

    def to_text(self) -> str:
        """One line of JSON."""
        return json.dumps({"schema": SCHEMA, **asdict(self)})


def ticket_from(text: str) -> Ticket:
    """The inverse of `Ticket.to_text`."""
    data = json_value(text)
    return Ticket(data["mark"], data["folder"], data["stop"])


def require_folder(folder: Path) -> None:
    """Check that this process sees the folder, before anything is copied into it.

    Raises:
        StorageError: it is on another host, or was removed by a process that gave up.
    """
    if not folder.is_dir():
        raise _not_there(folder)


def put_share(
    folder: Path,
    rank: int,
    specs: Mapping[KeyPath, TensorSpec],
    placed: Mapping[KeyPath, tuple[PlacedBox, ...]],
) -> None:
    """Publish the boxes of a process; their bytes must already be readable.

    Raises:
        StorageError: the folder was not found or cannot be written.
    """
    tensors = {
        render(path): {
            "shape": list(spec.shape),
            "dtype": spec.dtype,
            "boxes": [list(box) for box in placed.get(path, ())],
        }
        for path, spec in specs.items()
    }
    _put(folder / f"share-{rank}.json", {"tensors": tensors})


def put_failure(folder: Path, rank: int, error: BaseException) -> None:
    """Publish that a process has no share, and why; rank 0 does not wait for it, now or at the end.

    Raises:
        StorageError: the folder was not found or cannot be written.
    """
    _put(folder / f"share-{rank}.json", {"failed": str(error)})
    _put(folder / f"seen-{rank}", {})  # last: a process that sees it may remove the folder
    _remove_read(folder)


def gather_shares(
    folder: Path,
    own_boxes: Mapping[KeyPath, tuple[PlacedBox, ...]],
    specs: Mapping[KeyPath, TensorSpec],
    ranks: Iterable[int],
    *,
    patience: float,
) -> dict[KeyPath, tuple[PlacedBox, ...]]:
    """Wait for the shares of the other processes.

    Args:
        folder: the shared folder.
        own_boxes: the boxes of this process.
        specs: the tensors of this process.
        ranks: the other processes.
        patience: seconds to wait for each.

    Raises:
        IncompleteError: a process failed, or did not answer in time.
        MismatchError: a process has different tensors.
    """
    expected = {render(path): (list(spec.shape), spec.dtype) for path, spec in specs.items()}
    merged = {path: list(boxes) for path, boxes in own_boxes.items()}
    for rank in ranks:
        with waiting(str(folder), what=f"the share of process {rank}"):
            share, ended = _share_of(folder, rank, patience)
        if share is None or "failed" in share:
            silent = ended or f"sent no share within {patience:g} s"
            why = silent if share is None else f"failed: {share['failed']}"
            raise IncompleteError(
                f"process {rank} {why}",
                uri=str(folder),
                cure=_CURE,
            )
        sent = {name: (row["shape"], row["dtype"]) for name, row in share["tensors"].items()}
        odd = min((name for name in {*expected, *sent} if expected.get(name) != sent.get(name)), default=None)
        if odd is not None:
            raise MismatchError(
                f"tensors of process {rank} differ from those of process 0",
                path=odd,
                cure="export the same tree in all processes; export each stage of a pipeline separately,"
                " with alone=True",
            )
        for name, row in share["tensors"].items():
            merged.setdefault(parse(name), []).extend(
                PlacedBox(tuple(offsets), tuple(sizes), file, start)
                for offsets, sizes, file, start in row["boxes"]
            )
    return {path: tuple(boxes) for path, boxes in merged.items()}


def put_owner(folder: Path, rank: int) -> None:
    """Say which process a rank is, so that the others notice when it has ended; if that fails, they wait longer.

    Args:
        folder: the shared folder.
        rank: of this process.
    """
    try:
        (folder / f"here-{rank}.json").write_text(json.dumps(this_process(f"rank-{rank}").to_json()))
    except OSError as error:
        log.debug("could not name this process in %s: %s", folder, error)


def _share_of(folder: Path, rank: int, patience: float) -> tuple[dict[str, Any] | None, str]:
    """The share of a process; None if it does not come, with the words about its end if it has ended."""
    deadline = time.monotonic() + patience
    while True:
        ended = _end_of(folder, rank)  # looked at first: what a process has sent before its end counts
        share = _await(folder / f"share-{rank}.json", min(_LOOK, max(deadline - time.monotonic(), 0)))
        if share is not None or ended or time.monotonic() >= deadline:
            return share, ended


def _end_of(folder: Path, rank: int) -> str:
    """The words about the end of a process of this machine; empty if it lives, or if that is not known."""
    try:
        owner = owner_in((folder / f"here-{rank}.json").read_bytes()[:MOST_BYTES])
    except OSError:
        return ""
    if verdict_of_process(owner) is not Verdict.DEAD or owner is None:
        return ""
    return f"has ended (process number {owner.pid} on {owner.host})"


def put_outcome(folder: Path, ranks: Iterable[int], receipt: Mapping[str, Any] | None, error: str) -> None:
    """Publish the outcome, give the other processes time to read it, and remove the folder.

    Raises:
        StorageError: it could not be published; the folder is removed nevertheless.
    """
    _make_room(folder)
    try:
        _put(folder / _OUTCOME, {"receipt": receipt, "error": error})
        deadline = time.monotonic() + _GOODBYE
        for rank in ranks:
            with waiting(str(folder), what=f"process {rank}, which has not read the outcome"):
                # Until it has read the outcome, or never will.
                _until(
                    lambda rank=rank: (folder / f"seen-{rank}").exists() or bool(_end_of(folder, rank)),
                    deadline - time.monotonic(),
                )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def leave_failure(folder: Path, ranks: Iterable[int], error: str) -> None:
    """Publish why rank 0 gave up, without waiting: the last process that reads it removes the folder.

    Raises:
        StorageError: it could not be published; the folder is removed, which the other processes notice.
    """
    _make_room(folder)
    try:
        _put(folder / _OUTCOME, {"receipt": None, "error": error, "readers": list(ranks)})
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    _remove_read(folder)


def await_outcome(folder: Path, rank: int, *, patience: float) -> dict[str, Any]:
    """Wait for the outcome from rank 0.

    Args:
        folder: the shared folder.
        rank: of this process.
        patience: seconds to wait after the last heartbeat of rank 0.

    Raises:
        StorageError: rank 0 has ended, or this process does not see its folder.
        WherryError: rank 0 failed.
    """
    found = _outcome(folder, patience)
    try:
        (folder / f"seen-{rank}").touch()
        _remove_read(folder)
    except OSError as error:  # the outcome is the same; at worst rank 0 waits a little longer
        log.debug("could not notify process 0 that its outcome was read: %s", error)
    if found["error"]:
        raise WherryError(f"process 0 failed: {found['error']}", cure="check the log of process 0")
    return found["receipt"]


def _outcome(folder: Path, patience: float) -> dict[str, Any]:
    deadline, watch = time.monotonic() + patience, Watch(folder / LEASE)
    while (found := _await(folder / _OUTCOME, min(_LOOK, patience))) is None:
        if not folder.exists():
            raise StorageError(
                "process 0 ended without reporting the outcome of the export", uri=str(folder), cure=_CURE
            )
        ended = _end_of(folder, 0)
        if ended and (found := _await(folder / _OUTCOME, 0)) is not None:
            return found
        if ended:
            shutil.rmtree(folder, ignore_errors=True)
            raise StorageError(f"process 0 {ended}", uri=str(folder), cure=_CURE)
        if _shows_life(watch):
            deadline = time.monotonic() + patience
        elif time.monotonic() > deadline:
            shutil.rmtree(
                folder, ignore_errors=True
            )  # its creator has ended; other waiting processes notice at once
            raise StorageError(
                f"timed out after {patience:g} s without a heartbeat of process 0",
                uri=str(folder),
                cure=_CURE,
            )
    return found


def _shows_life(watch: Watch) -> bool:
    """Whether the lease shows that rank 0 works on the export; an unreadable lease does not."""
    try:
        return watch.look() is Verdict.ALIVE
    except OSError as error:
        log.debug("cannot read %s: %s", watch.path, error)
        return False


def _remove_read(folder: Path) -> None:
    """Remove the folder if rank 0 has left that to the readers, and all of them have read the outcome."""
    found = _await(folder / _OUTCOME, 0) or {}
    if "readers" in found and all((folder / f"seen-{rank}").exists() for rank in found["readers"]):
        shutil.rmtree(folder, ignore_errors=True)


def _make_room(folder: Path) -> None:
    """Remove the parts: a full disk may be the cause of a failure, and the outcome needs some space."""
    for path in folder.glob("part-*"):
        path.unlink(missing_ok=True)


def _not_there(folder: Path) -> StorageError:
    return StorageError("export folder not found", uri=str(folder), cure=_CURE)


def _put(path: Path, data: Mapping[str, Any]) -> None:
    draft = path.with_suffix(".draft")
    try:
        draft.write_text(json.dumps({"schema": SCHEMA, **data}))
        draft.replace(path)
    except FileNotFoundError as error:
        raise _not_there(path.parent) from error
    except OSError as error:
        raise storage_error(error, str(path)) from error


def _await(path: Path, patience: float) -> dict[str, Any] | None:
    """The contents of a file that another process creates; None if it does not appear in time."""
    if not _until(lambda: os.path.exists(path), patience):  # noqa: PTH110  a third of the time of Path.exists
        return None
    try:
        return json_value(path.read_text())
    except FileNotFoundError:
        return None  # the folder was removed between the two


def _until(true: Callable[[], bool], patience: float) -> bool:
    deadline = time.monotonic() + patience
    while not true():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_PAUSE)
    return True
