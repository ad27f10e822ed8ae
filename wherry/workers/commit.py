"""commit: makes the result of a job from the receipts of its units.

The receipts become the journal of an interrupted run in which every move is done, next to the files that the workers
have made; then the conversion is resumed. So it is proved and committed like any conversion: it is read back and
compared with the hashes of the leaves that were read from the source, the commit member comes last and cannot
overwrite, and of two commits at the same time one makes the target. A false receipt cannot get through.

Bytes that another process than their maker has read back are not read again. A proof counts if another process than
the maker of the unit made it, with the same wherry, of the files that the receipts name, and if it has read the same
leaves that the maker has hashed. A move that two units have made counts if the proofs of both have it, a leaf that is
in several moves if all of them count. Of a tensor in boxes, a unit and its proof must have hashed the same bytes, and
a leaf counts if every unit that has bytes of it was read back. A file that several units have made must be as it was
before it was read, and its receipts do not say how: so proofs do. So every byte that the commit does not read was read
from storage by a process that has not written it, and the commit has compared the result. Tensors whose digests do not
follow from the receipts (short runs, workers without kernels, SHA-256) are read here, as a conversion in one process
does.

A part of a shared upload is sent whole. One with bytes that depend on other units (the checksum in the frame of a
member whose tensor is in two regions, the directory of an archive) cannot be sent by a unit. So the commit moves what
has bytes in such a part once more: one or two moves of 8 MiB for a region.

Leaves that lie in several units are joined from values: nobody reads a byte for that. A tensor of which something is
missing (runs were short, a worker had no kernels) has no leaves here, and is read.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

from wherry.converter.convert import convert_all
from wherry.converter.job import Job, targets_of
from wherry.core import threads
from wherry.core.digest import HASH_BYTES, LEAF, LeafHasher, LeafValues, leaf_count, tensor_digest
from wherry.core.keypath import KeyPath, render
from wherry.core.progress import OnProgress
from wherry.core.receipt import GroupReceipt
from wherry.core.tensorspec import Span, TensorSpec
from wherry.core.units import plural
from wherry.cures import Command, Cure
from wherry.errors import IncompleteError, MismatchError, TargetInUseError, storage_errors
from wherry.formats.format import Extent
from wherry.mover.hashing import Hashes, hash_checkpoint
from wherry.mover.readback import ReadEvidence, SharedBlock
from wherry.store.copy import add_name
from wherry.store.folders import make_folders, sync_folder, sync_tree
from wherry.store.location import Location
from wherry.store.remote_store import heads
from wherry.store.store import Part
from wherry.target.file_ranges import FileRange, file_sizes, ranges_of
from wherry.target.journal import Checks, DurableMove, finished_journal, open_journal
from wherry.target.object_staging import is_committed
from wherry.target.staging import JOURNAL, left_for
from wherry.target.uploaded_file import part_size
from wherry.version import __version__
from wherry.workers.job import SplitJob, opened_job
from wherry.workers.records import (
    TOKEN_DIGITS,
    Claim,
    Task,
    TaskKind,
    TaskRecord,
    claims_among,
    records_by_unit,
)
from wherry.workers.tasks import (
    SharedUploads,
    is_as_made,
    made_place,
    member,
    object_path,
    receipt_of,
    shared_record,
    staged_in,
    staging_of,
)
from wherry.workers.unit import Unit

_NAMED = 5  # units that an error names
_AT_ONCE = 16  # requests
_Share: TypeAlias = tuple[TaskRecord, LeafValues]  # what one receipt has of a tensor


def commit(uri: str, *, progress: OnProgress | None = None) -> GroupReceipt:
    """Prove and commit the result of a job, and remove the job.

    Args:
        uri: the folder of the job, or its target.
        progress: called a few times a second.

    Returns:
        The receipt of the one target; `already` if it was committed before.

    Raises:
        NotFoundError: there is no job.
        IncompleteError: units are not made, or not as their receipts say; nothing was committed.
        MismatchError: a receipt is wrong, or this process sees another source or plan; nothing was committed.
        TargetExistsError, TargetInUseError: something else is at the target, or is writing it.
        WherryError: what `convert` raises.
    """
    with opened_job(uri) as split:
        job, store = split.job, split.records.store
        is_made = (
            job.committed.exists() if store is None else is_committed(job.committed, job.row.commit_members)
        )
        shared = SharedUploads(split)
        finished = records_by_unit(TaskKind.MAKE, () if is_made else split.records.names())
        receipts = None if is_made else _receipts(split, finished, shared)
        prepare: Callable[[Job], Job] | None = None  # only the job is left, or another commit was interrupted
        if receipts is not None:  # all of them is checked before anything is moved
            moves, boxes = _merged_moves(receipts, split.uri), dict[KeyPath, tuple[bytes, ...]]()
            if len(split.algorithms) == 1:
                held, specs = [(one, one.boxes) for one in receipts], job.checkpoint.manifest.tensors
                boxes = _joined_leaves(held, specs, split.algorithms[0], split.uri)
            sources = _merged_hashes(split, receipts) if job.checkpoint.is_view else None
            evidence = _evidence(split, finished, receipts, moves, boxes)
            _compose(split, receipts, _with_boxes(moves, boxes), shared)
            prepare = partial(_with_findings, evidence=evidence, sources=sources, progress=progress)
        group = convert_all(split.record.request, progress=progress, prepare=prepare)
        split.records.end()
    return group


def _receipts(
    split: SplitJob, finished: Mapping[int, Sequence[str]], shared: SharedUploads
) -> list[TaskRecord] | None:
    """One valid receipt of each unit; None if another commit has used their files, and was interrupted."""

    def found_of(unit: Unit) -> TaskRecord | None:
        return receipt_of(split, unit, finished.get(unit.number, []), shared)

    with threads.executor(_AT_ONCE, "wherry-receipts", numbers=False) as pool:
        rows = pool.map(found_of, split.units)
        found = {unit.number: row for unit, row in zip(split.units, rows, strict=True) if row is not None}
    missing = [unit.name for unit in split.units if unit.number not in found]
    if not missing:
        return [found[unit.number] for unit in split.units]
    if _is_composed(split):
        return None
    kept = {unit.files[0].name for unit in split.units if unit.number in found}
    for unit in split.units:
        if unit.number not in found and unit.number in finished:
            _make_again(split, unit, finished[unit.number])
            if unit.region is not None and unit.files[0].name not in kept:  # the file that they share is lost
                split.records.remove(shared_record(unit))
    more = ", …" if len(missing) > _NAMED else ""
    raise IncompleteError(
        f"{len(missing)} of {plural(len(split.units), 'unit')} are not written: {', '.join(missing[:_NAMED])}{more}",
        uri=split.uri,
        cure=Cure("run {}", Command("work", split.job.committed.uri)),
    )


def _make_again(
    split: SplitJob, unit: Unit, receipts: Sequence[str], proofs: Sequence[TaskRecord] = ()
) -> None:
    """Remove receipts of a unit whose files are not as they were left, its claims, and what is there of its objects.

    Proofs that name it cannot be used without it, nor those of a file that it shares. A receipt that was written since
    the commit has looked stays, with its objects: another commit may use them, and may have committed them.
    """
    tokens, names = {name[-TOKEN_DIGITS:] for name in receipts}, split.records.names()
    void = {unit.number, *(proof.unit for proof in proofs)}
    if unit.region is not None:  # what it writes again changes the state of the file for all
        void |= {one.number for one in split.units if one.files[0].name == unit.files[0].name}
    found = records_by_unit(TaskKind.READ, names)
    read = [name for number in void for name in found.get(number, ())]
    keys = {Task(TaskKind.MAKE, unit).key, *(Task(TaskKind.READ, split.units[number]).key for number in void)}
    claims = [Claim(key, attempt, "").name for key, attempt in claims_among(names) if key in keys]
    for name in (*receipts, *read, *claims):
        split.records.remove(name)
    if (store := split.records.store) is None:
        return
    for path in (object_path(split, file.name) for file in unit.files):
        entry = store.head(path)
        if entry is not None and entry.run in tokens:
            store.remove_object(path, entry.mark)


def _is_composed(split: SplitJob) -> bool:
    """Whether an earlier commit has left the staging area on the file system from which it can be resumed."""
    if split.records.store is not None:
        return False
    committed = split.job.committed
    return any(
        one.identity == split.record.run for one in left_for(Path(committed.parent.path), committed.name)
    )


def _with_findings(
    job: Job,
    evidence: Callable[[Location], ReadEvidence],
    sources: Mapping[str, Hashes] | None,
    progress: OnProgress | None,
) -> Job:
    """The job with what workers have found; tensors of the source of a view that none has hashed are read."""
    if sources is None:
        return replace(job, evidence=evidence)
    source, memory, found = job.checkpoint.original, job.plan.memory, dict[str, Hashes]()
    for name, known in sources.items():
        rest = [path for path in source.manifest.tensors if path not in known.digests]
        read = hash_checkpoint(source, name, memory=memory, progress=progress, stage="digest", paths=rest)
        found[name] = known.joined(read)
    return replace(job, evidence=evidence, source_hashes=found)


def _evidence(
    split: SplitJob,
    finished: Mapping[int, Sequence[str]],
    receipts: list[TaskRecord],
    moves: Iterable[DurableMove],
    boxes: Mapping[KeyPath, Sequence[bytes]],
) -> Callable[[Location], ReadEvidence]:
    """A function that gives what workers have read back, of the target as it is staged.

    Raises:
        IncompleteError: a worker has read something else than what the maker of a unit says that it wrote; the unit is
            made again.
    """
    names = records_by_unit(TaskKind.READ, split.records.names()).values()
    found = split.records.read_all([name for of_unit in names for name in of_unit], TaskRecord)
    if not found:
        return lambda _staged: ReadEvidence()
    shared = _shared_marks(split, receipts)
    proofs = valid_proofs(split, receipts, found, shared)
    difference = next(_differences(proofs, receipts, moves), None)
    if difference is None:
        return lambda staged: replace(
            evidence_of(proofs, receipts, boxes, staged),
            changed=watch_files(split, receipts, staged, shared),
        )
    wrong = [receipt for receipt in receipts if receipt.name in difference.proof.of]
    wrong = [one for one in wrong if difference.blames(split.units[one.unit])] or wrong
    for receipt in wrong:
        void = [proof for proof in proofs if receipt.name in proof.of]
        _make_again(split, split.units[receipt.unit], finished[receipt.unit], void)
    where = "" if difference.leaf is None else f" of leaf {difference.leaf}"
    raise IncompleteError(
        f"{', '.join(f'unit {split.units[one.unit].name}' for one in wrong)}: {difference.proof.worker} read back"
        f" other bytes{where} than {', '.join(one.worker for one in wrong)} wrote",
        uri=split.uri,
        path=render(difference.source),
        cure=Cure("run {}, which writes them again", Command("work", split.job.committed.uri)),
    )


def _shared_marks(split: SplitJob, receipts: Sequence[TaskRecord]) -> dict[str, str]:
    """Name of each file of a file system that several units have made → its present state."""
    marks: dict[str, str] = {}
    for receipt in receipts if split.records.store is None else ():
        name = receipt.files[0].name
        if split.units[receipt.unit].region is not None and name not in marks:
            entry = made_place(split, receipt, name).stat()
            marks[name] = entry.mark if entry else ""
    return marks


def watch_files(
    split: SplitJob, receipts: Sequence[TaskRecord], staged: Location, shared: Mapping[str, str]
) -> Callable[[], frozenset[str]]:
    """A function that tells which files of a staged target are no longer as they were read, by their paths.

    That is as their receipts say, or, of files that several units have made on a file system, as `shared` does. Objects
    that several units make were not read by workers.

    Args:
        split: the job.
        receipts: one of each unit.
        staged: where the target is staged.
        shared: name of each file of several units → its state.
    """
    store = split.records.store
    rows = [(member(staged, file.name), one, file) for one in receipts for file in one.files]
    if store is not None:
        made = {
            object_path(split, file.name): (place.path, one, file)
            for place, one, file in rows
            if split.units[one.unit].region is None
        }

        def replaced() -> frozenset[str]:
            found = ((made[path], state) for path, state in heads(store, made))
            return frozenset(path for (path, one, file), state in found if not is_as_made(state, one, file))

        return replaced

    def state(place: Location) -> str:
        entry = place.stat()
        return entry.inode if entry else ""

    # The writer of the format may write headers again, which changes the time of the last change.
    first = {
        place: state(place)
        if (entry := place.stat()) and entry.mark == shared.get(file.name, file.mark)
        else None
        for place, _one, file in rows
    }
    return lambda: frozenset(place.path for place, inode in first.items() if state(place) != inode)


def _compose(
    split: SplitJob, receipts: list[TaskRecord], rows: list[DurableMove], shared: SharedUploads
) -> None:
    """Leave files, objects and a journal as a run does that was interrupted after its last move."""
    area, store = staging_of(split), split.records.store
    if store is not None:
        uploads = list(shared.uploads.values())
        runs = [receipt.token for receipt in receipts] + [upload.run for upload in uploads]
        notes = [note for receipt in receipts for note in receipt.notes]
        parts = [part for receipt in receipts for part in shared.current(receipt)]
        rows = _without_open(split, rows, parts, shared) if uploads else rows
        sent = [[path, asdict(part)] for path, part in parts]
        members = split.job.row.commit_members
        finished_journal(area, split.record.header, members, runs, rows, notes, sent, uploads)
        return
    if _is_composed(split):
        return  # another commit has done it
    place = split.records.folder.join(f"area-{secrets.token_hex(4)}")
    draft = Path(place.path)
    with storage_errors(split.uri):
        draft.mkdir(mode=0o700)
        _gather(split, receipts, place)
        journal = open_journal(draft / JOURNAL, split.record.header)
        try:
            journal.record(rows)
        finally:
            journal.close()
        sync_tree(draft)
        try:
            draft.rename(area.path)
        except OSError as error:  # another commit was faster
            raise _taken_error(split) from error
        sync_folder(Path(area.path).parent)
        for receipt in receipts:
            for file in receipt.files:  # files of an area have one name each
                Path(made_place(split, receipt, file.name).path).unlink(missing_ok=True)


def _gather(split: SplitJob, receipts: list[TaskRecord], draft: Location) -> None:
    """Give the files of all attempts second names in one folder."""
    staged = staged_in(split, draft)
    for receipt in receipts:
        for file in receipt.files:
            made = Path(made_place(split, receipt, file.name).path)
            place = Path(member(staged, file.name).path)
            if place.exists():
                continue  # another region of it has come first
            make_folders(place.parent)
            try:
                add_name(made, place)
            except FileNotFoundError as error:  # another commit was faster
                raise _taken_error(split) from error


def _taken_error(split: SplitJob) -> TargetInUseError:
    return TargetInUseError(
        "another process commits this job",
        uri=split.uri,
        cure=Cure("wait for it, or run {} again", Command("commit", split.job.committed.uri)),
        retryable=True,
    )


def _without_open(
    split: SplitJob, rows: list[DurableMove], parts: Iterable[tuple[str, Part]], shared: SharedUploads
) -> list[DurableMove]:
    """The moves all of whose bytes are in parts that were sent."""
    store = split.records.store
    assert store is not None, "uploads are in one"
    paths = {upload.path for upload in shared.uploads.values()}
    sent = {(path, part.number) for path, part in parts}
    file_map, targets = split.file_map(), targets_of(split.job.plan)
    sizes = file_sizes(file_map)
    assert sizes is not None, "files of unknown sizes have one process"

    def was_sent(found: FileRange) -> bool:
        path = object_path(split, found.file)
        if path not in paths or found.start == found.stop:
            return True
        step = part_size(sizes[found.file], store.part_limits)
        return all((path, number) in sent for number in range(found.start // step, -(-found.stop // step)))

    def is_done(row: DurableMove) -> bool:
        target = targets[row.source]
        if target.chunks is not None:  # files with chunks have no regions
            return True
        return all(map(was_sent, ranges_of(file_map, target.path, row.span) or ()))

    return [row for row in rows if is_done(row)]


# ---- what receipts say together -------------------------------------------------------------------------------------


def _joined_leaves(
    rows: Iterable[tuple[TaskRecord, Mapping[KeyPath, LeafValues]]],
    specs: Mapping[KeyPath, TensorSpec],
    algorithm: str,
    uri: str,
) -> dict[KeyPath, tuple[bytes, ...]]:
    """The leaves of the tensors of which units together have hashed every byte."""
    shares: dict[KeyPath, defaultdict[int, list[_Share]]] = {}
    for receipt, held in rows:
        for path, values in held.items():
            count = leaf_count(specs[path].nbytes) if path in specs else -1
            if count < 0 or any(leaf >= count for leaf in (*values.leaves, *values.parts)):
                raise _invalid(receipt, path, uri)
            of_leaf = shares.setdefault(path, defaultdict(list))
            for leaf in (*values.leaves, *values.parts):
                of_leaf[leaf].append((receipt, values))
    found: dict[KeyPath, tuple[bytes, ...]] = {}
    for path, of_leaf in shares.items():
        hasher = LeafHasher(specs[path], (algorithm,))
        # One leaf after the other, so that one is open; where one is not known, the others are of no use.
        if all(_join_leaf(hasher, leaf, of_leaf[leaf], path, uri) for leaf in range(len(hasher.leaves))):
            found[path] = hasher.hashes(algorithm)
    return found


def _join_leaf(hasher: LeafHasher, leaf: int, shares: Iterable[_Share], path: KeyPath, uri: str) -> bool:
    """Whether a leaf is known, after what all receipts have of it was taken."""
    for receipt, values in shares:
        digest = values.leaves.get(leaf)
        if digest is not None and hasher.leaves[leaf] not in (None, digest):
            raise _invalid(receipt, path, uri)
        if digest is not None:
            hasher.preset(leaf, digest)
        elif leaf in values.parts:
            try:
                hasher.take_values(leaf, values.parts[leaf])
            except ValueError as error:
                raise _invalid(receipt, path, uri) from error
    return hasher.leaves[leaf] is not None


def _invalid(receipt: TaskRecord, path: KeyPath, uri: str) -> MismatchError:
    return MismatchError(
        f"the receipt {receipt.name} by {receipt.worker} has values of a tensor that are invalid, or differ from those"
        " of another receipt",
        uri=uri,
        path=render(path),
        cure=Cure("remove {} and run {} again", receipt.name, Command("work")),
    )


def _merged_moves(receipts: Iterable[TaskRecord], uri: str) -> list[DurableMove]:
    """The moves of all units, each once: one with chunks of two units was made by both."""
    found: dict[tuple[KeyPath, Span], tuple[DurableMove, TaskRecord]] = {}
    for receipt in receipts:
        for move in receipt.moves:
            first, maker = found.setdefault((move.source, move.span), (move, receipt))
            if first != move:
                raise MismatchError(
                    f"two workers have read different bytes: {maker.worker} and {receipt.worker}",
                    uri=uri,
                    path=render(move.source),
                    cure=Cure(
                        "check both machines, remove {} and {}, and run {} again",
                        maker.name,
                        receipt.name,
                        Command("work"),
                    ),
                )
    return [move for move, _receipt in found.values()]


def _with_boxes(moves: Iterable[DurableMove], leaves: Mapping[KeyPath, Sequence[bytes]]) -> list[DurableMove]:
    """The moves, those in boxes with the leaves of their tensors.

    A box has no leaf of its own: its span only orders the boxes of a tensor. So each leaf goes to the moves that have
    its place among the spans.
    """

    def complete(move: DurableMove) -> DurableMove:
        if move.source not in leaves or move.leaves:
            return move
        numbers = range(move.span.start // LEAF, leaf_count(move.span.stop))
        return move._replace(leaves={number: leaves[move.source][number] for number in numbers})

    return [complete(move) for move in moves]


def _merged_hashes(split: SplitJob, receipts: Sequence[TaskRecord]) -> dict[str, Hashes]:
    """The digests of the source's own tensors, by algorithm; without those that units have not hashed whole."""
    specs = split.job.checkpoint.original.manifest.tensors
    shared = [(receipt, receipt.sources) for receipt in receipts] if len(split.algorithms) == 1 else []
    found: dict[str, Hashes] = {}
    for algorithm in split.algorithms:
        leaves = _joined_leaves(shared, specs, algorithm, split.uri)
        for path, text in (row for receipt in receipts for row in receipt.hashed.get(algorithm, {}).items()):
            leaves[path] = tuple(text[at : at + HASH_BYTES] for at in range(0, len(text), HASH_BYTES))
        digests = {path: tensor_digest(specs[path], own, algorithm) for path, own in leaves.items()}
        found[algorithm] = Hashes(algorithm, digests, leaves)
    return found


