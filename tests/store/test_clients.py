"""What the clients of Azure and Amazon are given, and what they report."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from itertools import permutations

import pytest

import wherry
from tests.support.object_stores import model
from wherry.errors import StorageError, UsageError
from wherry.store import azure
from wherry.store.amazon import AmazonStore
from wherry.store.azure import first_block, parse_block_name, part_block, parts_of
from wherry.store.content import checksum_of
from wherry.store.local_store import locate
from wherry.store.store import Upload
from wherry.store.waits import RetryPolicy

MD5 = "d41d8cd98f00b204e9800998ecf8427e"


@pytest.fixture
def backend(make_backend):
    return make_backend("az")


def views(*pieces):
    return [memoryview(one) for one in pieces]


def upload_of(backend, name, run="run", data=b"data"):
    upload = backend.objects.begin(backend.path(name), run)
    return upload, [backend.objects.put_part(upload, 0, views(data))]


@pytest.mark.parametrize("run", ["1a2b3c4d", "x" * 32, "x" * 33, "a b", ""])
def test_a_name_says_what_it_is(run):
    first, part = (
        parse_block_name(first_block("0123456789ab", run)),
        parse_block_name(part_block("0123456789ab", 49_999, MD5)),
    )
    assert (first.key, first.number, first.rest) == (
        "0123456789ab",
        None,
        run if run[32:] == "" and " " not in run else "",
    )
    assert (part.key, part.number, part.rest) == ("0123456789ab", 49_999, MD5)
    assert len(first.text) == len(part.text) == 60, "the service allows 64, all of the same length"
    assert parse_block_name("block-00000001") is None


def test_the_block_that_was_sent_last_is_the_part():
    blocks = [(parse_block_name(f"0123456789ab00007{when:011x}{MD5}"), when) for when in (5, 9, 7)]
    (part,) = parts_of(blocks)
    assert (part.number, part.nbytes, part.checksum) == (7, 9, f"md5:{MD5}")


def test_an_abort_leaves_the_object_of_another_run_as_it_is(backend):
    upload, _parts = upload_of(backend, "model", "loser")
    other, parts = upload_of(backend, "model", "winner")
    made = backend.objects.assemble(other, parts)
    late, _parts = upload_of(backend, "model", "late")
    for one in (upload, late):
        backend.objects.abort(one)
    assert backend.objects.head(backend.path("model")) == made
    with pytest.raises(FileExistsError):
        backend.objects.assemble(upload, parts)


def test_blocks_of_another_program_are_no_upload_of_ours(backend):
    place = backend.place.join("model")
    names = ["block-1", "block-2"]

    async def stage(fs):
        blob = azure._blob(fs, place.path)
        for name in names:
            await blob.stage_block(name, b"foreign")

    place.store.request(place.path, stage)
    assert list(backend.objects.uploads(backend.place.path)) == []
    with pytest.raises(StorageError, match="does not accept the request") as caught:
        backend.objects.begin(place.path, "run")
    assert caught.value.kind == "invalid"


def copied(backend, *statuses, abort=None):
    """Copy an object; the service says these statuses before it says `success`, and answers so to an abort."""
    made = backend.objects.put_object(backend.path("source"), b"data", "run")
    states = list(statuses)

    def say(handler, body):
        code, headers, data = handler.forward(body)
        kept = [
            (name, value)
            for name, value in headers
            if name.lower() not in ("x-ms-copy-status", "x-ms-copy-progress")
        ]
        handler.reply(code, [*kept, ("x-ms-copy-status", states.pop(0)), ("x-ms-copy-progress", "1/4")], data)

    backend.proxy.clear()
    backend.proxy.inject(say, len(states), "HEAD", backend.path("target"))
    backend.proxy.inject(abort, 1, "PUT", "comp=copy")
    return backend.objects.copy_object(backend.path("source"), made.mark, backend.path("target"), "other")


def test_a_copy_that_takes_time_is_waited_for(backend, monkeypatch):
    monkeypatch.setattr(azure, "_LOOK_SECONDS", 0.01)
    assert copied(backend, *["pending"] * 3).run == "other"
    assert backend.place.join("target").read(0, 9) == b"data"


def test_a_copy_that_fails_leaves_nothing(backend):
    with pytest.raises(StorageError, match="has not copied the object: failed") as caught:
        copied(backend, "failed")
    assert caught.value.retryable
    assert backend.objects.head(backend.path("target")) is None


def test_a_copy_without_progress_is_stopped(backend, monkeypatch):
    monkeypatch.setattr(azure, "_LOOK_SECONDS", 0.01)
    backend.place.store.policy = RetryPolicy(timeout=0.5, pause=0.01)
    aborted = []

    def abort(handler, _body):
        aborted.append(handler.headers["x-ms-copy-action"])
        handler.reply(204, [("x-ms-version", "2021-12-02")], b"")

    with pytest.raises(StorageError, match="has not copied the object: pending"):
        copied(backend, *["pending"] * 10_000, abort=abort)
    backend.proxy.clear()
    assert aborted == ["abort"]
    assert backend.objects.head(backend.path("target")) is None


def test_a_folder_is_listed_without_those_whose_names_begin_alike(backend):
    for name in ("model/a", "model/b/c", "model-2/d", "model-2/e/f"):
        backend.objects.put_object(backend.path(name), b"x", "run")
    backend.proxy.clear()
    found = backend.place.join("model").entries()
    assert [(entry.name, entry.is_dir, entry.size) for entry in found] == [("a", False, 1), ("b", True, 0)]
    assert len(backend.proxy.requests) == 1
    with pytest.raises(FileNotFoundError):
        backend.place.store.entries(backend.path("mod"))


def test_the_checksums_of_the_parts_are_a_proof(backend, tmp_path):
    source = model(tmp_path / "model", rows=3000, count=4)
    target = backend.place.join("out.safetensors").uri
    receipt = wherry.convert(
        source / "model.safetensors", target, to="safetensors", verify="store", lineage=False
    )
    assert receipt.verification == {"level": "store", "ok": True, "tensors": 4, "checksum": "md5"}
    assert wherry.verify(target, level="digest").ok


def test_a_container_has_several_names(backend):
    backend.objects.put_object(backend.path("x"), b"data", "run")
    for protocol in ("abfs", "abfss"):
        place = locate(f"{protocol}://{backend.path('x')}")
        assert place.read(0, 9) == b"data"
        assert place.uri.startswith(f"{protocol}://")


@pytest.mark.parametrize("host", ["models.dfs.core.windows.net", "models.blob.core.chinacloudapi.cn"])
def test_a_uri_with_an_account_says_where_it_belongs(host):
    with pytest.raises(UsageError, match="names the storage account 'models'") as caught:
        locate(f"abfss://weights@{host}/a/b")
    assert caught.value.cure == "set AZURE_STORAGE_ACCOUNT_NAME=models and write az://weights/a/b"


def test_the_name_of_a_block_has_the_md5_that_the_service_has_compared(backend):
    data = os.urandom(4096)
    upload, (part,) = upload_of(backend, "model", data=data)
    assert part.checksum == f"md5:{parse_block_name(part.mark).rest}" == checksum_of(views(data), "md5")
    assert backend.objects.parts(upload) == [part]


# What is particular to s3://: lists of parts that name a part more than once.


UPLOAD = Upload("bucket/model", "key", "run")
START = datetime(2026, 1, 1, tzinfo=UTC)


def row(number, mark, second):
    moment = {} if second is None else {"LastModified": START + timedelta(seconds=second)}
    return {"PartNumber": number, "Size": 8, "ETag": mark, **moment}


@pytest.fixture
def listed(monkeypatch):
    """Pages of rows → number and mark of the parts that are found."""

    def find(*pages):
        left = list(pages)

        def answer(_objects, _path, method, UploadId, **_after):  # noqa: N803  the name of the client's argument
            assert (method, UploadId) == ("list_parts", "key")
            rows = left.pop(0)
            return {"Parts": rows, "IsTruncated": bool(left), "NextPartNumberMarker": 1}

        monkeypatch.setattr(AmazonStore, "_call", answer)
        return [(part.number, part.mark) for part in AmazonStore.__new__(AmazonStore).parts(UPLOAD)]

    return find


@pytest.mark.parametrize(
    "rows", list(permutations([row(1, "old", 0), row(1, "new", 2), row(1, "older", -1)]))
)
def test_the_state_of_a_part_that_was_sent_last_is_found_in_any_order(listed, rows):
    assert listed([*rows, row(2, "end", 1)]) == [(0, "new"), (1, "end")]


def test_the_states_of_a_part_are_on_different_pages(listed):
    assert listed([row(1, "new", 2)], [row(1, "old", 0), row(2, "end", 1)]) == [(0, "new"), (1, "end")]


@pytest.mark.parametrize("second", [1, None])
def test_a_part_is_left_out_if_nothing_tells_which_state_is_newer(listed, second):
    tied = [row(1, "a", second), row(1, "b", second), row(1, "a", second)]
    assert listed([*tied, row(2, "end", second)]) == [(1, "end")]
    assert listed([*tied, row(1, "older", 0)] if second else tied) == []


def test_a_part_that_is_listed_twice_in_the_same_state_is_found(listed):
    assert listed([row(1, "new", 1), row(1, "new", 1), row(1, "old", 0)]) == [(0, "new")]
