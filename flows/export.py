"""The post-training export: a checkpoint that a training job commits is converted, verified, registered and recorded.

`wherry emit URI`, the hooks to paste and `wherry.export` post the event `wherry.checkpoint.committed`, which starts
this flow with the checkpoint as its source. The routes define the targets, unless explicit targets are given. If no
route takes the checkpoint, the flow ends as Completed, since an event may be about any checkpoint, and its state, a
warning in the log and a notification give the reasons; a checkpoint that `select` leaves out is no reason to warn.
The nightly run converts whatever was missed here.
"""

from dataclasses import replace
from typing import Any, ClassVar

from prefect import flow
from prefect.states import Completed
from pydantic import Field

from wherry.config.config import in_force
from wherry.config.roots import root_of
from wherry.config.schema import MlflowSettings
from wherry.errors import NotRecordedError, WherryError
from wherry.flows.convert import chain, summary
from wherry.flows.convert_spec import ConvertSpec, TargetSpec
from wherry.flows.form import FormModel
from wherry.ledger.resolve import checkpoint_uri
from wherry.nightly.conversion import Conversion
from wherry.tasks.common import run_logger, show_table
from wherry.tasks.ending import ending
from wherry.tasks.steps import register, route_targets, verify


class ExportSpec(FormModel):
    """What to export; the only parameter of the flow, and its form in the Prefect UI."""

    FIRST: ClassVar[tuple[str, ...]] = ("source", "routes", "targets", "register_source", "alias")

    source: str = Field(description="URI or path of the committed checkpoint, or of its run.")
    routes: tuple[str, ...] = Field(default=(), description="Names of the routes to apply; all by default.")
    targets: tuple[TargetSpec, ...] = Field(
        default=(), description="Targets to convert to, instead of those of the routes."
    )
    register_source: str | None = Field(
        default=None,
        description="Register the checkpoint itself as this model, if training exported it ready for use.",
    )
    alias: str | None = Field(
        default=None,
        description="Alias of the registered versions, for example candidate; that of the route by default.",
    )
    config: str | None = Field(
        default=None, description="Path of wherry.toml; that of the worker by default."
    )
    env: str | None = Field(
        default=None, description="Environment [env.NAME] of wherry.toml; WHERRY_ENV by default."
    )


@flow(name="post-training-export", flow_run_name="export {spec.source}", result_serializer="json")
def export(spec: ExportSpec) -> Any:
    """Convert one checkpoint by its routes, or to the given targets.

    Returns:
        JSON values: `source`; in `routes` the decision of each route; in `conversions` the result of
        `convert-checkpoint` for each route that took it; `registration` of the source itself, if requested.
    """
    with (
        in_force(spec.config, spec.env) as config,
        ending("post-training-export", f"Export of {spec.source}") as end,
    ):
        rows = _wanted_targets(spec)
        made: list[dict[str, Any]] = []
        failures: list[WherryError] = []
        for row in rows:
            if row["takes"]:
                _carry_out(row, spec, config.settings.mlflow, made, failures)
        registered = _register_source(spec, failures)
        table = [{"what": f"route {row['route']}".strip(), "value": row["reason"]} for row in rows]
        for done in made:
            for one in (done, *done["further"]):
                table += summary(one)
        table += [{"what": "failed", "value": str(error)} for error in failures]
        show_table(table, "wherry-export", f"export of {spec.source}")
        grave = [one for one in failures if not isinstance(one, NotRecordedError)]
        # Nothing is done with the checkpoint, and no route leaves it out by its `select` either.
        unrouted = not (spec.register_source or any(row["takes"] or row["unselected"] for row in rows))
        end.counts = {
            "converted": len(made),
            "failed": len(grave),
            "left": sum(not row["takes"] for row in rows),
            **({"unrouted": 1} if unrouted else {}),
        }
        if unrouted:
            reasons = "; ".join(f"{row['route']}: {row['reason']}" for row in rows)
            end.warning = f"0 converted, 1 unrouted: {spec.source}: no route takes it: {reasons}"
        if failures:
            raise (grave or failures)[0]
    routes = [{name: row[name] for name in ("route", "takes", "reason")} for row in rows]
    done = {"source": spec.source, "routes": routes, "conversions": made, "registration": registered}
    return Completed(message=end.warning, data=done) if end.warning is not None else done


def _wanted_targets(spec: ExportSpec) -> list[dict[str, Any]]:
    """Explicit targets as a route without a name; else the decisions of the routes; empty for a registration only."""
    if spec.targets:
        return [
            {
                "route": "",
                "takes": True,
                "reason": "explicit targets",
                "unselected": False,
                "below": _root(spec),
            }
        ]
    if spec.register_source and not spec.routes:
        return []
    return route_targets(spec.source, spec.routes, spec.config, spec.env)


def _root(spec: ExportSpec) -> str | None:
    """The folder of the routes below which the source is opened, since an event or a form may name anything."""
    return root_of(checkpoint_uri(spec.source))


def _carry_out(
    row: dict[str, Any], spec: ExportSpec, mlflow: MlflowSettings,
    made: list[dict[str, Any]], failures: list[WherryError],
) -> None:  # fmt: skip
    """Carry out one route and record it in the ledger as the nightly run does; a failure does not stop the others."""
    try:
        if spec.targets:
            first, *rest = (one.model_dump() for one in spec.targets)
            fields = {**first, "source": spec.source, "further": rest, "below": row["below"]}
            conversion = ConvertSpec.model_validate(fields).conversion
        else:
            conversion = Conversion.from_json(row["conversion"])
        alias = spec.alias or conversion.alias
        done = chain(replace(conversion, alias=alias, **mlflow.model_dump()))
        made.append({"route": row["route"], **done})
    except NotRecordedError as error:
        run_logger().error("route %s: %s", row["route"], error)
        made += [{"route": row["route"], **error.result}] if error.result else []
        failures.append(error)
    except WherryError as error:
        run_logger().error("route %s: %s", row["route"], error)
        failures.append(error)


def _register_source(spec: ExportSpec, failures: list[WherryError]) -> dict[str, Any] | None:
    """The registration of the checkpoint itself; a failure does not hide the results of the routes."""
    if spec.register_source is None:
        return None
    try:
        below = _root(spec)
        verify(spec.source, level="digest", below=below)
        return register(spec.source, spec.register_source, spec.alias, below=below)
    except WherryError as error:
        run_logger().error("registration of %s failed: %s", spec.source, error)
        failures.append(error)
        return None
