"""Checks that an MLflow store answers before MLflow's client is used, which retries in silence for minutes.

Any answer will do, even a refusal: what it means is for the client to find out. A database is only connected to.
"""

from __future__ import annotations

import socket
import urllib.request
from http.client import HTTPException
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from wherry.core.emit import opener
from wherry.errors import StorageError
from wherry.storage.home import without_secrets

ANSWER_SECONDS = 5
# Port of a database whose URI names none, by the dialect of the URI.
_PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}


def require_answer(*uris: str) -> None:
    """Check that these stores answer, each once.

    Args:
        uris: tracking and registry URIs of MLflow; files and unknown schemes are not checked.

    Raises:
        StorageError: a server or database does not answer within 5 seconds; a retry can help.
    """
    for uri in dict.fromkeys(uris):
        reason = _silence(uri)
        if reason is not None:
            raise StorageError(
                f"MLflow does not answer: {reason}",
                uri=without_secrets(uri),
                cure="start the server, or check MLFLOW_TRACKING_URI and MLFLOW_REGISTRY_URI",
                retryable=True,
            )


def _silence(uri: str) -> str | None:
    """Why a store does not answer; None if it does."""
    try:
        parts = urlsplit(uri)
        host, port = parts.hostname, parts.port
    except ValueError:
        return None  # the client has an error for it
    if parts.scheme in ("http", "https"):
        return _silence_of_server(uri)
    port = port or _PORTS.get(parts.scheme.partition("+")[0])
    return _silence_of_port(host, port) if host and port else None


def _silence_of_server(uri: str) -> str | None:
    request = urllib.request.Request(f"{uri.rstrip('/')}/health")  # noqa: S310  only http and https get here
    try:
        with opener().open(request, timeout=ANSWER_SECONDS):
            return None
    except HTTPError:
        return None
    except URLError as error:
        return _reason(error.reason)
    except (OSError, HTTPException) as error:
        return _reason(error)


def _silence_of_port(host: str, port: int) -> str | None:
    try:
        with socket.create_connection((host, port), ANSWER_SECONDS):
            return None
    except OSError as error:
        return _reason(error)


def _reason(error: object) -> str:
    if isinstance(error, TimeoutError):
        return f"no response within {ANSWER_SECONDS} s"
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
