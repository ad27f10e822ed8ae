"""The coordinator, with workers that do what workers do: they die, hang, come late, see something else, and lie."""

from __future__ import annotations

import re
import sys
import time
from importlib import import_module

import pytest

import wherry
from tests.support.jobs import (
    as_elsewhere,
    claimed,
    committed,
    made_job,
    proofs,
    receipts,
    slow_worker,
    undisturbed,
)
from tests.support.object_stores import leftover_names, uploads_below
from tests.support.waits import waits_reported_at_once
from tests.support.worker_pools import (
    ImaginaryPool,
    SeparatePool,
    carried,
    committed_as_by_one,
    coordinated,
    job_of,
    makes,
    same_tensors,
)
from wherry.converter import job as jobs
from wherry.errors import MissingExtraError, NotFoundError, StorageError, UsageError
from wherry.store.local_store import locate
from wherry.target.clean import clean
from wherry.workers import coordinator, tasks
from wherry.workers import job as job_module
from wherry.workers import work as working
from wherry.workers.commit import commit
from wherry.workers.records import ChallengeRecord, Claims, TaskKind, job_records
from wherry.workers.work import carry_with_pool, work

HANGS = ImaginaryPool.HANGS
FAILED = {"error": {"what": "the storage does not answer", "uri": None, "cure": None, "retryable": True}}


@pytest.fixture(params=["files", "objects"])
def any_target(request, tmp_path):
    return str(tmp_path / "out") if request.param == "files" else f"memory://bucket{tmp_path}/out"


def challenges(target):
    return [name for name in job_records(locate(target)).names() if name.startswith("challenge")]


def test_every_unit_is_made_once_by_workers_that_have_proved_themselves(source, any_target, tmp_path):
    made, pool = job_of(source, any_target), ImaginaryPool("ab")
    assert sorted(carried(made, pool)) == list(range(12))
    assert [title for _worker, title in pool.calls[:2]] == ["prove-a", "prove-b"]
    units = [title for _worker, title in pool.calls if title.startswith("unit-")]
    assert units == [f"unit-{unit.name}-1" for unit in made.units]
    assert len(pool.units_of("a")) == len(pool.units_of("b")) == 6
    assert challenges(any_target) == []
    assert working._open.job is None
    assert committed_as_by_one(made, source, tmp_path)
    assert [name for name in leftover_names(any_target) if not name.startswith("undisturbed")] == []


def test_each_unit_is_read_back_by_a_worker_that_has_not_made_it(source, any_target, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "LARGEST", 2)  # every tensor is read by itself
    made, pool = job_of(source, any_target), SeparatePool("ab")
    names = list(carry_with_pool(made, pool))
    assert sorted(names) == sorted([*receipts(any_target), *proofs(any_target)])
    assert [name[:5] for name in names] == ["recei"] * 12 + [
        "proof"
    ] * 12  # what is left to be made goes first
    for worker, other in ("ab", "ba"):
        own = {
            row["unit"] for row in receipts(any_target).values() if row["worker"] == f"process of {worker}"
        }
        assert set(pool.proofs_of(other)) == own
    [receipt] = commit(made.uri).receipts
    assert receipt.verification["bytes_by_workers"] == 1_200_000
    assert same_tensors(receipt, source, tmp_path)


def test_a_worker_that_is_alone_leaves_the_reading_to_the_commit(source, any_target, tmp_path):
    made, pool = job_of(source, any_target), SeparatePool("a")
    assert sorted(carried(made, pool)) == list(range(12))
    assert pool.proofs_of("a") == []
    assert committed_as_by_one(made, source, tmp_path)


def test_what_only_its_maker_could_read_back_is_left_when_the_others_are_lost(source, any_target, tmp_path):
    def faults(worker, function, _call):
        if worker == "b" and function == TaskKind.READ:
            pool.workers.discard("b")
            return HANGS
        return None

    made, pool = job_of(source, any_target), SeparatePool("ab", faults)
    assert len(carried(made, pool)) == 18
    assert len(proofs(any_target)) == len(pool.proofs_of("a")) == 6
    assert committed_as_by_one(made, source, tmp_path)


