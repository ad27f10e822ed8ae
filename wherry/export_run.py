"""What an export does: check, agree, copy while training waits; give, gather and convert in the background.

Nothing here is caught: `wherry.export` keeps every failure in its handle.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
import uuid
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from wherry.convert import Asked, Target, convert_opened, existing, plan_jobs
from wherry.errors import WherryError, storage_error
from wherry.keypath import render
from wherry.layouts import Wish
from wherry.lease import Lease
from wherry.live_checkpoint import live_checkpoint
from wherry.manifest import Manifest
from wherry.receipt import from_json, utc_now
from wherry.registry import service
from wherry.shares import (
    Ticket,
    await_outcome,
    gather_shares,
    put_failure,
    put_outcome,
    put_share,
    ticket_from,
)
from wherry.snapshot import Snapshot
from wherry.spill import FOLDER_VARIABLE
from wherry.staging import PREFIX
from wherry.store import locate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from wherry.checkpoint import Checkpoint
    from wherry.export_request import Request
    from wherry.keypath import KeyPath
    from wherry.receipt import Receipt
    from wherry.snapshot import Placed

log = logging.getLogger("wherry.export")
_LEASE = "writer.lease"
_PARAMETERS = ("params", "target", "model")
_THERE = "already there"
_LONGEST = 1500  # characters of an error that is told to the other processes


class Begun(NamedTuple):
    """An export whose snapshot has been taken.

    Attributes:
        step: of training, where known.
        work: what is left to do in the background.
        leads: whether this process is the one that writes.
    """

    step: int | None
    work: Callable[[], Receipt | None]
    leads: bool


def begin(state: object, request: Request) -> Begun:
    """Check, agree and copy, while training waits.

    Raises:
        WherryError: what was asked for is not possible; nothing was copied.
    """
    found = service("export-state").survey(state)
    processes = service("export-processes").group(found.distributed)
    if (
        processes.count == 1 and processes.rank
    ):  # it holds what the first one holds too, and that one exports it
        return Begun(request.step, lambda: None, leads=False)
    ready, ticket, planned = _ready(found, request), Ticket(uuid.uuid4().hex), None
    if processes.rank == 0:
        ticket, planned = _planned(ready, ticket, shared=processes.count > 1)
    ticket = ticket_from(processes.broadcast(ticket.to_text()))
    if isinstance(ready, Exception):
        _report(Path(ticket.folder) if ticket.folder else None, processes, ready)
        raise ready
    if isinstance(planned, Exception):
        raise planned
    request, manifest = ready
    leads = processes.rank == 0
    if ticket.stop is None:
        return Begun(request.step, _copied(found, manifest, request, processes, ticket), leads=leads)
    if ticket.stop != _THERE:
        raise WherryError(f"process 0 refused: {ticket.stop}", uri=request.uri)
    return Begun(request.step, lambda: planned, leads=leads)


def _ready(found: Any, request: Request) -> tuple[Request, Manifest] | Exception:
    """What is exported, or why it cannot be: raised only once no other process waits for this one's broadcast."""
    if found.failure is not None:
        return found.failure
    try:
        request = replace(request, step=_step(found, request))
        return request, _manifest(found, request)
    except Exception as error:  # noqa: BLE001  it is raised once the others know
        return error


def _planned(
    ready: tuple[Request, Manifest] | Exception, ticket: Ticket, *, shared: bool
) -> tuple[Ticket, Receipt | Exception | None]:
    """Whether the target can hold it, from shapes alone; where not, all processes are told before this one says why."""
    if isinstance(ready, Exception):
        return replace(ticket, stop=_in_short(ready)), ready
    request, manifest = ready
    try:
        with _checkpoint(manifest, {}, request, ticket.mark, "") as checkpoint:
            job = plan_jobs(checkpoint, [_target(request)], _asked(request))[0]
            there = existing(job, request.if_exists)
        if there is not None:
            return replace(ticket, stop=_THERE), there
        if shared or request.snapshot == "disk":
            folder = _spool(request, ticket.mark)
            folder.mkdir(mode=0o700)
            ticket = replace(ticket, folder=str(folder))
    except OSError as error:
        failure = error if isinstance(error, WherryError) else storage_error(error, request.uri)
        return replace(ticket, stop=_in_short(failure)), failure
    except Exception as error:  # noqa: BLE001  it is raised once the others know
        return replace(ticket, stop=_in_short(error)), error
    return ticket, None


def _in_short(error: Exception) -> str:
    """In ASCII, so that it is as long as it looks in what is broadcast."""
    return str(error).encode("ascii", "replace")[:_LONGEST].decode()


