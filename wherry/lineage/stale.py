"""stale: find converted checkpoints that differ from what a new conversion would produce.

Only metadata is read. A source is compared by the fingerprint of its files. The conversion is planned again, as its
route states it or else as it was requested, and the digests of the two plans are compared: a plan contains the
structure of the source, the target format, every option and every rule. The files that the request names, which a plan
does not cover, are compared too. For old receipts without a request, the version of wherry is compared. What was
derived from a stale checkpoint is stale too. Reasons are data; each result has the command that converts again.

`rules_for` finds the routes that may have requested a conversion: a route whose target is this very URI. Where there is
none (the template changed, or somebody converted by hand below a route's root), the routes with the deepest root, each
with all its targets of that format.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, replace
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

from wherry.converter.command import (
    UNPLANNED,
    command_line,
    differences,
    planned_again,
    present,
    resolved,
    stated,
)
from wherry.core.request import RewriteRequest, SourceRequest, TargetRequest
from wherry.core.units import DEFAULT_MEMORY
from wherry.errors import NotFoundError, WherryError
from wherry.formats.checkpoint import open_checkpoint, open_source, present_fingerprint
from wherry.formats.registry import find_format
from wherry.routes.routes import refusal, wanted, whereabouts
from wherry.runtime import threads
from wherry.storage.sidecar import read_sidecar
from wherry.storage.stores import is_live, locate
from wherry.version import __version__

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence

    from wherry.config.schema import Route, TargetRule
    from wherry.core.detection import Detection
    from wherry.ledger.nodes import LineageNode
    from wherry.ledger.replay import ConversionRecord, PlaceRecord
    from wherry.routes.routes import Whereabouts


_log = logging.getLogger(__name__)
SCHEMA = 1
_WORKERS = 8  # sources that are checked in parallel; the work waits for storage
# Kinds of reasons.
SOURCE_GONE, SOURCE_CHANGED, SOURCE_UNREADABLE = "source-gone", "source-changed", "source-unreadable"
PLAN_CHANGED, ROUTE_CHANGED, OLDER_WHERRY = "plan-changed", "route-changed", "older-wherry"
UPSTREAM = "upstream-stale"


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
    rows, nodes = _rows(about)
    routes = _routes(config)
    with threads.executor(_WORKERS) as pool:
        looked = list(pool.map(_look, rows, repeat(routes), repeat(nodes)))
    return [one for one in _with_upstream(rows, looked) if one.reasons]


def _rows(about: str | os.PathLike[str] | None) -> tuple[list[ConversionRecord], Mapping[str, LineageNode]]:
    """The current conversions, one for each place, and the nodes of their sources."""
    from wherry.ledger.nodes import asked_in, conversions, nodes
    from wherry.ledger.record import open_ledger

    chosen = None if about is None else _below(about)
    with open_ledger() as ledger:
        every = {row.target_uri: row for row in conversions(ledger)}.values()
        kept = [row for row in every if row.gone is None and _has_source(row)]
        rows = [row for row in kept if chosen is None or row.target_digest in chosen]
        rows.sort(key=lambda row: row.statement)
        asked = asked_in(ledger, (row.statement for row in rows))
        sources = nodes(ledger, {row.source_digest for row in rows})
    return [replace(row, asked=asked[row.statement]) for row in rows], sources


def _has_source(row: ConversionRecord) -> bool:
    """Whether its source can still exist: neither a live training state, nor the checkpoint itself, in place."""
    return not is_live(row.source_uri) and row.source_uri != row.target_uri


def _below(about: str | os.PathLike[str]) -> set[str]:
    from wherry.lineage.answers import impact

    return set(impact(about).nodes)


def _routes(config: str | None) -> tuple[Route, ...]:
    from wherry.config.config import load_config

    return load_config(config).routes


def _look(row: ConversionRecord, routes: Sequence[Route], nodes: Mapping[str, LineageNode]) -> Stale:
    """Compare one conversion with the present source and routes."""
    source = nodes[row.source_digest]
    rules: list[RouteRule] = []
    reasons: list[Reason] = []
    at: str | None = row.source_uri
    try:
        with open_source(_source(row, _said(row).get("from", source.format))) as checkpoint:
            rules = (
                []
                if "as" in _said(row)
                else rules_for(row.target_uri, row.format, checkpoint.detection, routes)
            )
            if present_fingerprint(checkpoint) != row.source_fingerprint:
                what = f"the files of {row.source_uri} have changed since {row.time}"
                reasons.append(Reason(SOURCE_CHANGED, what))
        reasons += _by_route(row, source.format, rules) if rules else _by_record(row, source.format)
    except NotFoundError:
        at = next((place.uri for place in source.places if _is_same(place, source.format)), None)
        elsewhere = f"; a copy is at {at}" if at else ""
        reasons.append(Reason(SOURCE_GONE, f"{row.source_uri} no longer exists{elsewhere}"))
    except WherryError as error:
        reasons.append(Reason(SOURCE_UNREADABLE, error.what))
    cure = _cure(row, at, rules) if at and reasons else None
    return Stale(row.target_uri, row.target_digest, row.format, row.source_uri, tuple(reasons), cure)


def _is_same(place: PlaceRecord, format: str) -> bool:
    """Whether a place still has the recorded files."""
    try:
        with open_checkpoint(place.uri, format=format) as checkpoint:
            return place.gone is None and present_fingerprint(checkpoint) == place.fingerprint
    except WherryError:
        return False  # a place that cannot be reached does not help


def _said(row: ConversionRecord) -> Mapping[str, Any]:
    """The recorded request, or as much of it as the options state."""
    return row.asked or resolved(row.format, row.options)


def _source(row: ConversionRecord, format: str) -> SourceRequest:
    """Its source, with the request's options for reading it."""
    return SourceRequest(row.source_uri, format, opaque=tuple(_said(row).get("opaque", ())))