def test_a_worker_that_hangs_in_a_proof_holds_up_nothing(source, any_target, tmp_path):
    """Only the maker is left besides it, so the commit reads the unit back."""
    made = job_of(source, any_target)
    pool = SeparatePool(
        "ab", lambda worker, function, _c: HANGS if function == TaskKind.READ and worker == "b" else None
    )
    assert len(carried(made, pool)) == 18
    assert len(pool.proofs_of("b")) == 1
    assert committed_as_by_one(made, source, tmp_path)


def test_proofs_of_an_earlier_carriage_are_kept(source, any_target, tmp_path):
    made = job_of(source, any_target)

    def interrupted(_worker, function, _call):
        if function == TaskKind.READ and len(proofs(any_target)) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        carried(made, SeparatePool("ab", interrupted))
    before = proofs(any_target)
    assert len(before) == 4
    pool = SeparatePool("bc")
    assert len(carried(made, pool)) == 24
    assert before.items() <= proofs(any_target).items()
    assert len(pool.proofs_of("b")) + len(pool.proofs_of("c")) == 8
    own = {row["unit"] for row in receipts(any_target).values() if row["worker"] == "process of b"}
    assert own.isdisjoint(pool.proofs_of("b"))
    assert committed_as_by_one(made, source, tmp_path)


def test_the_proof_of_a_worker_that_fails_goes_to_another(source, any_target, tmp_path):
    failed = []

    def faults(worker, function, _call):
        if worker == "b" and function == TaskKind.READ and not failed:
            failed.append(worker)
            return FAILED
        return None

    made, pool = job_of(source, any_target), SeparatePool("abc", faults)
    assert len(carried(made, pool)) == 24
    assert failed
    assert len(proofs(any_target)) == 12
    assert committed_as_by_one(made, source, tmp_path)


def test_the_units_of_another_carrier_are_not_made_again(source, any_target):
    made = job_of(source, any_target)

    def interrupted(_worker, _function, call):
        if call == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        carried(made, ImaginaryPool("a", interrupted))
    assert working._open.job is None
    pool = ImaginaryPool("b")
    assert sorted(carried(made, pool)) == list(range(12))
    assert len(pool.units_of("b")) == 8


def test_the_unit_of_a_worker_that_is_lost_goes_to_another(source, any_target, tmp_path, caplog):
    made = job_of(source, any_target)

    def faults(worker, function, _call):
        if worker == "b" and makes(function):
            pool.workers.discard("b")
            return HANGS
        return None

    pool = ImaginaryPool("ab", faults)
    assert sorted(carried(made, pool)) == list(range(12))
    [lost] = pool.units_of("b")
    assert lost[:-1] + "2" in pool.units_of("a")
    assert f"worker b was lost while it wrote unit {lost[5:-2]}" in caplog.text
    assert any(future.cancelled() for future in pool.futures)
    assert committed_as_by_one(made, source, tmp_path)


def test_the_unit_of_a_worker_that_was_killed_in_it_goes_to_another_at_once(
    source, any_target, tmp_path, monkeypatch
):
    """On another machine, whose claim does not look dead: the coordinator knows."""
    made = job_of(source, any_target)

    def faults(worker, function, _call):
        if worker == "b" and makes(function):
            with monkeypatch.context() as patch:
                as_elsewhere(patch)
                patch.setattr(tasks, "finish", lambda _writer: (_ for _ in ()).throw(_Killed))
                patch.setattr(Claims, "renewed", lambda *_: _Nothing())
                with pytest.raises(_Killed):
                    working.do(made.uri, pool.token, "receipt", int(pool.calls[-1][1].split("-")[1]))
            pool.workers.discard("b")
            return HANGS
        if not makes(function):
            pool.token = next(iter(challenges(any_target))).split("-")[1]
        return None

    pool = ImaginaryPool("ab", faults)
    assert sorted(carried(made, pool)) == list(range(12))
    assert committed_as_by_one(made, source, tmp_path)


class _Killed(BaseException):
    pass


class _Nothing:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