# ---- what workers have read back -------------------------------------------------------------------------------------


class _Difference(NamedTuple):
    """Bytes that were read back otherwise than their receipt says."""

    proof: TaskRecord
    source: KeyPath
    leaf: int | None  # None of boxes, of which no process has whole leaves

    def blames(self, unit: Unit) -> bool:
        """Whether a unit has written these bytes."""
        if self.leaf is None:
            return unit.number == self.proof.unit
        start, stop = self.leaf * LEAF, (self.leaf + 1) * LEAF
        return any(
            part.source == self.source and part.start < stop and part.stop > start for part in unit.parts
        )


def valid_proofs(
    split: SplitJob, receipts: Sequence[TaskRecord], proofs: Iterable[TaskRecord], present: Mapping[str, str]
) -> list[TaskRecord]:
    """The proofs that count.

    Args:
        split: the job.
        receipts: one of each unit, whose files are there.
        proofs: all that were found.
        present: name of each file that several units have made → its state.
    """
    names = {receipt.name: receipt.unit for receipt in receipts}

    def counts(proof: TaskRecord) -> bool:
        if proof.unit >= len(split.units):
            return False
        unit, maker = split.units[proof.unit], receipts[proof.unit]
        marks = {file.name: file.mark for file in proof.files}
        return (
            (proof.digest, proof.version, proof.algorithm) == (unit.digest, __version__, split.algorithms[0])
            and proof.worker != maker.worker
            and maker.name in proof.of
            and names.keys() >= set(proof.of)
            and all(unit.has(move.source, move.span) for move in proof.moves)
            and proof.boxes_read.keys() <= {part.source for part in unit.parts}
            and marks.items() <= present.items()
            and (unit.region is None or unit.files[0].name in marks)
        )

    return [proof for proof in proofs if counts(proof)]


