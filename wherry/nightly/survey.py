"""survey: the checkpoints below a route's root that the route selects, each opened once for its size and fingerprint.

Omissions are reported with the reason: other runs and formats, steps that are not selected, products of wherry, damaged
or unfinished checkpoints, and those that vanished between being found and being opened.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Literal

from wherry.config.schema import Route
from wherry.core.detection import Detection
from wherry.core.lazy_dataclass import dataclass
from wherry.core.progress import logger
from wherry.errors import MissingExtraError, NotFoundError, StorageError, WherryError
from wherry.formats.checkpoint import open_source, present_fingerprint
from wherry.formats.detect import examine
from wherry.formats.discover import NEWER_STEP, SkippedPath, walk
from wherry.nightly.routes import Whereabouts, foreign_reason, refusal, whereabouts
from wherry.nightly.scores import known_score, score
from wherry.store.local_store import is_live
from wherry.store.location import Location, modified_time
from wherry.store.sidecar import read_sidecar

Why = Literal["not taken", "not settled", "ours", "damaged", "unreadable", "vanished", "no score"]
# Errors that say nothing about the checkpoint: it is not known whether the route selects it.
_UNKNOWN = (StorageError, MissingExtraError)
DAMAGED: Why = "damaged"
UNCONVERTED = (
    DAMAGED,
    "unreadable",
    "blocked",
    "failed",
)  # reasons for which a route cannot convert what it selects
_NANOSECONDS = 1_000_000_000
_log = logger(__name__)


@dataclass(frozen=True, slots=True)
class Omission:
    """A checkpoint below the root that is not converted now, and why.

    Attributes:
        uri: the checkpoint, or a folder about which nothing is known.
        why: the kind of reason.
        reason: the reason, as text.
        error: why the night has failed as long as this stands; None if nothing is wrong with the night.
        excluded: whether the route's `runs` or `formats` leave it out.
    """

    uri: str
    why: str
    reason: str
    error: WherryError | None = None
    excluded: bool = False

    def to_json(self) -> dict[str, str]:
        """The fields by name."""
        return {"uri": self.uri, "why": self.why, "reason": self.reason}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint that the route selects.

    Attributes:
        found: its detection, examined.
        where: its run, step and name.
        fingerprint: current fingerprint of its files.
        nbytes: bytes of its files.
        score: the metric by which the route selects or keeps checkpoints, if any.
        newest: whether it is the newest candidate of its run: only that one gets the alias, even if an older one is
            registered later.
    """

    found: Detection
    where: Whereabouts
    fingerprint: str
    nbytes: int
    score: float | None = None
    newest: bool = False


def survey(
    route: Route, *, products: Collection[str] = (), on_pass: Callable[[Omission], None] | None = None
) -> list[Candidate]:
    """The checkpoints below a route's root that it selects, newest step first in each run.

    Args:
        route: the route.
        products: URIs of checkpoints that wherry converted from others; they are never sources of a route.
        on_pass: called for each omission.

    Raises:
        NotFoundError: the root does not exist.
        StorageError: the storage failed.
    """
    tell = on_pass or _ignore
    placed = list(_place(route, products, tell))
    # Newest first; one without a step counts as the end of its run.
    placed.sort(key=lambda pair: (pair[1].run, pair[1].step is None, -(pair[1].step or 0), pair[1].name))
    found: list[Candidate] = []
    for _run, group in groupby(placed, key=lambda pair: (pair[1].run, pair[1].step is None)):
        for chosen in _of_run(route, list(group), tell):
            one = _candidate(route, *chosen, tell)
            if one is not None:
                found.append(one)
    last: dict[str, tuple[bool, int]] = {}
    for one in found:
        last[one.where.run] = max(_late(one), last.get(one.where.run, (False, -1)))
    return [replace(one, newest=_late(one) == last[one.where.run]) for one in found]


def _late(one: Candidate) -> tuple[bool, int]:
    return one.where.step is None, one.where.step or 0


Placed = tuple["Detection", Whereabouts, "float | None"]


