"""Calls of stores end: retries, deadlines, and which waits are reported, when, and to whom."""

from __future__ import annotations

import logging
import sys
import threading
import time
import types
from email.utils import formatdate

import fsspec
import pytest
import tensorstore
from click.testing import CliRunner
from fsspec.registry import _registry as loaded_classes

from tests.support import buckets
from wherry.cli import cli
from wherry.errors import MissingExtraError, StorageError, UsageError
from wherry.integrations.containers.zarr.kvstore import await_result
from wherry.store import azure, waits
from wherry.store.failures import library_errors, retry_after_of
from wherry.store.local_store import locate
from wherry.store.remote_store import call_with_deadline
from wherry.store.waits import (
    TIMEOUT_VARIABLE,
    RetryPolicy,
    call_with_retries,
    reporting_waits_to,
    storage_timeout,
    waiting,
)


class BusyError(Exception):
    """An answer of a busy store."""

    status = 503

    def __init__(self, retry_after):
        super().__init__("busy")
        self.headers = {"Retry-After": retry_after}


@pytest.mark.parametrize(("ahead", "least"), [(300, 250), (-300, 0)])
def test_a_store_asks_to_wait_until_a_time(ahead, least):
    retry_after = formatdate(time.time() + ahead, usegmt=True)
    assert least <= retry_after_of(BusyError(retry_after)) <= max(ahead, 0)


def test_a_store_asks_to_wait_for_seconds():
    assert retry_after_of(BusyError("7")) == 7


@pytest.mark.parametrize("retry_after", ["", "soon", "-1", "Mon, 99 Nov 2026 99:00:00 GMT"])
def test_a_wait_that_nobody_understands_is_none(retry_after):
    assert retry_after_of(BusyError(retry_after)) is None


def test_pauses_double_with_jitter_up_to_the_longest():
    policy = RetryPolicy()
    for attempt, longest in ((1, 0.5), (2, 1.0), (4, 4.0), (9, 8.0)):
        pauses = {policy.pause_after(attempt, None) for _ in range(50)}
        assert len(pauses) > 1
        assert longest / 2 <= min(pauses) <= max(pauses) <= longest
    assert policy.pause_after(1, 30.0) == 30.0


def test_a_larger_transfer_has_more_time():
    assert RetryPolicy(timeout=60).deadline(0) == 60
    assert RetryPolicy(timeout=60).deadline(64 << 20) == 124


def test_no_attempt_begins_after_the_budget():
    calls = []

    def call(_seconds):
        calls.append(1)
        time.sleep(0.06)
        raise StorageError("no answer", retryable=True)

    with pytest.raises(
        StorageError, match="no answer"
    ):  # and the number of attempts, where there was time for two
        call_with_retries(call, "gs://b/k", RetryPolicy(timeout=0.1, pause=0.0, attempts=100))
    assert len(calls) <= 4


def test_what_a_retry_cannot_help_is_not_repeated():
    calls = []

    def call(_seconds):
        calls.append(1)
        raise StorageError("access denied")

    with pytest.raises(StorageError) as caught:
        call_with_retries(call, "gs://b/k", RetryPolicy())
    assert (caught.value.what, len(calls)) == ("access denied", 1)


def test_a_call_without_a_deadline_of_its_own_is_left_behind():
    ended = threading.Event()
    fs = types.SimpleNamespace(info=lambda _path: ended.wait())
    with pytest.raises(TimeoutError):
        call_with_deadline(fs, "info", 0.1, "x")
    ended.set()


@pytest.mark.parametrize("value", ["0", "soon"])
def test_an_invalid_timeout_is_refused(value, monkeypatch):
    monkeypatch.setenv(waits.TIMEOUT_VARIABLE, value)
    with pytest.raises(UsageError):
        storage_timeout()


def test_flag_before_variable_before_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(waits.TIMEOUT_VARIABLE, raising=False)
    assert storage_timeout() == 60
    (tmp_path / "wherry.toml").write_text('storage_timeout = "2m"\n')
    assert storage_timeout() == 120
    monkeypatch.setenv(waits.TIMEOUT_VARIABLE, "90s")
    assert storage_timeout() == 90
    seen = []
    monkeypatch.setattr("wherry.ledger.resolve.detect_source", lambda _source: seen.append(storage_timeout()))
    CliRunner().invoke(cli, ["--storage-timeout", "30s", "detect", "x"])
    assert seen == [30]
    assert storage_timeout() == 90


