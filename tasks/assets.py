"""assets, as tasks: a conversion as Prefect's own materialization of one asset from another.

The events are `prefect.asset.materialization.succeeded` for the target, with the source as its dependency; a server
keeps them as long as its events, so they are a free export and never the truth, which is the ledger.

Facts (Prefect 3.8): the key of an asset is a URI of at most 512 characters without `%`, spaces, quotes and brackets;
what depends on what is an argument of the task, so that each conversion makes a task of its own.
"""

from __future__ import annotations

import hashlib
from typing import Any
from urllib.parse import quote

from prefect.assets import Asset, AssetProperties, add_asset_metadata, materialize

from wherry.storage.home import without_secrets
from wherry.tasks.common import run_logger

_LONGEST = 512  # characters of a key
_KEPT = (
    "/:@-._~!$*+,"  # what a key may hold besides letters and digits; the rest becomes `=` and two hex digits
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
    """Report to Prefect that a conversion derived one asset from another; call it in a flow, after the conversion.

    Prefect not taking it is no reason to fail a conversion that is done: that is logged.

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
        run_logger().warning("the asset was not recorded by Prefect: %s", error)


def asset_of(reference: dict[str, Any]) -> Asset:
    """A checkpoint as an asset.

    Args:
        reference: JSON form of a CheckpointRef.
    """
    name = reference["uri"].rstrip("/").rsplit("/", 1)[-1]
    step = "" if reference.get("step") is None else f", step {reference['step']}"
    words = f"{reference['format']}, {reference['kind']}, {reference['tensors']} tensors{step}"
    return Asset(
        key=asset_key(reference["uri"]), properties=AssetProperties(name=name[:200], description=words)
    )


def asset_key(uri: str) -> str:
    """The URI of a checkpoint as Prefect takes it: with a scheme, quoted, without secrets, and not too long."""
    scheme, separator, path = without_secrets(uri).partition("://")
    quoted = quote(path if separator else uri, safe=_KEPT).replace("%", "=")
    whole = f"{scheme.lower() if separator else 'file'}://{quoted}"
    if len(whole) <= _LONGEST:
        return whole
    mark = hashlib.sha256(whole.encode()).hexdigest()[:16]
    return f"{whole[: _LONGEST - 17]}-{mark}"
