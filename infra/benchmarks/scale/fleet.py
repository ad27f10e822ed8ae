"""Fleet: worker processes on this machine, and what each has cost; some are killed or paused while units are made."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Self

_KIB = 1024
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class WorkerProcess:
    """One process.

    Attributes:
        name: also its access key.
        process: the process.
        errors: what it says.
        peak: bytes of resident memory at its highest.
        cpu: processor seconds.
        state: empty, `killed` or `paused`.
    """

    name: str
    process: subprocess.Popen[bytes]
    errors: IO[bytes]
    peak: int = 0
    cpu: float = 0.0
    state: str = ""

    def look(self) -> None:
        """Note its memory and processor time."""
        with suppress(OSError):
            status = Path(f"/proc/{self.process.pid}/status").read_text()
            self.peak = max(self.peak, _field(status, "VmHWM"))
            self.cpu = max(self.cpu, cpu_seconds(self.process.pid))


@dataclass(slots=True)
class Fleet:
    """The processes of one row; all of them end with the block.

    Attributes:
        folder: for what they say.
        workers: the processes, in the order in which they were started.
    """

    folder: Path
    workers: list[WorkerProcess] = field(default_factory=list[WorkerProcess])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.process.kill()
            worker.process.wait()
            worker.errors.close()

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> WorkerProcess:
        """Start a process."""
        errors = (self.folder / f"{name}.log").open("wb")
        process = subprocess.Popen(
            command, env=dict(environment), cwd=self.folder, stdout=errors, stderr=subprocess.STDOUT
        )
        self.workers.append(WorkerProcess(name, process, errors))
        return self.workers[-1]

    def look(self) -> None:
        """Note memory and processor time of all."""
        for worker in self.workers:
            worker.look()

    def strike(self, worker: WorkerProcess, state: str) -> None:
        """Kill or pause a worker."""
        worker.look()
        worker.process.send_signal(signal.SIGKILL if state == "killed" else signal.SIGSTOP)
        worker.state = state

    def resume(self) -> None:
        """Let paused workers go on."""
        for worker in self.workers:
            if worker.state == "paused":
                worker.process.send_signal(signal.SIGCONT)

    @property
    def running(self) -> list[WorkerProcess]:
        """Those that have neither ended nor been struck."""
        return [one for one in self.workers if not one.state and one.process.poll() is None]

    def said(self, worker: WorkerProcess) -> str:
        """The end of what a process has said."""
        return (self.folder / f"{worker.name}.log").read_text(errors="replace")[-2000:]


def cpu_seconds(pid: int) -> float:
    """Processor seconds of a process so far.

    Raises:
        OSError: it has ended.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _field(status: str, name: str) -> int:
    lines = [line for line in status.splitlines() if line.startswith(name)]
    return int(lines[0].split()[1]) * _KIB if lines else 0  # a process that has ended has no memory
