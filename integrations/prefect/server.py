"""The Prefect server that the commands talk to: its address, and whether it answers.

Prefect's client waits a minute for each of several attempts and says nothing; a request beforehand says what is
waited for.
"""

from __future__ import annotations

from prefect.settings import get_current_settings

from wherry.errors import UsageError
from wherry.store.home import without_secrets
from wherry.store.probe import await_answer

CURE = "start it with `prefect server start`, or check PREFECT_API_URL"


def answering_server() -> str | None:
    """The API URL of the configured server, once it answers; None where none is configured.

    Raises:
        StorageError: it does not answer within twice the `storage_timeout`; a retry can help.
    """
    api = get_current_settings().api.url
    if not api:
        return None
    await_answer(api, without_secrets(api), "Prefect", CURE)
    return api


def required_server() -> str:
    """Like `answering_server`, where a server is needed.

    Raises:
        UsageError: no server is configured.
        StorageError: it does not answer within twice the `storage_timeout`; a retry can help.
    """
    api = answering_server()
    if api is None:
        raise UsageError(
            "no Prefect server configured",
            cure="run `prefect server start` and set PREFECT_API_URL to the URL that it prints",
        )
    return api
