"""night: one unattended run over the routes, whoever runs its steps: Prefect's tasks or threads of this process.

    plan_night → for each checkpoint: convert, verify, register, note what came of it → report

The order of a night is that of the routes. A checkpoint that fails or vanishes is a row of the report and stops
nothing. Where a conversion to several targets fails, each target is tried alone, so that one that cannot be made does
not hold up the others. Two nights over one route exclude each other by a lease in the home; the second one skips.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack, contextmanager
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from wherry.converter.convert import convert_all
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
from wherry.formats.registry import find_format
from wherry.ledger.outcomes import not_recorded, registration_of, verification_of
from wherry.ledger.replay import FAILURE, PRODUCT
from wherry.models.register import register
from wherry.routes.reconcile import Todo, Work, estimate, hours, todo
from wherry.routes.report import Came, NightPlan, NightReport, WorkOutcome
from wherry.routes.survey import Omission, survey
from wherry.runtime import threads
from wherry.runtime.child import NoAnswerError
from wherry.staging.lease import Lease
from wherry.storage.home import ensure_home
from wherry.storage.stores import is_live, locate
from wherry.verifier.verify import comparison, verified
from wherry.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from wherry.config.config import Config
    from wherry.config.schema import Route
    from wherry.core.receipt import Receipt
    from wherry.routes.routes import RouteTarget, Whereabouts

    class Attempt(Protocol):
        """The conversion of one checkpoint to some targets, started."""

        def add_done_callback(self, told: Callable[[Any], None], /) -> None:
            """Have `told` called, in any thread, once it has ended."""

        def result(self) -> int:
            """The bytes written; raises what ended it."""
            ...

    Start: TypeAlias = Callable[[Work, tuple[RouteTarget, ...]], Attempt]
    # How the steps of a route are run, as many at a time as the route says.
    Runner: TypeAlias = Callable[[Route], AbstractContextManager[Start]]

# What the source is not to blame for: a full disk, missing rights, a missing extra or the limits of a child process
# are mended elsewhere.
_PASSING = (NotFoundError, TargetInUseError, StorageError, MissingExtraError, NotRecordedError, NoAnswerError)
_ALONE: tuple[Came, ...] = ("not recorded", "failed")  # after these each target of a work is tried by itself
_log = logging.getLogger(__name__)


def run_night(
    config: Config,
    routes: Iterable[Route],
    *,
    dry_run: bool = False,
    go: bool = False,
    retry_failed: bool = False,
    runner: Runner | None = None,
    on_plan: Callable[[NightPlan], None] = lambda _plan: None,
) -> NightReport:
    """Convert what these routes ask for and the ledger does not have.

    Args:
        config: with the settings.
        routes: in order.
        dry_run: only plan.
        go: convert on a first night too.
        retry_failed: try again what failed for good with the same files.
        runner: what runs the steps; threads of this process by default.
        on_plan: called with the plan of each route before anything is converted.

    Raises:
        StorageError: the ledger cannot be read or written.
    """
    asked, chosen = tuple(routes), runner or partial(_on_threads, config)
    with ExitStack() as stack:
        free = [route for route in asked if dry_run or stack.enter_context(holding(route))]
        plans = plan_night(free, retry_failed=retry_failed, go=go)
        for plan in plans:
            on_plan(plan)
        outcomes = [one for plan in (() if dry_run else plans) for one in _carried_out(plan, chosen)]
    return NightReport(plans, tuple(outcomes), tuple(route.name for route in asked if route not in free))


def plan_night(
    routes: Iterable[Route], *, retry_failed: bool = False, go: bool = False
) -> tuple[NightPlan, ...]:
    """What each route has to do now; nothing is written.

    Args:
        routes: in order.
        retry_failed: try again what failed for good with the same files.
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
            plans.append(NightPlan(route, empty, 0.0, error=_without_frames(as_ours(error, route.root))))
            continue
        full = Todo(rest.route, rest.works, (*passed, *rest.passed), rest.waiting, rest.first)
        plans.append(
            NightPlan(route, full, hours(full, facts, route), None if go else estimate(full, facts, route))
        )
    return tuple(plans)


