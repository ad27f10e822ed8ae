"""Access to an MLflow store: its client, its errors as wherry's errors, and the tag names that all records use.

Facts (MLflow 3.17):
- Creating a client does not open the store; the first request does, and a new SQLite store creates its tables then.
  Two threads that do so at once conflict, so it is done under a lock, once per store.
- The fluent API keeps its active run per thread; only `MlflowClient` is used, with explicit URIs.
- Ending a run through a server prints two lines to the standard output, which belongs to the caller; this is disabled.
- Tags and aliases are upserted by read and insert: two writers of one new key collide, and one gets BAD_REQUEST with
  the database's message. Version numbers collide too; MLflow itself tries three times. Both are retried here.
- `search_model_versions` leaves `aliases` empty; the aliases of all versions are a mapping of the registered model.
- Its sessions of `requests` are made by one function, from which every one comes with checked connections here.
- The client waits up to two minutes for each of eight attempts and says nothing; `wherry.store.waits` does.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import Any, TypeVar, cast
from urllib.parse import quote

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.utils import request_utils

from wherry.core.lazy_dataclass import dataclass
from wherry.errors import StorageError, UsageError, WherryError
from wherry.integrations.mlflow_probe import START_MLFLOW, require_answer
from wherry.integrations.mlflow_version import not_registered
from wherry.store.addresses import configured_servers, guard_requests, refusal_in, require_configured_address
from wherry.store.home import sqlite_file, without_secrets
from wherry.store.waits import waiting

os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")

EXPERIMENT = "wherry"
ATTEMPT_TAG = "wherry.attempt"
EXISTS = "RESOURCE_ALREADY_EXISTS"
ABSENT = "RESOURCE_DOES_NOT_EXIST"
# MLflow's error codes after which the same call may succeed.
_TRANSIENT = ("TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED", "INTERNAL_ERROR", "REQUEST_TIMEOUT")
# Messages of databases when two writers insert one row, and of MLflow when it gives up allocating a version number.
_COLLISIONS = ("unique constraint", "duplicate entry", "duplicate key", "giving up after")
_ROUNDS = 8
_PAUSE_SECONDS = 0.1
_opening = threading.Lock()
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Stores:
    """The stores of runs (tracking) and of versions (registry), as MLflow URIs."""

    tracking_uri: str
    registry_uri: str


@contextmanager
def open_client(stores: Stores) -> Generator[MlflowClient]:
    """A client whose errors are translated to wherry's errors, with the registry as their URI.

    Raises:
        UsageError: a URI contains credentials, or MLflow rejects a value.
        NotFoundError: the model, version or run does not exist.
        StorageError: a store does not answer, or cannot be written.
    """
    for uri in (stores.tracking_uri, stores.registry_uri):
        # The URL of a database has no other place for its password.
        if uri.startswith(("http://", "https://")) and "@" in uri.partition("://")[2].partition("/")[0]:
            raise UsageError(
                "the MLflow URI contains credentials",
                uri=without_secrets(uri),
                cure="set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
            )
    require_answer(stores.tracking_uri, stores.registry_uri)
    with _errors(stores.tracking_uri, stores.registry_uri):
        watched: Any = _WatchedClient(without_secrets(stores.registry_uri), stores)
        yield cast("MlflowClient", watched)


class _WatchedClient:
    """Has the methods of MLflow's client; a call that takes long is reported as a wait for the registry."""

    def __init__(self, shown: str, stores: Stores) -> None:
        self._shown = shown
        with waiting(shown):
            self._client = _client(stores.tracking_uri, stores.registry_uri)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        if not callable(found):
            return found

        @wraps(found)
        def call(*positional: Any, **named: Any) -> Any:
            with waiting(self._shown):
                return found(*positional, **named)

        return call


def colliding(call: Callable[[], _T]) -> _T:
    """Make a call that writes; retry it when it collides with another writer of the same row.

    Raises:
        MlflowException: the call failed for another reason, or on every attempt.
    """
    for attempt in range(1, _ROUNDS):
        try:
            return call()
        except MlflowException as error:
            if not any(words in str(error.message).lower() for words in _COLLISIONS):
                raise
        time.sleep(random.uniform(0, _PAUSE_SECONDS * attempt))  # noqa: S311  not a secret: it separates two writers
    return call()


def absent_is_fine(call: Callable[[], object]) -> None:
    """Make a call that deletes; ignore that the object does not exist.

    Raises:
        MlflowException: the call failed for another reason.
    """
    try:
        call()
    except MlflowException as error:
        if error.error_code != ABSENT:
            raise


def page(registry_uri: str, name: str, version: str) -> str | None:
    """URL of a version's page in the browser; None without a server."""
    if not registry_uri.startswith(("http://", "https://")):
        return None
    return f"{without_secrets(registry_uri).rstrip('/')}/#/models/{quote(name, safe='')}/versions/{version}"


def quote_value(value: str) -> str:
    """Quote a value for MLflow's search filters.

    Raises:
        UsageError: the value contains a quotation mark, which the filter grammar cannot express.
    """
    if "'" in value or '"' in value:
        raise UsageError(
            f"invalid name {value!r}: it contains a quotation mark",
            cure="choose a name without quotation marks",
        )
    return f"'{value}'"


def _client(tracking_uri: str, registry_uri: str) -> MlflowClient:
    for uri in (tracking_uri, registry_uri):
        file = sqlite_file(uri)
        if file is not None and not file.parent.exists():
            file.parent.mkdir(parents=True, mode=0o700)
    with _opening:
        return _first_use(tracking_uri, registry_uri)


@lru_cache(maxsize=8)
def _first_use(tracking_uri: str, registry_uri: str) -> MlflowClient:
    client = MlflowClient(tracking_uri=tracking_uri, registry_uri=registry_uri)
    client.get_experiment_by_name(EXPERIMENT)
    client.search_registered_models(max_results=1)
    return client


def _check_connections() -> None:
    """Have every session of MLflow check the address of each connection; MLflow has no option for it."""
    module: Any = request_utils
    real = module._get_request_session  # noqa: SLF001

    @wraps(real)
    def session(*positional: Any, **named: Any) -> Any:
        return guard_requests(real(*positional, **named), require_configured_address)

    module._get_request_session = session  # noqa: SLF001


_check_connections()


@contextmanager
def _errors(*uris: str) -> Generator[None]:
    """Translate MLflow's errors; the last URI, that of the registry, becomes the error's URI."""
    uri = without_secrets(uris[-1])
    try:
        with configured_servers(*uris):
            yield
    except WherryError:
        raise
    except MlflowException as error:
        if (refused := refusal_in(error)) is not None:
            raise refused from error
        message = str(error.message)
        for secret in uris:
            message = message.replace(secret, without_secrets(secret))
        raise _translate(str(error.error_code), message, uri) from error
    except OSError as error:
        raise StorageError(
            f"cannot connect to MLflow: {error}", uri=uri, cure=START_MLFLOW, retryable=True
        ) from error


def _translate(code: str, message: str, uri: str) -> WherryError:
    if code == "INVALID_PARAMETER_VALUE":
        return UsageError(
            f"MLflow rejected the request: {message}", uri=uri, cure="correct the value that it names"
        )
    if code == ABSENT:
        return not_registered(message, uri)
    transient = code in _TRANSIENT
    return StorageError(
        f"MLflow returned {code}: {message}",
        uri=uri,
        cure="try again" if transient else "check your permissions on the registry and the MLflow version",
        retryable=transient,
    )
