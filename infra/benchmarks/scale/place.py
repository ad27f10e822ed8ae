"""Place: where a row runs: a double of its own, and the environment that leads each process to it under its name."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.scale.fleet import cpu_seconds

EXPIRY = 10  # seconds after which a claim that is not renewed expires
INFRA = Path(__file__).resolve().parents[2]
_DASK = {
    "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "10",
    "DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "60s",
    "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "60s",
}


@dataclass(frozen=True, slots=True)
class Row:
    """What is run.

    Attributes:
        carrier: `work` or `dask`; `convert` for one process without units.
        workers: number of worker processes.
        size: bytes of the checkpoint.
        rate: bytes a second of each worker, each way; 0 for no limit.
        units: number of units: one for each layer of the checkpoint.
        killed, paused: how many of the workers are killed or paused on the way.
        seed: of the moments at which they are.
    """

    carrier: str
    workers: int
    size: int
    rate: int
    units: int
    killed: int = 0
    paused: int = 0
    seed: int = 0


class Place:
    """The double of a row."""

    def __init__(self, url: str, pid: int, folder: Path, key: str) -> None:
        self.url, self._pid, self._folder, self._key = url, pid, folder, key
        self.strikes: list[tuple[str, str, float]] = []

    def environment(self, worker: str) -> dict[str, str]:
        """The variables that lead a process to the double under a name."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("WHERRY_", "AWS_"))}
        own = {
            "WHERRY_HOME": str(self._folder / "home"),
            "WHERRY_KEY": self._key,
            "TMPDIR": str(self._folder),
        }
        keys = {"AWS_ACCESS_KEY_ID": worker, "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
        return {**kept, **own, **keys, **_DASK, "AWS_ENDPOINT_URL": self.url}

    def tally(self) -> dict[str, Any]:
        """What the double has counted."""
        with urllib.request.urlopen(f"{self.url}/-/tally") as answer:
            return json.load(answer)

    def listing(self) -> str:
        """Names and states of all objects of the target."""
        with urllib.request.urlopen(f"{self.url}/target?list-type=2&prefix=") as answer:
            return answer.read().decode()

    def cpu(self) -> float:
        """Processor seconds of the double."""
        return cpu_seconds(self._pid)


@contextmanager
def double_of(row: Row, folder: Path) -> Generator[Place]:
    rate, gate = str(row.rate), str(0 if row.carrier == "convert" else row.workers)
    words = ["--size", str(row.size), "--layers", str(row.units), "--rate", rate, "--workers", gate]
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.scale.server", *words],
        cwd=INFRA,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        port = int(process.stdout.readline())
        yield Place(f"http://127.0.0.1:{port}", process.pid, folder, secrets.token_hex(16))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
