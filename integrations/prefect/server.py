"""The Prefect server that the commands talk to: its address, and whether it answers.

Prefect's client waits a minute for each of several attempts and says nothing; a request beforehand takes seconds.
"""

from __future__ import annotations

from prefect.settings import get_current_settings

from wherry.errors import StorageError, UsageError
from wherry.remote.probe import silence_of
from wherry.storage.home import without_secrets

CURE = "start it with `prefect server start`, or check PREFECT_API_URL"


def answering_server() -> str | None:
    """The API URL of the configured server, after checking that it answers; None where none is configured.

    Raises:
        StorageError: it does not answer within 5 seconds; a retry can help.
    """
    api = get_current_settings().api.url
    if not api:
        return None
    shown = without_secrets(api)
    reason = silence_of(api, shown)
    if reason is not None:
        raise StorageError(f"Prefect does not answer: {reason}", uri=shown, cure=CURE, retryable=True)
    return api


def required_server() -> str:
    """As `answering_server`, where a server is needed.

    Raises:
        UsageError: no server is configured.
        StorageError: it does not answer within 5 seconds; a retry can help.
    """
    api = answering_server()
    if api is None:
        raise UsageError(
            "no Prefect server configured",
            cure="run `prefect server start` and set PREFECT_API_URL to the URL that it prints",
        )
    return api
