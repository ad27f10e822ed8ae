"""work: one worker of a job: it claims units, makes them, and writes their receipts, until none is left.

Then it reads back units that others have made. Nobody waits for that: what has no proof is read back by the commit.

Any number of workers on any machines do this at the same time. They agree only through records beside the target, so no
engine and no coordinator is needed; whatever starts the processes will do.
"""

from __future__ import annotations

import random
import secrets
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from wherry.core.progress import logger
from wherry.errors import IncompleteError, MismatchError, TargetExistsError, WherryError
from wherry.records.claims import EXPIRY_SECONDS, Claims, claims_among
from wherry.records.records import JOB
from wherry.records.unit_proof import proofs_in
from wherry.records.unit_receipt import receipts_by_unit
from wherry.remote.waits import waiting
from wherry.units.make import make_unit, this_worker
from wherry.units.prove import prove_unit
from wherry.units.split_job import opened_job
from wherry.units.worker_needs import require_able

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from wherry.records.claims import Claim
    from wherry.records.unit import Unit
    from wherry.records.unit_proof import UnitProof
    from wherry.records.unit_receipt import UnitReceipt
    from wherry.units.split_job import SplitJob

LOOK_SECONDS = 1.0  # between two looks, while other workers have the rest
LOOKED_AT = 2  # claims of others that a worker looks at before it takes a unit that nobody has claimed
LOOKED_AT_LAST = 4  # where there is no such unit
_MOST_FAILURES = 3  # of a worker, one after the other
_log = logger(__name__)


