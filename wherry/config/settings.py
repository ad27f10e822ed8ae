"""settings: single settings, and the URLs of ledger and registry.

Environment variables that name a shared ledger or an MLflow server take precedence over `wherry.toml`, and that over
the files in the home. Looking up a path or a URL creates nothing. Without a `wherry.toml` the schema of the
configuration is not imported.
"""

from __future__ import annotations

import os
from typing import Any

from wherry.config.file import config_file
from wherry.config.values import required_origin
from wherry.errors import UsageError
from wherry.storage.home import home

_ORIGIN_CURE = "write it as https://HOST or https://HOST:PORT, or unset it"


def configured_value(name: str) -> Any:
    """The value of a setting in the configuration, including environment variables; None without a configuration.

    Args:
        name: dotted name, for example `mlflow.tracking_uri`.

    Raises:
        UsageError: the configuration is invalid.
        NotFoundError: the file that `WHERRY_CONFIG` names does not exist.
    """
    if config_file() is None:
        return None
    from wherry.config.config import load_config, value_at

    return value_at(load_config().settings.model_dump(), name)


def ledger_url() -> str:
    """URL of the ledger: `WHERRY_LEDGER`, the setting `ledger`, or a SQLite file in the home."""
    return (
        os.environ.get("WHERRY_LEDGER") or configured_value("ledger") or f"sqlite:///{home() / 'ledger.db'}"
    )


def audits_are_recorded() -> bool:
    """Whether audits are recorded in the ledger: `WHERRY_AUDIT_RECORD`, the setting `audit.record`, or true.

    Raises:
        UsageError: the variable is neither true nor false.
    """
    given = os.environ.get("WHERRY_AUDIT_RECORD")
    if given is None:
        return configured_value("audit.record") is not False
    if given.lower() not in ("true", "false"):
        raise UsageError(
            f"invalid value of WHERRY_AUDIT_RECORD: {given!r}; expected true or false",
            cure="correct or unset it",
        )
    return given.lower() == "true"


def pages_url() -> str | None:
    """Where others reach the pages of `wherry lineage serve`: `WHERRY_LINEAGE_URL` or the setting; None without one.

    Raises:
        UsageError: it is not the address of a server alone.
    """
    given = os.environ.get("WHERRY_LINEAGE_URL") or configured_value("lineage.url")
    try:
        return required_origin(given) if given else None
    except ValueError as error:
        raise UsageError(f"invalid value of lineage.url: {error}", cure=_ORIGIN_CURE) from None


def mlflow_tracking_uri() -> str:
    """`MLFLOW_TRACKING_URI`, the setting, or a SQLite file in the home (MLflow's default is the working folder)."""
    given = os.environ.get("MLFLOW_TRACKING_URI") or configured_value("mlflow.tracking_uri")
    return given or embedded_registry_uri()


def embedded_registry_uri() -> str:
    """URI of the MLflow store in the home, which is used where no server is configured."""
    return f"sqlite:///{home() / 'mlflow.db'}"


def mlflow_registry_uri() -> str:
    """`MLFLOW_REGISTRY_URI`, the setting, or the tracking store."""
    return (
        os.environ.get("MLFLOW_REGISTRY_URI")
        or configured_value("mlflow.registry_uri")
        or mlflow_tracking_uri()
    )
