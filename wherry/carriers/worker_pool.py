"""Worker pool: the workers of an engine, as its adapter shows them to the coordinator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from concurrent.futures import Future

    # What runs on a worker: a function of `wherry.carriers.on_worker`, which takes and returns JSON values.
    WorkerFunction = Callable[..., Mapping[str, Any]]


class Workplace(NamedTuple):
    """Where the workers of a carrier are.

    Attributes:
        address: of an engine that is running; empty to start one on this machine.
        workers: number of workers to start.
    """

    address: str = ""
    workers: int = 1


class WorkerPool(Protocol):
    """Workers, each a process that makes one unit at a time.

    Only names of functions, small arguments and answers of a few hundred bytes pass through the engine: bytes of
    checkpoints go between the workers and the stores.
    """

    def present(self) -> Collection[str]:
        """The names of the workers that are there now; a worker that was restarted has another name.

        Raises:
            StorageError: the engine is not reachable.
        """
        ...

    def submit(self, worker: str, title: str, function: WorkerFunction, *arguments: Any) -> Future[Any]:
        """Run a function on one worker.

        Args:
            worker: its name.
            title: what the engine's dashboard shows.
            function: what is run.
            arguments: JSON values.

        Returns:
            Its answer. The future does not end while the worker hangs, and also not always if it is lost; one that is
            cancelled is forgotten by the engine, whether or not it ran.
        """
        ...


class OpenPool(Protocol):
    """What the adapter of an engine is: opens a pool, as a context manager."""

    def __call__(self, where: Workplace) -> Any:
        """Connect to the engine, or start one on this machine; a `with` block of it gives a WorkerPool.

        Args:
            where: address of the engine, or number of workers to start.

        Raises:
            UsageError: the address is invalid.
            StorageError: the engine is not reachable, or did not start.
        """
        ...
