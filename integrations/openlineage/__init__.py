"""OpenLineage: the ledger's statements as run events, for a file (JSON lines) or a server (HTTP).

The events follow the published specification directly, without the OpenLineage package:
- Run event 2-0-2: `eventTime`, `producer`, `schemaURL`, `eventType`, `run`, `job`, `inputs`, `outputs`.
- A conversion is a START at its beginning and a COMPLETE at its end, with one `runId` that is derived from the
  statement's hash, so that readers see an event that is delivered twice as one run. Other statements are one event; a
  verification that did not pass, and a conversion that failed, is a FAIL with the facet `errorMessage`.
- A dataset is named by its store and path (`gs://bucket` and `path`; `file` and the absolute path). Its version is
  the checkpoint digest; tensors are the fields of its schema, and if key paths were changed, `columnLineage` maps each
  tensor to its source tensor. Both are read from the sidecar if it still exists.
- The custom facets `wherry_checkpoint` and `wherry_statement` have digests, plan, exactness and the ledger position.

Servers: `http(s)://host` stands for the path `/api/v1/lineage` on that host; `OPENLINEAGE_API_KEY` is sent as a bearer
token, as in OpenLineage's own clients.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from wherry.config.settings import configured_value
from wherry.core.receipt import CheckpointRef, utc_now
from wherry.errors import WherryError
from wherry.integrations.openlineage.datasets import (
    PRODUCER,
    SPEC,
    describe_dataset,
    facet,
    identify,
    lineage_of_tensors,
    place_identifier,
    schema_of,
)
from wherry.integrations.openlineage.transport import transport
from wherry.ledger.replay import has_failed
from wherry.ledger.statements import Statement
from wherry.store.local_store import locate
from wherry.store.sidecar import Sidecar, read_sidecar
from wherry.version import __version__

NAMESPACE = "wherry"
_RUNS = uuid.UUID(
    "5f1c2f0e-8f0b-5d6a-9c55-0f2f5c7d3a11"
)  # wherry's namespace for run ids that are derived from hashes
# kind of a statement about one checkpoint → job.
_JOBS = {"registration": "register", "promotion": "promote", "rollback": "rollback", "deletion": "prune"}


def projection(destination: str) -> Callable[[Statement], bool]:
    """Make a function that takes statements one by one and returns whether it sent an event.

    Raises:
        UsageError: the destination is neither a path nor an http(s) URL.
        StorageError: an event could not be delivered; raised when a statement is taken.
    """
    send, namespace = transport(destination), _namespace()

    def take(statement: Statement) -> bool:
        found = [_within(namespace, event) for event in events(statement)]
        if found:
            send(found)
        return bool(found)

    return take


def events(statement: Statement) -> Iterator[dict[str, Any]]:
    """The run events of a statement; none for claims, sightings and other statements that concern only the ledger."""
    if statement.kind == "conversion":
        yield from _conversion(statement)
    elif statement.kind == "verification":
        yield _verification(statement)
    elif statement.kind in _JOBS:
        yield _about(statement)


def report_failure(
    destination: str, error: WherryError, source: str, target: str, to: str, started: str
) -> None:
    """Report a conversion that failed: START and FAIL of one run.

    Args:
        destination: see `projection`.
        error: the error of the conversion.
        source, target: URIs.
        to: the target's format.
        started: when the conversion began; UTC.

    Raises:
        StorageError: the events could not be delivered.
    """
    run = {"runId": str(uuid.uuid4()), "facets": {**_engine(__version__), **_error(error.what)}}
    job = _job("convert", f"to {to}")
    ends = {"inputs": [place_identifier(source)], "outputs": [place_identifier(target)]}
    began = {**run, "facets": _engine(__version__)}
    reported = _event("START", started, began, job, **ends), _event("FAIL", utc_now(), run, job, **ends)
    transport(destination)([_within(_namespace(), event) for event in reported])


def _namespace() -> str:
    """The namespace of the jobs, from the section `[openlineage]` of `wherry.toml`."""
    return str(configured_value("openlineage.namespace") or NAMESPACE)


def _within(namespace: str, event: dict[str, Any]) -> dict[str, Any]:
    return {**event, "job": {**event["job"], "namespace": namespace}}


def _conversion(statement: Statement) -> Iterator[dict[str, Any]]:
    body = statement.body
    source, target = _reference(body["source"]), _reference(body["target"])
    converted, original = _sidecar(target), _sidecar(source)
    parents = [_reference(row["checkpoint"]) for row in body.get("parents", ())]
    inputs = [describe_dataset(source, schema_of(original))]
    inputs += [describe_dataset(one, schema_of(_sidecar(one))) for one in parents[1:]]
    tensors = {**schema_of(converted), **({} if parents else lineage_of_tensors(converted, source))}
    outputs = [describe_dataset(target, tensors, size=target.nbytes)]
    run = _run(statement, str(body["software"].get("wherry", "unknown")))
    job = _job("convert", f"{source.format} to {target.format}")
    ends = {"inputs": inputs, "outputs": outputs}
    yield _event("START", body["started"] or statement.time, run, job, **ends)
    yield _event("COMPLETE", body["finished"] or statement.time, run, job, **ends)


def _verification(statement: Statement) -> dict[str, Any]:
    outcome = statement.body["verification"]
    wrong = has_failed(outcome)
    run = _run(statement)
    if wrong:
        run["facets"] |= _error(f"verification failed: {outcome.get('verdict', 'failed')}{_first(outcome)}")
    job = _job("verify", str(outcome.get("level", "")))
    return _event("FAIL" if wrong else "COMPLETE", statement.time, run, job, inputs=_subjects(statement))


def _first(outcome: Mapping[str, Any]) -> str:
    """The first tensor that failed, from a verification's JSON form."""
    tensors = outcome.get("tensors")
    failed = tensors.get("failed") if isinstance(tensors, dict) else None
    return f": {failed[0]['path']}: {failed[0]['reason']}" if failed else ""