def test_a_worker_that_hangs_holds_up_one_unit_which_gets_a_second_attempt(
    source, any_target, tmp_path, caplog
):
    made = job_of(source, any_target)
    pool = ImaginaryPool(
        "ab", lambda worker, function, _c: HANGS if worker == "b" and makes(function) else None
    )
    assert sorted(carried(made, pool)) == list(range(12))
    [slow] = pool.units_of("b")
    assert pool.units_of("a")[-1] == slow[:-1] + "2"  # last: when no unit waited
    assert "it gets a second attempt" in caplog.text
    assert any(future.cancelled() for future in pool.futures)
    assert committed_as_by_one(made, source, tmp_path)


def test_a_straggler_that_ends_after_all_changes_nothing(source, any_target, tmp_path):
    made, held = job_of(source, any_target), []

    def faults(worker, function, _call):
        if worker == "b" and makes(function) and not held:
            held.append(len(pool.futures) - 1)
            return HANGS
        if held and makes(function) and pool.calls[-1][1].endswith("-2"):
            number = int(pool.calls[-1][1].split("-")[1])
            answer = working.do(made.uri, token[0], "receipt", number)
            pool.futures[held[0]].set_result(answer)  # both have the receipt
            return answer
        if not makes(function) and challenges(any_target):
            token[:] = [challenges(any_target)[0].split("-")[1]]
        return None

    token = [""]
    pool = ImaginaryPool("ab", faults)
    assert sorted(carried(made, pool)) == list(range(12))
    assert committed_as_by_one(made, source, tmp_path)


def test_a_worker_that_comes_later_gets_units(source, any_target):
    def faults(_worker, _function, call):
        if call == 4:
            pool.workers.add("b")

    made, pool = job_of(source, any_target), ImaginaryPool("a", faults)
    assert sorted(carried(made, pool)) == list(range(12))
    assert ("b", "prove-b") in pool.calls
    assert len(pool.units_of("b")) > 3


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ({"problem": "no job found"}, "no job found"),
        ({"version": "0.0.1"}, r"it has wherry 0\.0\.1; this process has wherry "),
        ({"plan": "another"}, "it has another plan"),
        ({"name": "00000000"}, "what it writes next to the target is not seen here"),
        (ModuleNotFoundError("No module named 'wherry'"), "ModuleNotFoundError: No module named 'wherry'"),
    ],
)
def test_a_worker_that_cannot_is_named_and_left_out(source, any_target, caplog, answer, why):
    def faults(worker, function, _call):
        if worker != "b" or function != "prove":
            return None
        if isinstance(answer, Exception):
            return answer
        token = challenges(any_target)[0].split("-")[1]
        return {**working.prove(made.uri, token), **answer}

    made = job_of(source, any_target)
    pool = ImaginaryPool("ab", faults)
    found = coordinated(made, pool)
    assert pool.units_of("b") == []
    assert re.match(why, found.left_out["b"])
    assert f"worker b is left out: {found.left_out['b']}" in caplog.text


def test_what_a_worker_writes_must_hold_the_secret(source, any_target):
    made = job_of(source, any_target)
    with working.job_work(made) as challenge:
        answer = working.prove(made.uri, challenge.token)
        assert challenge.problem(answer) == ""
        name = f"challenge-{challenge.token}-{answer['name']}"
        made.records.replace(name, ChallengeRecord("another"), "00000000")
        assert challenge.problem(answer) == "what it writes next to the target is not seen here"
        assert (
            challenge.problem({**answer, "name": "../x"})
            == "what it writes next to the target is not seen here"
        )
        working.close(made.uri, challenge.token)
    assert challenges(any_target) == []


def test_a_worker_without_memory_says_so(source, any_target, monkeypatch):
    made = job_of(source, any_target)
    monkeypatch.setattr("wherry.workers.job.available_memory", lambda: 1 << 20)
    monkeypatch.setenv("WHERRY_WORKER_WAIT", "0.3")
    with pytest.raises(
        StorageError,
        match=r"no worker can make units; a: this worker has 1\.\d MB of free memory; a unit needs",
    ):
        carried(made, ImaginaryPool("a"))


