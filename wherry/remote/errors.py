"""Translates errors of the storage libraries (s3fs, gcsfs, huggingface_hub and their HTTP clients) into WherryErrors.

`wherry.remote.failures` has the kinds of failure with words and cures. Unrecognised exceptions are left unchanged.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from textwrap import shorten
from typing import TYPE_CHECKING

from wherry.credentials import redact
from wherry.errors import NotFoundError, StorageError, UnsupportedError, UsageError, WherryError
from wherry.remote.addresses import refusal_in
from wherry.remote.failures import (
    ABSENT,
    BEYOND,
    BROKEN,
    EXISTS,
    FAILURES,
    NO_BUCKET,
    TIMEOUT,
    kind_of,
    region_of,
    retry_after_of,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

_PACKAGES = frozenset({
    "aiobotocore", "aiohttp", "adlfs", "azure", "botocore", "fsspec", "gcsfs", "google", "httpcore", "httpx", "httpx2",
    "huggingface_hub", "requests", "s3fs", "urllib3",
})  # fmt: skip
# Kinds that callers decide about, as Python names them.
_PLAIN: Mapping[str, type[Exception]] = {
    ABSENT: FileNotFoundError,
    EXISTS: FileExistsError,
    BEYOND: EOFError,
}

_LONGEST_TEXT = 400  # characters of what a library says


@contextmanager
def library_errors(protocol: str, path: str) -> Generator[None]:
    """Around a call of a storage library.

    Raises:
        FileNotFoundError: the library reported a missing file with an exception of its own.
        FileExistsError: the same for an object that exists, or is not in the state that was required.
        EOFError: a range begins at the end of an object, or after it.
        WherryError: see `translate_error`.
    """
    handled = sys.exception()
    try:
        yield
    except Exception as error:
        _separate(error, handled)
        found = refusal_in(error) or translate_error(error, protocol, path)
        if found is None:
            raise
        if found is error:
            raise
        raise found from error


def translate_error(error: Exception, protocol: str, path: str) -> Exception | None:
    """The error that stands for an exception of a library; None for an ordinary OSError or an unknown exception."""
    if isinstance(error, WherryError):
        return None
    kind = kind_of(error)
    plain = _PLAIN.get(kind)
    if plain is not None and not isinstance(error, plain):
        return plain(f"{protocol}://{path}")
    if kind == NO_BUCKET:
        return bucket_not_found(protocol, path)
    if kind in FAILURES:
        return _failure(error, kind, protocol, path)
    return _other(error, protocol, path)


def timed_out(uri: str) -> StorageError:
    """The error for a store that did not answer in time."""
    protocol, _, path = uri.partition("://")
    return _failure(TimeoutError(), TIMEOUT, protocol, path)


def altered_error(uri: str, expected: str, got: str) -> StorageError:
    """The error for bytes whose checksum, as the store computed it, differs from ours; sending them again can help."""
    what = f"the store received altered bytes: expected {expected}, got {got}"
    error = StorageError(
        what,
        uri=uri,
        cure="run it again; if it happens often, check this machine's memory and network",
        retryable=True,
    )
    error.kind = BROKEN
    return error


def bucket_not_found(protocol: str, path: str) -> NotFoundError:
    """The error for a path in a bucket that does not exist."""
    bucket = f"{protocol}://{path.partition('/')[0]}"
    return NotFoundError(
        "bucket not found", uri=bucket, cure="check the name of the bucket, or create it: wherry creates none"
    )


def _separate(error: BaseException, handled: BaseException | None) -> None:
    """Take an exception that was handled before a call out of the chain of what the call raised: it is no cause."""
    found: BaseException | None = error
    while found is not None and handled is not None:
        if found.__context__ is handled:
            found.__context__ = None
        found = found.__context__


def _failure(error: Exception, kind: str, protocol: str, path: str) -> StorageError:
    failure = FAILURES[kind]
    text = one_line(error)
    what = failure.words.format(protocol=protocol) + (f": {text}" if text else "")
    cure = failure.cure_for(protocol, region_of(error))
    found = StorageError(what, uri=f"{protocol}://{path}", cure=cure, retryable=failure.retryable)
    found.kind, found.retry_after = kind, retry_after_of(error)
    return found


def _other(error: Exception, protocol: str, path: str) -> WherryError | None:
    uri, text = f"{protocol}://{path}", one_line(error) or type(error).__name__
    if isinstance(error, ValueError):
        return UsageError(
            f"invalid path for {protocol}://: {text}",
            uri=uri,
            cure="write the path as the storage library expects it",
        )
    if isinstance(error, NotImplementedError):
        return UnsupportedError(
            f"{protocol}:// does not support this operation", uri=uri, cure="use another store"
        )
    packages = {cls.__module__.partition(".")[0] for cls in type(error).__mro__}
    if not isinstance(error, OSError) and packages & _PACKAGES:
        cure = "check that the storage is reachable"
        return StorageError(f"storage failed: {text}", uri=uri, cure=cure, retryable=True)
    return None


def one_line(error: Exception) -> str:
    """The text of an exception in one line, without secrets; the beginning of a long one."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return shorten(redact(text), _LONGEST_TEXT, placeholder=" …")
