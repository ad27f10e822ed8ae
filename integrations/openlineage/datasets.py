"""Checkpoints as OpenLineage datasets: their names, and the facets that describe them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wherry.core.digest import algorithm_of, digits_of
from wherry.core.keypath import render
from wherry.core.receipt import CheckpointRef
from wherry.errors import UsageError
from wherry.layout.spelling import NAMES, RENAMED
from wherry.store.local_store import locate
from wherry.store.sidecar import Sidecar
from wherry.version import __version__

SPEC = "2-0-2"
PRODUCER = f"urn:wherry:{__version__}"
MOST_FIELDS = 5000  # tensors that a schema lists; servers refuse events of many megabytes
_CORE = ("RunFacet", "JobFacet", "DatasetFacet")


def facet(name: str, release: str, **fields: Any) -> dict[str, Any]:
    """A facet with the required fields: its producer and the URL of its schema.

    Args:
        name: name in the specification; the base kinds are for custom facets.
        release: release of its schema.
        fields: its contents; fields without a value are left out.
    """
    file = "OpenLineage.json" if name in _CORE else f"facets/{release}/{name}.json"
    where = f"{SPEC}/{file}" if name in _CORE else file
    url = f"https://openlineage.io/spec/{where}#/$defs/{name}"
    return {"_producer": PRODUCER, "_schemaURL": url, **{k: v for k, v in fields.items() if v is not None}}


def place_identifier(uri: str) -> dict[str, Any]:
    """Namespace and name of a place, as in the specification: `gs://bucket` or `file`, and the path.

    A place in a store whose package is not installed is named by its URI.
    """
    try:
        location = locate(uri)
    except (UsageError, ImportError):
        scheme, _, rest = uri.partition("://")
        return {"namespace": scheme or "file", "name": rest or uri}
    if location.store.capabilities.local:
        return {"namespace": "file", "name": location.path}
    bucket, _, path = location.path.lstrip("/").partition("/")
    return {"namespace": f"{location.store.protocol}://{bucket}", "name": path or "/"}


def identify(digest: str) -> dict[str, str]:
    """A checkpoint's name that does not depend on its place: its digest, in the namespace of the algorithm."""
    return {"namespace": f"wherry://{algorithm_of(digest)}", "name": digits_of(digest)}


def describe_dataset(
    reference: CheckpointRef, tensors: dict[str, Any], *, size: int | None = None
) -> dict[str, Any]:
    """A checkpoint as a dataset.

    Args:
        reference: the checkpoint.
        tensors: facets about its tensors.
        size: bytes written, for an output.
    """
    name = place_identifier(reference.uri)
    alias = {**identify(reference.checkpoint_digest), "type": "CHECKPOINT"}
    layer = "file" if name["namespace"] == "file" else name["namespace"].partition("://")[0]
    own = facet(
        "DatasetFacet",
        SPEC,
        checkpointDigest=reference.checkpoint_digest,
        weightsDigest=reference.weights_digest,
        fingerprint=reference.fingerprint,
        format=reference.format,
        formatVersion=reference.format_version,
        kind=reference.kind,
        step=reference.step,
        tensors=reference.tensors,
        parameters=reference.parameters,
        bytes=reference.nbytes,
    )
    facets = {
        "version": facet("DatasetVersionDatasetFacet", "1-0-1", datasetVersion=reference.checkpoint_digest),
        "storage": facet("StorageDatasetFacet", "1-0-1", storageLayer=layer, fileFormat=reference.format),
        "symlinks": facet("SymlinksDatasetFacet", "1-0-1", identifiers=[alias]),
        "wherry_checkpoint": own,
        **tensors,
    }
    written = facet("OutputStatisticsOutputDatasetFacet", "1-0-2", size=size)
    statistics = {} if size is None else {"outputFacets": {"outputStatistics": written}}
    return {**name, "facets": facets, **statistics}


def schema_of(sidecar: Sidecar | None) -> dict[str, Any]:
    """The tensors as the fields of a schema; empty without a manifest, or with more tensors than servers accept."""
    if sidecar is None or len(sidecar.manifest.tensors) > MOST_FIELDS:
        return {}
    digests = sidecar.manifest.digests
    fields = [
        {
            "name": spec.name,
            "type": f"{spec.dtype}[{','.join(map(str, spec.shape))}]",
            **({"description": f"tensor digest {digests[path]}"} if path in digests else {}),
        }
        for path, spec in sorted(sidecar.manifest.tensors.items())
    ]
    return {"schema": facet("SchemaDatasetFacet", "1-2-0", fields=fields)}


def lineage_of_tensors(sidecar: Sidecar | None, source: CheckpointRef) -> dict[str, Any]:
    """Map tensors to their source tensors, if a conversion changed key paths and its record has the mapping.

    If a layout split, joined or transposed tensors, the receipt has no such record; then there is no facet rather than
    a wrong one.
    """
    receipt = sidecar.receipt if sidecar else None
    if sidecar is None or receipt is None or len(sidecar.manifest.tensors) > MOST_FIELDS:
        return {}
    before = _former_names(sidecar, receipt.options)
    kind = "IDENTITY" if receipt.lossless else "TRANSFORMATION"
    place = place_identifier(source.uri)
    fields = {
        spec.name: {
            "inputFields": [
                {
                    **place,
                    "field": before[spec.name],
                    "transformations": [{"type": "DIRECT", "subtype": kind}],
                }
            ]
        }
        for spec in sidecar.manifest.tensors.values()
        if before.get(spec.name, spec.name) != spec.name
    }
    return {"columnLineage": facet("ColumnLineageDatasetFacet", "1-2-0", fields=fields)} if fields else {}


def _former_names(sidecar: Sidecar, options: Mapping[str, Any]) -> dict[str, str]:
    """Printed key path → key path in the source, if the record has the mapping."""
    noted = sidecar.manifest.origin.get(NAMES)
    if isinstance(noted, dict):
        return {new: old for old, new in noted[RENAMED].items()}
    if RENAMED in options:
        return {new: old for old, new in options[RENAMED].items()}
    split = options.get("split")
    return {render(path): render((split.join(path),)) for path in sidecar.manifest.tensors} if split else {}
