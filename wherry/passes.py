"""passes: the jobs of a conversion carried out, those that read the same thing together.

Jobs that keep the source's tree share one pass over it. A view through another system's layout has a pass of its own,
after the source was digested in its own order: a view reads regions, of which no leaf of the source can be hashed.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from wherry.errors import MismatchError, WherryError
from wherry.hashing import Hashes, compare, hash_checkpoint
from wherry.job import Job, Staged, complete, stage
from wherry.mover import Carrier
from wherry.planned import joint_moves
from wherry.pool import Pool
from wherry.progress import Meter
from wherry.sidecar import read_sidecar
from wherry.spill import Spill
from wherry.store import locate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wherry.checkpoint import Checkpoint
    from wherry.receipt import Receipt


def run(jobs: Sequence[Job]) -> list[Receipt | WherryError]:
    """Carry out all jobs; what came of each, in order.

    Raises:
        WherryError: what could be read of a source was not right, or all targets of a pass failed.
    """
    results: dict[int, Receipt | WherryError] = {}
    for group in _groups(jobs):
        checkpoint = jobs[group[0]].checkpoint
        mine = [jobs[number] for number in group]
        if checkpoint.original is not checkpoint:
            mine = _digested(mine)
        results |= dict(zip(group, _pass(mine), strict=True))
    return [results[number] for number in range(len(jobs))]


def _groups(jobs: Sequence[Job]) -> list[list[int]]:
    """The numbers of jobs that read the same."""
    groups: dict[int, list[int]] = {}
    for number, job in enumerate(jobs):
        groups.setdefault(id(job.checkpoint), []).append(number)
    return list(groups.values())


def _digested(jobs: list[Job]) -> list[Job]:
    """The jobs of a view, with the digests of what it is a view of."""
    from wherry.relaid import Relaid

    view, one = jobs[0].checkpoint, jobs[0]
    source = view.original
    read = view.canonical if isinstance(view, Relaid) else source
    hashes = hash_checkpoint(read, memory=one.plan.memory, progress=one.progress, stage="digest")
    agree_with_source(source, hashes)
    return [replace(job, source_digests=hashes.digests) for job in jobs]


def _pass(jobs: list[Job]) -> list[Receipt | WherryError]:
    with ExitStack() as stack:
        if jobs[0].checkpoint.original is not jobs[0].checkpoint:
            stack.callback(jobs[0].checkpoint.close)
        staged = [stage(job, stack) for job in jobs]
        hashes = _move(jobs, staged)
        if jobs[0].checkpoint.original is jobs[0].checkpoint:
            agree_with_source(jobs[0].checkpoint, hashes)
        return [_outcome(one, hashes) for one in staged]


def _outcome(staged: Staged, hashes: Hashes) -> Receipt | WherryError:
    taken = {source: hashes.digests[source] for source in staged.output.targets if source in hashes.digests}
    mine = Hashes(taken, {source: hashes.leaves[source] for source in taken})
    try:
        return complete(staged, mine)
    except WherryError as error:
        staged.staging.failed(error)
        return error


def _move(jobs: list[Job], staged: list[Staged]) -> Hashes:
    checkpoint, memory = jobs[0].checkpoint, jobs[0].plan.memory
    wanted = {source for job in jobs for source in job.plan.pairs.values()}
    specs = {path: spec for path, spec in checkpoint.manifest.tensors.items() if path in wanted}
    pool = Pool(memory)
    with Spill(checkpoint.reader, pool, staged[0].staging.spill) as source:
        carrier = Carrier(
            source=source,
            specs=specs,
            pool=pool,
            meter=Meter("convert", sum(spec.nbytes for spec in specs.values()), jobs[0].progress),
            outputs=tuple(one.output for one in staged),
        )
        carrier.carry(joint_moves([job.plan for job in jobs]))
    broken = [one.output.error for one in staged if one.output.error]
    if len(broken) == len(staged):
        raise broken[0]
    return Hashes.of(specs, carrier.hashers)


def agree_with_source(checkpoint: Checkpoint, hashes: Hashes) -> None:
    """Where the source has a manifest of ours, its bytes must still be the ones that were recorded.

    Raises:
        MismatchError: they are not; the tensor is named.
    """
    recorded = read_sidecar(locate(checkpoint.uri))
    if recorded is None:
        return
    known = recorded.manifest.digests
    failed = compare(hashes, {path: known[path] for path in hashes.digests if path in known}, recorded.leaves)
    if failed:
        raise MismatchError(
            f"the source has changed since it was recorded: {failed[0].reason}",
            uri=checkpoint.uri,
            path=failed[0].path,
            cure="restore the source, or delete its sidecar if the change was meant",
        )
