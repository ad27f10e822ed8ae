"""dask: a pool of Dask workers, of a cluster that runs, or of one on this machine that ends with the conversion.

Each task is pinned to one worker: which worker gets which unit is the coordinator's decision, which knows more of them
than Dask does. A task has the name of its unit as its key, which dashboards show.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import distributed

from wherry.errors import StorageError
from wherry.integrations.engines.dask_cluster import DaskCluster, dask_cluster
from wherry.workers.coordinator import WorkerFunction, Workplace

if TYPE_CHECKING:
    from distributed.security import Security


_START_SECONDS = 60.0


class DaskPool:
    """The workers of a Dask cluster; see WorkerPool."""

    def __init__(self, client: distributed.Client, address: str, cluster: DaskCluster | None = None) -> None:
        """Take a client.

        Args:
            client: of the cluster.
            address: of its scheduler.
            cluster: where it is one of this machine.
        """
        self._client, self._address, self._cluster = client, address, cluster
        self._numbers = itertools.count()

    def present(self) -> Collection[str]:
        """See WorkerPool."""
        if self._cluster is not None:
            self._cluster.require_running()
        try:
            threads: Any = self._client.nthreads()  # worker → its number of threads
            return list[str](threads)
        except (OSError, ValueError) as error:  # a closed client raises ValueError
            raise _unreachable(self._address, error) from error

    def submit(self, worker: str, title: str, function: WorkerFunction, *arguments: Any) -> Future[Any]:
        """See WorkerPool."""
        answer = Future[Any]()
        task: Any = self._client.submit(
            function, *arguments, key=f"{title}-{next(self._numbers)}", workers=[worker],
            allow_other_workers=False, pure=False,
        )  # fmt: skip
        answer.add_done_callback(partial(_forget, task))
        loop: Any = self._client.loop
        loop.add_callback(_pass_on, self._client, answer, task)
        return answer


@contextmanager
def pool(where: Workplace) -> Generator[DaskPool]:
    """Connect to a cluster, or start one on this machine.

    Args:
        where: address of the scheduler, or number of workers to start.

    Raises:
        StorageError: it is not reachable, or did not start.
    """
    if where.address:
        with _client(where.address) as client:
            yield DaskPool(client, where.address)
        return
    with dask_cluster(where.workers) as made, _client(made.address, made.security) as client:
        yield DaskPool(client, made.address, made)


def _forget(task: Any, answer: Future[Any]) -> None:
    """Have Dask forget a task whose future was cancelled."""
    if answer.cancelled():
        task.cancel()


async def _pass_on(client: Any, answer: Future[Any], task: Any) -> None:
    """Give the result of a task to its future; runs in the event loop of the client.

    A callback of the task would fetch the result in the one thread that Dask has for callbacks: a result whose worker
    is lost, or paused, before it is fetched would hold up all others. The future can be cancelled until the result is
    here, so that the coordinator can give up what it waits for.
    """
    value, problem = None, None
    try:
        value = await client.gather(task, asynchronous=True)
    except BaseException as error:  # noqa: BLE001  whatever it is, the coordinator judges it
        problem = error
    if not answer.set_running_or_notify_cancel():
        return
    if problem is None:
        answer.set_result(value)
    else:
        answer.set_exception(problem)


@contextmanager
def _client(address: str, security: Security | None = None) -> Generator[distributed.Client]:
    try:
        client = distributed.Client(
            address, security=security, timeout=_START_SECONDS, set_as_default=False, name="wherry"
        )
    except (OSError, ValueError) as error:
        raise _unreachable(address, error) from error
    with client:
        yield client


def _unreachable(address: str, error: Exception) -> StorageError:
    return StorageError(
        f"the Dask scheduler does not answer: {error}",
        uri=f"dask://{address.rpartition('//')[2]}",
        cure="check its address; run the same command again; written units are kept",
        retryable=True,
    )
