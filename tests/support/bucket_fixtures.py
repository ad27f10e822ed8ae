"""A bucket of its own for a test, in servers that all tests of a session share; for the conftest of a folder."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count

import pytest

from tests.support import buckets
from wherry.store.local_store import locate

_numbers = count()


def on_both(quick):
    """Parametrize a test by a bucket on gs and one on s3; only one of them in the quick suite."""
    params = [pytest.param(name, marks=[] if name == quick else [pytest.mark.slow]) for name in ("gs", "s3")]
    return pytest.mark.parametrize("bucket", params, indirect=True)


@dataclass
class Bucket:
    """A bucket behind a proxy that injects faults and records requests.

    Attributes:
        protocol: `gs`, `s3` or `az`.
        name: of the bucket.
        proxy: in front of the server.
    """

    protocol: str
    name: str
    proxy: object

    @property
    def uri(self):
        return f"{self.protocol}://{self.name}"

    def at(self, path):
        return locate(f"{self.uri}/{path}")

    def put(self, path, data):
        place = self.at(path)
        place.store.call(place.path, "pipe_file", place.path, data)

    def upload(self, source, path):
        """A file, or all files below a folder."""
        for file in [source] if source.is_file() else (one for one in source.rglob("*") if one.is_file()):
            below = "" if source.is_file() else f"/{file.relative_to(source)}"
            self.put(f"{path}{below}", file.read_bytes())

    def requests(self):
        """The requests since the last call."""
        found = list(self.proxy.requests)
        self.proxy.requests.clear()
        return found


@pytest.fixture(scope="session")
def bucket_servers():
    """A function from protocol to the proxy of a running server, which starts with its first use."""
    proxies = {}
    with ExitStack() as stack:

        def proxy_of(protocol):
            if protocol not in proxies:
                proxies[protocol] = stack.enter_context(getattr(buckets, protocol)())
            return proxies[protocol]

        yield proxy_of


@pytest.fixture(params=["gs", "s3", "az"])
def bucket(request, bucket_servers, monkeypatch, tmp_path):
    proxy, name = bucket_servers(request.param), f"bucket-{next(_numbers)}"
    variables = {"HOME": tmp_path, "CLOUDSDK_CONFIG": tmp_path, "AWS_CONFIG_FILE": tmp_path / "none"}
    for variable, value in {**buckets.KEYS, **variables, "AWS_EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(variable, str(value))
    for variable, value in buckets.variables(request.param, proxy.url).items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", "")
    monkeypatch.delenv("TENSORSTORE_GCS_HTTP_URL")  # which wherry sets, for this process
    buckets.forget_filesystems()
    proxy.clear()
    buckets.create_bucket(request.param, proxy, name)
    proxy.clear()
    yield Bucket(request.param, name, proxy)
    proxy.clear()
    buckets.forget_filesystems()
