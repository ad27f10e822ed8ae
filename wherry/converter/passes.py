"""passes: the jobs of a conversion carried out, those that read the same thing together.

Jobs that keep the source's tree share one pass over it. A view through another system's layout has a pass of its own,
in which the source is digested too (`wherry.view.groups`).
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from wherry.converter.job import Job, Staged, complete, stage
from wherry.converter.plan import joint_moves
from wherry.converter.references import agree_with_source
from wherry.core.progress import Meter
from wherry.errors import WherryError
from wherry.formats.pin import blaming_changes
from wherry.mover.carrier import Carrier
from wherry.mover.hashing import Hashes
from wherry.mover.pool import Pool
from wherry.mover.source import Spill

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wherry.core.receipt import Receipt


def run(jobs: Sequence[Job]) -> list[Receipt | WherryError]:
    """Carry out all jobs; what came of each, in order. A pass that fails does not keep the others from being made."""
    results: dict[int, Receipt | WherryError] = {}
    for group in _groups(jobs):
        try:
            done = _pass([jobs[number] for number in group])
        except WherryError as error:
            done = [error] * len(group)
        results |= dict(zip(group, done, strict=True))
    return [results[number] for number in range(len(jobs))]


def _groups(jobs: Sequence[Job]) -> list[list[int]]:
    """The numbers of jobs that read the same."""
    groups: dict[int, list[int]] = {}
    for number, job in enumerate(jobs):
        groups.setdefault(id(job.checkpoint), []).append(number)
    return list(groups.values())


def _pass(jobs: list[Job]) -> list[Receipt | WherryError]:
    seen = jobs[0].checkpoint
    with ExitStack() as stack:
        if seen.original is not seen:
            stack.callback(seen.close)
        with blaming_changes(jobs[0].pin, seen.original):
            staged = [stage(job, stack) for job in jobs]
            hashes, own = _move(jobs, staged)
            agree_with_source(seen.original, hashes if own is None else own)
        if own is not None:
            staged = [replace(one, job=replace(one.job, source_digests=own.digests)) for one in staged]
        return [_outcome(one, hashes) for one in staged]


def _outcome(staged: Staged, hashes: Hashes) -> Receipt | WherryError:
    taken = {source: hashes.digests[source] for source in staged.output.targets if source in hashes.digests}
    mine = Hashes(taken, {source: hashes.leaves[source] for source in taken})
    try:
        return complete(staged, mine)
    except WherryError as error:
        return staged.staging.failed(error)


def _move(jobs: list[Job], staged: list[Staged]) -> tuple[Hashes, Hashes | None]:
    """The digests of what was read, and where that is a view, those of what it is a view of."""
    checkpoint, memory = jobs[0].checkpoint, jobs[0].plan.memory
    wanted = {source for job in jobs for source in job.plan.pairs.values()}
    specs = {path: spec for path, spec in checkpoint.manifest.tensors.items() if path in wanted}
    pool = Pool(memory)
    with Spill(checkpoint.reader, pool, staged[0].staging.spill) as source:
        carrier = Carrier(
            source=source,
            specs=specs,
            pool=pool,
            meter=Meter("convert", sum(spec.nbytes for spec in specs.values()), jobs[0].running.progress),
            outputs=tuple(one.output for one in staged),
        )
        own = _carried(carrier, jobs)
    broken = [one.output.error for one in staged if one.output.error]
    if len(broken) == len(staged):
        raise broken[0]
    return Hashes.of(specs, carrier.hashers), own


def _carried(carrier: Carrier, jobs: list[Job]) -> Hashes | None:
    moves, seen = joint_moves([job.plan for job in jobs]), jobs[0].checkpoint
    if seen.original is seen:
        carrier.carry(moves)
        return None
    from wherry.view.groups import ViewPass
    from wherry.view.view import RelaidReader

    assert isinstance(seen.reader, RelaidReader)
    return ViewPass(seen.original, seen.reader, carrier, moves, jobs[0].running.progress).carry()
