"""stale: find converted checkpoints that differ from what a new conversion would produce.

Only metadata is read. A source is compared by the fingerprint of its files. The conversion is planned again, as its
route states it or else as it was requested, and the digests of the two plans are compared: a plan contains the
structure of the source, the target format, every option and every rule. The files that the request names, which a plan
does not cover, are compared too. What was derived from a stale checkpoint is stale too. Reasons are data; each result
has the command that converts again.

Conversions are grouped by their source: each source is opened once, and a plan is made once for all conversions of a
source with the same request, so that the time grows with the number of sources and requests, not of their products.

A conversion may have been requested by a route whose target is this very URI. Where there is none (the template
changed, or somebody converted by hand below a route's root), by the routes with the deepest root, each with all its
targets of that format.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from wherry.config.roots import root_of
from wherry.config.schema import Route, TargetRule
from wherry.converter.command import (
    UNPLANNED,
    command_line,
    differences,
    planned_again,
    present,
    restore_request,
    stated_options,
)
from wherry.core import threads
from wherry.core.digest import canonical_json
from wherry.core.lazy_dataclass import dataclass
from wherry.core.progress import logger
from wherry.core.request import RewriteRequest, SourceRequest, TargetRequest
from wherry.core.units import DEFAULT_MEMORY, plural
from wherry.errors import HostileError, NotFoundError, WherryError
from wherry.formats.checkpoint import open_source, present_fingerprint
from wherry.formats.registry import find_format
from wherry.nightly.routes import refusal, wanted_targets, whereabouts
from wherry.store.local_store import is_live, locate

if TYPE_CHECKING:
    from wherry.core.detection import Detection
    from wherry.ledger.nodes import LineageNode
    from wherry.ledger.replay import ConversionRecord, PlaceRecord


_Plans = dict[bytes, str | WherryError]  # for one source: request → digest of its plan, or the error
_log = logger(__name__)
SCHEMA = 1
_WORKERS = 8  # sources that are checked in parallel; the work waits for storage
_AT_ONCE = (
    32  # sources in one task of a worker: a task for each costs more than the check of a missing local file
)
# Kinds of reasons.
SOURCE_GONE, SOURCE_CHANGED, SOURCE_UNREADABLE = "source-gone", "source-changed", "source-unreadable"
PLAN_CHANGED, ROUTE_CHANGED, UPSTREAM = "plan-changed", "route-changed", "upstream-stale"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a checkpoint is stale: one of the kinds above, and the details."""

    kind: str
    detail: str


@dataclass(frozen=True, slots=True)
class Stale:
    """A converted checkpoint that is stale.

    Attributes:
        uri: its URI.
        checkpoint_digest: its identity.
        format: its format.
        source_uri: URI of its source.
        reasons: why it is stale.
        cure: the command that converts again, after the present target has been moved away. None where no source is
            known to exist.
    """

    uri: str
    checkpoint_digest: str
    format: str
    source_uri: str
    reasons: tuple[Reason, ...]
    cure: str | None

    def to_json(self) -> dict[str, Any]:
        """One row of `lineage stale --json`."""
        return asdict(self)


def stale(about: str | os.PathLike[str] | None = None, *, config: str | None = None) -> list[Stale]:
    """The checkpoints that a new conversion would produce differently.

    Args:
        about: only this checkpoint and what was derived from it (a URI, a digest or a model URI); all by default.
        config: the configuration; `WHERRY_CONFIG`, or `wherry.toml` in the working folder or the home by default.

    Returns:
        The stale checkpoints, in the order of their conversions.

    Raises:
        NotFoundError, AmbiguousError, StorageError: as `lineage.show`.
        UsageError: the configuration is invalid.
    """
    from wherry.config.config import load_config

    with threads.without_collection():
        rows, nodes = _rows(about)
    routes = load_config(config).routes
    # Those that have the same source, read in the same way.
    by_source = defaultdict[tuple[Any, ...], "list[ConversionRecord]"](list)
    for row in rows:
        recorded = _recorded_request(row)
        read_as = recorded.get("format", nodes[row.source_digest].format)
        how = read_as, *recorded.get("allow_opaque", ()), "as" in recorded
        by_source[row.source_digest, row.source_uri, how].append(row)
    groups = list(by_source.values())
    tasks = [groups[start : start + _AT_ONCE] for start in range(0, len(groups), _AT_ONCE)]

    def look(task: Sequence[Sequence[ConversionRecord]]) -> list[Stale]:
        return [one for rows in task for one in _look(rows, routes, nodes)]

    with threads.executor(_WORKERS) as pool:
        found = {one.uri: one for some in pool.map(look, tasks) for one in some}
    return [one for one in _with_upstream(rows, [found[row.target_uri] for row in rows]) if one.reasons]


