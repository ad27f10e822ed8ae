"""Emulated buckets, each behind a proxy that injects faults and enforces what the emulator does not."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest

from tests.support import buckets, store_rules
from tests.support.faults import Proxy
from wherry.store.amazon import AmazonStore
from wherry.store.azure import AzureStore
from wherry.store.google import GoogleStore
from wherry.store.store import PartLimits
from wherry.store.waits import RetryPolicy
from wherry.target import uploaded_file

PART = 32 << 10  # bytes of the parts of the tests of faults


@dataclass
class Bucket:
    """One emulated bucket.

    Attributes:
        scheme: of its URIs.
        proxy: in front of the server.
        uri: of the bucket.
    """

    scheme: str
    proxy: Proxy
    uri: str


@pytest.fixture(scope="module", params=list(store_rules.RULES))
def emulated(request):
    """A bucket; the environment of this process leads to it."""
    scheme = request.param
    with getattr(buckets, scheme)() as proxy, pytest.MonkeyPatch.context() as patch:
        buckets.create_bucket(scheme, proxy, "streams")
        patch.setenv("WHERRY_KEY", "the key of the tests of buckets")
        for name, value in buckets.variables(scheme, proxy.url).items():
            patch.setenv(name, value)
        buckets.forget_filesystems()
        yield Bucket(scheme, proxy, f"{scheme}://streams")


@pytest.fixture
def faulty(emulated, monkeypatch):
    """A bucket that refuses what the real store does, small parts, and retries that wait for milliseconds."""
    emulated.proxy.clear()
    emulated.proxy.rules = store_rules.RULES[emulated.scheme]
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1)
    monkeypatch.setattr(uploaded_file, "PART_BYTES", PART)
    for kind in (AmazonStore, AzureStore, GoogleStore):
        monkeypatch.setattr(kind, "part_limits", PartLimits(1, 1 << 30, 1024))
    quick = partial(RetryPolicy, pause=0.01, longest_pause=0.05)
    monkeypatch.setattr("wherry.store.remote_store.RetryPolicy", quick)
    buckets.forget_filesystems()
    yield emulated
    emulated.proxy.clear()
    emulated.proxy.rules = None
    buckets.forget_filesystems()
