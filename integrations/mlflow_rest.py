"""Looks up a registered version on an MLflow server over its REST API, without MLflow's client.

Importing the client takes seconds, more than most verbs take with a model URI. This module only knows the plain case:
a server that answers, with a password or token from the environment or without one. In every other case it returns
None, and the client is used, which knows the other ways to authenticate, tries again and reports errors.

Source: MLflow 3.17, `protos/model_registry.proto` (GetRegisteredModel, GetModelVersion, SearchModelVersions) and
`utils/rest_utils.py`.
"""

from __future__ import annotations

import os
import urllib.request
from base64 import b64encode
from http.client import HTTPException
from typing import Any
from urllib.parse import urlencode

from wherry.core.json_document import json_value
from wherry.integrations.mlflow_probe import require_answer
from wherry.integrations.mlflow_version import RegisteredVersion
from wherry.store.addresses import open_checked

_TIMEOUT_SECONDS = 10
_MOST_BYTES = 16 << 20
# Settings of MLflow's client that change how it connects or what it asks for.
_CLIENT_SETTINGS = (
    "MLFLOW_TRACKING_AUTH", "MLFLOW_TRACKING_AWS_SIGV4", "MLFLOW_TRACKING_INSECURE_TLS", "MLFLOW_WORKSPACE",
    "MLFLOW_TRACKING_CLIENT_CERT_PATH", "MLFLOW_TRACKING_SERVER_CERT_PATH",
)  # fmt: skip


def look_up(
    name: str, *, registry_uri: str, version: str | None = None, alias: str | None = None
) -> RegisteredVersion | None:
    """The version of a registered model with a number or an alias, else the newest.

    None if MLflow's client must answer.

    Raises:
        StorageError: the server does not answer.
    """
    scheme, _, rest = registry_uri.partition("://")
    if (
        scheme not in ("http", "https")
        or "@" in rest.partition("/")[0]  # credentials
        or any(os.environ.get(setting) for setting in _CLIENT_SETTINGS)
    ):
        return None
    require_answer(registry_uri)
    try:
        model = _get(registry_uri, "registered-models/get", name=name)["registered_model"]
        aliases = {row["alias"]: str(row["version"]) for row in model.get("aliases", ())}
        number = version if alias is None else aliases[alias]
        if number:
            row = _get(registry_uri, "model-versions/get", name=name, version=number)["model_version"]
        elif "'" in name:
            return None  # the filter cannot express it
        else:
            fields = {"filter": f"name='{name}'", "max_results": "1", "order_by": "version_number DESC"}
            row = _get(registry_uri, "model-versions/search", **fields)["model_versions"][0]
        tags = {tag["key"]: tag["value"] for tag in row.get("tags", ())}
        held = tuple(sorted(one for one, there in aliases.items() if there == str(row["version"])))
        return RegisteredVersion(row["name"], str(row["version"]), tags, held)
    except (OSError, HTTPException, ValueError, LookupError, TypeError, AttributeError):
        return None


def _get(registry_uri: str, method: str, **fields: str) -> dict[str, Any]:
    url = f"{registry_uri.rstrip('/')}/api/2.0/mlflow/{method}?{urlencode(fields)}"
    request = urllib.request.Request(url, headers=_credentials())  # noqa: S310  only http and https get here
    with open_checked(request, _TIMEOUT_SECONDS) as answer:
        return json_value(answer.read(_MOST_BYTES))


def by_password(user: str, password: str) -> dict[str, str]:
    """The header of HTTP Basic authentication."""
    return {"Authorization": f"Basic {b64encode(f'{user}:{password}'.encode()).decode()}"}


def _credentials() -> dict[str, str]:
    """A password comes before a token, as in MLflow."""
    user = os.environ.get("MLFLOW_TRACKING_USERNAME")
    password = os.environ.get("MLFLOW_TRACKING_PASSWORD")
    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    if user and password:
        return by_password(user, password)
    return {"Authorization": f"Bearer {token}"} if token else {}
