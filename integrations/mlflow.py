"""MLflow: model versions that point at checkpoints.

A version is registered by reference: its source is the checkpoint's URI, its tags carry the digests, and a small
run holds receipt and manifest as JSON. MLflow has no unique key on a digest, so uniqueness is reached in three
steps: search by tag, create where there is none, search again. The lowest version wins, and the loser deletes what
it has created itself. Any number of threads and processes end with one version.

Facts (MLflow 3.17):
- An MLflow server refuses local paths as source; an own scheme is taken. Local checkpoints go through a server as
  `wherry://sha256/<checkpoint digest>`, with the path in the tag `wherry.uri`.
- The default artifact folder of a SQLite store is in the working directory; ours is set on the experiment.
- Ending a run through a server prints two lines to the standard output, which is our caller's; that is turned off.
- The fluent API keeps its active run per thread; only `MlflowClient` is used, with explicit URIs.
"""

from __future__ import annotations

import os
import threading
import uuid
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from wherry import __version__
from wherry.errors import StorageError, UsageError, WherryError
from wherry.home import ensure_home, mlflow_artifacts, sqlite_file, without_secrets
from wherry.store import locate

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from mlflow.entities.model_registry import ModelVersion

    from wherry.sidecar import Sidecar

os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")

EXPERIMENT = "wherry"
DIGEST_TAG = "wherry.checkpoint_digest"
ATTEMPT_TAG = "wherry.attempt"
# Schemes that a registry keeps as they are and that other MLflow clients can read.
_PORTABLE = ("gs", "s3")
_EXISTS = "RESOURCE_ALREADY_EXISTS"
# MLflow's error codes after which the same call may succeed.
_TRANSIENT = ("TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED", "INTERNAL_ERROR", "REQUEST_TIMEOUT")
# Making a client opens the store, and a new SQLite store creates its tables then: one thread at a time.
_opening = threading.Lock()


@dataclass(frozen=True, slots=True)
class Version:
    """What came of `register_version`: the version, whether it is new, and its page where a server shows it."""

    version: str
    created: bool
    page: str | None


def register_version(
    sidecar: Sidecar,
    uri: str,
    name: str,
    *,
    alias: str | None,
    tags: Mapping[str, str],
    tracking_uri: str,
    registry_uri: str,
) -> Version:
    """Give a checkpoint its one version of a registered model.

    Args:
        sidecar: identity, manifest and receipt of the checkpoint.
        uri: where it lies.
        name: the registered model.
        alias: set on the version.
        tags: set on the version, next to ours.
        tracking_uri: where the run with receipt and manifest goes.
        registry_uri: where the version goes.

    Raises:
        UsageError: MLflow does not take the name, the alias or a tag.
        StorageError: a store cannot be reached or written; nothing that this call created is left.
    """
    _refuse_credentials(tracking_uri, registry_uri)
    with _mlflow_errors(tracking_uri, registry_uri):
        client = _client(tracking_uri, registry_uri)
        _ensure_model(client, name)
        version = _find(client, name, sidecar.checkpoint.checkpoint_digest)
        created = False
        if version is None:
            source = _source(sidecar, uri, registry_uri)
            version, created = _create(client, name, source, _our_tags(sidecar, uri), sidecar)
        try:
            for key, value in tags.items():
                client.set_model_version_tag(name, str(version.version), key, value)
            if alias is not None:
                client.set_registered_model_alias(name, alias, str(version.version))
        except BaseException:
            if created:
                _undo(client, version)
            raise
        return Version(str(version.version), created, _page(registry_uri, name, str(version.version)))


def _create(
    client: MlflowClient, name: str, source: str, tags: Mapping[str, str], sidecar: Sidecar
) -> tuple[ModelVersion, bool]:
    """Create a version and let the lowest one win."""
    run_id = _record_run(client, name, tags, sidecar)
    mine: ModelVersion | None = None
    try:
        mine = client.create_model_version(name, source, run_id=run_id, tags=dict(tags), await_creation_for=0)
        winner = _find(client, name, tags[DIGEST_TAG])
    except BaseException:
        client.delete_run(run_id)
        if mine is not None:
            client.delete_model_version(name, str(mine.version))
        raise
    if winner is None or int(winner.version) == int(mine.version):
        return mine, True
    _undo(client, mine)
    return winner, False


def _undo(client: MlflowClient, version: ModelVersion) -> None:
    """Delete a version that this attempt created, and its run."""
    client.delete_model_version(version.name, str(version.version))
    if version.run_id:
        client.delete_run(version.run_id)


def _find(client: MlflowClient, name: str, digest: str) -> ModelVersion | None:
    """The lowest version of the model that is this checkpoint."""
    found = client.search_model_versions(f"name = '{name}' and tags.`{DIGEST_TAG}` = '{digest}'")
    return min(found, key=lambda version: int(version.version), default=None)


