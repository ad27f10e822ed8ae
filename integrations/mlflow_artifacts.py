"""MLflow's entry point for `wherry://` URIs; MLflow imports it while it is itself imported, so it imports nothing."""

from __future__ import annotations

from typing import Any


def repository(artifact_uri: str, tracking_uri: str | None = None, registry_uri: str | None = None) -> Any:
    """The artifact repository of a registered checkpoint, as the group `mlflow.artifact_repository` requires.

    Args:
        artifact_uri: `wherry://ALGORITHM/DIGEST`, the source of a version.
        tracking_uri, registry_uri: MLflow's stores; those of MLflow's own settings by default.
    """
    from wherry.integrations.mlflow.model import CheckpointRepository

    return CheckpointRepository(artifact_uri, tracking_uri, registry_uri)
