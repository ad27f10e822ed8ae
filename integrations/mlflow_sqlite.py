"""Looks up a registered version in the SQLite file of an MLflow registry, without MLflow's client.

Importing the client takes seconds, more than most verbs take with a model URI. This module only knows the plain case:
a file with a schema that it knows, without workspaces. In every other case it returns None, and the client is used,
which creates and checks the schema. The file is opened for reading only; every write is left to the client.

Source: MLflow 3.17, `store/model_registry/dbmodels/models.py`, `store/model_registry/sqlalchemy_store.py`
(get_registered_model, get_model_version) and `store/db_migrations/versions`.
"""

from __future__ import annotations

import os
import sqlite3

from wherry.integrations.mlflow_version import (
    MOST_NAMES,
    RegisteredVersion,
    no_version,
    unknown_alias,
    unknown_model,
    unknown_version,
)
from wherry.store.home import sqlite_file, sqlite_to_read, without_secrets

# Revisions of MLflow's schema in which the tables below are the same: from the one that added workspaces to the last
# one of MLflow 3.17, in this order.
_REVISIONS = frozenset({
    "1b5f0d9ad7c1", "e1f2a3b4c5d6", "76601a5f987d", "c3d6457b6d8a", "a5b4c3d2e1f0", "ae8bbe7743c9", "7d34483879f0",
    "da6fb0208061", "89d3d66ed43f", "b7e4c1a90f23", "a8b9c0d1e2f3", "c1d2e3f4a5b6", "c3d9e7f1a2b4", "6f8d9c3b2a1e",
    "1971f2d9a75b", "17e22815139b", "b7e2c1a4d9f3", "75868b020152", "dc11669786a5",
})  # fmt: skip
_WORKSPACE = "default"  # the workspace of everything where workspaces are not enabled
_CLIENT_SETTINGS = ("MLFLOW_ENABLE_WORKSPACES", "MLFLOW_WORKSPACE")
_DELETED = "Deleted_Internal"  # stage of a deleted version

_TABLES = (
    "alembic_version",
    "registered_models",
    "registered_model_aliases",
    "model_versions",
    "model_version_tags",
)
_REVISION = "SELECT version_num FROM alembic_version"
_ELSEWHERE = "SELECT 1 FROM registered_models WHERE workspace <> ? LIMIT 1"
_MODEL = "SELECT 1 FROM registered_models WHERE workspace = ? AND name = ?"
_NAMES = "SELECT name FROM registered_models WHERE workspace = ? ORDER BY name LIMIT ?"
_ALIASES = "SELECT alias, version FROM registered_model_aliases WHERE workspace = ? AND name = ?"
_VERSION = "SELECT version FROM model_versions WHERE workspace = ? AND name = ? AND version = ? AND current_stage <> ?"
_NUMBERS = (
    "SELECT version FROM model_versions WHERE workspace = ? AND name = ? AND current_stage <> ? "
    "ORDER BY version DESC LIMIT ?"
)
_NEWEST = "SELECT max(version) FROM model_versions WHERE workspace = ? AND name = ? AND current_stage <> ?"
_TAGS = "SELECT key, value FROM model_version_tags WHERE workspace = ? AND name = ? AND version = ?"


def look_up(
    name: str, *, registry_uri: str, version: str | None = None, alias: str | None = None
) -> RegisteredVersion | None:
    """The version of a registered model with a number or an alias, else the newest.

    None if MLflow's client must answer.

    Raises:
        NotFoundError: as the client raises it: the model, version or alias does not exist.
    """
    file = sqlite_file(registry_uri)
    if file is None or "?" in registry_uri or any(os.environ.get(setting) for setting in _CLIENT_SETTINGS):
        return None
    uri = without_secrets(registry_uri)
    try:
        with sqlite_to_read(file, _TABLES) as connection:
            connection.execute("BEGIN")  # one snapshot for all queries
            revisions = {row[0] for row in connection.execute(_REVISION)}
            if len(revisions) != 1 or not revisions <= _REVISIONS:
                return None
            if connection.execute(_ELSEWHERE, (_WORKSPACE,)).fetchone() is not None:
                return None  # a model is in another workspace
            return _find_version(connection, name, version, alias, uri)
    except (
        sqlite3.Error,
        ValueError,
        OverflowError,
    ):  # ValueError: a number that is none; OverflowError: too large
        return None


def _find_version(
    connection: sqlite3.Connection, name: str, version: str | None, alias: str | None, uri: str
) -> RegisteredVersion | None:
    model = (_WORKSPACE, name)
    if connection.execute(_MODEL, model).fetchone() is None:
        if ":" in name:  # an invalid name, about which the client says more
            return None
        known = connection.execute(_NAMES, (_WORKSPACE, MOST_NAMES)).fetchall()
        raise unknown_model(name, [row[0] for row in known], uri)
    aliases = {word: int(number) for word, number in connection.execute(_ALIASES, model)}
    if version is not None:
        number = int(version)
    elif alias is not None:
        number = aliases.get(alias)
    else:
        number = connection.execute(_NEWEST, (*model, _DELETED)).fetchone()[0]
    if number is None:
        raise unknown_alias(name, alias, aliases) if alias is not None else no_version(name, uri)
    if connection.execute(_VERSION, (*model, number, _DELETED)).fetchone() is None:
        numbers = connection.execute(_NUMBERS, (*model, _DELETED, MOST_NAMES)).fetchall()
        raise unknown_version(name, str(number), [row[0] for row in numbers], uri)
    tags = dict(connection.execute(_TAGS, (*model, number)).fetchall())
    if None in tags.values():  # the column allows it, and the client has its own way with it
        return None
    held = tuple(sorted(word for word, there in aliases.items() if there == number))
    return RegisteredVersion(name, str(number), tags, held)
