"""Delivery of OpenLineage events: appended to a file, one JSON object per line, or posted to a server.

A line is appended under a lock and synced, so that lines of several processes do not mix; an event counts as delivered
when the file is synced to disk, or the server has answered with success. Credentials come only from
`OPENLINEAGE_API_KEY`, are sent only over the requested connection (redirects are not followed), and are never part of
an error.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit

from wherry.core.emit import post
from wherry.cures import Command, Cure
from wherry.errors import StorageError, UsageError, storage_error
from wherry.store.home import without_secrets

API_KEY = "OPENLINEAGE_API_KEY"
_PATH = "/api/v1/lineage"
_SECONDS = 5.0  # for one event: with automatic delivery, a conversion waits for it
_CURE = Cure("check the server, then run {}", Command("ledger deliver", "openlineage"))


def transport(destination: str) -> Callable[[Sequence[dict[str, Any]]], None]:
    """Make a function that sends events to a destination.

    Args:
        destination: a path, a `file://` URL or an http(s) URL; an http(s) URL without a path gets the path of the API.

    Raises:
        UsageError: the destination is none of these, or contains a user or password.
    """
    parts = urlsplit(destination)
    if parts.username or parts.password:
        raise UsageError(
            "the destination of OpenLineage events contains a user or password",
            uri=without_secrets(destination),
            cure=f"remove them from the URL and set {API_KEY}",
        )
    if parts.scheme in ("http", "https"):
        return partial(_post, destination if parts.path.strip("/") else destination.rstrip("/") + _PATH)
    if parts.scheme in ("", "file") and parts.path:
        return partial(_append, str(Path(parts.path).absolute()))
    raise UsageError(
        "invalid destination of OpenLineage events; expected a file or an http(s) URL",
        uri=without_secrets(destination),
        cure="set for example WHERRY_OPENLINEAGE=/var/log/wherry/lineage.jsonl",
    )


def _append(path: str, events: Sequence[dict[str, Any]]) -> None:
    lines = "".join(f"{json.dumps(event)}\n" for event in events).encode()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        with os.fdopen(descriptor, "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise storage_error(error, path) from error


def _post(url: str, events: Sequence[dict[str, Any]]) -> None:
    shown = without_secrets(url)
    key = os.environ.get(API_KEY)
    headers = {"User-Agent": "wherry", **({"Authorization": f"Bearer {key}"} if key else {})}
    for event in events:
        try:
            post(url, json.dumps(event), headers, timeout=_SECONDS)
        except HTTPError as error:
            again = (
                error.code >= HTTPStatus.INTERNAL_SERVER_ERROR or error.code == HTTPStatus.TOO_MANY_REQUESTS
            )
            raise StorageError(
                f"the OpenLineage server returned HTTP status {error.code}",
                uri=shown,
                cure=_CURE,
                retryable=again,
            ) from None
        except OSError as error:
            reason = getattr(error, "reason", error)
            raise StorageError(
                f"cannot connect to the OpenLineage server: {reason}", uri=shown, cure=_CURE, retryable=True
            ) from None
