"""remote_store: the store of a protocol, opened by the class that knows its provider."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from wherry.errors import MissingExtraError, UsageError, WherryError, missing_extra
from wherry.remote.errors import one_line, translate_error
from wherry.remote.failures import AZURE
from wherry.remote.retries import RetryPolicy, storage_timeout
from wherry.store.fsspec_store import FsspecStore
from wherry.store.protocols import OF_OTHER_STORES, OF_SERVERS, OTHER, protocol_of

if TYPE_CHECKING:
    from collections.abc import Mapping

_SUPPORTED = "use file, gs, s3, az, hf, https or memory"
# protocol → module and class of the provider; a command imports those that it needs.
_KINDS: Mapping[str, str] = {
    "memory": "memory.MemoryStore",
    "s3": "amazon.AmazonStore",
    "gs": "google.GoogleStore",
    "gcs": "google.GoogleStore",
    **dict.fromkeys(AZURE, "azure.AzureStore"),
    "hf": "hub.HubStore",
    "http": "web.WebStore",
    "https": "web.WebStore",
}


def remote_store(protocol: str) -> FsspecStore:
    """The store of a protocol.

    Raises:
        MissingExtraError: the package for it is not installed.
        UsageError: the protocol is unknown or cannot be read, or the setting `storage_timeout` is invalid.
    """
    policy = RetryPolicy(storage_timeout())
    if protocol in OF_SERVERS:
        raise _not_opened(
            protocol, "a URI of wherry has no login, and its library opens no server without one"
        )
    if protocol in OF_OTHER_STORES:
        raise _not_opened(protocol, "it opens other URIs unchecked")
    try:
        return _kind(protocol)(protocol, policy)
    except ImportError as error:
        known = protocol_of(protocol)
        if known.extra:
            raise missing_extra(known.package, known.extra, f"{protocol}:// storage") from error
        raise MissingExtraError(
            f"{protocol}:// storage needs a package that no extra of wherry installs: {error}",
            cure="install the package that the message names, or copy the checkpoint to a store that wherry supports",
        ) from error
    except Exception as error:
        if protocol_of(protocol) is not OTHER:
            raise translate_error(error, protocol, "") or error from error
        if isinstance(error, WherryError):
            raise
        if str(error).startswith("Protocol not known"):
            raise UsageError(f"unknown storage protocol {protocol}://", cure=_SUPPORTED) from error
        raise _not_opened(
            protocol, f"its library does not open with the URI alone: {one_line(error)}"
        ) from error


def _kind(protocol: str) -> type[FsspecStore]:
    if protocol not in _KINDS:
        return FsspecStore
    module, _, name = _KINDS[protocol].partition(".")
    return getattr(import_module(f"wherry.store.{module}"), name)


def _not_opened(protocol: str, why: str) -> UsageError:
    """The error for a protocol that fsspec knows, but whose file system wherry cannot open."""
    return UsageError(
        f"{protocol}:// cannot be read: {why}",
        cure=f"mount it as a folder, or copy the checkpoint; {_SUPPORTED}",
    )
