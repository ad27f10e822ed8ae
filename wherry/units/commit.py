"""commit: makes the result of a job from the receipts of its units.

The receipts become the journal of an interrupted run in which every move is done, beside the files that the workers
have made; then the conversion is resumed. So it is proved and committed like any conversion: it is read back and
compared with the hashes of the leaves that were read from the source, the commit member comes last and cannot
overwrite, and of two commits at the same time one makes the target. A receipt that lies cannot get through.

What other processes than its makers have read back is not read again (`proof_check`). What receipts leave open of the
digests (short runs, workers without kernels, SHA-256) is read here, as a conversion in one process does.
"""

from __future__ import annotations

import secrets
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from wherry.converter.convert import convert_all
from wherry.core.keypath import render
from wherry.core.units import plural
from wherry.errors import IncompleteError, MismatchError, TargetInUseError, storage_errors
from wherry.mover.hashing import Hashes, hash_checkpoint
from wherry.mover.readback import ReadBefore
from wherry.records.claims import TOKEN_DIGITS, claims_of
from wherry.records.joined_leaves import joined_leaves, merged_hashes, with_boxes
from wherry.records.unit_proof import proof_from, proofs_in
from wherry.records.unit_receipt import (
    UnitReceipt,
    merged_moves,
    receipt_from,
    receipts_by_unit,
    require_equal,
    require_whole,
)
from wherry.runtime import threads
from wherry.staging.area import JOURNAL, LOG_SUFFIX, left_for
from wherry.staging.journal import open_journal
from wherry.staging.object_journal import finished_journal
from wherry.staging.object_staging import is_committed
from wherry.storage.copy import add_name
from wherry.storage.folders import make_folders, sync_folder, sync_tree
from wherry.units.made_files import folder_token, object_path, shared_marks, watch_files
from wherry.units.make import attempt_folder, member, staged_at, staging_of
from wherry.units.open_parts import without_open
from wherry.units.proof_check import differences, is_blamed, read_before, valid_proofs
from wherry.units.shared_files import SharedUploads, shared_record, shared_token
from wherry.units.split_job import opened_job
from wherry.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from wherry.converter.job import Job
    from wherry.core.keypath import KeyPath
    from wherry.core.progress import OnProgress
    from wherry.core.receipt import GroupReceipt
    from wherry.records.unit import Unit
    from wherry.records.unit_proof import UnitProof
    from wherry.storage.location import Location
    from wherry.units.split_job import SplitJob

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
        shared = SharedUploads(split, partial(object_path, split))
        receipts, before, sources = None if _is_made(split) else _receipts(split, shared), _unread, None
        if receipts is not None:  # all of them is checked before anything is moved
            boxes, sources = _boxes(split, receipts), _source_hashes(split, receipts)
            before = _proofs(split, receipts, boxes)
            _compose(split, receipts, boxes, shared)

        def prepare(job: Job) -> Job:
            if receipts is None:
                return job
            return replace(job, before=before, source_hashes=_with_rest(job, sources, progress))

        group = convert_all(split.request, progress=progress, prepare=prepare)
        split.records.end()
    return group


def _is_made(split: SplitJob) -> bool:
    """Whether the target is there, so that only the job is left."""
    committed = split.job.committed
    if split.records.store is None:
        return committed.exists()
    return is_committed(committed, split.job.row.commit_members)


def _receipts(split: SplitJob, shared: SharedUploads) -> list[UnitReceipt] | None:
    """One valid receipt of each unit; None if another commit has used their files, and was interrupted.

    Raises:
        IncompleteError: units are not made.
        MismatchError: a receipt does not cover its unit, or two receipts of one unit differ.
    """
    finished = receipts_by_unit(split.records.names())

    def found_of(unit: Unit) -> UnitReceipt | None:
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
                split.records.remove(shared_record(unit.files[0].name))
    more = ", …" if len(missing) > _NAMED else ""
    raise IncompleteError(
        f"{len(missing)} of {plural(len(split.units), 'unit')} are not written: {', '.join(missing[:_NAMED])}{more}",
        uri=split.uri,
        cure=f"run `wherry work {shlex.quote(split.job.committed.uri)}`",
    )