def _about(statement: Statement) -> dict[str, Any]:
    """One event about one checkpoint: its output is the registered version, or its end."""
    body, job = statement.body, _job(_JOBS[statement.kind], str(statement.body.get("name", "")))
    subjects = _subjects(statement)
    if statement.kind == "deletion":
        gone = facet("LifecycleStateChangeDatasetFacet", "1-0-1", lifecycleStateChange="DROP")
        outputs = [
            {**one, "facets": {**one.get("facets", {}), "lifecycleStateChange": gone}} for one in subjects
        ]
        return _event("COMPLETE", statement.time, _run(statement), job, outputs=outputs)
    parts = [str(body[name]) for name in ("name", "version") if body.get(name)]
    name = f"models:/{'/'.join(parts) or 'unknown'}"
    model = {"namespace": str(body.get("registry") or NAMESPACE), "name": name}
    return _event("COMPLETE", statement.time, _run(statement), job, inputs=subjects, outputs=[model])


def _subjects(statement: Statement) -> list[dict[str, Any]]:
    """The checkpoint that a statement is about; the deletion that a rebuild recovers has only its digest."""
    body = statement.body
    if body.get("subject"):
        return [describe_dataset(_reference(body["subject"]), {})]
    digest = body.get("checkpoint_digest")
    return [identify(digest)] if digest else []


def _run(statement: Statement, engine: str | None = None) -> dict[str, Any]:
    body = statement.body
    facts = {
        "kind": statement.kind,
        "statement": statement.seq,
        "hash": statement.hash,
        **{
            name: body[name]
            for name in ("lossless", "options", "verification", "seconds", "group")
            if name in body
        },
        **({"planDigest": body["plan_digest"]} if "plan_digest" in body else {}),
    }
    own = facet("RunFacet", SPEC, **facts)
    facets = {**_engine(engine or __version__), "wherry_statement": own}
    return {"runId": str(uuid.uuid5(_RUNS, statement.hash)), "facets": facets}


def _engine(engine: str) -> dict[str, Any]:
    row = facet("ProcessingEngineRunFacet", "1-1-1", version=engine, openlineageAdapterVersion=__version__)
    return {"processing_engine": {**row, "name": "wherry"}}


def _error(message: str) -> dict[str, Any]:
    row = facet("ErrorMessageRunFacet", "1-0-1", message=message, programmingLanguage="Python")
    return {"errorMessage": row}


def _job(verb: str, more: str) -> dict[str, Any]:
    kind = facet(
        "JobTypeJobFacet", "2-0-4", processingType="BATCH", integration="WHERRY", jobType=verb.upper()
    )
    return {"namespace": NAMESPACE, "name": f"{verb} {more}".strip(), "facets": {"jobType": kind}}


def _event(
    kind: str, time: str, run: Mapping[str, Any], job: Mapping[str, Any], **ends: Any
) -> dict[str, Any]:
    return {
        "eventType": kind,
        "eventTime": time,
        "producer": PRODUCER,
        "schemaURL": f"https://openlineage.io/spec/{SPEC}/OpenLineage.json#/$defs/RunEvent",
        "run": dict(run),
        "job": dict(job),
        "inputs": ends.get("inputs", []),
        "outputs": ends.get("outputs", []),
    }


def _reference(row: Mapping[str, Any]) -> CheckpointRef:
    return CheckpointRef(**row)


def _sidecar(reference: CheckpointRef) -> Sidecar | None:
    """The sidecar of a checkpoint, if it is still the checkpoint that the statement is about."""
    try:
        location = locate(reference.uri)
        sidecar = read_sidecar(location) if location.exists() else None
    except WherryError:
        return None  # a sidecar that cannot be read is skipped; the statement's event is sent anyway
    same = sidecar is not None and sidecar.checkpoint.checkpoint_digest == reference.checkpoint_digest
    return sidecar if same else None
