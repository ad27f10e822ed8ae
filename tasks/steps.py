"""The steps as Prefect tasks, each a call of the engine's function of that name.

A task is a step of one checkpoint, never a tensor, a chunk or a request: a task costs 11–17 ms and several rows in
Prefect's database. Tasks take and return only JSON values; nothing is pickled.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from prefect import task
from prefect.runtime import flow_run

from wherry.config.schema import Route
from wherry.converter.plan import plan_targets
from wherry.core.receipt import GroupReceipt, from_json
from wherry.core.request import ConvertRequest, SourceRequest
from wherry.core.units import DEFAULT_UNIT, parse_size, plural, short, show_seconds, show_size
from wherry.errors import NotFoundError, NotRecordedError, TargetInUseError
from wherry.formats.discover import SkippedPath
from wherry.formats.discover import discover as find
from wherry.ledger.record import record
from wherry.ledger.resolve import detect as look_at
from wherry.models.promote import promote as carry_out
from wherry.models.promote import rollback as go_back
from wherry.models.register import register as enter
from wherry.nightly.conversion import conversion_for
from wherry.nightly.preflight import refuse_here
from wherry.nightly.routes import Explanation, chosen_routes, explain, load_config
from wherry.nightly.scores import known_score
from wherry.prove.audit import audit as look
from wherry.prove.markdown import markdown
from wherry.prove.verify import verify_and_record
from wherry.store.local_store import locate
from wherry.tasks.common import STEP, progress_artifact, run_logger, show_table
from wherry.trace.lineage import show
from wherry.workers import convert_on
from wherry.workers.commit import commit as commit_job
from wherry.workers.records import TaskRecord, target_of
from wherry.workers.unit import Unit
from wherry.workers.work import work as make_units


@task(name="detect", task_run_name="detect {uri}", **STEP)
def detect(uri: str, **which: Any) -> dict[str, Any]:
    """Detect the checkpoint at a URI; return the JSON form of the detection, whatever its verdict.

    Args:
        uri: a checkpoint, step or run.
        which: further fields of a SourceRequest.
    """
    found = look_at(SourceRequest(uri, **which))
    run_logger().info("%s is %s (%s): %s", found.uri, found.format, found.format_version, found.verdict)
    return found.to_json()


@task(name="discover", task_run_name="discover {root}", **STEP)
def discover(root: str) -> list[dict[str, Any]]:
    """Find the checkpoints below a root; log skipped paths.

    Returns:
        The JSON form of each detection.
    """
    log = run_logger()

    def passed_over(skipped: SkippedPath) -> None:
        log.info("skipped %s: %s", skipped.uri, skipped.reason)

    found = [detection.to_json() for detection in find(root, on_skip=passed_over)]
    log.info("found %d checkpoints below %s", len(found), root)
    return found


# The other fields of a plan name every tensor, which is too large for the result of a task.
_KEPT = (
    "target",
    "to",
    "format_version",
    "options",
    "digest",
    "tensors",
    "bytes_in",
    "bytes_out",
    "peak_memory",
)


@task(name="plan", task_run_name="plan {request[source][uri]}", **STEP)
def plan(request: dict[str, Any]) -> dict[str, Any]:
    """Plan a conversion.

    Args:
        request: the JSON form of a ConvertRequest with one target.

    Returns:
        The plan in brief, with its digest.

    Raises:
        UsageError: this worker is a container that would keep the target or the ledger inside itself.
    """
    parsed_request = ConvertRequest.from_json(request)
    refuse_here(parsed_request.targets[0].uri)
    (made,) = plan_targets(parsed_request)
    size = show_size(made.nbytes_in)
    run_logger().info("%d tensors, %s to read, plan %s", made.tensors, size, short(made.digest))
    data = made.to_json()
    return {name: data[name] for name in _KEPT}


@task(name="convert", task_run_name="convert {request[source][uri]}", **STEP)
def convert(request: dict[str, Any], on: str = "threads", unit: str = DEFAULT_UNIT) -> list[dict[str, Any]]:
    """Convert a checkpoint, reading it once.

    A run that was killed can be run again: a target appears complete or not at all, and if it already exists as the
    result of this same conversion, nothing is done. With an engine, the progress is by units, and a run that was
    cancelled or has crashed leaves a job that the next run takes up.

    Args:
        request: the JSON form of a ConvertRequest.
        on: what makes the target, as `wherry convert --on` takes it.
        unit: size of a unit of an engine.

    Returns:
        The JSON form of the receipt of each target, in order. If the ledger cannot be used, their `lineage` states it,
        and the task `lineage`, which comes last, tries again.
    """
    parsed_request = ConvertRequest.from_json(request)
    try:
        progress = progress_artifact("convert", parsed_request.source.uri)
        group = convert_on(parsed_request, on, unit_bytes=parse_size(unit), progress=progress)
    except NotRecordedError as error:
        group = error.result
    for receipt in group.receipts:
        outcome = "exists already" if receipt.already else f"written in {receipt.seconds:.1f} s"
        run_logger().info("%s %s; lineage: %s", receipt.target.uri, outcome, receipt.lineage)
    return [receipt.to_json() for receipt in group.receipts]


@task(name="work", task_run_name="work on {job}", **STEP)
def work(job: str, expiry: float = 60.0, *, commit: bool = True) -> dict[str, Any]:
    """Write units of a job until none is left; any number of runs do so at the same time.

    A run that is cancelled or crashes leaves its unit to the others. One that comes after the commit has nothing to do.

    Args:
        job: its folder, or its target.
        expiry: seconds without a heartbeat after which the unit of another worker is written again.
        commit: whether to commit the target at the end, unless another run does.

    Returns:
        The JSON form of a WorkReport, and in `receipt` that of the target if this run has committed it.
    """
    log = run_logger()

    def log_unit(unit: Unit, receipt: TaskRecord) -> None:
        log.info("unit %s: %s in %s", unit.name, show_size(unit.nbytes), show_seconds(receipt.seconds))

    try:
        report: dict[str, Any] = make_units(job, expiry=expiry, on_unit=log_unit).to_json()
    except NotFoundError:
        target = target_of(locate(job))
        if target.entry is None:
            raise
        log.info("the job was committed before: %s", target.uri)
        report = {"job": job, "made": [], "nbytes": 0, "units": 0, "ended": True}
    group: GroupReceipt | None = None
    if commit and not report["ended"]:
        try:
            group = commit_job(job, progress=progress_artifact("commit", job))
        except NotRecordedError as error:
            group = error.result
        except (TargetInUseError, NotFoundError) as error:
            log.info("another run commits: %s", error.what)
    receipt = group.receipts[0].to_json() if group else None
    rows = [("job", report["job"]), ("written here", f"{plural(len(report['made']), 'unit')} of {report['units']}"),
            ("bytes", show_size(report["nbytes"])), ("committed here", "yes" if receipt else "no")]  # fmt: skip
    show_table([{"what": what, "value": value} for what, value in rows], "wherry-work", f"Work on {job}")
    return {**report, "receipt": receipt}


@task(name="verify", task_run_name="verify {uri}", **STEP)
def verify(
    uri: str,
    level: str = "present",
    against: str | None = None,
    family_file: str | None = None,
    below: str | None = None,
    against_below: str | None = None,
) -> dict[str, Any]:
    """Verify a checkpoint, and fail if it does not pass.

    Args:
        uri: the checkpoint.
        level: level of the verification.
        against: the source, at levels that compare with it.
        family_file: the file that declares the model family with whose layouts it was converted from the source.
        below: a folder that the checkpoint must not leave.
        against_below: a folder that the source must not leave.

    Returns:
        The JSON form of the verification, with `lineage`: whether the ledger recorded it.

    Raises:
        IncompleteError: a part of the checkpoint is missing.
        MismatchError: the checkpoint differs from its record, or from `against`.
    """
    progress = progress_artifact("verify", uri)
    outcome, recorded = verify_and_record(
        uri, below=below, level=level, against=against, against_below=against_below, family_file=family_file,
        progress=progress,
    )  # fmt: skip
    run_logger().info("%s at level %s: %s; lineage: %s", outcome.uri, level, outcome.verdict, recorded)
    return {**outcome.to_json(), "lineage": recorded}


@task(name="register", task_run_name="register {uri}", **STEP)
def register(
    uri: str,
    model: str,
    alias: str | None = None,
    tracking_uri: str | None = None,
    registry_uri: str | None = None,
    tags: dict[str, str] | None = None,
    below: str | None = None,
) -> dict[str, Any]:
    """Register a checkpoint by reference; the same checkpoint and model always give the same version.

    Args:
        uri: the checkpoint.
        model: the registered model.
        alias, tracking_uri, registry_uri, tags: as for `wherry.register`.
        below: a folder that the checkpoint must not leave.

    Returns:
        The fields of the registration.
    """
    stores = {"tracking_uri": tracking_uri, "registry_uri": registry_uri}
    done = enter(
        SourceRequest(uri, below=below), model, alias=alias, tags=tags, run_page=flow_run.ui_url, **stores
    )
    run_logger().info(
        "%s version %s %s", model, done.version, "created" if done.created else "exists already"
    )
    return asdict(done)


@task(name="lineage", task_run_name="lineage {receipt[target][uri]}", **STEP)
def lineage(receipt: dict[str, Any]) -> dict[str, Any]:
    """Record a conversion if it is not recorded yet, and return its lineage.

    `convert` commits even if the ledger cannot be written; here, where a retry is possible, that is a failure.

    Args:
        receipt: JSON form of a receipt.

    Returns:
        The JSON form of the lineage tree.

    Raises:
        NotRecordedError: the ledger cannot be used; the conversion itself is committed.
    """
    try:
        record(from_json(receipt))
    except NotRecordedError as error:
        error.retryable = True  # the database server of a ledger may recover
        raise
    tree = show(receipt["target"]["checkpoint_digest"])
    run_logger().info("lineage: %d checkpoints, %d conversions", len(tree.nodes), len(tree.edges))
    return tree.to_json()


_NIGHTLY = "best"  # selects among all steps of a run, so one step alone does not suffice


@task(name="export", task_run_name="export {source}", **STEP)
def route_targets(
    source: str, routes: tuple[str, ...] = (), config: str | None = None, env: str | None = None
) -> list[dict[str, Any]]:
    """Resolve the routes for a checkpoint.

    Args:
        source: URI of the checkpoint.
        routes: names of routes; all by default.
        config: the configuration file; by default the one that `wherry config show` prints.
        env: environment of the configuration.

    Returns:
        For each route: `route`, `takes`, `reason`, `unselected` (its `select` leaves the checkpoint out), and as
        `conversion` the JSON form of a Conversion without the registry's URIs, since they may contain credentials;
        None if the route does not take the checkpoint.
    """
    read = load_config(config, env)
    chosen = {route.name: route for route in chosen_routes(read, routes)}
    found = [one for one in explain(source, read) if one.route in chosen]
    rows = [_row(chosen[one.route], one, read.settings.memory) for one in found]
    for row in rows:
        run_logger().info(
            "route %s %s: %s", row["route"], "takes it" if row["takes"] else "does not take it", row["reason"]
        )
    return rows


def _row(route: Route, found: Explanation, memory: str) -> dict[str, Any]:
    takes, reason, unselected = found.takes, found.reason, found.unselected
    if takes and route.selection.choice == _NIGHTLY:
        unselected = True
        takes, reason = False, f"select = {route.select}: the nightly run compares the steps of the run"
    conversion: dict[str, Any] | None = None
    if takes:
        assert found.where is not None
        assert found.source is not None
        # The source is the checkpoint that the targets' names were filled in from: a run may have a newer step by now.
        source = SourceRequest(found.source, route.format, allow_opaque=route.allow_opaque, below=route.root)
        value = known_score(route.place(found.source), route.retention.metric, run_logger())
        conversion = conversion_for(route, source, found.where, found.targets, memory, value).to_json()
    return {
        "route": route.name,
        "takes": takes,
        "reason": reason,
        "unselected": unselected,
        "conversion": conversion,
    }


@task(name="promote", task_run_name="promote {subject}", **STEP)
def promote(subject: str, **chosen: Any) -> dict[str, Any]:
    """Promote a checkpoint or model version; fail if the verification or the policy does not pass.

    Args:
        subject: a model URI or a checkpoint's URI.
        chosen: further arguments of `wherry.promote`.

    Returns:
        The JSON form of the promotion.
    """
    done = carry_out(subject, progress=progress_artifact("promote", subject), **chosen)
    outcome = (
        "was set already"
        if done.already
        else f"replaces {f'version {done.replaced}' if done.replaced else 'nothing'}"
    )
    run_logger().info("%s version %s is %s; it %s", done.name, done.version, done.alias, outcome)
    return done.to_json()


@task(name="rollback", task_run_name="rollback {model}", **STEP)
def rollback(model: str, **chosen: Any) -> dict[str, Any]:
    """Move an alias back to the version that had it before.

    Args:
        model: the registered model.
        chosen: further arguments of `wherry.models.promote.rollback`.

    Returns:
        The JSON form of the rollback.
    """
    done = go_back(model, progress=progress_artifact("rollback", model), **chosen)
    run_logger().info("%s version %s is %s again", done.name, done.version, done.alias)
    return done.to_json()


@task(name="audit", task_run_name="audit {scope}", **STEP)
def audit(scope: str | list[str], **chosen: Any) -> dict[str, Any]:
    """Audit checkpoints; findings are results, not failures.

    Args:
        scope: `registered`, `all`, or roots.
        chosen: further arguments of `wherry.audit`.

    Returns:
        `report`: the JSON form of the report; `markdown`: the report as text.
    """
    shown = scope if isinstance(scope, str) else ", ".join(scope)
    reading = progress_artifact("audit", shown) if chosen.get("level") == "digest" else None
    report = look(scope, progress=reading, **chosen)  # pyright: ignore[reportArgumentType]  the flow's model has checked it
    counts = report.counts
    run_logger().info(
        "checkpoints: %d, errors: %d, warnings: %d, notes: %d, in %.1f s; anchor: statement %d, %s",
        counts["checkpoints"],
        counts["errors"],
        counts["warnings"],
        counts["notes"],
        report.seconds,
        report.chain.statements,
        report.chain.head,
    )
    return {"report": report.to_json(), "markdown": markdown(report)}
