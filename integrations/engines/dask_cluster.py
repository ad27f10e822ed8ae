"""dask_cluster: a Dask cluster on this machine that ends with the conversion.

The scheduler and the workers are children of this process, on loopback, with certificates for one conversion alone:
Dask runs whatever a client sends it, and every user of a machine can connect to a port.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from distributed.security import Security

from wherry.core import child
from wherry.core.child import Child
from wherry.core.json_document import json_value
from wherry.errors import StorageError, missing_extra
from wherry.store.folders import PREFIX
from wherry.store.waits import waiting
from wherry.workers.coordinator import ALLOWED_LOSSES
from wherry.workers.engines import stop, variables

_START_SECONDS = 60.0
_LOOK_SECONDS = 0.1
_GRACE = 1.0  # seconds in which a worker can end by itself: what it leaves is known
_LAST = 300  # characters of what a process said last
# Of the cluster of this machine: a worker without a sign of life is lost after a minute.
_SETTINGS = {
    "DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "60s",
    "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": str(ALLOWED_LOSSES),
    "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "60s",
    "DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP": "60s",
}


class DaskCluster(NamedTuple):
    """A scheduler and its workers.

    Attributes:
        address: of the scheduler.
        security: what a client needs to connect.
        scheduler, workers: the processes.
    """

    address: str
    security: Security
    scheduler: Child
    workers: list[Child]

    def require_running(self) -> None:
        """Refuse to go on without the scheduler, or without any worker.

        Raises:
            StorageError: they have ended.
        """
        for those in ([self.scheduler], self.workers):
            if all(one.has_ended() for one in those):
                raise _ended_error(those[0])


@contextmanager
def dask_cluster(workers: int) -> Generator[DaskCluster]:
    """Run a cluster while the block runs.

    Args:
        workers: number of workers.

    Raises:
        StorageError: it did not start.
        MissingExtraError: the package for certificates is not installed.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{PREFIX}dask-")))
        security, words = _certificates(folder)
        scheduler, address = _scheduler(stack, folder, words)
        # Without a nanny a worker that is killed stays away; wherry bounds its own memory: Dask does not pause for it.
        more = ["--no-nanny", "--nthreads", "1", "--memory-limit", "0", "--no-dashboard"]
        more = [address, *words, *more, "--local-directory", str(folder)]
        started = [_process(stack, "distributed.cli.dask_worker", folder, more) for _ in range(workers)]
        stack.callback(stop, [scheduler, *started], _GRACE)
        yield DaskCluster(address, security, scheduler, started)


def _ended_error(process: Child) -> StorageError:
    said = process.result().errors.strip()[-_LAST:].splitlines()
    return StorageError(
        f"the Dask cluster of this machine has ended: {said[-1] if said else 'it was killed'}",
        cure="run the same command again; it resumes with the units that are left",
        retryable=True,
    )


def _certificates(folder: Path) -> tuple[Security, list[str]]:
    """Certificates for one cluster: as a client takes them, and as options of scheduler and worker."""
    try:
        made = Security.temporary()
    except ImportError as error:
        raise missing_extra("cryptography", "dask", "a Dask cluster") from error
    texts = {"ca-file": made.tls_ca_file, "cert": made.tls_worker_cert, "key": made.tls_worker_key}
    for name, text in texts.items():
        (folder / name).write_text(text)
    return made, [word for name in texts for word in (f"--tls-{name}", str(folder / name))]


def _scheduler(stack: ExitStack, folder: Path, words: Sequence[str]) -> tuple[Child, str]:
    """Start the scheduler, and wait until it listens; with its address."""
    file = folder / "scheduler.json"
    more = [
        "--protocol",
        "tls",
        "--port",
        "0",
        "--scheduler-file",
        str(file),
        "--dashboard-address",
        "127.0.0.1:0",
    ]
    process = _process(stack, "distributed.cli.dask_scheduler", folder, [*words, *more])
    deadline = time.monotonic() + _START_SECONDS
    with waiting(str(file), what="the scheduler of Dask to listen"):
        while not file.exists() or not file.read_text():
            if process.has_ended() or time.monotonic() > deadline:
                raise _ended_error(process)
            time.sleep(_LOOK_SECONDS)
    return process, json_value(file.read_text())["address"]


def _process(stack: ExitStack, module: str, folder: Path, words: Sequence[str]) -> Child:
    environment = {**variables(), **_SETTINGS, "TMPDIR": str(folder)}
    words = [*words, "--host", "127.0.0.1"]
    return stack.enter_context(child.child_process(module, words, purpose="Dask", variables=environment))
