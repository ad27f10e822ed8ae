"""A night: errors of sources, targets and services, how it ends, and many checkpoints."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import threading
import time
import tracemalloc
import weakref
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from tests.support.command import cure_of, typed
from tests.support.webhook import webhook_server
from wherry.config.config import in_force
from wherry.config.config import load_config as load_config_of_checkpoints
from wherry.config.file import config_file
from wherry.config.settings import configured_value
from wherry.core.child import NoAnswerError
from wherry.core.threads import ThreadPool
from wherry.errors import (
    CorruptError,
    MismatchError,
    MissingExtraError,
    NotFoundError,
    NotRecordedError,
    StorageError,
    TargetInUseError,
    UnrepresentableError,
    UnsupportedError,
    UsageError,
)
from wherry.ledger import record as ledgers
from wherry.ledger.replay import FAILURE
from wherry.nightly import ending as module
from wherry.nightly import night as nights
from wherry.nightly.ending import blame, ending
from wherry.nightly.metrics import measure
from wherry.nightly.night import run_night
from wherry.nightly.report import failure, markdown
from wherry.nightly.routes import chosen_routes, load_config
from wherry.prove import native
from wherry.trace.lineage import show

CONFIG = """
[routes.r]
root = "runs"
min_age = 0
concurrency = {concurrency}
level = "{level}"
{more}
"""
TARGET = '[[routes.r.targets]]\nformat = "{format}"\nuri = "out/{{run}}-{{step}}{end}"\n'
NPZ, ORBAX = TARGET.format(format="npz", end=".npz"), TARGET.format(format="orbax", end="")


@pytest.fixture
def night(tmp_path):
    def loaded(level="none", more="", runs=("a",), targets=(NPZ,), concurrency=1):
        for run in runs:
            place = tmp_path / "runs" / run / "checkpoint-1"
            if not place.exists():
                place.mkdir(parents=True)
                save_file({"w": np.ones(3, np.float32)}, place / "model.safetensors")
        (tmp_path / "wherry.toml").write_text(
            CONFIG.format(level=level, more=more, concurrency=concurrency) + "\n".join(targets)
        )
        config = load_config(tmp_path / "wherry.toml")
        return SimpleNamespace(run=lambda **how: nights.run_night(config, config.routes, **how))

    return loaded


def raising(error):
    def raised(*_, **__):
        raise error

    return raised


def verification(verdict):
    """The outcome of a verification, as the error has it that says that it was not recorded."""
    return SimpleNamespace(ok=verdict == "ok", to_json=lambda: {"verdict": verdict, "level": "roundtrip"})


# This machine.


@pytest.mark.parametrize(
    "error", [NoAnswerError("it exceeded its memory limit"), MemoryError(), OSError(28, "full")]
)
def test_what_this_machine_cannot_do_is_tried_again(night, monkeypatch, error):
    with monkeypatch.context() as patch:
        patch.setattr(nights, "verify_and_record", raising(error))
        report = night(level="digest").run()
    assert (dict(report.counts), failure(report).exit_code) == ({"failed": 1}, 10)
    assert dict(night().run().counts) == {"converted": 1}


@pytest.mark.parametrize("name", ["WHERRY_CHILD_TIMEOUT", "WHERRY_CHILD_MEMORY"])
def test_a_faulty_limit_is_said_before_a_night_begins(night, monkeypatch, name):
    monkeypatch.setenv(name, "30min")
    with pytest.raises(UsageError, match="30min"):
        night(level="native")


@pytest.mark.parametrize(
    ("output", "kind", "words"),
    [
        (
            '{"unsafe": "torch 2.1 is not safe", "cure": "upgrade it", "cure_in_python": "upgrade it"}',
            MissingExtraError,
            "torch 2.1",
        ),
        (
            '{"unsupported": "no model class X", "cure": "read it", "cure_in_python": "read it"}',
            UnsupportedError,
            "no model class X",
        ),
        ("", NoAnswerError, "printed no result"),
    ],
)
def test_what_is_installed_is_no_property_of_the_checkpoint(monkeypatch, output, kind, words):
    monkeypatch.setattr(
        native.child, "run", lambda *_, **__: SimpleNamespace(code=0, output=output, errors="")
    )
    with pytest.raises(kind, match=words) as caught:
        native._ask({"task": "native"}, 0)
    assert caught.value.cure


def test_a_failure_that_cannot_be_noted_stops_nothing(night, monkeypatch, caplog):
    real, convert = ledgers.record_event, nights.convert_on

    def refused(ledger, kind, digest, body):
        if body["about"] == FAILURE:
            raise StorageError("the ledger is locked")
        return real(ledger, kind, digest, body)

    def first_fails(request, *words, **how):
        if "/a/" in request.source.uri:
            raise UnrepresentableError("no such dtype")
        return convert(request, *words, **how)

    monkeypatch.setattr(ledgers, "record_event", refused)
    monkeypatch.setattr(nights, "convert_on", first_fails)
    report = night(runs=("a", "b")).run()
    assert dict(report.counts) == {"converted": 1, "failed": 1}
    assert failure(report).exit_code == 7
    assert "was not recorded: the ledger is locked" in caplog.text


# Every further night.


def occupied(tmp_path):
    place = tmp_path / "out" / "a-1.npz"
    place.parent.mkdir(exist_ok=True)
    place.write_text("somebody's")
    return place


def test_a_failure_ends_every_night_until_its_cause_is_removed(night, tmp_path):
    place = occupied(tmp_path)
    for came in (["failed"], [], []):
        report = night(runs=("a", "b")).run()
        assert [one.came for one in report.outcomes if one.came == "failed"] == came, "it is tried once"
        assert report.counts["failed"] == 1
        assert (failure(report).exit_code, len(report.failures)) == (8, 1)
    assert "--retry-failed" in failure(report).cure
    assert str(place) in markdown(report).partition("## Failed")[2].partition("##")[0]
    place.unlink()
    done = night(runs=("a", "b")).run(retry_failed=True)
    assert (failure(done), dict(done.counts)) == (None, {"converted": 1, "done": 1})
    assert failure(night(runs=("a", "b")).run()) is None


def test_a_note_without_a_class_is_a_failure_too(night, tmp_path, monkeypatch):
    occupied(tmp_path)
    real = nights.failed_notes
    for kind in ("", "os", "KeyError"):
        monkeypatch.setattr(
            nights, "failed_notes", lambda *given, kind=kind: [{**one, "kind": kind} for one in real(*given)]
        )
        night().run(retry_failed=True)
        assert failure(night().run()).exit_code == 1


def test_what_is_blocked_fails_the_night(night, tmp_path):
    night().run()
    shutil.move(tmp_path / "runs" / "a" / "checkpoint-1", tmp_path / "runs" / "a" / "last")
    report = night(runs=(), targets=[NPZ.replace("{run}", "{run}-{step}")]).run()
    assert dict(report.counts) == {"blocked": 1}
    assert failure(report).exit_code == 2


@pytest.mark.parametrize("at", ["wherry.nightly.survey.examine", "wherry.formats.discover.look"])
def test_what_cannot_be_read_is_neither_damaged_nor_passed_over(night, monkeypatch, at):
    loaded = night()
    monkeypatch.setattr(at, raising(StorageError("the store is unreachable", retryable=True)))
    report = loaded.run()
    assert dict(report.counts) == {"unreadable": 1}
    assert failure(report).exit_code == 10


# After the commit.


def test_a_registry_in_use_is_no_other_run(night, tmp_path, monkeypatch):
    monkeypatch.setattr(nights, "register", raising(TargetInUseError("another process moves aliases")))
    report = night(more='model = "m"').run()
    error = failure(report)
    assert (dict(report.counts), error.exit_code) == ({"not recorded": 1}, 12)
    assert cure_of(error.cure) == f"wherry register {tmp_path / 'out' / 'a-1.npz'} --model m"


@pytest.mark.parametrize("targets", [(NPZ,), (NPZ, ORBAX)])
def test_a_source_that_vanishes_after_the_commit_is_said(night, tmp_path, monkeypatch, targets):
    real = nights.verify_and_record

    def and_vanish(*words, **how):
        shutil.rmtree(tmp_path / "runs" / "a" / "checkpoint-1", ignore_errors=True)
        return real(*words, **how)

    monkeypatch.setattr(nights, "verify_and_record", and_vanish)
    report = night(level="roundtrip", targets=targets).run()
    error = failure(report)
    assert (dict(report.counts), error.exit_code) == ({"not recorded": 1}, 12)
    assert "done, but not verified: file or folder not found" in error.what
    made = tmp_path / "out" / "a-1.npz"
    assert cure_of(error.cure) == f"wherry verify {made} --level digest"
    assert [edge.statement for edge in show(made).edges] == [1]


@pytest.mark.parametrize(("verdict", "registers"), [("ok", True), ("uncompared", False), (None, False)])
def test_a_night_registers_only_what_passed_and_says_what_is_not_recorded(
    night, tmp_path, monkeypatch, verdict, registers
):
    """Without a verdict, it could not be verified."""
    error, registered = NotRecordedError("not recorded: disk full"), []
    error.result = verdict and verification(verdict)
    monkeypatch.setattr(nights, "verify_and_record", raising(error))
    monkeypatch.setattr(nights, "register", lambda uri, *_, **__: registered.append(uri))
    report = night(level="digest", more='model = "m"').run()
    assert (dict(report.counts), failure(report).exit_code) == ({"not recorded": 1}, 12)
    assert "disk full" in failure(report).what
    assert registered == ([str(tmp_path / "out" / "a-1.npz")] if registers else [])


def test_a_night_registers_nothing_that_differs(night, monkeypatch):
    registered = []
    monkeypatch.setattr(nights, "verify_and_record", raising(MismatchError("it differs")))
    monkeypatch.setattr(nights, "register", lambda uri, *_, **__: registered.append(uri))
    report = night(level="digest", more='model = "m"').run()
    assert (dict(report.counts), registered) == ({"failed": 1}, [])


def test_what_vanishes_before_the_commit_is_no_failure(night, tmp_path, monkeypatch):
    convert = nights.convert_on

    def and_vanish(*words, **how):
        shutil.rmtree(tmp_path / "runs" / "a" / "checkpoint-1", ignore_errors=True)
        return convert(*words, **how)

    monkeypatch.setattr(nights, "convert_on", and_vanish)
    report = night(targets=(NPZ, ORBAX)).run()
    assert (dict(report.counts), failure(report)) == ({"vanished": 1}, None)


# The flow.


@pytest.fixture
def after(monkeypatch):
    """What follows the commit in the flow, with stand-ins for the steps."""
    pytest.importorskip("prefect")
    module, registered = import_module("wherry.flows.convert"), []

    def register(uri, *_, **_stores):
        registered.append(uri)
        return {}

    monkeypatch.setattr(module, "register", register)
    monkeypatch.setattr(module, "lineage", lambda _: {})
    monkeypatch.setattr(module, "asset_events", lambda _: None)
    target = module.TargetSpec(target="t", to="npz", model="m")
    spec = module.ConvertSpec(source="s", level="roundtrip", **target.model_dump(exclude_none=True))
    receipt = {"target": {"uri": "t"}, "source": {"uri": "s"}}

    def carried(error):
        monkeypatch.setattr(module, "verify", raising(error))
        refused = []
        return module._after(spec.conversion, 0, receipt, refused), refused, registered

    return carried


def test_the_flow_registers_nothing_that_was_not_verified(after):
    done, refused, registered = after(NotFoundError("nothing is there", uri="s"))
    assert (done["verification"], done["registration"], registered) == (None, None, [])
    assert [one.what for one in refused] == ["done, but not verified: nothing is there"]


def test_the_flow_registers_what_passed_and_is_not_recorded(after):
    error = NotRecordedError("done, but not recorded: disk full")
    error.result = verification("ok")
    done, refused, registered = after(error)
    assert (done["verification"]["verdict"], registered, refused) == ("ok", ["t"], [error])


def test_the_flow_registers_nothing_that_was_not_compared_with_the_ledger(after):
    error = NotRecordedError("not recorded: the ledger was not compared")
    error.result = verification("uncompared")
    done, refused, registered = after(error)
    assert (done["verification"]["verdict"], registered, refused) == ("uncompared", [], [error])


def test_the_flow_ends_where_a_target_differs_and_registers_nothing(after, monkeypatch):
    registered = []
    monkeypatch.setattr("wherry.flows.convert.register", lambda uri, *_, **__: registered.append(uri))
    with pytest.raises(MismatchError, match="differs"):
        after(MismatchError("it differs"))
    assert registered == []


# The order of a night, and what it keeps.


RUNS = ("a", "b", "c", "d")


@pytest.fixture
def interrupt():
    """A function that interrupts the main thread, as Ctrl-C does, and returns once that has been interrupted."""
    interrupted = threading.Event()

    def handle(_number, _frame):
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    def send():
        while (
            not interrupted.is_set()
        ):  # again: a signal just before the thread begins to wait does not wake it
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            interrupted.wait(0.05)

    before = signal.signal(signal.SIGINT, handle)
    yield send
    signal.signal(signal.SIGINT, before)


def test_an_interrupted_night_begins_nothing_more(night, monkeypatch, interrupt):
    """What is at work ends; what waits in the queue is left for the next night.

    The first work interrupts the night when all are in the queue, and ends when the pool has been stopped.
    """
    begun, ended, queued, stopped = [], [], threading.Semaphore(0), threading.Event()
    submit, shutdown = ThreadPool.submit, ThreadPool.shutdown

    def submitted(pool, call, *given):
        future = submit(pool, call, *given)
        if call is carry:
            queued.release()
        return future

    def shut_down(pool, wait=True, *, cancel_futures=False):
        shutdown(pool, wait=False, cancel_futures=cancel_futures)
        stopped.set()
        shutdown(pool, wait=wait)

    def carry(conversion):
        begun.append(conversion.request.source.uri)
        if len(begun) == 1:
            assert all(queued.acquire(timeout=120) for _run in RUNS)
            stopped.clear()
            interrupt()
            assert stopped.wait(120)
        ended.append(conversion.request.source.uri)
        return 0

    monkeypatch.setattr(nights, "_carry", carry)
    monkeypatch.setattr(ThreadPool, "submit", submitted)
    monkeypatch.setattr(ThreadPool, "shutdown", shut_down)
    with pytest.raises(KeyboardInterrupt):
        night(runs=RUNS).run()
    assert len(begun) == 1
    assert ended == begun


def test_a_failure_is_noted_at_once_and_rows_stay_in_order(night, monkeypatch):
    """The first work waits until the failure of the last one is noted."""
    noted = threading.Event()
    real = nights.failed_notes
    monkeypatch.setattr(nights, "failed_notes", lambda *given: (noted.set(), real(*given))[1])

    def carry(conversion):
        if conversion.notes[0]["run"] == "a":
            assert noted.wait(20)
            return 1
        raise UnrepresentableError("no")

    monkeypatch.setattr(nights, "_carry", carry)
    report = night(runs=("a", "b"), more="", concurrency=2).run()
    came = {Path(one.source).parent.name: one.came for one in report.outcomes}
    assert came == {"a": "converted", "b": "failed"}
    assert [Path(one.source).parent.name for one in report.outcomes] == [
        Path(work.source.found.uri).parent.name for plan in report.plans for work in plan.works
    ]


def test_the_report_keeps_no_frames_of_what_failed(night, monkeypatch):
    class Large:
        """What a conversion has in memory."""

    alive = []

    def carry(*_given):
        large = Large()
        alive.append(weakref.ref(large))
        try:
            int(str(large))
        except ValueError as error:
            raise UnrepresentableError("no") from error

    monkeypatch.setattr(nights, "_carry", carry)
    report = night(runs=RUNS).run()
    gc.collect()
    assert [one.came for one in report.outcomes] == ["failed"] * 4
    assert all(one.error is not None for one in report.outcomes)
    assert [one() for one in alive] == [None] * 4


# A night with a damaged source: it succeeds, and says so everywhere that anybody looks.


CONFIG_OF_SOURCES = """
[routes.r]
root = "runs"
min_age = {min_age}
select = "{select}"

