"""Job: one target of a conversion, from its plan to its commit.

stage → (the mover moves) → finish → read back → sidecar → commit. Each job stages, resumes, is verified and commits
independently. Jobs that keep the source's tree share one pass over it. A view through another system's layout has a
separate pass, which also computes the source's digests (`wherry.transform.groups`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, field, replace
from operator import eq
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wherry.converter.plan import Plan, joint_moves
from wherry.converter.references import agree_with_sources, recorded_of, reference, source_references
from wherry.core.account import fold_entries, losses_notes
from wherry.core.blank_values import repeated_notes, zeros_notes
from wherry.core.digest import LeafValues, origin_digest, sha256_of
from wherry.core.interrupts import committing, go_on, settle
from wherry.core.keypath import KeyPath, render
from wherry.core.lazy_dataclass import dataclass
from wherry.core.manifest import Companion, Manifest
from wherry.core.progress import Meter, RunContext
from wherry.core.receipt import Receipt, software, utc_now
from wherry.core.tensorspec import Span, TensorSpec, bytes_of
from wherry.core.threads import return_freed_memory, without_collection
from wherry.credentials import redact_values
from wherry.errors import MismatchError, StorageError, WherryError
from wherry.formats.checkpoint import (
    Checkpoint,
    JoinedPin,
    Pin,
    blaming_changes,
    fingerprint,
    present_fingerprint,
)
from wherry.formats.companions import copy_companion, digest_companion, file_digest
from wherry.formats.format import Format, Glimpse
from wherry.formats.recorded_files import recorded_files
from wherry.mover.carrier import Carrier
from wherry.mover.hashing import Hashes, hash_checkpoint, read_back
from wherry.mover.map_writer import MapWriter, writer_of
from wherry.mover.move import JointMoves, cells
from wherry.mover.output import Output
from wherry.mover.pool import Pool
from wherry.mover.readback import FilesBeingWritten, ReadBack, ReadEvidence
from wherry.mover.source import Source, ways_of
from wherry.store.local_store import is_at_or_below, make_folder
from wherry.store.location import Location
from wherry.store.ranges import LARGEST
from wherry.store.sidecar import FOLDER_NAME, Sidecar, encode, put_sidecar
from wherry.store.store import Entry
from wherry.target.journal import Journal
from wherry.target.sinks import open_staging
from wherry.target.staged_objects import is_readable, run_of
from wherry.target.staging import Staging
from wherry.version import __version__

if TYPE_CHECKING:
    from wherry.config.settings import DigestChoice
    from wherry.target.object_staging import ObjectStaging


@dataclass(frozen=True, slots=True)
class Job:
    """The constant data of one target while it is made.

    Attributes:
        checkpoint: the opened source.
        plan: the plan.
        row: the target format.
        target: the location of the checkpoint.
        committed: the location that is committed in one step: the target, or the step folder of a run around it.
        running: when the run began, and the receiver of its progress.
        meta: metadata of the user to store with the checkpoint.
        pin: the source's files when the plan was made.
        choice: the algorithm of the digests that are recorded.
        group: see Receipt.
        source_digests: of the source's tensors, if `checkpoint` is a view of it; otherwise the pass computes them.
        source_hashes: the same by algorithm, if other processes have computed them before the pass.
        evidence: gives what other processes have read back of the target, which is staged at a location.
        stated: the stated options of the request; see `wherry.converter.command`.
    """

    checkpoint: Checkpoint
    plan: Plan
    row: Format
    target: Location
    committed: Location
    running: RunContext
    meta: Mapping[str, str]
    pin: Pin | JoinedPin
    choice: DigestChoice
    group: str = ""
    source_digests: Mapping[KeyPath, str] | None = None
    source_hashes: Mapping[str, Hashes] | None = None
    evidence: Callable[[Location], ReadEvidence] = lambda _staged: ReadEvidence()
    stated: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def algorithm(self) -> str:
        """The algorithm of the digests that are recorded."""
        return self.choice.algorithm


@dataclass(frozen=True, slots=True)
class StagedJob:
    """A job with its staging area open.

    Attributes:
        job: the job.
        staging: the area.
        staged: the location of the checkpoint in the area.
        journal: the finished moves.
        companions: the copied companion files of the target, with their digests.
        output: the receiver of the mover's bytes.
        recorded: the sidecar of the source.
    """

    job: Job
    staging: Staging
    staged: Location
    journal: Journal
    companions: tuple[Companion, ...]
    output: Output
    recorded: Sidecar | None


@dataclass(frozen=True, slots=True)
class Carriage:
    """What a pass carries into the targets of one layout, and where.

    Attributes:
        job: one of the targets.
        moves: of all of them, or some of these moves.
        staged: the location of the first target, until it is committed.
        spill: a local folder for temporary files of decoded bytes.
        outputs: the receivers of the bytes.
    """

    job: Job
    moves: JointMoves
    staged: Location
    spill: Path
    outputs: tuple[Output, ...]


@dataclass(frozen=True, slots=True)
class PassHashes:
    """The hashes that a pass has computed.

    Attributes:
        hashes: the digests by algorithm of the tensors of each layout that were read whole.
        own: those of the original of views; None if it is carried as it is, and in no further layout.
        boxes: what was hashed of tensors that were carried in boxes, where other processes have the rest.
        sources: the same of the tensors of the original of a view.
    """

    hashes: Sequence[Mapping[str, Hashes]]
    own: Mapping[str, Hashes] | None
    boxes: Mapping[KeyPath, LeafValues]
    sources: Mapping[KeyPath, LeafValues]


def run(jobs: Sequence[Job]) -> list[Receipt | WherryError]:
    """Carry out all jobs; returns the result of each, in order. A failed pass does not stop the others."""
    results: dict[int, Receipt | WherryError] = {}
    for group in passes(jobs):
        go_on()
        try:
            done = _pass([jobs[number] for number in group])
        except WherryError as error:
            done = [error] * len(group)
        results |= dict(zip(group, done, strict=True))
    return [results[number] for number in range(len(jobs))]


def passes(jobs: Sequence[Job]) -> list[list[int]]:
    """The numbers of the jobs that share a pass, which reads the source once.

    A job whose files are sent in parts has a pass of its own, as it needs its own order of the moves; so does one
    whose target is inside another target, which must be there before.
    """
    groups: dict[int, list[int]] = {}
    for number, job in enumerate(jobs):
        sent = job.committed.store.capabilities.parts
        inner = any(other is not job and is_at_or_below(other.committed, job.committed) for other in jobs)
        groups.setdefault(number if sent or inner else -1, []).append(number)
    return list(groups.values())


def _pass(jobs: list[Job]) -> list[Receipt | WherryError]:
    original, algorithm = jobs[0].checkpoint.original, jobs[0].algorithm
    with ExitStack() as stack:
        for seen in {id(job.checkpoint): job.checkpoint for job in jobs}.values():
            if seen.is_view:
                stack.callback(seen.close)
        with blaming_changes(jobs[0].pin, original):
            recorded = recorded_of(original)
            algorithms = algorithms_of(algorithm, *recorded.values())
            done: dict[int, Receipt | WherryError] = {}
            staged: dict[int, StagedJob] = {}
            for number, job in enumerate(jobs):
                try:
                    with blaming_changes(job.pin, original), ExitStack() as opened:
                        staged[number] = stage(job, algorithms, recorded.get(()), opened)
                        stack.push(opened.pop_all())
                except WherryError as error:  # such as a target that is in use; the others are still made
                    done[number] = error
            if not staged:
                return [done[number] for number in range(len(jobs))]
            return_freed_memory()  # of plans and layouts, before buffers of other sizes
            layouts = _by_layout(staged)
            moved = move([_carriage([staged[number] for number in one]) for one in layouts], algorithms)
            hashes, own = moved.hashes, moved.own
            agree_with_sources(original, recorded, own or hashes[0])
        for numbers, found in zip(layouts, hashes, strict=True):
            for number in numbers:
                one, job = staged[number], jobs[number]
                if own is not None and job.checkpoint.is_view:
                    job = replace(job, source_digests=own[algorithm].digests)
                try:
                    carried = found[algorithm].of_some(one.output.targets)
                    done[number] = complete(replace(one, job=job), carried)
                except WherryError as error:
                    done[number] = one.staging.failed(error)
        return [done[number] for number in range(len(jobs))]


def _by_layout(staged: Mapping[int, StagedJob]) -> list[list[int]]:
    """The numbers of the jobs of each layout; the source's own layout is first, as its digests are the source's."""
    layouts: dict[int, list[int]] = {}
    for number, one in sorted(staged.items(), key=lambda row: row[1].job.checkpoint.is_view):
        layouts.setdefault(id(one.job.checkpoint), []).append(number)
    return list(layouts.values())


def _carriage(targets: Sequence[StagedJob]) -> Carriage:
    """All that is carried into the targets of one layout."""
    first, outputs = targets[0], tuple(one.output for one in targets)
    moves = joint_moves([one.job.plan for one in targets])
    return Carriage(first.job, moves, first.staged, first.staging.spill, outputs)


def _in_order(carriage: Carriage) -> Carriage:
    """What is carried, in the order of the bytes of the target's files, which are uploaded in parts.

    A part is sent when all its bytes are known: in another order more parts would wait for bytes than memory can hold.
    """
    moves, extents_at = carriage.moves, carriage.outputs[0].writer.extents

    def position(row: tuple[KeyPath, Sequence[TensorSpec]]) -> tuple[str, int]:
        target = row[1][0]
        first = Span(0, target.nbytes)
        if target.chunks is not None:
            first = next(cells(target.whole, target.chunks), target.whole)
        extents = extents_at(target.path, first)
        return (extents[0].location.path, extents[0].offset) if extents else ("", 0)

    targets = dict(sorted(moves.targets.items(), key=position))
    return replace(carriage, moves=replace(moves, targets=targets))


def algorithms_of(chosen: str, *recorded: Sidecar | None) -> tuple[str, ...]:
    """The algorithms with which a pass hashes: the chosen one, and those of the sources' records."""
    return tuple(dict.fromkeys((chosen, *(one.algorithm for one in recorded if one is not None))))


