"""The convert flow: detect → plan → convert → verify → register → lineage, for one checkpoint.

Load it as `flows/convert.py:convert_checkpoint` or `wherry.flows.convert.convert_checkpoint`. It can be run again after
a crash: it detects a finished conversion and a registered version. A failure ends the flow as Failed, with the error's
text and cure in the state's message and in a table artifact. So does a conversion that is committed but not recorded or
not registered (exit code 12); then a second artifact shows what is committed.
"""

import threading
from collections.abc import Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitUpdate
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    TaskRunFilter,
    TaskRunFilterName,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import StateType
from prefect.concurrency.sync import concurrency
from prefect.context import FlowRunContext, TaskRunContext
from prefect.exceptions import ObjectAlreadyExists
from prefect.runtime import flow_run

from wherry.config.config import load_config
from wherry.core.units import plural, show_seconds, show_size
from wherry.errors import NotRecordedError, WherryError
from wherry.flows.convert_spec import ConvertSpec, TargetSpec
from wherry.integrations.prefect.server import answering_server
from wherry.nightly.conversion import Conversion, after_commit, note_made
from wherry.store.local_store import limits_of
from wherry.store.waits import waiting
from wherry.tasks.assets import asset_events
from wherry.tasks.common import run_logger, show_failure, show_link, show_table
from wherry.tasks.ending import ending
from wherry.tasks.steps import convert, detect, lineage, plan, register, verify

__all__ = ["ConvertSpec", "TargetSpec", "chain", "convert_checkpoint", "summary"]

LIMIT = "wherry-io-"  # prefix of the names of global concurrency limits, before the store
_PATIENCE_SECONDS = 330.0  # longer than the lease of a slot lasts that nobody renews
_alone_lock = threading.Lock()
_seen = set[tuple[str | None, str]]()  # runs of this process and limits of which the slots were looked at
_OPEN = [StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING]  # a task that is tried again is scheduled
_AT_WORK = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.RUNNING])))
_CONVERTING = TaskRunFilter(
    name=TaskRunFilterName(like_="convert "),
    state=TaskRunFilterState(type=TaskRunFilterStateType(any_=_OPEN)),
)


@flow(name="convert-checkpoint", flow_run_name="{spec.source} to {spec.to}", result_serializer="json")
def convert_checkpoint(spec: ConvertSpec) -> dict[str, Any]:
    """Convert a checkpoint, verify, register and record it.

    Returns:
        JSON values: `detection`, and for the first target `plan`, `receipt`, `verification`, `registration` (the last
        two None if not requested) and `lineage`; in `further` the same for each further target.
    """
    with ending("convert-checkpoint", f"Conversion of {spec.source}", only_failures=True) as end:
        try:
            done = chain(spec.conversion)
        except NotRecordedError as error:
            _show_all(spec, error.result)
            show_failure(error, f"{spec.source} was converted, but not recorded")
            raise
        except WherryError as error:
            show_failure(error, f"{spec.source} was not converted")
            raise
        _show_all(spec, done)
        end.counts = {"converted": len(spec.targets)}
    return done


def chain(conversion: Conversion) -> dict[str, Any]:
    """Run the steps as tasks of the calling flow or task; see `convert_checkpoint`.

    All later steps use the checkpoint that `detect` selected, since a run may get a newer step meanwhile.

    Raises:
        NotRecordedError: the targets are committed, but not recorded or not registered; `result` has the return value
            with None for missing parts.
    """
    stated = conversion.request
    found = detect(**stated.to_json()["source"])
    request = replace(stated, source=replace(stated.source, uri=found["uri"], step=None, item=None))
    plans = [plan(replace(request, targets=(one,)).to_json()) for one in request.targets]
    with _turn([found["uri"], *(one.uri for one in request.targets)]):
        receipts = convert(request.to_json(), conversion.on, conversion.unit)
    refused: list[NotRecordedError] = []
    made = [
        {"plan": planned, **_after(conversion, number, receipt, refused)}
        for number, (planned, receipt) in enumerate(zip(plans, receipts, strict=True))
    ]
    done = {"detection": found, **made[0], "further": made[1:]}
    try:
        if refused:
            raise refused[0]
        note_made(conversion.notes)
    except NotRecordedError as error:
        error.result = done
        raise
    return done


@contextmanager
def _turn(uris: Iterable[str]) -> Generator[None]:
    """Wait for a slot of the configured concurrency limit of each store, and hold it.

    Every flow converts through this function, so the limits apply to all flows together. Outside of a flow run there is
    no server that counts slots, and the function does not wait.
    """
    stated = load_config().settings.concurrency
    limits = {LIMIT + store: stated[store] for store in limits_of(uris, stated)}
    if not limits or (FlowRunContext.get() is None and TaskRunContext.get() is None):
        yield
        return
    answering_server()
    _make_limits(limits)
    _free_slots_if_alone(limits)
    with ExitStack() as slots:
        with waiting(", ".join(limits), what="a free slot of the concurrency limit"):
            _occupy(limits, slots)
        yield
        answering_server()  # to which the slots are given back