def _make_again(split: SplitJob, unit: Unit, receipts: list[str], proofs: Sequence[UnitProof] = ()) -> None:
    """Remove the receipts of a unit whose files are not there as it was left, and what is still there of them.

    Args:
        split: the job.
        unit: the unit.
        receipts: its receipts.
        proofs: which other units' proofs are of no use without it; those of a file that it shares are neither.
    """
    tokens, names = {name[-TOKEN_DIGITS:] for name in receipts}, split.records.names()
    void = {proof.unit for proof in proofs} | {one.number for one in _sharers(split, unit)}
    own = [name for number in void for name in proofs_in(names).get(number, ())]
    again = [unit, *(split.proof_of(split.units[number]) for number in sorted(void))]
    for name in [*receipts, *own, *(claim for one in again for claim in claims_of(one, names))]:
        split.records.remove(name)
    store = split.records.store
    if store is None:
        return
    for file in unit.files:
        path = object_path(split, file.name)
        found = store.head(path)
        if found is not None and found.run in tokens:
            store.remove_object(path, found.mark)


def _sharers(split: SplitJob, unit: Unit) -> list[Unit]:
    """The units of the same file: what one of them writes again changes its state for all."""
    if unit.region is None:
        return [unit]
    return [one for one in split.units if one.files[0].name == unit.files[0].name]


def _is_composed(split: SplitJob) -> bool:
    """Whether an earlier commit has left the staging area on the file system from which it can be resumed."""
    if split.records.store is not None:
        return False
    committed = split.job.committed
    return any(
        one.identity == split.identity for one in left_for(Path(committed.parent.path), committed.name)
    )


def receipt_of(
    split: SplitJob, unit: Unit, names: list[str], shared: SharedUploads | None = None
) -> UnitReceipt | None:
    """The receipt of a unit whose files are there; None if there is none.

    Args:
        split: the job.
        unit: one of its units.
        names: of its receipts.
        shared: the uploads that several units share, for a unit that is a region of one.

    Raises:
        MismatchError: a receipt does not cover the unit, or two receipts differ.
        StorageError: the storage failed.
    """
    rows = (split.records.read(name) for name in names)
    receipts = [receipt_from(row, split.uri) for row in rows if row]
    for receipt in receipts:
        _require_version(receipt, split)
        require_whole(receipt, unit, split.uri)
        require_equal(receipts[0], receipt, split.uri)
    return next((receipt for receipt in receipts if _is_present(split, receipt, shared)), None)


def _require_version(receipt: UnitReceipt, split: SplitJob) -> None:
    if receipt.version != __version__:
        raise MismatchError(
            f"unit {receipt.unit} was made with wherry {receipt.version} by {receipt.worker}",
            uri=split.uri,
            cure=f"remove {receipt.name} and run `wherry work` again with wherry {__version__}",
        )


def _is_present(split: SplitJob, receipt: UnitReceipt, shared: SharedUploads | None) -> bool:
    """Whether what a receipt names is there, in the state that its worker has left."""
    store = split.records.store
    if store is None:
        token = folder_token(split, receipt)
        entries = [member(staged_at(split, token), file.name).stat() for file in receipt.files]
        if split.units[receipt.unit].region is not None:
            return token == shared_token(split, split.units[receipt.unit]) and all(entries)
        states = [None if entry is None else (entry.size, entry.mark) for entry in entries]
        return states == [(file.nbytes, file.mark) for file in receipt.files]
    if split.units[receipt.unit].region is not None:
        return shared is not None and shared.has(receipt)
    found = [store.head(object_path(split, file.name)) for file in receipt.files]
    return all(
        one is not None and (one.run, one.nbytes, one.mark) == (receipt.token, file.nbytes, file.mark)
        for one, file in zip(found, receipt.files, strict=True)
    )


def _unread(_staged: Location) -> ReadBefore:
    return ReadBefore()


def _source_hashes(split: SplitJob, receipts: list[UnitReceipt]) -> dict[str, Hashes] | None:
    """The digests of the source of a view, as far as workers have hashed it.

    Raises:
        MismatchError: a receipt has invalid values.
    """
    source = split.job.checkpoint
    if not source.is_view:
        return None
    return merged_hashes(receipts, source.original.manifest.tensors, split.algorithms, split.uri)


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