@contextmanager
def holding(route: Route) -> Generator[bool]:
    """Exclude other nights over a route; False where one is at work."""
    with ExitStack() as stack:
        free = True
        try:
            stack.enter_context(Lease(ensure_home() / f"night-{route.name}.lease", f"route {route.name}"))
        except TargetInUseError:
            free = False
        yield free


def _carried_out(plan: NightPlan, runner: Runner) -> Iterator[WorkOutcome]:
    """What came of each work of a route, in order: all are started at once, the runner bounds how many run.

    A failure is noted, and each target tried alone, as soon as it is there, whatever else is still at work.
    """
    ended: SimpleQueue[tuple[int, tuple[RouteTarget, ...], Attempt]] = SimpleQueue()
    whole: dict[int, WorkOutcome] = {}
    rows: list[list[tuple[int, WorkOutcome]]] = [[] for _work in plan.works]
    with runner(plan.route) as start:

        def begin(number: int, targets: tuple[RouteTarget, ...]) -> None:
            attempt = start(plan.works[number], targets)
            attempt.add_done_callback(lambda _ended: ended.put((number, targets, attempt)))

        for number, work in enumerate(plan.works):
            begin(number, work.targets)
        running = len(plan.works)
        while running:
            number, targets, attempt = ended.get()
            running -= 1
            work = plan.works[number]
            outcome = _came(work, targets, attempt)
            if number not in whole and outcome.came in _ALONE and targets[1:]:
                whole[number] = outcome
                for one in targets:
                    begin(number, (one,))
                running += len(targets)
            else:
                rows[number].append((work.targets.index(targets[0]), _noted(work, targets, outcome)))
    for number, found in enumerate(rows):
        alone = [outcome for _at, outcome in sorted(found, key=lambda row: row[0])]
        yield from settled(whole[number], alone) if number in whole else alone


def _came(work: Work, targets: tuple[RouteTarget, ...], attempt: Attempt) -> WorkOutcome:
    """What came of an attempt that has ended; its error is kept without the frames that it was raised in."""
    uri = work.source.found.uri
    try:
        return WorkOutcome(
            work.route, uri, "converted", tuple(one.place for one in targets), attempt.result()
        )
    except Exception as caught:  # noqa: BLE001  whatever it is, it stops this checkpoint alone
        return came_of(work, targets, _without_frames(as_ours(caught, uri)))


