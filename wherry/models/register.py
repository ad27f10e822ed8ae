"""register: put a checkpoint into a model registry by reference; no tensor byte is copied or read.

The identity of a version is (model name, checkpoint digest): registering again gives the same version. The ledger
is told before and after, so that a crash in between leaves a claim that the next call completes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from wherry.config.settings import mlflow_registry_uri, mlflow_tracking_uri
from wherry.core.receipt import Receipt
from wherry.core.services import service
from wherry.errors import NotFoundError, UsageError, WherryError
from wherry.ledger.resolve import checkpoint_uri, proved_sidecar
from wherry.storage.home import without_secrets

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from wherry.storage.sidecar import Sidecar

RESERVED = "wherry."


@dataclass(frozen=True, slots=True)
class Registration:
    """A version of a registered model.

    Attributes:
        name: the registered model.
        version: its version, as the registry counts.
        uri: the checkpoint.
        checkpoint_digest: its identity.
        created: False where the version was there already.
        registry: the registry, without user, password or query.
        page: where a browser shows the version; None where no server is known.
    """

    name: str
    version: str
    uri: str
    checkpoint_digest: str
    created: bool
    registry: str
    page: str | None


def register(
    uri_or_receipt: str | os.PathLike[str] | Receipt,
    name: str,
    *,
    alias: str | None = None,
    tracking_uri: str | None = None,
    registry_uri: str | None = None,
    tags: Mapping[str, str] | None = None,
) -> Registration:
    """Register a checkpoint that has a sidecar.

    Args:
        uri_or_receipt: the checkpoint, a run folder, a model URI, or the receipt of the conversion that made it.
        name: the registered model; made where there is none.
        alias: set on the version, and taken from any other version of the model.
        tracking_uri: MLflow store for the run that holds receipt and manifest; `MLFLOW_TRACKING_URI`, or a SQLite
            file in the home by default.
        registry_uri: MLflow registry; `MLFLOW_REGISTRY_URI`, or where the runs go by default.
        tags: further tags of the version.

    Raises:
        NotFoundError: nothing is there, or it has no sidecar.
        MismatchError: its sidecar was altered.
        UsageError: a tag of our own namespace, or a name or alias that MLflow does not take.
        MissingExtraError: mlflow is not installed.
        StorageError: the registry or the ledger cannot be reached or written.
    """
    reserved = sorted(key for key in tags or {} if key.startswith(RESERVED))
    if reserved:
        raise UsageError(f"tag {reserved[0]!r} is set by wherry", cure=f"choose a name without {RESERVED!r}")
    uri, sidecar = _subject(uri_or_receipt)
    tracking = tracking_uri or mlflow_tracking_uri()
    registry = registry_uri or (tracking if tracking_uri else mlflow_registry_uri())
    return enter(
        uri, sidecar, name, alias=alias, tags=tags or {}, tracking_uri=tracking, registry_uri=registry
    )


def enter(
    uri: str,
    sidecar: Sidecar,
    name: str,
    *,
    alias: str | None,
    tags: Mapping[str, str],
    tracking_uri: str,
    registry_uri: str,
) -> Registration:
    """Register a checkpoint whose sidecar has been read; as `register`, with any tags and both stores given."""
    from wherry.ledger.record import claim_registration, drop_claim, open_ledger, record_registration

    mlflow, registry = service("mlflow"), without_secrets(registry_uri)
    stores = {"tracking_uri": tracking_uri, "registry_uri": registry_uri}
    with open_ledger() as ledger:
        claim_registration(ledger, sidecar.checkpoint, registry, name)
        try:
            # what this attempt creates is taken back where the ledger fails
            with mlflow.registering(sidecar, uri, name, alias=alias, tags=tags, **stores) as done:
                record_registration(ledger, sidecar.checkpoint, registry, name, done.version)
        except WherryError:
            drop_claim(ledger, sidecar.checkpoint, registry, name)
            raise
    digest = sidecar.checkpoint.checkpoint_digest
    return Registration(name, done.version, uri, digest, done.created, registry, done.page)


def _subject(uri_or_receipt: str | os.PathLike[str] | Receipt) -> tuple[str, Sidecar]:
    """Where the checkpoint lies, and its sidecar."""
    from wherry.formats.detect import resolve

    asked = uri_or_receipt.target.uri if isinstance(uri_or_receipt, Receipt) else uri_or_receipt
    location, _found = resolve(checkpoint_uri(asked))
    sidecar = proved_sidecar(location, "register")
    if isinstance(uri_or_receipt, Receipt):
        _require_same(uri_or_receipt, sidecar, location.uri)
    return location.uri, sidecar


def _require_same(receipt: Receipt, sidecar: Sidecar, uri: str) -> None:
    if receipt.target.checkpoint_digest != sidecar.checkpoint.checkpoint_digest:
        raise NotFoundError(
            "the checkpoint of this receipt is not there any more; another one is",
            uri=uri,
            cure="register by the URI, if the one that is there now is meant",
            stage="register",
        )
