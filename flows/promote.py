"""The promote flow: verify a registered checkpoint again, check the policy, move the alias; or roll back.

Load it as `flows/promote.py:promote` or `wherry.flows.promote.promote`. It can be run again after a crash: it detects
an alias that was moved already. A refusal ends the flow as Failed, with every gate in a table artifact.
"""

from typing import Any, Self

from prefect import flow
from pydantic import BaseModel, ConfigDict, Field, model_validator

from wherry.errors import WherryError
from wherry.models.policy import Policy
from wherry.tasks.artifacts import show_link, show_table
from wherry.tasks.common import show_failure
from wherry.tasks.ending import ending
from wherry.tasks.promote import promote as promote_task
from wherry.tasks.promote import rollback as rollback_task


class PromoteSpec(BaseModel):
    """What to promote; the only parameter of the flow, and its form in the Prefect UI."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    subject: str | None = Field(
        default=None,
        description="Model URI (models:/NAME@candidate, models:/NAME/VERSION) or URI of a checkpoint.",
    )
    name: str | None = Field(
        default=None, description="Registered model; required for the URI of a checkpoint and for a rollback."
    )
    to_alias: str = Field(
        default="champion", description="Alias to set; the version that had it becomes `previous`."
    )
    rollback: bool = Field(
        default=False,
        description="Instead of promoting, give the alias of `name` back to the version that had it before.",
    )
    level: str = Field(
        default="",
        description="Verification level; by default `digest` to promote and `present` to roll back.",
    )
    policy: Policy = Field(default=Policy(), description="Policy that the checkpoint must pass.")
    policy_name: str | None = Field(
        default=None, description="Name of a policy in wherry.toml, instead of `policy`."
    )
    tracking_uri: str | None = Field(
        default=None, description="MLflow tracking store; an embedded one by default."
    )
    registry_uri: str | None = Field(
        default=None, description="MLflow registry; the tracking store by default."
    )
    to_registry_uri: str | None = Field(default=None, description="Promote into this other MLflow registry.")

    @model_validator(mode="after")
    def _says_what(self) -> Self:
        if self.rollback and not self.name:
            raise ValueError("missing `name`: a rollback requires it")
        if not self.rollback and not self.subject:
            raise ValueError("missing `subject`: a promotion requires it")
        return self


@flow(name="promote", flow_run_name="{spec.subject} to {spec.to_alias}", result_serializer="json")
def promote(spec: PromoteSpec) -> dict[str, Any]:
    """Promote a checkpoint, or roll a promotion back.

    Returns:
        The JSON form of the promotion or rollback.
    """
    with ending("promote", _title(spec)) as end:
        try:
            done = _carry_out(spec)
        except WherryError as error:
            show_failure(error, f"{_subject(spec)} was not promoted")
            raise
        _show(spec, done)
        came = "already there" if done["already"] else "rolled back" if spec.rollback else "promoted"
        end.counts = {came: 1}
    return done


def _show(spec: PromoteSpec, done: dict[str, Any]) -> None:
    show_table(summary(done), "wherry-promotion", f"{_subject(spec)}: {done['alias']}")
    if done["page"]:
        text = f"{done['name']} version {done['version']}"
        show_link(done["page"], text, "wherry-model-version", "In the MLflow UI")


def _title(spec: PromoteSpec) -> str:
    return f"Rollback of {spec.name}" if spec.rollback else f"Promotion of {spec.subject} to {spec.to_alias}"


def summary(done: dict[str, Any]) -> list[dict[str, str]]:
    """The flow's result as rows of (what, value): the promotion, then each gate."""
    rows = {
        "model": f"{done['name']} version {done['version']}",
        "alias": done["alias"],
        "replaced": done["replaced"] or "nothing",
        "already there": "yes" if done["already"] else "no",
        "checkpoint": done["uri"],
        "digest": done["checkpoint_digest"],
        "verified": f"at level {done['level']}",
        "by": done["by"],
        "registry": done["registry"],
    }
    gates = [(f"gate {row['gate']} {row['asked']}", row["found"]) for row in done["gates"]]
    return [{"what": what, "value": value} for what, value in [*rows.items(), *gates]]


def _carry_out(spec: PromoteSpec) -> dict[str, Any]:
    common: dict[str, Any] = {"tracking_uri": spec.tracking_uri, "registry_uri": spec.registry_uri}
    common |= {"level": spec.level} if spec.level else {}
    if spec.rollback:
        return rollback_task(spec.name or "", alias=spec.to_alias, **common)
    return promote_task(
        spec.subject or "",
        name=spec.name,
        to_alias=spec.to_alias,
        gates=spec.policy_name or spec.policy.model_dump(mode="json"),
        to_registry_uri=spec.to_registry_uri,
        **common,
    )


def _subject(spec: PromoteSpec) -> str:
    return f"the rollback of {spec.name}" if spec.rollback else str(spec.subject)