def _without_frames(error: WherryError) -> WherryError:
    """An error for the report: frames would keep alive what a conversion had in memory, for the whole night."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def _noted(work: Work, targets: tuple[RouteTarget, ...], outcome: WorkOutcome) -> WorkOutcome:
    """Tell the ledger of a failure; where it cannot be written the next night tries the work again."""
    try:
        note(failed_notes(work, targets, outcome.error) if outcome.error else ())
    except WherryError as refusal:
        _log.warning("the failure of %s was not noted: %s", work.source.found.uri, refusal)
    return outcome


@contextmanager
def _on_threads(config: Config, route: Route) -> Generator[Start]:
    with threads.executor(route.concurrency, "wherry-night") as pool:
        try:
            yield lambda work, targets: pool.submit(_carry, config, route, work, targets)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # what is at work ends, what waits does not begin
            raise


def _carry(config: Config, route: Route, work: Work, targets: tuple[RouteTarget, ...]) -> int:
    """Convert, verify, register and note one checkpoint; the bytes written."""
    ends = [one.rule.at(one.uri) for one in targets]
    group = convert_all(route.request(route.source(work.source.found), ends, config.settings.memory))
    for one, receipt in zip(targets, group.receipts, strict=True):
        _after(config, route, one, receipt, alias=route.alias if work.source.newest else None)
    note_made(notes_of(work, targets))
    return sum(receipt.bytes_written for receipt in group.receipts if not receipt.already)


def _after(config: Config, route: Route, one: RouteTarget, receipt: Receipt, *, alias: str | None) -> None:
    """What follows the commit of one target."""
    uri = receipt.target.uri
    if route.verify != "none":
        with verification_of(uri):
            family_file = one.rule.at(one.uri).layout.family_file
            verified(uri, **comparison(route.verify, receipt.source.uri, family_file))
    if one.model is not None:
        settings: dict[str, Any] = config.settings.mlflow.model_dump()
        with registration_of(uri, one.model, alias=alias, tags=route.tags):
            register(uri, one.model, alias=alias, tags=route.tags, **settings)


def as_ours(error: BaseException, uri: str) -> WherryError:
    """Any error as one of ours: storage libraries raise their own, and a bug must cost one checkpoint, not a night."""
    ours = wherry_error(error, uri=uri, cure="look at the log of the run")
    if isinstance(ours, InternalError):
        ours.retryable = True
    return ours


def came_of(work: Work, targets: Iterable[RouteTarget], error: WherryError) -> WorkOutcome:
    """What an error of a work means: not recorded, vanished, in use by another run, or failed."""
    uri, places = work.source.found.uri, tuple[str, ...]()
    came: Came = "failed"
    if isinstance(error, NotRecordedError):
        came, places = "not recorded", tuple(one.place for one in targets)
    elif isinstance(error, TargetInUseError):
        came = "in use"
    elif isinstance(error, NotFoundError) and not _exists(uri):
        came = "vanished"
    return WorkOutcome(work.route, uri, came, places, error=error)


def settled(whole: WorkOutcome, alone: Sequence[WorkOutcome]) -> list[WorkOutcome]:
    """What came of the targets of a work, tried alone after the whole of it failed.

    Where something was committed before the source vanished, the error of the whole still counts.

    Args:
        whole: what came of the work.
        alone: what came of each target.
    """
    rest = [one for one in alone if one.came not in ("vanished", "in use")]
    was_committed = whole.came == "not recorded" or (whole.error is not None and whole.error.committed)
    return [*rest, whole] if was_committed and len(rest) < len(alone) else list(alone)


def made_notes(
    route: str, source: str, where: Whereabouts, targets: Iterable[RouteTarget], score: float | None
) -> list[dict[str, Any]]:
    """What the ledger is told of targets that are made: which route wanted them, and by which request.

    It is told last of all: what has no such note is taken up again by the next night.

    Args:
        route: its name.
        source: URI of the checkpoint that they were made of.
        where: its run and step.
        targets: what was made.
        score: the metric that the route chooses or keeps by; None where it has none or it is not known.
    """
    return [
        {
            "about": PRODUCT, "route": route, "request": one.request, "target": one.place, "committed": one.committed,
            "source": source, "run": where.run, "step": where.step, "format": find_format(one.rule.format).name,
            "score": score,
        }
        for one in targets
    ]  # fmt: skip


def notes_of(work: Work, targets: Iterable[RouteTarget]) -> list[dict[str, Any]]:
    """The notes of a night's work."""
    source = work.source
    return made_notes(work.route, source.found.uri, source.where, targets, source.score)


def failed_notes(work: Work, targets: Iterable[RouteTarget], error: WherryError) -> list[dict[str, Any]]:
    """What the ledger is told of a failure that the same files will meet again, whatever is done to the machine."""
    if error.retryable or isinstance(error, _PASSING):
        return []
    body = {
        "about": FAILURE, "route": work.route, "source": work.source.found.uri,
        "fingerprint": work.source.fingerprint, "requests": [one.request for one in targets],
        "error": error.what, "wherry": __version__,
    }  # fmt: skip
    return [body]


def note(bodies: Iterable[dict[str, Any]]) -> None:
    """Append notes to the ledger.

    Raises:
        StorageError: the ledger cannot be written.
    """
    from wherry.ledger.record import open_ledger, record_event

    every = list(bodies)
    if not every:
        return  # a ledger that cannot be used is no fault of what has nothing to say
    with open_ledger() as ledger:
        for body in every:
            record_event(ledger, "note", None, body)


def note_made(bodies: Sequence[dict[str, Any]]) -> None:
    """Append the notes of `made_notes`, once everything else is done.

    Raises:
        NotRecordedError: the ledger cannot be written.
    """
    try:
        note(bodies)
    except WherryError as error:
        uris = [str(body["target"]) for body in bodies]
        raise not_recorded(error, uris, cure="run the night again, which goes on from here") from error


def _exists(uri: str) -> bool:
    return locate(uri).exists()
