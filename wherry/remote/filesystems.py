"""filesystems: calls of the file systems of fsspec that always end, and the options that all of them get.

Each library retries in its own way: gcsfs up to 36 times in half a minute, botocore 5 times within 5 of s3fs. The
classes of `wherry.store` open them such that they attempt once, and `wherry.remote.retries` repeats. A call of an
asynchronous file system has a deadline in the loop of fsspec, which then closes the connection; any other call runs in
a thread of its own, which is left behind when its time is over. No library keeps listings, of which wherry reads each
anew: they take 1 kB for each object.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from wherry.errors import StorageError

_T = TypeVar("_T")

CONNECT_SECONDS = 10.0
CONNECTIONS = 32  # to one store


class PassedOnError(Exception):
    """Carries an error through aiohttp, which replaces OSErrors, and through gcsfs, which retries those of aiohttp."""

    def __init__(self, error: StorageError) -> None:
        super().__init__(error.what)
        self.error = error


def call_with_deadline(fs: Any, name: str, seconds: float, *args: Any, **kwargs: Any) -> Any:
    """Call a method of a file system.

    Raises:
        TimeoutError: it did not end within so many seconds.
        Exception: what the method raised.
    """
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
    except PassedOnError as carrier:
        raise carrier.error from carrier.__cause__


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


def stated_options(protocol: str, **ours: Any) -> dict[str, Any]:
    """Our options of a file system, below those that the user's configuration of fsspec states."""
    from fsspec.config import conf

    stated: dict[str, Any] = conf.get(protocol, {})
    return {
        name: {**value, **stated.get(name, {})} if isinstance(value, dict) else stated.get(name, value)
        for name, value in ours.items()
    }


def aiohttp_timeout(timeout: float) -> Any:
    """The timeouts of a session of aiohttp, of which none is for a whole transfer."""
    from aiohttp import ClientTimeout

    return ClientTimeout(total=None, sock_connect=min(CONNECT_SECONDS, timeout), sock_read=timeout)