[[routes.r.targets]]
format = "npz"
uri = "out/{{run}}-{{step}}.npz"
"""


def _truncated(place):
    data = (place / "model.safetensors").read_bytes()
    (place / "model.safetensors").write_bytes(data[:-4])


def _empty(place):
    (place / "model.safetensors").write_bytes(b"")


def _zeros(place):
    data = (place / "model.safetensors").read_bytes()
    (place / "model.safetensors").write_bytes(bytes(64) + data[64:])


def _cut_header(place):
    (place / "model.safetensors").write_bytes((place / "model.safetensors").read_bytes()[:20])


def _missing_shard(place):
    (place / "model.safetensors").rename(place / "model-00001-of-00002.safetensors")
    where = {"w": "model-00001-of-00002.safetensors", "v": "model-00002-of-00002.safetensors"}
    index = {"metadata": {"total_size": 256}, "weight_map": where}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))


def _junk_sidecar(place):
    (place / "wherry.json").write_text("{")


KINDS = (_truncated, _empty, _zeros, _cut_header, _missing_shard, _junk_sidecar)


@pytest.fixture
def night_of_sources(tmp_path, monkeypatch):
    """A function that runs `wherry nightly`, and gives its exit code and what it prints."""
    (tmp_path / "wherry.toml").write_text(CONFIG_OF_SOURCES.format(min_age=0, select="all"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WHERRY_METRICS", str(tmp_path / "wherry.prom"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with webhook_server("/hooks/T0KEN") as webhook:
        monkeypatch.setenv("WHERRY_NOTIFY_WEBHOOK", webhook.url)
        yield webhook


def _checkpoint(folder, run):
    place = folder / "runs" / run / "checkpoint-1"
    place.mkdir(parents=True)
    save_file({"w": np.ones((8, 4), np.float32)}, place / "model.safetensors")
    return place


@pytest.mark.parametrize("select", ["all", "latest"])
@pytest.mark.parametrize("damage", KINDS)
def test_each_kind_of_damage_reaches_the_log_the_webhook_and_prometheus(
    damage, select, night_of_sources, tmp_path, capfd, caplog
):
    (tmp_path / "wherry.toml").write_text(CONFIG_OF_SOURCES.format(min_age=0, select=select))
    _checkpoint(tmp_path, "good")
    bad = _checkpoint(tmp_path, "bad")
    damage(bad)
    code, printed = typed("nightly", tmp_path, capfd)
    assert code == 0, printed
    [logged] = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert logged.startswith(f"1 converted, 1 damaged: {bad}: ")
    [(_path, body)] = night_of_sources.got
    assert f"warning: {logged}" in body["text"]
    assert body["wherry"]["counts"] == {"converted": 1, "damaged": 1}
    metrics = (tmp_path / "wherry.prom").read_text()
    assert 'wherry_unconverted{route="r"} 1\n' in metrics
    assert 'wherry_last_run_count{flow="nightly-convert",outcome="damaged"} 1\n' in metrics
    assert 'wherry_oldest_unconverted_age_seconds{route="r"} 0\n' not in metrics


@pytest.mark.parametrize("select", ["all", "latest"])
def test_a_checkpoint_that_is_being_written_is_no_damage(select, night_of_sources, tmp_path, capfd):
    """A copy in progress looks cut off: it counts as damaged when nothing has changed for `min_age`."""
    (tmp_path / "wherry.toml").write_text(CONFIG_OF_SOURCES.format(min_age='"15m"', select=select))
    bad = _checkpoint(tmp_path, "bad")
    _truncated(bad)
    assert typed("nightly", tmp_path, capfd)[0] == 0
    assert night_of_sources.got == []
    earlier = time.time() - 3600
    for path in (bad / "model.safetensors", bad):
        os.utime(path, (earlier, earlier))
    assert typed("nightly", tmp_path, capfd)[0] == 0
    assert [body["wherry"]["counts"] for _path, body in night_of_sources.got] == [{"damaged": 1}]


def test_a_damaged_newest_step_is_reported_although_an_earlier_one_is_converted(
    night_of_sources, tmp_path, capfd
):
    (tmp_path / "wherry.toml").write_text(CONFIG_OF_SOURCES.format(min_age=0, select="latest"))
    place = _checkpoint(tmp_path, "run")
    newest = place.with_name("checkpoint-2")
    shutil.copytree(place, newest)
    _truncated(newest)
    code, printed = typed("nightly", tmp_path, capfd)
    assert (code, (tmp_path / "out" / "run-1.npz").exists()) == (0, True), printed
    [(_path, body)] = night_of_sources.got
    assert f"warning: 1 converted, 1 damaged: {newest}: " in body["text"]


def test_a_night_without_damage_says_nothing_more(night_of_sources, tmp_path, capfd):
    _checkpoint(tmp_path, "good")
    code, printed = typed("nightly", tmp_path, capfd)
    assert (code, "warning" in printed, night_of_sources.got) == (0, False, [])
    assert 'wherry_unconverted{route="r"} 0\n' in (tmp_path / "wherry.prom").read_text()


def test_an_event_that_no_route_takes_is_announced_when_it_is_sent(
    night_of_sources, tmp_path, capfd, monkeypatch
):
    elsewhere = _checkpoint(tmp_path / "others", "a")
    with webhook_server("/api/events") as prefect:
        monkeypatch.setenv("PREFECT_API_URL", prefect.url.removesuffix("/events"))
        code, printed = typed(f"emit {elsewhere}", tmp_path, capfd)
        assert code == 0, printed
        assert (
            "warning: the event will not convert HOME/others/runs/a/checkpoint-1: no route takes it: r: "
            in printed
        )
        cure = printed.partition("note: `")[2].partition("`")[0]
        code, explanation = typed(cure.removeprefix("wherry "), tmp_path, capfd)
        assert code == 0
        assert "it is not below" in explanation
        wanted = _checkpoint(tmp_path, "b")
        code, printed = typed(f"emit {wanted}", tmp_path, capfd)
    assert (code, "warning" in printed) == (0, False)


# How a workflow ends: which notices are sent, what the metrics note, and that neither ever fails it.


@pytest.fixture
def notices(monkeypatch):
    sent = []
    monkeypatch.setattr(module, "send", lambda _, notice, page=None: sent.append((notice, page)) or "sent")
    return sent


def noted():
    return {(one.name, dict(one.labels).get("outcome")): one.value for one in measure([])}


def test_a_good_end(notices):
    with ending("promote", "Promotion", page="https://ui.example/1") as end:
        end.counts = {"promoted": 1}
    [(notice, page)] = notices
    assert (notice.title, notice.counts, notice.first_error) == ("Promotion", {"promoted": 1}, None)
    assert page == "https://ui.example/1"
    assert noted()["wherry_last_run_ok", None] == 1
    assert noted()["wherry_last_run_count", "promoted"] == 1


def test_an_error_is_reported_noted_and_goes_on(notices):
    with pytest.raises(CorruptError), ending("promote", "Promotion", only_failures=True):
        raise CorruptError("torn", uri="/a", path="w", cure="copy it again")
    [(notice, _page)] = notices
    assert (notice.first_error, notice.cure, notice.counts) == ("/a: w: torn", "copy it again", {"failed": 1})
    assert noted()["wherry_last_run_ok", None] == 0


def test_a_bug_is_reported_and_what_the_block_said_stays(notices):
    with pytest.raises(ZeroDivisionError), ending("audit", "Audit") as end:
        end.first_error, end.counts = "said before", {"errors": 2}
        raise ZeroDivisionError("by zero")
    assert notices[0][0].first_error == "said before"
    with ending("audit", "Audit") as end:
        blame(end, ZeroDivisionError("by zero"))
    assert notices[1][0].first_error == "ZeroDivisionError: by zero"
    assert notices[1][0].cure == "see the log of the run"


def test_nothing_is_reported_of_what_was_not_done_or_is_not_over(notices):
    with ending("nightly-convert", "Night") as end:
        end.silent = True
    with pytest.raises(KeyboardInterrupt), ending("nightly-convert", "Night"):
        raise KeyboardInterrupt
    with ending("convert-checkpoint", "Conversion", only_failures=True):
        pass
    assert notices == []
    assert noted()["wherry_last_run_ok", None] == 1, "only the conversion ended"


def test_what_cannot_be_noted_does_not_fail_it(notices, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WHERRY_LEDGER", f"sqlite:///{tmp_path / 'file' / 'ledger.db'}")
    with ending("promote", "Promotion"):
        pass
    assert notices
    assert "the end of the run was not recorded for the metrics" in caplog.text


def test_a_configuration_in_force(tmp_path, monkeypatch):
    file = tmp_path / "some.toml"
    file.write_text('memory = "1MiB"\n[env.prod]\nmemory = "2MiB"\n')
    monkeypatch.setenv("WHERRY_ENV", "prod")
    with in_force(file) as loaded:
        assert loaded.settings.memory == configured_value("memory") == "2MiB"
    assert config_file() is None
    monkeypatch.delenv("WHERRY_ENV")
    with pytest.raises(CorruptError), in_force(file, "prod"):
        assert configured_value("memory") == "2MiB"
        raise CorruptError("it ends badly")
    with in_force(None) as loaded:
        assert loaded.file is None


# Many small checkpoints in one process: processor time and memory per checkpoint do not grow.


def sources(folder, count):
    """Checkpoints that have been left alone for a long time."""
    for number in range(count):
        place = folder / f"r{number}" / "checkpoint-1"
        place.mkdir(parents=True)
        save_file({"w": np.full((8, 4), number, "f4")}, place / "model.safetensors")
        for path in (place / "model.safetensors", place, place.parent):
            os.utime(path, (1e9, 1e9))
    return folder


def test_conversions_in_one_process(own_home, tmp_path):
    places = sorted(sources(tmp_path / "runs", 33).glob("*/*"))

    def converted(some):
        began = time.process_time()
        for place in some:
            wherry.convert(place, tmp_path / "out" / place.parent.name, to="orbax")
        return time.process_time() - began

    converted(places[:3])  # imports, the ledger's tables
    first = converted(places[3:13])
    gc.collect()
    tracemalloc.start()
    later = [converted(places[13:23])]
    gc.collect()
    held = tracemalloc.get_traced_memory()[0]
    later.append(converted(places[23:]))
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - held
    tracemalloc.stop()
    assert later[1] < 2 * later[0]
    assert later[1] < 10 * first  # tracing costs several times the work
    assert grown < 200_000


def test_a_night_of_many_checkpoints(own_home, tmp_path):
    few, many = (night_of_checkpoints(tmp_path / str(count), count) for count in (6, 30))
    assert many < 10 * few


def night_of_checkpoints(folder, count):
    sources(folder / "runs", count)
    (folder / "wherry.toml").write_text(
        f'[routes.r{count}]\nroot = "{folder}/runs"\n[[routes.r{count}.targets]]\n'
        f'format = "orbax"\nuri = "{folder}/out/{{run}}/{{step}}"\n'
    )
    loaded = load_config_of_checkpoints(folder / "wherry.toml")
    began = time.process_time()
    report = run_night(loaded, chosen_routes(loaded), go=True)
    assert dict(report.counts) == {"converted": count}
    return time.process_time() - began