def move(
    layouts: Sequence[Carriage],
    algorithms: tuple[str, ...],
    hashed: Collection[KeyPath] | None = None,
    *,
    shared: bool = False,
) -> PassHashes:
    """Carry moves of one source into its targets in one or several layouts.

    Args:
        layouts: what is carried, and where.
        algorithms: with which the pass hashes.
        hashed: the tensors of the original of views whose digests are computed; all by default.
        shared: whether other processes carry moves of these tensors, too; there is one layout then.

    Raises:
        WherryError: reading failed, or every output did.
    """
    layouts = [_in_order(one) if one.staged.store.capabilities.staged else one for one in layouts]
    first = layouts[0].job
    progress, known = first.running.progress, first.source_hashes
    views = [one.job.checkpoint for one in layouts]
    specs = [
        {path: one.job.checkpoint.manifest.tensors[path] for path in one.moves.targets} for one in layouts
    ]
    meter = Meter("convert", sum(bytes_of(one.values()) for one in specs), progress)
    pool = Pool(min(reading_memory(one.job.plan, one.staged) for one in layouts))
    stopped = threading.Event()
    with ExitStack() as stack:
        stack.callback(pool.clear)  # before the end of the target is read back, with a pool of its own
        through = None
        if len(layouts) > 1 or views[0].is_view:
            from wherry.transform.groups import ViewPass

            taken = () if known is not None else hashed
            seen_paths = list(zip(views, specs, strict=True))
            through = stack.enter_context(
                ViewPass(seen_paths, algorithms, stopped, progress, taken, shared=shared)
            )
        readers = through.readers if through else [views[0].reader]
        carriers, moves = list[Carrier](), list[JointMoves]()
        for one, reader, paths in zip(layouts, readers, specs, strict=True):
            ways = one.moves.ways if len(layouts) == 1 else None
            source = stack.enter_context(Source(reader, pool, one.spill, ways=ways, stopped=stopped))
            carriers.append(Carrier(source, paths, meter, algorithms, one.outputs, whole=not shared))
            carried = one.moves
            if ways is None:  # the plan has seen another reader, which keeps nothing for other layouts
                carried = replace(carried, ways=ways_of(source, carried.sources, list(carried.targets)))
            moves.append(carried)
        own = through.carry(carriers, moves) if through else None
        if not through:
            carriers[0].carry(moves[0])
    outputs = [output for one in layouts for output in one.outputs]
    broken = [output.error for output in outputs if output.error]
    if len(broken) == len(outputs):
        raise broken[0]
    found = [
        {
            algorithm: replace(
                Hashes.when_needed(paths, seen.manifest.tensors, carrier.leaves, algorithm), seen=carrier.seen
            )
            for algorithm in algorithms
        }
        for seen, paths, carrier in zip(views, specs, carriers, strict=True)
    ]
    boxes = {
        path: values
        for path, hasher in carriers[0].leaves.hashers()
        if shared and moves[0].are_boxes(path) and (values := hasher.values()) and values.nbytes
    }
    return PassHashes(found, known or own, boxes, through.values if through else {})