def _boxes(split: SplitJob, receipts: list[UnitReceipt]) -> dict[KeyPath, tuple[bytes, ...]]:
    """The leaves of tensors that were moved in boxes, as far as all workers together have hashed them.

    Raises:
        MismatchError: a receipt has invalid values.
    """
    rows, specs = [(one, one.boxes) for one in receipts], split.job.checkpoint.manifest.tensors
    return joined_leaves(rows, specs, split.algorithms[0], split.uri) if len(split.algorithms) == 1 else {}


def _proofs(
    split: SplitJob, receipts: list[UnitReceipt], boxes: Mapping[KeyPath, Sequence[bytes]]
) -> Callable[[Location], ReadBefore]:
    """A function that gives what workers have read back, of the target as it is staged.

    Raises:
        IncompleteError: a worker has read something else than what the maker of a unit says that it wrote; the unit is
            made again.
    """
    if not split.proof_units:
        return _unread
    rows = split.records.read_all([one for all_ in proofs_in(split.records.names()).values() for one in all_])
    shared = shared_marks(split, receipts)
    proofs = valid_proofs(split, receipts, [proof_from(row, split.uri) for row in rows if row], shared)
    other = next(differences(proofs, receipts, merged_moves(receipts, split.uri)), None)
    if other is None:
        return lambda staged: replace(
            read_before(split, proofs, receipts, boxes, staged),
            changed=watch_files(split, receipts, staged, shared),
        )
    by_name = {receipt.name: receipt for receipt in receipts}
    odd = [by_name[name] for name in other.proof.receipts]
    odd = [one for one in odd if is_blamed(split, one, other)] or odd
    for receipt in odd:
        vain = [proof for proof in proofs if receipt.name in proof.receipts]
        _make_again(split, split.units[receipt.unit], [receipt.name], vain)
    raise IncompleteError(
        f"{', '.join(f'unit {split.units[one.unit].name}' for one in odd)}: {other.proof.worker} read back other bytes"
        f"{other.where} than {', '.join(one.worker for one in odd)} wrote",
        uri=split.uri,
        path=render(other.source),
        cure=f"run `wherry work {shlex.quote(split.job.committed.uri)}`, which writes them again",
    )


def _compose(
    split: SplitJob,
    receipts: list[UnitReceipt],
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
        members = split.job.row.commit_members
        finished_journal(area, store, split.header, members, runs, rows, notes, parts, uploads)
        return
    if _is_composed(split):
        return  # another commit has done it
    draft = Path(split.records.folder.join(f"area-{secrets.token_hex(4)}").path)
    with storage_errors(split.uri):
        draft.mkdir(mode=0o700)
        _gather(split, receipts, draft)
        journal = open_journal(draft / JOURNAL, split.header)
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
                Path(member(staged_at(split, folder_token(split, receipt)), file.name).path).unlink(
                    missing_ok=True
                )


def _gather(split: SplitJob, receipts: list[UnitReceipt], draft: Path) -> None:
    """Give the files of all attempts second names in one folder."""
    for receipt in receipts:
        token = folder_token(split, receipt)
        origin = attempt_folder(split, token)
        for file in receipt.files:
            made = Path(member(staged_at(split, token), file.name).path)
            place = draft / made.relative_to(origin)
            if place.exists():
                continue  # another region of it has come first
            make_folders(place.parent)
            try:
                add_name(made, place)
            except FileNotFoundError as error:  # another commit was faster
                raise _taken_error(split) from error
        _gather_logs(origin, draft)


def _gather_logs(origin: Path, draft: Path) -> None:
    """Join the logs in which writers have noted where things lie in the files of their unit."""
    for log in sorted(origin.rglob(f"*{LOG_SUFFIX}")):
        place = draft / log.relative_to(origin)
        make_folders(place.parent)
        with place.open("ab") as file:
            file.write(log.read_bytes())


def _taken_error(split: SplitJob) -> TargetInUseError:
    return TargetInUseError(
        "another process commits this job",
        uri=split.uri,
        cure=f"wait for it, or run `wherry commit {shlex.quote(split.job.committed.uri)}` again",
        retryable=True,
    )
