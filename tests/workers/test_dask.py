"""Dask: a real cluster whose workers are killed, paused and added; and what its scheduler and dashboards see."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress

import pytest

from tests.support.jobs import by_two, receipts
from tests.support.object_stores import leftover_names, model
from tests.support.processes import gone, is_running
from tests.support.worker_pools import committed_as_by_one, job_of, request_of, same_tensors, set_variables
from wherry.errors import MissingExtraError, StorageError, WherryError
from wherry.workers import convert_on
from wherry.workers import work as working
from wherry.workers.coordinator import ALLOWED_LOSSES, Workplace
from wherry.workers.work import carry_with_pool

distributed = pytest.importorskip("distributed", reason="distributed is not installed")

from wherry.integrations.engines import dask, dask_cluster  # noqa: E402  they import distributed


@pytest.fixture(scope="module")
def cluster():
    """A cluster of two workers that somebody else has started."""
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=None, memory_limit=0, host="127.0.0.1"
    ) as started:
        yield started


@pytest.fixture
def address(cluster):
    """Its address; the workers have the home and the key of this test."""
    ours = {name: value for name, value in os.environ.items() if name.startswith("WHERRY_")}
    with distributed.Client(cluster.scheduler_address, set_as_default=False) as client:
        client.run(set_variables, ours)
    return cluster.scheduler_address.removeprefix("tcp://")


@pytest.fixture
def target(tmp_path):
    return str(tmp_path / "out")


def process_ids(cluster):
    """Address of each worker → process ID."""
    with distributed.Client(cluster.scheduler_address, set_as_default=False) as client:
        return client.run(os.getpid)


def running_workers(cluster):
    """Process IDs of the workers of a local cluster, those that were started again too."""
    return [nanny.pid for nanny in cluster.workers.values() if nanny.pid and is_running(nanny.pid)]


def left(target):
    return [one for one in leftover_names(target) if not one.startswith("undisturbed")]


def test_a_cluster_that_runs_is_used_and_stays_as_it_was(source, target, tmp_path, cluster, address):
    before = process_ids(cluster)
    [receipt] = convert_on(request_of(source, target), f"dask://{address}", unit_bytes=110_000).receipts
    assert same_tensors(receipt, source, tmp_path)
    assert left(target) == []
    assert process_ids(cluster) == before
    with distributed.Client(cluster.scheduler_address, set_as_default=False) as client:
        assert set(client.run(lambda: working._open.job is None).values()) == {True}
        assert client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.tasks)) == []


def unit_transitions(dask_scheduler):
    """Key and new state of each transition of a unit, as the scheduler has seen them."""
    return [
        (key, finish) for key, _start, finish, *_ in dask_scheduler.transition_log if key.startswith("unit-")
    ]


def test_units_have_their_names_on_the_dashboard_and_each_worker_one_at_a_time(
    source, target, cluster, address
):
    made = job_of(source, target)
    with dask.pool(Workplace(address)) as pool:
        names = list(carry_with_pool(made, pool))
    assert sum(name.startswith("receipt") for name in names) == 12
    with distributed.Client(cluster.scheduler_address, set_as_default=False) as client:
        story = client.run_on_scheduler(unit_transitions)
    shown = {
        key.rsplit("-", 2)[0] for key, _finish in story
    }  # without the numbers of the attempt and of the task
    read = [made.units[int(name.split("-")[1])].name for name in names if name.startswith("proof")]
    assert shown == {f"unit-{unit.name}" for unit in made.units} | {f"unit-{name}-proof" for name in read}
    outstanding, most = set(), 0
    for key, state in story:
        outstanding = (
            outstanding - {key} if state in {"memory", "released", "forgotten"} else outstanding | {key}
        )
        most = max(most, len(outstanding))
    assert most == 2, "nothing waits in the engine: each worker has one unit"


def test_a_worker_that_is_paused_holds_up_nothing_and_changes_nothing_afterwards(
    source, target, tmp_path, cluster, address
):
    made, stopped = job_of(source, target), []
    try:
        with dask.pool(Workplace(address)) as pool:
            for _receipt in carry_with_pool(made, pool):
                if not stopped:
                    stopped.append(min(process_ids(cluster).values()))
                    os.kill(stopped[0], signal.SIGSTOP)
        assert committed_as_by_one(made, source, tmp_path)
    finally:
        os.kill(stopped[0], signal.SIGCONT)
    before = left(target)
    assert len(process_ids(cluster)) == 2  # it answers again
    assert left(target) == before == []


class LastAnswer:
    """A result with which its worker ends, or pauses, when it is fetched."""

    def __init__(self, signal_number):
        self.signal_number = signal_number

    def __reduce__(self):
        os.kill(os.getpid(), self.signal_number)
        return (int, (self.signal_number,))


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_result_that_cannot_be_fetched_holds_up_no_other(end, cluster, address):
    workers = process_ids(cluster)
    one, other = workers
    with dask.pool(Workplace(address)) as pool:
        lost = pool.submit(one, "first", LastAnswer, end)
        with suppress(TimeoutError):
            lost.result(timeout=2)  # it has begun to be fetched
        try:
            found = [pool.submit(other, "second", abs, -number).result(timeout=20) for number in range(3)]
            assert found == [0, 1, 2]
            assert not lost.done()
            assert lost.cancel(), "the coordinator gives it up when it misses the worker"
        finally:
            with suppress(ProcessLookupError):
                os.kill(workers[one], signal.SIGCONT)
    cluster.wait_for_workers(2)


def test_a_worker_that_is_added_gets_units(source, target, tmp_path, cluster, address):
    made, added = job_of(source, target, "25KB", 25_600), []
    with dask.pool(Workplace(address)) as pool:
        for _receipt in carry_with_pool(made, pool):
            if not added:
                old = set(process_ids(cluster).values())
                cluster.scale(3)
                cluster.wait_for_workers(3)
                added += set(process_ids(cluster).values()) - old
                for pid in old:
                    os.kill(pid, signal.SIGSTOP)
        for pid in old:
            os.kill(pid, signal.SIGCONT)
    makers = [int(row["worker"].split()[1]) for row in receipts(target).values()]
    assert makers.count(added[0]) > len(made.units) / 2
    assert committed_as_by_one(made, source, tmp_path)


def test_a_worker_that_cannot_is_named_and_left_out(source, target, cluster, address, caplog):
    """One of the workers has another key: it does not believe what the job says."""
    ids = process_ids(cluster)
    other = min(ids)
    made = job_of(source, target)
    with distributed.Client(cluster.scheduler_address, set_as_default=False) as client:
        client.run(set_variables, {"WHERRY_KEY": "a key of somebody else"}, workers=[other])
        busy = client.submit(time.sleep, 5, workers=[max(ids)], pure=False)  # the other one answers first
        try:
            with dask.pool(Workplace(address)) as pool:
                names = list(carry_with_pool(made, pool))
            assert sum(name.startswith("receipt") for name in names) == 12
        finally:
            client.run(set_variables, {"WHERRY_KEY": ""}, workers=[other])
            busy.result()
    assert f"worker {other} is left out: the record job.json was altered" in caplog.text
    makers = {int(row["worker"].split()[1]) for row in receipts(target).values()}
    assert makers <= set(ids.values()) - {ids[other]}


def test_a_scheduler_that_does_not_answer(source, target, monkeypatch):
    monkeypatch.setattr(dask, "_START_SECONDS", 1.0)
    with pytest.raises(StorageError, match="the Dask scheduler does not answer") as caught:
        convert_on(request_of(source, target), "dask://127.0.0.1:1", unit_bytes=110_000)
    assert caught.value.retryable
    assert caught.value.uri == "dask://127.0.0.1:1"


def test_two_coordinators_carry_one_job_with_the_same_workers(source, target, tmp_path, address):
    """Each reopens the job at the workers that the other has used; together they make one target."""
    request = request_of(source, target)
    winners, failed = by_two(
        lambda: convert_on(request, f"dask://{address}", unit_bytes=110_000).receipts[0], WherryError
    )
    assert winners, failed
    assert all(same_tensors(one, source, tmp_path) for one in winners)
    [again] = convert_on(request, f"dask://{address}", unit_bytes=110_000).receipts
    assert again.already
    assert left(target) == []


def test_a_cluster_of_this_machine_is_set_for_machines_that_are_lost():
    with (
        dask_cluster.dask_cluster(1) as started,
        distributed.Client(started.address, security=started.security, set_as_default=False) as client,
    ):
        found = client.run_on_scheduler(scheduler_settings)
    assert found == [ALLOWED_LOSSES, 60.0, "60s", "60s"]


def scheduler_settings(dask_scheduler):
    import dask.config as dask_settings

    return [
        dask_scheduler.allowed_failures,
        dask_scheduler.worker_ttl,
        *(dask_settings.get(f"distributed.comm.timeouts.{name}") for name in ("connect", "tcp")),
    ]


def test_a_cluster_of_this_machine_admits_nobody_else(tmp_path):
    with dask_cluster.dask_cluster(1) as started:
        place = started.address.removeprefix("tls://")
        assert place.startswith("127.0.0.1:")
        for scheme in ("tcp", "tls"):
            with pytest.raises((OSError, TypeError)):
                distributed.Client(f"{scheme}://{place}", timeout=2, set_as_default=False)
        other = distributed.security.Security.temporary()
        with pytest.raises(OSError):
            distributed.Client(started.address, security=other, timeout=2, set_as_default=False)
        pids = [started.scheduler.pid, *(one.pid for one in started.workers)]
    assert gone(pids)


@pytest.mark.parametrize("which", ["scheduler", "workers"])
def test_a_cluster_of_this_machine_that_has_ended_is_an_error(source, target, monkeypatch, which):
    made = job_of(source, target)
    with (
        pytest.raises(
            StorageError, match=r"the Dask cluster of this machine has ended|Dask scheduler does not"
        ) as caught,
        dask.pool(Workplace(workers=1)) as pool,
    ):
        for _receipt in carry_with_pool(made, pool):
            one = pool._cluster.scheduler if which == "scheduler" else pool._cluster.workers[0]
            os.kill(one.pid, signal.SIGKILL)
    assert caught.value.retryable
    assert 0 < len(receipts(target)) < 12


def test_a_missing_package_is_named(source, target, monkeypatch):
    def absent():
        raise ImportError("Using `Security.temporary` requires `cryptography`")

    monkeypatch.setattr(dask_cluster.Security, "temporary", absent)
    with pytest.raises(MissingExtraError, match="a Dask cluster needs the package cryptography") as caught:
        convert_on(request_of(source, target), "dask:1", unit_bytes=110_000)
    assert "add the extra dask: `" in caught.value.cure


@pytest.mark.slow
def test_workers_that_are_killed_paused_and_added(tmp_path):
    """240 units of 1 MB by four workers: one is paused, one is added, and every 50th receipt kills one."""
    source, target = model(tmp_path / "model", rows=4000, count=60), str(tmp_path / "place" / "out")
    (tmp_path / "place").mkdir()
    made, chance, paused = job_of(source, target, "1MB", 1_000_000), random.Random(7), []
    with distributed.LocalCluster(
        n_workers=4, threads_per_worker=1, dashboard_address=None, memory_limit=0, host="127.0.0.1"
    ) as cluster:
        with dask.pool(Workplace(cluster.scheduler_address.removeprefix("tcp://"))) as pool:
            for count, _receipt in enumerate(carry_with_pool(made, pool)):
                if count == 10:
                    paused += running_workers(cluster)[:1]
                    os.kill(paused[0], signal.SIGSTOP)
                elif count == 30:
                    cluster.scale(5)
                elif count % 50 == 49:
                    others = [pid for pid in running_workers(cluster) if pid not in paused]
                    os.kill(chance.choice(others), signal.SIGKILL)
        assert count >= len(made.units) - 1  # units are read back by workers, too
        os.kill(paused[0], signal.SIGCONT)
        assert committed_as_by_one(made, source, tmp_path)
    assert left(target) == []