@without_collection()
def stage(job: Job, algorithms: tuple[str, ...], recorded: Sidecar | None, stack: ExitStack) -> StagedJob:
    """Open a job's staging area and writer, and resume an interrupted run.

    Args:
        job: the job.
        algorithms: with which the pass hashes; the journal has leaves of all of them.
        recorded: the sidecar of the source.
        stack: closes the area and the writer.

    Raises:
        TargetInUseError: another run is writing the target.
        StorageError: the storage failed.
    """
    header, by_checksum = header_of(job, algorithms), job.plan.verify == "store"
    opening = open_staging(
        job.committed,
        identity_of(header),
        header,
        job.row.commit_members,
        job.plan.manifest.nbytes,
        # A file that states companions is read before the commit, for their digests.
        is_file=job.row.single_file and not (by_checksum and job.row.holds.stated),
        memory=job.plan.memory,
        by_checksum=by_checksum,
    )
    staging = stack.enter_context(opening)
    journal = staging.journal()
    staged = inside(job, staging.location)
    make_folder(staged.parent)
    companions: tuple[Companion, ...] = ()
    if not job.row.single_file:  # the layout of a single file reads what the file states of them
        companions = tuple(
            copy_companion(job.checkpoint, one, staged.member(f"{job.row.companion_folder}{one.name}"))
            for one in job.plan.manifest.companions
        )
    evidence = job.evidence(staged)  # the writer may write headers again, which changes files
    writer = writer_of(job.row, staged, job.plan.manifest, job.plan.options, job.checkpoint.reader.companion)
    stack.callback(writer.close)
    staging.sync_names()
    targets = targets_of(job.plan)
    back = None
    if job.plan.verify == "digest":
        files = FilesBeingWritten()
        if staged.store.capabilities.staged:
            # Each range of an object costs a request, so only large ones are read meanwhile.
            files = FilesBeingWritten(
                is_readable, run_of(staged).using.sender.drain, least_alone(objects=True)
            )
        back = ReadBack(writer, targets, job.target.uri, files, evidence=evidence, algorithms=algorithms)
    output = Output(writer, targets, journal, back, job.plan.overflow)
    return StagedJob(job, staging, staged, journal, companions, output, recorded)


