"""commit: makes the result of a job from the receipts of its units.

The receipts become the journal of an interrupted run in which every move is done, next to the files that the workers
have made; then the conversion is resumed. So it is proved and committed like any conversion: it is read back and
compared with the hashes of the leaves that were read from the source, the commit member comes last and cannot
overwrite, and of two commits at the same time one makes the target. A receipt that lies cannot get through.

What other processes than its makers have read back is not read again (`read_back`). What receipts leave open of the
digests (short runs, workers without kernels, SHA-256) is read here, as a conversion in one process does.

A part of a shared upload is sent whole. One with bytes that depend on other units (the checksum in the frame of a
member whose tensor lies in two regions, the directory of an archive) cannot be sent by a unit. So the commit moves what
has bytes in such a part once more: one or two moves of 8 MiB for a region.
"""

from __future__ import annotations

import secrets
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from wherry.converter.convert import convert_all
from wherry.converter.job import targets_of
from wherry.core.keypath import render
from wherry.core.units import plural
from wherry.errors import IncompleteError, TargetInUseError, storage_errors
from wherry.mover.hashing import Hashes, hash_checkpoint
from wherry.mover.readback import ReadEvidence
from wherry.runtime import threads
from wherry.storage.copy import add_name
from wherry.storage.folders import make_folders, sync_folder, sync_tree
from wherry.target.area import JOURNAL, left_for
from wherry.target.file_ranges import file_sizes, ranges_of
from wherry.target.journal import finished_journal, open_journal
from wherry.target.object_staging import is_committed
from wherry.target.uploaded_file import part_size
from wherry.workers.attempts import (
    SharedUploads,
    attempt_folder,
    folder_token,
    made_place,
    map_of_job,
    object_path,
    receipt_of,
    shared_marks,
    shared_record,
    staging_of,
    watch_files,
)
from wherry.workers.claims import TOKEN_DIGITS, claims_of
from wherry.workers.job import opened_job
from wherry.workers.joined_leaves import joined_leaves, merged_hashes, merged_moves, with_boxes
from wherry.workers.read_back import differences, evidence_of, is_blamed, valid_proofs
from wherry.workers.record import Task, TaskKind, TaskRecord, records_by_unit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from wherry.converter.job import Job
    from wherry.core.keypath import KeyPath
    from wherry.core.progress import OnProgress
    from wherry.core.receipt import GroupReceipt
    from wherry.storage.location import Location
    from wherry.store.store import Part
    from wherry.target.durable_move import DurableMove
    from wherry.target.file_ranges import FileRange
    from wherry.workers.job import SplitJob
    from wherry.workers.unit import Unit


_NAMED = 5  # units that an error names
_AT_ONCE = 16  # requests


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
        receipts = None if is_made else _receipts(split, shared)
        if receipts is None:  # only the job is left, or another commit was interrupted
            group = convert_all(split.record.request, progress=progress)
        else:  # all of them is checked before anything is moved
            boxes, sources = dict["KeyPath", tuple[bytes, ...]](), None
            if len(split.algorithms) == 1:
                held, specs = [(one, one.boxes) for one in receipts], job.checkpoint.manifest.tensors
                boxes = joined_leaves(held, specs, split.algorithms[0], split.uri)
            if job.checkpoint.is_view:
                specs = job.checkpoint.original.manifest.tensors
                sources = merged_hashes(receipts, specs, split.algorithms, split.uri)
            evidence = _evidence(split, receipts, boxes)
            _compose(split, receipts, boxes, shared)

            def prepare(job: Job) -> Job:
                return replace(job, evidence=evidence, source_hashes=_with_rest(job, sources, progress))

            group = convert_all(split.record.request, progress=progress, prepare=prepare)
        split.records.end()
    return group


def _receipts(split: SplitJob, shared: SharedUploads) -> list[TaskRecord] | None:
    """One valid receipt of each unit; None if another commit has used their files, and was interrupted.

    Raises:
        IncompleteError: units are not made.
        MismatchError: a receipt does not cover its unit, or two receipts of one unit differ.
    """
    finished = records_by_unit(TaskKind.MAKE, split.records.names())

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
        cure=f"run `wherry work {shlex.quote(split.job.committed.uri)}`",
    )


def _make_again(split: SplitJob, unit: Unit, receipts: list[str], proofs: Sequence[TaskRecord] = ()) -> None:
    """Remove the receipts of a unit whose files are not there as it was left, and what is still there of them.

    Args:
        split: the job.
        unit: the unit.
        receipts: its receipts.
        proofs: which other units' proofs are of no use without it; those of a file that it shares are neither.
    """
    tokens, names = {name[-TOKEN_DIGITS:] for name in receipts}, split.records.names()
    void = {unit.number, *(proof.unit for proof in proofs)}
    if unit.region is not None:  # what it writes again changes the state of the file for all
        void |= {one.number for one in split.units if one.files[0].name == unit.files[0].name}
    own = [name for number in void for name in records_by_unit(TaskKind.READ, names).get(number, ())]
    again = [
        Task(TaskKind.MAKE, unit),
        *(Task(TaskKind.READ, split.units[number]) for number in sorted(void)),
    ]
    for name in [*receipts, *own, *(claim for task in again for claim in claims_of(task, names))]:
        split.records.remove(name)
    store = split.records.store
    if store is None:
        return
    for file in unit.files:
        path = object_path(split, file.name)
        found = store.head(path)
        if found is not None and found.run in tokens:
            store.remove_object(path, found.mark)


