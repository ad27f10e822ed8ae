"""emit: tell a Prefect server that a checkpoint was committed, so that its deployments can convert it.

This module uses only the standard library: a trainer may copy it to a machine without wherry and Prefect. It sends one
`POST /events` to the server at `PREFECT_API_URL`, with the credentials that Prefect's own client uses:
`PREFECT_API_KEY` (Prefect Cloud) or `PREFECT_API_AUTH_STRING` (a server with basic authentication). They are sent in a
header and appear nowhere else. Redirects are not followed: a redirected POST arrives as a GET that posts nothing, and
would carry the credentials along. An event may get lost; the nightly run finds the checkpoint all the same.

    python emit.py gs://runs/llama/checkpoint_12000
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import urllib.request

COMMITTED = "wherry.checkpoint.committed"
FAILED = "wherry.export.failed"


def emit(
    uri: str,
    *,
    event: str = COMMITTED,
    step: int | None = None,
    payload: Mapping[str, Any] | None = None,
    api: str | None = None,
    timeout: float = 10.0,
    strict: bool = True,
) -> str:
    """Post one event about a checkpoint.

    Args:
        uri: URI or path of the checkpoint; the resource of the event, `{{ event.resource['uri'] }}` in a trigger. A
            relative path is made absolute, as the run that the event starts has another working directory.
        event: name of the event.
        step: training step, where known.
        payload: further JSON values of the event.
        api: base URL of the server's API; `PREFECT_API_URL` by default.
        timeout: seconds to wait for the server.
        strict: whether an event that cannot be posted is an error. In a training loop it must not be: it is logged.

    Returns:
        The id of the event; empty where it was not posted and `strict` is off.

    Raises:
        ValueError: no server is configured.
        OSError: the server did not accept the event.
    """
    try:
        body = event_body(whole_uri(uri), event=event, step=step, payload=payload)
        return post_event(body, api=api, timeout=timeout)
    except (ValueError, OSError) as error:
        if strict:
            raise
        logging.getLogger("wherry.emit").warning(
            "could not send the event for %s: %s; the nightly run finds the checkpoint", uri, error
        )
        return ""


def whole_uri(uri: str) -> str:
    """The URI itself, or the absolute path of a path."""
    return uri if re.match(r"[A-Za-z][\w+.-]*:/", uri) else os.path.abspath(os.path.expanduser(uri))  # noqa: PTH100, PTH111  a string


def post_event(body: dict[str, Any], *, api: str | None = None, timeout: float = 10.0) -> str:
    """Post the body of an event. Posted again, it stays one event: Prefect knows it by its id.

    Args:
        body: as `event_body` returns it.
        api, timeout: as for `emit`.

    Returns:
        The id of the event.

    Raises:
        ValueError: no server is configured.
        OSError: the server did not accept the event.
    """
    base = (api or os.environ.get("PREFECT_API_URL") or "").rstrip("/")
    if not base.startswith(("http://", "https://")):
        raise ValueError("missing or invalid Prefect API URL: PREFECT_API_URL must be an http or https URL")
    post(f"{base}/events", json.dumps([body]), _credentials(), timeout=timeout)
    return body["id"]


def post(url: str, text: str, headers: Mapping[str, str], *, timeout: float) -> None:
    """Post JSON to an http or https address; redirects are not followed.

    Args:
        url: the address; the caller has checked its scheme.
        text: the JSON.
        headers: further headers.
        timeout: seconds to wait for the server.

    Raises:
        urllib.error.HTTPError: the server did not accept it.
        OSError: the server cannot be reached, or does not speak HTTP.
        ValueError: it is not an address.
    """
    import http.client  # only sending needs it and urllib, and they take longer than a small command
    import urllib.error
    import urllib.request

    headers = {"Content-Type": "application/json", **headers}
    request = urllib.request.Request(url, text.encode(), headers, method="POST")  # noqa: S310  see above
    try:
        with opener().open(request, timeout=timeout) as answer:
            answer.read()  # a truncated answer is an error
    except OSError as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # it holds the connection
        raise
    except http.client.HTTPException as error:
        raise OSError(f"invalid HTTP response: {type(error).__name__}") from error


def opener(*handlers: urllib.request.BaseHandler) -> urllib.request.OpenerDirector:
    """An opener that follows no redirect, so that credentials and message reach only the given address.

    Args:
        handlers: further handlers of urllib.
    """
    import urllib.request

    class Stay(urllib.request.HTTPRedirectHandler):
        """Turns redirects into errors."""

        def redirect_request(self, *_arguments: Any, **_named: Any) -> None:
            """See HTTPRedirectHandler; None makes the response an error."""

    return urllib.request.build_opener(Stay, *handlers)


def event_body(
    uri: str, *, event: str = COMMITTED, step: int | None = None, payload: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The JSON body of the event; all labels of the resource are strings."""
    import hashlib  # with OpenSSL, which an absolute path does not need

    resource = {
        "prefect.resource.id": f"wherry.checkpoint.{hashlib.sha256(uri.encode()).hexdigest()[:16]}",
        "prefect.resource.name": uri,
        "uri": uri,
        **({} if step is None else {"step": str(step)}),
    }
    return {
        "id": str(uuid.uuid4()),
        "occurred": datetime.now(UTC).isoformat(),
        "event": event,
        "resource": resource,
        "related": [],
        "payload": {"schema": 1, **(payload or {})},
    }


def _credentials() -> dict[str, str]:
    key, pair = os.environ.get("PREFECT_API_KEY"), os.environ.get("PREFECT_API_AUTH_STRING")
    if key:
        return {"Authorization": f"Bearer {key}"}
    import base64

    return {"Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"} if pair else {}


if __name__ == "__main__":
    sys.stdout.write(emit(sys.argv[1]) + "\n")
