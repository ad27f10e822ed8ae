"""What tests of units share: small conversions, jobs of them, workers that die, and records that are changed."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager, nullcontext, suppress

import pytest

import wherry
from wherry.carriers import challenge
from wherry.core.request import TargetRequest, convert_request
from wherry.errors import StorageError, TargetExistsError
from wherry.records import claims
from wherry.records.claims import Claims
from wherry.records.records import records_beside
from wherry.records.unit_proof import proofs_in
from wherry.records.unit_receipt import receipts_by_unit
from wherry.staging.lease_watch import Owner
from wherry.storage.stores import locate
from wherry.units import make, prove
from wherry.units import work as working
from wherry.units.commit import commit
from wherry.units.split_job import split
from wherry.units.work import work

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
    real, calls = getattr(make, name), []

    def call(*args, **kwargs):
        calls.append(name)
        if len(calls) == count:
            raise kind(name)
        return real(*args, **kwargs)

    return call


def killed(target, monkeypatch, name, count):
    """A worker that dies while it makes a unit; its claim stays."""
    with monkeypatch.context() as patch:
        patch.setattr(make, name, stopped_at(name, count))
        with pytest.raises(Killed):
            work(target)


def as_dead(patch):
    """Claims of this process count as those of a process that has ended."""
    real = claims.this_process

    def ended(token):
        owner = real(token)
        return Owner(owner.host, owner.pid, owner.pid_namespace, 1, token)

    patch.setattr(claims, "this_process", ended)


def as_elsewhere(patch):
    """Claims of this process count as those of another machine."""
    real = claims.this_process
    patch.setattr(claims, "this_process", lambda token: Owner("elsewhere", 1, "", None, real(token).token))


def receipts(target):
    records = records_beside(locate(target))
    return {
        name: records.read(name) for names in receipts_by_unit(records.names()).values() for name in names
    }


def changed(target, name, **fields):
    """Replace fields of a record; it is signed with the right key."""
    records = records_beside(locate(target))
    records.replace(name, {**records.read(name), **fields}, "00000000")


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
        for module in (make, prove, working, challenge):
            patch.setattr(module, "this_worker", lambda: name)
        yield


def proofs(target):
    """Name → contents of the records of proofs."""
    records = records_beside(locate(target))
    return {name: records.read(name) for names in proofs_in(records.names()).values() for name in names}


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
    real, back = make.finish, threading.Event()

    def slow(writer):
        if threading.current_thread().name == "slow":
            back.wait(60)
        real(writer)

    def run():
        with suppress(TargetExistsError, StorageError):
            work(target)

    monkeypatch.setattr(make, "finish", slow)
    monkeypatch.setattr(Claims, "renewed", lambda _self, _claim, _unit: nullcontext())
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
    """Unit and attempt of every claim of a job."""
    return claims.claims_among(records_beside(locate(target)).names())


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
