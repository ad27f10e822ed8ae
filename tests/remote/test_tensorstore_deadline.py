"""Calls of tensorstore, which reads Zarr and OCDBT from buckets by itself, end too."""

from __future__ import annotations

import threading

import pytest
import tensorstore

from wherry.errors import StorageError
from wherry.integrations.containers.zarr.kvstore import await_result
from wherry.remote.waits import TIMEOUT_VARIABLE


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