def _copied(
    found: Any, manifest: Manifest, request: Request, processes: Any, ticket: Ticket
) -> Callable[[], Receipt | None]:
    """Take this process's share."""
    folder = Path(ticket.folder) if ticket.folder else None
    share = folder / f"part-{processes.rank}" if folder else None
    shot: Snapshot | None = None
    try:
        shot = Snapshot(share if request.snapshot == "disk" else None)
        shot.take(one for one in found.tensors if one.shared or not processes.rank)
    except BaseException as error:
        if shot is not None:
            shot.close()
        _report(folder, processes, error)
        raise
    taken = shot
    if processes.rank:
        assert folder is not None
        return lambda: _give(taken, manifest, folder, processes.rank)
    return lambda: _finish(
        taken, manifest, request, found.framework, folder, range(1, processes.count), ticket.mark
    )


def _report(folder: Path | None, processes: Any, error: BaseException) -> None:
    """Tell the other processes that this one has nothing to give."""
    if folder is None:
        return
    if processes.rank:
        put_failure(folder, processes.rank, error)
    else:
        put_outcome(folder, (), None, str(error))


def _give(shot: Snapshot, manifest: Manifest, folder: Path, rank: int) -> Receipt:
    """What the other processes do: give their share, and learn what came of it."""
    try:
        try:
            put_share(folder, rank, manifest.tensors, shot.publish(folder / f"part-{rank}"))
        except BaseException as error:
            put_failure(folder, rank, error)
            raise
        return from_json(await_outcome(folder, rank))
    finally:
        shot.close()


def _finish(
    shot: Snapshot, manifest: Manifest, request: Request, framework: str, folder: Path | None, others: range,
    mark: str,
) -> Receipt | None:  # fmt: skip
    """What rank 0 does: put the shares together and convert them."""
    receipt, failure, lease = None, "it was interrupted", ExitStack()
    try:
        if (
            folder is not None
        ):  # its heartbeat says that the folder is in use, when nothing else changes there
            lease.enter_context(Lease(folder / _LEASE, request.uri))
        placed = shot.placed
        if folder is not None and others:
            placed = gather_shares(folder, placed, manifest.tensors, others, patience=request.patience)
        with _checkpoint(manifest, placed, request, mark, framework) as checkpoint:
            group = convert_opened(
                checkpoint, [_target(request)], _asked(request), if_exists=request.if_exists
            )
        receipt = group.receipts[0]
    except BaseException as error:
        failure = str(error)
        raise
    finally:
        shot.close()
        with lease:
            _tell(folder, others, receipt, failure)
    return receipt


def _tell(folder: Path | None, others: range, receipt: Receipt | None, failure: str) -> None:
    """Tell the other processes; that they cannot be told does not change what came of the export."""
    if folder is None:
        return
    try:
        put_outcome(folder, others, receipt and receipt.to_json(), "" if receipt else failure)
    except WherryError as error:
        log.warning("the other processes were not told what came of the export: %s", error)


def _checkpoint(
    manifest: Manifest,
    placed: Mapping[KeyPath, tuple[Placed, ...]],
    request: Request,
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


def _target(request: Request) -> Target:
    return Target(request.uri, request.to, request.options or {})


def _asked(request: Request) -> Asked:
    wish = Wish(request.family, None, request.config, request.dtype, request.assets)
    return Asked(
        request.memory, request.verify, request.only, request.ignore, request.into, None, None, request.meta or {},
        wish, utc_now(), time.monotonic(),
    )  # fmt: skip


def _manifest(found: Any, request: Request) -> Manifest:
    tensors = {one.spec.path: one.spec for one in found.tensors}
    roots = {path[0] for path in tensors if path}
    tied = {one.spec.name: render(one.alias) for one in found.tensors if one.alias}
    state = bool(roots & set(_PARAMETERS)) and bool(roots - set(_PARAMETERS))
    return Manifest(
        tensors=tensors,
        values=found.values,
        empties=found.empties,
        lists=found.lists,
        step=request.step,
        kind="train-state" if state else "params",
        origin={"framework": found.framework, **({"tied": tied} if tied else {})},
    )


def _step(found: Any, request: Request) -> int | None:
    """The step that was said, or the one that the state counts itself."""
    if request.step is not None:
        return request.step
    value = found.values.get(("step",))
    if isinstance(value, int):
        return value
    for spec, boxes, *_rest in found.tensors:
        if spec.path == ("step",) and spec.size == 1 and "int" in spec.dtype and boxes:
            return int.from_bytes(boxes[0].load(), "little", signed=not spec.dtype.startswith("u"))
    return None


def _spool(request: Request, mark: str) -> Path:
    """A folder of its own on the target's file system, or where temporary files go."""
    location = locate(request.uri)
    if request.spool is not None:
        parent = Path(request.spool)
    elif location.store.capabilities.local:
        parent = next(one for one in Path(location.path).parents if one.is_dir())
    else:
        parent = Path(os.environ.get(FOLDER_VARIABLE) or tempfile.gettempdir())
    return parent / f"{PREFIX}{location.name}.{mark[:8]}.spool"
