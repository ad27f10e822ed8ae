"""convert: carry out plans, so that each target appears complete and verified, or not at all.

plan → stage → move → finish → read back → sidecar → commit → lineage. The source is read once, regardless of the
number of targets; its leaves are hashed meanwhile, and must match the digests of its sidecar, if it has one.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from wherry.config.digests import digest_choice
from wherry.converter.command import stated_options
from wherry.converter.if_exists import existing_result
from wherry.converter.job import Job
from wherry.converter.keywords import spelled_out
from wherry.converter.passes import run
from wherry.converter.plan import plan_target
from wherry.converter.traffic import require_room_now
from wherry.converter.unused_options import require_used
from wherry.core.digest import sha256_of
from wherry.core.option import options_of
from wherry.core.progress import RunContext
from wherry.core.receipt import GroupReceipt, Receipt, software
from wherry.core.request import (
    ConvertKeywords,
    ConvertRequest,
    SourceRequest,
    TargetRequest,
    convert_request,
)
from wherry.core.services import service
from wherry.errors import NotRecordedError, UsageError, WherryError
from wherry.formats.checkpoint import open_source
from wherry.formats.pin import settled_checkpoint, take_pins
from wherry.formats.registry import find_target_format
from wherry.ledger.deliver import report_failure
from wherry.ledger.open import resolve_named
from wherry.ledger.outcomes import LEFT_OUT, record_all
from wherry.runtime.threads import without_collection
from wherry.storage.sidecar import signature_location
from wherry.storage.stores import locate
from wherry.target.clean import tidy
from wherry.target.in_use import in_use
from wherry.target.janitor import tidy as tidy_left_behind
from wherry.target.object_staging import is_unfinished

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Generator, Iterable, Mapping
    from contextlib import AbstractContextManager
    from typing import Unpack

    from wherry.core.progress import OnProgress
    from wherry.formats.checkpoint import Checkpoint
    from wherry.formats.format import Format, Options
    from wherry.storage.location import Location


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
    """Convert a checkpoint to several targets, reading it once.

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
    with (
        _reporting_failures(request, running.started),
        opening() as checkpoint,
        _signing_committed(sign, progress),
    ):
        group = convert_opened(checkpoint, request, running, prepare)
    if sign is not None:
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
    threading.Thread(target=_ahead, args=(lineage,), name="wherry-ahead", daemon=True).start()
    there = {
        index: receipt for index, job in enumerate(jobs) if (receipt := existing(job, request.if_exists))
    }
    for index, job in enumerate(jobs):
        if index not in there:
            require_room_now(job.plan)
    if prepare is not None:
        jobs = [job if index in there else prepare(job) for index, job in enumerate(jobs)]
    receipts = _make(jobs, there, lineage=lineage)
    group = GroupReceipt(jobs[0].group, tuple(replace(one, lineage=LEFT_OUT) for one in receipts))
    if not lineage:
        return group
    try:  # existing targets too, which the ledger may lack
        return replace(group, receipts=record_all(group.receipts))
    except NotRecordedError as error:
        error.result = replace(group, receipts=error.result)
        raise


@contextmanager
def _reporting_failures(request: ConvertRequest, started: str) -> Generator[None]:
    """Report an error that ends a conversion to the projections; committed targets have not failed."""
    try:
        yield
    except NotRecordedError:
        raise
    except WherryError as error:
        for number, target in enumerate(request.targets if request.lineage else ()):
            if number not in error.committed:
                report_failure(error, request.source.uri, target.uri, target.to, started)
        raise


@contextmanager
def _signing_committed(key: str | None, progress: OnProgress | None) -> Generator[None]:
    """Sign committed targets, even if they could not be recorded, or if other targets failed."""
    try:
        yield
    except NotRecordedError as error:
        if key is not None:
            _sign(error.result.receipts, key, progress)
        raise
    except WherryError as failure:
        if key is not None:
            try:
                _sign(failure.committed.values(), key, progress)
            except WherryError as error:  # the original failure is still the one that is raised
                failure.add_note(f"not signed: {error.for_shell()}")
        raise


def _sign(receipts: Iterable[Receipt], key: str, progress: OnProgress | None) -> None:
    """Sign committed targets; existing targets keep their signatures, so that a rerun reads nothing."""
    for receipt in receipts:
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
        _require_apart(checkpoint, place)
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


def _ahead(lineage: bool) -> None:
    """Import what records the conversion in advance, while bytes are moved."""
    software()
    if lineage:
        import_module("wherry.ledger.record")


def _make(jobs: list[Job], there: Mapping[int, Receipt], *, lineage: bool) -> list[Receipt]:
    """Make the missing targets; returns the receipts of all.

    Raises:
        WherryError: the first error of any target; `committed` has the receipts of the others.
    """
    rest = [index for index in range(len(jobs)) if index not in there]
    results = {**there, **dict(zip(rest, run([jobs[index] for index in rest]), strict=True))}
    done = {index: one for index, one in sorted(results.items()) if isinstance(one, Receipt)}
    failure = next((one for _, one in sorted(results.items()) if isinstance(one, WherryError)), None)
    if failure is None:
        return list(done.values())
    failure.committed = _record_committed(done, failure, lineage=lineage) if done else {}
    raise failure


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
        raise UsageError(f"{row.name} has no naming rule for the steps of a run", cure="leave out --into")
    if step is None:
        raise UsageError("the source has no step number", uri=checkpoint.uri, cure="pass --as-step N")
    folder = row.step_folder(step)
    row.guard(target.join(folder), into)
    return target.join(folder.split("/")[0]), target.join(folder)


def existing(job: Job, if_exists: str | None) -> Receipt | None:
    """The receipt of an existing target of a job; see `existing_result`."""
    if is_unfinished(job.committed, job.row.commit_members):
        return None
    receipt = existing_result(job.checkpoint, job.plan, job.target, job.committed, if_exists)
    if receipt is not None:
        tidy(job.committed)
    return receipt


def _require_apart(checkpoint: Checkpoint, target: Location) -> None:
    """Refuse a target inside a source, which would change the source."""
    sources = [part.checkpoint.location for part in checkpoint.original.parts] or [checkpoint.location]
    around = (one for one in sources if f"{target.path}/".startswith(f"{one.path.rstrip('/')}/"))
    if any(one.store.protocol == target.store.protocol for one in around):
        raise UsageError(
            "the target is inside the source", uri=target.uri, cure="choose a target outside the source"
        )
