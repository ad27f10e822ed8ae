"""settings: single settings, and where the ledger and the registry are.

Environment variables that name a shared ledger or an MLflow server win over `wherry.toml`, and that over the files in
the home. Looking up a path or a URL creates nothing. Where there is no `wherry.toml`, nothing of the configuration is
imported.
"""

from __future__ import annotations

import os
from typing import Any

from wherry.config.file import config_file
from wherry.storage.home import home


def configured(name: str) -> Any:
    """What the configuration says of a setting, environment variables included; None where it says nothing.

    Args:
        name: dotted, as `mlflow.tracking_uri`.

    Raises:
        UsageError: the configuration is faulty.
        NotFoundError: the configuration that `WHERRY_CONFIG` names is not there.
    """
    if config_file() is None:
        return None
    from wherry.config.config import load_config, value_at

    return value_at(load_config().settings.model_dump(), name)


def ledger_url() -> str:
    """SQLAlchemy URL of the ledger: `WHERRY_LEDGER`, the configuration's, or a SQLite file in the home."""
    return os.environ.get("WHERRY_LEDGER") or configured("ledger") or f"sqlite:///{home() / 'ledger.db'}"


def mlflow_tracking_uri() -> str:
    """`MLFLOW_TRACKING_URI`, the configuration's, or a SQLite file in the home (MLflow's own is the working folder)."""
    given = os.environ.get("MLFLOW_TRACKING_URI") or configured("mlflow.tracking_uri")
    return given or f"sqlite:///{home() / 'mlflow.db'}"


def mlflow_registry_uri() -> str:
    """`MLFLOW_REGISTRY_URI`, the configuration's, or where the tracking store is."""
    return os.environ.get("MLFLOW_REGISTRY_URI") or configured("mlflow.registry_uri") or mlflow_tracking_uri()
