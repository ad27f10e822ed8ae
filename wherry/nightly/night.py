"""night: one unattended run over the routes; Prefect tasks or threads of this process carry out its steps.

    plan_night → for each checkpoint: convert, verify, register, record a note → report

Routes are processed in order. A checkpoint that fails or vanishes becomes a row of the report; the run goes on. Where a
conversion to several targets fails, each target is tried alone, so that one bad target does not block the others. A
lease in the home keeps two nights from working on the same route; the second one skips it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from wherry.config.config import Config
from wherry.config.schema import Route
from wherry.core import threads
from wherry.core.child import NoAnswerError
from wherry.core.progress import logger
from wherry.core.units import parse_size
from wherry.errors import (
    InternalError,
    MissingExtraError,
    NotFoundError,
    NotRecordedError,
    StorageError,
    TargetInUseError,
    WherryError,
    wherry_error,
)
from wherry.ledger.replay import FAILURE
from wherry.models.register import register
from wherry.nightly.conversion import Conversion, after_commit, conversion_for, note, note_made
from wherry.nightly.reconcile import Todo, Work, estimate, hours, todo
from wherry.nightly.report import Came, NightPlan, NightReport, WorkOutcome
from wherry.nightly.routes import RouteTarget
from wherry.nightly.survey import Omission, survey
from wherry.prove.verify import verify_and_record
from wherry.store.home import ensure_home
from wherry.store.local_store import is_live, locate
from wherry.target.janitor import end_runs
from wherry.target.janitor import tidy as tidy_left_behind
from wherry.target.lease import Lease, LeaseFile
from wherry.version import __version__
from wherry.workers import convert_on

if TYPE_CHECKING:

    class Attempt(Protocol):
        """The conversion of one checkpoint to some targets, started."""

        def add_done_callback(self, callback: Callable[[Any], None], /) -> None:
            """Call `callback` in any thread once the attempt has ended."""

        def result(self) -> int:
            """The bytes written; raises the exception of a failed attempt."""
            ...

    Start: TypeAlias = Callable[[Conversion], Attempt]
    # Runs the steps of a route, as many at a time as its `concurrency` allows.
    Runner: TypeAlias = Callable[[Route], AbstractContextManager[Start]]

# Errors that the source does not cause: a full disk, missing permissions, a missing extra, the limits of a child
# process. They are not noted as failures of the source.
_PASSING = (NotFoundError, TargetInUseError, StorageError, MissingExtraError, NotRecordedError, NoAnswerError)
_ALONE: tuple[Came, ...] = ("not recorded", "failed")  # after these, each target of a work is tried alone
_log = logger(__name__)


def run_night(
    config: Config,
    routes: Iterable[Route],
    *,
    dry_run: bool = False,
    go: bool = False,
    retry_failed: bool = False,
    runner: Runner | None = None,
    on_plan: Callable[[NightPlan], None] = lambda _plan: None,
    on_outcome: Callable[[WorkOutcome], None] = lambda _outcome: None,
) -> NightReport:
    """Make the missing targets of these routes.

    Args:
        config: the configuration.
        routes: the routes, in order.
        dry_run: only plan.
        go: convert on a first night too.
        retry_failed: retry checkpoints whose conversion failed, although their files are unchanged.
        runner: runs the steps; threads of this process by default.
        on_plan: called with the plan of each route before anything is converted.
        on_outcome: called when the conversion of a checkpoint, or of one target that is tried alone, has ended.

    Raises:
        StorageError: the ledger cannot be read or written.
    """
    all_routes = tuple(routes)
    if not dry_run:
        tidy_left_behind()
        end_runs()
    with ExitStack() as stack:
        free = [route for route in all_routes if dry_run or stack.enter_context(holding(route))]
        plans = plan_night(free, retry_failed=retry_failed, go=go)
        for plan in plans:
            on_plan(plan)
        works = () if dry_run else plans
        outcomes = [
            one for plan in works for one in _carried_out(config, plan, runner or _on_threads, on_outcome)
        ]
    return NightReport(plans, tuple(outcomes), tuple(route.name for route in all_routes if route not in free))


def plan_night(
    routes: Iterable[Route], *, retry_failed: bool = False, go: bool = False
) -> tuple[NightPlan, ...]:
    """Plan the work of each route; writes nothing.

    Args:
        routes: the routes, in order.
        retry_failed: retry checkpoints whose conversion failed, although their files are unchanged.
        go: convert on a first night too.
    """
    from wherry.ledger.nodes import present
    from wherry.ledger.record import open_ledger

    with open_ledger() as ledger:
        facts = present(ledger)
    products = frozenset(place for place, last in facts.by_target.items() if not is_live(last.source_uri))
    plans: list[NightPlan] = []
    for route in routes:
        passed: list[Omission] = []
        try:
            found = survey(route, products=products, on_pass=passed.append)
            rest = todo(route, found, facts, exists=_exists, retry_failed=retry_failed)
        except Exception as error:  # noqa: BLE001  a root or target store that is out of reach stops no other route
            empty = Todo(route.name, (), tuple(passed), (), first=False)
            plans.append(
                NightPlan(route, empty, 0.0, error=_without_frames(to_wherry_error(error, route.root)))
            )
            continue
        full = Todo(rest.route, rest.works, (*passed, *rest.passed), rest.waiting, rest.first)
        plans.append(
            NightPlan(route, full, hours(full, facts, route), None if go else estimate(full, facts, route))
        )
    return tuple(plans)


@contextmanager
def holding(route: Route) -> Generator[bool]:
    """Hold the lease of a route; yields False where another night holds it."""
    with ExitStack() as stack:
        free = True
        try:
            lease = LeaseFile(ensure_home() / f"night-{route.name}.lease")
            stack.enter_context(Lease(lease, f"route {route.name}"))
        except TargetInUseError:
            free = False
        yield free


def _carried_out(
    config: Config, plan: NightPlan, runner: Runner, on_outcome: Callable[[WorkOutcome], None]
) -> Iterator[WorkOutcome]:
    """Carry out the works of a route and yield their outcomes in order; the runner limits how many run at a time.

    A failure is handled at once, while other works still run: it is noted, or each target is tried alone.
    """
    ended: SimpleQueue[tuple[int, tuple[RouteTarget, ...], Attempt]] = SimpleQueue()
    whole: dict[int, WorkOutcome] = {}
    rows: list[list[tuple[int, WorkOutcome]]] = [[] for _work in plan.works]
    with runner(plan.route) as start:

        def begin(number: int, targets: tuple[RouteTarget, ...]) -> None:
            attempt = start(conversion_of(config, plan.route, plan.works[number], targets))
            attempt.add_done_callback(lambda _ended: ended.put((number, targets, attempt)))

        for number, work in enumerate(plan.works):
            begin(number, work.targets)
        running = len(plan.works)
        while running:
            number, targets, attempt = ended.get()
            running -= 1
            work = plan.works[number]
            outcome = _came(work, targets, attempt)
            on_outcome(outcome)
            if number not in whole and outcome.came in _ALONE and targets[1:]:
                whole[number] = outcome
                for one in targets:
                    begin(number, (one,))
                running += len(targets)
            else:
                rows[number].append((work.targets.index(targets[0]), _note_outcome(work, targets, outcome)))
    for number, found in enumerate(rows):
        alone = [outcome for _at, outcome in sorted(found, key=lambda row: row[0])]
        yield from settle_outcomes(whole[number], alone) if number in whole else alone


def _came(work: Work, targets: tuple[RouteTarget, ...], attempt: Attempt) -> WorkOutcome:
    """The outcome of an attempt that has ended; its error is kept without traceback."""
    uri = work.source.found.uri
    try:
        return WorkOutcome(
            work.route, uri, "converted", tuple(one.place for one in targets), attempt.result()
        )
    except Exception as caught:  # noqa: BLE001  any error fails only this checkpoint
        return came_of(work, targets, _without_frames(to_wherry_error(caught, uri)))


def _without_frames(error: WherryError) -> WherryError:
    """The error without traceback: its frames would keep the buffers of the conversion alive until the report."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def _note_outcome(work: Work, targets: tuple[RouteTarget, ...], outcome: WorkOutcome) -> WorkOutcome:
    """Note a failure in the ledger; if that fails, the next night tries the work again."""
    try:
        note(failed_notes(work, targets, outcome.error) if outcome.error else ())
    except WherryError as refusal:
        _log.warning("the failure of %s was not recorded: %s", work.source.found.uri, refusal)
    return outcome


