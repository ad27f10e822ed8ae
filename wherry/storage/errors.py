"""Translates errors of the storage libraries (s3fs, gcsfs, huggingface_hub and their HTTP clients) into WherryErrors.

These libraries raise many exceptions that are not OSErrors. They are recognised by the names of their classes and of
the packages that define them, so that no library needs to be installed. Unrecognised exceptions are left unchanged.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from wherry.errors import StorageError, UnsupportedError, UsageError, WherryError, redact

if TYPE_CHECKING:
    from collections.abc import Generator

_LOG_IN = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run: aws configure",
    "gs": "run: gcloud auth application-default login",
    "gcs": "run: gcloud auth application-default login",
    "hf": "set HF_TOKEN, or run: hf auth login",
}
_NO_CREDENTIALS = frozenset({
    "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "NoAuthTokenError",
    "TokenRetrievalError", "SSOError", "ProfileNotFound", "LocalTokenNotFoundError", "DefaultCredentialsError",
    "RefreshError",
})  # fmt: skip
_REFUSED = frozenset({"PermissionError", "GatedRepoError"})
_REFUSING = (401, 403)  # HTTP
_OFFLINE = frozenset({"OfflineModeIsEnabled", "LocalEntryNotFoundError"})
_ABSENT = frozenset({
    "RepositoryNotFoundError", "RevisionNotFoundError", "EntryNotFoundError", "RemoteEntryNotFoundError",
    "BucketNotFoundError",
})  # fmt: skip
_PACKAGES = frozenset({
    "aiobotocore", "aiohttp", "adlfs", "azure", "botocore", "fsspec", "gcsfs", "google", "httpcore", "httpx", "httpx2",
    "huggingface_hub", "requests", "s3fs", "urllib3",
})  # fmt: skip


@contextmanager
def library_errors(protocol: str, path: str) -> Generator[None]:
    """Around a call of a storage library.

    Raises:
        FileNotFoundError: the library reported a missing file with an exception of its own.
        WherryError: see `translated`.
    """
    try:
        yield
    except Exception as error:
        found = translated(error, protocol, path)
        if found is None:
            raise
        raise found from error


def translated(error: Exception, protocol: str, path: str) -> Exception | None:
    """The error that stands for an exception of a library; None for an ordinary OSError or an unknown exception."""
    if isinstance(error, WherryError):
        return None
    names = {cls.__name__ for cls in type(error).__mro__}
    if names & _ABSENT and not names & (_OFFLINE | _REFUSED):
        return FileNotFoundError(f"{protocol}://{path}")
    return _ours(error, names, protocol, path)


def _ours(error: Exception, names: set[str], protocol: str, path: str) -> WherryError | None:
    uri, text = f"{protocol}://{path}", " ".join(redact(str(error)).split()) or type(error).__name__
    log_in = _LOG_IN.get(protocol, f"log in to {protocol}:// as its library requires")
    found: WherryError | None = None
    if names & _OFFLINE:
        found = StorageError(f"{protocol}:// is offline: {text}", cure="unset HF_HUB_OFFLINE")
    elif names & _NO_CREDENTIALS:
        found = StorageError(f"no credentials for {protocol}://: {text}", cure=log_in)
    elif names & _REFUSED or _status(error) in _REFUSING:
        found = StorageError(f"access denied: {text}", cure=log_in)
    elif isinstance(error, ValueError):
        found = UsageError(
            f"invalid path for {protocol}://: {text}", cure="write the path as the storage library expects it"
        )
    elif isinstance(error, NotImplementedError):
        found = UnsupportedError(f"{protocol}:// does not support this operation", cure="use another store")
    elif not isinstance(error, OSError) and _packages(error) & _PACKAGES:
        cure = "check that the storage is reachable"
        found = StorageError(f"storage failed: {text}", cure=cure, retryable=True)
    if found is not None:
        found.uri = uri
    return found


def _packages(error: Exception) -> set[str]:
    """The packages that define the class of an exception and its base classes."""
    return {cls.__module__.partition(".")[0] for cls in type(error).__mro__}


def _status(error: Exception) -> int | None:
    """The HTTP status that an error carries, in its response or in `code` as gcsfs does; None if it has none."""
    found = str(getattr(getattr(error, "response", None), "status_code", getattr(error, "code", None)))
    return int(found) if found.isdecimal() else None
