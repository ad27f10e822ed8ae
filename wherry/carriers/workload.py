"""Workload: what a coordinator has its workers do: the units of a conversion, or of a checkpoint that is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from wherry.carriers import on_worker
from wherry.units.unit_receipt import done

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from wherry.carriers.challenge import Challenge
    from wherry.carriers.worker_pool import WorkerFunction


class Call(NamedTuple):
    """A function that a worker runs, with its arguments, which are JSON values."""

    function: WorkerFunction
    arguments: tuple[Any, ...]


class Workload(Protocol):
    """Units that any worker can do; see Coordinator."""

    @property
    def uri(self) -> str:
        """What errors name."""
        ...

    @property
    def again(self) -> str:
        """What the same command does when it is run again."""
        ...

    @property
    def names(self) -> Sequence[str]:
        """The names of the units."""
        ...

    def finished(self) -> Mapping[int, Any]:
        """Number of each unit that is done already → its result."""
        ...

    def proof(self) -> Call:
        """What a worker does first: its answer shows whether it can do units."""
        ...

    def problem(self, answer: Mapping[str, Any]) -> str:
        """Why a worker that gave this answer cannot do units; empty if it can."""
        ...

    def unit(self, number: int) -> Call:
        """Do a unit; the answer has `seconds` and what `result` reads, or `busy`, or `error`."""
        ...

    def result(self, number: int, answer: Mapping[str, Any]) -> Any:
        """The result of a unit, from an answer."""
        ...

    def end(self) -> Call:
        """What an idle worker does last."""
        ...


class JobWork:
    """The units of a job; the result of each is the name of the record of its receipt."""

    again = "resumes with the units that are left"

    def __init__(self, challenge: Challenge) -> None:
        self._challenge, self._job = challenge, challenge.job

    @property
    def uri(self) -> str:
        """See Workload."""
        return self._job.uri

    @property
    def names(self) -> list[str]:
        """See Workload."""
        return [unit.name for unit in self._job.units]

    def finished(self) -> dict[int, str]:
        """See Workload."""
        return {number: names[0] for number, names in done(self._job.records.names()).items()}

    def proof(self) -> Call:
        """See Workload."""
        return Call(on_worker.prove, (self._job.uri, self._challenge.token))

    def problem(self, answer: Mapping[str, Any]) -> str:
        """See Workload."""
        return self._challenge.problem(answer)

    def unit(self, number: int) -> Call:
        """See Workload."""
        return Call(on_worker.make, (self._job.uri, self._challenge.token, number))

    def result(self, number: int, answer: Mapping[str, Any]) -> str:  # noqa: ARG002  of the protocol
        """See Workload."""
        return answer["receipt"]

    def end(self) -> Call:
        """See Workload."""
        return Call(on_worker.close, (self._challenge.token,))