def least_alone(*, objects: bool) -> int:
    """Bytes of a tensor that is read back by itself; each range of an object costs a request."""
    return LARGEST // 2 if objects else FilesBeingWritten().least


def header_of(job: Job, algorithms: tuple[str, ...]) -> dict[str, str]:
    """The header that identifies a run: a journal is continued only if its header is equal."""
    return {
        "plan": job.plan.digest,
        "source": sha256_of("source", [present_fingerprint(job.checkpoint), job.pin.digest]),
        "target": job.committed.name,
        "digest": " ".join(algorithms),
        "version": __version__,
    }


def identity_of(header: Mapping[str, str]) -> str:
    """Eight hex digits of a header, for the name of the staging area."""
    return sha256_of("run", header)[:8]


def inside(job: Job, committed: Location) -> Location:
    """The location of the checkpoint in what is committed in one step, for example in a staged step folder."""
    inner = job.target.path[len(job.committed.path) :].strip("/")
    return committed.join(inner) if inner else committed


def complete(staged: StagedJob, hashes: Hashes) -> Receipt:
    """Finish, read back, write the sidecar and commit.

    Args:
        staged: the job after the mover's pass.
        hashes: digests of the source's tensors that were carried, by source key path.

    Raises:
        MismatchError: the read-back differs, or the source changed; nothing is committed.
        TargetExistsError: the target was created meanwhile.
        StorageError: the storage failed.
    """
    job, place = staged.job, staged.staged
    if staged.output.error is not None:
        with blaming_changes(job.pin, job.checkpoint.original):
            raise staged.output.error
    ours, pairs = hashes, job.plan.pairs
    if not all(map(eq, pairs, pairs.values())):  # by the key paths of the target
        ours = hashes.renamed({source: target for target, source in pairs.items()})
    with without_collection():
        finish(staged.output.writer)
        return_freed_memory()  # the writer's tables, before those of the opened target
        if staged.staging.target.store.capabilities.parts:
            from wherry.target.object_staging import ObjectStaging

            if isinstance(staged.staging, ObjectStaging) and staged.staging.run.direct:
                return _complete_unread(staged, staged.staging, hashes, ours)
        opened = _open_staged(job, place)
    # Boxes and the source's identity read the source again.
    with blaming_changes(job.pin, job.checkpoint.original):
        with opened as written:
            companions = staged.companions
            if job.row.single_file:
                companions = tuple(digest_companion(written, one) for one in written.manifest.companions)
            boxed = {path: source for path, source in pairs.items() if path not in ours.digests}
            found = _hash_boxes(staged, written, boxed) if boxed else None
            verification = _verify(staged, written, ours)
            ours = ours if found is None else ours.joined(found)
            mark = fingerprint(written.reader.members(), place, marks=job.target.store.capabilities.local)
            files = recorded_files(written.reader, place)
        del opened, written
        return_freed_memory()  # of what was opened: the record takes as much
        with without_collection():
            sidecar, receipt = _sidecar(staged, ours, hashes, verification, mark, files, companions)
    with without_collection():
        text = encode(sidecar) if job.row.single_file else None
        if text is None:
            put_sidecar(place.join(FOLDER_NAME), sidecar)
    if place.path != staged.staging.location.path and job.row.finish_step is not None:
        job.row.finish_step(staged.staging.location, job.plan.manifest)
    job.pin.require_unchanged(job.checkpoint.original)
    if job.plan.verify == "digest" and place.store.capabilities.staged:
        _prove_files(staged)
    with committing(job.target.uri):
        staged.staging.commit(text)
    return receipt


