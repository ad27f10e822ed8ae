"""Versions: one per registered model and checkpoint, by reference, with any number of concurrent callers.

MLflow has no unique key on a digest, so uniqueness takes three steps: search by tag, create if nothing was found,
search again. The lowest version wins; a loser deletes the version that it created and adopts the winner.

A winner whose later step fails deletes its version, which another caller may have adopted. Both callers therefore
announce what they do before they check: the adopter writes `wherry.adopted` and then checks for `wherry.withdrawn`; the
withdrawer writes `wherry.withdrawn` and then checks for `wherry.adopted`. At least one of the two sees the other: an
adopted version stays, and a caller that sees a withdrawal waits for its end. An attempt that was killed between
creating and searching leaves a duplicate above the winner; the next caller that adopts the winner removes the duplicate
if it is old and has no alias.

The source of a version is `wherry://<algorithm>/<checkpoint digest>`, from which `model` serves MLflow's loaders; the
place is in the tag `wherry.uri`. An MLflow server accepts such a scheme, and refuses local paths.
"""

from __future__ import annotations

import json
import shlex
import time
import uuid
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_MODEL_VERSIONS

from wherry.config.settings import lineage_url
from wherry.core.digest import digest_uri
from wherry.core.lazy_dataclass import dataclass
from wherry.errors import StorageError
from wherry.integrations.mlflow.aliases import aliases, exclusive, move_aliases, set_tag, tag_version
from wherry.integrations.mlflow.client import (
    ABSENT,
    ATTEMPT_TAG,
    EXISTS,
    Stores,
    absent_is_fine,
    colliding,
    open_client,
    page,
    quote_value,
)
from wherry.integrations.mlflow.figures import LINEAGE_TAG, RUN_PAGE_TAG, description
from wherry.integrations.mlflow.runs import LOGGED_MODEL_TAG, forget_run, record_run
from wherry.ledger.resolve import DELETED_TAG, DIGEST_TAG, URI_TAG, VERIFIED_TAG, WEIGHTS_TAG
from wherry.models.register import VersionFacts
from wherry.store.sidecar import Sidecar
from wherry.store.waits import waiting
from wherry.version import __version__

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

    from wherry.integrations.mlflow.runs import RunRecord

ADOPTED_TAG = "wherry.adopted"
WITHDRAWN_TAG = "wherry.withdrawn"
# Tags that a version gets when it is used; a version with any of them is not a leftover.
_USED_TAGS = (ADOPTED_TAG, DELETED_TAG, "wherry.promoted_", "wherry.replaced.", "wherry.rolled_back")
_ROUNDS = 5
_STALE_SECONDS = 600.0  # the creator of an older duplicate is presumed dead
_YOUNG_SECONDS = 3600.0  # an attempt that created a version may take this long
_WITHDRAWAL_SECONDS = 15.0  # the process of an older withdrawal is presumed dead
_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Version:
    """Result of registering: the version, whether it is new, and the URL of its page if there is a server."""

    version: str
    created: bool
    page: str | None


