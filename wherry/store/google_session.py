"""google_session: the file system of gcsfs as wherry opens it: one attempt for each request, checked addresses."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wherry.errors import StorageError
from wherry.remote.addresses import guard, redirect_guard
from wherry.remote.errors import translate_error
from wherry.remote.failures import FAILURES, kind_of
from wherry.remote.filesystems import PassedOnError, aiohttp_timeout, in_thread, stated_options
from wherry.text.json_values import json_value

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

_METADATA = "169.254.169.254"  # where Google Cloud and others answer questions of a machine about itself
_METADATA_SECONDS = 1.0
_LONGEST_MESSAGE = 300
_FIRST_FAILURE = 400  # the smallest status of HTTP that is an error


class AnswerError(Exception):
    """An answer of Google Cloud Storage with the status of a failure."""

    def __init__(self, status: int, headers: Mapping[str, str], text: str) -> None:
        super().__init__(f"HTTP {status}: {_message(text)}")
        self.status, self.headers = status, headers


def open_google(timeout: float) -> Any:
    """GCSFileSystem with one attempt for each request; see decision 029 for why it is the class of `gcsfs.core`."""
    import gcsfs
    from gcsfs.core import GCSFileSystem

    kind = gcsfs.GCSFileSystem if os.environ.get("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT") else GCSFileSystem
    session = {
        "timeout": aiohttp_timeout(timeout),
        "middlewares": (_fail_at_once,),
        "trace_configs": [redirect_guard()],
    }
    anonymous = {} if _has_google_login() else {"token": "anon"}
    fs: Any = kind(**stated_options("gs", session_kwargs=session, use_listings_cache=False, **anonymous))
    if "_set_session" not in vars(fs):  # fsspec returns the same object again
        fs._set_session = partial(_guarded_session, fs._set_session)  # noqa: SLF001  gcsfs has no option for it
    return fs


async def _guarded_session(opening: Callable[[], Awaitable[Any]]) -> Any:
    """The session of gcsfs, whose connections are checked."""
    session = await opening()
    return session if "_resolve_host" in vars(session.connector) else guard(session, configured=True)


def refresh_login(fs: Any, seconds: float) -> None:
    """Renew expired credentials of Google here; in the loop of fsspec that would stop all other calls.

    Raises:
        TimeoutError, Exception: it failed.
    """
    login: Any = getattr(fs, "credentials", None)
    held: Any = getattr(login, "credentials", None)
    if held is not None and not held.valid:
        in_thread(login.maybe_refresh, seconds)


async def _fail_at_once(request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
    """Middleware of aiohttp: what gcsfs would retry or log is raised as an error that it passes on.

    The body is read here too, so that a connection that is cut in the middle counts.
    """
    from aiohttp import ClientError

    try:
        response: Any = await handler(request)
        await require_success(response)
        await response.read()
    except (ClientError, TimeoutError, AnswerError) as error:
        found = translate_error(error, "gs", "")
        if isinstance(found, StorageError):
            raise PassedOnError(found) from error
        raise
    return response


async def require_success(response: Any) -> None:
    """Raise if Google Cloud Storage answered with a failure that `wherry.remote.failures` knows."""
    if response.status >= _FIRST_FAILURE:
        error = AnswerError(response.status, response.headers, await response.text())
        if kind_of(error) in FAILURES:
            raise error


def _message(text: str) -> str:
    """The message of a JSON answer; the beginning of any other text."""
    with suppress(ValueError, KeyError, TypeError):
        text = str(json_value(text)["error"]["message"])
    return text[:_LONGEST_MESSAGE]


def _has_google_login() -> bool:
    """Whether any source of Google credentials exists: else its library asks the metadata server for half a minute."""
    folder = Path(os.environ.get("CLOUDSDK_CONFIG") or Path("~/.config/gcloud").expanduser())
    files = (folder / "application_default_credentials.json", Path("~/.gcs_tokens").expanduser())
    if os.environ.get("GOOGLE_APPLICATION_CREDENTIALS") or any(file.exists() for file in files):
        return True
    if os.environ.get("STORAGE_EMULATOR_HOST") or os.environ.get("NO_GCE_CHECK") == "true":
        return False
    return _is_google_metadata(os.environ.get("GCE_METADATA_HOST") or _METADATA)


def _is_google_metadata(host: str) -> bool:
    """Whether a server names itself as that of Google; other clouds have one at the same address."""
    from http.client import HTTPConnection, HTTPException

    connection = HTTPConnection(host, timeout=_METADATA_SECONDS)
    try:
        connection.request("GET", "/", headers={"Metadata-Flavor": "Google"})
        return connection.getresponse().headers.get("Metadata-Flavor") == "Google"
    except (OSError, HTTPException, ValueError):
        return False
    finally:
        connection.close()
