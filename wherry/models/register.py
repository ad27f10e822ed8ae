"""register: put a checkpoint into a model registry by reference; no tensor byte is copied or read.

The identity of a version is (model name, checkpoint digest): registering again returns the same version. A claim is
recorded in the ledger before the version is created, so that the next call completes a registration that crashed.
The page of a version also has what its sidecar does not tell: what the ledger knows, and which run registers it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from wherry.core.lazy_dataclass import dataclass
from wherry.core.receipt import Receipt
from wherry.core.request import SourceRequest
from wherry.core.services import service
from wherry.credentials import redact_values
from wherry.errors import NotFoundError, UsageError, WherryError
from wherry.ledger.database import Ledger
from wherry.ledger.resolve import proved_sidecar, resolve_named, stores_of
from wherry.store.home import without_secrets
from wherry.store.sidecar import Sidecar

RESERVED = "wherry."


@dataclass(frozen=True, slots=True)
class Registration:
    """A version of a registered model.

    Attributes:
        name: the registered model.
        version: its version number in the registry.
        uri: the checkpoint.
        checkpoint_digest: its identity.
        created: False where the version existed already.
        registry: the registry, without user, password or query.
        page: URL of the version in a browser; None without a server.
    """

    name: str
    version: str
    uri: str
    checkpoint_digest: str
    created: bool
    registry: str
    page: str | None


def register(
    uri_or_receipt: str | os.PathLike[str] | Receipt | SourceRequest,
    model: str,
    *,
    alias: str | None = None,
    tracking_uri: str | None = None,
    registry_uri: str | None = None,
    tags: Mapping[str, str] | None = None,
    run_page: str | None = None,
) -> Registration:
    """Register a checkpoint that has a sidecar.

    Args:
        uri_or_receipt: the checkpoint, a run folder, a model URI, a request for it, or the receipt of the conversion
            that made it.
        model: the registered model; created if it does not exist.
        alias: set on the version, and taken from any other version of the model.
        tracking_uri: MLflow store for the run that holds receipt and manifest; `MLFLOW_TRACKING_URI`, or a SQLite
            file in the home by default.
        registry_uri: MLflow registry; `MLFLOW_REGISTRY_URI`, or the tracking store by default.
        tags: further tags of the version.
        run_page: URL of the workflow run that registers it, for a link on the version's page.

    Raises:
        NotFoundError: the checkpoint does not exist, or has no sidecar.
        MismatchError: its sidecar was altered.
        UsageError: a tag has a reserved name, or MLflow rejects the name or alias.
        MissingExtraError: mlflow is not installed.
        StorageError: the registry or the ledger cannot be reached or written.
    """
    from wherry.formats.detect import resolve_source

    reserved = sorted(key for key in tags or {} if key.startswith(RESERVED))
    if reserved:
        raise UsageError(
            f"reserved tag name {reserved[0]!r}", cure=f"choose a name that does not begin with {RESERVED!r}"
        )
    named = uri_or_receipt.target.uri if isinstance(uri_or_receipt, Receipt) else uri_or_receipt
    source = named if isinstance(named, SourceRequest) else SourceRequest(os.fspath(named))
    location, _found = resolve_source(resolve_named(source))
    sidecar = proved_sidecar(location, "register")
    digest = sidecar.checkpoint.checkpoint_digest
    if isinstance(uri_or_receipt, Receipt) and uri_or_receipt.target.checkpoint_digest != digest:
        raise NotFoundError(
            "digest mismatch: the URI of this receipt now holds another checkpoint",
            uri=location.uri,
            cure="pass the URI instead of the receipt to register the current checkpoint",
            stage="register",
        )
    return enter(
        location.uri,
        sidecar,
        model,
        alias=alias,
        tags=redact_values(tags or {}),
        run_page=run_page or "",
        **stores_of(tracking_uri, registry_uri),
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
    run_page: str = "",
) -> Registration:
    """Like `register`, for a checkpoint whose sidecar has been read, with any tags and explicit stores."""
    from wherry.ledger.record import claim_registration, drop_claim, open_ledger, record_registration

    mlflow, registry = service("mlflow"), without_secrets(registry_uri)
    stores = {"tracking_uri": tracking_uri, "registry_uri": registry_uri}
    with open_ledger() as ledger:
        claim_registration(ledger, sidecar.checkpoint, registry, name)
        try:
            details = {"facts": facts_of(ledger, sidecar, run_page), "alias": alias, "tags": tags}
            # the context removes what it has created where the ledger fails
            with mlflow.registering(sidecar, uri, name, **details, **stores) as done:
                record_registration(ledger, sidecar.checkpoint, registry, name, done.version)
        except WherryError:
            drop_claim(ledger, sidecar.checkpoint, registry, name)
            raise
    digest = sidecar.checkpoint.checkpoint_digest
    return Registration(name, done.version, uri, digest, done.created, registry, done.page)


@dataclass(frozen=True, slots=True)
class VersionFacts:
    """Facts about a version at the moment when it is registered.

    Attributes:
        verified: the last verification, for people: level, verdict and time; empty if none is recorded.
        max_error: largest error of a value; 0 after a lossless conversion, None if it is unknown.
        run_page: URL of the workflow run that registers it; empty if there is none.
    """

    verified: str = ""
    max_error: float | None = None
    run_page: str = ""


def facts_of(ledger: Ledger, sidecar: Sidecar, run_page: str = "") -> VersionFacts:
    """The facts that ledger and sidecar have about a checkpoint.

    Raises:
        StorageError: the ledger cannot be read.
    """
    return VersionFacts(_last_verification(ledger, sidecar), _max_error(ledger, sidecar), run_page)


def verified_words(level: str, verdict: str, time: str) -> str:
    """A verification in one line, such as `digest: ok, 2026-11-23 21:04 UTC`; the time is in UTC."""
    return f"{level}: {verdict}, {time[:16].replace('T', ' ')} UTC"


def _last_verification(ledger: Ledger, sidecar: Sidecar) -> str:
    """The last recorded verification, else the one before the commit."""
    from wherry.ledger.nodes import nodes

    digest = sidecar.checkpoint.checkpoint_digest
    node = nodes(ledger, [digest]).get(digest)
    if node is not None and node.verified is not None:
        return verified_words(node.verified.level, node.verified.verdict, node.verified.time)
    receipt = sidecar.receipt
    proof = receipt.verification if receipt else None
    if receipt is None or not proof or not proof.get("ok"):
        return ""
    return verified_words(str(proof["level"]), "ok", receipt.finished)


def _max_error(ledger: Ledger, sidecar: Sidecar) -> float | None:
    """Zero for a lossless conversion; else what a roundtrip to its source has measured."""
    from wherry.ledger.nodes import verifications

    receipt = sidecar.receipt
    if receipt is None:
        return None
    if receipt.lossless:
        return 0.0
    roundtrip = verifications(ledger, sidecar.checkpoint.checkpoint_digest).get("roundtrip", {})
    measured = roundtrip.get("lossy") if roundtrip.get("against") == receipt.source.uri else None
    return None if measured is None else float(measured["error"])
