"""convert: carry out plans, so that each target appears complete and verified, or not at all.

plan → stage → move → finish → read back → sidecar → commit → lineage. The source is read once for all targets on this
machine; its leaves are hashed meanwhile, and must match the digests of its sidecar, if it has one.

An existing target is already the result of the same conversion if its sidecar has the same plan digest, the source has
the same fingerprint as then, and the target's files still have the fingerprint with which they were committed. Then a
rerun does nothing. Any other existing target is never touched.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Unpack

from wherry.config.settings import digest_choice
from wherry.converter.command import stated_options
from wherry.converter.job import Job, passes, run
from wherry.converter.keywords import spelled_out
from wherry.converter.plan import plan_target, require_room, require_used
from wherry.core.digest import sha256_of
from wherry.core.progress import OnProgress, RunContext
from wherry.core.receipt import GroupReceipt, Receipt, software
from wherry.core.request import (
    ConvertKeywords,
    ConvertRequest,
    SourceRequest,
    TargetRequest,
    convert_request,
    options_of,
)
from wherry.core.services import service
from wherry.core.threads import without_collection
from wherry.cures import Argument, Blank, Cure
from wherry.errors import NotRecordedError, TargetExistsError, UsageError, WherryError
from wherry.formats.checkpoint import (
    Checkpoint,
    fingerprint,
    open_source,
    present_fingerprint,
    settled_checkpoint,
    take_pins,
)
from wherry.formats.format import Format, Options
from wherry.formats.registry import find_target_format
from wherry.ledger.deliver import report_failure
from wherry.ledger.record import LEFT_OUT, record_all
from wherry.ledger.resolve import resolve_named
from wherry.store.local_store import is_at_or_below, locate
from wherry.store.location import Location
from wherry.store.sidecar import Sidecar, read_sidecar, signature_location
from wherry.target.janitor import in_use
from wherry.target.janitor import tidy as tidy_left_behind
from wherry.target.sinks import is_unfinished

CHOICES = ("fail", "skip", "resume")


@spelled_out(ConvertKeywords, options_of(SourceRequest, TargetRequest, ConvertRequest))
def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: str,
    options: Options | None = None,
    **common: Unpack[ConvertKeywords],
) -> Receipt:
    """Convert a checkpoint to one target.

    Args:
        source: URI of a checkpoint, step or run; never changed.
        target: URI of the committed checkpoint; must not exist, unless it is the result of the same conversion.
        to: target format, a name or alias.
        options: format-specific options and `split` / `join`.
        common: the other options, as in ConvertKeywords; `layout` is a LayoutRequest in place of its fields, and
            `progress` is called a few times a second.

    Returns:
        The receipt; `already` if nothing had to be done.

    Raises:
        NotRecordedError: the target is committed, but the ledger cannot be used; `result` is the receipt.
        WherryError: see the tree in `wherry.errors`; nothing is left at the destination.
    """
    progress = common.pop("progress", None)
    request = convert_request(source, [TargetRequest(str(target), to, options or {})], **common)
    try:
        return convert_all(request, progress=progress).receipts[0]
    except NotRecordedError as error:
        error.result = error.result.receipts[0]
        raise


def convert_all(
    request: ConvertRequest,
    *,
    progress: OnProgress | None = None,
    prepare: Callable[[Job], Job] | None = None,
    opened: Callable[[], AbstractContextManager[Checkpoint]] | None = None,
) -> GroupReceipt:
    """Convert a checkpoint to several targets, reading it once for all of them on this machine.

    Each target commits, resumes and is verified independently: if one fails, the others are still made.

    Args:
        request: the request.
        progress: called a few times a second.
        prepare: called with each planned job whose target does not exist; returns the job that is carried out.
        opened: opens the source, if it is not the one checkpoint that the request names.

    Returns:
        The receipts of all targets, in order; `already` if nothing had to be done.

    Raises:
        NotRecordedError: the targets are committed, but the ledger cannot be used; `result` is the GroupReceipt.
        WherryError: the first error of any target, after the others were made; their receipts are in its `committed`.
    """
    running, sign = RunContext.begun(progress), request.sign
    if sign is not None:
        service("signing").load_key(sign)  # report an invalid key before any byte is moved
    tidy_left_behind()
    opening = opened or partial(settled_source, request.source)
    try:
        with opening() as checkpoint:
            group = convert_opened(checkpoint, request, running, prepare)
    except NotRecordedError as error:  # the targets are committed
        _sign(error.result.receipts, sign, progress)
        raise
    except WherryError as failure:
        try:
            _sign(failure.committed.values(), sign, progress)
        except WherryError as error:  # the original failure is still the one that is raised
            failure.add_note(f"not signed: {error.for_shell()}")
        for number, target in enumerate(request.targets if request.lineage else ()):
            if number not in failure.committed:
                report_failure(failure, request.source.uri, target.uri, target.to, running.started)
        raise
    _sign(group.receipts, sign, progress)
    return group


@contextmanager
def settled_source(source: SourceRequest) -> Generator[Checkpoint]:
    """The checkpoint that a request names, once nobody writes it any more, and marked as in use."""
    opened = settled_checkpoint(lambda: open_source(resolve_named(source)))
    with opened as checkpoint, in_use(checkpoint.uri):
        yield checkpoint


def convert_opened(
    checkpoint: Checkpoint,
    request: ConvertRequest,
    running: RunContext,
    prepare: Callable[[Job], Job] | None = None,
) -> GroupReceipt:
    """Convert an opened checkpoint, for example a live training state; see `convert_all`."""
    jobs, lineage = plan_jobs(checkpoint, request, running), request.lineage
    # It reads a file of each package, and is kept.
    threading.Thread(target=software, name="wherry-ahead", daemon=True).start()
    there = {
        index: receipt for index, job in enumerate(jobs) if (receipt := existing(job, request.if_exists))
    }
    rest = [index for index in range(len(jobs)) if index not in there]
    require_room([jobs[index].plan for index in rest])
    if prepare is not None:
        jobs = [job if index in there else prepare(job) for index, job in enumerate(jobs)]
    results = {**there, **dict(zip(rest, run([jobs[index] for index in rest]), strict=True))}
    done = {index: one for index, one in sorted(results.items()) if isinstance(one, Receipt)}
    failure = next((one for _, one in sorted(results.items()) if isinstance(one, WherryError)), None)
    if failure is not None:
        failure.committed = _record_committed(done, failure, lineage=lineage) if done else {}
        raise failure
    bytes_read = sum(max(done[number].bytes_read for number in shared) for shared in passes(jobs))
    receipts = tuple(replace(receipt, lineage=LEFT_OUT) for receipt in done.values())
    group = GroupReceipt(jobs[0].group, receipts, bytes_read)
    if not lineage:
        return group
    try:  # existing targets too, which the ledger may lack
        return replace(group, receipts=record_all(group.receipts))
    except NotRecordedError as error:
        error.result = replace(group, receipts=error.result)
        raise


def _sign(receipts: Iterable[Receipt], key: str | None, progress: OnProgress | None) -> None:
    """Sign committed targets, if there is a key; existing ones keep their signatures, so that a rerun reads nothing."""
    for receipt in receipts if key is not None else ():
        if not (receipt.already and signature_location(locate(receipt.target.uri)).exists()):
            service("signing").sign(receipt.target.uri, key, progress=progress)


@without_collection()
def plan_jobs(checkpoint: Checkpoint, request: ConvertRequest, running: RunContext) -> list[Job]:
    """Plan all targets; nothing is written."""
    pin, choice = take_pins(checkpoint), digest_choice(ledger=request.lineage)
    jobs: list[Job] = []
    for target in request.targets:
        row = find_target_format(target.to)
        committed, place = _places(locate(target.uri), row, checkpoint, target, request.as_step)
        sources = [part.checkpoint.location for part in checkpoint.original.parts] or [checkpoint.location]
        if any(is_at_or_below(one, place) for one in sources):
            raise UsageError(
                "the target is inside the source", uri=place.uri, cure="choose a target outside the source"
            )
        seen, plan = plan_target(checkpoint, row, replace(target, uri=place.uri), request)
        job = Job(
            checkpoint=seen, plan=plan, row=row, target=place, committed=committed,
            running=running, meta=request.meta, pin=pin, choice=choice, stated=stated_options(request, target),
        )  # fmt: skip
        jobs.append(job)
    uris = [job.committed.uri for job in jobs]
    twice = next((uri for uri in uris if uris.count(uri) > 1), None)
    if twice is not None:
        raise UsageError("duplicate target", uri=twice, cure="choose a different path for each target")
    require_used(checkpoint.uri, request.targets, [job.plan.unused for job in jobs])
    # The same for the same plans, so that a resumed pass has the same name.
    group = sha256_of("group", [job.plan.digest for job in jobs]) if len(jobs) > 1 else ""
    return [replace(job, group=group) for job in jobs]


def _record_committed(
    done: Mapping[int, Receipt], failure: WherryError, *, lineage: bool
) -> dict[int, Receipt]:
    """Record committed targets although others failed, and add a note to the error; returns the receipts."""
    failure.add_note(f"these targets are committed: {', '.join(one.target.uri for one in done.values())}")
    if not lineage:
        return {index: replace(one, lineage=LEFT_OUT) for index, one in done.items()}
    try:
        receipts = record_all(list(done.values()))
    except NotRecordedError as refused:
        failure.add_note(refused.for_shell())
        receipts = refused.result
    return dict(zip(done, receipts, strict=True))


def _places(
    target: Location, row: Format, checkpoint: Checkpoint, request: TargetRequest, as_step: int | None
) -> tuple[Location, Location]:
    """The location that is committed in one step, and the location of the checkpoint in it."""
    into = request.into
    if not into:
        row.guard(target, into)
        return target, target
    step = checkpoint.manifest.step if as_step is None else as_step
    if row.step_folder is None:
        raise UsageError(
            f"{row.name} has no naming rule for the steps of a run",
            cure=Cure("leave out {}", Argument("into")),
        )
    if step is None:
        raise UsageError(
            "the source has no step number",
            uri=checkpoint.uri,
            cure=Cure("pass {}", Argument("as-step", Blank("N"))),
        )
    folder = row.step_folder(step)
    row.guard(target.join(folder), into)
    return target.join(folder.split("/")[0]), target.join(folder)


def existing(job: Job, if_exists: str | None) -> Receipt | None:
    """The receipt of an existing target of a job; see `existing_result`."""
    members = job.row.commit_members
    return existing_result(job.checkpoint, job.plan.digest, job.target, job.committed, members, if_exists)


def existing_result(
    checkpoint: Checkpoint,
    digest: str,
    target: Location,
    committed: Location,
    members: tuple[str, ...],
    if_exists: str | None,
) -> Receipt | None:
    """The receipt of an existing target, marked `already`; None if the target does not exist.

    Args:
        checkpoint: the opened source.
        digest: of the plan of the conversion or rewrite.
        target: the location of the checkpoint.
        committed: the location that would be committed in one step: the target, or the step folder around it.
        members: names of commit members of its format.
        if_exists: `skip` accepts any target that wherry wrote, `resume` (the default) the result of this same
            conversion, `fail` nothing.

    Raises:
        TargetExistsError: the target is something else.
        UsageError: `if_exists` is invalid.
    """
    if is_unfinished(committed, members):
        return None
    if if_exists not in (None, *CHOICES):
        raise UsageError(f"invalid value for if_exists: {if_exists!r}", cure=f"choose {' or '.join(CHOICES)}")
    if not committed.exists():
        return None
    from wherry.target.hub_repository import is_blank

    if is_blank(committed):
        return None
    try:
        sidecar = read_sidecar(target)
    except WherryError:
        sidecar = None  # an unreadable sidecar proves nothing, so the target must not be touched
    receipt = sidecar.receipt if sidecar else None
    accepted = if_exists == "skip" or (
        if_exists != "fail" and _is_result(sidecar, checkpoint, digest, target)
    )
    if receipt is not None and accepted:
        from wherry.target.clean import tidy

        tidy(committed)
        return replace(receipt, already=True)
    raise TargetExistsError(
        "target already exists and is not the result of this conversion",
        uri=committed.uri,
        cure="choose another target, or remove this one",
    )


def _is_result(sidecar: Sidecar | None, checkpoint: Checkpoint, digest: str, target: Location) -> bool:
    receipt = sidecar.receipt if sidecar else None
    if sidecar is None or receipt is None or receipt.plan_digest != digest:
        return False
    sources = [part.checkpoint for part in checkpoint.original.parts] or [checkpoint]
    if [one.fingerprint for one in receipt.sources] != [present_fingerprint(one) for one in sources]:
        return False
    try:
        which = SourceRequest(target.uri, sidecar.checkpoint.format, allow_opaque=tuple(target.opaque))
        with open_source(which) as present:
            can = target.store.capabilities
            from wherry.target.hub_repository import CARD

            # Without the page of a repository that wherry has added to the target.
            own = (
                CARD
                if can.one_commit and CARD not in {one.name for one in sidecar.manifest.companions}
                else ""
            )
            members = [entry for entry in present.reader.members() if entry.name != own]
            mark = fingerprint(members, target, marks=can.local)
    except WherryError:
        return False  # damaged since then: not a complete result, and not repaired here
    return mark == sidecar.checkpoint.fingerprint
