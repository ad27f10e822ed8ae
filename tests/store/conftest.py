"""Stores of objects for the contract: memory, fake-gcs-server, moto, Azurite, and SeaweedFS with --slow."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from uuid import uuid4

import pytest

from tests.support import buckets, store_rules
from wherry.store.local_store import locate
from wherry.store.location import Location
from wherry.store.memory import MemoryStore
from wherry.store.store import PartLimits, Store
from wherry.store.waits import RetryPolicy

SMALL = 4096  # bytes of the parts of a store whose limits can be set
_PROTOCOLS = {"seaweed": "s3"}
QUICK = RetryPolicy(timeout=10.0, pause=0.01, longest_pause=0.05)


@dataclass
class Backend:
    """One store that tests may fill.

    Attributes:
        name: `memory`, `gs`, `s3`, `az` or `seaweed`.
        place: an empty folder of the test.
        objects: its Store.
        proxy: in front of the server; None for memory.
        part: bytes of the smallest part.
    """

    name: str
    place: Location
    objects: Store
    proxy: object
    part: int

    def path(self, name):
        return self.place.join(name).path


@contextmanager
def server_of(name):
    """The proxy of a running server with one bucket."""
    if name == "memory":
        yield None
        return
    with getattr(buckets, name)() as proxy:
        buckets.create_bucket(_PROTOCOLS.get(name, name), proxy, "bucket")
        proxy.rules = {"gs": store_rules.google, "s3": store_rules.amazon, "az": store_rules.azure}.get(name)
        yield proxy


@pytest.fixture(scope="session")
def servers():
    """Starts a server when a test first needs it."""
    with ExitStack() as stack:
        found = {}

        def proxy_of(name):
            if name not in found:
                found[name] = stack.enter_context(server_of(name))
            return found[name]

        yield proxy_of


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """No login of the developer, and no file system of another test."""
    variables = {"HOME": tmp_path, "CLOUDSDK_CONFIG": tmp_path, "AWS_CONFIG_FILE": tmp_path / "none"}
    for name, value in {**buckets.KEYS, **variables, "AWS_EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(name, str(value))
    buckets.forget_filesystems()
    yield
    buckets.forget_filesystems()


@pytest.fixture
def make_backend(servers, alone, monkeypatch):
    """Name → Backend."""

    def make(name):
        proxy = servers(name)
        monkeypatch.setattr(MemoryStore, "part_limits", PartLimits(SMALL, 1 << 20, 100))
        monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", SMALL)
        protocol = _PROTOCOLS.get(name, name)
        for variable, value in buckets.variables(protocol, proxy.url).items() if proxy else ():
            monkeypatch.setenv(variable, value)
        place = locate(f"{protocol}://bucket/{uuid4().hex}")
        place.store.policy = QUICK
        if proxy:
            proxy.clear()
        return Backend(name, place, place.store, proxy, 5 << 20 if name == "seaweed" else SMALL)

    return make


@pytest.fixture(params=["memory", "gs", "s3", "az", pytest.param("seaweed", marks=pytest.mark.slow)])
def backend(request, make_backend):
    return make_backend(request.param)


@pytest.fixture(params=["gs", "s3", "az", pytest.param("seaweed", marks=pytest.mark.slow)])
def remote(request, make_backend):
    return make_backend(request.param)
