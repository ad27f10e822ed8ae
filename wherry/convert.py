"""convert: carry out a plan, so that the target appears whole and proved, or not at all.

plan → stage → move → finish → read back → sidecar → commit → lineage. Source leaves are hashed on the way; where
the source has a sidecar of ours, its digests must agree. Before the commit the staged target is opened like any
checkpoint and every byte is read back from storage and compared, unless `verify="none"`.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from wherry import __version__
from wherry.checkpoint import Checkpoint, open_checkpoint
from wherry.digest import sha256_of
from wherry.errors import MismatchError, UsageError
from wherry.existing import existing_result, present_fingerprint
from wherry.fingerprint import fingerprint
from wherry.format import Glimpse
from wherry.hashing import Hashes, compare, hash_checkpoint
from wherry.journal import Journal, open_journal
from wherry.mover import Carrier
from wherry.plan import DEFAULT_MEMORY, Plan, make_plan
from wherry.pool import Pool
from wherry.progress import Meter, OnProgress
from wherry.receipt import Receipt, software, utc_now
from wherry.references import reference, source_reference
from wherry.registry import find_format
from wherry.sidecar import FOLDER_NAME, Sidecar, encode, read_sidecar
from wherry.staging import Staging
from wherry.store import Location, locate, make_folder

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from wherry.format import Format, Options, Writer
    from wherry.manifest import Companion, Manifest


@dataclass(frozen=True, slots=True)
class _Run:
    """What stays the same during one conversion.

    `committed` is what appears in one step: the target itself, or the step folder of a run that holds it.
    """

    checkpoint: Checkpoint
    plan: Plan
    row: Format
    target: Location
    committed: Location
    progress: OnProgress | None
    meta: Mapping[str, str]
    started: str
    clock: float


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: str,
    options: Options | None = None,
    memory: str | int = DEFAULT_MEMORY,
    progress: OnProgress | None = None,
    verify: str = "digest",
    if_exists: str | None = None,
    lineage: bool = True,
    only: str | None = None,
    ignore: tuple[str, ...] = (),
    format: str | None = None,
    step: int | None = None,
    item: str | None = None,
    meta: Mapping[str, str] | None = None,
    into: bool = False,
    as_step: int | None = None,
) -> Receipt:
    """Convert a checkpoint.

    Args:
        source: URI of a checkpoint, step or run; never changed.
        target: URI of exactly what is committed; must not exist, unless it is the result of this same conversion.
        to: target format, a name or alias.
        options: format-specific options and `split` / `join`.
        memory: budget of what is in flight, for example `128MiB`.
        progress: called a few times a second.
        verify: `digest` reads the staged target back and compares every leaf, `none` does not.
        if_exists: `fail` (the default) or `skip`, for a target that is not the result of this conversion.
        lineage: whether the ledger records the conversion.
        only, ignore: see `plan`.
        format, step, item: which checkpoint of the source.
        meta: what the user wants to keep with the checkpoint, in the manifest's `origin`.
        into: `target` is a run folder; the step folder is made inside it by the format's naming rule.
        as_step: the step to write, where the source states none (or another one is wanted).

    Returns:
        The receipt; `already` where nothing had to be done.

    Raises:
        WherryError: see the tree in `wherry.errors`; nothing is left at the destination.
    """
    started, clock = utc_now(), time.monotonic()
    with open_checkpoint(source, format=format, step=step, item=item) as checkpoint:
        row = find_format(to)
        committed, place = _places(locate(target), row, checkpoint, into=into, as_step=as_step)
        plan = make_plan(
            checkpoint, place.uri, to=to, options=options, memory=memory, only=only, ignore=ignore, verify=verify,
            as_step=as_step,
        )  # fmt: skip
        _require_apart(checkpoint, place)
        run = _Run(checkpoint, plan, row, place, committed, progress, meta or {}, started, clock)
        receipt = existing_result(checkpoint, plan, place, committed, if_exists) or _write(run)
    return _record(receipt) if lineage and not receipt.already else receipt


def _places(
    target: Location, row: Format, checkpoint: Checkpoint, *, into: bool, as_step: int | None
) -> tuple[Location, Location]:
    """What is committed in one step, and where the checkpoint lies in it."""
    if not into:
        return target, target
    step = checkpoint.manifest.step if as_step is None else as_step
    if row.step_folder is None:
        raise UsageError(f"{row.name} has no naming rule for the steps of a run", cure="leave --into away")
    if step is None:
        raise UsageError("the source states no step", uri=checkpoint.uri, cure="say --as-step N")
    folder = row.step_folder(step)
    return target.join(folder.split("/")[0]), target.join(folder)


def _write(run: _Run) -> Receipt:
    header = {"plan": run.plan.digest, "source": present_fingerprint(run.checkpoint), "version": __version__}
    with Staging(run.committed, sha256_of("run", header)[:8]) as staging:
        journal = open_journal(staging.journal, header)
        if not journal.done:
            staging.clear()
        inner = run.target.path[len(run.committed.path) :].strip("/")
        staged = staging.location.join(inner) if inner else staging.location
        make_folder(staged.parent)
        try:
            sidecar = _fill(run, staged, journal, staging.discarded or journal.reason)
        finally:
            journal.close()
        text = encode(sidecar)
        if not run.row.single_file:
            staged.join(FOLDER_NAME).put(text)
        if inner and run.row.finish_step is not None:
            run.row.finish_step(staging.location, run.plan.manifest)
        staging.commit(run.row.commit_member, beside=text if run.row.single_file else None)
    assert sidecar.receipt is not None
    return sidecar.receipt


def _fill(run: _Run, staged: Location, journal: Journal, note: str | None) -> Sidecar:
    companions = _copy_companions(run, staged)
    hashes = _move(run, staged, journal)
    _agree_with_source(run, hashes)
    verification = _read_back(run, staged, hashes) if run.plan.verify == "digest" else None
    sidecar = _sidecar(run, staged, hashes, companions, verification)
    assert sidecar.receipt is not None
    return replace(sidecar, receipt=replace(sidecar.receipt, resumed_bytes=journal.nbytes, note=note))


def _move(run: _Run, staged: Location, journal: Journal) -> Hashes:
    plan, reader = run.plan, run.checkpoint.reader
    assert run.row.create is not None
    writer = run.row.create(staged, plan.manifest, plan.options)
    try:
        carrier = Carrier(
            reader=reader,
            specs=dict(plan.source_manifest.tensors),
            pool=Pool(plan.memory),
            meter=Meter("convert", plan.nbytes_in, run.progress),
            writer=writer,
            targets=dict(plan.manifest.tensors),
            journal=journal,
        )
        carrier.carry(plan.moves())
        _finish(writer)
    finally:
        writer.close()
    return Hashes.of(plan.manifest.tensors, carrier.hashers)


def _finish(writer: Writer) -> None:
    writer.sync()
    writer.finish()


def _agree_with_source(run: _Run, hashes: Hashes) -> None:
    """Where the source has a manifest of ours, its bytes must still be the ones that were recorded."""
    recorded = read_sidecar(locate(run.checkpoint.uri))
    if recorded is None:
        return
    expected = {
        target: recorded.manifest.digests[source]
        for target, source in run.plan.pairs.items()
        if source in recorded.manifest.digests
    }
    leaves = {target: recorded.leaves.get(source, ()) for target, source in run.plan.pairs.items()}
    failed = compare(hashes, expected, leaves)
    if failed:
        raise MismatchError(
            f"the source has changed since it was recorded: {failed[0].reason}",
            uri=run.checkpoint.uri,
            path=failed[0].path,
            cure="restore the source, or delete its sidecar if the change was meant",
        )


def _read_back(run: _Run, staged: Location, hashes: Hashes) -> dict[str, Any]:
    detection = run.row.detect(Glimpse(staged))
    if detection is None:
        raise MismatchError(
            "what was written is not recognised", uri=run.target.uri, cure="report this with the plan"
        )
    clock = time.monotonic()
    with Checkpoint(run.row.open(staged, detection)) as written:
        _same_structure(run, written.manifest)
        found = hash_checkpoint(written, memory=run.plan.memory, progress=run.progress, stage="verify")
    failed = compare(found, hashes.digests, hashes.leaves)
    if failed:
        raise MismatchError(
            f"read-back differs from what was written: {failed[0].reason}",
            uri=run.target.uri,
            path=failed[0].path,
            cure="check the storage; nothing was committed",
        )
    seconds = round(time.monotonic() - clock, 3)
    return {"level": "digest", "ok": True, "tensors": len(found.digests), "seconds": seconds}


def _same_structure(run: _Run, found: Manifest) -> None:
    expected = {path: (spec.shape, spec.dtype) for path, spec in run.plan.manifest.tensors.items()}
    seen = {path: (spec.shape, spec.dtype) for path, spec in found.tensors.items()}
    if expected != seen:
        odd = min(set(expected.items()) ^ set(seen.items()))
        raise MismatchError(f"read-back has another structure at {'/'.join(odd[0])}", uri=run.target.uri)


def _copy_companions(run: _Run, staged: Location) -> tuple[Companion, ...]:
    copied: list[Companion] = []
    for companion in run.plan.manifest.companions:
        data = run.checkpoint.reader.companion(companion.name).read()
        if len(data) != companion.size:
            raise MismatchError("a companion file changed during the conversion", uri=run.checkpoint.uri)
        place = staged.member(f"{run.row.companion_folder}{companion.name}")
        make_folder(place.parent)
        place.put(data)
        copied.append(replace(companion, sha256=hashlib.sha256(data).hexdigest()))
    return tuple(copied)


def _sidecar(
    run: _Run,
    staged: Location,
    hashes: Hashes,
    companions: tuple[Companion, ...],
    verification: dict[str, Any] | None,
) -> Sidecar:
    plan = run.plan
    origin = {**plan.manifest.origin, **({"meta": dict(run.meta)} if run.meta else {})}
    manifest = replace(plan.manifest, origin=origin).with_digests(hashes.digests, companions)
    target = reference(run.target.uri, plan.to, plan.format_version, manifest, _staged_mark(run, staged))
    carried = {source: hashes.digests[moved] for moved, source in plan.pairs.items()}
    receipt = Receipt(
        source=source_reference(run.checkpoint, carried, companions, plan.memory),
        target=target,
        plan_digest=plan.digest,
        options=dict(plan.options),
        software=software(),
        started=run.started,
        finished=utc_now(),
        seconds=round(time.monotonic() - run.clock, 3),
        bytes_read=plan.nbytes_in,
        bytes_written=plan.nbytes_out,
        verification=verification,
    )
    return Sidecar(manifest, target, receipt, hashes.leaves)


def _staged_mark(run: _Run, staged: Location) -> str:
    detection = run.row.detect(Glimpse(staged))
    assert detection is not None
    with Checkpoint(run.row.open(staged, detection)) as written:
        return fingerprint(written.reader.members(), staged, marks=run.target.store.capabilities.local)


def _require_apart(checkpoint: Checkpoint, target: Location) -> None:
    """A target inside the source would change the source."""
    inside = f"{target.path}/".startswith(f"{locate(checkpoint.uri).path.rstrip('/')}/")
    if inside and target.store.protocol == locate(checkpoint.uri).store.protocol:
        raise UsageError(
            "the target lies inside the source", uri=target.uri, cure="choose a target beside it"
        )


def _record(receipt: Receipt) -> Receipt:
    from wherry.lineage import record  # SQLAlchemy costs a fifth of a second

    return replace(receipt, lineage=record(receipt))
