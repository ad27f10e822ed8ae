"""night: one unattended run over the routes, whoever runs it: what is to do, what came of it, and the report.

    plan_night → for each work: convert, verify, register, `note` what came of it → report

The order of a night is that of the routes. A checkpoint that fails or vanishes is a row of the report and stops
nothing. Two nights over one route exclude each other by a lease in the home; the second one skips.
"""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from wherry.errors import (
    DamagedError,
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
from wherry.ledger.recording import not_recorded
from wherry.ledger.replay import FAILURE, PRODUCT
from wherry.routes.reconcile import Todo, Work, estimate, hours, todo
from wherry.routes.survey import Passed, survey
from wherry.runtime.child import NoAnswerError
from wherry.staging.lease import Lease
from wherry.storage.home import ensure_home
from wherry.storage.stores import is_live, locate
from wherry.version import __version__

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping, Sequence

    from wherry.config.schema import Route
    from wherry.routes.routes import Wanted, Whereabouts

# What the source is not to blame for: a full disk, missing rights, a missing extra or the limits of a child process
# are mended elsewhere.
_PASSING = (NotFoundError, TargetInUseError, StorageError, MissingExtraError, NotRecordedError, NoAnswerError)
_log = logging.getLogger(__name__)
Came = Literal["converted", "not recorded", "failed", "vanished", "in use"]
ALONE: tuple[Came, ...] = ("not recorded", "failed")  # after these each target of a work is tried by itself


@dataclass(frozen=True, slots=True)
class Plan:
    """What one route does tonight.

    Attributes:
        route: the route.
        todo: the difference.
        hours: how long all that waits would take.
        estimate: why nothing is converted tonight; None where it is.
        error: why the root could not be looked at, as JSON of an error; None where it could.
    """

    route: Route
    todo: Todo
    hours: float
    estimate: str | None = None
    error: dict[str, Any] | None = None

    @property
    def works(self) -> tuple[Work, ...]:
        """What is converted tonight."""
        return () if self.estimate else self.todo.works

    def to_json(self) -> dict[str, Any]:
        """As a dry run prints it."""
        return {
            "route": self.route.name, "count": self.todo.count, "bytes": self.todo.nbytes,
            "hours": round(self.hours, 3), "tonight": len(self.works), "estimate": self.estimate, "error": self.error,
            "works": [work.to_json() for work in self.todo.works],
            "passed": [one.to_json() for one in self.todo.passed],
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one work.

    Attributes:
        route: its name.
        source: URI of the checkpoint.
        came: in one word.
        targets: URIs of what was made.
        nbytes: bytes written.
        error: JSON form of the error; None where there was none.
    """

    route: str
    source: str
    came: Came
    targets: tuple[str, ...] = ()
    nbytes: int = 0
    error: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields by name."""
        return {
            "route": self.route, "source": self.source, "came": self.came, "targets": list(self.targets),
            "bytes": self.nbytes, "error": self.error,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Report:
    """What a night did.

    Attributes:
        plans: for each route.
        outcomes: for each work.
        skipped: routes that another night works on.
    """

    plans: tuple[Plan, ...]
    outcomes: tuple[Outcome, ...] = ()
    skipped: tuple[str, ...] = ()
    counts: Mapping[str, int] = field(init=False)

    def __post_init__(self) -> None:
        """Count once."""
        counts = Counter[str](outcome.came for outcome in self.outcomes)
        counts.update(one.why for plan in self.plans for one in plan.todo.passed)
        counts["failed"] += sum(plan.error is not None for plan in self.plans)
        object.__setattr__(
            self, "counts", {name: number for name, number in sorted(counts.items()) if number}
        )

    @property
    def failures(self) -> list[dict[str, Any]]:
        """Errors of this night, in order; what is known to fail and was not tried is none."""
        found = [plan.error for plan in self.plans if plan.error is not None]
        return found + self._errors("failed")

    @property
    def unrecorded(self) -> list[dict[str, Any]]:
        """Errors of what was converted, but not recorded or not registered."""
        return self._errors("not recorded")

    def _errors(self, came: Came) -> list[dict[str, Any]]:
        return [
            {**one.error, "uri": one.error["uri"] or one.source}
            for one in self.outcomes
            if one.came == came and one.error is not None
        ]

    @property
    def left_to_another(self) -> bool:
        """Whether this night did nothing because another one is at work."""
        return bool(self.skipped) and not self.plans

    def to_json(self) -> dict[str, Any]:
        """As the flow returns it."""
        return {
            "schema": 1, "counts": dict(self.counts), "skipped": list(self.skipped),
            "plans": [plan.to_json() for plan in self.plans],
            "outcomes": [outcome.to_json() for outcome in self.outcomes],
        }  # fmt: skip


def plan_night(routes: Iterable[Route], *, retry_failed: bool = False, go: bool = False) -> tuple[Plan, ...]:
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
    plans: list[Plan] = []
    for route in routes:
        passed: list[Passed] = []
        try:
            found = survey(route, products=products, on_pass=passed.append)
            rest = todo(route, found, facts, exists=_exists, retry_failed=retry_failed)
        except Exception as error:  # noqa: BLE001  a root or target store that is out of reach stops no other route
            empty = Todo(route.name, (), tuple(passed), (), first=False)
            plans.append(Plan(route, empty, 0.0, error=as_ours(error, route.root).to_json()))
            continue
        full = Todo(rest.route, rest.works, (*passed, *rest.passed), rest.waiting, rest.first)
        plans.append(
            Plan(route, full, hours(full, facts, route), None if go else estimate(full, facts, route))
        )
    return tuple(plans)


@contextmanager
def holding(route: Route) -> Generator[bool]:
    """Exclude other nights over a route; False where one is at work."""
    lease = Lease(ensure_home() / f"night-{route.name}.lease", f"route {route.name}")
    try:
        lease.__enter__()
    except TargetInUseError:
        yield False
        return
    try:
        yield True
    finally:
        lease.__exit__(None, None, None)


def as_ours(error: BaseException, uri: str) -> WherryError:
    """Any error as one of ours: storage libraries raise their own, and a bug must cost one checkpoint, not a night."""
    ours = wherry_error(error, uri=uri, cure="look at the log of the run")
    if isinstance(ours, InternalError):
        ours.retryable = True
    return ours


def came_of(work: Work, targets: Iterable[Wanted], error: WherryError) -> Outcome:
    """What an error of a work means: not recorded, vanished, in use by another run, or failed."""
    uri, places = work.source.found.uri, tuple[str, ...]()
    came: Came = "failed"
    if isinstance(error, NotRecordedError):
        came, places = "not recorded", tuple(one.place for one in targets)
    elif isinstance(error, TargetInUseError):
        came = "in use"
    elif isinstance(error, NotFoundError) and not _exists(uri):
        came = "vanished"
    return Outcome(work.route, uri, came, places, error=error.to_json())


def settled(whole: Outcome, error: WherryError, alone: Sequence[Outcome]) -> list[Outcome]:
    """What came of the targets of a work, tried alone after the whole of it failed.

    Where something was committed before the source vanished, the error of the whole still counts.

    Args:
        whole: what came of the work.
        error: its error.
        alone: what came of each target.
    """
    rest = [one for one in alone if one.came not in ("vanished", "in use")]
    was_committed = whole.came == "not recorded" or error.committed
    return [*rest, whole] if was_committed and len(rest) < len(alone) else list(alone)


def made_notes(
    route: str, source: str, where: Whereabouts, targets: Iterable[Wanted], score: float | None
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


def notes_of(work: Work, targets: Iterable[Wanted]) -> list[dict[str, Any]]:
    """The notes of a night's work."""
    source = work.source
    return made_notes(work.route, source.found.uri, source.where, targets, source.score)


def failed_notes(work: Work, targets: Iterable[Wanted], error: WherryError) -> list[dict[str, Any]]:
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


def note_failed(work: Work, targets: Iterable[Wanted], error: WherryError) -> None:
    """Append the notes of `failed_notes`; where the ledger cannot be written the next night tries the work again."""
    try:
        note(failed_notes(work, targets, error))
    except WherryError as refusal:
        _log.warning("the failure of %s was not noted: %s", work.source.found.uri, refusal)


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


def failure(report: Report) -> WherryError | None:
    """The error that the whole night ends with, of the kind of the first one; None where all is done and recorded.

    What failed counts before what was only not recorded.
    """
    found, word = report.failures, "failed"
    if not found:
        found, word = report.unrecorded, "not recorded"
    if not found:
        return None
    first = found[0]
    known_kinds = {
        kind.__name__: kind for kind in (*WherryError.__subclasses__(), *DamagedError.__subclasses__())
    }
    kind = known_kinds.get(str(first["error"]), WherryError)
    tried = len(report.outcomes)
    what = f"{len(found)} of {max(tried, len(found))} {word}; the first: {first['what']}"
    return kind(what, uri=first["uri"], path=first["path"], cure=first["cure"], stage=first["stage"])


def _exists(uri: str) -> bool:
    return locate(uri).exists()