def _occupy(limits: Mapping[str, int], slots: ExitStack) -> None:
    """Wait for a slot of each limit; after the time of a lease in which none came free, free those that are lost."""
    while True:
        try:
            slots.enter_context(concurrency(list(limits), occupy=1, timeout_seconds=_PATIENCE_SECONDS))
        except TimeoutError:
            _free_lost_slots(limits)
        else:
            return


def _free_slots_if_alone(limits: Iterable[str]) -> None:
    """Free the lost slots of limits before the first conversion of this process, if no other flow run is at work."""
    run = flow_run.id
    with _alone_lock:
        fresh = [name for name in limits if (run, name) not in _seen]
        _seen.update((run, name) for name in fresh)
        if not fresh:
            return
        with get_client(sync_client=True) as client:
            alone = all(str(one.id) == run for one in client.read_flow_runs(flow_run_filter=_AT_WORK))
        if alone:
            _free_lost_slots(fresh)


def _free_lost_slots(limits: Iterable[str]) -> None:
    """Free the slots of limits that no conversion holds.

    A server that keeps the leases of slots in memory, as Prefect's does by default, forgets them when it ends, and
    their slots stay taken for ever. Each slot is held by a task that converts; where fewer of them run than slots are
    taken, the rest is lost.
    """
    with get_client(sync_client=True) as client:
        runs = client.read_task_runs(flow_run_filter=_AT_WORK, task_run_filter=_CONVERTING)
        at_work = sum(one.name.startswith("convert ") for one in runs)
        for name in limits:
            found = client.read_global_concurrency_limit_by_name(name)
            if found.active_slots > at_work:
                run_logger().warning(
                    "%s: %d of %d slots are taken and %d conversions run: the others are free again",
                    name, found.active_slots, found.limit, at_work,
                )  # fmt: skip
                client.update_global_concurrency_limit(
                    name, GlobalConcurrencyLimitUpdate(active_slots=at_work)
                )


def _make_limits(limits: Mapping[str, int]) -> None:
    """Create or update the configured global concurrency limits on the server."""
    with get_client(sync_client=True) as client:
        for name, limit in limits.items():
            try:
                client.upsert_global_concurrency_limit_by_name(name, limit)
            except ObjectAlreadyExists:  # another run has just created it; update it
                client.upsert_global_concurrency_limit_by_name(name, limit)


def _after(
    conversion: Conversion, number: int, receipt: dict[str, Any], refused: list[NotRecordedError]
) -> dict[str, Any]:
    """The steps after the commit of one target; a failure of ledger or registry does not stop the other steps."""
    uris = receipt["target"]["uri"], receipt["source"]["uri"]
    verification, registration, refusals = after_commit(conversion, number, *uris, verify, register)
    refused += refusals
    asset_events(receipt)
    tree = None
    try:
        tree = lineage(receipt)
    except NotRecordedError as error:
        refused.append(error)
    return {"receipt": receipt, "verification": verification, "registration": registration, "lineage": tree}


def _show_all(spec: ConvertSpec, done: dict[str, Any]) -> None:
    """The artifacts of each target."""
    for one in (done, *done["further"]):
        show_table(
            summary(one), "wherry-conversion", f"{spec.source} to {one['receipt']['target']['format']}"
        )
        row = one["registration"]
        if row and row["page"]:
            text = f"{row['name']} version {row['version']}"
            show_link(row["page"], text, "wherry-model-version", "In the MLflow UI")


def summary(done: dict[str, Any]) -> list[dict[str, str]]:
    """The flow's result as rows of (what, value)."""
    receipt, source, target = done["receipt"], done["receipt"]["source"], done["receipt"]["target"]
    seconds, tree = max(receipt["seconds"], 1e-9), done["lineage"]
    rows = {
        "source": source["uri"],
        "source format": f"{source['format']} ({source['format_version']})",
        "source digest": source["checkpoint_digest"],
        "target": target["uri"],
        "target format": f"{target['format']} ({target['format_version']})",
        "target digest": target["checkpoint_digest"],
        "tensors": f"{target['tensors']}, {plural(target['parameters'], 'parameter')}",
        "moved": f"{show_size(receipt['bytes_written'])} in {show_seconds(seconds)}",
        "rate": f"{show_size(receipt['bytes_written'] / seconds)}/s",
        "lossless": "yes" if receipt["lossless"] else "no",
        "already there": "yes" if receipt["already"] else "no",
        "plan": receipt["plan_digest"],
        "lineage": "not recorded"
        if tree is None
        else f"{plural(len(tree['nodes']), 'checkpoint')}, {plural(len(tree['edges']), 'conversion')}",
    }
    if done["verification"]:
        rows["verified"] = f"{done['verification']['verdict']} at level {done['verification']['level']}"
    if done["registration"]:
        row = done["registration"]
        rows["model version"] = f"{row['name']} {row['version']} in {row['registry']}"
    return [{"what": what, "value": value} for what, value in rows.items()]
