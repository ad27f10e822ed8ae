"""Which routes could have asked for a conversion that lies there, and what each of them states of it now.

A route that puts the result at this very place asked for it. Where none does (the template changed, or somebody
converted by hand below a route's root), the routes with the deepest root may have, each by any of its targets of that
format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from wherry.converter.command import stated
from wherry.errors import WherryError
from wherry.formats.registry import find_format
from wherry.routes.routes import refusal, wanted, whereabouts
from wherry.storage.stores import locate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wherry.config.schema import Route, TargetRule
    from wherry.core.detection import Detection
    from wherry.routes.routes import Whereabouts


class Rule(NamedTuple):
    """What a route states for a target."""

    route: Route
    rule: TargetRule


def rules_for(uri: str, format: str, source: Detection, routes: Sequence[Route]) -> list[Rule]:
    """What the routes that take a source state of what is made of it.

    Args:
        uri: where the result lies.
        format: of the result.
        source: what it was made of, as it is now.
        routes: all that there are.

    Returns:
        What may have asked for it; empty where no route did.
    """
    exact: list[Rule] = []
    deepest: list[tuple[int, Rule]] = []
    for route in routes:
        where = whereabouts(route.root, source)
        if where is None or refusal(route, source, where) is not None:
            continue
        places = _places(route, source, where)
        for rule in route.targets:
            if find_format(rule.format).name == format:
                deepest.append((len(locate(route.root).uri), Rule(route, rule)))
                exact += [Rule(route, rule)] if places.get(rule.uri) == uri else []
    depth = max((depth for depth, _rule in deepest), default=0)
    return exact or [rule for there, rule in deepest if there == depth]


def _places(route: Route, source: Detection, where: Whereabouts) -> dict[str, str]:
    """Template → where it puts what is made of a source; empty where the route cannot tell."""
    try:
        return {one.rule.uri: one.place for one in wanted(route, source, where)}
    except WherryError:
        return {}


def as_routed(route: Route, rule: TargetRule) -> dict[str, Any]:
    """What a night states of a target; the classes that the route lets pass are let pass already."""
    return stated(
        rule.wish, to=rule.format, options=rule.settings, only=rule.only, ignore=route.ignore, meta=route.meta,
        verify=None if route.read_back else "none", **{"from": route.source_format},
    )  # fmt: skip
