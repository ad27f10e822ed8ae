"""carry: runs the commands of a row: units by `wherry work` or by Dask, or one process; strikes workers on the way."""

from __future__ import annotations

import json
import random
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.scale.content import layer_bytes
from benchmarks.scale.place import EXPIRY

if TYPE_CHECKING:
    from benchmarks.scale.fleet import Fleet
    from benchmarks.scale.place import Place, Row

SOURCE, TARGET = "s3://source/model", "s3://target/out"
MEMORY = 72 << 20  # the budget of each process: a worker of Dask has 38 MB of libraries that others have not
_LOOK = 0.25
_MARGIN = 1.01  # of a layer, for what a file has besides


class RowFailedError(RuntimeError):
    """A process of a row failed; the message is what it said."""


@dataclass(slots=True)
class RowRun:
    """A row that is being run."""

    row: Row
    fleet: Fleet
    place: Place
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
            text = (self.fleet.folder / f"{process.name}.log").read_text()
            return json.loads(text[text.index("{") :])  # warnings come first
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
        words = [
            SOURCE,
            TARGET,
            "--to",
            "dcp",
            "--set",
            f"shard_size={layer}B",
            "--verify",
            "store",
            "--no-lineage",
            "--memory",
            str(MEMORY),
        ]
        return words if self.row.carrier == "convert" else [*words, "--unit", f"{layer}B"]


def _by_work(run: RowRun) -> dict[str, Any]:
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


def _by_dask(run: RowRun) -> dict[str, Any]:
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
        words = (
            "--no-nanny",
            "--nthreads",
            "1",
            "--memory-limit",
            "0",
            "--no-dashboard",
            "--local-directory",
        )
        run.start(
            f"worker-{number}",
            "-m",
            "distributed.cli.dask_worker",
            address,
            *words,
            str(run.fleet.folder),
            *host,
        )
    return run.wherry("convert", *run.target_words(), "--on", f"dask://{address.removeprefix('tcp://')}")


def _by_one(run: RowRun) -> dict[str, Any]:
    """One process without units, under the name of a worker."""
    run.start("worker-0", "-m", "wherry.cli", "convert", *run.target_words(), "--json")
    worker = run.fleet.workers[-1]
    found = run.ended()
    run.fleet.workers.append(worker)
    worker.errors = (run.fleet.folder / "worker-0.log").open("ab")
    return found


CARRY = {"work": _by_work, "dask": _by_dask, "convert": _by_one}


def strikes_of(row: Row) -> list[tuple[float, int, str]]:
    """When which worker is struck: fraction of the units with receipts, number of the worker, and how."""
    chance = random.Random(row.seed)
    victims = chance.sample(range(row.workers), row.killed + row.paused)
    states = ["killed"] * row.killed + ["paused"] * row.paused
    return sorted(
        (chance.uniform(0.1, 0.8), victim, state) for victim, state in zip(victims, states, strict=True)
    )
