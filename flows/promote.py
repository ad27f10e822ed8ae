"""The promote flow: verify a registered checkpoint again, check the policy, move the alias; or roll back.

Load it as `flows/promote.py:promote` or `wherry.flows.promote.promote`. It can be run again after a crash: it detects
an alias that was moved already. A refusal ends the flow as Failed, with every gate in a table artifact.
"""

from typing import Annotated, Any, ClassVar, Self

from prefect import flow
from pydantic import ConfigDict, Field, WithJsonSchema, model_validator

from wherry.errors import WherryError
from wherry.flows.form import FormModel, plain_fields
from wherry.ledger.resolve import model_in
from wherry.models.policy import Policy
from wherry.tasks.common import show_failure, show_link, show_table
from wherry.tasks.ending import ending
from wherry.tasks.steps import promote as promote_task
from wherry.tasks.steps import rollback as rollback_task


class PolicyForm(Policy):
    """The gates of a promotion; a gate that is left out lets everything pass."""

    model_config = ConfigDict(json_schema_extra=plain_fields)


class PromoteSpec(FormModel):
    """What to promote; the only parameter of the flow, and its form in the Prefect UI."""

    FIRST: ClassVar[tuple[str, ...]] = ("subject", "alias", "model", "policy_name", "rollback")

    subject: str = Field(
        description="Model URI (models:/NAME@candidate, models:/NAME/VERSION) or URI of a checkpoint; models:/NAME for "
        "a rollback."
    )
    model: str | None = Field(
        default=None, description="Registered model; required for the URI of a checkpoint."
    )
    alias: str = Field(
        default="champion", description="Alias to set; the version that had it becomes `previous`."
    )
    rollback: bool = Field(
        default=False,
        description="Instead of promoting, give the alias back to the version of the model that had it before.",
    )
    level: str = Field(
        default="",
        description="Verification level; by default `digest` to promote and `present` to roll back.",
    )
    policy: Annotated[Policy, WithJsonSchema(PolicyForm.model_json_schema())] = Field(
        default=Policy(), description="Policy that the checkpoint must pass."
    )
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
    def _names_a_model(self) -> Self:
        if self.rollback and not self.known_model:
            raise ValueError("`subject` names no model, which a rollback requires: models:/NAME")
        return self

    @property
    def known_model(self) -> str:
        """The registered model; empty if only the URI of a checkpoint is stated."""
        return self.model or model_in(self.subject) or ""


@flow(name="promote", flow_run_name="{spec.subject} to {spec.alias}", result_serializer="json")
def promote(spec: PromoteSpec) -> dict[str, Any]:
    """Promote a checkpoint, or roll a promotion back.

    Returns:
        The JSON form of the promotion or rollback.
    """
    title = (
        f"Rollback of {spec.known_model}" if spec.rollback else f"Promotion of {spec.subject} to {spec.alias}"
    )
    with ending("promote", title) as end:
        common: dict[str, Any] = {"tracking_uri": spec.tracking_uri, "registry_uri": spec.registry_uri}
        common |= {"level": spec.level} if spec.level else {}
        try:
            if spec.rollback:
                done = rollback_task(spec.known_model, alias=spec.alias, **common)
            else:
                done = promote_task(
                    spec.subject,
                    model=spec.model,
                    alias=spec.alias,
                    policy=spec.policy_name or spec.policy.model_dump(mode="json"),
                    to_registry_uri=spec.to_registry_uri,
                    **common,
                )
        except WherryError as error:
            show_failure(error, f"{_subject(spec)} was not promoted")
            raise
        show_table(summary(done), "wherry-promotion", f"{_subject(spec)}: {done['alias']}")
        if done["page"]:
            text = f"{done['name']} version {done['version']}"
            show_link(done["page"], text, "wherry-model-version", "In the MLflow UI")
        came = "already there" if done["already"] else "rolled back" if spec.rollback else "promoted"
        end.counts = {came: 1}
    return done


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
    gates = [(f"gate {row['gate']} {row['requested']}", row["found"]) for row in done["gates"]]
    return [{"what": what, "value": value} for what, value in [*rows.items(), *gates]]


def _subject(spec: PromoteSpec) -> str:
    return f"the rollback of {spec.known_model}" if spec.rollback else spec.subject
