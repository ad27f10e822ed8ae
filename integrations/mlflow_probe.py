"""Checks that an MLflow store answers before MLflow's client is used, which retries in silence for minutes."""

from __future__ import annotations

from wherry.errors import StorageError
from wherry.remote.probe import silence_of
from wherry.storage.home import without_secrets

START_MLFLOW = "start the server, or check MLFLOW_TRACKING_URI and MLFLOW_REGISTRY_URI"


def require_answer(*uris: str) -> None:
    """Check that these stores answer, each once.

    Args:
        uris: tracking and registry URIs of MLflow; files and unknown schemes are not checked.

    Raises:
        StorageError: a server or database does not answer within 5 seconds; a retry can help.
    """
    for uri in dict.fromkeys(uris):
        shown = without_secrets(uri)
        reason = silence_of(uri, shown)
        if reason is not None:
            raise StorageError(
                f"MLflow does not answer: {reason}",
                uri=shown,
                cure=START_MLFLOW,
                retryable=True,
            )
