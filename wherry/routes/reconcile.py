"""reconcile: what is still to be made, as the difference between what lies there and what the ledger has.

A lost event costs a day and not a checkpoint, because this looks at the storage. A source counts as converted where
the ledger has a conversion of it, with the same files as now, to the place that the route names. What is not done
again, and why, is told with the same care as what is:

    done       it is made and there            stale      the source or the route changed since, and the target is there
    pruned     it was made and then removed    failed     it failed before with the same files, request and wherry
    blocked    the route cannot name a target  waiting    it is over the limits of one night
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wherry.core.units import parse_size
from wherry.errors import WherryError
from wherry.routes.routes import RouteTarget, wanted
from wherry.routes.survey import Candidate, Omission
from wherry.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from wherry.config.schema import Route
    from wherry.ledger.replay import LedgerState

_RATE = 200_000_000  # bytes a second, where the ledger has none


@dataclass(frozen=True, slots=True)
class Work:
    """One checkpoint and what is to be made of it, in one read.

    Attributes:
        route: name of the route.
        source: the checkpoint.
        targets: what is to be made.
        nbytes: of the source's files.
        reasons: for each target, why: `new` or `its target is gone`.
    """

    route: str
    source: Candidate
    targets: tuple[RouteTarget, ...]
    nbytes: int
    reasons: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As `wherry nightly --dry-run --json` prints it."""
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
    """What one route has to do now.

    Attributes:
        route: its name.
        works: what fits into this night, in the order in which it is done.
        passed: everything else, with the reason.
        waiting: what is over the limits.
        first: whether the route has never made anything.
    """

    route: str
    works: tuple[Work, ...]
    passed: tuple[Omission, ...]
    waiting: tuple[Work, ...]
    first: bool

    @property
    def nbytes(self) -> int:
        """Bytes of all sources that wait, those over the limits included."""
        return sum(work.nbytes for work in (*self.works, *self.waiting))

    @property
    def count(self) -> int:
        """Checkpoints that wait, those over the limits included."""
        return len(self.works) + len(self.waiting)


def todo(
    route: Route,
    candidates: Iterable[Candidate],
    known: LedgerState,
    *,
    exists: Callable[[str], bool],
    retry_failed: bool = False,
) -> Todo:
    """Subtract what is known from what lies there.

    Args:
        route: what is asked for.
        candidates: from `survey`, in the order in which they shall be done.
        known: from the ledger.
        exists: whether anything lies at a URI.
        retry_failed: try again what failed for good with the same files.
    """
    passed: list[Omission] = []
    works: list[Work] = []
    for candidate in candidates:
        try:
            targets = wanted(route, candidate.found, candidate.where)
        except WherryError as error:
            passed.append(Omission(candidate.found.uri, "blocked", f"{error.what}; {error.cure}"))
            continue
        work = _work(route, candidate, targets, known, exists, passed, retry_failed=retry_failed)
        works += [work] if work is not None else []
    taken, waiting = _within_limits(route, works)
    passed += [Omission(work.source.found.uri, "waiting", "over the limits of one night") for work in waiting]
    return Todo(
        route.name,
        taken,
        tuple(passed),
        waiting,
        first=all(name != route.name for name, _target in known.products),
    )


def hours(todo: Todo, known: LedgerState, route: Route) -> float:
    """How long all that waits would take, from the rate of past conversions, with the route's concurrency."""
    return todo.nbytes / ((known.rate or _RATE) * route.concurrency) / 3600


def estimate(todo: Todo, known: LedgerState, route: Route) -> str | None:
    """Why a first night only estimates; None where it may convert."""
    if not todo.first or route.first_night == "convert" or todo.count <= route.first_night_items:
        return None
    return (
        f"{todo.count} checkpoints wait and this route has never converted one: nothing was converted; about "
        f'{hours(todo, known, route):.1f} h. State first_night = "convert" in the route, or limit it with max_items'
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
    )  # what an older wherry could not do is tried again
    failures = {} if retry_failed else known.failures.get(key, {})
    for one in targets:
        why, reason = _standing(candidate, one, known, exists)
        if why == "new" and one.request in failures:
            why, reason = "failed", f"it failed before, and nothing has changed: {failures[one.request]}"
        if why == "new":
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
    """Where one target stands, and the reason in words."""
    rows = known.by_source.get(candidate.found.uri, {}).get(candidate.fingerprint, [])
    done = next((row for row in reversed(rows) if row.target_uri == one.place), None)
    there = exists(one.place)
    if done is not None and there:
        request = known.requests.get(one.place)
        if request is None:  # the note is the last thing that a night writes of a target
            return "new", "made, but what follows the commit (verification, registration) did not end"
        changed = "the route states something else than when it was made; remove it, or give it another place"
        return ("done", "made") if request == one.request else ("stale", changed)
    if done is not None and done.gone is not None:
        return "pruned", f"made, and removed at {done.gone}"
    if done is not None:
        return "new", "its target is gone"
    before = known.by_target.get(one.place)
    if there and before is not None and before.source_uri == candidate.found.uri:
        return "stale", "the source changed since it was made; remove it, or give it another place"
    return "new", "new"


def _within_limits(route: Route, works: list[Work]) -> tuple[tuple[Work, ...], tuple[Work, ...]]:
    """As many as one night may take; a checkpoint that is larger than the limit has a night of its own."""
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
