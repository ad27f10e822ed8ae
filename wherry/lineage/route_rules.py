"""route_rules: which rules of the present routes may have requested a conversion.

A route whose target is this very URI. Where there is none (the template changed, or somebody converted by hand below a
route's root), the routes with the deepest root, each with all its targets of that format. What depends only on the
source is found once for all its conversions, of which there may be thousands.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from wherry.converter.command import stated_options
from wherry.core.request import SourceRequest
from wherry.core.units import DEFAULT_MEMORY
from wherry.errors import WherryError
from wherry.formats.registry import find_format
from wherry.routes.routes import refusal, wanted_targets, whereabouts
from wherry.storage.stores import locate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wherry.config.schema import Route, TargetRule
    from wherry.core.detection import Detection
    from wherry.ledger.replay import ConversionRecord


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
