"""The convert flow: detect → plan → convert → verify → register → lineage, for one checkpoint.

Load it as `flows/convert.py:convert_checkpoint` or `wherry.flows.convert.convert_checkpoint`. It may be run again
after a crash: a finished conversion is recognised, and a registered version is found. A failure ends the flow as
Failed, with the error's text and cure in the state's message and in a table artifact.
"""

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

from prefect import flow
from prefect.artifacts import create_link_artifact, create_table_artifact
from prefect.client.orchestration import get_client
from prefect.concurrency.sync import concurrency
from prefect.context import FlowRunContext, TaskRunContext
from prefect.exceptions import ObjectAlreadyExists

from wherry.config import load_config
from wherry.errors import WherryError
from wherry.flows.convert_spec import ConvertSpec, TargetSpec
from wherry.stores import limits_of
from wherry.tasks.assets import asset_events
from wherry.tasks.common import show_failure
from wherry.tasks.convert import convert
from wherry.tasks.detect import detect
from wherry.tasks.ending import ending
from wherry.tasks.lineage import lineage
from wherry.tasks.plan import plan
from wherry.tasks.register import register
from wherry.tasks.verify import verify
from wherry.units import show_seconds, show_size
from wherry.verified import comparison

__all__ = ["ConvertSpec", "TargetSpec", "chain", "convert_checkpoint", "summary"]

LIMIT = "wherry-io-"  # global concurrency limits are called this and the store


@flow(name="convert-checkpoint", flow_run_name="{spec.source} to {spec.to}", result_serializer="json")
def convert_checkpoint(spec: ConvertSpec) -> dict[str, Any]:
    """Convert a checkpoint, verify, register and record it.

    Returns:
        JSON values: `detection`, and for the first target `plan`, `receipt`, `verification`, `registration` (the last
        two None where they were not asked for) and `lineage`; in `further` the same for each further target.
    """
    with ending("convert-checkpoint", f"Conversion of {spec.source}", only_failures=True) as end:
        try:
            done = chain(spec)
        except WherryError as error:
            show_failure(error, f"{spec.source} was not converted")
            raise
        for one in (done, *done["further"]):
            _show(spec, one)
        end.counts = {"converted": len(spec.targets)}
    return done


def chain(spec: ConvertSpec) -> dict[str, Any]:
    """The steps, as tasks of the flow or task that calls it; see `convert_checkpoint`.

    What `detect` chose is what all others take: a run may get a newer step meanwhile.
    """
    found = detect(spec.source, format=spec.format, step=spec.step, item=spec.item, opaque=spec.opaque)
    source, common = found["uri"], _common(spec)
    plans = [_planned(source, one, common) for one in spec.targets]
    with _turn([source, *(one.target for one in spec.targets)]):
        receipts = convert(
            source, [one.engine() for one in spec.targets],
            if_exists=spec.if_exists, meta=spec.meta, as_step=spec.as_step, sign=spec.sign, **common,
        )  # fmt: skip
    made = [
        {"plan": planned, **_after(spec, one, receipt)}
        for one, planned, receipt in zip(spec.targets, plans, receipts, strict=True)
    ]
    return {"detection": found, **made[0], "further": made[1:]}


@contextmanager
def _turn(uris: Iterable[str]) -> Generator[None]:
    """Wait until each of the stores may take one more conversion, and occupy it, by the limits that are stated.

    Every flow converts through here, so the limits hold over all of them. Outside of a run there is no server that
    counts, and nothing is waited for.
    """
    stated = load_config().settings.concurrency
    limits = {LIMIT + store: stated[store] for store in limits_of(uris, stated)}
    if not limits or (FlowRunContext.get() is None and TaskRunContext.get() is None):
        yield
        return
    _make_limits(limits)
    with concurrency(list(limits), occupy=1):
        yield


def _make_limits(limits: Mapping[str, int]) -> None:
    """The global concurrency limits that the configuration states, made or set on the server."""
    with get_client(sync_client=True) as client:
        for name, limit in limits.items():
            try:
                client.upsert_global_concurrency_limit_by_name(name, limit)
            except ObjectAlreadyExists:  # another run made it a moment ago; it is ours to set now
                client.upsert_global_concurrency_limit_by_name(name, limit)


def _after(spec: ConvertSpec, target: TargetSpec, receipt: dict[str, Any]) -> dict[str, Any]:
    """What follows the commit of one target."""
    uri = receipt["target"]["uri"]
    verified = None
    if spec.verify != "none":
        verified = verify(uri, **comparison(spec.verify, receipt["source"]["uri"], target.family_file))
    registered = None
    if target.model_name is not None:
        registered = register(
            uri, target.model_name, spec.alias, spec.tracking_uri, spec.registry_uri, spec.tags
        )
    asset_events(receipt)
    return {
        "receipt": receipt,
        "verification": verified,
        "registration": registered,
        "lineage": lineage(receipt),
    }


def _planned(source: str, target: TargetSpec, common: dict[str, Any]) -> dict[str, Any]:
    return plan(
        source,
        target.target,
        target.to,
        options=target.settings,
        only=target.only,
        wish=target.wish,
        **common,
    )


def _common(spec: ConvertSpec) -> dict[str, Any]:
    """What plan and convert must be told alike, for one plan digest."""
    return {
        "format": spec.format,
        "ignore": spec.ignore,
        "memory": spec.memory,
        "opaque": spec.opaque,
        "verify": "digest" if spec.read_back else "none",
    }


def _show(spec: ConvertSpec, done: dict[str, Any]) -> None:
    """The artifacts of one target."""
    reference = done["receipt"]["target"]
    create_table_artifact(
        summary(done), key="wherry-conversion", description=f"{spec.source} to {reference['format']}"
    )
    row = done["registration"]
    if row and row["page"]:
        text = f"{row['name']} version {row['version']}"
        create_link_artifact(
            row["page"], link_text=text, key="wherry-model-version", description="In the MLflow UI"
        )


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
