"""export, as a task: resolve the routes of `wherry.toml` for a checkpoint that a training job has just committed."""

from __future__ import annotations

from typing import Any

from prefect import task

from wherry.config.schema import Route, Settings
from wherry.core.request import SourceRequest
from wherry.errors import WherryError
from wherry.routes.night import made_notes
from wherry.routes.routes import Explanation, chosen_routes, explain, load_config, spec_of
from wherry.routes.scores import score
from wherry.storage.location import Location
from wherry.tasks.common import STEP
from wherry.tasks.run_log import run_logger

_NIGHTLY = "best"  # selects among all steps of a run, so one step alone does not suffice


@task(name="export", task_run_name="export {source}", **STEP)
def route_targets(
    source: str, routes: tuple[str, ...] = (), config: str | None = None, env: str | None = None
) -> list[dict[str, Any]]:
    """Resolve the routes for a checkpoint.

    Args:
        source: URI of the checkpoint.
        routes: names of routes; all by default.
        config: the configuration file; by default the one that `wherry config show` prints.
        env: environment of the configuration.

    Returns:
        For each route: `route`, `takes`, `reason`, `unselected` (its `select` leaves the checkpoint out), as `spec` the
        fields of the ConvertSpec, None if the route does not take the checkpoint, and in `notes` the product notes for
        the ledger once the targets are made. The registry's URIs are left out, since they may contain credentials.
    """
    read = load_config(config, env)
    chosen = {route.name: route for route in chosen_routes(read, routes)}
    found = [one for one in explain(source, read) if one.route in chosen]
    rows = [_row(chosen[one.route], one, read.settings) for one in found]
    for row in rows:
        run_logger().info(
            "route %s %s: %s", row["route"], "takes it" if row["spec"] else "does not take it", row["reason"]
        )
    return rows


def _row(route: Route, found: Explanation, settings: Settings) -> dict[str, Any]:
    takes, reason, unselected = found.takes, found.reason, found.unselected
    if takes and route.selection.choice == _NIGHTLY:
        unselected = True
        takes, reason = False, f"select = {route.select}: the nightly run compares the steps of the run"
    spec: dict[str, Any] | None = None
    notes: list[dict[str, Any]] = []
    if takes:
        assert found.where is not None
        assert found.source is not None
        # The source is the checkpoint that the targets' names were filled in from: a run may have a newer step by now.
        spec = spec_of(route, SourceRequest(found.source, route.format), found.targets, settings.memory)
        value = _score(route.place(found.source), route.retention.metric)
        notes = made_notes(route.name, found.source, found.where, found.targets, value)
    return {
        "route": route.name,
        "takes": takes,
        "reason": reason,
        "unselected": unselected,
        "spec": spec,
        "notes": notes,
    }


def _score(place: Location, metric: str | None) -> float | None:
    """The metric that retention needs; None if it cannot be read, and then the checkpoint is kept."""
    try:
        return None if metric is None else score(place, metric)
    except WherryError as error:
        run_logger().warning("could not read metric %s of %s: %s", metric, place.uri, error)
        return None
