"""Faults of each request of a store of objects: a call that meets one does what it would have done without."""

from __future__ import annotations

import os
import time

import pytest

from tests.support.faults import ALWAYS, cut, cut_sent, flip_sent, lose_answer, status
from wherry.errors import NotFoundError, StorageError, UnsupportedError

FAULTS = {
    "the answer is lost after the server acted": lose_answer,
    "the server is busy": status(503, b"busy"),
    "the request is cut": cut_sent,
    "the answer is cut": cut,
}


def views(*pieces):
    return [memoryview(one) for one in pieces]


def upload_with(backend, name, *pieces):
    upload = backend.objects.begin(backend.path(name), "run")
    return upload, [backend.objects.put_part(upload, at, views(data)) for at, data in enumerate(pieces)]


def object_of(backend, name, data):
    return backend.objects.put_object(backend.path(name), data, "run")


def content(backend, name):
    return backend.place.join(name).read(0, 1 << 24)


# Each gets a backend and a new name, prepares what it needs, and returns the call and what must hold of its result.
def head(backend, name):
    made = object_of(backend, name, b"data")
    return lambda: backend.objects.head(backend.path(name)), lambda found: found == made


def create(backend, name):
    return lambda: object_of(backend, name, b"data"), lambda _made: content(backend, name) == b"data"


def replace(backend, name):
    made = object_of(backend, name, b"old")
    return (
        lambda: backend.objects.put_object(backend.path(name), b"new", "run", replaces=made.mark),
        lambda found: content(backend, name) == b"new" and found.mark != made.mark,
    )


def remove(backend, name):
    made = object_of(backend, name, b"data")
    return (
        lambda: backend.objects.remove_object(backend.path(name), made.mark),
        lambda done: done and backend.objects.head(backend.path(name)) is None,
    )


def begin(backend, name):
    return (
        lambda: backend.objects.begin(backend.path(name), "run"),
        lambda upload: backend.objects.parts(upload) == [],
    )


def put_part(backend, name):
    data = os.urandom(backend.part)
    upload, _none = upload_with(backend, name)

    def holds(part):
        backend.objects.assemble(upload, [part])
        return content(backend, name) == data

    return lambda: backend.objects.put_part(upload, 0, views(data)), holds


def parts(backend, name):
    upload, made = upload_with(backend, name, bytes(backend.part), b"end")
    return (
        lambda: backend.objects.parts(upload),
        lambda found: [one.mark for one in found] == [one.mark for one in made],
    )


def assemble(backend, name):
    data = os.urandom(backend.part)
    upload, made = upload_with(backend, name, data, b"end")
    return (
        lambda: backend.objects.assemble(upload, made),
        lambda found: (
            (found.run, content(backend, name)) == ("run", data + b"end")
            and not list(backend.objects.uploads(backend.path(name)))
        ),
    )


def abort(backend, name):
    upload, _made = upload_with(backend, name, b"end")
    return (
        lambda: backend.objects.abort(upload),
        lambda _none: not list(backend.objects.uploads(backend.path(name))),
    )


def uploads(backend, name):
    upload, _made = upload_with(backend, name, b"end")
    return (
        lambda: list(backend.objects.uploads(backend.path(name))),
        lambda found: [one.key for one in found] == [upload.key],
    )


def copy(backend, name):
    made = object_of(backend, f"{name}-source", b"data")
    return (
        lambda: backend.objects.copy_object(
            backend.path(f"{name}-source"), made.mark, backend.path(name), "run"
        ),
        lambda found: (found.run, content(backend, name)) == ("run", b"data"),
    )


CALLS = [head, create, replace, remove, begin, put_part, parts, assemble, abort, uploads, copy]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_fault_of_any_request_is_not_seen(remote, call):
    proxy = remote.proxy
    run, holds = call(remote, "clean")
    proxy.clear()
    assert holds(run())
    run, _holds = call(remote, "counted")
    proxy.clear()
    run()
    for number in range(len(proxy.requests)):
        for what, act in FAULTS.items():
            run, holds = call(remote, f"{number}-{act.__name__}-{len(what)}")
            proxy.clear()
            proxy.inject(act, after=number)
            found = run()
            assert not any(fault.times for fault in proxy.faults), f"request {number} was not made"
            proxy.clear()
            assert holds(found), f"{what} at request {number}"


