"""Row: one conversion from the double into it, by `wherry work` or Dask, with killed and paused workers or without.

Worker processes run on this machine, each with a bandwidth of its own; some are killed or paused while units are made.
The row on SeaweedFS is of a store that keeps every byte, so that the result is read back and compared leaf by leaf.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.bucket_servers import BUCKET, amazon
from benchmarks.inputs import make_huggingface
from benchmarks.scale.server import layer_bytes

EXPIRY = 10  # seconds after which a claim that is not renewed expires
MEMORY = 72 << 20  # the budget of each process: a worker of Dask has 38 MB of libraries that others have not
SOURCE, TARGET = "s3://source/model", "s3://target/out"
INFRA = Path(__file__).resolve().parents[2]
_TICKS = os.sysconf("SC_CLK_TCK")
_LOOK = 0.25
_MARGIN = 1.01  # of a layer, for what a file has besides
_DISK_UNITS = 16
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
        start: seconds from the start of the first worker until every worker had sent its first claim.
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
    own: dict[str, Any] = {
        "row": Row(**data["row"]),
        "strikes": tuple((str(name), str(state), float(at)) for name, state, at in data["strikes"]),
        "unit_seconds": tuple(data["unit_seconds"]),
    }
    return RowResult(**{**data, **own})


# ---- Processes


@dataclass(slots=True)
class WorkerProcess:
    """One process.

    Attributes:
        name: also its access key.
        process: the process.
        log: what it says.
        peak: bytes of resident memory at its highest.
        cpu: processor seconds.
        state: empty, `killed` or `paused`.
    """

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    peak: int = 0
    cpu: float = 0.0
    state: str = ""

    def look(self) -> None:
        """Note its memory and processor time."""
        with suppress(OSError):
            status = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
            peaks = [int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM")]
            self.peak = max(self.peak, *peaks, 0)  # a process that has ended has no memory
            self.cpu = max(self.cpu, cpu_seconds(self.process.pid))

    def end(self) -> None:
        """Kill it, if it runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    @property
    def said(self) -> str:
        """The end of what it has said."""
        return self.log.read_text(errors="replace")[-2000:]


