"""What tests of units share: small conversions, jobs of them, workers that die, and records that are changed."""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import pytest

import wherry
from wherry.core.request import TargetRequest, convert_request
from wherry.errors import StorageError, TargetExistsError
from wherry.store.local_store import locate
from wherry.store.location import MOST_CONFIG
from wherry.target import journal as journals
from wherry.target.lease import Owner
from wherry.target.signed_log import journal_key, sign
from wherry.workers import records, tasks
from wherry.workers import work as working
from wherry.workers.commit import commit
from wherry.workers.job import split
from wherry.workers.records import Claims, TaskKind, TaskRecord, decode, job_records, records_by_unit
from wherry.workers.work import work

SIZES = {
    "hf": {"max_shard_size": "250KB"}, "dcp": {"shard_size": "250KB"}, "orbax": {"data_file_size": "250KB"},
}  # fmt: skip


def requested(source, target, to="hf", **more):
    """The request of a conversion whose target has several files."""
    ignore = () if to in ("hf", "dcp", "orbax") else ("companions",)
    common = {"lineage": False, "ignore": ignore, **more}
    return convert_request(str(source), [TargetRequest(str(target), to, SIZES.get(to, {}))], **common)


def made_job(source, target, to="hf", unit=300_000, **more):
    """A job of about five units."""
    return split(requested(source, target, to, **more), unit)


def undisturbed(source, folder, to="hf"):
    """The receipt of the same conversion in one process."""
    request = requested(source, folder / "undisturbed", to)
    return wherry.convert(
        source, folder / "undisturbed", to=to, options=request.targets[0].options, lineage=False,
        ignore=request.ignore,
    ).target  # fmt: skip


def committed(target):
    [receipt] = commit(target).receipts
    return receipt


class Killed(BaseException):
    """The process was killed here: nothing of what it does when it fails is done."""


def stopped_at(name, count, kind=Killed):
    """A function that stops its process at a call: a worker that is killed there."""
    real, calls = getattr(tasks, name), []

    def call(*args, **kwargs):
        calls.append(name)
        if len(calls) == count:
            raise kind(name)
        return real(*args, **kwargs)

    return call


def killed(target, monkeypatch, name, count):
    """A worker that dies while it makes a unit; its claim stays."""
    with monkeypatch.context() as patch:
        patch.setattr(tasks, name, stopped_at(name, count))
        with pytest.raises(Killed):
            work(target)


def as_dead(patch):
    """Claims of this process count as those of a process that has ended."""
    real = records.this_process

    def ended(token):
        owner = real(token)
        return Owner(owner.host, owner.pid, owner.pid_namespace, 1, token)

    patch.setattr(records, "this_process", ended)


def as_elsewhere(patch):
    """Claims of this process count as those of another machine."""
    real = records.this_process
    patch.setattr(records, "this_process", lambda token: Owner("elsewhere", 1, "", None, real(token).token))


def row_of(records, name):
    """What a record holds, as JSON; its moves as rows."""
    row = json.loads(records.folder.join(name).read_whole(MOST_CONFIG).rpartition(b"\t")[0])
    if "moves" in row:
        row["moves"] = list(map(journals.encode, journals.decode_all(row["moves"])))
    return row


def put_row(records, name, row):
    """Write a record that holds this; it is signed with this process's key."""
    if isinstance(row.get("moves"), list):
        row = {**row, "moves": {"done": row["moves"], "small": {"paths": [], "sizes": [], "leaves": ""}}}
    path, data = records.folder.join(name).path, sign(row, journal_key())
    if records.store is None:
        Path(path).write_bytes(data)
    else:
        found = records.store.head(path)
        replaces = {"replaces": found.mark} if found else {}
        records.store.put_object(path, data, "00000000", **replaces)


def record_from(row):
    """The record of a receipt or a proof that `row_of` has read."""
    small = {"paths": [], "sizes": [], "leaves": ""}
    text = json.dumps({**row, "moves": {"done": row["moves"], "small": small}})
    return decode(TaskRecord, text.encode(), "a record", "job")


def _rows(target, kind):
    records = job_records(locate(target))
    names = records_by_unit(kind, records.names()).values()
    return {name: row_of(records, name) for of_unit in names for name in of_unit}


def receipts(target):
    """Name → contents of the records of what was made."""
    return _rows(target, TaskKind.MAKE)


def claimants(target):
    """The processes that have claimed a task."""
    records = job_records(locate(target))
    rows = [row_of(records, name) for name in records.names() if name.startswith("claim-")]
    return {json.loads(row["owner"])["pid"] for row in rows}


def proofs(target):
    """Name → contents of the records of what was read back."""
    return _rows(target, TaskKind.READ)


def read_back_bytes(row):
    """Bytes of the moves of a record."""
    return sum(stop - start for _path, start, stop, *_more in row["moves"])


def changed(target, name, **fields):
    """Replace fields of a record; it is signed with the right key."""
    records = job_records(locate(target))
    put_row(records, name, {**row_of(records, name), **fields})


def lie_about_checksum(target, tensor):
    """Change the CRC-32 that receipts state of the first bytes of a tensor."""
    lying = {}
    for name, row in receipts(target).items():
        moves = [list(move) for move in row["moves"]]
        for move in moves:
            if move[0].startswith(tensor) and len(move) > 5 and move[1] == 0:
                move[5] = [[first, last, value ^ 1] for first, last, value in move[5]]
                lying[name] = moves
    assert lying
    for name, moves in lying.items():
        changed(target, name, moves=moves)


@contextmanager
def worker_named(name):
    """This process counts as a worker of this name, which is another one."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (tasks, working):
            patch.setattr(module, "this_worker", lambda: name)
        yield


def made_and_proved(target):
    """One worker makes every unit, another one reads them back."""
    with worker_named("a maker"):
        work(target)
    with worker_named("a prover"):
        return work(target)


@contextmanager
def slow_worker(target, monkeypatch):
    """A worker of another machine that has claimed a unit and does not renew its claim; it comes back at the end.

    Its object may have been made by the other worker then, or its folder be gone.
    """
    real, back = tasks.finish, threading.Event()

    def slow(writer):
        if threading.current_thread().name == "slow":
            back.wait(60)
        real(writer)

    def run():
        with suppress(TargetExistsError, StorageError):
            work(target)

    monkeypatch.setattr(tasks, "finish", slow)
    monkeypatch.setattr(Claims, "renewed", lambda _self, _claim: nullcontext())
    thread = threading.Thread(target=run, name="slow")
    with monkeypatch.context() as patch:
        as_elsewhere(patch)
        thread.start()
        while not claimed(target):
            time.sleep(0.02)
    try:
        yield
    finally:
        back.set()
        thread.join()


def claimed(target):
    """Task and attempt of every claim of a job."""
    return records.claims_among(job_records(locate(target)).names())


def by_two(act, errors):
    """What two threads return that do one thing at the same time, and the errors, of the given kinds, of the others."""
    made, failed = [], []

    def run():
        try:
            made.append(act())
        except errors as error:
            failed.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made, failed