@contextmanager
def registering(
    sidecar: Sidecar,
    uri: str,
    name: str,
    *,
    facts: VersionFacts,
    alias: str | None,
    tags: Mapping[str, str],
    tracking_uri: str,
    registry_uri: str,
) -> Generator[Version]:
    """Register a checkpoint as the one version of a registered model, and undo it if the block fails.

    Args:
        sidecar: identity, manifest and receipt of the checkpoint.
        uri: URI of the checkpoint.
        name: the registered model; created if it does not exist.
        facts: what a new version states in addition.
        alias: alias to set on the version.
        tags: tags to set on the version; they override wherry's own.
        tracking_uri: store of the run with receipt and manifest.
        registry_uri: store of the version.

    Raises:
        UsageError: MLflow rejects the name, the alias or a tag.
        StorageError: a store cannot be reached or written; everything that this call created is deleted, and aliases
            and tags are unchanged.
    """
    stores = Stores(tracking_uri, registry_uri)
    with open_client(stores) as client:
        _ensure_model(client, name)
        ours = _our_tags(sidecar, uri, facts)
        source = digest_uri(sidecar.checkpoint.checkpoint_digest)
        version, undo = _settle(
            client, name, ours[DIGEST_TAG], lambda: _create(client, name, source, ours, sidecar, facts)
        )
        number = str(version.version)
        try:
            if DELETED_TAG in version.tags:  # its checkpoint exists again: the tombstone becomes a version
                set_tag(client, version.name, number, URI_TAG, uri)
                client.delete_model_version_tag(version.name, number, DELETED_TAG)
            with (
                tag_version(client, name, number, tags),
                move_aliases(client, name, {alias: number} if alias else {}),
            ):
                yield Version(number, undo is not None, page(registry_uri, name, number))
        except BaseException as error:
            if undo is not None:
                _withdraw(client, version, undo, error)
            raise


def lowest(client: MlflowClient, name: str, digest: str) -> ModelVersion | None:
    """The lowest version of the model with this checkpoint digest."""
    return min(versions(client, digest, name), key=lambda version: int(version.version), default=None)


def versions(client: MlflowClient, digest: str, name: str | None = None) -> list[ModelVersion]:
    """The versions with this checkpoint digest, of one model or of all."""
    model = "" if name is None else f"name = {quote_value(name)} and "
    return list(client.search_model_versions(f"{model}tags.`{DIGEST_TAG}` = {quote_value(digest)}"))


def _settle(
    client: MlflowClient, name: str, digest: str, create: Callable[[], tuple[ModelVersion, RunRecord]]
) -> tuple[ModelVersion, RunRecord | None]:
    """The one version, and the records of this attempt if it created the version."""
    for _round in range(_ROUNDS):
        winner = lowest(client, name, digest)
        if winner is None:
            created, recorded = create()
            try:
                link = json.dumps([{"name": created.name, "version": created.version}])
                client.set_logged_model_tags(recorded.tags[LOGGED_MODEL_TAG], {MLFLOW_MODEL_VERSIONS: link})
                winner = lowest(client, name, digest)
            except BaseException as error:
                _withdraw(client, created, recorded, error)
                raise
            if winner is None or int(winner.version) == int(created.version):
                return created, recorded
            absent_is_fine(lambda number=str(created.version): client.delete_model_version(name, number))
            recorded.take_back()
        if _adopt(client, winner):
            _remove_duplicates(client, name, digest, winner)
            return winner, None
    raise StorageError(
        f"{name}: concurrent attempts to register this checkpoint keep failing",
        cure="try again",
        retryable=True,
    )


def _create(
    client: MlflowClient,
    name: str,
    source: str,
    tags: Mapping[str, str],
    sidecar: Sidecar,
    facts: VersionFacts,
) -> tuple[ModelVersion, RunRecord]:
    recorded = record_run(client, name, tags, sidecar, facts)
    try:
        version = colliding(
            lambda: client.create_model_version(
                name,
                source,
                run_id=recorded.run_id,
                tags={**tags, **recorded.tags},
                description=description(tags),
                await_creation_for=0,
            )
        )
    except BaseException:
        recorded.take_back()
        raise
    return version, recorded


def _remove_duplicates(client: MlflowClient, name: str, digest: str, winner: ModelVersion) -> None:
    """Delete versions of the same checkpoint that killed attempts left, with the run and logged model of each."""
    if not _duplicates(client, name, digest, winner):
        return
    with exclusive(client, name):  # promotions of this model wait, so that none sets an alias on a duplicate
        bearing = set(aliases(client, name).values())
        for version in _duplicates(client, name, digest, winner):
            if str(version.version) not in bearing:
                absent_is_fine(lambda one=version: client.delete_model_version(name, str(one.version)))
                forget_run(client, version.run_id, version.tags)