def cpu_seconds(pid: int) -> float:
    """Processor seconds of a process so far.

    Raises:
        OSError: it has ended.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


@dataclass(slots=True)
class RowRun:
    """A row that is being run, against a double of its own.

    Attributes:
        row: what is run.
        folder: for logs and settings.
        url, pid: of the double.
        planned: when which worker is struck: fraction of the units with receipts, number of the worker, and how.
        strikes: those that were, as results have them.
        workers: the processes, in the order in which they were started.
    """

    row: Row
    folder: Path
    url: str
    pid: int
    planned: list[tuple[float, int, str]]
    strikes: list[tuple[str, str, float]] = field(default_factory=list[tuple[str, str, float]])
    workers: list[WorkerProcess] = field(default_factory=list[WorkerProcess])
    _key: str = field(default_factory=lambda: secrets.token_hex(16))

    def start(self, name: str, *words: str) -> WorkerProcess:
        """Start a process of this Python, led to the double under a name."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("WHERRY_", "AWS_"))}
        own = {"WHERRY_HOME": str(self.folder / "home"), "WHERRY_KEY": self._key, "TMPDIR": str(self.folder)}
        keys = {"AWS_ACCESS_KEY_ID": name, "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
        environment = {**kept, **own, **keys, **_DASK, "AWS_ENDPOINT_URL": self.url}
        log = self.folder / f"{name}.log"
        with log.open("wb") as said:
            process = subprocess.Popen(
                [sys.executable, *words],
                env=environment,
                cwd=self.folder,
                stdout=said,
                stderr=subprocess.STDOUT,
            )
        self.workers.append(WorkerProcess(name, process, log))
        return self.workers[-1]

    def wherry(self, name: str, *words: str) -> dict[str, Any]:
        """Run a command of wherry to its end, while workers are struck; its JSON."""
        one = self.start(name, "-m", "wherry.cli", *words, "--json")
        while one.process.poll() is None:
            self.look()
        if one.process.returncode:
            raise RowFailedError(f"{self.row}: {one.said}")
        text = one.log.read_text()
        return json.loads(text[text.index("{") :])  # warnings come first

    def look(self) -> None:
        """Wait a moment, note what processes cost, and strike the workers whose moment has come."""
        time.sleep(_LOOK)
        for worker in self.workers:
            worker.look()
        done = len(self.tally()["units"]) / self.row.units if self.planned else 0.0
        while self.planned and done >= self.planned[0][0]:
            _at, number, state = self.planned.pop(0)
            victim = next(one for one in self.workers if one.name == f"worker-{number}")
            victim.process.send_signal(signal.SIGKILL if state == "killed" else signal.SIGSTOP)
            victim.state = state
            self.strikes.append((victim.name, state, round(done, 3)))

    def wake(self) -> None:
        """Let paused workers go on: they must end by themselves, or idle, and change nothing of what was committed."""
        before = self._asked("target?list-type=2&prefix=")
        for worker in self.workers:
            if worker.state == "paused":
                worker.process.send_signal(signal.SIGCONT)
        time.sleep(2 * EXPIRY)
        if self._asked("target?list-type=2&prefix=") != before:
            raise RowFailedError("a worker that was paused has changed what was committed")

    def tally(self) -> dict[str, Any]:
        """What the double has counted."""
        return json.loads(self._asked("-/tally"))

    def _asked(self, path: str) -> bytes:
        with urllib.request.urlopen(f"{self.url}/{path}") as answer:
            return answer.read()

    def target_words(self) -> list[str]:
        """The arguments of a conversion."""
        layer = f"{int(layer_bytes(self.row.size, self.row.units) * _MARGIN)}B"
        words = [
            SOURCE, TARGET, "--to", "dcp", "--set", f"shard_size={layer}", "--verify", "store",
            "--no-lineage",
        ]  # fmt: skip
        units = [] if self.row.carrier == "convert" else ["--unit", layer]
        return [*words, "--memory", str(MEMORY), *units]


# ---- Carriers


def _by_work(run: RowRun) -> dict[str, Any]:
    run.wherry("split", "split", *run.target_words())
    for number in range(run.row.workers):
        run.start(f"worker-{number}", "-m", "wherry.cli", "work", TARGET, "--json", "--expiry", f"{EXPIRY}s")
    workers = [one for one in run.workers if one.name.startswith("worker")]
    while any(not one.state and one.process.poll() is None for one in workers):
        run.look()
    for worker in workers:
        if not worker.state and worker.process.returncode:
            raise RowFailedError(f"{worker.name} of {run.row}: {worker.said}")
    return run.wherry("commit", "commit", TARGET)


def _by_dask(run: RowRun) -> dict[str, Any]:
    """On loopback and without certificates: for a machine of one's own."""
    file = run.folder / "scheduler.json"
    host = ("--host", "127.0.0.1")
    scheduler = run.start(
        "scheduler", "-m", "distributed.cli.dask_scheduler", "--port", "0", "--scheduler-file", str(file),
        "--dashboard-address", "127.0.0.1:0", *host,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not file.exists() or not file.read_text():
        if time.monotonic() > deadline:
            raise RowFailedError(f"no scheduler: {scheduler.said}")
        time.sleep(_LOOK)
    address = json.loads(file.read_text())["address"]
    words = ("--no-nanny", "--nthreads", "1", "--memory-limit", "0", "--no-dashboard", "--local-directory")
    for number in range(run.row.workers):
        program = ("-m", "distributed.cli.dask_worker", address)
        run.start(f"worker-{number}", *program, *words, str(run.folder), *host)
    return run.wherry(
        "commit", "convert", *run.target_words(), "--on", f"dask://{address.removeprefix('tcp://')}"
    )


def _by_one(run: RowRun) -> dict[str, Any]:
    """One process without units, under the name of a worker."""
    return run.wherry("worker-0", "convert", *run.target_words())


CARRY = {"work": _by_work, "dask": _by_dask, "convert": _by_one}


def strikes_of(row: Row) -> list[tuple[float, int, str]]:
    """When which worker is struck: fraction of the units with receipts, number of the worker, and how."""
    chance = random.Random(row.seed)
    victims = chance.sample(range(row.workers), row.killed + row.paused)
    states = ["killed"] * row.killed + ["paused"] * row.paused
    return sorted(
        (chance.uniform(0.1, 0.8), victim, state) for victim, state in zip(victims, states, strict=True)
    )


@contextmanager
def _running(row: Row, folder: Path) -> Generator[RowRun]:
    """A double, and the processes that are started meanwhile; all of them end with the block."""
    gate = 0 if row.carrier == "convert" else row.workers
    numbers = {"--size": row.size, "--layers": row.units, "--rate": row.rate, "--workers": gate}
    words = [str(word) for pair in numbers.items() for word in pair]
    command = [sys.executable, "-m", "benchmarks.scale.server", *words]
    with subprocess.Popen(command, cwd=INFRA, stdout=subprocess.PIPE, text=True) as double:
        assert double.stdout is not None
        workers: list[WorkerProcess] = []
        try:
            url = f"http://127.0.0.1:{int(double.stdout.readline())}"
            yield RowRun(row, folder, url, double.pid, strikes_of(row), workers=workers)
        finally:
            for worker in workers:
                worker.end()
            double.kill()


def run(row: Row, folder: Path) -> RowResult:
    """Run one row.

    Args:
        row: what to run.
        folder: an empty folder for logs and settings.

    Raises:
        RowFailedError: a process failed that was not killed, or the target changed after its commit.
    """
    load = os.getloadavg()[0]
    with _running(row, folder) as running:
        begun = time.time()
        receipt = CARRY[row.carrier](running)
        ended = time.time()
        for worker in running.workers:
            worker.look()
        tally = running.tally()
        if row.paused:
            running.wake()
        workers = [one for one in running.workers if one.name.startswith("worker")]
        moments = tally["moments"] or {"first_claim": begun, "last_receipt": ended}
        counts = {
            kind: [rows for name, rows in tally[kind].items() if name.startswith("worker")]
            for kind in ("bytes", "requests")
        }
        operations = sorted({name for rows in counts["requests"] for name in rows})
        return RowResult(
            row=row,
            start=round(moments["first_claim"] - begun, 2),
            seconds=round(moments["last_receipt"] - moments["first_claim"], 2),
            commit=round(ended - moments["last_receipt"], 2),
            unit_seconds=tuple(seconds for _worker, seconds in tally["units"]),
            peak=max(one.peak for one in workers),
            worker_cpu=round(sum(one.cpu for one in workers), 2),
            double_cpu=round(cpu_seconds(running.pid), 2),
            bytes_in=sum(rows.get("sent", 0) for rows in counts["bytes"]),
            bytes_out=sum(rows.get("received", 0) for rows in counts["bytes"]),
            requests={name: sum(rows.get(name, 0) for rows in counts["requests"]) for name in operations},
            digest=receipt["target"]["checkpoint_digest"],
            verification=receipt["verification"],
            strikes=tuple(running.strikes),
            load=round(load, 1),
        )


# ---- SeaweedFS


def run_on_disk(size: int, workers: int, folder: Path) -> dict[str, Any]:
    """Convert with read-back through workers, and in one process.

    Args:
        size: bytes of the checkpoint.
        workers: number of `wherry work`.
        folder: an empty folder.

    Returns:
        Seconds of the units and of the commit, what it has proved, and whether the digest is that of one process.

    Raises:
        RowFailedError: a process failed.
    """
    make_huggingface(folder / "model", size)
    load, unit = os.getloadavg()[0], f"{-(-size // _DISK_UNITS)}B"
    source, target, other = (f"s3://{BUCKET}/{name}" for name in ("model", "out", "one"))
    options = ["--to", "dcp", "--set", f"shard_size={unit}", "--no-lineage"]
    with amazon(folder) as store:
        own = {
            "WHERRY_HOME": str(folder / "home"),
            "WHERRY_KEY": "the key of this bench",
            "TMPDIR": str(folder),
        }
        environment = {**os.environ, **store.environment, **own}

        def python(*words: str) -> str:
            command = [sys.executable, "-m", *words]
            done = subprocess.run(
                command, env=environment, cwd=INFRA, capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise RowFailedError(done.stderr or done.stdout)
            return done.stdout

        python("benchmarks.bucket_work", "copy", str(folder / "model"), source)
        python("wherry.cli", "split", source, target, *options, "--unit", unit)
        begun = time.monotonic()
        command = [sys.executable, "-m", "wherry.cli", "work", target, "--json"]
        processes = [
            subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) for _ in range(workers)
        ]
        if max([process.wait() for process in processes], key=abs):
            raise RowFailedError("a worker failed on SeaweedFS")
        made = time.monotonic()
        receipt = json.loads(python("wherry.cli", "commit", target, "--json"))
        committed = time.monotonic()
        one = json.loads(python("wherry.cli", "convert", source, other, *options, "--json"))
    digests = [receipt["target"]["checkpoint_digest"], one["target"]["checkpoint_digest"]]
    return {
        "size": size, "workers": workers, "seconds": round(made - begun, 2), "commit": round(committed - made, 2),
        "verification": receipt["verification"], "digest": digests[0], "same_digest": digests[0] == digests[1],
        "load": round(load, 1),
    }  # fmt: skip
