"""Reading a registry: resolve model URIs, list registered versions, identify the caller; and delete versions.

A version whose checkpoint was pruned keeps its tags, digest included, and gets the tag `wherry.deleted`, so that the
registry still shows what was registered.
"""

from __future__ import annotations

import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mlflow.exceptions import MlflowException

from wherry.core.emit import opener
from wherry.core.receipt import utc_now
from wherry.errors import NotFoundError, StorageError, UsageError
from wherry.integrations.mlflow.aliases import aliases
from wherry.integrations.mlflow.client import ABSENT, Stores, open_client, quote_value
from wherry.integrations.mlflow.versions import lowest, versions
from wherry.integrations.mlflow_probe import START_MLFLOW
from wherry.integrations.mlflow_rest import by_password
from wherry.integrations.mlflow_version import (
    MOST_NAMES,
    RegisteredVersion,
    no_version,
    unknown_alias,
    unknown_model,
    unknown_version,
)
from wherry.ledger.resolve import DELETED_TAG, DIGEST_TAG
from wherry.store.home import without_secrets

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion


_PAGE = 1000
_TIMEOUT_SECONDS = 30
_OK, _REFUSED = 200, (401, 403)  # statuses of HTTP


def registered_versions(
    tracking_uri: str, registry_uri: str, *, with_aliased: bool = False
) -> Iterator[RegisteredVersion]:
    """Every version that wherry registered, by two searches with a thousand rows a request.

    Args:
        tracking_uri: MLflow's tracking store.
        registry_uri: MLflow's registry.
        with_aliased: whether to list also every other version that has an alias.

    Raises:
        StorageError: the registry cannot be reached.
    """
    with open_client(Stores(tracking_uri, registry_uri)) as client:
        named = _all_aliases(client)
        token: str | None = None
        while True:
            found = client.search_model_versions(max_results=_PAGE, page_token=token)
            for row in found:
                held = named.get((row.name, str(row.version)), ())
                if DIGEST_TAG in row.tags or (with_aliased and held):
                    yield _registered_version(row, held)
            token = found.token
            if not token:
                return


def _registered_version(row: ModelVersion, named: tuple[str, ...]) -> RegisteredVersion:
    return RegisteredVersion(row.name, str(row.version), row.tags, named)


def look_up(
    name: str, *, tracking_uri: str, registry_uri: str, version: str | None = None, alias: str | None = None
) -> RegisteredVersion:
    """The version of a registered model with a number or an alias, else the newest one.

    Raises:
        NotFoundError: the model, version or alias does not exist.
    """
    uri = without_secrets(registry_uri)
    with open_client(Stores(tracking_uri, registry_uri)) as client:
        with _instead(lambda: unknown_model(name, _models(client), uri)):
            named = aliases(client, name)
        if alias is None and version is None:
            rows = client.search_model_versions(
                f"name={quote_value(name)}", max_results=1, order_by=["version_number DESC"]
            )
            if not rows:
                raise no_version(name, uri)
            row = rows[0]
        else:
            number = version if alias is None else named.get(alias)
            if number is None:
                raise unknown_alias(name, alias, named)
            with _instead(lambda: unknown_version(name, str(number), _numbers(client, name), uri)):
                row = client.get_model_version(name, number)
        return _registered_version(row, _of(named, str(row.version)))


@contextmanager
def _instead(error: Callable[[], NotFoundError]) -> Generator[None]:
    """Raise our error, with what there is, in the place of MLflow's for what does not exist."""
    try:
        yield
    except MlflowException as absent:
        if absent.error_code != ABSENT:
            raise
        raise error() from absent


def _models(client: MlflowClient) -> list[str]:
    return [row.name for row in client.search_registered_models(max_results=MOST_NAMES)]


def _numbers(client: MlflowClient, name: str) -> list[int]:
    rows = client.search_model_versions(f"name={quote_value(name)}", max_results=MOST_NAMES)
    return [int(row.version) for row in rows]