def _place(
    route: Route, products: Collection[str], tell: Callable[[Omission], None]
) -> Iterator[tuple[Detection, Whereabouts]]:
    def skip(one: SkippedPath) -> None:
        if one.error is not None:
            tell(_unusable(one.uri, one.error))
            return
        if one.damaged:
            tell(Omission(one.uri, DAMAGED, one.reason))
            return
        tell(Omission(one.uri, "not taken" if one.reason == NEWER_STEP else "not settled", one.reason))

    latest = route.selection.choice == "latest"
    for found in walk(route.place(route.root), skip, route.min_age, newest=latest):
        where = whereabouts(route.root, found)
        assert where is not None  # discover looks below the root only
        reason, excluded = refusal(route, found, where), foreign_reason(route, found, where) is not None
        if reason is not None and not excluded:
            tell(Omission(found.uri, "not taken", reason))
            continue
        try:
            product = found.uri in products or _is_product(route.place(found.uri))
        except WherryError as error:
            tell(_unusable(found.uri, error))
            continue
        if product:
            tell(Omission(found.uri, "ours", "wherry converted it from another checkpoint"))
        elif reason is not None:
            tell(Omission(found.uri, "not taken", reason, excluded=True))
        else:
            yield found, where


def _is_product(place: Location) -> bool:
    """Whether a checkpoint was converted from another one; a checkpoint that training exported is a source."""
    sidecar = read_sidecar(place)
    receipt = None if sidecar is None else sidecar.receipt
    return receipt is not None and not is_live(receipt.source.uri)


def _of_run(
    route: Route, rows: list[tuple[Detection, Whereabouts]], tell: Callable[[Omission], None]
) -> Iterator[Placed]:
    chosen = route.selection
    if chosen.choice == "best":
        yield from _best(route, rows, tell)
        return
    newest = rows[0][1].step
    for found, where in rows:
        if chosen.choice == "latest" and where.step != newest:
            tell(Omission(found.uri, "not taken", "this run has a newer step"))
        else:
            yield found, where, None


def _best(
    route: Route, rows: list[tuple[Detection, Whereabouts]], tell: Callable[[Omission], None]
) -> Iterator[Placed]:
    chosen = route.selection
    scored: list[tuple[float, Detection, Whereabouts]] = []
    for found, where in rows:
        try:
            value = score(route.place(found.uri), chosen.metric)
        except WherryError as error:
            omission = _unusable(found.uri, error)
            tell(omission if omission.error else Omission(found.uri, "no score", error.what))
            continue
        if value is None:
            tell(Omission(found.uri, "no score", f"no file next to it states {chosen.metric}"))
            continue
        verdict = examine(route.place(found.uri), found)
        if verdict.verdict == "ok":
            scored.append((value, found, where))
        else:
            tell(Omission(found.uri, DAMAGED, verdict.reason or verdict.verdict))
    pick = max if chosen.highest else min
    best = pick((value for value, _found, _where in scored), default=None)
    top = max((where.step or 0 for value, _found, where in scored if value == best), default=0)
    for value, found, where in scored:
        if value == best and (where.step or 0) == top:
            yield found, where, value
        else:
            tell(
                Omission(
                    found.uri, "not taken", f"{chosen.metric} is {value:g}; the best of its run is {best:g}"
                )
            )


def _candidate(
    route: Route, found: Detection, where: Whereabouts, value: float | None, tell: Callable[[Omission], None]
) -> Candidate | None:
    place = route.place(found.uri)
    try:
        verdict = examine(place, found)
        if verdict.verdict != "ok":
            tell(Omission(found.uri, DAMAGED, verdict.reason or verdict.verdict))
            return None
        with open_source(route.source(found)) as opened:
            members = list(opened.reader.members())
            mark = present_fingerprint(opened)
        since = route.selection.since
        written = modified_time(place, members) if since is not None else None
    except NotFoundError:
        tell(Omission(found.uri, "vanished", "it was removed during the survey"))
        return None
    except WherryError as error:
        tell(_unusable(found.uri, error))
        return None
    if since is not None and written is not None and written < since:
        tell(Omission(found.uri, "not taken", f"it was written before {since.isoformat()}"))
        return None
    metric = route.retention.metric
    value = known_score(place, metric, _log) if value is None else value
    return Candidate(verdict, where, mark, sum(max(member.size, 0) for member in members), value)


def _unusable(uri: str, error: WherryError) -> Omission:
    """A checkpoint that cannot be opened: it is damaged, or its storage could not be read."""
    unknown = isinstance(error, _UNKNOWN)
    return Omission(uri, "unreadable" if unknown else DAMAGED, error.what, error if unknown else None)


def _ignore(_passed: Omission) -> None:
    """Ignore an omission."""
