"""rewrite: make a checkpoint readable by changing its small files alone; no tensor is decoded or encoded.

check everything → copy (by reflink, or by the store) → small files → open and compare → digests → sidecar → commit →
lineage. The result is a new checkpoint that appears complete or not at all, and the source is never changed; only with
`in_place` files of the source itself are replaced, and the old ones kept. The formats define the rewrites:
`Format.rewrites`, and those of the formats that it refines.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import replace

from wherry.config.settings import digest_choice
from wherry.converter.command import stated_options
from wherry.converter.convert import existing_result
from wherry.converter.in_place import change_in_place, replace_sidecar
from wherry.converter.plan import not_copied, require_requested, within_source
from wherry.converter.proof import ProofRequest, know, prove
from wherry.converter.rewrite_places import copied_by_store, require_kind, require_places
from wherry.converter.rewrite_plan import RewritePlan, Rewritten
from wherry.core.account import IgnoredEntry
from wherry.core.digest import sha256_of
from wherry.core.interrupts import committing
from wherry.core.keypath import render
from wherry.core.lazy_dataclass import dataclass
from wherry.core.progress import Meter, OnProgress, RunContext
from wherry.core.request import RewriteRequest, SourceRequest
from wherry.core.units import DEFAULT_MEMORY, parse_budget
from wherry.cures import Command, Cure
from wherry.errors import IncompleteError, NotRecordedError, UnsupportedError, UsageError
from wherry.formats.checkpoint import Checkpoint, Pin, blaming_changes, settled_checkpoint, take_pin
from wherry.formats.detect import absence, resolve_source
from wherry.formats.format import Change
from wherry.formats.registry import find_format, rewrites
from wherry.ledger.record import LEFT_OUT, record
from wherry.ledger.resolve import resolve_named
from wherry.store.copy import carry, list_files
from wherry.store.local_store import locate, make_folder
from wherry.store.location import Location
from wherry.store.sidecar import FOLDER_NAME, Sidecar, encode
from wherry.target.files import require_separate_names
from wherry.target.object_staging import ObjectStaging
from wherry.target.sinks import open_staging
from wherry.target.staging import Staging

VERIFY = ("digest", "none")


@dataclass(frozen=True, slots=True)
class _Ready:
    """A rewrite whose source has been opened and checked."""

    rewriting: RewritePlan
    change: Change
    source: Location
    target: Location
    checkpoint: Checkpoint
    pin: Pin


def plan_rewrite(request: RewriteRequest) -> RewritePlan:
    """Plan a rewrite, after checking that everything that the result needs exists; nothing is written.

    Raises: as `rewrite`.
    """
    with _ready(request) as ready:
        return ready.rewriting


def rewrite(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str] | None = None,
    *,
    as_: str,
    in_place: bool = False,
    memory: str | int = DEFAULT_MEMORY,
    progress: OnProgress | None = None,
    verify: str = "digest",
    ignore: tuple[str, ...] = (),
    if_exists: str | None = None,
    lineage: bool = True,
    meta: Mapping[str, str] | None = None,
    format: str | None = None,
    step: int | None = None,
    item: str | None = None,
    allow_opaque: Iterable[str] = (),
) -> Rewritten:
    """Rewrite the small files of a checkpoint.

    Args:
        source: URI of a checkpoint; changed only with `in_place`, which must be on a local file system.
        target: URI of the committed checkpoint; a folder that does not exist yet, on a local file system if the source
            is, else in the bucket of the source.
        as_: `NAME` or `NAME=VALUE`; `wherry formats FORMAT` lists the names.
        in_place: replace files of the source itself, and keep each as `<file>.before`.
        memory: budget for reading, for example `128MiB`.
        progress: called a few times a second.
        verify: with `digest` every tensor is read at the source and again at the target, and compared; with `none`
            only the metadata is, and nothing is recorded unless the source's digests are known.
        ignore: `others` leaves weights of the step behind, as in `convert`.
        if_exists: as in `convert`.
        lineage: whether the ledger records it.
        meta: metadata of the user to store with the checkpoint.
        format, step, item: which checkpoint of the source.
        allow_opaque: classes in pickles to accept as opaque values, as in `convert`.

    Raises:
        UsageError: the rewrite is unknown or has nothing to do, or neither or both of a target and `in_place` are
            given.
        UnsupportedError: the rewrite does not support this checkpoint.
        IncompleteError: something that the result needs is missing.
        UnrepresentableError: weights of the step would be left behind, and `ignore` does not say so.
        MismatchError: the result differs from the source; nothing is committed, files in place are restored.
        TargetExistsError, TargetInUseError, StorageError: the target cannot be made.
        NotRecordedError: it is committed, but the ledger cannot be used; `result` is the Rewritten.
    """
    named_target = None if target is None else os.fspath(target)
    chosen = SourceRequest(os.fspath(source), format, step, item, tuple(allow_opaque))
    request = RewriteRequest(
        source=chosen, target=named_target, as_=as_, in_place=in_place,
        memory=memory, ignore=ignore, if_exists=if_exists or "resume", verify=verify, meta=meta or {}, lineage=lineage,
    )  # fmt: skip
    return carry_out(request, progress=progress)


def carry_out(request: RewriteRequest, *, progress: OnProgress | None = None) -> Rewritten:
    """Carry out a rewrite request; see `rewrite`."""
    if request.verify not in VERIFY:
        raise UsageError(
            f"invalid value for verify: {request.verify!r}", cure=f"choose {' or '.join(VERIFY)}"
        )
    wanted = ProofRequest(
        request,
        digest_choice(ledger=request.lineage).algorithm,
        parse_budget(request.memory),
        RunContext.begun(progress),
        stated_options(request),
    )
    with _ready(request) as ready:
        if request.in_place:
            done = _in_place(ready, wanted)
        else:
            digest, target, members = ready.rewriting.digest, ready.target, _members(ready)
            there = existing_result(ready.checkpoint, digest, target, target, members, request.if_exists)
            done = _stage(ready, wanted) if there is None else Rewritten(ready.rewriting, there)
    if done.receipt is None:  # without digests nothing can be recorded
        return done
    if not request.lineage:
        return replace(done, receipt=replace(done.receipt, lineage=LEFT_OUT))
    try:
        return replace(done, receipt=record(done.receipt))
    except NotRecordedError as error:
        error.result = replace(done, receipt=error.result)
        raise


@contextmanager
def _ready(request: RewriteRequest) -> Generator[_Ready]:
    target, in_place = request.target, request.in_place
    if (target is None) != in_place:
        raise UsageError("rewrite needs either a target or in_place", cure="name a new folder")
    location, detection = resolve_source(resolve_named(request.source))
    home = location if target is None else locate(target, location.opaque)
    require_places(location, home, in_place=in_place)
    if f"{home.path}/".startswith(f"{location.path}/") and home.path != location.path:
        raise UsageError("the target is inside the source", uri=home.uri, cure="choose a target outside it")
    name, _, value = request.as_.partition("=")
    known = rewrites(detection.format)
    if name not in known:
        raise UsageError(
            f"unknown rewrite {name!r} for format {detection.format}",
            uri=location.uri,
            cure=f"choose {' or '.join(known)}" if known else Cure("use {} instead", Command("convert")),
        )
    row = known[name]
    with settled_checkpoint(
        lambda: Checkpoint(row.plan(location, detection, value or None).opened, opaque=location.opaque)
    ) as settled:
        pin = take_pin(settled)
    change = row.plan(location, detection, value or None)
    with Checkpoint(change.opened, opaque=location.opaque) as checkpoint:
        require_kind(change, location)
        if in_place and change.staged_only:
            raise UnsupportedError(change.staged_only, uri=location.uri, cure="pass a target instead")
        missing = absence(checkpoint.reader)
        if missing is not None:
            raise IncompleteError(missing, uri=location.uri, cure="use another step; this one is incomplete")
        for uri, short in checkpoint.shortages:
            raise IncompleteError(short.reason, uri=uri, cure=short.cure)
        rows = () if in_place else within_source(not_copied(change), request.source.uri, location.uri)
        require_requested(rows, request, location.uri)
        rewriting = _rewriting(change, location, home, (name, value or None), rows, in_place=in_place)
        yield _Ready(rewriting, change, location, home, checkpoint, pin)


def _rewriting(
    change: Change, source: Location, target: Location, chosen: tuple[str, str | None],
    ignored: tuple[IgnoredEntry, ...], *, in_place: bool,
) -> RewritePlan:  # fmt: skip
    sizes = list_files(source)
    renamed = {render(old): render(new) for old, new in sorted(change.renamed.items())}
    # Contents are left out: a commit time in them would make every request different.
    named = [*chosen, in_place, sorted(change.carried.items()), sorted(change.files), renamed]
    return RewritePlan(
        source=source.uri,
        format=change.opened.detection.format,
        target=target.uri,
        name=chosen[0],
        value=chosen[1],
        in_place=in_place,
        files=tuple(change.files),
        carried=(len(change.carried), sum(sizes[name].size for name in change.carried)),
        ignored=ignored,
        renamed=renamed,
        tensors=len(change.opened.manifest.tensors),
        digest=sha256_of("rewrite", named),
    )


def _members(ready: _Ready) -> tuple[str, ...]:
    """The commit members of the target."""
    return find_format(ready.rewriting.format).commit_members


def _stage(ready: _Ready, wanted: ProofRequest) -> Rewritten:
    identity = sha256_of("run", [ready.rewriting.digest, ready.pin.digest])[:8]
    header, nbytes = {"rewrite": identity, "target": ready.target.name}, ready.rewriting.carried[1]
    with open_staging(ready.target, identity, header, _members(ready), nbytes, resume=False) as staging:
        wanted = replace(wanted, folder=staging.spill)
        with blaming_changes(ready.pin, ready.checkpoint):
            sidecar, ways = _write_and_prove(ready, staging, wanted)
        if sidecar is not None:
            staging.location.join(FOLDER_NAME).put(encode(sidecar))
        staging.prove_small()
        ready.pin.require_unchanged(ready.checkpoint)
        with committing(ready.target.uri):
            staging.commit()
    return Rewritten(ready.rewriting, sidecar and sidecar.receipt, ways)


def _write_and_prove(
    ready: _Ready, staging: Staging, wanted: ProofRequest
) -> tuple[Sidecar | None, dict[str, int]]:
    """Copy, write and prove; returns the sidecar, and the number of bytes copied in each way."""
    change = ready.change
    area = replace(staging.location, opaque=ready.target.opaque)
    known = know(ready.checkpoint, wanted)
    require_separate_names(area, [*change.carried.values(), *change.files])
    make_folder(area)
    meter = Meter("carry", ready.rewriting.carried[1], wanted.running.progress)
    if isinstance(staging, ObjectStaging):
        ways = copied_by_store(ready.source, area, staging.run, change.carried, meter)
    else:
        ways = carry(ready.source, area, change.carried, meter)
    for name, data in change.files.items():
        place = area.member(name)
        make_folder(place.parent)
        place.put(data)
    change.finish(area)
    return prove(ready.checkpoint, change, known, area, wanted, ready.rewriting), ways


def _in_place(ready: _Ready, wanted: ProofRequest) -> Rewritten:
    known = know(ready.checkpoint, wanted)

    def require_unchanged() -> None:
        ready.pin.require_unchanged(ready.checkpoint)

    with change_in_place(ready.source, ready.change, require_unchanged) as held:
        sidecar = prove(ready.checkpoint, ready.change, known, ready.source, wanted, ready.rewriting)
        with held.exclusive():  # also without a sidecar: the proved files must be those that this run made
            if sidecar is not None:
                replace_sidecar(ready.source, encode(sidecar))
    return Rewritten(ready.rewriting, sidecar and sidecar.receipt)