def _rows(about: str | os.PathLike[str] | None) -> tuple[list[ConversionRecord], Mapping[str, LineageNode]]:
    """The current conversions, one for each place, and the nodes of their sources."""
    from wherry.ledger.nodes import current_conversions, referenced_nodes
    from wherry.ledger.record import open_ledger

    chosen = None if about is None else _below(about)
    with open_ledger() as ledger:
        # Neither a live training state, nor the checkpoint itself, in place, is a source that can still exist.
        rows = [
            row
            for row in current_conversions(ledger, chosen)
            if not is_live(row.source_uri) and row.source_uri != row.target_uri
        ]
        judged = [row for row in rows if _is_below_a_root(row.source_uri)]
        if len(judged) < len(rows):
            first = next(row.source_uri for row in rows if row not in judged)
            _log.warning(
                "%s not judged: their sources, the first of them %s, are in no folder that a route reads or writes",
                plural(len(rows) - len(judged), "conversion"), first,
            )  # fmt: skip
        return judged, referenced_nodes(ledger, {row.source_digest for row in judged})


def _is_below_a_root(uri: str) -> bool:
    """Whether a place that the ledger states may be opened."""
    try:
        root_of(uri)
    except HostileError:
        return False
    return True


def _below(about: str | os.PathLike[str]) -> set[str]:
    from wherry.ledger.record import descendants, open_ledger
    from wherry.trace.lineage import find_named

    with open_ledger() as ledger:
        root, _sidecar = find_named(ledger, os.fspath(about))
        return {root, *(edge.target for edge in descendants(ledger, root))}


@dataclass(frozen=True, slots=True)
class PresentSource:
    """A source of conversions, as it is now.

    Attributes:
        rules: the rules of routes that apply to it.
        fingerprint: of its files; empty if it could not be read.
        error: why it could not be read; None if it could.
    """

    rules: tuple[RuleForSource, ...] = ()
    fingerprint: str = ""
    error: WherryError | None = None


def _look(
    rows: Sequence[ConversionRecord], routes: Sequence[Route], nodes: Mapping[str, LineageNode]
) -> Iterator[Stale]:
    """Compare the conversions of one source with its present files and with the routes."""
    first, source = rows[0], nodes[rows[0].source_digest]
    found, plans = _present_source(first, source.format, routes), _Plans()
    at: str | None = first.source_uri
    if isinstance(found.error, NotFoundError):  # another place may still have the recorded files
        missing = at if _recorded_request(first).get("format", source.format) == source.format else None
        places = (place for place in source.places if place.uri != missing)
        at = next((place.uri for place in places if _is_same(place, source.format)), None)
    for row in rows:
        rules = rules_for(row.target_uri, row.format, found.rules)
        reasons = tuple(_reasons(row, source.format, found, rules, at, plans))
        cure = _cure(row, at, rules) if at and reasons else None
        yield Stale(row.target_uri, row.target_digest, row.format, row.source_uri, reasons, cure)


def _present_source(row: ConversionRecord, format: str, routes: Sequence[Route]) -> PresentSource:
    recorded, rules = _recorded_request(row), ()
    try:
        with open_source(_source(row, recorded.get("format", format))) as checkpoint:
            rules = () if "as" in recorded else rules_at(checkpoint.detection, routes)
            return PresentSource(rules, present_fingerprint(checkpoint))
    except WherryError as error:
        return PresentSource(rules, error=error)


