"""reconcile: the missing targets of a route, as the difference between storage and ledger.

Because this looks at the storage, a lost event delays a conversion until the next night and loses none. A source counts
as converted where the ledger has a conversion of its current files to the target of the route. What is left out is
reported with the reason:

    done       the target exists              stale      the source or the route changed since, and the target exists
    pruned     it was made and then removed   failed     it failed before with the same files, request and wherry
    blocked    the route cannot name a target waiting    it exceeds the limits of one night
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from wherry import errors
from wherry.config.schema import Route
from wherry.core.lazy_dataclass import dataclass
from wherry.core.units import parse_size, plural
from wherry.cures import Argument, Cure
from wherry.errors import WherryError
from wherry.nightly.routes import RouteTarget, wanted_targets
from wherry.nightly.survey import Candidate, Omission
from wherry.version import __version__

if TYPE_CHECKING:
    from wherry.ledger.replay import LedgerState

_RATE = 200_000_000  # bytes per second, where the ledger has no conversions to measure


@dataclass(frozen=True, slots=True)
class Work:
    """One checkpoint and its missing targets, which are made in one read.

    Attributes:
        route: name of the route.
        source: the checkpoint.
        targets: the targets to make.
        nbytes: bytes of the source's files.
        reasons: for each target, why it is made.
    """

    route: str
    source: Candidate
    targets: tuple[RouteTarget, ...]
    nbytes: int
    reasons: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The JSON form, which `wherry nightly --dry-run --json` prints."""
        return {
            "route": self.route, "source": self.source.found.uri, "format": self.source.found.format,
            "run": self.source.where.run, "step": self.source.where.step, "bytes": self.nbytes,
            "targets": [
                {**one.to_json(), "reason": reason}
                for one, reason in zip(self.targets, self.reasons, strict=True)
            ],
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Todo:
    """The work of one route.

    Attributes:
        route: its name.
        works: the works of this night, in order.
        passed: checkpoints and targets that are left out, with the reason.
        waiting: works that exceed the limits of one night.
        first: whether the route has never made a target.
    """

    route: str
    works: tuple[Work, ...]
    passed: tuple[Omission, ...]
    waiting: tuple[Work, ...]
    first: bool

    @property
    def nbytes(self) -> int:
        """Bytes of all sources, including those over the limits."""
        return sum(work.nbytes for work in (*self.works, *self.waiting))

    @property
    def count(self) -> int:
        """Number of checkpoints, including those over the limits."""
        return len(self.works) + len(self.waiting)


def todo(
    route: Route,
    candidates: Iterable[Candidate],
    known: LedgerState,
    *,
    exists: Callable[[str], bool],
    retry_failed: bool = False,
) -> Todo:
    """The missing targets of the candidates.

    Args:
        route: the route.
        candidates: from `survey`, in the order of processing.
        known: the ledger state.
        exists: whether a URI exists.
        retry_failed: retry targets that failed, although the files are unchanged.
    """
    passed: list[Omission] = []
    works: list[Work] = []
    for candidate in candidates:
        try:
            targets = wanted_targets(route, candidate.found, candidate.where)
        except WherryError as error:
            passed.append(Omission(candidate.found.uri, "blocked", f"{error.what}; {error.cure}", error))
            continue
        work = _work(route, candidate, targets, known, exists, passed, retry_failed=retry_failed)
        works += [work] if work is not None else []
    taken, waiting = _within_limits(route, works)
    passed += [
        Omission(work.source.found.uri, "waiting", "exceeds the limits of one nightly run")
        for work in waiting
    ]
    return Todo(
        route.name,
        taken,
        tuple(passed),
        waiting,
        first=all(name != route.name for name, _target in known.products),
    )


def hours(todo: Todo, known: LedgerState, route: Route) -> float:
    """Estimated hours for all works, by the rate of past conversions and the route's concurrency."""
    return todo.nbytes / ((known.rate or _RATE) * route.concurrency) / 3600


def estimate(todo: Todo, known: LedgerState, route: Route) -> str | None:
    """Why the first night of a route converts nothing; None where it may convert."""
    if not todo.first or route.first_night == "convert" or todo.count <= route.first_night_items:
        return None
    return (
        f"{plural(todo.count, 'checkpoint', 'is/are')} waiting, about {hours(todo, known, route):.1f} h, and this "
        'route has not converted any yet: nothing was converted. Set first_night = "convert" in the route, or limit '
        "it with max_items"
    )


def _work(
    route: Route, candidate: Candidate, targets: tuple[RouteTarget, ...], known: LedgerState,
    exists: Callable[[str], bool], passed: list[Omission], *, retry_failed: bool,
) -> Work | None:  # fmt: skip
    open_: list[tuple[RouteTarget, str]] = []
    key = (
        candidate.found.uri,
        candidate.fingerprint,
        __version__,
    )  # failures of another version of wherry are retried
    failures = {} if retry_failed else known.failures.get(key, {})
    for one in targets:
        why, reason = _standing(candidate, one, known, exists)
        if why == "new" and one.request in failures:
            noted = failures[one.request]
            what = f"it failed before with the same files and options: {noted.what}"
            found = getattr(errors, noted.kind, None)
            kind = found if isinstance(found, type) and issubclass(found, WherryError) else WherryError
            cure = Cure(
                "remove the cause and add {}; a source that has changed is tried again by itself",
                Argument("retry-failed"),
            )
            error = kind(what, uri=one.place, cure=cure)  # of the class of the first night's error
            passed.append(Omission(candidate.found.uri, "failed", f"{one.place}: {what}", error))
        elif why == "new":
            open_.append((one, reason))
        else:
            passed.append(Omission(candidate.found.uri, why, f"{one.place}: {reason}"))
    if not open_:
        return None
    chosen, reasons = zip(*open_, strict=True)
    return Work(route.name, candidate, chosen, candidate.nbytes, reasons)


def _standing(
    candidate: Candidate, one: RouteTarget, known: LedgerState, exists: Callable[[str], bool]
) -> tuple[str, str]:
    """The state of one target, and the reason."""
    rows = known.by_source.get(candidate.found.uri, {}).get(candidate.fingerprint, [])
    done = next((row for row in reversed(rows) if row.target_uri == one.place), None)
    there = exists(one.place)
    if done is not None and there:
        request = known.requests.get(one.place)
        if request is None:  # the note is the last record that a night writes about a target
            return "new", "committed, but verification or registration did not finish"
        changed = "the route has changed since the conversion; remove the target, or choose another one"
        return ("done", "made") if request == one.request else ("stale", changed)
    if done is not None and done.gone is not None:
        return "pruned", f"removed at {done.gone}"
    if done is not None:
        return "new", "its target no longer exists"
    before = known.by_target.get(one.place)
    if there and before is not None and before.source_uri == candidate.found.uri:
        return (
            "stale",
            "the source has changed since the conversion; remove the target, or choose another one",
        )
    return "new", "new"


def _within_limits(route: Route, works: list[Work]) -> tuple[tuple[Work, ...], tuple[Work, ...]]:
    """Split the works by the limits of one night; a checkpoint larger than the limit gets a night alone."""
    most = parse_size(route.max_bytes) if route.max_bytes is not None else None
    taken: list[Work] = []
    total = 0
    for work in works:
        full = route.max_items is not None and len(taken) >= route.max_items
        if full or (most is not None and taken and total + work.nbytes > most):
            break
        taken.append(work)
        total += work.nbytes
    return tuple(taken), tuple(works[len(taken) :])
