"""filesystems: the file systems of fsspec as wherry opens them, and calls of them that always end.

Each library retries in its own way: gcsfs up to 36 times in half a minute, botocore 5 times within 5 of s3fs. Here
they attempt once, and `wherry.remote.retries` repeats. A call of an asynchronous file system has a deadline in the
loop of fsspec, which then closes the connection; any other call runs in a thread of its own, which is left behind
when its time is over. No library keeps listings, of which wherry reads each anew: they take 1 kB for each object.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from wherry.errors import StorageError
from wherry.remote import azure, http_reads
from wherry.remote.addresses import checking_resolver, guard
from wherry.remote.errors import translate_error
from wherry.remote.failures import FAILURES, kind_of
from wherry.text.json_values import json_value

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

_T = TypeVar("_T")

_CONNECT_SECONDS = 10.0
_METADATA = "169.254.169.254"  # where Google Cloud and others answer questions of a machine about itself
_METADATA_SECONDS = 1.0
_LONGEST_MESSAGE = 300
_CONNECTIONS = 32  # to one store
_FIRST_FAILURE = 400  # the smallest status of HTTP that is an error


class _PassedOnError(Exception):
    """Carries an error through aiohttp, which replaces OSErrors, and through gcsfs, which retries those of aiohttp."""

    def __init__(self, error: StorageError) -> None:
        super().__init__(error.what)
        self.error = error


class AnswerError(Exception):
    """An answer of Google Cloud Storage with the status of a failure."""

    def __init__(self, status: int, headers: Mapping[str, str], text: str) -> None:
        super().__init__(f"HTTP {status}: {_message(text)}")
        self.status, self.headers = status, headers


def open_filesystem(protocol: str, timeout: float) -> Any:
    """The file system of a protocol; the same object for the same arguments.

    Args:
        protocol: of the URI.
        timeout: seconds without progress after which a request fails.

    Raises:
        ImportError: the package is not installed.
        ValueError: fsspec does not know the protocol.
    """
    import fsspec

    if protocol in ("gs", "gcs"):
        return _google(timeout)
    if protocol == "s3":
        return _amazon(timeout)
    if protocol in azure.PROTOCOLS:
        return azure.open_azure(timeout)
    if protocol in http_reads.PROTOCOLS:
        client = {"timeout": _aiohttp_timeout(timeout), "trace_configs": [http_reads.redirect_guard()]}
        ours = {"client_kwargs": client, "get_client": http_reads.open_session}
        return fsspec.filesystem(protocol, **_stated_options(protocol, **ours))
    return fsspec.filesystem(protocol)


def call_with_deadline(
    fs: Any, name: str | Callable[..., Awaitable[Any]], seconds: float, *args: Any, **kwargs: Any
) -> Any:
    """Call a method of a file system, or a coroutine function of ours with the file system.

    Raises:
        TimeoutError: it did not end within so many seconds.
        Exception: what the method raised.
    """
    if not isinstance(name, str):
        return call_async(fs, lambda: name(fs, *args, **kwargs), seconds)
    method = getattr(fs, f"_{name}", None) if getattr(fs, "async_impl", False) else None
    if method is None:
        return in_thread(lambda: getattr(fs, name)(*args, **kwargs), seconds)
    return call_async(fs, lambda: method(*args, **kwargs), seconds)


def call_async(fs: Any, call: Callable[[], Awaitable[_T]], seconds: float) -> _T:
    """Call an asynchronous function in the loop of an asynchronous file system.

    Raises:
        TimeoutError: it did not end within so many seconds.
        Exception: what the function raised.
    """
    from fsspec.asyn import sync

    try:
        return cast("_T", sync(fs.loop, call, timeout=seconds))
    except _PassedOnError as carrier:
        raise carrier.error from carrier.__cause__


def refresh_login(fs: Any, seconds: float) -> None:
    """Renew expired credentials of Google here; in the loop of fsspec that would stop all other calls.

    Raises:
        TimeoutError, Exception: it failed.
    """
    login: Any = getattr(fs, "credentials", None)
    held: Any = getattr(login, "credentials", None)
    if held is not None and not held.valid:
        in_thread(login.maybe_refresh, seconds)


def in_thread(call: Callable[[], _T], seconds: float) -> _T:
    """The result of a call in a daemon thread, for which no exit of the process waits.

    Raises:
        TimeoutError: it did not end within so many seconds.
        Exception: what the call raised.
    """
    done, result, failure = threading.Event(), list[_T](), list[BaseException]()

    def work() -> None:
        try:
            result.append(call())
        except BaseException as error:  # noqa: BLE001  raised again where the result is waited for
            failure.append(error)
        finally:
            done.set()

    threading.Thread(target=work, name="wherry-storage", daemon=True).start()
    if not done.wait(seconds):
        raise TimeoutError
    if failure:
        raise failure[0]
    return result[0]


def _stated_options(protocol: str, **ours: Any) -> dict[str, Any]:
    """Our options of a file system, below those that the user's configuration of fsspec states."""
    from fsspec.config import conf

    stated: dict[str, Any] = conf.get(protocol, {})
    return {
        name: {**value, **stated.get(name, {})} if isinstance(value, dict) else stated.get(name, value)
        for name, value in ours.items()
    }