def test_a_worker_with_another_key_says_so(source, any_target, monkeypatch):
    made = job_of(source, any_target)

    def faults(_worker, _function, _call):
        monkeypatch.setenv("WHERRY_KEY", "a key of somebody else")
        answer = working.prove(made.uri, "12345678")
        monkeypatch.delenv("WHERRY_KEY")
        return answer

    monkeypatch.setenv("WHERRY_WORKER_WAIT", "0.3")
    with pytest.raises(
        StorageError, match=r"a: the record job\.json was altered, or signed with another key"
    ):
        carried(made, ImaginaryPool("a", faults))


def test_a_worker_that_does_not_see_the_record_of_the_coordinator_says_so(source, any_target):
    made = job_of(source, any_target)
    assert (
        "does not see the files that the coordinator wrote" in working.prove(made.uri, "12345678")["problem"]
    )
    working.close(made.uri, "12345678")


def test_a_pool_without_workers_is_not_waited_for_without_end(source, any_target, monkeypatch):
    made = job_of(source, any_target)
    monkeypatch.setenv("WHERRY_WORKER_WAIT", "0.1")
    with pytest.raises(StorageError, match="no worker can make units; there is none") as caught:
        carried(made, ImaginaryPool(""))
    assert caught.value.retryable
    with pytest.raises(StorageError, match="no worker can make units; a has not answered"):
        carried(made, ImaginaryPool("a", lambda *_: HANGS))


def test_an_error_that_can_pass_is_tried_again_and_a_worker_that_fails_again_and_again_is_left_out(
    source, any_target, tmp_path
):
    made = job_of(source, any_target)
    pool = ImaginaryPool(
        "ab", lambda worker, function, _c: FAILED if worker == "b" and makes(function) else None
    )
    found = coordinated(made, pool)
    assert len(pool.units_of("b")) == coordinator.ALLOWED_STRIKES
    assert found.left_out == {"b": "the storage does not answer"}
    assert committed_as_by_one(made, source, tmp_path)


def test_a_unit_that_fails_everywhere_ends_the_carriage(source, any_target):
    made = job_of(source, any_target)

    def faults(_worker, function, _call):
        return FAILED if makes(function) and pool.calls[-1][1].startswith("unit-00003") else None

    pool = ImaginaryPool("abcdef", faults)
    with pytest.raises(
        StorageError, match=r"unit 00003-\w{8} cannot be made; worker \w: the storage does not"
    ):
        carried(made, pool)
    assert sum(title.startswith("unit-00003") for _w, title in pool.calls) == coordinator.ALLOWED_FAILURES + 1


def test_an_error_that_no_retry_can_cure_ends_the_carriage_at_once(source, any_target):
    made = job_of(source, any_target)
    error = NotFoundError("the job has ended", uri=made.uri, cure="run the same command again").to_json()
    pool = ImaginaryPool("ab", lambda _w, function, _c: {"error": error} if makes(function) else None)
    with pytest.raises(StorageError, match="the job has ended") as caught:
        carried(made, pool)
    assert not caught.value.retryable
    assert caught.value.cure == "run the same command again"


def test_a_unit_that_kills_its_workers_ends_the_carriage(source, any_target):
    made = job_of(source, any_target)

    def faults(worker, function, call):
        if makes(function) and pool.calls[-1][1].startswith("unit-00003"):
            pool.workers ^= {worker, f"next {call}"}
            return HANGS
        return None

    pool = ImaginaryPool("a", faults)
    with pytest.raises(StorageError, match=r"11 workers were lost while making unit 00003-"):
        carried(made, pool)


def test_a_unit_that_another_process_makes_is_looked_at_again(source, any_target):
    busy = [{"busy": True}] * 3
    made = job_of(source, any_target)
    pool = ImaginaryPool("ab", lambda _w, function, _c: busy.pop() if busy and makes(function) else None)
    assert sorted(carried(made, pool)) == list(range(12))


