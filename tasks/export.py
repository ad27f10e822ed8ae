"""export, as a task: the targets that the routes state for a checkpoint that training has just committed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prefect import task

from wherry.core.request import SourceRequest
from wherry.errors import WherryError
from wherry.routes.night import made_notes
from wherry.routes.routes import chosen_routes, explain, load_config, spec_of
from wherry.routes.scores import score
from wherry.tasks.common import STEP, run_logger

if TYPE_CHECKING:
    from wherry.config.schema import Route, Settings
    from wherry.routes.routes import Explanation

_NIGHTLY = "best"  # a choice among steps that are all there; one step alone cannot tell


@task(name="export", **STEP)
def routed(
    source: str, routes: tuple[str, ...] = (), config: str | None = None, env: str | None = None
) -> list[dict[str, Any]]:
    """Resolve the routes for a checkpoint.

    Args:
        source: its URI.
        routes: names of routes; all by default.
        config: the file; found as `wherry config show` says by default.
        env: its environment.

    Returns:
        For each route: `route`, `takes`, `reason`, as `spec` the fields of the ConvertSpec, None where it takes
        nothing, and in `notes` what the ledger is told once the targets are made. The registry's URIs are not in it,
        which may hold credentials.
    """
    read = load_config(config, env)
    chosen = {route.name: route for route in chosen_routes(read, routes)}
    found = [one for one in explain(source, read) if one.route in chosen]
    rows = [_row(chosen[one.route], one, read.settings) for one in found]
    for row in rows:
        run_logger().info(
            "route %s %s: %s", row["route"], "takes it" if row["spec"] else "leaves it", row["reason"]
        )
    return rows


def _row(route: Route, found: Explanation, settings: Settings) -> dict[str, Any]:
    takes, reason = found.takes, found.reason
    if takes and route.selection.choice == _NIGHTLY:
        takes, reason = False, f"select = {route.select}: the nightly run compares the steps of the run"
    return {
        "route": route.name,
        "takes": takes,
        "reason": reason,
        "spec": _spec(route, found, settings.memory) if takes else None,
        "notes": _notes(route, found) if takes else [],
    }


def _spec(route: Route, found: Explanation, memory: str) -> dict[str, Any]:
    """The source is what the targets' names were filled in from: a run may have a newer step by now."""
    assert found.source is not None
    return spec_of(route, SourceRequest(found.source, route.source_format), found.targets, memory)


def _notes(route: Route, found: Explanation) -> list[dict[str, Any]]:
    """What the ledger is told of the targets of a checkpoint that a route takes."""
    assert found.where is not None
    assert found.source is not None
    value = _score(found.source, route.retention.metric)
    return made_notes(route.name, found.source, found.where, found.targets, value)


def _score(uri: str, metric: str | None) -> float | None:
    """The metric that retention asks for; what cannot be read is not known, and what is not known is kept."""
    try:
        return None if metric is None else score(uri, metric)
    except WherryError as error:
        run_logger().warning("%s is not known of %s: %s", metric, uri, error)
        return None