def _by_route(row: ConversionRecord, source_format: str, rules: Sequence[RouteRule]) -> Iterator[Reason]:
    """The reasons, if none of the routes that may have requested it would produce the same now."""
    told: list[Reason] = []
    for route, rule in rules:
        name = f"route {route.name}"
        try:
            asked = as_routed(row, route, rule)
            now = _planned(row, route.source_format or source_format, asked)
        except WherryError as error:  # a file that the route names
            now, asked = error, {}
        if isinstance(now, WherryError):
            told.append(Reason(ROUTE_CHANGED, f"{name} fails now: {now.what}"))
            continue
        if now == row.plan_digest and not (row.asked and any(differences(row.asked, asked, UNPLANNED))):
            return
        how = ", ".join(differences(row.asked, asked)) if row.asked else ""
        what = f"{name} has changed since the conversion"
        told.append(Reason(ROUTE_CHANGED, f"{what}: {how}" if how else what))
    yield told[0]


def _by_record(row: ConversionRecord, source_format: str) -> Iterator[Reason]:
    """The reason, if the recorded request would not produce the same now."""
    if not row.asked:
        yield from _by_options(row, source_format)
        return
    try:
        asked = present(row.asked)
        now: str | WherryError = _planned(row, source_format, asked)
        changed = ", ".join(differences(row.asked, asked, UNPLANNED))
    except WherryError as error:  # a file that it names
        now, changed = error, ""
    if isinstance(now, WherryError):
        yield Reason(PLAN_CHANGED, f"the same request fails now: {now.what}")
    elif now != row.plan_digest or changed:
        what = f"the same request gives another plan than on {row.time}"
        yield Reason(PLAN_CHANGED, f"files of the request have changed: {changed}" if changed else what)


def _by_options(row: ConversionRecord, source_format: str) -> Iterator[Reason]:
    """As `_by_record`, for a receipt without a request: only its options and the version of wherry are known."""
    plans = [_planned(row, source_format, {**_said(row), **more}) for more in ({}, {"only": "params"})]
    if row.plan_digest in plans:
        return
    if _is_plain(row) and not isinstance(plans[0], WherryError):
        yield Reason(PLAN_CHANGED, f"the same request gives another plan than on {row.time}")
    elif row.software and row.software != __version__:
        yield Reason(OLDER_WHERRY, f"it was converted by wherry {row.software}; this is {__version__}")


