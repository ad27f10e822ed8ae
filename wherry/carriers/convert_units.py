"""convert_units: converts a checkpoint with a carrier: cuts the plan, has the units made, and commits."""

from __future__ import annotations

from contextlib import closing, suppress
from typing import TYPE_CHECKING

from wherry.carriers.carrier import carrier_of
from wherry.carriers.processes import require_made
from wherry.converter.convert import convert_all
from wherry.core.progress import Meter, UnitCounts
from wherry.errors import IncompleteError, TargetExistsError, UsageError
from wherry.records.unit_receipt import receipts_by_unit
from wherry.units.commit import commit
from wherry.units.split_job import split

if TYPE_CHECKING:
    from wherry.carriers.carrier import UnitCarrier
    from wherry.carriers.worker_pool import Workplace
    from wherry.core.progress import OnProgress
    from wherry.core.receipt import GroupReceipt
    from wherry.core.request import ConvertRequest
    from wherry.units.split_job import SplitJob

_ROUNDS = 3  # a file that was changed or removed after its receipt is made again


def convert_units(
    request: ConvertRequest, on: str, unit_bytes: int, progress: OnProgress | None
) -> GroupReceipt:
    """Convert a checkpoint to one target with a carrier; see `convert_on`."""
    carrier, where = carrier_of(on)
    if len(request.targets) != 1:
        raise UsageError(
            "an engine writes only one target at a time", cure="give one TARGET, or leave out --on"
        )
    try:
        made = split(request, unit_bytes)
    except TargetExistsError:
        return convert_all(request, progress=progress)  # which says what is there
    for _ in range(_ROUNDS - 1):
        with suppress(IncompleteError):
            return _round(made, carrier, where, progress)
    return _round(made, carrier, where, progress)


# Kind of a record → what is done when it comes.
_PHASES = {"receipt": "convert", "proof": "verify"}


def _round(
    made: SplitJob, carrier: UnitCarrier, where: Workplace, progress: OnProgress | None
) -> GroupReceipt:
    """Have the units made that are left, and commit.

    Raises:
        IncompleteError: what a receipt names is not there, or not any more as it was left.
        WherryError: see `convert_on`.
    """
    before = set(receipts_by_unit(made.records.names()))
    counts = UnitCounts(len(made.units), len(before))
    total = sum(unit.nbytes for unit in made.units)
    meters = {kind: Meter(phase, total, progress, counts) for kind, phase in _PHASES.items()}
    meters["receipt"].resume(sum(made.units[number].nbytes for number in before))
    with closing(carrier.carry(made, where, counts)) as records:
        for name in records:
            kind, number = name.split("-")[:2]
            unit = made.units[int(number)]
            is_new = kind != "receipt" or unit.number not in before
            counts.done += kind == "receipt" and is_new
            meters[kind].add(unit.nbytes * is_new, unit.name)
    require_made(made, [])
    return commit(made.uri, progress=progress)