def test_a_flag_that_is_no_duration_is_refused():
    done = CliRunner().invoke(cli, ["--storage-timeout", "soon", "detect", "x"])
    assert isinstance(done.exception, UsageError)


@pytest.mark.parametrize("protocol", ["ftp", "sftp", "webdav"])
def test_a_protocol_whose_library_takes_no_uri_is_refused_whatever_is_installed(protocol):
    done = CliRunner().invoke(cli, ["detect", f"{protocol}://host/x"])
    assert isinstance(done.exception, UsageError)
    assert "has no login" in str(done.exception)
    assert "mount it" in done.exception.cure
    assert "install" not in done.exception.cure, "no package would help"


class _Refuses(fsspec.AbstractFileSystem):
    """A file system that cannot be opened as it is."""

    def __init__(self, **options):
        super().__init__(**options)
        raise OSError("cannot load its library\n" + 100 * "/usr/lib/somewhere: not found\n")


class _NeedsMore(fsspec.AbstractFileSystem):
    """A file system that wants an argument."""

    cachable = False

    def __init__(self, token, **options):
        super().__init__(**options)


@pytest.mark.parametrize(("kind", "says"), [(_Refuses, "cannot load its library"), (_NeedsMore, "'token'")])
def test_a_file_system_that_cannot_be_opened_is_refused_in_few_words(kind, says):
    fsspec.register_implementation("unopened", kind, clobber=True)
    with pytest.raises(UsageError, match="does not open with the URI alone") as caught:
        locate("unopened://host/x")
    assert says in caught.value.what
    assert "\n" not in caught.value.what
    assert len(caught.value.what) < 600


def test_a_protocol_that_nobody_knows_is_refused():
    with pytest.raises(UsageError, match="unknown storage protocol nothing://"):
        locate("nothing://host/x")


@pytest.mark.parametrize(("protocol", "package"), [("oss", "ossfs"), ("dropbox", "dropboxdrivefs")])
def test_a_protocol_without_an_extra_names_what_fsspec_needs(protocol, package):
    with pytest.raises(MissingExtraError, match=package) as caught:
        locate(f"{protocol}://host/x")
    assert "wherry[" not in str(caught.value)
    done = CliRunner().invoke(cli, ["detect", f"{protocol}://host/x"])
    assert isinstance(done.exception, MissingExtraError), "and not a verdict about the checkpoint"


@pytest.mark.parametrize(
    ("protocol", "extra", "module"),
    [
        ("s3", "s3", "s3fs"),
        ("gs", "gcs", "gcsfs"),
        ("az", "azure", "adlfs"),
        ("abfs", "azure", "adlfs"),
        ("hf", "hub", "huggingface_hub"),
    ],
)
def test_a_protocol_of_an_extra_names_it(protocol, extra, module, monkeypatch):
    monkeypatch.delitem(loaded_classes, protocol, raising=False)  # another test may have loaded it
    azure._kind.cache_clear()
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError) as caught:
        locate(f"{protocol}://bucket/x")
    assert caught.value.cure.startswith(f"add the extra {extra}: `")
    assert caught.value.exit_code == 11


def test_a_host_that_answers_has_or_lacks_the_file(tmp_path):
    with buckets.files_over_http(tmp_path) as url:
        (tmp_path / "a.bin").write_bytes(b"0123456789")
        place = locate(f"{url}/a.bin")
        assert place.entry is not None
        assert (place.entry.name, place.entry.size, place.uri) == ("a.bin", 10, f"{url}/a.bin")
        assert locate(f"{url}/b.bin").stat() is None


class EntryNotFoundError(Exception):
    pass


class AnswerError(Exception):
    def __init__(self, status):
        super().__init__(f"HTTP {status}")
        self.status = status


def test_an_exception_that_was_handled_before_is_no_cause():
    """A call that is made because another one failed: its own failure counts."""
    try:
        with library_errors("s3", "bucket/first"):
            raise AnswerError(412)
    except FileExistsError:
        with pytest.raises(FileNotFoundError), library_errors("s3", "bucket/second"):
            raise AnswerError(404)  # noqa: B904
        with pytest.raises(FileNotFoundError), library_errors("s3", "bucket/third"):
            raise EntryNotFoundError  # noqa: B904  statuses of the chain count before classes


