"""The steps of an export: check, agree and copy while training waits; share, gather and convert in the background.

Errors are raised to the caller; `wherry.export` keeps them in its handle.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from wherry.converter.convert import convert_opened, existing, plan_jobs
from wherry.core.keypath import KeyPath, render
from wherry.core.manifest import Manifest
from wherry.core.progress import RunContext, logger
from wherry.core.receipt import Receipt, from_json
from wherry.core.services import service
from wherry.errors import NotRecordedError, UsageError, WherryError, storage_error
from wherry.formats.checkpoint import Checkpoint
from wherry.layout.tree_reading import read_leaves
from wherry.ledger.record import record, require_recorded
from wherry.live.checkpoint import live_checkpoint
from wherry.live.request import ExportRequest, spool_of
from wherry.live.shares import (
    LEASE,
    Ticket,
    await_outcome,
    gather_shares,
    leave_failure,
    put_failure,
    put_outcome,
    put_owner,
    put_share,
    require_folder,
    ticket_from,
)
from wherry.live.snapshot import PlacedBox, Snapshot
from wherry.store.folders import remove_leftover
from wherry.store.local_store import locate
from wherry.target.janitor import forget, note
from wherry.target.janitor import tidy as tidy_left_behind
from wherry.target.lease import Lease, LeaseFile

log = logger("wherry.export")
_THERE = "already there"
_LONGEST = 1500  # characters of an error that is sent to the other processes


class Begun(NamedTuple):
    """An export whose snapshot has been taken.

    Attributes:
        step: of training, if known.
        work: the rest of the work, for the background.
        leads: whether this process is the one that writes.
        undo: called instead of `work` to give up because of an error: frees the snapshot and tells the other processes.
    """

    step: int | None
    work: Callable[[], Receipt | None]
    leads: bool
    undo: Callable[[BaseException], None] = lambda _error: None


def begin(state: object, request: ExportRequest) -> Begun:
    """Check, agree and copy, while training waits.

    Raises:
        WherryError: the request cannot be fulfilled; nothing was copied.
    """
    found = service("export-state").survey(state)
    groups = service("export-processes")
    processes = groups.ProcessGroup(0, 1, str) if request.alone else groups.group(found.distributed)
    if processes.count == 1 and processes.rank:
        log.info(
            "process %d skips the export to %s: process 0 exports the same state; "
            "pass alone=True to export a separate state of this process",
            processes.rank, request.uri,
        )  # fmt: skip
        return Begun(request.step, lambda: None, leads=False)
    ready, ticket, planned = _ready(found, request), Ticket(uuid.uuid4().hex), None
    if processes.rank == 0:
        ticket, planned = _plan_export(ready, ticket, shared=processes.count > 1)
    ticket = _agree(processes, ticket)
    if isinstance(ready, Exception):
        _report(Path(ticket.folder) if ticket.folder else None, processes, ready)
        raise ready
    if isinstance(planned, Exception):
        raise planned
    request, manifest = ready
    leads = processes.rank == 0
    if ticket.stop is None:
        return _copy_share(found, manifest, request, processes, ticket)
    if ticket.stop != _THERE:
        raise WherryError(
            f"process 0 refused the export: {ticket.stop}", uri=request.uri, cure="check the log of process 0"
        )
    return Begun(request.step, lambda: planned and record(planned), leads=leads)


def _ready(found: Any, request: ExportRequest) -> tuple[ExportRequest, Manifest] | Exception:
    """The request and manifest, or an error, which is raised once no other process waits for this one's broadcast."""
    if found.failure is not None:
        return found.failure
    try:
        if request.alone:
            _require_whole(found)
        request = replace(request, step=_step(found, request))
        tensors = {one.spec.path: one.spec for one in found.tensors}
        tied = {one.spec.name: render(one.alias) for one in found.tensors if one.alias}
        return request, Manifest(
            tensors=tensors,
            values=found.values,
            empties=found.empties,
            lists=found.lists,
            step=request.step,
            kind=read_leaves(tensors, found.values, found.empties, specs=tensors).whole_of_arrays,
            origin={"framework": found.framework, **({"tied": tied} if tied else {})},
        )
    except Exception as error:  # noqa: BLE001  it is raised once the others know
        return error


def _require_whole(found: Any) -> None:
    for one in found.tensors:
        if sum(math.prod(box.sizes) for box in one.boxes) < one.spec.size:
            raise UsageError(
                "alone=True needs a complete state, but other processes hold parts of this tensor",
                path=one.spec.name,
                cure="export without alone=True in all processes that hold parts",
            )


def _plan_export(
    ready: tuple[ExportRequest, Manifest] | Exception, ticket: Ticket, *, shared: bool
) -> tuple[Ticket, Receipt | Exception | None]:
    """Plan the export from shapes alone; an error is raised only after all processes know of it."""
    if isinstance(ready, Exception):
        return replace(ticket, stop=_in_short(ready)), ready
    request, manifest = ready
    tidy_left_behind()
    try:
        with _checkpoint(manifest, {}, request, ticket.mark, "") as checkpoint:
            job = plan_jobs(checkpoint, request.convert, RunContext.begun())[0]
            there = existing(job, request.convert.if_exists)
        if there is not None:
            return replace(ticket, stop=_THERE), there
        if shared or request.snapshot == "disk":
            folder = spool_of(request, ticket.mark)
            note(folder)  # for the janitor, if this process is killed
            folder.mkdir(mode=0o700)
            ticket = replace(ticket, folder=str(folder))
    except OSError as error:
        failure = error if isinstance(error, WherryError) else storage_error(error, request.uri)
        return replace(ticket, stop=_in_short(failure)), failure
    except Exception as error:  # noqa: BLE001  it is raised once the others know
        return replace(ticket, stop=_in_short(error)), error
    return ticket, None