def _complete_unread(staged: StagedJob, staging: ObjectStaging, hashes: Hashes, ours: Hashes) -> Receipt:
    """Commit a file of which the store has all parts; no part can be read before.

    Raises: what `complete` does. If the file cannot be opened as what the plan says, it is removed again.
    """
    job, place = staged.job, staged.staged
    checksum = staging.run.compare_checksums()
    file = Entry(place.name, staging.run.file_at(place.path).size, is_dir=False)
    verification = {"level": "store", "ok": True, "tensors": len(job.plan.pairs), "checksum": checksum}
    with blaming_changes(job.pin, job.checkpoint.original), without_collection():
        sidecar, receipt = _sidecar(
            staged, ours, hashes, verification, fingerprint([file], place, marks=False), {".": file.size}, ()
        )
        text = encode(sidecar)
    job.pin.require_unchanged(job.checkpoint.original)
    with committing(job.target.uri):
        staging.commit(text)
    try:
        with _open_staged(job, place) as written:
            _require_structure(job, written.manifest)
    except WherryError as error:
        if not isinstance(error, StorageError):
            staging.withdraw()
            settle([job.target.uri])
        raise
    return receipt


def finish(writer: MapWriter) -> None:
    """Complete the container and close it."""
    writer.sync()
    writer.finish()
    writer.close()