def _reasons(
    row: ConversionRecord,
    format: str,
    found: PresentSource,
    rules: Sequence[RouteRule],
    at: str | None,
    plans: _Plans,
) -> Iterator[Reason]:
    """Why a conversion is stale."""
    if isinstance(found.error, NotFoundError):
        elsewhere = f"; a copy is at {at}" if at else ""
        yield Reason(SOURCE_GONE, f"{row.source_uri} no longer exists{elsewhere}")
    elif found.error is not None:
        yield Reason(SOURCE_UNREADABLE, found.error.what)
    else:
        if found.fingerprint != row.source_fingerprint:
            yield Reason(SOURCE_CHANGED, f"the files of {row.source_uri} have changed since {row.time}")
        yield from _by_route(row, format, rules, plans) if rules else _by_record(row, format, plans)
    yield from _other_sources(row)


def _other_sources(row: ConversionRecord) -> Iterator[Reason]:
    """The reasons of the further sources of a merge."""
    for one in row.request.get("merge", {}).get("sources", ())[1:]:
        try:
            with open_source(_stated_source(one["uri"], one["format"])) as checkpoint:
                same = present_fingerprint(checkpoint) == one["fingerprint"]
        except NotFoundError:
            yield Reason(SOURCE_GONE, f"{one['uri']} no longer exists")
        except WherryError as error:
            yield Reason(SOURCE_UNREADABLE, error.what)
        else:
            if not same:
                yield Reason(SOURCE_CHANGED, f"the files of {one['uri']} have changed since {row.time}")


def _stated_source(uri: str, format: str | None) -> SourceRequest:
    """The request for a checkpoint whose place only the ledger states."""
    return SourceRequest(uri, format, below=root_of(uri))


def _is_same(place: PlaceRecord, format: str) -> bool:
    """Whether a place still has the recorded files."""
    if place.gone is not None:
        return False
    try:
        with open_source(_stated_source(place.uri, format)) as checkpoint:
            return present_fingerprint(checkpoint) == place.fingerprint
    except WherryError:
        return False  # a place that cannot be reached does not help


def _recorded_request(row: ConversionRecord) -> Mapping[str, Any]:
    """The recorded request; where a receipt states none, as a program may make it, what its options state."""
    return row.request or restore_request(row.format, row.options)


def _source(row: ConversionRecord, format: str) -> SourceRequest:
    """The source of a conversion, with the request's options for reading it."""
    opaque = tuple(_recorded_request(row).get("allow_opaque", ()))
    return replace(_stated_source(row.source_uri, format), allow_opaque=opaque)


def _by_route(
    row: ConversionRecord, source_format: str, rules: Sequence[RouteRule], plans: _Plans
) -> Iterator[Reason]:
    """The reasons, if none of the routes that may have requested it would produce the same now."""
    reasons, recorded = list[Reason](), _recorded_request(row)
    for route, rule in rules:
        name = f"route {route.name}"
        try:
            request = as_routed(row, route, rule)
            now = _planned_once(row, route.format or source_format, request, plans)
        except WherryError as error:  # a file that the route names
            now, request = error, {}
        if isinstance(now, WherryError):
            reasons.append(Reason(ROUTE_CHANGED, f"{name} fails now: {now.what}"))
            continue
        if now == row.plan_digest and not any(differences(recorded, request, UNPLANNED)):
            return
        how = ", ".join(differences(recorded, request))
        what = f"{name} has changed since the conversion"
        reasons.append(Reason(ROUTE_CHANGED, f"{what}: {how}" if how else what))
    yield reasons[0]


def _by_record(row: ConversionRecord, source_format: str, plans: _Plans) -> Iterator[Reason]:
    """The reason, if the recorded request would not produce the same now."""
    recorded = _recorded_request(row)
    try:
        request = present(recorded)
        now: str | WherryError = _planned_once(row, source_format, request, plans)
        changed = ", ".join(differences(recorded, request, UNPLANNED))
    except WherryError as error:  # a file that it names
        now, changed = error, ""
    if isinstance(now, WherryError):
        yield Reason(PLAN_CHANGED, f"the same request fails now: {now.what}")
    elif now != row.plan_digest or changed:
        what = f"the same request gives another plan than on {row.time}"
        yield Reason(PLAN_CHANGED, f"files of the request have changed: {changed}" if changed else what)


def _planned_once(
    row: ConversionRecord, source_format: str, request: Mapping[str, Any], plans: _Plans
) -> str | WherryError:
    """Like `_plan_now`, from earlier plans for the same source: no plan depends on where its target is."""
    protocol = row.target_uri.partition("://")[0] if "://" in row.target_uri else ""
    target = row.target_uri if "as" in request else protocol  # a rewrite looks at its target
    key = canonical_json([source_format, row.format, target, request])
    if key not in plans:
        plans[key] = _plan_now(row, source_format, request)
    return plans[key]


