"""child_pool: a pool of processes of this machine, without an engine: each call is a child process of its own.

A child that is killed is one lost attempt. The start of a child costs half a second, a unit of a gigabyte more.
"""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from wherry.carriers.processes import variables
from wherry.errors import StorageError
from wherry.runtime import child, threads
from wherry.text.json_values import json_value

if TYPE_CHECKING:
    from collections.abc import Collection, Generator
    from concurrent.futures import Future

    from wherry.carriers.worker_pool import WorkerFunction
    from wherry.runtime.threads import ThreadPool

_LOOK_SECONDS = 0.1


class ChildPool:
    """Processes of this machine; see WorkerPool."""

    def __init__(self, count: int, executor: ThreadPool, over: threading.Event) -> None:
        """Begin.

        Args:
            count: number of workers.
            executor: has a thread for each.
            over: set when the pool is closed: the children are killed.
        """
        self._names = [f"process-{number}" for number in range(count)]
        self._executor, self._over = executor, over

    def present(self) -> Collection[str]:
        """See WorkerPool."""
        return self._names

    def submit(self, worker: str, title: str, function: WorkerFunction, *arguments: Any) -> Future[Any]:  # noqa: ARG002
        """See WorkerPool."""
        return self._executor.submit(
            self._call, title, f"{function.__module__}:{function.__qualname__}", arguments
        )

    def _call(self, title: str, name: str, arguments: tuple[Any, ...]) -> Any:
        text = json.dumps([name, arguments])
        with child.child_process(
            "wherry.carriers.call", purpose=title, text=text, variables=variables()
        ) as one:
            while not one.has_ended():
                if self._over.wait(_LOOK_SECONDS):
                    raise StorageError("the pool was closed", cure="run the command again")
            done = one.result()
        if done.code:
            raise StorageError(
                f"{title} ended with exit code {done.code}: {done.errors[-200:]}",
                retryable=True,
                cure="run the command again; if it ends so again, with --on threads",
            )
        return json_value(done.output)


@contextmanager
def child_pool(count: int) -> Generator[ChildPool]:
    """Open a pool; at its end, children that still run are killed.

    Args:
        count: number of workers.
    """
    over = threading.Event()
    with threads.executor(count, "wherry-child", numbers=False) as executor:
        try:
            yield ChildPool(count, executor, over)
        finally:
            over.set()
            executor.shutdown(wait=True, cancel_futures=True)