def _message(text: str) -> str:
    """The message of a JSON answer; the beginning of any other text."""
    with suppress(ValueError, KeyError, TypeError):
        text = str(json_value(text)["error"]["message"])
    return text[:_LONGEST_MESSAGE]


def _aiohttp_timeout(timeout: float) -> Any:
    from aiohttp import ClientTimeout

    return ClientTimeout(total=None, sock_connect=min(_CONNECT_SECONDS, timeout), sock_read=timeout)


def _google(timeout: float) -> Any:
    """GCSFileSystem with one attempt for each request; see decision 029 for why it is the class of `gcsfs.core`."""
    import gcsfs
    from gcsfs.core import GCSFileSystem

    kind = gcsfs.GCSFileSystem if os.environ.get("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT") else GCSFileSystem
    session = {
        "timeout": _aiohttp_timeout(timeout),
        "middlewares": (_fail_at_once,),
        "trace_configs": [http_reads.redirect_guard()],
    }
    anonymous = {} if _has_google_login() else {"token": "anon"}
    fs: Any = kind(**_stated_options("gs", session_kwargs=session, use_listings_cache=False, **anonymous))
    if "_set_session" not in vars(fs):  # fsspec returns the same object again
        fs._set_session = partial(_guarded_session, fs._set_session)  # noqa: SLF001  gcsfs has no option for it
    return fs


async def _guarded_session(opening: Callable[[], Awaitable[Any]]) -> Any:
    """The session of gcsfs, whose connections are checked."""
    session = await opening()
    return session if "_resolve_host" in vars(session.connector) else guard(session, configured=True)


def _amazon(timeout: float) -> Any:
    from s3fs import S3FileSystem

    config = {
        "signature_version": "s3v4",  # of presigned URLs too, which have an older one by default
        "connect_timeout": min(_CONNECT_SECONDS, timeout),
        "read_timeout": timeout,
        "retries": {"mode": "standard", "total_max_attempts": 1},
        "max_pool_connections": _CONNECTIONS,
        "connector_args": {"resolver": checking_resolver()},
    }
    fs: Any = S3FileSystem(**_stated_options("s3", config_kwargs=config, use_listings_cache=False))
    fs.retries = 1
    return fs


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
            raise _PassedOnError(found) from error
        raise
    return response


async def require_success(response: Any) -> None:
    """Raise if Google Cloud Storage answered with a failure that `wherry.remote.failures` knows."""
    if response.status >= _FIRST_FAILURE:
        error = AnswerError(response.status, response.headers, await response.text())
        if kind_of(error) in FAILURES:
            raise error


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