def test_the_claim_of_a_worker_holds_off_the_workers_of_others_alone(source, any_target, monkeypatch):
    made = made_job(source, any_target)
    [first_task, second_task, *_], records = made.tasks, made.records
    as_elsewhere(monkeypatch)
    first = Claims(records, coordinator="aaaa").take(first_task, records.names())
    assert Claims(records).take(first_task, records.names()) is None
    assert Claims(records, coordinator="bbbb").take(first_task, records.names()) is None
    second = Claims(records, coordinator="aaaa").take(first_task, records.names())
    assert second.attempt == 1
    assert second.before == {first.token}
    without = Claims(records).take(second_task, records.names())
    assert without is not None
    assert Claims(records).take(second_task, records.names()) is None


def test_a_worker_answers_what_went_wrong(source, any_target, tmp_path):
    made = job_of(source, any_target)
    made.records.end()
    answer = working.do(made.uri, "12345678", "receipt", 0)
    assert answer["error"]["what"] == "no job found"
    assert not answer["error"]["retryable"]


# How long the coordinator waits for workers, what it says meanwhile, and what its error says.


@pytest.fixture
def target_of_wait(tmp_path):
    return str(tmp_path / "out")


class SpotPool(ImaginaryPool):
    """Its machines are all lost in the fourth unit; another comes when `seconds` have passed."""

    def __init__(self, seconds):
        super().__init__("ab", self._lost)
        self.seconds, self.since = seconds, None

    def present(self):
        if self.since is not None and time.monotonic() - self.since > self.seconds:
            self.workers = {"c"}
        return super().present()

    def _lost(self, worker, function, _call):
        if worker == "c" or not makes(function) or sum("unit-" in title for _w, title in self.calls) < 4:
            return None
        self.since, self.workers = self.since or time.monotonic(), set()
        return HANGS


def test_machines_that_are_lost_together_are_waited_for(source, target_of_wait, tmp_path, monkeypatch):
    made, pool = job_of(source, target_of_wait), SpotPool(0.6)
    with waits_reported_at_once(monkeypatch) as lines:
        assert sorted(carried(made, pool)) == list(range(12))
    line = f"{made.uri}: waiting for a worker that can make units (there is none; gives up after 10:00)"
    assert lines.count(line) == 1
    assert len(pool.units_of("c")) == 9
    assert committed_as_by_one(made, source, tmp_path)


def test_the_error_says_that_the_next_run_resumes_which_it_does(
    source, target_of_wait, tmp_path, monkeypatch
):
    made = job_of(source, target_of_wait)
    monkeypatch.setenv("WHERRY_WORKER_WAIT", "0.2s")
    with pytest.raises(StorageError, match="no worker can make units; there is none") as caught:
        carried(made, SpotPool(60))
    assert caught.value.retryable
    assert "run the same command again; it resumes with the units that are left" in caught.value.cure
    assert "WHERRY_WORKER_WAIT" in caught.value.cure
    assert len(receipts(target_of_wait)) == 3
    pool = ImaginaryPool("d")
    assert sorted(carried(job_of(source, target_of_wait), pool)) == list(range(12))
    assert len(pool.units_of("d")) == 9
    assert committed_as_by_one(made, source, tmp_path)


def test_workers_that_have_failed_their_proof_are_named_and_waited_for_a_minute_at_most(
    source, target_of_wait, monkeypatch
):
    """Who has another key, wherry or storage will not get better; a new machine may come."""
    made = job_of(source, target_of_wait)
    monkeypatch.setattr(coordinator, "REFUSED_SECONDS", 0.3)
    pool = ImaginaryPool("abcde", lambda *_: {"problem": "it has another plan"})
    rows = "a: it has another plan; b: it has another plan; c: it has another plan; 2 others"
    with waits_reported_at_once(monkeypatch) as lines, pytest.raises(StorageError, match=f"units; {rows} "):
        carried(made, pool)
    assert f"{made.uri}: waiting for a worker that can make units ({rows}; gives up after 0 s)" in lines


