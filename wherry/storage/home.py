"""Home: where wherry keeps what belongs to no single checkpoint (the ledger and the embedded MLflow store).

One folder, `WHERRY_HOME`, private to its user; by default the platform's folder for user data. Environment
variables that name a shared ledger or an MLflow server win over `wherry.toml`, and that over the files in the home.
Looking up a path or a URL creates nothing; `ensure_home` does. Where there is no `wherry.toml`, nothing of the
configuration is imported.
"""

from __future__ import annotations

import getpass
import os
import re
from pathlib import Path
from typing import Any

from platformdirs import user_data_dir

from wherry.errors import storage_error

_PRIVATE = 0o700
_END_OF_AUTHORITY = re.compile("[/?#]")
_DATABASES = frozenset({"postgresql", "postgres", "mysql", "mariadb", "mssql", "oracle"})
CONFIG_NAME = "wherry.toml"
CONFIG_ENV = "WHERRY_CONFIG"
ENVIRONMENT_ENV = "WHERRY_ENV"


def home() -> Path:
    """The folder: `WHERRY_HOME`, or the user data folder of the platform."""
    given = os.environ.get("WHERRY_HOME")
    return Path(given).expanduser().absolute() if given else Path(user_data_dir("wherry", appauthor=False))


def ensure_home() -> Path:
    """The folder, made private to its user where it was not there.

    Raises:
        StorageError: it cannot be created.
    """
    folder = home()
    try:
        folder.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
    except OSError as error:
        failure = storage_error(error, str(folder))
        failure.cure = "set WHERRY_HOME to a folder that can be written"
        raise failure from error
    return folder


def config_file() -> Path | None:
    """The configuration: what `WHERRY_CONFIG` names, else `wherry.toml` in the working directory or the home.

    One in the working directory is passed over where `wherry.config.trust` says that it does not count.
    """
    given = os.environ.get(CONFIG_ENV)
    if given:
        return Path(given).expanduser().absolute()
    here, own = Path(CONFIG_NAME).absolute(), home() / CONFIG_NAME
    if here != own and os.path.lexists(here):
        from wherry.config.trust import counts

        if counts(here):
            return here
    return own if own.is_file() else None


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


def mlflow_artifacts() -> Path:
    """Where receipts go that the embedded MLflow store holds as run artifacts."""
    return home() / "mlflow-artifacts"


def user_name() -> str:
    """Who runs this, for the record; `unknown` where the system has no name for it, as in some containers."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "unknown"


def without_secrets(url: str) -> str:
    """A URL as it may be stored and printed: without user, password, query and fragment, which can hold tokens."""
    scheme, separator, rest = url.partition("://")
    rest = _without_user(scheme, rest)
    return scheme + separator + rest.partition("?")[0].partition("#")[0]


def _without_user(scheme: str, rest: str) -> str:
    """What follows `user:password@`; an `@` in the path of an ordinary URI stays.

    A password is often written unquoted, with a `/`, `?` or `#`. It is told from host and path by what follows the
    first colon: a port is a number. Addresses of databases have no other `@`.
    """
    authority = _END_OF_AUTHORITY.split(rest, maxsplit=1)[0]
    _host, colon, port = authority.partition(":")
    if not authority or "@" not in rest:
        return rest
    in_password = colon and not port.isdecimal() and not authority.startswith("[")
    if scheme.partition("+")[0] in _DATABASES or ("@" not in authority and in_password):
        return rest.rpartition("@")[2]
    return authority.rpartition("@")[2] + rest[len(authority) :]


def sqlite_file(url: str) -> Path | None:
    """The file behind a SQLite URL; None for any other URL."""
    scheme, separator, path = url.partition(":///")
    is_file = separator and scheme.partition("+")[0] == "sqlite" and path
    return Path(path.partition("?")[0]).absolute() if is_file else None