def _duplicates(client: MlflowClient, name: str, digest: str, winner: ModelVersion) -> list[ModelVersion]:
    """Old versions of the checkpoint besides the winner; no caller got their numbers, so none was promoted."""
    last = time.time() - _STALE_SECONDS
    return [
        version
        for version in versions(client, digest, name)
        if int(version.version) > int(winner.version)
        and version.creation_timestamp / 1000 < last
        and ATTEMPT_TAG in version.tags
        and not any(key.startswith(_USED_TAGS) for key in version.tags)
    ]


def _adopt(client: MlflowClient, version: ModelVersion) -> bool:
    """Adopt a version of another attempt; False if that attempt has withdrawn it."""
    name, number = version.name, str(version.version)
    if time.time() - version.creation_timestamp / 1000 > _YOUNG_SECONDS:
        return True
    deadline = time.monotonic() + _WITHDRAWAL_SECONDS
    try:
        set_tag(client, name, number, ADOPTED_TAG, uuid.uuid4().hex)
        with waiting(f"models:/{name}/{number}", what="another attempt that may withdraw this version"):
            while not _is_held(client.get_model_version(name, number).tags):
                if time.monotonic() > deadline:
                    client.delete_model_version_tag(name, number, WITHDRAWN_TAG)
                time.sleep(_POLL_SECONDS)
    except MlflowException as error:
        if error.error_code != ABSENT:
            raise
        return False
    return True


def _is_held(tags: Mapping[str, str]) -> bool:
    """Whether a version that this attempt adopted is not withdrawn; one that is being deleted may show no tags."""
    return ADOPTED_TAG in tags and WITHDRAWN_TAG not in tags


def _withdraw(client: MlflowClient, version: ModelVersion, recorded: RunRecord, error: BaseException) -> None:
    """Delete a version of this attempt and its records, unless another attempt has adopted the version."""
    name, number = version.name, str(version.version)
    try:
        set_tag(client, name, number, WITHDRAWN_TAG, uuid.uuid4().hex)
        if ADOPTED_TAG in client.get_model_version(name, number).tags:
            client.delete_model_version_tag(name, number, WITHDRAWN_TAG)
            return
        client.delete_model_version(name, number)
        recorded.take_back()
    except Exception as failure:  # noqa: BLE001  the first error is the one to raise; this one is added to it
        error.add_note(f"could not delete {name} version {number}: {failure}")


def _ensure_model(client: MlflowClient, name: str) -> None:
    quote_value(name)
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != EXISTS:
            raise


def _our_tags(sidecar: Sidecar, uri: str, facts: VersionFacts) -> dict[str, str]:
    subject, receipt = sidecar.checkpoint, sidecar.receipt
    by_digest = digest_uri(subject.checkpoint_digest)
    tags = {
        DIGEST_TAG: subject.checkpoint_digest,
        WEIGHTS_TAG: subject.weights_digest,
        URI_TAG: uri,
        "wherry.format": subject.format,
        "wherry.format_version": subject.format_version or "",
        "wherry.version": __version__,
        "wherry.fetch": shlex.join(["wherry", "fetch", by_digest, "TARGET"]),
        ATTEMPT_TAG: uuid.uuid4().hex,
    }
    tags |= {VERIFIED_TAG: facts.verified} if facts.verified else {}
    page_url = lineage_url(subject.checkpoint_digest)
    tags |= {LINEAGE_TAG: page_url} if page_url else {}
    tags |= {RUN_PAGE_TAG: facts.run_page} if facts.run_page else {}
    if receipt is not None:
        tags["wherry.plan_digest"] = receipt.plan_digest
        tags["wherry.source_uri"] = receipt.source.uri
        tags["wherry.source_digest"] = receipt.source.checkpoint_digest
        tags |= {"wherry.load": receipt.snippet.strip()} if receipt.snippet.strip() else {}
    return tags