@dataclass(frozen=True, slots=True)
class WorkReport:
    """What one worker has done.

    Attributes:
        job: URI of the job.
        made: names of the units that it made.
        nbytes: bytes of their files.
        proved: names of the units that it read back.
        units: number of units of the job.
        ended: whether the job ended meanwhile, because it was committed.
    """

    job: str
    made: tuple[str, ...]
    nbytes: int
    units: int
    ended: bool = False
    proved: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The form of `wherry work --json`."""
        return {**asdict(self), "made": list(self.made), "proved": list(self.proved)}


def work(
    uri: str,
    *,
    expiry: float = EXPIRY_SECONDS,
    on_unit: Callable[[Unit, UnitReceipt], None] | None = None,
) -> WorkReport:
    """Make units of a job until every unit has a receipt; then read back what other processes have made.

    Args:
        uri: the folder of the job, or its target.
        expiry: seconds after which the claim of another worker that is not renewed expires.
        on_unit: called for each unit that was made.

    Raises:
        NotFoundError: there is no job.
        MismatchError: this process has another wherry, or sees another source or plan.
        MissingExtraError: this process lacks a codec.
        StorageError: it has too little memory for a unit.
        WherryError: making units failed several times.
    """
    with opened_job(uri) as split:
        require_able(split)
        claims = Claims(split.records, expiry)
        try:
            return _Worker(split, claims, on_unit).run()
        except (Exception, KeyboardInterrupt, SystemExit):
            with suppress(WherryError):  # otherwise they expire
                claims.release()
            raise


def make_claimed(split: SplitJob, claims: Claims, unit: Unit, claim: Claim) -> UnitReceipt:
    """Make a unit that was claimed, and record its receipt; the claim is renewed meanwhile.

    Raises:
        TargetExistsError: another attempt has made one of the objects.
        WherryError: the source cannot be read, or the storage failed.
    """
    with claims.renewed(claim, unit):
        receipt = make_unit(split, unit, claim)
        split.records.create(receipt.name, receipt.to_json(), claim.token)
    return receipt


def prove_claimed(split: SplitJob, claims: Claims, unit: Unit, claim: Claim) -> UnitProof | None:
    """Read back a unit that another process has made, and record the proof; the claim is renewed meanwhile.

    Args:
        split: the job.
        claims: its claims.
        unit: the unit.
        claim: on its proof.

    Returns:
        The proof; None if what was made is not there as its receipt says, which the commit will find.

    Raises:
        WherryError: the storage failed.
    """
    with claims.renewed(claim, split.proof_of(unit)):
        try:
            proof = prove_unit(split, unit, split.records.names(), claim.token)
        except (IncompleteError, MismatchError) as error:
            _log.warning("unit %s was not read back: %s", unit.name, error)
            return None
        split.records.create(proof.name, proof.to_json(), claim.token)
    return proof


def in_order(rest: Sequence[Unit], names: Sequence[str], worker: str = "") -> list[Unit]:
    """The order in which a worker tries to claim units.

    To look at the claims of all other workers before each unit would take requests that grow with their square. So each
    worker looks at few, and at the same ones as long as they are there, since it takes two looks to see that one has
    expired; each chooses others, so that together they see all. Which free unit comes first is left to chance, so that
    two rarely try the same.

    Args:
        rest: the units without a receipt, in the order of their numbers.
        names: of the records of the job.
        worker: id of the worker.
    """
    taken = {number for number, _attempt in claims_among(names)}
    held = [unit for unit in rest if unit.number in taken]
    free = [unit for unit in rest if unit.number not in taken]
    held.sort(key=lambda unit: blake2b(f"{worker}-{unit.number}".encode(), digest_size=8).digest())
    if not free:
        return held[:LOOKED_AT_LAST]
    first = [] if held else free[:1]  # a worker that is alone goes in order
    others = free[len(first) :]
    return [*held[:LOOKED_AT], *first, *random.sample(others, len(others))]


class _Worker:
    """The loop of one worker."""

    def __init__(
        self, split: SplitJob, claims: Claims, on_unit: Callable[[Unit, UnitReceipt], None] | None
    ) -> None:
        self._split, self._claims, self._on_unit = split, claims, on_unit
        self._made: list[Unit] = []
        self._proved: list[Unit] = []
        self._makers: dict[str, str] = {}  # name of a receipt → who wrote it
        self._left_out = set[int]()  # numbers of proofs that this worker cannot make
        self._failures = 0
        self._id = secrets.token_hex(4)

    def run(self) -> WorkReport:
        while True:
            with waiting(self._split.uri, what="units that other workers make"):
                found = self._claim_next()
            if isinstance(found, WorkReport):
                return found
            unit, claim = found
            count = len(self._split.units)
            if unit.number < count:
                self._make(unit, claim)
            else:
                self._prove(self._split.units[unit.number - count], claim)

    def _claim_next(self) -> tuple[Unit, Claim] | WorkReport:
        """The next unit, once one can be claimed; the report if none is left."""
        while True:
            names = self._split.records.names()
            if JOB not in names:
                return self._report(ended=True)
            finished = receipts_by_unit(names)
            rest = [unit for unit in self._split.units if unit.number not in finished]
            if not rest:
                return self._claimed_proof(names, finished) or self._report()
            for unit in in_order(rest, names, self._id):
                claim = self._claims.take(unit, names)
                if claim is not None:
                    return unit, claim
            time.sleep(LOOK_SECONDS)

    def _claimed_proof(
        self, names: Sequence[str], finished: Mapping[int, Sequence[str]]
    ) -> tuple[Unit, Claim] | None:
        """The next unit of another maker to read back; None if there is none that nobody reads."""
        proved = proofs_in(names)
        rest = [
            proof
            for proof in self._split.proof_units
            if proof.number - len(self._split.units) not in proved and proof.number not in self._left_out
        ]
        for proof in in_order(rest, names, self._id):
            if this_worker() in self._makers_of(finished[proof.number - len(self._split.units)]):
                self._left_out.add(proof.number)
            elif (claim := self._claims.take(proof, names)) is not None:
                return proof, claim
        return None

    def _makers_of(self, receipts: Sequence[str]) -> set[str]:
        """Who has written some receipts."""
        for name in receipts:
            if name not in self._makers:
                row = self._split.records.read(name)
                self._makers[name] = str(row and row.get("worker"))
        return {self._makers[name] for name in receipts}

    def _prove(self, unit: Unit, claim: Claim) -> None:
        """Read back a unit; where that fails, it is left to others."""
        try:
            proof = prove_claimed(self._split, self._claims, unit, claim)
        except WherryError as error:
            if not error.retryable:
                raise
            _log.warning("unit %s was not read back: %s", unit.name, error)
            proof = None
        if proof is None:
            self._left_out.add(claim.unit)
        else:
            self._proved.append(unit)

    def _make(self, unit: Unit, claim: Claim) -> None:
        """Make a unit that was claimed; a failure that may pass is counted."""
        try:
            receipt = make_claimed(self._split, self._claims, unit, claim)
        except TargetExistsError:
            # An earlier attempt was not dead but slow, and has made the object after all.
            self._note_failure(unit)
        except WherryError as error:
            if not error.retryable:
                raise
            self._note_failure(unit, error)
        else:
            self._failures = 0
            self._made.append(unit)
            if self._on_unit is not None:
                self._on_unit(unit, receipt)

    def _note_failure(self, unit: Unit, error: WherryError | None = None) -> None:
        self._failures += 1
        _log.warning("unit %s was not written: %s", unit.name, error or "another attempt has written it")
        if self._failures >= _MOST_FAILURES:
            raise error or TargetExistsError(
                f"the objects of unit {unit.name} were made by somebody else",
                uri=self._split.job.committed.uri,
                cure="choose another target, or remove this one",
            )
        time.sleep(LOOK_SECONDS)

    def _report(self, *, ended: bool = False) -> WorkReport:
        names = tuple(unit.name for unit in self._made)
        nbytes = sum(unit.nbytes for unit in self._made)
        proved = tuple(unit.name for unit in self._proved)
        return WorkReport(self._split.uri, names, nbytes, len(self._split.units), ended, proved)
