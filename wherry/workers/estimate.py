"""estimate: what the units of a plan ask of several workers: bytes, requests, memory, and hours at given rates.

The numbers follow from metadata alone. Time is that of the busiest worker if each moves bytes at the given rate, and
takes the next unit when it has finished one; latency, retries and workers that die are left out. Workers also share the
read-back. The commit alone reads back tensors that only the reader of the finished target can read in order, those in
boxes that are not hashed when they are moved, and parts of uploads, which cannot be read before they are complete.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from wherry.converter.plan import (
    ONE_PROCESS,
    Plan,
    SharedTraffic,
    hashes_on_the_way,
    joint_moves,
    plan_target,
    require_used,
    traffic_of,
)
from wherry.converter.source_digests import read_for_digests
from wherry.core.algorithms import BLAKE3
from wherry.core.digest import hashes_boxes
from wherry.core.request import ConvertRequest
from wherry.core.tensorspec import TensorSpec
from wherry.core.units import parse_size, plural, show_seconds, show_size
from wherry.errors import UsageError
from wherry.formats.checkpoint import Checkpoint, open_source
from wherry.formats.registry import find_target_format
from wherry.ledger.resolve import resolve_named
from wherry.mover.readback import is_run
from wherry.storage.location import Location
from wherry.storage.stores import locate
from wherry.workers.unit import CLIENT_BYTES, UNIT_BYTES, Unit, units_of

DEFAULT_RATE = 400_000_000  # bytes a second that one worker reads, and writes meanwhile


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """The units of a plan, shared out to workers.

    Attributes:
        units: the units; empty if one process has to make the target.
        workers: number of workers that have something to do.
        rate: bytes a second that a worker reads, and writes meanwhile.
        seconds: how long the busiest worker takes, with its share of the read-back, and then the commit.
        commit_bytes: bytes that the commit reads back alone.
        peak_memory: bytes of memory of a worker.
        requests: number of requests to stores, of all workers.
        whole: why there is only one unit, or none; empty if there are several.
        large: what several workers make of a file that is larger than a unit; empty if there is none.
    """

    units: tuple[Unit, ...]
    workers: int
    rate: int
    seconds: float
    peak_memory: int
    requests: int
    whole: str = ""
    large: str = ""
    commit_bytes: int = 0

    @property
    def rows(self) -> list[tuple[str, str]]:
        """As `wherry plan --workers N` prints it: name and value of each row."""
        sizes = [unit.nbytes for unit in self.units]
        least, most = show_size(min(sizes, default=0)), show_size(max(sizes, default=0))
        return [
            ("units", f"{plural(len(sizes), 'unit')} of {least} to {most}" if sizes else ""),
            ("one worker", self.whole),
            ("large files", self.large),
            ("workers", f"{self.workers}, {show_size(self.rate)}/s each: {show_seconds(self.seconds)}"),
            ("worker memory", show_size(self.peak_memory)),
            ("commit alone", f"{show_size(self.commit_bytes)} read back" if self.commit_bytes else ""),
        ]

    def to_json(self) -> dict[str, Any]:
        """The form of `wherry plan --workers N --json`."""
        return {
            "workers": self.workers,
            "rate": self.rate,
            "seconds": round(self.seconds, 1),
            "peak_memory": self.peak_memory,
            "requests": self.requests,
            "commit_bytes": self.commit_bytes,
            "one_worker": self.whole,
            "large_files": self.large,
            "units": [unit.to_json() for unit in self.units],
        }


def parse_rate(text: str) -> int:
    """Bytes a second of a rate such as `400MB/s`; `/s` may be left out.

    Raises:
        UsageError: it is not a rate.
    """
    try:
        return parse_size(text.strip().removesuffix("/s"))
    except UsageError as error:
        raise UsageError(f"invalid rate {text!r}", cure="write for example 400MB/s") from error


def plan_for_workers(
    request: ConvertRequest, workers: int, unit_bytes: int = UNIT_BYTES, rate: int = DEFAULT_RATE
) -> tuple[Plan, WorkerPlan]:
    """The plan of a request with one target, and its units; nothing is written.

    Args:
        request: the request.
        workers: number of workers.
        unit_bytes: size of a unit.
        rate: bytes a second that one worker reads, and writes meanwhile.

    Raises: what `plan_targets` does.
    """
    (target,) = request.targets
    with open_source(resolve_named(request.source)) as checkpoint:
        source, plan = plan_target(checkpoint, find_target_format(target.to), target, request)
        require_used(checkpoint.uri, request.targets, [plan.unused])
        place = locate(target.uri)
        units, whole = units_of(source, plan, place, unit_bytes)
        back = _read_back(source, plan, units, place)
        shared = _shared_traffic(source, plan, units, back, workers) if units else ONE_PROCESS
        plan = replace(plan, traffic=traffic_of(source, plan, shared))
    rows = zip(units, back.bytes_in, back.by_unit, strict=True)
    loads = [max(read, unit.nbytes) + proved for unit, read, proved in rows]
    if not units:
        loads = [max(plan.nbytes_in, plan.nbytes_out) + plan.nbytes_out * (plan.verify == "digest")]
    stores = plan.traffic.stores
    return plan, WorkerPlan(
        units=units,
        workers=min(workers, len(loads)),
        rate=rate,
        seconds=(longest(loads, workers) + back.alone) / rate,
        peak_memory=plan.peak_memory + CLIENT_BYTES * bool(stores),
        requests=sum(one.reads + one.writes + one.lists for one in stores),
        whole=whole,
        large=large_files(units, place),
        commit_bytes=back.alone,
    )


def large_files(units: Sequence[Unit], target: Location) -> str:
    """How several workers make one file of a target; empty if none is so large."""
    if all(unit.region is None for unit in units):
        return ""
    local = target.store.capabilities.local
    return "regions of one preallocated file" if local else "parts of one multipart upload"


class _Reads(NamedTuple):
    """What is read of a source, and read back of a target."""

    bytes_in: list[int]  # bytes of the source that each unit reads
    by_unit: list[int]  # bytes of each unit that another worker reads
    alone: int  # bytes that the commit reads alone


def _read_back(source: Checkpoint, plan: Plan, units: Sequence[Unit], target: Location) -> _Reads:
    back, local = plan.verify == "digest", target.store.capabilities.local
    rows = list(_read_in_order(plan)) if back and units else []
    decoded = sum(spec.nbytes for spec, _box in rows)
    open_uploads = [unit.nbytes for unit in units if back and unit.region is not None and not local]
    alone = sum(spec.nbytes * (1 + box) for spec, box in rows)
    share = back * (1 - min(1, decoded / max(plan.nbytes_out, 1)))  # of the bytes of a unit that workers read
    by_unit = [round(unit.nbytes * share * (local or unit.region is None)) for unit in units]
    again, stored = read_for_digests(source, plan), source.original.manifest.tensors
    bytes_in = [  # with those that a unit reads for digests alone
        sum(part.nbytes for part in (*unit.parts, *unit.also_read))
        + sum(stored[path].nbytes for path in unit.hashed if path in again)
        for unit in units
    ]
    return _Reads(bytes_in, by_unit, alone + sum(open_uploads))


def _shared_traffic(
    source: Checkpoint, plan: Plan, units: Sequence[Unit], back: _Reads, workers: int
) -> SharedTraffic:
    twice = source.is_view and not hashes_on_the_way()  # as the traffic of one process does
    stored = sum(spec.nbytes for spec in source.original.manifest.tensors.values()) if twice else 0
    return SharedTraffic(
        workers=min(workers, len(units)),
        times=sum(back.bytes_in) / max(plan.nbytes_in + stored, 1),
        read_back=sum(back.by_unit) + back.alone,
        # A claim and a receipt of each unit; a claim and a proof of what workers read back.
        records=2 * (len(units) + sum(map(bool, back.by_unit))),
    )


def _read_in_order(plan: Plan) -> Iterator[tuple[TensorSpec, bool]]:
    """Each tensor that the commit reads in order, and whether it is in boxes: these are read a second time."""
    moves = joint_moves([plan])
    for target, source in plan.pairs.items():
        spec, first = plan.manifest.tensors[target], next(moves.of(source), None)
        if first is None or is_run(spec, first):
            continue
        if not (first.box and first.region and hashes_boxes(spec, first.region, (BLAKE3,))):
            yield spec, first.box


def longest(loads: Sequence[int], workers: int) -> int:
    """The load of the busiest of some workers, where each takes the next load when it has finished one.

    Args:
        loads: in the order in which they are taken.
        workers: at least one.
    """
    busy = [0] * workers
    for load in loads:
        heapq.heapreplace(busy, busy[0] + load)
    return max(busy)