def find_digest(
    digest: str, *, tracking_uri: str, registry_uri: str, name: str | None = None
) -> RegisteredVersion | None:
    """The lowest version with a checkpoint digest, of one model or of all models."""
    with open_client(Stores(tracking_uri, registry_uri)) as client:
        if name is not None:
            row = lowest(client, name, digest)
        else:
            row = min(versions(client, digest), key=lambda row: (row.name, int(row.version)), default=None)
        if row is None:
            return None
        return _registered_version(row, _of(aliases(client, row.name), str(row.version)))


def unregister(name: str, version: str, *, tracking_uri: str, registry_uri: str) -> None:
    """Delete a version; its number is never used again.

    Raises:
        UsageError: an alias points to the version.
        NotFoundError: the version does not exist.
    """
    with open_client(Stores(tracking_uri, registry_uri)) as client:
        _require_free(client, name, version)
        client.delete_model_version(name, version)


def mark_deleted(
    name: str, version: str, *, by: str, reason: str, tracking_uri: str, registry_uri: str
) -> None:
    """Tag a version as deleted, with time, person and reason; the version stays as a tombstone.

    Raises:
        UsageError: an alias points to the version.
        NotFoundError: the version does not exist.
    """
    with open_client(Stores(tracking_uri, registry_uri)) as client:
        _require_free(client, name, version)
        client.set_model_version_tag(name, version, DELETED_TAG, f"{utc_now()} by {by}: {reason}")


def unmark_deleted(name: str, version: str, *, tracking_uri: str, registry_uri: str) -> None:
    """Remove the tag of `mark_deleted`, if the bytes were not deleted after all."""
    with open_client(Stores(tracking_uri, registry_uri)) as client:
        client.delete_model_version_tag(name, version, DELETED_TAG)


def identity(registry_uri: str) -> str | None:
    """The user as which the registry authenticates the caller; None if it has no users or does not know this one.

    The server of `--app-name basic-auth` returns a user's record only to that user. If it refuses the same request
    without a password, it does check passwords. Redirects are not followed: the answer of another server proves
    nothing, and the password must not be sent to it.
    """
    user = os.environ.get("MLFLOW_TRACKING_USERNAME")
    password = os.environ.get("MLFLOW_TRACKING_PASSWORD")
    if not registry_uri.startswith(("http://", "https://")) or not user or not password:
        return None
    url = f"{registry_uri.rstrip('/')}/api/2.0/mlflow/users/get?username={urllib.parse.quote(user, safe='')}"
    asks = _status(url, {}) in _REFUSED
    return user if asks and _status(url, by_password(user, password)) == _OK else None


def _status(url: str, headers: Mapping[str, str]) -> int:
    request = urllib.request.Request(url, headers=dict(headers))  # noqa: S310  only http and https get here
    try:
        with opener().open(request, timeout=_TIMEOUT_SECONDS) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    except OSError as error:
        raise StorageError(
            f"cannot connect to MLflow: {error}", uri=without_secrets(url), cure=START_MLFLOW, retryable=True
        ) from error


def _require_free(client: MlflowClient, name: str, version: str) -> None:
    held = _of(aliases(client, name), version)
    if held:
        raise UsageError(
            f"{name} version {version} has the alias {', '.join(held)}", cure="promote another version first"
        )


def _of(named: Mapping[str, str], version: str) -> tuple[str, ...]:
    return tuple(sorted(alias for alias, number in named.items() if number == version))


def _all_aliases(client: MlflowClient) -> dict[tuple[str, str], tuple[str, ...]]:
    found: dict[tuple[str, str], tuple[str, ...]] = {}
    token: str | None = None
    while True:
        models = client.search_registered_models(max_results=_PAGE, page_token=token)
        for model in models:
            for alias, number in sorted(model.aliases.items()):
                key = (model.name, str(number))
                found[key] = (*found.get(key, ()), alias)
        token = models.token
        if not token:
            return found