def _ensure_model(client: MlflowClient, name: str) -> None:
    if "'" in name or '"' in name:
        raise UsageError(f"model name {name!r} has a quotation mark", cure="choose a name without one")
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != _EXISTS:
            raise


def _record_run(client: MlflowClient, name: str, tags: Mapping[str, str], sidecar: Sidecar) -> str:
    """A finished run whose artifacts are manifest and receipt."""
    run = client.create_run(_experiment(client), run_name=f"register {name}", tags=dict(tags))
    run_id: str = run.info.run_id
    try:
        client.log_dict(run_id, sidecar.manifest.to_json(), "manifest.json")
        if sidecar.receipt is not None:
            client.log_dict(run_id, sidecar.receipt.to_json(), "receipt.json")
        client.set_terminated(run_id)
    except BaseException:
        client.delete_run(run_id)
        raise
    return run_id


def _experiment(client: MlflowClient) -> str:
    found = client.get_experiment_by_name(EXPERIMENT)
    if found is not None:
        return found.experiment_id
    embedded = sqlite_file(client.tracking_uri) is not None
    folder = (ensure_home() and mlflow_artifacts().as_uri()) if embedded else None
    try:
        return client.create_experiment(EXPERIMENT, artifact_location=folder)
    except MlflowException as error:
        if error.error_code != _EXISTS:
            raise
    return _experiment(client)


def _our_tags(sidecar: Sidecar, uri: str) -> dict[str, str]:
    subject, receipt = sidecar.checkpoint, sidecar.receipt
    tags = {
        DIGEST_TAG: subject.checkpoint_digest,
        "wherry.weights_digest": subject.weights_digest,
        "wherry.uri": uri,
        "wherry.format": subject.format,
        "wherry.format_version": subject.format_version or "",
        "wherry.version": __version__,
        ATTEMPT_TAG: uuid.uuid4().hex,
    }
    if receipt is not None:
        tags["wherry.plan_digest"] = receipt.plan_digest
        tags["wherry.source_uri"] = receipt.source.uri
        tags["wherry.source_digest"] = receipt.source.checkpoint_digest
    return tags


def _source(sidecar: Sidecar, uri: str, registry_uri: str) -> str:
    """The version's source: the URI where the registry takes it, else the digest under our own scheme."""
    location = locate(uri)
    if location.store.protocol in _PORTABLE:
        return location.uri
    if location.store.capabilities.local and sqlite_file(registry_uri) is not None:
        return Path(location.path).as_uri()
    return f"wherry://sha256/{sidecar.checkpoint.checkpoint_digest}"


def _page(registry_uri: str, name: str, version: str) -> str | None:
    if not registry_uri.startswith(("http://", "https://")):
        return None
    return f"{without_secrets(registry_uri).rstrip('/')}/#/models/{quote(name, safe='')}/versions/{version}"


def _client(tracking_uri: str, registry_uri: str) -> MlflowClient:
    for uri in (tracking_uri, registry_uri):
        file = sqlite_file(uri)
        if file is not None and not file.parent.exists():
            file.parent.mkdir(parents=True, mode=0o700)
    with _opening:
        return _opened(tracking_uri, registry_uri)


@lru_cache(maxsize=8)
def _opened(tracking_uri: str, registry_uri: str) -> MlflowClient:
    client = MlflowClient(tracking_uri=tracking_uri, registry_uri=registry_uri)
    client.get_experiment_by_name(EXPERIMENT)  # the stores open on first use, not with the client
    client.search_registered_models(max_results=1)
    return client


def _refuse_credentials(*uris: str) -> None:
    """Only HTTP: the URL of a database has no other place for its password."""
    for uri in uris:
        if uri.startswith(("http://", "https://")) and "@" in uri.partition("://")[2].partition("/")[0]:
            raise UsageError(
                "an MLflow URI must not carry credentials",
                uri=without_secrets(uri),
                cure="set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
            )


@contextmanager
def _mlflow_errors(*uris: str) -> Generator[None]:
    """MLflow's errors as ours; the last URI, the registry's, is named."""
    uri = without_secrets(uris[-1])
    try:
        yield
    except WherryError:
        raise
    except MlflowException as error:
        message = str(error.message)
        for secret in uris:
            message = message.replace(secret, without_secrets(secret))
        raise _translated(str(error.error_code), message, uri) from error
    except OSError as error:
        raise StorageError(f"MLflow cannot be reached: {error}", uri=uri, retryable=True) from error


def _translated(code: str, message: str, uri: str) -> WherryError:
    if code == "INVALID_PARAMETER_VALUE":
        return UsageError(f"MLflow does not take this: {message}", uri=uri)
    transient = code in _TRANSIENT
    return StorageError(
        f"MLflow refused ({code}): {message}",
        uri=uri,
        cure="try again" if transient else "check the rights at the registry and its version",
        retryable=transient,
    )