def reading_memory(plan: Plan, staged: Location) -> int:
    """Bytes of the plan's memory in which a pass reads and decodes: not those that an upload takes."""
    if not staged.store.capabilities.staged:
        return plan.memory
    from wherry.target.parts import reading_share

    return reading_share(plan.memory)


def targets_of(plan: Plan) -> Mapping[KeyPath, TensorSpec]:
    """Source key path → target tensor, in the order of the pairs."""
    tensors = plan.manifest.tensors
    if list(tensors) == list(plan.pairs) == list(plan.pairs.values()):
        return tensors  # no key path is changed
    return {source: tensors[target] for target, source in plan.pairs.items()}


def _hash_boxes(staged: StagedJob, written: Checkpoint, boxed: Mapping[KeyPath, KeyPath]) -> Hashes:
    """The digests of tensors whose boxes were not hashed when they were carried: the written target is read.

    Args:
        staged: the job after the mover's pass.
        written: the target.
        boxed: target key path → source key path of these tensors.

    Raises:
        MismatchError: the written data differs from the source.
    """
    job = staged.job
    found = hash_checkpoint(
        written,
        job.algorithm,
        memory=reading_memory(job.plan, staged.staged),
        progress=job.running.progress,
        paths=boxed,
        folder=staged.staging.spill,
    )
    if job.plan.verify == "digest":
        from wherry.converter.proof import prove_boxes

        digests, memory = job.source_digests, job.plan.memory
        prove_boxes(
            job.checkpoint,
            written,
            boxed,
            found,
            digests,
            memory=memory,
            progress=job.running.progress,
        )
    return found


def _verify(staged: StagedJob, written: Checkpoint, expected: Hashes) -> dict[str, Any] | None:
    """The outcome of the verification that the plan asks for.

    With `digest`, what the pass could not read back is read, and the metadata must refer to what it did.
    """
    job, staging = staged.job, staged.staging
    if job.plan.verify == "store":
        from wherry.target.object_staging import ObjectStaging

        assert isinstance(staging, ObjectStaging), "the plan has checked"
        _require_structure(job, written.manifest)
        algorithm = staging.run.compare_checksums()
        return {"level": "store", "ok": True, "tensors": len(job.plan.pairs), "checksum": algorithm}
    if job.plan.verify != "digest":
        return None
    clock, back = time.monotonic(), staged.output.back
    _require_structure(job, written.manifest)
    proved = () if back is None else back.proved(written)
    rest = [path for path in expected.digests if path not in proved]
    failed = read_back(
        written,
        expected,
        paths=rest if len(rest) < len(written.manifest.tensors) else None,
        memory=reading_memory(job.plan, staged.staged),
        progress=job.running.progress,
        folder=staged.staging.spill,
    )
    if failed:
        raise MismatchError(
            f"read-back differs from what was written: {failed[0].reason}",
            uri=job.target.uri,
            path=failed[0].path,
            cure="check the storage; nothing was committed",
        )
    seconds = round(time.monotonic() - clock, 3)
    taken = {source for target, source in job.plan.pairs.items() if target in proved}
    by_workers = 0 if back is None else back.evidence.nbytes(taken)
    more = {"bytes_by_workers": by_workers} if by_workers else {}
    return {"level": "digest", "ok": True, "tensors": len(job.plan.pairs), "seconds": seconds, **more}


def _prove_files(staged: StagedJob) -> None:
    """Read back the objects that are not read as tensors: companions, and the files of the container and of wherry.

    Raises:
        MismatchError: they differ from what was put.
    """
    folder = staged.job.row.companion_folder
    for one in staged.companions:
        place = staged.staged.member(f"{folder}{one.name}")
        if file_digest(place) != one.sha256:
            raise MismatchError(
                "read-back differs from what was written",
                uri=staged.job.target.uri,
                path=one.name,
                cure="check the storage; nothing was committed",
            )
    staged.staging.prove_small()