def test_a_machine_that_is_replaced_by_one_that_cannot_is_still_waited_for(
    source, target_of_wait, monkeypatch
):
    """A coordinator that had workers waits the whole time for the next."""
    made, pool = job_of(source, target_of_wait), SpotPool(0.1)
    monkeypatch.setattr(coordinator, "REFUSED_SECONDS", 0.0)
    real = working.prove

    def late(worker, function, call):
        if worker == "c" and function == "prove":
            pool.workers, pool.present = {"d"}, lambda: {"c"} if time.monotonic() - begun < 0.6 else {"d"}
            return {**real(made.uri, "00000000"), "problem": "it has another plan"}
        return None if worker == "d" else pool._lost(worker, function, call)

    begun, pool.faults = time.monotonic(), late
    assert sorted(carried(made, pool)) == list(range(12))
    assert pool.units_of("d")


def test_the_time_is_a_setting(tmp_path, monkeypatch):
    assert coordinator.worker_wait() == coordinator.WAIT_SECONDS == 600
    (tmp_path / "wherry.toml").write_text('worker_wait = "30m"\n')
    monkeypatch.setenv("WHERRY_CONFIG", str(tmp_path / "wherry.toml"))
    assert coordinator.worker_wait() == 1800
    monkeypatch.setenv("WHERRY_WORKER_WAIT", "1h")
    assert coordinator.worker_wait() == 3600
    monkeypatch.setenv("WHERRY_WORKER_WAIT", "soon")
    with pytest.raises(UsageError, match="invalid duration 'soon'"):
        coordinator.worker_wait()


# A worker shows what it has before it takes a unit, whoever has started it.


def test_a_worker_without_memory_for_a_unit_takes_none(source, target, monkeypatch):
    """Under Kubernetes and Slurm there is no coordinator that would leave it out."""
    made_job(source, target)
    monkeypatch.setattr(job_module, "available_memory", lambda: 1 << 20)
    with pytest.raises(
        StorageError, match=r"has 1\.0 MB of free memory; a unit needs 1\d\d\.\d MB"
    ) as caught:
        work(target)
    assert caught.value.retryable, "a pod is started again, maybe on another machine"
    assert claimed(target) == []
    monkeypatch.setattr(job_module, "available_memory", lambda: None)  # unknown
    assert len(work(target).made) == 6


@pytest.mark.parametrize("package", job_module._CODECS)
def test_a_worker_without_a_codec_says_which(monkeypatch, package):
    for name in job_module._CODECS:  # one that is imported without another fails by itself
        import_module(name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=f"this worker lacks the package {package}") as caught:
        job_module.require_able(None)
    assert f"pip install {package}`" in caught.value.cure


def test_a_worker_of_an_engine_without_a_codec_is_named_and_left_out(source, target, monkeypatch):
    def faults(worker, function, _call):
        if worker != "b" or function != "prove":
            return None
        token = next(name.split("-")[1] for name in made.records.names() if name.startswith("challenge"))
        with monkeypatch.context() as patch:
            patch.setattr(job_module, "_CODECS", ("a_codec_that_is_missing",))
            return working.prove(made.uri, token)

    made, pool = job_of(source, target), ImaginaryPool("ab", faults)
    found = coordinated(made, pool)
    assert pool.units_of("b") == []
    assert "lacks the package a_codec_that_is_missing" in found.left_out["b"]


# A worker that comes back from the dead when all is over.


def test_a_worker_that_comes_back_after_the_commit_changes_nothing(source, target, tmp_path, monkeypatch):
    """Its unit was made by another, the target is committed, the job is removed; `wherry clean` knows what it left."""
    made_job(source, target)
    with slow_worker(target, monkeypatch):
        work(target, expiry=0.3)
        receipt = committed(target)
        before = {entry.name: entry.size for entry in locate(target).walk()}
    assert {entry.name: entry.size for entry in locate(target).walk()} == before
    assert receipt.target.checkpoint_digest == undisturbed(source, tmp_path).checkpoint_digest
    assert wherry.verify(target, level="digest").ok
    assert all(report.removed for report in clean(locate(target).parent.uri, min_age=0))
    assert [name for name in leftover_names(target) if not name.startswith("undisturbed")] == []
    assert wherry.verify(target, level="digest").ok
    if not target.startswith("/"):
        assert uploads_below(target) == []
