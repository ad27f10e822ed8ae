"""Shares: how the processes of one training run put one snapshot together, over a folder that all of them see.

Each process writes what it has into the folder, then `share-<rank>.json`, which says where every box lies; rank 0
waits for all of them, converts, and leaves `outcome.json` for the others. Nothing here is a collective operation, so it
can go on in the background while training uses its communicators. Only `Ticket` is handed round while training waits.
Nobody waits for ever: rank 0 for a share no longer than it has patience, the others no longer than that after the last
sign of life of rank 0, which renews a lease in the folder. Only rank 0 makes the folder: who does not find it gives up.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from wherry.core.keypath import parse, render
from wherry.errors import IncompleteError, MismatchError, StorageError, WherryError, storage_error
from wherry.live.snapshot import PlacedBox
from wherry.staging.lease_watch import Verdict, Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import TensorSpec

log = logging.getLogger("wherry.export")
SCHEMA = 1
LEASE = "writer.lease"  # renewed by rank 0 for as long as it works on the export
_OUTCOME = "outcome.json"
_PAUSE = 0.05
_LOOK = 1.0  # seconds between two looks at whether rank 0 is still there
_GOODBYE = 30.0  # seconds that rank 0 keeps the outcome for the others to read
_CURE = (
    "see the logs of the other processes; several hosts need a folder that all of them see: give it as spool="
)


@dataclass(frozen=True, slots=True)
class Ticket:
    """What rank 0 tells the others before the snapshot is taken.

    Attributes:
        mark: names this export and no other.
        folder: where the shares lie; None where one process has everything.
        stop: why nothing is done, where the plan was refused or the target is there already.
    """

    mark: str
    folder: str | None = None
    stop: str | None = None

    def to_text(self) -> str:
        """One line of JSON."""
        return json.dumps({"schema": SCHEMA, **asdict(self)})


def ticket_from(text: str) -> Ticket:
    """The inverse of `Ticket.to_text`."""
    data = json.loads(text)
    return Ticket(data["mark"], data["folder"], data["stop"])


def require_folder(folder: Path) -> None:
    """Refuse, before anything is copied into it, a folder that this process does not see.

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
    """Say what a process has; its bytes must be readable by now.

    Raises:
        StorageError: the folder is not there, or cannot be written.
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
    """Say that a process has nothing to give, and why; rank 0 need not wait for it, now or at the end.

    Raises:
        StorageError: the folder is not there, or cannot be written.
    """
    _put(folder / f"share-{rank}.json", {"failed": str(error)})
    _put(folder / f"seen-{rank}", {})  # the last word: whoever sees it may remove the folder
    _remove_read(folder)


def gather_shares(
    folder: Path,
    mine: Mapping[KeyPath, tuple[PlacedBox, ...]],
    specs: Mapping[KeyPath, TensorSpec],
    ranks: Iterable[int],
    *,
    patience: float,
) -> dict[KeyPath, tuple[PlacedBox, ...]]:
    """Wait for the shares of the other processes.

    Args:
        folder: where they appear.
        mine: what this process has.
        specs: the tensors, as this process sees them.
        ranks: the other processes.
        patience: seconds to wait for each.

    Raises:
        IncompleteError: a process failed, or did not answer in time.
        MismatchError: it has other tensors.
    """
    merged = {path: list(boxes) for path, boxes in mine.items()}
    for rank in ranks:
        share = _await(folder / f"share-{rank}.json", patience)
        if share is None or "failed" in share:
            why = "did not give its share in time" if share is None else f"failed: {share['failed']}"
            raise IncompleteError(
                f"process {rank} {why}",
                uri=str(folder),
                cure=_CURE,
            )
        _require_same(specs, share["tensors"], rank)
        for name, row in share["tensors"].items():
            merged.setdefault(parse(name), []).extend(_placed(box) for box in row["boxes"])
    return {path: tuple(boxes) for path, boxes in merged.items()}


def put_outcome(folder: Path, ranks: Iterable[int], receipt: Mapping[str, Any] | None, error: str) -> None:
    """Tell the other processes what came of it, give them time to read it, and remove the folder.

    Raises:
        StorageError: they could not be told; the folder is removed all the same.
    """
    _make_room(folder)
    try:
        _put(folder / _OUTCOME, {"receipt": receipt, "error": error})
        deadline = time.monotonic() + _GOODBYE
        for rank in ranks:
            _until(lambda rank=rank: (folder / f"seen-{rank}").exists(), deadline - time.monotonic())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def leave_failure(folder: Path, ranks: Iterable[int], error: str) -> None:
    """Tell the other processes why rank 0 gave up, without waiting for them: the last who reads it removes the folder.

    Raises:
        StorageError: they could not be told; the folder is removed, which they notice.
    """
    _make_room(folder)
    try:
        _put(folder / _OUTCOME, {"receipt": None, "error": error, "readers": list(ranks)})
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    _remove_read(folder)


def await_outcome(folder: Path, rank: int, *, patience: float) -> dict[str, Any]:
    """Wait for what rank 0 says.

    Args:
        folder: where it says so.
        rank: of this process.
        patience: seconds to wait after the last sign of life of rank 0.

    Raises:
        StorageError: rank 0 is gone, or this process does not see what it does.
        WherryError: rank 0 failed.
    """
    found = _outcome(folder, patience)
    try:
        (folder / f"seen-{rank}").touch()
        _remove_read(folder)
    except OSError as error:  # the outcome is the same; rank 0 waits a little for nothing, if it still does
        log.debug("process 0 was not told that its outcome was read: %s", error)
    if found["error"]:
        raise WherryError(f"process 0 failed: {found['error']}", cure="see its log")
    return found["receipt"]


def _outcome(folder: Path, patience: float) -> dict[str, Any]:
    deadline, watch = time.monotonic() + patience, Watch(folder / LEASE)
    while (found := _await(folder / _OUTCOME, min(_LOOK, patience))) is None:
        if not folder.exists():
            raise StorageError(
                "process 0 left without saying what came of the export", uri=str(folder), cure=_CURE
            )
        if _shows_life(watch):
            deadline = time.monotonic() + patience
        elif time.monotonic() > deadline:
            shutil.rmtree(
                folder, ignore_errors=True
            )  # whoever made it is gone; others who wait notice at once
            raise StorageError(
                f"process 0 gave no sign of life for {patience:g} s", uri=str(folder), cure=_CURE
            )
    return found


def _shows_life(watch: Watch) -> bool:
    """Whether rank 0 has shown that it works on the export; storage that does not say so gives no sign of life."""
    try:
        return watch.look() is Verdict.ALIVE
    except OSError as error:
        log.debug("%s could not be read: %s", watch.path, error)
        return False


def _remove_read(folder: Path) -> None:
    """Remove the folder where rank 0 has left it to the readers, and all of them have read why."""
    found = _await(folder / _OUTCOME, 0) or {}
    if "readers" in found and all((folder / f"seen-{rank}").exists() for rank in found["readers"]):
        shutil.rmtree(folder, ignore_errors=True)


def _make_room(folder: Path) -> None:
    """Remove the parts: a full disk may be what went wrong, and the outcome must find some space."""
    for path in folder.glob("part-*"):
        path.unlink(missing_ok=True)


def _not_there(folder: Path) -> StorageError:
    return StorageError("the folder of the export is not there", uri=str(folder), cure=_CURE)


def _placed(row: list[Any]) -> PlacedBox:
    offsets, sizes, file, start = row
    return PlacedBox(tuple(offsets), tuple(sizes), file, start)


def _require_same(specs: Mapping[KeyPath, TensorSpec], found: Mapping[str, Any], rank: int) -> None:
    ours = {render(path): (list(spec.shape), spec.dtype) for path, spec in specs.items()}
    theirs = {name: (row["shape"], row["dtype"]) for name, row in found.items()}
    odd = min((name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name)), default=None)
    if odd is not None:
        raise MismatchError(
            f"process {rank} has other tensors than process 0",
            path=odd,
            cure="export the same tree in all processes; stages of a pipeline are exported one by one,"
            " with alone=True",
        )


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
    """A file that another process puts in place, once it is there; None where it does not come."""
    if not _until(lambda: os.path.exists(path), patience):  # noqa: PTH110  a third of the time of Path.exists
        return None
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None  # the folder was removed between the two


def _until(true: Callable[[], bool], patience: float) -> bool:
    deadline = time.monotonic() + patience
    while not true():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_PAUSE)
    return True
