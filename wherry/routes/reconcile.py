"""reconcile: what is still to be made, as the difference between what lies there and what the ledger has.

A lost event costs a day and not a checkpoint, because this looks at the storage. A source counts as converted where
the ledger has a conversion of it, with the same files as now, to the place that the route names. What is not done
again, and why, is told with the same care as what is:

    done       it is made and there            stale      the source or the route changed since, and the target is there
    pruned     it was made and then removed    failed     it failed before with the same files, request and wherry
    blocked    the route cannot name a target  waiting    it is over the limits of one night
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wherry.core.units import parse_size
from wherry.errors import WherryError
from wherry.routes.routes import Wanted, wanted
from wherry.routes.survey import Candidate, Passed
from wherry.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from wherry.config.schema import Route
    from wherry.ledger.nodes import ConvertedTarget
    from wherry.ledger.record import Ledger

MADE = "route"  # what a note says that tells of a target of a route
FAILED = "failure"  # and one that tells of a failure which trying again cannot cure
_SAMPLE = 200  # conversions from which the rate of a night is estimated
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
    targets: tuple[Wanted, ...]
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
class Known:
    """What the ledger says, for a whole night.

    Attributes:
        converted: (source URI, fingerprint) → conversions of it.
        at: target URI → its last conversion.
        requests: target URI → the request by which a route had it made.
        failed: (source URI, fingerprint) → requests that failed for good, with the error.
        rate: bytes a second of past conversions; None where there are none.
        routes: names of routes that have made something.
    """

    converted: Mapping[tuple[str, str], list[ConvertedTarget]] = field(
        default_factory=dict[tuple[str, str], "list[ConvertedTarget]"]
    )
    at: Mapping[str, ConvertedTarget] = field(default_factory=dict[str, "ConvertedTarget"])
    requests: Mapping[str, str] = field(default_factory=dict[str, str])
    failed: Mapping[tuple[str, str], Mapping[str, str]] = field(
        default_factory=dict[tuple[str, str], "Mapping[str, str]"]
    )
    rate: float | None = None
    routes: frozenset[str] = frozenset()


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
    passed: tuple[Passed, ...]
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


def known(ledger: Ledger) -> Known:
    """Read what the ledger says of conversions, routes and failures."""
    from wherry.ledger.nodes import converted_sources, last_conversions

    requests: dict[str, str] = {}
    failed: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    routes: set[str] = set()
    for body in _notes(ledger):
        if body.get("about") == MADE:
            requests[body["target"]] = body["request"]
            routes.add(body["route"])
        elif body.get("about") == FAILED and body["wherry"] == __version__:
            failed[body["source"], body["fingerprint"]] |= dict.fromkeys(body["requests"], body["error"])
    return Known(
        converted_sources(ledger),
        last_conversions(ledger),
        requests,
        dict(failed),
        _rate(ledger),
        frozenset(routes),
    )


def todo(
    route: Route,
    candidates: Iterable[Candidate],
    known: Known,
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
    passed: list[Passed] = []
    works: list[Work] = []
    for candidate in candidates:
        try:
            targets = wanted(route, candidate.found, candidate.where)
        except WherryError as error:
            passed.append(Passed(candidate.found.uri, "blocked", f"{error.what}; {error.cure}"))
            continue
        work = _work(route, candidate, targets, known, exists, passed, retry_failed=retry_failed)
        works += [work] if work is not None else []
    taken, waiting = _within_limits(route, works)
    passed += [Passed(work.source.found.uri, "waiting", "over the limits of one night") for work in waiting]
    return Todo(route.name, taken, tuple(passed), waiting, first=route.name not in known.routes)


def hours(todo: Todo, known: Known, route: Route) -> float:
    """How long all that waits would take, from the rate of past conversions, with the route's concurrency."""
    return todo.nbytes / ((known.rate or _RATE) * route.concurrency) / 3600


def estimate(todo: Todo, known: Known, route: Route) -> str | None:
    """Why a first night only estimates; None where it may convert."""
    if not todo.first or route.first_night == "convert" or todo.count <= route.first_night_items:
        return None
    return (
        f"{todo.count} checkpoints wait and this route has never converted one: nothing was converted; about "
        f'{hours(todo, known, route):.1f} h. State first_night = "convert" in the route, or limit it with max_items'
    )


def _work(
    route: Route, candidate: Candidate, targets: tuple[Wanted, ...], known: Known,
    exists: Callable[[str], bool], passed: list[Passed], *, retry_failed: bool,
) -> Work | None:  # fmt: skip
    open_: list[tuple[Wanted, str]] = []
    failures = {} if retry_failed else known.failed.get((candidate.found.uri, candidate.fingerprint), {})
    for one in targets:
        why, reason = _standing(candidate, one, known, exists)
        if why == "new" and one.request in failures:
            why, reason = "failed", f"it failed before, and nothing has changed: {failures[one.request]}"
        if why == "new":
            open_.append((one, reason))
        else:
            passed.append(Passed(candidate.found.uri, why, f"{one.place}: {reason}"))
    if not open_:
        return None
    chosen, reasons = zip(*open_, strict=True)
    return Work(route.name, candidate, chosen, candidate.nbytes, reasons)


def _standing(
    candidate: Candidate, one: Wanted, known: Known, exists: Callable[[str], bool]
) -> tuple[str, str]:
    """Where one target stands, and the reason in words."""
    rows = known.converted.get((candidate.found.uri, candidate.fingerprint), [])
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
    before = known.at.get(one.place)
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


def _notes(ledger: Ledger) -> Iterable[dict[str, Any]]:
    from wherry.ledger.statements import statements

    return (one.body for one in statements(ledger, kinds={"note"}))


def _rate(ledger: Ledger) -> float | None:
    """Bytes a second of the last conversions, as one works after the other."""
    from wherry.ledger.statements import head, statements

    after = max(head(ledger).seq - _SAMPLE, 0)
    rows = [one.body for one in statements(ledger, after=after, kinds={"conversion"})]
    seconds = sum(row["seconds"] for row in rows)
    return sum(row["bytes_read"] for row in rows) / seconds if seconds > 0 else None