def _agree(processes: Any, ticket: Ticket) -> Ticket:
    """The ticket of rank 0, which all processes get; if one of them is lost, its folder is removed."""
    try:
        return ticket_from(processes.broadcast(ticket.to_text()))
    except BaseException:
        if ticket.folder is not None:
            folder = Path(ticket.folder)
            remove_leftover(folder)
            forget(folder)
        raise


def _in_short(error: Exception) -> str:
    """The error as ASCII text, so that its length in the broadcast is known."""
    return str(error).encode("ascii", "replace")[:_LONGEST].decode()


def _copy_share(
    found: Any, manifest: Manifest, request: ExportRequest, processes: Any, ticket: Ticket
) -> Begun:
    """Copy this process's share."""
    folder = Path(ticket.folder) if ticket.folder else None
    share = folder / f"part-{processes.rank}" if folder else None
    held = ExitStack()

    def undo(error: BaseException) -> None:
        try:
            held.close()  # first, because a full disk may be the cause
        finally:
            _report(folder, processes, error)

    try:
        if folder is not None:
            require_folder(folder)
            put_owner(folder, processes.rank)
        shot = Snapshot(share if request.snapshot == "disk" else None)
        held.callback(shot.close)
        shot.take(one for one in found.tensors if one.shared or not processes.rank)
    except BaseException as error:
        undo(error)
        raise

    def work() -> Receipt | None:
        if processes.rank:
            assert folder is not None
            return _give(shot, manifest, folder, processes, request.patience)
        others = range(1, processes.count)
        return _finish(shot, manifest, request, found.framework, folder, others, ticket.mark)

    return Begun(request.step, work, leads=processes.rank == 0, undo=undo)


def _report(folder: Path | None, processes: Any, error: BaseException) -> None:
    """Tell the other processes that this one has no share; if that fails, it is only logged."""
    if folder is None:
        return
    try:
        if processes.rank:
            put_failure(folder, processes.rank, error)
        else:
            leave_failure(folder, range(1, processes.count), str(error))
    except OSError as failure:
        log.warning("could not notify the other processes that the export failed: %s", failure)
    finally:
        forget(folder)


def _give(shot: Snapshot, manifest: Manifest, folder: Path, processes: Any, patience: float) -> Receipt:
    """The work of the other processes: provide their share, and wait for the outcome."""
    rank = processes.rank
    try:
        try:
            require_folder(folder)
            put_share(folder, rank, manifest.tensors, shot.publish(folder / f"part-{rank}"))
        except BaseException as error:
            _report(folder, processes, error)
            raise
        return require_recorded(from_json(await_outcome(folder, rank, patience=patience)))
    finally:
        shot.close()


def _finish(
    shot: Snapshot, manifest: Manifest, request: ExportRequest, framework: str, folder: Path | None, others: range,
    mark: str,
) -> Receipt | None:  # fmt: skip
    """The work of rank 0: gather the shares and convert them."""
    receipt, failure, lease = None, "the export was interrupted", ExitStack()
    try:
        if folder is not None:
            require_folder(folder)
            lease.enter_context(Lease(LeaseFile(folder / LEASE), request.uri))  # the other processes watch it
        placed = shot.placed
        if folder is not None and others:
            placed = gather_shares(folder, placed, manifest.tensors, others, patience=request.patience)
        with _checkpoint(manifest, placed, request, mark, framework) as checkpoint:
            group = convert_opened(checkpoint, request.convert, RunContext.begun())
        receipt = group.receipts[0]
    except NotRecordedError as error:
        receipt = error.result = error.result.receipts[0]
        raise
    except BaseException as error:
        failure = str(error)
        raise
    finally:
        shot.close()
        with lease:
            _tell(folder, others, receipt, failure)
    return receipt


def _tell(folder: Path | None, others: range, receipt: Receipt | None, failure: str) -> None:
    """Tell the other processes the outcome; if that fails, it is only logged."""
    if folder is None:
        return
    try:
        put_outcome(folder, others, receipt and receipt.to_json(), "" if receipt else failure)
    except OSError as error:
        log.warning("could not notify the other processes of the outcome of the export: %s", error)
    finally:
        forget(folder)


def _checkpoint(
    manifest: Manifest,
    placed: Mapping[KeyPath, tuple[PlacedBox, ...]],
    request: ExportRequest,
    mark: str,
    framework: str,
) -> Checkpoint:
    return live_checkpoint(
        manifest,
        placed,
        name=request.name or locate(request.uri).name,
        mark=mark,
        framework=framework,
        system=request.system,
    )


def _step(found: Any, request: ExportRequest) -> int | None:
    """The requested step, or the step that the state contains."""
    if request.step is not None:
        return request.step
    value = found.values.get(("step",))
    if isinstance(value, int):
        return value
    for spec, boxes, *_rest in found.tensors:
        if spec.path == ("step",) and spec.size == 1 and "int" in spec.dtype and boxes:
            return int.from_bytes(boxes[0].load(), "little", signed=not spec.dtype.startswith("u"))
    return None
