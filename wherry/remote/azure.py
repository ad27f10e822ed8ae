"""azure: the file system of adlfs as wherry opens it, and requests to Azure that adlfs does not make as needed here.

The account and its credentials are those that adlfs finds: `AZURE_STORAGE_CONNECTION_STRING`, or
`AZURE_STORAGE_ACCOUNT_NAME` with a key, a token or the login of `az login`. The client of Azure attempts each request
four times within half a minute; here it attempts once, and `wherry.remote.retries` repeats.
"""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING, Any

from wherry.errors import UsageError
from wherry.remote.addresses import guard

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PROTOCOLS = ("az", "abfs", "abfss")
_CONNECT_SECONDS = 10.0
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


async def blocks_of(fs: Any, path: str, start: int, stop: int, mark: str) -> AsyncIterator[bytes]:
    """Bytes [start, stop) of a blob, in order; in one state, if it is named by its ETag."""
    from azure.core import MatchConditions

    container, _, name = path.partition("/")
    how = {"etag": mark, "match_condition": MatchConditions.IfNotModified} if mark else {}
    blob = fs.service_client.get_blob_client(container, name)
    answer = await blob.download_blob(offset=start, length=stop - start, max_concurrency=1, **how)
    async for block in answer.chunks():
        yield block


async def children(fs: Any, path: str) -> list[dict[str, Any]]:
    """The children of a folder, as `ls` of fsspec tells them; adlfs lists all folders whose names begin alike.

    Raises:
        FileNotFoundError: the folder does not exist.
    """
    container, _, name = path.strip("/").partition("/")
    prefix = f"{name}/" if name else ""
    client = fs.service_client.get_container_client(container)
    found = client.walk_blobs(name_starts_with=prefix, include=["metadata"], delimiter="/")
    rows = await fs._details([one async for one in found])  # noqa: SLF001  the rows of `ls`
    if name and not rows:
        raise FileNotFoundError(path)
    # Where folders are blobs too, a folder is listed twice.
    return list(
        {row["name"]: row for row in sorted(rows, key=lambda row: row["type"] == "directory")}.values()
    )


async def list_one(fs: Any, container: str) -> None:
    """List one blob of a container."""
    found = fs.service_client.get_container_client(container).list_blobs(results_per_page=1)
    async for _one in found:
        return


@cache
def _kind(timeout: float) -> Any:
    """The class of adlfs with one attempt for each request; fsspec keeps one file system for each class."""
    from adlfs import AzureBlobFileSystem
    from azure.core.pipeline.transport import AioHttpTransport
    from azure.storage.blob.aio import BlobServiceClient

    options: dict[str, Any] = {
        "retry_total": 0,
        "connection_timeout": min(_CONNECT_SECONDS, timeout),
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

    stated = {name for protocol in PROTOCOLS for name in conf.get(protocol, {})}
    return any(os.environ.get(f"AZURE_STORAGE_{name.upper()}") or name in stated for name in _ACCOUNTS)