@contextmanager
def _on_threads(route: Route) -> Generator[Start]:
    with threads.executor(route.concurrency, "wherry-night") as pool:
        try:
            yield lambda conversion: pool.submit(_carry, conversion)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # running works finish, waiting ones do not start
            raise


def _carry(conversion: Conversion) -> int:
    """Convert, verify, register and note one checkpoint; return the bytes written."""
    group = convert_on(conversion.request, conversion.on, unit_bytes=parse_size(conversion.unit))
    refused: list[NotRecordedError] = []
    for number, (_model, receipt) in enumerate(zip(conversion.models, group.receipts, strict=True)):
        uris = receipt.target.uri, receipt.source.uri
        refused += after_commit(conversion, number, *uris, verify_and_record, register)[2]
    if refused:
        raise refused[0]
    note_made(conversion.notes)
    return sum(receipt.bytes_written for receipt in group.receipts if not receipt.already)


def conversion_of(config: Config, route: Route, work: Work, targets: Sequence[RouteTarget]) -> Conversion:
    """The conversion to some targets of a checkpoint; only the newest checkpoint of a run gets the alias."""
    source, settings = work.source, config.settings
    made = conversion_for(
        route, route.source(source.found), source.where, targets, settings.memory, source.score
    )
    return replace(made, alias=route.alias if source.newest else None, **settings.mlflow.model_dump())


