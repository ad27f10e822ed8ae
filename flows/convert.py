"""The convert flow: detect → plan → convert → verify → register → lineage, for one checkpoint.

Load it as `flows/convert.py:convert_checkpoint` or `wherry.flows.convert.convert_checkpoint`. It may be run again
after a crash: a finished conversion is recognised, and a registered version is found. A failure ends the flow as
Failed, with the error's text and cure in the state's message and in a table artifact.
"""

from typing import Any, Literal

from prefect import flow
from prefect.artifacts import create_link_artifact, create_table_artifact
from pydantic import BaseModel, ConfigDict, Field

from wherry.errors import WherryError
from wherry.tasks.convert import convert
from wherry.tasks.detect import detect
from wherry.tasks.lineage import lineage
from wherry.tasks.plan import plan
from wherry.tasks.register import register
from wherry.tasks.verify import verify
from wherry.units import show_seconds, show_size


class ConvertSpec(BaseModel):
    """What to convert; the one parameter of the flow, and its form in the Prefect UI."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str = Field(
        description="URI or path of a checkpoint, a step folder or a run folder (its newest step)."
    )
    target: str = Field(
        description="URI or path of exactly what shall be written; with `into`, the run folder."
    )
    to: str = Field(
        description="Target format, a name or alias; `wherry formats` lists them.",
        examples=["safetensors", "huggingface", "orbax", "dcp", "maxtext", "t5x", "flax-msgpack"],
    )
    options: dict[str, Any] = Field(
        default={}, description="Options of the target format, as `--set` takes them."
    )
    format: str | None = Field(
        default=None, description="Format of the source, where detection would not decide."
    )
    step: int | None = Field(default=None, description="Step of a run; its newest complete step by default.")
    item: str | None = Field(default=None, description="Item of a step.")
    only: Literal["params"] | None = Field(default=None, description="Carry the parameters alone.")
    ignore: tuple[Literal["values", "empties", "companions"], ...] = Field(
        default=(), description="Leave behind what the target cannot hold."
    )
    memory: str = Field(default="128MiB", description="Budget of what is in flight.")
    into: bool = Field(default=False, description="The target is a run; make the step folder inside it.")
    if_exists: Literal["fail", "skip", "resume"] = Field(
        default="resume",
        description="Accept nothing at the target, anything that wherry wrote, or the result of this conversion.",
    )
    read_back: bool = Field(default=True, description="Read every byte of the target back before the commit.")
    verify: Literal["none", "structure", "present", "digest"] = Field(
        default="present",
        description="Level of the verification of the committed target; `digest` reads it again.",
    )
    meta: dict[str, str] = Field(default={}, description="Kept with the checkpoint, in its manifest.")
    model_name: str | None = Field(
        default=None, description="Registered model in MLflow; not registered by default."
    )
    alias: str | None = Field(default=None, description="Alias to set on the model version.")
    tags: dict[str, str] = Field(default={}, description="Tags of the model version.")
    tracking_uri: str | None = Field(
        default=None, description="MLflow tracking store; an embedded one by default."
    )
    registry_uri: str | None = Field(
        default=None, description="MLflow registry; the tracking store by default."
    )


@flow(name="convert-checkpoint", flow_run_name="{spec.source} to {spec.to}", result_serializer="json")
def convert_checkpoint(spec: ConvertSpec) -> dict[str, Any]:
    """Convert a checkpoint, verify, register and record it.

    Returns:
        JSON values: `detection`, `plan`, `receipt`, `verification`, `registration` (the last two None where they
        were not asked for) and `lineage`.
    """
    try:
        done = _chain(spec)
    except WherryError as error:
        rows = [
            {"what": name, "value": str(value)}
            for name, value in error.to_json().items()
            if value is not None
        ]
        create_table_artifact(rows, key="wherry-failure", description=f"{spec.source} was not converted")
        raise
    create_table_artifact(summary(done), key="wherry-conversion", description=f"{spec.source} to {spec.to}")
    page = done["registration"] and done["registration"]["page"]
    if page:
        text = f"{spec.model_name} version {done['registration']['version']}"
        create_link_artifact(page, link_text=text, key="wherry-model-version", description="In the MLflow UI")
    return done


def _chain(spec: ConvertSpec) -> dict[str, Any]:
    """The steps. What `detect` chose is what all others take: a run may get a newer step meanwhile."""
    found = detect(spec.source, format=spec.format, step=spec.step, item=spec.item)
    source, chosen = found["uri"], _chosen(spec)
    planned = plan(source, spec.target, spec.to, **chosen)
    receipt = convert(
        source, spec.target, spec.to, if_exists=spec.if_exists, into=spec.into, meta=spec.meta, **chosen
    )
    uri = receipt["target"]["uri"]
    verified = None if spec.verify == "none" else verify(uri, level=spec.verify)
    registered = None
    if spec.model_name is not None:
        registered = register(
            uri, spec.model_name, spec.alias, spec.tracking_uri, spec.registry_uri, spec.tags
        )
    return {
        "detection": found,
        "plan": planned,
        "receipt": receipt,
        "verification": verified,
        "registration": registered,
        "lineage": lineage(receipt),
    }


def _chosen(spec: ConvertSpec) -> dict[str, Any]:
    """What plan and convert must be told alike, for one plan digest."""
    return {
        "options": spec.options,
        "format": spec.format,
        "only": spec.only,
        "ignore": spec.ignore,
        "memory": spec.memory,
        "verify": "digest" if spec.read_back else "none",
    }


def summary(done: dict[str, Any]) -> list[dict[str, str]]:
    """The flow's result as rows of (what, value)."""
    receipt, source, target = done["receipt"], done["receipt"]["source"], done["receipt"]["target"]
    seconds = max(receipt["seconds"], 1e-9)
    rows = {
        "source": source["uri"],
        "source format": f"{source['format']} ({source['format_version']})",
        "source digest": source["checkpoint_digest"],
        "target": target["uri"],
        "target format": f"{target['format']} ({target['format_version']})",
        "target digest": target["checkpoint_digest"],
        "tensors": f"{target['tensors']}, {target['parameters']:,} parameters",
        "moved": f"{show_size(receipt['bytes_written'])} in {show_seconds(seconds)}",
        "rate": f"{show_size(receipt['bytes_written'] / seconds)}/s",
        "lossless": "yes" if receipt["lossless"] else "no",
        "already there": "yes" if receipt["already"] else "no",
        "plan": receipt["plan_digest"],
        "lineage": f"{len(done['lineage']['nodes'])} checkpoints, {len(done['lineage']['edges'])} conversions",
    }
    if done["verification"]:
        rows["verified"] = f"{done['verification']['verdict']} at level {done['verification']['level']}"
    if done["registration"]:
        row = done["registration"]
        rows["model version"] = f"{row['name']} {row['version']} in {row['registry']}"
    return [{"what": what, "value": value} for what, value in rows.items()]
