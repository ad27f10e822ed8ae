"""on_worker: what runs on a worker of an engine: it proves itself, makes and proves units, and closes the job.

Arguments and answers are JSON values, so an engine carries nothing else. A worker makes one unit at a time, with all of
its cores; it opens the job once.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wherry.carriers.challenge import answer_to
from wherry.errors import NotFoundError, TargetExistsError, WherryError, wherry_error
from wherry.records.claims import Claims
from wherry.records.records import JOB
from wherry.records.unit_proof import proofs_in
from wherry.records.unit_receipt import receipts_by_unit
from wherry.units.split_job import opened_job
from wherry.units.work import make_claimed, prove_claimed

if TYPE_CHECKING:
    from wherry.units.split_job import SplitJob


@dataclass(slots=True)
class _OpenJob:
    """The job that this process has open for a coordinator.

    Attributes:
        token: id of the coordinator.
        stack: closes it.
        job, claims: of the job; None before it is open.
    """

    token: str = ""
    stack: ExitStack = field(default_factory=ExitStack)
    job: SplitJob | None = None
    claims: Claims | None = None


_lock = threading.Lock()
_open = _OpenJob()


def prove(uri: str, token: str) -> dict[str, Any]:
    """Show that this worker can make units of a job; see `wherry.carriers.challenge`.

    Args:
        uri: of the job.
        token: id of the coordinator.

    Returns:
        The answer, or in `problem` why it cannot.
    """
    try:
        with _lock:
            return answer_to(_open_job(uri, token)[0], token)
    except (WherryError, ImportError) as error:
        return {"problem": " ".join(str(error).split())}


def make(uri: str, token: str, number: int) -> dict[str, Any]:
    """Make a unit.

    Args:
        uri: of the job.
        token: id of the coordinator.
        number: of the unit.

    Returns:
        `receipt`, the name of its record; or `busy`, if another process makes the unit; or `error`.
    """
    try:
        with _lock:
            return _make_unit(*_open_job(uri, token), number)
    except TargetExistsError as error:  # an earlier attempt was not dead but slow, and has made an object
        return {"error": {**error.to_json(), "retryable": True}}
    except Exception as error:  # noqa: BLE001  the coordinator decides
        return {"error": wherry_error(error, uri=uri).to_json()}


def check(uri: str, token: str, number: int) -> dict[str, Any]:
    """Read back a unit that another process has made.

    Args:
        uri: of the job.
        token: id of the coordinator.
        number: of the unit.

    Returns:
        `proof`, the name of its record, None if this process cannot prove the unit; or `busy`, if another process does;
        or `error`.
    """
    try:
        with _lock:
            return _check_unit(*_open_job(uri, token), number)
    except Exception as error:  # noqa: BLE001  the coordinator decides
        return {"error": wherry_error(error, uri=uri).to_json()}


def close(token: str) -> dict[str, Any]:
    """Close the job that this process has open for a coordinator."""
    with _lock:
        if _open.token == token:
            _close()
    return {}


def _make_unit(job: SplitJob, claims: Claims, number: int) -> dict[str, Any]:
    names = job.records.names()
    if JOB not in names:
        raise NotFoundError("the job has ended", uri=job.uri, cure="run the same command again")
    unit = job.units[number]
    if finished := receipts_by_unit(names).get(number):
        return {"receipt": finished[0], "seconds": None}
    claim = claims.take(unit, names)
    if claim is None:
        return {"busy": True}
    receipt = make_claimed(job, claims, unit, claim)
    return {"receipt": receipt.name, "seconds": receipt.seconds, "worker": receipt.worker}


def _check_unit(job: SplitJob, claims: Claims, number: int) -> dict[str, Any]:
    names = job.records.names()
    if finished := proofs_in(names).get(number):
        return {"proof": finished[0], "seconds": None}
    claim = claims.take(job.proof_of(job.units[number]), names)
    if claim is None:
        return {"busy": True}
    proof = prove_claimed(job, claims, job.units[number], claim)
    return {"proof": proof and proof.name, "seconds": proof and proof.seconds}


def _open_job(uri: str, token: str) -> tuple[SplitJob, Claims]:
    if _open.job is None or _open.claims is None or _open.token != token:
        _close()
        _open.job = _open.stack.enter_context(opened_job(uri))
        _open.claims, _open.token = Claims(_open.job.records, coordinator=token), token
    return _open.job, _open.claims


def _close() -> None:
    _open.job = _open.claims = None
    _open.token = ""
    _open.stack.close()