@pytest.mark.parametrize("call", [create, put_part])
def test_the_pause_that_the_store_asks_for_is_kept(remote, call):
    run, holds = call(remote, "model")
    remote.proxy.clear()
    remote.proxy.inject(status(429, b"slower", [("Retry-After", "1")]))
    started = time.monotonic()
    assert holds(run())
    assert time.monotonic() - started >= 1


def test_the_store_refuses_a_part_with_a_flipped_bit(remote):
    """Its checksum catches it, and it is sent again; the assembled bytes are right."""
    data = os.urandom(remote.part)
    upload, _none = upload_with(remote, "model")
    remote.proxy.clear()
    remote.proxy.inject(flip_sent)
    part = remote.objects.put_part(upload, 0, views(data))
    assert len(remote.proxy.requests) == 2
    remote.objects.assemble(upload, [part])
    assert content(remote, "model") == data


def test_a_bit_that_flips_each_time_is_an_error(remote):
    upload, _none = upload_with(remote, "model")
    remote.proxy.clear()
    remote.proxy.inject(flip_sent, ALWAYS)
    with pytest.raises(StorageError) as caught:
        remote.objects.put_part(upload, 0, views(os.urandom(remote.part)))
    assert (caught.value.kind, caught.value.retryable) == ("broken", True)
    remote.proxy.clear()
    assert remote.objects.parts(upload) == []


def test_a_store_that_takes_altered_bytes_is_caught(make_backend):
    """fake-gcs-server does: the checksum that it reports is not ours."""
    remote = make_backend("gs")
    rules, remote.proxy.rules = remote.proxy.rules, None
    try:
        data = os.urandom(remote.part)
        upload, _none = upload_with(remote, "model")
        remote.proxy.inject(flip_sent)
        part = remote.objects.put_part(upload, 0, views(data))
        assert remote.objects.parts(upload) == [part]
        remote.objects.assemble(upload, [part])
        assert content(remote, "model") == data
    finally:
        remote.proxy.rules = rules


def test_what_a_lost_answer_leaves_behind_is_listed(make_backend):
    """S3 began an upload that this run does not know; without parts it costs nothing."""
    remote = make_backend("s3")
    remote.proxy.clear()
    remote.proxy.inject(lose_answer)
    upload = remote.objects.begin(remote.path("model"), "run")
    found = list(remote.objects.uploads(remote.path("model")))
    assert len(found) == 2
    assert upload.key in [one.key for one in found]


@pytest.mark.parametrize("name", ["gs", "s3"])  # SeaweedFS creates a bucket that is absent
def test_an_absent_bucket_is_named(make_backend, name):
    remote = make_backend(name)
    for call in (
        lambda: remote.objects.put_object("absent-bucket/x", b"x", "run"),
        lambda: remote.objects.begin("absent-bucket/x", "run"),
        lambda: remote.objects.head("absent-head/x"),
    ):
        with pytest.raises(NotFoundError, match="bucket not found"):
            call()


def test_a_client_too_old_for_a_condition_is_refused(make_backend, monkeypatch):
    """s3fs leaves out what its client does not know; an object would be replaced."""
    remote = make_backend("s3")
    fs = remote.place.store.fs
    known = fs._get_s3_method_kwargs

    def older(method, **stated):
        return {name: value for name, value in known(method, **stated).items() if name != "IfNoneMatch"}

    monkeypatch.setattr(fs, "_get_s3_method_kwargs", older)
    with pytest.raises(UnsupportedError, match="does not support IfNoneMatch of put_object") as caught:
        remote.objects.put_object(remote.path("x"), b"x", "run")
    assert "pip install" in caught.value.cure


def test_a_store_without_checksums_gets_none(make_backend, monkeypatch):
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    remote = make_backend("s3")
    upload, made = upload_with(remote, "model", bytes(remote.part), b"end")
    assert [part.checksum for part in made] == ["", ""]
    assert remote.objects.assemble(upload, made).checksums == {}
    assert content(remote, "model") == bytes(remote.part) + b"end"