def _plan_now(row: ConversionRecord, source_format: str, request: Mapping[str, Any]) -> str | WherryError:
    """Digest of the plan that the request gives now, or the error."""
    from wherry.converter.plan import plan_targets
    from wherry.converter.rewrite import plan_rewrite

    source = _source(row, source_format)
    try:
        if "merge" in request:  # the files of its sources alone are compared
            return row.plan_digest
        if "as" in request:
            return plan_rewrite(
                RewriteRequest(source=source, target=row.target_uri, as_=request["as"])
            ).digest
        again = planned_again(request, source, TargetRequest(row.target_uri, row.format))
        return plan_targets(again)[0].digest
    except WherryError as error:
        return error


def _cure(row: ConversionRecord, source: str, rules: Sequence[RouteRule]) -> str:
    """The command line that converts again, as the route states it or as it was recorded."""
    request = _recorded_request(row)
    if rules:
        route, rule = rules[0]
        try:
            request = {
                **as_routed(row, route, rule),
                **{n: v for n, v in request.items() if n in ("into", "as_step")},
            }
        except WherryError as error:
            _log.debug("the cure uses the recorded request: %s", error)
    return command_line(request, source, row.target_uri, moved=source != row.source_uri)


def _with_upstream(rows: Sequence[ConversionRecord], looked: Sequence[Stale]) -> Iterator[Stale]:
    """Add what was derived from stale checkpoints; rows are in the order of their conversions."""
    worn: dict[str, str] = {}
    for row, one in zip(rows, looked, strict=True):
        above = worn.get(row.source_uri)
        full = (*one.reasons, Reason(UPSTREAM, f"{above} is stale")) if above else one.reasons
        if any(reason.kind != SOURCE_GONE for reason in full):
            worn[row.target_uri] = row.target_uri
        yield replace(one, reasons=full) if above else one


# ---- rules of routes that may have requested a conversion ------------------------------------------------------------


class RouteRule(NamedTuple):
    """A route with one of its target rules."""

    route: Route
    rule: TargetRule


class RuleForSource(NamedTuple):
    """A rule that applies to a source.

    Attributes:
        rule: the rule.
        format: its format.
        depth: length of the URI of the route's root.
        place: URI of its target for this source; None where the route cannot determine it.
    """

    rule: RouteRule
    format: str
    depth: int
    place: str | None


def rules_at(source: Detection, routes: Sequence[Route]) -> tuple[RuleForSource, ...]:
    """The rules of all routes that accept a source, as it is now."""
    found: list[RuleForSource] = []
    for route in routes:
        where = whereabouts(route.root, source)
        if where is None or refusal(route, source, where) is not None:
            continue
        places: dict[str, str] = {}  # template → URI of the target
        with suppress(WherryError):  # the route cannot determine them for this source
            places = {one.rule.uri: one.place for one in wanted_targets(route, source, where)}
        depth = len(locate(route.root).uri)
        found += [
            RuleForSource(RouteRule(route, rule), find_format(rule.format).name, depth, places.get(rule.uri))
            for rule in route.targets
        ]
    return tuple(found)


def rules_for(uri: str, format: str, rules: Sequence[RuleForSource]) -> list[RouteRule]:
    """The rules of routes that may have requested a conversion.

    Args:
        uri: URI of the result.
        format: format of the result.
        rules: the rules that apply to its source.

    Returns:
        The rules; empty where no route can have requested it.
    """
    same = [one for one in rules if one.format == format]
    depth = max((one.depth for one in same), default=0)
    exact = [one.rule for one in same if one.place == uri]
    return exact or [one.rule for one in same if one.depth == depth]


def as_routed(row: ConversionRecord, route: Route, rule: TargetRule) -> dict[str, Any]:
    """The request of a nightly run for a target."""
    target = replace(rule.at(row.target_uri), into=False)
    source = SourceRequest(row.source_uri, route.format, allow_opaque=route.allow_opaque)
    return stated_options(route.request(source, [target], DEFAULT_MEMORY), target)