def _is_composed(split: SplitJob) -> bool:
    """Whether an earlier commit has left the staging area on the file system from which it can be resumed."""
    if split.records.store is not None:
        return False
    committed = split.job.committed
    return any(
        one.identity == split.record.run for one in left_for(Path(committed.parent.path), committed.name)
    )


def _with_rest(
    job: Job, sources: Mapping[str, Hashes] | None, progress: OnProgress | None
) -> dict[str, Hashes] | None:
    """The digests of the source of a view; tensors that workers have not hashed are read."""
    if sources is None:
        return None
    source, memory, found = job.checkpoint.original, job.plan.memory, dict[str, "Hashes"]()
    for name, known in sources.items():
        rest = [path for path in source.manifest.tensors if path not in known.digests]
        read = hash_checkpoint(source, name, memory=memory, progress=progress, stage="digest", paths=rest)
        found[name] = known.joined(read)
    return found


def _evidence(
    split: SplitJob, receipts: list[TaskRecord], boxes: Mapping[KeyPath, Sequence[bytes]]
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
    shared = shared_marks(split, receipts)
    proofs = valid_proofs(split, receipts, found, shared)
    difference = next(differences(proofs, receipts, merged_moves(receipts, split.uri)), None)
    if difference is None:
        return lambda staged: replace(
            evidence_of(proofs, receipts, boxes, staged),
            changed=watch_files(split, receipts, staged, shared),
        )
    by_name = {receipt.name: receipt for receipt in receipts}
    wrong = [by_name[name] for name in difference.proof.of]
    wrong = [one for one in wrong if is_blamed(split, one, difference)] or wrong
    for receipt in wrong:
        void = [proof for proof in proofs if receipt.name in proof.of]
        _make_again(split, split.units[receipt.unit], [receipt.name], void)
    raise IncompleteError(
        f"{', '.join(f'unit {split.units[one.unit].name}' for one in wrong)}: {difference.proof.worker} read back"
        f" other bytes{difference.where} than {', '.join(one.worker for one in wrong)} wrote",
        uri=split.uri,
        path=render(difference.source),
        cure=f"run `wherry work {shlex.quote(split.job.committed.uri)}`, which writes them again",
    )


def _compose(
    split: SplitJob,
    receipts: list[TaskRecord],
    boxes: Mapping[KeyPath, Sequence[bytes]],
    shared: SharedUploads,
) -> None:
    """Leave files, objects and a journal as a run does that was interrupted after its last move."""
    area, store = staging_of(split), split.records.store
    rows = with_boxes(merged_moves(receipts, split.uri), boxes)
    if store is not None:
        uploads = list(shared.uploads.values())
        runs = [receipt.token for receipt in receipts] + [upload.run for upload in uploads]
        notes = [note for receipt in receipts for note in receipt.notes]
        parts = [part for receipt in receipts for part in shared.current(receipt)]
        rows = without_open(split, rows, parts, shared)
        sent = [[path, asdict(part)] for path, part in parts]
        members = split.job.row.commit_members
        finished_journal(area, split.record.header, members, runs, rows, notes, sent, uploads)
        return
    if _is_composed(split):
        return  # another commit has done it
    draft = Path(split.records.folder.join(f"area-{secrets.token_hex(4)}").path)
    with storage_errors(split.uri):
        draft.mkdir(mode=0o700)
        _gather(split, receipts, draft)
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


def _gather(split: SplitJob, receipts: list[TaskRecord], draft: Path) -> None:
    """Give the files of all attempts second names in one folder."""
    for receipt in receipts:
        origin = attempt_folder(split, folder_token(split, receipt))
        for file in receipt.files:
            made = Path(made_place(split, receipt, file.name).path)
            place = draft / made.relative_to(origin)
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
        cure=f"wait for it, or run `wherry commit {shlex.quote(split.job.committed.uri)}` again",
        retryable=True,
    )


# ---- parts that no unit could send -----------------------------------------------------------------------------------


def without_open(
    split: SplitJob, rows: list[DurableMove], parts: Iterable[tuple[str, Part]], shared: SharedUploads
) -> list[DurableMove]:
    """The moves all of whose bytes are in parts that were sent.

    Args:
        split: the job.
        rows: moves that units have made.
        parts: path of an object and one of its parts, that were sent.
        shared: the shared uploads.
    """
    if not shared.uploads:
        return rows
    job, store = split.job, split.records.store
    assert store is not None, "uploads are in one"
    paths = {upload.path for upload in shared.uploads.values()}
    sent = {(path, part.number) for path, part in parts}
    file_map, targets = map_of_job(job), targets_of(job.plan)
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
