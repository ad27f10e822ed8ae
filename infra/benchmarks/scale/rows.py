"""Row: one conversion from the double into it, by `wherry work` or Dask, with killed and paused workers or without."""

from __future__ import annotations

import json
import os
import random
import secrets
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.scale.content import layer_bytes
from benchmarks.scale.fleet import Fleet, cpu_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

INFRA = Path(__file__).resolve().parents[2]
CARRIERS = ("work", "dask")
SOURCE, TARGET = "s3://source/model", "s3://target/out"
EXPIRY = 10  # seconds after which a claim that is not renewed expires
_LOOK = 0.25
_MARGIN = 1.01  # of a layer, for what a file has besides
_DASK = {
    "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "10",
    "DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "60s",
    "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "60s",
}


class RowFailedError(RuntimeError):
    """A process of a row failed; the message is what it said."""


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


@dataclass(frozen=True, slots=True)
class RowResult:
    """What was seen of a row.

    Attributes:
        row: what was run.
        start: seconds from the start of the first worker until all had asked for a unit.
        seconds: from then to the receipt of the last unit.
        commit: seconds from that receipt until the target was committed.
        unit_seconds: of each receipt, as they came.
        peak: bytes of memory of the largest worker.
        worker_cpu: processor seconds of all workers, their start included.
        double_cpu: processor seconds of the double until the commit.
        bytes_in, bytes_out: what all workers read and wrote.
        requests: of all workers, by operation.
        digest: of the target.
        verification: what the commit has proved.
        strikes: worker, what was done to it, and the fraction of the units that had receipts.
        load: of the machine before the row.
    """

    row: Row
    start: float
    seconds: float
    commit: float
    unit_seconds: tuple[float, ...]
    peak: int
    worker_cpu: float
    double_cpu: float
    bytes_in: int
    bytes_out: int
    requests: Mapping[str, int]
    digest: str
    verification: Mapping[str, Any]
    strikes: tuple[tuple[str, str, float], ...]
    load: float

    def to_json(self) -> dict[str, Any]:
        """Every field by its name."""
        return asdict(self)


def row_from(data: Mapping[str, Any]) -> RowResult:
    """The inverse of `to_json`."""
    strikes = tuple((str(name), str(state), float(at)) for name, state, at in data["strikes"])
    return RowResult(
        **{**data, "row": Row(**data["row"]), "strikes": strikes, "unit_seconds": tuple(data["unit_seconds"])}
    )


def run(row: Row, folder: Path) -> RowResult:
    """Run one row.

    Args:
        row: what to run.
        folder: an empty folder for logs and settings.

    Raises:
        RowFailedError: a process failed that was not killed, or the target changed after its commit.
    """
    load = os.getloadavg()[0]
    with ExitStack() as stack:
        place = stack.enter_context(_double(row, folder))
        fleet = stack.enter_context(Fleet(folder))
        begun = time.time()
        receipt = _CARRY[row.carrier](_Run(row, fleet, place, _strikes(row)))
        ended = time.time()
        fleet.look()
        tally, before = place.tally(), place.listing()
        if row.paused:
            _wake(fleet, place, before)
        workers = [one for one in fleet.workers if one.name.startswith("worker")]
        moments = tally["moments"] or {"first_claim": begun, "last_receipt": ended}
        return RowResult(
            row=row,
            start=round(moments["first_claim"] - begun, 2),
            seconds=round(moments["last_receipt"] - moments["first_claim"], 2),
            commit=round(ended - moments["last_receipt"], 2),
            unit_seconds=tuple(seconds for _worker, seconds in tally["units"]),
            peak=max(one.peak for one in workers),
            worker_cpu=round(sum(one.cpu for one in workers), 2),
            double_cpu=round(place.cpu(), 2),
            bytes_in=_sum(tally["bytes"], "sent"),
            bytes_out=_sum(tally["bytes"], "received"),
            requests=_requests(tally["requests"]),
            digest=receipt["target"]["checkpoint_digest"],
            verification=receipt["verification"],
            strikes=tuple(place.strikes),
            load=round(load, 1),
        )