def to_wherry_error(error: BaseException, uri: str) -> WherryError:
    """Any exception as a WherryError, so that storage libraries and bugs fail one checkpoint and not the night."""
    ours = wherry_error(error, uri=uri, cure="see the log of the run")
    if isinstance(ours, InternalError):
        ours.retryable = True
    return ours


def came_of(work: Work, targets: Iterable[RouteTarget], error: WherryError) -> WorkOutcome:
    """The outcome for the error of a work: not recorded, vanished, in use by another run, or failed."""
    uri, places = work.source.found.uri, tuple[str, ...]()
    came: Came = "failed"
    if isinstance(error, NotRecordedError):
        came, places = "not recorded", tuple(one.place for one in targets)
    elif isinstance(error, TargetInUseError):
        came = "in use"
    elif isinstance(error, NotFoundError) and not _exists(uri):
        came = "vanished"
    return WorkOutcome(work.route, uri, came, places, error=error)


def settle_outcomes(whole: WorkOutcome, alone: Sequence[WorkOutcome]) -> list[WorkOutcome]:
    """The outcomes of the targets of a work that were tried alone after the whole work failed.

    Where a target was committed before the source vanished, the outcome of the whole work is kept too.

    Args:
        whole: outcome of the whole work.
        alone: outcome of each target.
    """
    rest = [one for one in alone if one.came not in ("vanished", "in use")]
    was_committed = whole.came == "not recorded" or (whole.error is not None and whole.error.committed)
    return [*rest, whole] if was_committed and len(rest) < len(alone) else list(alone)


def failed_notes(work: Work, targets: Iterable[RouteTarget], error: WherryError) -> list[dict[str, Any]]:
    """The notes of a failure that will recur with the same files; empty for errors of the machine."""
    if error.retryable or isinstance(error, _PASSING):
        return []
    body = {
        "about": FAILURE, "route": work.route, "source": work.source.found.uri,
        "fingerprint": work.source.fingerprint, "requests": [one.request for one in targets],
        "error": error.what, "kind": type(error).__name__, "wherry": __version__,
    }  # fmt: skip
    return [body]


def _exists(uri: str) -> bool:
    return locate(uri).exists()
