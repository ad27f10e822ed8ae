"""What a user sees of faults of gs://, s3:// and az://: real clients, real servers, and a proxy that injects them."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import pytest

from tests.support import buckets
from tests.support.faults import ALWAYS, cut, hang, lose_answer, slow, status
from wherry.errors import NotFoundError, StorageError, UsageError, WherryError
from wherry.store import waits
from wherry.store.local_store import locate
from wherry.store.location import Location
from wherry.store.ranges import read_ranges
from wherry.store.remote_store import RangedStore
from wherry.store.transfers import BufferFill
from wherry.store.waits import RetryPolicy

DATA = bytes(range(256)) * 4
QUICK = RetryPolicy(timeout=10.0, pause=0.01, longest_pause=0.05)
GOOGLE = '{"error": {"code": %d, "message": "%s"}}'
AMAZON = "<Error><Code>%s</Code><Message>said so</Message></Error>"


@pytest.fixture(scope="module", params=["gs", "s3", "az"])
def server(request):
    """Protocol and proxy of a running store with one bucket."""
    with getattr(buckets, request.param)() as proxy:
        buckets.create_bucket(request.param, proxy, "bucket")
        yield request.param, proxy


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """No login of the developer, and no file system of another test; a function that forgets those of this one."""
    variables = {"HOME": tmp_path, "CLOUDSDK_CONFIG": tmp_path, "AWS_CONFIG_FILE": tmp_path / "none"}
    for name, value in {**buckets.KEYS, **variables, "AWS_EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("wherry.store.remote_store._answered", set())
    buckets.forget_filesystems()
    yield buckets.forget_filesystems
    buckets.forget_filesystems()


@pytest.fixture
def store(server, alone, monkeypatch):
    """A store of that server, with short deadlines and pauses; `proxy` injects faults."""
    protocol, proxy = server
    for name, value in buckets.variables(protocol, proxy.url).items():
        monkeypatch.setenv(name, value)
    found = locate(f"{protocol}://bucket/x").store
    found.policy, found.proxy = QUICK, proxy
    proxy.clear()
    found.put("bucket/model", DATA)
    proxy.clear()
    yield found
    proxy.clear()


def filled(store, path, start, stop):
    """What `readinto` puts into a buffer."""
    buffer = bytearray(stop - start)
    return bytes(buffer[: store.readinto(path, start, memoryview(buffer))])


READS = pytest.mark.parametrize(
    "read", [lambda store, *where: store.read(*where), filled], ids=["read", "readinto"]
)


def fails(call):
    with pytest.raises(StorageError) as caught:
        call()
    return caught.value


@READS
def test_an_error_that_passes_is_not_seen(store, read):
    store.proxy.inject(status(503, b"busy"), times=2)
    assert read(store, "bucket/model", 2, 6) == DATA[2:6]
    assert len(store.proxy.requests) == 3


@READS
@pytest.mark.parametrize("start", [len(DATA), len(DATA) + 5000])
def test_a_read_that_begins_at_the_end_or_after_it_gets_nothing_with_one_request(store, read, start):
    """The store answers 416."""
    assert read(store, "bucket/model", start, start + 10) == b""
    assert len(store.proxy.requests) == 1


def test_a_read_of_an_empty_object_gets_nothing(store):
    store.put("bucket/empty", b"")
    assert store.read("bucket/empty", 0, 10) == b""
    assert store.readinto("bucket/empty", 0, memoryview(bytearray(3))) == 0


@pytest.mark.parametrize("call", ["read", "put", "entries"])
def test_an_error_that_stays_ends_after_the_attempts_of_the_policy(store, call):
    store.proxy.inject(status(503, b"busy"), ALWAYS)
    arguments = {"read": ("bucket/model", 0, 4), "put": ("bucket/new", DATA), "entries": ("bucket",)}[call]
    error = fails(lambda: getattr(store, call)(*arguments))
    assert (error.exit_code, error.retryable, error.kind) == (10, True, "server")
    assert f"{QUICK.attempts} attempts" in error.what
    assert error.uri == f"{store.protocol}://{arguments[0]}"
    assert len(store.proxy.requests) == QUICK.attempts, "the library must not retry too"


def test_the_pause_that_the_store_asks_for_is_kept(store):
    store.proxy.inject(status(429, headers=[("Retry-After", "1")]))
    begin = time.monotonic()
    assert store.read("bucket/model", 0, 4) == DATA[:4]
    assert time.monotonic() - begin >= 1.0


def test_a_pause_beyond_the_budget_ends_at_once(store):
    store.proxy.inject(status(429, headers=[("Retry-After", "3600")]), ALWAYS)
    error = fails(lambda: store.read("bucket/model", 0, 4))
    assert (error.kind, error.retryable, len(store.proxy.requests)) == ("throttled", True, 1)
    assert "asks to wait 3600 s" in error.what


def test_a_slow_answer_is_waited_for(store):
    store.proxy.inject(slow(0.5))
    assert store.read("bucket/model", 0, 4) == DATA[:4]
    assert len(store.proxy.requests) == 1


@pytest.mark.parametrize("call", ["read", "put"])
def test_a_store_that_hangs_ends_within_the_budget(store, call):
    store.policy = RetryPolicy(timeout=0.5, pause=0.01)
    store.proxy.inject(hang, ALWAYS)
    arguments = {"read": ("bucket/model", 0, 4), "put": ("bucket/new", b"x")}[call]
    error = fails(lambda: getattr(store, call)(*arguments))
    assert (error.exit_code, error.retryable, error.kind) == (10, True, "timeout")
    assert len(store.proxy.requests) <= QUICK.attempts
    assert "storage_timeout" in error.cure


@READS
def test_a_body_that_is_cut_is_read_again(store, read):
    store.proxy.inject(cut)
    assert read(store, "bucket/model", 0, 1000) == DATA[:1000]
    store.policy = replace(QUICK, attempts=2)  # the client of Azure reads a body three times, with pauses
    store.proxy.inject(cut, ALWAYS)
    error = fails(lambda: read(store, "bucket/model", 0, 1000))
    assert (error.kind, error.retryable) == ("broken", True)
    assert error.uri == f"{store.protocol}://bucket/model"


@pytest.mark.parametrize(
    ("start", "stop", "words"),
    [
        (0, 10, "more than the 10 requested bytes"),
        (10, 20, "the store sent "),
        (10, 2 * len(DATA), "the requested range, which begins at byte 10"),
    ],
)
@pytest.mark.parametrize("by", ["connection", "library"])
def test_an_answer_that_ignores_the_range_is_no_answer(store, monkeypatch, start, stop, words, by):
    if by == "library":
        monkeypatch.setattr(type(store), "_range_request", RangedStore._range_request)
    length = [("Content-Length", str(len(DATA)))]
    store.proxy.inject(lambda handler, _body: handler.reply(200, length, DATA), ALWAYS)
    with pytest.raises(WherryError) as caught:
        filled(store, "bucket/model", start, stop)
    assert caught.value.uri == f"{store.protocol}://bucket/model"
    if store.protocol != "az":  # its client sees by itself that no range came
        assert words in caught.value.what


def test_a_late_answer_does_not_reach_a_buffer_that_was_given_back():
    buffer = bytearray(6)
    filling = BufferFill(memoryview(buffer))
    filling.add(b"ab")
    filling.close()
    filling.add(b"cd")
    assert (buffer, filling.count) == (bytearray(b"ab\0\0\0\0"), 2)


def test_ranges_are_read_at_the_same_time_through_faults(store):
    data = bytes(range(256)) * (12 << 10)  # 3 MiB: two requests
    store.put("bucket/large", data)
    store.proxy.clear()
    store.proxy.inject(status(503, b"busy"), times=2)
    wanted = [(10, 1000), (len(data) - 500, len(data)), (900, 2000)]
    parts = list(read_ranges(Location(store, "bucket/large"), wanted))
    assert [(one.number, bytes(one.data)) for one in parts] == [
        (number, data[slice(*wanted[number])]) for number in (0, 2, 1)
    ]
    assert len(store.proxy.requests) == 4


def test_a_lost_answer_to_a_put_is_not_the_put_of_another(store):
    method = {"gs": "POST", "s3": "PUT", "az": "PUT"}[store.protocol]
    store.proxy.inject(lose_answer, method=method)
    store.put("bucket/once", b"ours", create_only=True)
    assert store.read("bucket/once", 0, 10) == b"ours"
    with pytest.raises(FileExistsError):
        store.put("bucket/once", b"other", create_only=True)


def test_the_object_of_another_is_not_replaced(store, monkeypatch):
    store.put("bucket/existing", b"existing")
    monkeypatch.setattr(store, "stat", lambda _path: None)  # it appears after the check
    with pytest.raises(FileExistsError):
        store.put("bucket/existing", b"ours", create_only=True)
    assert store.read("bucket/existing", 0, 10) == b"existing"


@pytest.mark.parametrize("call", ["stat", "entries", "put"])
def test_a_bucket_that_does_not_exist(store, call):
    with pytest.raises(NotFoundError) as caught:
        getattr(store, call)(f"absent-{call}/x", *([b""] if call == "put" else []))
    assert (caught.value.what, caught.value.uri) == ("bucket not found", f"{store.protocol}://absent-{call}")
    assert store.stat("bucket/absent") is None


@pytest.mark.parametrize("protocol", ["gs", "s3", "az", "http"])
def test_a_server_that_refuses_connections_is_unreachable(protocol, alone, monkeypatch):
    """It was never reached in this process, so its address is probably wrong: few attempts are made."""
    closed = f"127.0.0.1:{buckets.free_port()}"
    for name, value in buckets.variables(protocol, f"http://{closed}").items():
        monkeypatch.setenv(name, value)
    place = locate(f"http://{closed}/model" if protocol == "http" else f"{protocol}://bucket/model")
    error = fails(place.stat)
    assert (error.exit_code, error.retryable, error.kind) == (10, True, "unreachable")
    assert "3 attempts" in error.what


ANSWERS = {
    "gs": [
        (401, GOOGLE % (401, "Anonymous caller does not have storage.objects.get access"), "no-credentials", "gcloud"),
        (401, GOOGLE % (401, "Invalid Credentials"), "expired", "gcloud auth application-default login"),
        (403, GOOGLE % (403, "you@example.com does not have access"), "forbidden", "roles/storage.objectUser"),
        (403, GOOGLE % (403, "The quota of the project was exceeded"), "quota", "raise the quota"),
        (403, GOOGLE % (403, "Rate Limit Exceeded"), "throttled", "[concurrency]"),
    ],
    "s3": [
        (403, AMAZON % "AccessDenied", "forbidden", "s3:GetObject"),
        (403, AMAZON % "ExpiredToken", "expired", "aws configure"),
        (403, AMAZON % "InvalidAccessKeyId", "refused", "aws configure"),
        (403, AMAZON % "RequestTimeTooSkewed", "clock", "set the clock"),
        (301, AMAZON % "PermanentRedirect", "region", "AWS_REGION=eu-west-1"),
        (503, AMAZON % "SlowDown", "throttled", "[concurrency]"),
    ],
    "az": [
        (401, AMAZON % "NoAuthenticationInformation", "no-credentials", "az login"),
        (403, AMAZON % "AuthenticationFailed", "refused", "AZURE_STORAGE_CONNECTION_STRING"),
        (403, AMAZON % "AuthorizationPermissionMismatch", "forbidden", "Storage Blob Data Contributor"),
        (403, AMAZON % "AccountIsDisabled", "forbidden", "az login"),
        (409, AMAZON % "PublicAccessNotPermitted", "no-credentials", "az login"),
        (503, AMAZON % "ServerBusy", "throttled", "[concurrency]"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("call", ["read", "stat"])
def test_every_refusal_has_its_cure(store, call):
    """The answer to HEAD has no body: then another request is made for the reason."""
    for code, body, kind, cure in ANSWERS[store.protocol]:
        store.proxy.clear()
        said = re.findall("<Code>(.*)</Code>", body)
        headers = [("x-amz-bucket-region", "eu-west-1"), *(("x-ms-error-code", one) for one in said)]
        store.proxy.inject(status(code, body.encode(), headers), ALWAYS)
        error = fails(lambda: getattr(store, call)("bucket/model", *([0, 4] if call == "read" else [])))
        if (kind, call, store.protocol) == ("throttled", "stat", "s3"):
            kind = "server"  # noqa: PLW2901  503 alone
        assert (error.kind, error.exit_code) == (kind, 10), body
        assert cure in error.cure or kind == "server", body


def test_s3_without_credentials(alone, monkeypatch):
    for name in buckets.KEYS:
        monkeypatch.delenv(name)
    error = fails(lambda: locate("s3://bucket/model").read(0, 4))
    assert (error.kind, error.retryable) == ("no-credentials", False)
    assert "aws configure" in error.cure


def test_az_without_an_account(alone):
    error = fails(lambda: locate("az://container/model"))
    assert (error.kind, error.retryable, error.uri) == ("no-credentials", False, "az://")
    assert "AZURE_STORAGE_ACCOUNT_NAME" in error.cure


def test_az_with_an_account_but_without_a_login(alone, monkeypatch):
    """There is neither a key, nor a token, nor a managed identity, nor a program of Azure."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("PATH", "")
    error = fails(lambda: locate("az://container/model").read(0, 4))
    assert (error.kind, error.retryable) == ("no-credentials", False)
    assert "az login" in error.cure
    assert len(error.what) < 500


def test_a_malformed_connection_string_of_az(alone, monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "nonsense")
    with pytest.raises(UsageError, match="malformed"):
        locate("az://container/model")


@pytest.mark.parametrize("answers", [True, False])
def test_gs_without_credentials_asks_anonymously_at_once(answers, alone, monkeypatch, tmp_path):
    """The library of Google would ask the metadata server for half a minute, even that of another cloud."""
    paused = []
    monkeypatch.setattr(time, "sleep", paused.append)
    with buckets.files_over_http(tmp_path) as url:
        address = url.removeprefix("http://") if answers else f"127.0.0.1:{buckets.free_port()}"
        monkeypatch.setenv("GCE_METADATA_HOST", address)
        assert locate("gs://bucket/model").store.fs.credentials.token == "anon"
    assert sum(paused) < 1


def test_the_setting_is_the_deadline(store, monkeypatch):
    monkeypatch.setenv(waits.TIMEOUT_VARIABLE, "3m")
    assert locate(f"{store.protocol}://bucket/x").store.policy.timeout == 180