class _Place:
    """The double of a row."""

    def __init__(self, url: str, pid: int, folder: Path, key: str) -> None:
        self.url, self._pid, self._folder, self._key = url, pid, folder, key
        self.strikes: list[tuple[str, str, float]] = []

    def environment(self, worker: str) -> dict[str, str]:
        """The variables that lead a process to the double under a name."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("WHERRY_", "AWS_"))}
        own = {"WHERRY_HOME": str(self._folder / "home"), "WHERRY_KEY": self._key, "TMPDIR": str(self._folder)}
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


@dataclass(slots=True)
class _Run:
    """A row that is being run."""

    row: Row
    fleet: Fleet
    place: _Place
    strikes: list[tuple[float, int, str]]

    def wherry(self, *words: str) -> dict[str, Any]:
        """Run a command of wherry to its end, while workers are struck; its JSON."""
        self.start("commit", "-m", "wherry.cli", *words, "--json")
        return self.ended()

    def start(self, name: str, *words: str) -> None:
        """Start a process of this Python."""
        self.fleet.start(name, [sys.executable, *words], self.place.environment(name))

    def ended(self) -> dict[str, Any]:
        """Wait for the process that was started last; its JSON."""
        process = self.fleet.workers.pop()
        try:
            while process.process.poll() is None:
                process.look()
                self.look()
            said = self.fleet.said(process) if process.process.returncode else ""
            if said:
                raise RowFailedError(f"{self.row}: {said}")
            return json.loads((self.fleet.folder / f"{process.name}.log").read_text())
        finally:
            if process.process.poll() is None:
                process.process.kill()
            process.process.wait()
            process.errors.close()

    def look(self) -> None:
        """Wait a moment, note what processes cost, and strike the workers whose moment has come."""
        time.sleep(_LOOK)
        self.fleet.look()
        if not self.strikes:
            return
        done = len(self.place.tally()["units"]) / self.row.units
        while self.strikes and done >= self.strikes[0][0]:
            _at, number, state = self.strikes.pop(0)
            victim = next(one for one in self.fleet.workers if one.name == f"worker-{number}")
            self.fleet.strike(victim, state)
            self.place.strikes.append((victim.name, state, round(done, 3)))

    def target_words(self) -> list[str]:
        """The arguments of a conversion."""
        layer = int(layer_bytes(self.row.size, self.row.units) * _MARGIN)
        words = [SOURCE, TARGET, "--to", "dcp", "--set", f"shard_size={layer}B", "--verify", "store", "--no-lineage"]
        return words if self.row.carrier == "convert" else [*words, "--unit", f"{layer}B"]


def _by_work(run: _Run) -> dict[str, Any]:
    run.wherry("split", *run.target_words())
    for number in range(run.row.workers):
        words = ("work", TARGET, "--json", "--expiry", f"{EXPIRY}s")
        run.start(f"worker-{number}", "-m", "wherry.cli", *words)
    while run.fleet.running:
        run.look()
    for worker in run.fleet.workers:
        if not worker.state and worker.process.returncode:
            raise RowFailedError(f"{worker.name} of {run.row}: {run.fleet.said(worker)}")
    return run.wherry("commit", TARGET)


def _by_dask(run: _Run) -> dict[str, Any]:
    """On loopback and without certificates: for a machine of one's own."""
    file = run.fleet.folder / "scheduler.json"
    host = ("--host", "127.0.0.1")
    run.start(
        "scheduler", "-m", "distributed.cli.dask_scheduler", "--port", "0", "--scheduler-file", str(file),
        "--dashboard-address", "127.0.0.1:0", *host,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not file.exists() or not file.read_text():
        if time.monotonic() > deadline:
            raise RowFailedError(f"no scheduler: {run.fleet.said(run.fleet.workers[0])}")
        time.sleep(_LOOK)
    address = json.loads(file.read_text())["address"]
    for number in range(run.row.workers):
        words = ("--no-nanny", "--nthreads", "1", "--memory-limit", "0", "--no-dashboard", "--local-directory")
        run.start(
            f"worker-{number}", "-m", "distributed.cli.dask_worker", address, *words, str(run.fleet.folder), *host
        )
    return run.wherry("convert", *run.target_words(), "--on", f"dask://{address.removeprefix('tcp://')}")


def _by_one(run: _Run) -> dict[str, Any]:
    """One process without units, under the name of a worker."""
    run.start("worker-0", "-m", "wherry.cli", "convert", *run.target_words(), "--json")
    worker = run.fleet.workers[-1]
    found = run.ended()
    run.fleet.workers.append(worker)
    worker.errors = (run.fleet.folder / "worker-0.log").open("ab")
    return found


_CARRY = {"work": _by_work, "dask": _by_dask, "convert": _by_one}


def _strikes(row: Row) -> list[tuple[float, int, str]]:
    """When which worker is struck: fraction of the units with receipts, number of the worker, and how."""
    chance = random.Random(row.seed)
    victims = chance.sample(range(row.workers), row.killed + row.paused)
    states = ["killed"] * row.killed + ["paused"] * row.paused
    return sorted((chance.uniform(0.1, 0.8), victim, state) for victim, state in zip(victims, states, strict=True))


def _wake(fleet: Fleet, place: _Place, before: str) -> None:
    """Let paused workers go on: they must end by themselves, or idle, and change nothing of what was committed."""
    fleet.resume()
    time.sleep(2 * EXPIRY)
    if place.listing() != before:
        raise RowFailedError("a worker that was paused has changed what was committed")


@contextmanager
def _double(row: Row, folder: Path) -> Iterator[_Place]:
    rate, gate = str(row.rate), str(0 if row.carrier == "convert" else row.workers)
    words = ["--size", str(row.size), "--layers", str(row.units), "--rate", rate, "--workers", gate]
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.scale.server", *words], cwd=INFRA, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        port = int(process.stdout.readline())
        yield _Place(f"http://127.0.0.1:{port}", process.pid, folder, secrets.token_hex(16))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _sum(counts: Mapping[str, Mapping[str, int]], name: str) -> int:
    return sum(count.get(name, 0) for worker, count in counts.items() if worker.startswith("worker"))


def _requests(counts: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for worker, count in counts.items():
        for operation, number in count.items() if worker.startswith("worker") else ():
            found[operation] = found.get(operation, 0) + number
    return dict(sorted(found.items()))