def _open_staged(job: Job, staged: Location) -> Checkpoint:
    """The staged target, opened like any checkpoint."""
    detection = job.row.detect(Glimpse(staged))
    if detection is None:
        raise MismatchError(
            f"the written target is not recognised as {job.row.name}",
            uri=job.target.uri,
            cure="report this as a bug, with the plan; nothing was committed",
        )
    return Checkpoint(job.row.open(staged, replace(detection, kind=job.plan.manifest.kind)))


def _require_structure(job: Job, found: Manifest) -> None:
    planned, written = job.plan.manifest.tensors, found.tensors
    odd = [
        path
        for path, spec in planned.items()
        if path not in written or (spec.shape, spec.dtype) != (written[path].shape, written[path].dtype)
    ]
    odd += written.keys() - planned.keys()
    if odd:
        raise MismatchError(
            f"read-back differs from the plan in shape or dtype at {'/'.join(min(odd))}", uri=job.target.uri
        )


def _sidecar(
    staged: StagedJob,
    ours: Hashes,
    hashes: Hashes,
    verification: dict[str, Any] | None,
    mark: str,
    files: dict[str, int | None] | None,
    companions: tuple[Companion, ...],
) -> tuple[Sidecar, Receipt]:
    job, plan = staged.job, staged.job.plan
    meta: dict[str, Any] = {"meta": redact_values(job.meta)} if job.meta else {}
    origin: dict[str, Any] = {**plan.manifest.origin, **meta}
    manifest = replace(plan.manifest, origin=origin).with_digests(ours.digests, companions)
    target = reference(job.target.uri, plan.to, plan.format_version, manifest, mark, job.algorithm)
    sources = source_references(
        job.checkpoint.original,
        staged.recorded,
        hashes.digests if job.source_digests is None else job.source_digests,
        # A view may replace a companion, as a layout does with the config: the source has its own.
        staged.companions if job.checkpoint.original is job.checkpoint else (),
        job.algorithm,
        plan.memory,
        staged.staging.spill,
    )
    merge = origin.get("merge", {})
    losses = {
        path: staged.output.losses[source]
        for path, source in plan.pairs.items()
        if source in staged.output.losses
    }
    if job.source_digests is None:
        blank = zeros_notes(plan.manifest.tensors, ours.digests)
    else:
        blank = zeros_notes(job.checkpoint.original.manifest.tensors, job.source_digests)
    blank += repeated_notes(plan.manifest.tensors, ours.digests, ours.seen)
    bytes_read, parents = plan.nbytes_in, list[dict[str, Any]]()
    if job.checkpoint.is_view:  # which takes several tensors for one, and those of other types
        taken = {stored for path in plan.pairs.values() for stored in job.checkpoint.made_of(path)}
        bytes_read = bytes_of(map(job.checkpoint.original.manifest.tensors.__getitem__, taken))
    if merge:
        rows: Sequence[Mapping[str, Any]] = merge["sources"]
        parents = [{**row, "checkpoint": asdict(one)} for row, one in zip(rows, sources, strict=True)]
    receipt = Receipt(
        source=sources[0],
        target=target,
        plan_digest=plan.digest,
        options=dict(plan.options),
        software=software(),
        started=job.running.started,
        finished=utc_now(),
        seconds=job.running.seconds,
        bytes_read=bytes_read,
        bytes_written=plan.nbytes_out,
        resumed_bytes=staged.journal.nbytes,
        note=staged.staging.discarded or staged.journal.reason,
        verification=verification,
        lossless=not plan.lossy and not merge and all(one.exact for one in losses.values()),
        warnings=[*plan.notes, *filter(None, [job.choice.note]), *losses_notes(losses), *blank],
        snippet=plan.snippet.replace("DST", job.target.uri),
        group=job.group,
        requested=dict(job.stated),
        ignored=[one.to_json() for one in fold_entries(plan.ignored)],
        family=plan.manifest.origin.get("layout", {}).get("family", ""),
        parents=parents,
        losses=[{"path": render(path), **asdict(one)} for path, one in sorted(losses.items())],
        origin=origin_digest(manifest.origin),
    )
    return Sidecar(manifest, target, receipt, ours.leaves, files), receipt
