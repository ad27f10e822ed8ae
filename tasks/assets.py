"""assets, as tasks: report a conversion to Prefect as the materialization of one asset from another.

The events are `prefect.asset.materialization.succeeded` for the target, with the source as its dependency. A server
deletes them with its other events, so they are only an export; the record of truth is the ledger.

Facts (Prefect 3.8): the key of an asset is a URI of at most 512 characters without `%`, spaces, quotes and brackets;
dependencies are an argument of the task, so each conversion makes a separate task.
"""

from __future__ import annotations

import hashlib
from typing import Any
from urllib.parse import quote

from prefect.assets import Asset, AssetProperties, add_asset_metadata, materialize

from wherry.core.units import plural
from wherry.store.home import without_secrets
from wherry.tasks.common import run_logger

_LONGEST = 512  # characters of a key
_KEPT = (
    "/:@-._~!$*+,"  # allowed in a key besides letters and digits; other bytes become `=` and two hex digits
)
_FACTS = (
    "format",
    "format_version",
    "checkpoint_digest",
    "weights_digest",
    "kind",
    "step",
    "tensors",
    "nbytes",
)


def asset_events(receipt: dict[str, Any]) -> None:
    """Report to Prefect that a conversion made one asset from another; call it in a flow, after the conversion.

    A failure of Prefect does not fail the finished conversion: it is logged.

    Args:
        receipt: JSON form of a receipt.
    """
    source, target = asset_of(receipt["source"]), asset_of(receipt["target"])
    facts = {name: receipt["target"][name] for name in _FACTS if receipt["target"].get(name) is not None}
    facts |= {name: receipt[name] for name in ("plan_digest", "lossless", "seconds", "bytes_written")}

    @materialize(target, asset_deps=[source], by="wherry", name="asset", persist_result=False)
    def tell(metadata: dict[str, Any]) -> None:
        add_asset_metadata(target, metadata)

    try:
        tell(facts)
    except Exception as error:  # noqa: BLE001  any failure of a client is only a failure to report
        run_logger().warning("could not record the asset in Prefect: %s", error)


def asset_of(reference: dict[str, Any]) -> Asset:
    """A checkpoint as an asset.

    Args:
        reference: JSON form of a CheckpointRef.
    """
    name = reference["uri"].rstrip("/").rsplit("/", 1)[-1]
    step = "" if reference.get("step") is None else f", step {reference['step']}"
    words = f"{reference['format']}, {reference['kind']}, {plural(reference['tensors'], 'tensor')}{step}"
    return Asset(
        key=asset_key(reference["uri"]), properties=AssetProperties(name=name[:200], description=words)
    )


def asset_key(uri: str) -> str:
    """The URI of a checkpoint as an asset key: with a scheme, quoted, without secrets, within the length limit."""
    scheme, separator, path = without_secrets(uri).partition("://")
    quoted = quote(path if separator else uri, safe=_KEPT).replace("%", "=")
    whole = f"{scheme.lower() if separator else 'file'}://{quoted}"
    if len(whole) <= _LONGEST:
        return whole
    mark = hashlib.sha256(whole.encode()).hexdigest()[:16]
    return f"{whole[: _LONGEST - 17]}-{mark}"
