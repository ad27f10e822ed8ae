"""Checks that an MLflow store answers before MLflow's client is used, which retries in silence for minutes."""

from __future__ import annotations

from wherry.store.home import without_secrets
from wherry.store.probe import await_answer

START_MLFLOW = "start the server, or check MLFLOW_TRACKING_URI and MLFLOW_REGISTRY_URI"


def require_answer(*uris: str) -> None:
    """Wait until these stores answer, each once.

    Args:
        uris: tracking and registry URIs of MLflow; files and unknown schemes are not checked.

    Raises:
        StorageError: a server or database does not answer within twice the `storage_timeout`; a retry can help.
    """
    for uri in dict.fromkeys(uris):
        await_answer(uri, without_secrets(uri), "MLflow", START_MLFLOW)
