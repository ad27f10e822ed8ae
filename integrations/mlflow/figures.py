"""figures: what the pages of a run and of a version tell a person: parameters, metrics, the source, and a description.

Facts (MLflow 3.17):
- A metric with a `model_id` is shown on the page of that logged model too.
- The digest of a dataset has at most 36 characters, its name 500.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping

from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param

from wherry.core.digest import algorithm_of
from wherry.core.receipt import CheckpointRef
from wherry.errors import printable
from wherry.models.register import VersionFacts
from wherry.store.sidecar import Sidecar

LINEAGE_TAG = "wherry.lineage_page"
RUN_PAGE_TAG = "wherry.prefect_run"
_DATASET_NAME, _DATASET_DIGEST = 500, 36


def params_of(sidecar: Sidecar) -> list[Param]:
    """The parameters of a run: formats, family, data types, and every option of the conversion as `options.NAME`."""
    subject, receipt = sidecar.checkpoint, sidecar.receipt
    values: dict[str, object] = {
        "format": subject.format,
        "format_version": subject.format_version,
        "kind": subject.kind,
        "step": subject.step,
        "dtype": dtypes_of(sidecar),
    }
    if receipt is not None:
        values |= {"source_format": receipt.source.format, "family": receipt.family}
        values |= {name: receipt.requested.get(name) for name in ("only", "ignore")}
        stated = receipt.requested.get("options")
        # Those in force, defaults included, and those that were stated for the layout.
        options = {**(stated if isinstance(stated, dict) else {}), **receipt.options}
        values |= {f"options.{name}": value for name, value in options.items()}
    return [Param(name, _text(value)) for name, value in values.items() if value not in (None, "", [])]


def dtypes_of(sidecar: Sidecar) -> str:
    """The data types of the tensors, those of the most elements first."""
    elements = Counter[str]()
    for tensor in sidecar.manifest.tensors.values():
        elements[tensor.dtype] += tensor.size
    return ", ".join(name for name, _ in elements.most_common())


def metrics_of(sidecar: Sidecar, facts: VersionFacts, model_id: str) -> list[Metric]:
    """The metrics of a run and its logged model: sizes; of a conversion also its time, and the error if it is known."""
    subject, receipt = sidecar.checkpoint, sidecar.receipt
    values: dict[str, float | None] = {
        "bytes": subject.nbytes,
        "tensors": subject.tensors,
        "parameters": subject.parameters,
        "max_error": facts.max_error,
    }
    if receipt is not None:
        values |= {"seconds": receipt.seconds, "bytes_written": receipt.bytes_written}
    now = int(time.time() * 1000)
    return [
        Metric(name, float(value), now, subject.step or 0, model_id=model_id)
        for name, value in values.items()
        if value is not None
    ]


def source_dataset(source: CheckpointRef) -> DatasetInput:
    """The source of a conversion as a dataset of the run, by reference."""
    algorithm = algorithm_of(source.checkpoint_digest)
    digest = source.checkpoint_digest.removeprefix(f"{algorithm}:")
    name = source.uri.rstrip("/").rsplit("/", 1)[-1] or source.format
    profile = {"tensors": source.tensors, "parameters": source.parameters, "bytes": source.nbytes}
    dataset = Dataset(
        name=printable(name)[:_DATASET_NAME],
        digest=digest[:_DATASET_DIGEST],
        source_type="wherry",
        source=json.dumps({"uri": source.uri, "checkpoint_digest": source.checkpoint_digest}),
        schema=json.dumps({"format": source.format, "kind": source.kind}),
        profile=json.dumps(profile),
    )
    return DatasetInput(dataset, [InputTag("mlflow.data.context", "source")])


def description(tags: Mapping[str, str]) -> str:
    """Description on the version's page: what it is, and how to fetch it."""
    version = f" ({tags['wherry.format_version']})" if tags["wherry.format_version"] else ""
    made = f", converted from `{_code(tags['wherry.source_uri'])}`" if "wherry.source_uri" in tags else ""
    lines = [f"Checkpoint in format {tags['wherry.format']}{version}{made}. Fetch and verify it:"]
    lines.append(f"```\n{_code(tags['wherry.fetch'])}\n```")
    if "wherry.load" in tags:
        code = printable(tags["wherry.load"], lines=True).replace("`", "'")
        lines.append(f"Load it from `{_code(tags['wherry.uri'])}`:\n```\n{code}\n```")
    links = {"Prefect flow run": tags.get(RUN_PAGE_TAG), "lineage": tags.get(LINEAGE_TAG)}
    shown = [
        f"[{text}](<{printable(url)}>)" for text, url in links.items() if url and not set("<>") & set(url)
    ]
    lines += [f"See also: {', '.join(shown)}."] if shown else []
    return "\n\n".join(lines)


def _code(text: str) -> str:
    """A text for a code span of Markdown, which names of checkpoints must not end."""
    return printable(text).replace("`", "'")


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else json.dumps(value, default=str)
