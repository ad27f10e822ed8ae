"""ray_actors: a pool of Ray actors, of a cluster that runs, or of one on this machine that ends with the conversion.

Each worker is an actor that is pinned to its node and never restarted. A cluster gets one for each of its nodes, since
a worker uses the cores of its machine; the coordinator decides which unit goes to which.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import tempfile
from collections import Counter
from collections.abc import Collection, Generator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import ray  # pyright: ignore[reportMissingImports]  too large for the environment of the tests
from ray.util.scheduling_strategies import (  # pyright: ignore[reportMissingImports]
    NodeAffinitySchedulingStrategy,
)

from wherry.errors import StorageError, UsageError
from wherry.store.folders import PREFIX
from wherry.workers.coordinator import WorkerFunction, Workplace
from wherry.workers.engines import variables

_STORE_BYTES = 80 << 20  # of Ray's object store, which nothing of a checkpoint passes through
# Of a cluster on this machine, unless the user has set them: it sends no statistics, and takes only those who know the
# token of this process. Ray reads them once, so they stay.
_SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


class RayActor:
    """The actor that runs on a worker."""

    def run(self, function: WorkerFunction, *arguments: Any) -> Mapping[str, Any]:
        """Call a function of `wherry.workers`."""
        return function(*arguments)


class _PinnedActor(NamedTuple):
    node: str
    actor: Any


class RayPool:
    """The actors of this conversion; see WorkerPool."""

    def __init__(self, address: str, each: int) -> None:
        """Begin without actors.

        Args:
            address: of the cluster, for messages.
            each: number of actors on each node.
        """
        self._address, self._each = address, each
        self._actors: dict[str, _PinnedActor] = {}
        self._numbers = itertools.count()

    def present(self) -> Collection[str]:
        """See WorkerPool."""
        try:
            nodes = {row["NodeID"] for row in ray.nodes() if row["Alive"] and row["Resources"].get("CPU")}
        except Exception as error:
            raise _unreachable(self._address, error) from error
        self._actors = {name: one for name, one in self._actors.items() if one.node in nodes}
        here = Counter(one.node for one in self._actors.values())
        for node in nodes:
            for _ in range(self._each - here[node]):
                pinned = NodeAffinitySchedulingStrategy(node, soft=False)
                kind: Any = ray.remote(RayActor)
                actor = kind.options(num_cpus=1, max_restarts=0, scheduling_strategy=pinned).remote()
                self._actors[f"{node[:12]}-{next(self._numbers)}"] = _PinnedActor(node, actor)
        return list(self._actors)

    def submit(self, worker: str, title: str, function: WorkerFunction, *arguments: Any) -> Future[Any]:
        """See WorkerPool."""
        answer = Future[Any]()
        task: Any = self._actors[worker].actor.run.options(name=title).remote(function, *arguments)
        answer.add_done_callback(partial(_forget, task))
        task.future().add_done_callback(partial(self._pass_on, worker, answer))
        return answer

    def dismiss(self) -> None:
        """End all actors."""
        for one in self._actors.values():
            with suppress(Exception):  # it has ended, or the cluster has
                ray.kill(one.actor)

    def _pass_on(self, worker: str, answer: Future[Any], task: Future[Any]) -> None:
        """Give the result of a task to its future; runs in a thread of Ray."""
        error = task.exception()
        if isinstance(error, ray.exceptions.ActorDiedError):
            self._actors.pop(worker, None)
        if not answer.set_running_or_notify_cancel():
            return
        if error is None:
            answer.set_result(task.result())
        else:
            answer.set_exception(error)


@contextmanager
def pool(where: Workplace) -> Generator[RayPool]:
    """Connect to a cluster, or start one on this machine.

    Args:
        where: address of the cluster, or number of workers to start.

    Raises:
        UsageError: this process uses Ray already.
        StorageError: it is not reachable, or did not start.
    """
    if ray.is_initialized():
        raise UsageError("this process uses Ray already", cure="call ray.shutdown() before the conversion")
    with _cluster(where.address) if where.address else _own_cluster(where.workers):
        found = RayPool(where.address, 1 if where.address else where.workers)
        try:
            yield found
        finally:
            found.dismiss()


@contextmanager
def _cluster(address: str) -> Generator[None]:
    try:
        ray.init(f"ray://{address}", namespace="wherry", log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        ray.shutdown()
        raise _unreachable(address, error) from error
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _own_cluster(workers: int) -> Generator[None]:
    """A cluster of one node on loopback."""
    for name, text in _SETTINGS.items():
        os.environ.setdefault(name, text)
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}ray-", ignore_cleanup_errors=True) as folder:
        try:
            ray.init(
                address="local", num_cpus=workers, namespace="wherry", include_dashboard=False,
                log_to_driver=False, logging_level=logging.ERROR, object_store_memory=_STORE_BYTES,
                runtime_env={"env_vars": variables()}, _node_ip_address="127.0.0.1", _temp_dir=folder,
            )  # fmt: skip
        except Exception as error:
            raise _unreachable("", error) from error
        try:
            yield
        finally:
            ray.shutdown()


def _forget(task: Any, answer: Future[Any]) -> None:
    """Have Ray forget a task whose future was cancelled."""
    if answer.cancelled():
        with suppress(Exception):  # it runs already, or the cluster has ended
            ray.cancel(task)


def _unreachable(address: str, error: Exception) -> StorageError:
    return StorageError(
        f"the Ray cluster does not answer: {' '.join(str(error).split())}",
        uri=address and f"ray://{address}",
        cure=f"{'check its address; ' if address else ''}run the same command again; written units are kept",
        retryable=True,
    )
