"""Workload: what a coordinator has its workers do: the units of a conversion, or of a checkpoint that is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from wherry.carriers import on_worker
from wherry.records.unit_proof import proofs_in
from wherry.records.unit_receipt import receipts_by_unit, unit_of

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

    def suits(self, number: int, answer: Mapping[str, Any]) -> bool:
        """Whether a unit can be done now by a worker that has proved itself with this answer.

        Units that suit none of the workers, none of which does anything, are left.
        """
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
    """The units of a job, and their proofs; the result of each is the name of the record of its receipt or proof.

    Units are read back when all are made, and by workers that have not made them. Where no such workers are left, the
    commit reads them back.
    """

    again = "resumes with the units that are left"

    def __init__(self, challenge: Challenge) -> None:
        self._challenge, self._job = challenge, challenge.job
        self._count, self._proofs = len(self._job.units), self._job.proof_units
        self._left = set(range(self._count))  # units without a receipt
        self._makers: dict[int, str] = {}  # number of a unit → who made it

    @property
    def uri(self) -> str:
        """See Workload."""
        return self._job.uri

    @property
    def names(self) -> list[str]:
        """See Workload."""
        return [unit.name for unit in (*self._job.units, *self._proofs)]

    def finished(self) -> dict[int, str]:
        """See Workload."""
        records = self._job.records.names()
        made = {number: names[0] for number, names in receipts_by_unit(records).items()}
        self._left.difference_update(made)
        proofs = proofs_in(records)
        numbers = {self._count + at: self._unit(self._count + at) for at in range(len(self._proofs))}
        return {**made, **{at: proofs[unit][0] for at, unit in numbers.items() if unit in proofs}}

    def proof(self) -> Call:
        """See Workload."""
        return Call(on_worker.prove, (self._job.uri, self._challenge.token))

    def problem(self, answer: Mapping[str, Any]) -> str:
        """See Workload."""
        return self._challenge.problem(answer)

    def suits(self, number: int, answer: Mapping[str, Any]) -> bool:
        """See Workload."""
        if number < self._count:
            return True
        worker = str(answer.get("worker", ""))
        return not self._left and bool(worker) and worker != self._maker(self._unit(number))

    def unit(self, number: int) -> Call:
        """See Workload."""
        if number < self._count:
            return Call(on_worker.make, (self._job.uri, self._challenge.token, number))
        return Call(on_worker.check, (self._job.uri, self._challenge.token, self._unit(number)))

    def result(self, number: int, answer: Mapping[str, Any]) -> str | None:
        """See Workload; None if a unit was not proved: that is left to the commit."""
        if number >= self._count:
            return answer["proof"]
        self._left.discard(number)
        if "worker" in answer:
            self._makers[number] = answer["worker"]
        return answer["receipt"]

    def _unit(self, number: int) -> int:
        """The number of the unit that a proof is of."""
        return self._proofs[number - self._count].number - self._count

    def _maker(self, number: int) -> str:
        """Who made a unit; the receipts that are not known are read together."""
        if number not in self._makers:
            names = [names[0] for names in receipts_by_unit(self._job.records.names()).values()]
            names = [name for name in names if unit_of(name) not in self._makers]
            for name, row in zip(names, self._job.records.read_all(names), strict=True):
                self._makers[unit_of(name)] = str(row and row.get("worker"))
        return self._makers.setdefault(number, "")

    def end(self) -> Call:
        """See Workload."""
        return Call(on_worker.close, (self._challenge.token,))