def _differences(
    proofs: Iterable[TaskRecord], receipts: Sequence[TaskRecord], moves: Iterable[DurableMove]
) -> Iterator[_Difference]:
    """The bytes of which proofs that count and receipts say different things."""
    made = {(move.source, move.span): move.leaves for move in moves}
    for proof in proofs:
        for source, digest in proof.boxes_read.items():
            values = receipts[proof.unit].boxes.get(source)
            if values is not None and values.digest != digest:
                yield _Difference(proof, source, None)
        for read in proof.moves:
            wrote = made.get((read.source, read.span), {})
            for leaf in sorted(wrote.keys() | read.leaves.keys()):
                if read.leaves.get(leaf) != wrote.get(leaf, b"")[:HASH_BYTES]:
                    yield _Difference(proof, read.source, leaf)


def evidence_of(
    proofs: Sequence[TaskRecord],
    receipts: Sequence[TaskRecord],
    boxes: Mapping[KeyPath, Sequence[bytes]],
    staged: Location,
) -> ReadEvidence:
    """The evidence of other processes, so that the commit does not read the same bytes.

    Args:
        proofs: those that count, in which nothing differs.
        receipts: one of each unit.
        boxes: the leaves of tensors in boxes that units together have hashed.
        staged: where the target is staged.
    """
    read = {(proof.unit, move.source, move.span): move.checks for proof in proofs for move in proof.moves}
    made = [(receipt.unit, move) for receipt in receipts for move in receipt.moves]
    lost = [move for unit, move in made if (unit, move.source, move.span) not in read]
    # A move with chunks of two units must be in the proofs of both.
    gone = {(move.source, move.span) for move in lost}
    unread = {(move.source, leaf) for move in lost for leaf in move.leaves}
    spans: dict[tuple[KeyPath, Span], Checks] = {}
    leaves: defaultdict[KeyPath, dict[int, bytes]] = defaultdict(dict)
    for unit, move in made:
        key = (move.source, move.span)
        if key not in gone and not any((move.source, leaf) in unread for leaf in move.leaves):
            spans[key] = read[unit, *key]
            leaves[move.source] |= {leaf: raw[:HASH_BYTES] for leaf, raw in move.leaves.items()}
    values: dict[KeyPath, list[tuple[int, bytes]]] = {}
    for source, wanted in boxes.items():
        proved = {proof.unit for proof in proofs if source in proof.boxes_read}
        proved -= {unit for unit, move in made if move.source == source and (source, move.span) in gone}
        leaves[source], values[source] = _read_of_boxes(source, wanted, proved, receipts)
    blocks: defaultdict[KeyPath, list[SharedBlock]] = defaultdict(list)
    for one in (block for proof in proofs for block in proof.blocks):
        extent = Extent(member(staged, one.name), one.start, one.length)
        blocks[one.source].append(SharedBlock(extent, one.digest))
    return ReadEvidence(spans, dict(leaves), values, dict(blocks))


def _read_of_boxes(
    source: KeyPath, wanted: Sequence[bytes], proved: Collection[int], receipts: Iterable[TaskRecord]
) -> tuple[dict[int, bytes], list[tuple[int, bytes]]]:
    """The leaves of a tensor in boxes that were read back whole, and what some units' proofs have of the others."""
    held = {one.unit: one.boxes[source] for one in receipts if source in one.boxes}
    read = [values for unit, values in held.items() if unit in proved]
    unread = {
        leaf
        for unit, values in held.items()
        if unit not in proved
        for leaf in (*values.leaves, *values.parts)
    }
    whole = {leaf for values in read for leaf in values.leaves}
    leaves = {leaf: digest for leaf, digest in enumerate(wanted) if leaf in whole or leaf not in unread}
    parts = (part for values in read for part in values.parts.items())
    return leaves, [(leaf, part) for leaf, part in parts if leaf not in leaves]
