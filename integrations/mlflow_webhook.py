"""Receives MLflow's webhooks, and tells Prefect when a version gets an alias.

`application` is a WSGI application for any server of that interface, behind TLS, which MLflow requires of a webhook:

    WHERRY_WEBHOOK_SECRET=… gunicorn --bind 127.0.0.1:8090 wherry.integrations.mlflow_webhook:application

Of the messages `model_version_alias.created` it makes events `wherry.alias.created`. The event's resource has the
labels `uri` (models:/NAME/VERSION, the same version also when the alias has moved on), `model` and `alias`. A
deployment is started by such an event; its trigger states which alias it obeys, and under which policy it promotes.

What is refused, since whoever reaches the address may post to it:

1. A message that the webhook's secret has not signed, with its time and number: 401.
2. A signed one that is recorded and posted again: its time is over (401), or its number was seen (409). The event has
   the number as its id, and Prefect takes an event once, also from several processes of the receiver.
3. A large one: 413, before it is read.

If Prefect does not accept the event, the status is 502, after which MLflow tries again.

Source: MLflow 3.17, `webhooks/delivery.py`: the signature is `v1,` and Base64 of HMAC-SHA256 over number, time and
body, joined by dots.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import time
import uuid
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from wherry.core.emit import event_body, post_event
from wherry.core.json_document import parse_json
from wherry.core.limits import SMALL
from wherry.errors import WherryError

ALIAS_CREATED = "wherry.alias.created"
_SECRET = "WHERRY_WEBHOOK_SECRET"  # noqa: S105  the name of the variable
_MOST_BYTES = 64 << 10
_WINDOW_SECONDS = 240  # Prefect remembers the ids of events for five minutes
_seen: dict[str, float] = {}  # number of a delivery that became an event → its time


def application(environ: Mapping[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """Answer one request, as WSGI requires."""
    status, text = _receive(environ)
    content = f"{text}\n".encode()
    headers = [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(content)))]
    start_response(f"{status.value} {status.phrase}", headers)
    return [content]


def _receive(environ: Mapping[str, Any]) -> tuple[HTTPStatus, str]:  # noqa: PLR0911  a table of answers
    secret = os.environ.get(_SECRET, "")
    if not secret:
        return HTTPStatus.INTERNAL_SERVER_ERROR, f"{_SECRET} is not set"
    if environ["REQUEST_METHOD"] != "POST":
        return HTTPStatus.METHOD_NOT_ALLOWED, "only POST is answered"
    length = environ.get("CONTENT_LENGTH") or "0"
    if not length.isdecimal() or int(length) > _MOST_BYTES:
        return HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "the message is too large"
    data = environ["wsgi.input"].read(int(length))
    number, now = environ.get("HTTP_X_MLFLOW_DELIVERY_ID", ""), time.time()
    refused = _refusal(environ, secret, number, data, now)
    if refused is not None:
        return refused
    try:
        event = _event(parse_json(data, "the message", limits=SMALL), number)
    except (WherryError, KeyError, TypeError, ValueError):
        return HTTPStatus.BAD_REQUEST, "this is not a message of MLflow"
    if event is None:
        return HTTPStatus.OK, "ignored: no version has got an alias"
    try:
        post_event(event)
    except (OSError, ValueError) as error:
        return HTTPStatus.BAD_GATEWAY, f"Prefect did not accept the event: {error}"
    _seen[number] = now
    return HTTPStatus.OK, f"{ALIAS_CREATED} {event['id']}"


def _refusal(
    environ: Mapping[str, Any], secret: str, number: str, data: bytes, now: float
) -> tuple[HTTPStatus, str] | None:
    """The answer to a message that is not signed, not of now, or not new; None if it is all three."""
    stated, signature = environ.get("HTTP_X_MLFLOW_TIMESTAMP", ""), environ.get("HTTP_X_MLFLOW_SIGNATURE", "")
    content = b".".join((number.encode("latin-1"), stated.encode("latin-1"), data))
    expected = b"v1," + b64encode(hmac.new(secret.encode(), content, hashlib.sha256).digest())
    if not hmac.compare_digest(expected, signature.encode("latin-1")):
        return HTTPStatus.UNAUTHORIZED, "the signature is not that of the secret"
    if not stated.isdecimal() or abs(now - int(stated)) > _WINDOW_SECONDS:
        return HTTPStatus.UNAUTHORIZED, "the time of the message is over"
    for old in [one for one, posted in _seen.items() if now - posted > 2 * _WINDOW_SECONDS]:
        _seen.pop(old, None)
    return (HTTPStatus.CONFLICT, "this message was received before") if number in _seen else None


def _event(message: Any, number: str) -> dict[str, Any] | None:
    """The event about a version that has got an alias; None if the message is about something else."""
    if (message["entity"], message["action"]) != ("model_version_alias", "created"):
        return None
    name, version, alias = (str(message["data"][key]) for key in ("name", "version", "alias"))
    event = event_body(f"models:/{quote(name, safe='')}/{version}", event=ALIAS_CREATED)
    event["resource"] |= {"model": name, "alias": alias}
    return {**event, "id": str(uuid.UUID(number))}