def _is_plain(row: ConversionRecord) -> bool:
    """Whether the recorded options were the whole request: no layout, no rules, nothing ignored."""
    try:
        sidecar = read_sidecar(locate(row.target_uri))
    except WherryError:
        return False  # an unreadable sidecar is reported by the audit
    if sidecar is None or sidecar.receipt is None:
        return False
    return not {"layout", "scan"} & set(sidecar.manifest.origin) and not sidecar.receipt.warnings


def _planned(row: ConversionRecord, source_format: str, asked: Mapping[str, Any]) -> str | WherryError:
    """Digest of the plan that the request gives now, or the error."""
    from wherry.converter.plan import plan_request
    from wherry.converter.rewrite import plan_rewrite

    source = _source(row, source_format)
    try:
        if "as" in asked:
            return plan_rewrite(RewriteRequest(source=source, target=row.target_uri, as_=asked["as"])).digest
        return plan_request(planned_again(asked, source, TargetRequest(row.target_uri, row.format))).digest
    except WherryError as error:
        return error


def _cure(row: ConversionRecord, source: str, rules: Sequence[RouteRule]) -> str:
    """The command line that converts again, as the route states it or as it was recorded."""
    asked = _said(row)
    if rules:
        route, rule = rules[0]
        try:
            asked = {
                **as_routed(row, route, rule),
                **{n: v for n, v in asked.items() if n in ("into", "as_step")},
            }
        except WherryError as error:
            _log.debug("the cure uses the recorded request: %s", error)
    return command_line(asked, source, row.target_uri, moved=source != row.source_uri)


def _with_upstream(rows: Sequence[ConversionRecord], looked: Sequence[Stale]) -> Iterator[Stale]:
    """Add what was derived from stale checkpoints; rows are in the order of their conversions."""
    worn: dict[str, str] = {}
    for row, one in zip(rows, looked, strict=True):
        above = worn.get(row.source_uri)
        full = (*one.reasons, Reason(UPSTREAM, f"{above} is stale")) if above else one.reasons
        if any(reason.kind not in (SOURCE_GONE, OLDER_WHERRY) for reason in full):
            worn[row.target_uri] = row.target_uri
        yield replace(one, reasons=full)


class RouteRule(NamedTuple):
    """A route with one of its target rules."""

    route: Route
    rule: TargetRule


def rules_for(uri: str, format: str, source: Detection, routes: Sequence[Route]) -> list[RouteRule]:
    """The rules of routes that may have requested a conversion.

    Args:
        uri: URI of the result.
        format: format of the result.
        source: its source, as it is now.
        routes: all routes.

    Returns:
        The rules; empty where no route can have requested it.
    """
    exact: list[RouteRule] = []
    deepest: list[tuple[int, RouteRule]] = []
    for route in routes:
        where = whereabouts(route.root, source)
        if where is None or refusal(route, source, where) is not None:
            continue
        places = _places(route, source, where)
        for rule in route.targets:
            if find_format(rule.format).name == format:
                deepest.append((len(locate(route.root).uri), RouteRule(route, rule)))
                exact += [RouteRule(route, rule)] if places.get(rule.uri) == uri else []
    depth = max((depth for depth, _rule in deepest), default=0)
    return exact or [rule for there, rule in deepest if there == depth]


def _places(route: Route, source: Detection, where: Whereabouts) -> dict[str, str]:
    """Template → URI of the target for a source; empty where the route cannot determine it."""
    try:
        return {one.rule.uri: one.place for one in wanted(route, source, where)}
    except WherryError:
        return {}


def as_routed(row: ConversionRecord, route: Route, rule: TargetRule) -> dict[str, Any]:
    """The request of a nightly run for a target."""
    target = replace(rule.at(row.target_uri), into=False)
    source = SourceRequest(row.source_uri, route.source_format, opaque=route.opaque)
    return stated(route.request(source, [target], DEFAULT_MEMORY), target)
