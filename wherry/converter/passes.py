"""passes: carries out the jobs of a conversion; jobs that read the same data share a pass.

Jobs that keep the source's tree share one pass over it. A view through another system's layout has a separate pass,
which also computes the source's digests (`wherry.view.groups`).
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from wherry.converter.job import Job, StagedJob, complete, reading_memory, stage
from wherry.converter.plan import joint_moves
from wherry.converter.references import agree_with_sources, recorded_of
from wherry.core.interrupts import go_on
from wherry.core.progress import Meter
from wherry.core.tensorspec import Span, bytes_of
from wherry.errors import WherryError
from wherry.formats.pin import blaming_changes
from wherry.mover.carrier import Carrier
from wherry.mover.hashing import Hashes
from wherry.mover.move import cells
from wherry.mover.pool import Pool
from wherry.mover.source import Source
from wherry.runtime.memory import return_freed_memory
from wherry.target.staged_objects import is_staged

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from wherry.core.keypath import KeyPath
    from wherry.core.leaf_values import LeafValues
    from wherry.core.receipt import Receipt
    from wherry.core.tensorspec import TensorSpec
    from wherry.mover.move import JointMoves
    from wherry.mover.output import Output
    from wherry.storage.location import Location
    from wherry.storage.sidecar import Sidecar


def run(jobs: Sequence[Job]) -> list[Receipt | WherryError]:
    """Carry out all jobs; returns the result of each, in order. A failed pass does not stop the others."""
    groups: dict[tuple[int, int], list[int]] = {}
    for number, job in enumerate(jobs):
        # A job whose files are uploaded needs its own order of the moves.
        alone = number if job.committed.store.capabilities.parts else -1
        groups.setdefault((id(job.checkpoint), alone), []).append(number)
    results: dict[int, Receipt | WherryError] = {}
    for group in groups.values():
        go_on()
        try:
            done = _pass([jobs[number] for number in group])
        except WherryError as error:
            done = [error] * len(group)
        results |= dict(zip(group, done, strict=True))
    return [results[number] for number in range(len(jobs))]


def _pass(jobs: list[Job]) -> list[Receipt | WherryError]:
    seen = jobs[0].checkpoint
    with ExitStack() as stack:
        if seen.is_view:
            stack.callback(seen.close)
        with blaming_changes(jobs[0].pin, seen.original):
            recorded = recorded_of(seen.original)
            algorithms = algorithms_of(jobs[0].algorithm, *recorded.values())
            staged = [stage(job, algorithms, recorded.get(()), stack) for job in jobs]
            return_freed_memory()  # of plans and layouts, before buffers of other sizes
            moves = joint_moves([job.plan for job in jobs])
            where = Pass(staged[0].staged, staged[0].staging.spill, tuple(one.output for one in staged))
            moved = move(jobs[0], moves, where, algorithms)
            del moves
            hashes, own = moved.hashes, moved.own
            agree_with_sources(seen.original, recorded, own or hashes)
        algorithm = jobs[0].algorithm
        if own is not None:
            staged = [
                replace(one, job=replace(one.job, source_digests=own[algorithm].digests)) for one in staged
            ]
        return [_outcome(one, hashes[algorithm]) for one in staged]


@dataclass(frozen=True, slots=True)
class Pass:
    """Where a pass writes.

    Attributes:
        staged: the location of the first output's checkpoint, until it is committed.
        spill: a local folder for temporary files of decoded bytes.
        outputs: the receivers of the bytes.
    """

    staged: Location
    spill: Path
    outputs: tuple[Output, ...]


@dataclass(frozen=True, slots=True)
class PassHashes:
    """What a pass has hashed.

    Attributes:
        hashes: the digests by algorithm of the tensors that were read whole.
        own: those of the original of a view; None if the source is no view.
        boxes: what was hashed of tensors that were carried in boxes, where other processes have the rest.
        sources: the same of the tensors of the original of a view.
    """

    hashes: Mapping[str, Hashes]
    own: Mapping[str, Hashes] | None
    boxes: Mapping[KeyPath, LeafValues]
    sources: Mapping[KeyPath, LeafValues]


def _in_order(moves: JointMoves, where: Pass) -> JointMoves:
    """The moves in the order of the bytes of the target's files, if these are uploaded in parts.

    A part is sent when all its bytes are known: in another order more parts would wait for bytes than memory can hold.
    """
    if not is_staged(where.staged):
        return moves
    extents_at = where.outputs[0].writer.extents

    def position(row: tuple[KeyPath, Sequence[TensorSpec]]) -> tuple[str, int]:
        target = row[1][0]
        first = Span(0, target.nbytes)
        if target.chunks is not None:
            first = next(cells(target.whole, target.chunks), target.whole)
        extents = extents_at(target.path, first)
        return (extents[0].location.path, extents[0].offset) if extents else ("", 0)

    return replace(moves, targets=dict(sorted(moves.targets.items(), key=position)))


def algorithms_of(chosen: str, *recorded: Sidecar | None) -> tuple[str, ...]:
    """The algorithms with which a pass hashes: the chosen one, and those of the sources' records."""
    return tuple(dict.fromkeys((chosen, *(one.algorithm for one in recorded if one is not None))))


def _outcome(staged: StagedJob, hashes: Hashes) -> Receipt | WherryError:
    try:
        return complete(staged, hashes.of_some(staged.output.targets))
    except WherryError as error:
        return staged.staging.failed(error)


def move(
    job: Job,
    moves: JointMoves,
    where: Pass,
    algorithms: tuple[str, ...],
    hashed: Collection[KeyPath] | None = None,
    *,
    shared: bool = False,
) -> PassHashes:
    """Carry moves into one target, or into several of one source.

    Args:
        job: one of the targets.
        moves: of all targets; or some of them.
        where: where they are written.
        algorithms: with which the pass hashes.
        hashed: the tensors of the original of a view whose digests are computed; all by default.
        shared: whether other processes carry moves of these tensors, too.

    Raises:
        WherryError: reading failed, or every output did.
    """
    seen, progress = job.checkpoint, job.running.progress
    moves = _in_order(moves, where)
    specs = {path: seen.manifest.tensors[path] for path in moves.targets}
    pool, stopped = Pool(reading_memory(job.plan, where.staged)), threading.Event()
    if job.source_hashes is not None:
        hashed = ()
    with ExitStack() as stack:
        stack.callback(pool.clear)  # before the end of the target is read back, with a pool of its own
        through = None
        if seen.is_view:
            from wherry.view.groups import ViewPass

            through = stack.enter_context(
                ViewPass(seen, specs, algorithms, stopped, progress, hashed, shared=shared)
            )
        reader = through.reader if through else seen.reader
        source = stack.enter_context(Source(reader, pool, where.spill, ways=moves.ways, stopped=stopped))
        meter = Meter("convert", bytes_of(specs.values()), progress)
        carrier = Carrier(source, specs, meter, algorithms, where.outputs, whole=not shared)
        own = through.carry(carrier, moves) if through else None
        if not through:
            carrier.carry(moves)
    broken = [one.error for one in where.outputs if one.error]
    if len(broken) == len(where.outputs):
        raise broken[0]
    tensors = seen.manifest.tensors
    found = {
        one: replace(Hashes.when_needed(specs, tensors, carrier.leaves, one), seen=carrier.seen)
        for one in algorithms
    }
    boxes = {
        path: values
        for path, hasher in carrier.leaves.hashers()
        if shared and moves.are_boxes(path) and (values := hasher.values()) and values.nbytes
    }
    return PassHashes(found, job.source_hashes or own, boxes, through.values if through else {})
