"""azure_session: the file system of adlfs as wherry opens it.

The account and its credentials are those that adlfs finds: `AZURE_STORAGE_CONNECTION_STRING`, or
`AZURE_STORAGE_ACCOUNT_NAME` with a key, a token or the login of `az login`. The client of Azure attempts each request
four times within half a minute; here it attempts once, and `wherry.remote.retries` repeats.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from wherry.errors import UsageError
from wherry.remote.addresses import guard
from wherry.remote.failures import AZURE
from wherry.remote.filesystems import CONNECT_SECONDS

_ACCOUNTS = ("account_name", "connection_string")  # options of adlfs, one of which names the account


class NoCredentialsError(Exception):
    """No account is named, and so no credentials are either."""


def open_azure(timeout: float) -> Any:
    """The file system of adlfs, with one attempt for each request.

    Args:
        timeout: seconds without progress after which a request fails.

    Raises:
        ImportError: adlfs is not installed.
        NoCredentialsError: no account is named.
        UsageError: what names it is malformed.
    """
    kind = _kind(timeout)
    if not _has_account():
        raise NoCredentialsError("no storage account is named")
    try:
        return kind()
    except ValueError as error:
        raise UsageError(
            "the connection string or the key of the Azure account is malformed",
            cure="set AZURE_STORAGE_CONNECTION_STRING as the page Access keys of the account shows it",
        ) from error


@cache
def _kind(timeout: float) -> Any:
    """The class of adlfs with one attempt for each request; fsspec keeps one file system for each class."""
    from adlfs import AzureBlobFileSystem
    from azure.core.pipeline.transport import AioHttpTransport
    from azure.storage.blob.aio import BlobServiceClient

    options: dict[str, Any] = {
        "retry_total": 0,
        "connection_timeout": min(CONNECT_SECONDS, timeout),
        "read_timeout": timeout,
    }

    class CheckedTransport(AioHttpTransport):
        async def open(self) -> None:
            await super().open()
            session: Any = self.session
            if "_resolve_host" not in vars(session.connector):
                guard(session, configured=True)

    class OneAttempt(AzureBlobFileSystem):
        def do_connect(self) -> None:
            super().do_connect()
            opened: Any = self.service_client
            self.service_client = BlobServiceClient(
                opened.url, credential=opened.credential, transport=CheckedTransport(**options), **options
            )

    return OneAttempt


def _has_account() -> bool:
    """Whether the environment, or the user's configuration of fsspec, names an account."""
    from fsspec.config import conf

    stated = {name for protocol in AZURE for name in conf.get(protocol, {})}
    return any(os.environ.get(f"AZURE_STORAGE_{name.upper()}") or name in stated for name in _ACCOUNTS)