# Which waits are reported, when, and to whom.


@pytest.fixture
def watch(monkeypatch):
    """A watch of its own, with a clock that the test sets; it looks at once."""
    found = waits._Watch()
    monkeypatch.setattr(waits, "_watch", found)
    return found


def test_a_line_after_two_seconds_and_then_every_half_minute(watch):
    with waiting("gs://bucket/key", 6) as wait:
        begin = wait.since
        assert watch.look(begin + 1.9) == []
        wait.attempt = 2
        assert watch.look(begin + 2) == ["gs://bucket/key has not answered for 2 s; attempt 2 of 6"]
        assert watch.look(begin + 31) == []
        assert watch.look(begin + 43) == ["gs://bucket/key has not answered for 43 s; attempt 2 of 6"]
    assert watch.look(begin + 100) == []


def test_one_line_for_each_bucket_about_its_oldest_wait(watch):
    with waiting("gs://bucket/a", 6) as first, waiting("gs://bucket/b", 6), waiting("s3://other/c", 6):
        assert [line.split()[0] for line in watch.look(first.since + 20)] == ["gs://bucket/a", "s3://other/c"]


def test_the_work_of_others_has_its_own_line(watch):
    with (
        waiting("models:/small", what="another process that moves its aliases") as first,
        waiting("models:/small"),
    ):
        assert watch.look(first.since + 12) == [
            "models:/small: waiting for another process that moves its aliases, 12 s so far",
            "models:/small has not answered for 12 s",
        ]


@pytest.mark.parametrize("listens", [True, False])
def test_the_line_reaches_the_log_or_the_run(listens, watch, monkeypatch, caplog):
    monkeypatch.setattr(waits, "NOTICE_SECONDS", 0.0)
    monkeypatch.setattr(waits, "_LOOK_SECONDS", 0.01)
    lines, reported = [], threading.Event()

    def say(line):
        lines.append(line)
        reported.set()

    caplog.set_level(logging.WARNING, waits.__name__)
    if listens:
        with reporting_waits_to(say), waiting("gs://bucket/key", 6):
            assert reported.wait(10)
        assert not caplog.records
    else:
        with waiting("gs://bucket/key", 6):
            deadline = time.monotonic() + 10
            while not caplog.records and time.monotonic() < deadline:
                time.sleep(0.01)
        lines = [record.getMessage() for record in caplog.records]
    assert lines == ["gs://bucket/key has not answered for 0 s; attempt 1 of 6"]


def test_the_thread_ends_with_the_last_wait(watch, monkeypatch):
    monkeypatch.setattr(waits, "_LOOK_SECONDS", 0.01)
    with waiting("gs://bucket/key"):
        assert watch._running
    deadline = time.monotonic() + 10
    while watch._running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not watch._running


def until(true):
    deadline = time.monotonic() + 10
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert true()


def test_a_thread_that_fails_is_followed_by_another(watch, monkeypatch, caplog):
    def fails(_line):
        raise RuntimeError("of a listener")

    monkeypatch.setattr(waits, "NOTICE_SECONDS", 0.0)
    monkeypatch.setattr(waits, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(threading, "excepthook", lambda _args: None)
    with monkeypatch.context() as patch:
        patch.setattr(waits, "_tell", fails)
        with waiting("gs://a/x"):
            until(lambda: not watch._running)
    with waiting("gs://b/x"):
        until(lambda: any("gs://b/x" in record.getMessage() for record in caplog.records))


# Calls of tensorstore, which reads Zarr and OCDBT from buckets by itself, end too.


def test_a_call_that_hangs_on_a_bucket_ends(monkeypatch):
    monkeypatch.setenv(TIMEOUT_VARIABLE, "0.1")
    _promise, future = tensorstore.Promise.new()
    with pytest.raises(StorageError) as caught:
        await_result(future, "gs://bucket/model")
    assert (caught.value.kind, caught.value.retryable, caught.value.uri) == (
        "timeout",
        True,
        "gs://bucket/model",
    )


def test_a_local_call_has_no_deadline(monkeypatch):
    monkeypatch.setenv(TIMEOUT_VARIABLE, "0.001")
    promise, future = tensorstore.Promise.new()
    threading.Timer(0.1, lambda: promise.set_result(7)).start()
    assert await_result(future, "/data/model") == 7
