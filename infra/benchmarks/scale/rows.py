"""Row: one conversion from the double into it, by `wherry work` or Dask, with killed and paused workers or without."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.scale.carry import CARRY, RowFailedError, RowRun, strikes_of
from benchmarks.scale.fleet import Fleet
from benchmarks.scale.place import EXPIRY, Place, Row, double_of


@dataclass(frozen=True, slots=True)
class RowResult:
    """What was seen of a row.

    Attributes:
        row: what was run.
        start: seconds from the start of the first worker until every worker had sent its first claim.
        seconds: from then to the receipt of the last unit.
        commit: seconds from that receipt until the target was committed.
        unit_seconds: of each receipt, as they came.
        peak: bytes of memory of the largest worker.
        worker_cpu: processor seconds of all workers, their start included.
        double_cpu: processor seconds of the double until the commit.
        bytes_in, bytes_out: what all workers read and wrote.
        requests: of all workers, by operation.
        digest: of the target.
        verification: what the commit has proved.
        strikes: worker, what was done to it, and the fraction of the units that had receipts.
        load: of the machine before the row.
    """

    row: Row
    start: float
    seconds: float
    commit: float
    unit_seconds: tuple[float, ...]
    peak: int
    worker_cpu: float
    double_cpu: float
    bytes_in: int
    bytes_out: int
    requests: Mapping[str, int]
    digest: str
    verification: Mapping[str, Any]
    strikes: tuple[tuple[str, str, float], ...]
    load: float

    def to_json(self) -> dict[str, Any]:
        """Every field by its name."""
        return asdict(self)


def row_from(data: Mapping[str, Any]) -> RowResult:
    """The inverse of `to_json`."""
    own: dict[str, Any] = {
        "row": Row(**data["row"]),
        "strikes": tuple((str(name), str(state), float(at)) for name, state, at in data["strikes"]),
        "unit_seconds": tuple(data["unit_seconds"]),
    }
    return RowResult(**{**data, **own})


def run(row: Row, folder: Path) -> RowResult:
    """Run one row.

    Args:
        row: what to run.
        folder: an empty folder for logs and settings.

    Raises:
        RowFailedError: a process failed that was not killed, or the target changed after its commit.
    """
    load = os.getloadavg()[0]
    with ExitStack() as stack:
        place = stack.enter_context(double_of(row, folder))
        fleet = stack.enter_context(Fleet(folder))
        begun = time.time()
        receipt = CARRY[row.carrier](RowRun(row, fleet, place, strikes_of(row)))
        ended = time.time()
        fleet.look()
        tally, before = place.tally(), place.listing()
        if row.paused:
            _wake(fleet, place, before)
        workers = [one for one in fleet.workers if one.name.startswith("worker")]
        moments = tally["moments"] or {"first_claim": begun, "last_receipt": ended}
        return RowResult(
            row=row,
            start=round(moments["first_claim"] - begun, 2),
            seconds=round(moments["last_receipt"] - moments["first_claim"], 2),
            commit=round(ended - moments["last_receipt"], 2),
            unit_seconds=tuple(seconds for _worker, seconds in tally["units"]),
            peak=max(one.peak for one in workers),
            worker_cpu=round(sum(one.cpu for one in workers), 2),
            double_cpu=round(place.cpu(), 2),
            bytes_in=_sum(tally["bytes"], "sent"),
            bytes_out=_sum(tally["bytes"], "received"),
            requests=_requests(tally["requests"]),
            digest=receipt["target"]["checkpoint_digest"],
            verification=receipt["verification"],
            strikes=tuple(place.strikes),
            load=round(load, 1),
        )


def _wake(fleet: Fleet, place: Place, before: str) -> None:
    """Let paused workers go on: they must end by themselves, or idle, and change nothing of what was committed."""
    fleet.resume()
    time.sleep(2 * EXPIRY)
    if place.listing() != before:
        raise RowFailedError("a worker that was paused has changed what was committed")


def _sum(counts: Mapping[str, Mapping[str, int]], name: str) -> int:
    return sum(count.get(name, 0) for worker, count in counts.items() if worker.startswith("worker"))


def _requests(counts: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for worker, count in counts.items():
        for operation, number in count.items() if worker.startswith("worker") else ():
            found[operation] = found.get(operation, 0) + number
    return dict(sorted(found.items()))
