"""All access to tensorstore: stores, contexts, arrays, and the translation of its errors.

tensorstore is imported inside functions: the import takes a fifth of a second, and detection does not need it. Each
job has its own context: no data cache (chunks are read once), a small cache for OCDBT nodes (without it every chunk
read would decode the root again), and bounded concurrency. tensorstore reports every failure as a ValueError that
begins with a status word; here these words become wherry's errors.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any, TypeAlias

from wherry.errors import CorruptError, IncompleteError, UnsupportedError, WherryError, storage_error
from wherry.store.local_store import LocalStore
from wherry.store.location import Location
from wherry.store.open_file import stable_path

if TYPE_CHECKING:
    import tensorstore as ts

    from wherry.integrations.containers.zarr.metadata import JsonObject

Store: TypeAlias = "ts.KvStore"
Array: TypeAlias = "ts.TensorStore"

# wherry protocol → tensorstore driver of bucket stores.
_BUCKETS = {"gs": "gcs", "gcs": "gcs", "s3": "s3"}
_DRIVERS = {2: "zarr", 3: "zarr3"}
_NODE_CACHE_BYTES = 32 << 20
_FILE_THREADS = 4

# The configuration of Orbax 0.11 and later: tiny values inside the tree, one large root.
_OCDBT_CONFIG = {
    "max_inline_value_bytes": 1024,
    "max_decoded_node_bytes": 100_000_000,
    "manifest_kind": "single",
}
_DATA_FILE_BYTES = 2 << 30

_STATUS_ERRORS: dict[str, type[WherryError]] = {
    "NOT_FOUND": IncompleteError,
    "OUT_OF_RANGE": IncompleteError,
    "DATA_LOSS": CorruptError,
    "FAILED_PRECONDITION": CorruptError,
    "INVALID_ARGUMENT": CorruptError,
}
# System errors that have a specific cure; a message of tensorstore quotes them.
_WITH_CURE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)


def context() -> ts.Context:
    """A fresh context with bounded memory and concurrency for one job."""
    import tensorstore

    return tensorstore.Context(
        {
            "cache_pool": {"total_bytes_limit": 0},
            "cache_pool#nodes": {"total_bytes_limit": _NODE_CACHE_BYTES},
            "data_copy_concurrency": {"limit": max(os.cpu_count() or 2, 2)},
            "file_io_concurrency": {"limit": _FILE_THREADS},
        }
    )


def base_spec(location: Location) -> JsonObject:
    """The tensorstore spec of a folder.

    Raises:
        UnsupportedError: tensorstore does not support the storage.
    """
    path = location.path.rstrip("/") + "/"
    if isinstance(location.store, LocalStore):
        path = stable_path(location.path.rstrip("/"), location.store.root) + "/"
    if location.store.capabilities.local:
        return {"driver": "file", "path": path}
    if location.store.protocol in _BUCKETS:
        bucket, _, key = path.lstrip("/").partition("/")
        spec: JsonObject = {"driver": _BUCKETS[location.store.protocol], "bucket": bucket, "path": key}
        if spec["driver"] != "s3":
            name_emulator()
            return spec
        # The server and region that the environment names for the libraries of a store, which tensorstore does not ask.
        url = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
        return spec | ({"endpoint": url, "aws_region": region} if url else {})
    raise UnsupportedError(
        f"unsupported storage {location.store.protocol}:// for zarr and OCDBT",
        uri=location.uri,
        cure="copy the checkpoint to a local folder, gs:// or s3:// first",
    )


def name_emulator() -> None:
    """Name tensorstore the server of Google Cloud Storage that STORAGE_EMULATOR_HOST names to other libraries."""
    emulator = os.environ.get("STORAGE_EMULATOR_HOST")
    if emulator:
        os.environ.setdefault("TENSORSTORE_GCS_HTTP_URL", emulator)


def store_spec(location: Location, *, ocdbt: bool, writable: bool = False) -> JsonObject:
    """The spec of the key-value store in a folder.

    Args:
        location: the folder.
        ocdbt: whether it is an OCDBT database rather than one file per key.
        writable: for a writer: files are not synced one by one, because the writer syncs them in groups (a sync
            per file is three times slower).
    """
    base = base_spec(location)
    if writable and base["driver"] == "file":
        base["file_io_sync"] = False
    if not ocdbt:
        return base
    spec: JsonObject = {"driver": "ocdbt", "base": base, "cache_pool": "cache_pool#nodes"}
    if writable:
        spec |= {"config": _OCDBT_CONFIG, "assume_config": True, "target_data_file_size": _DATA_FILE_BYTES}
    if base["driver"] != "file":
        spec["experimental_read_coalescing_threshold_bytes"] = 1_000_000
        spec["experimental_read_coalescing_interval"] = "1ms"
    return spec


def open_store(spec: JsonObject, using: ts.Context, uri: str) -> Store:
    """Open a key-value store.

    Raises:
        DamagedError: it is not a key-value store.
        StorageError: the storage failed.
    """
    import tensorstore

    try:
        return await_result(tensorstore.KvStore.open(spec, context=using), uri)
    except (ValueError, OSError) as error:
        raise translate_error(error, uri) from error


def read_value(store: Store, key: str, uri: str) -> bytes:
    """A small value; empty if the key does not exist.

    Raises:
        DamagedError, StorageError: it cannot be read.
    """
    try:
        return await_result(store.read(key), uri).value
    except (ValueError, OSError) as error:
        raise translate_error(error, uri) from error


def array_spec(spec: JsonObject, name: str, version: int, metadata: JsonObject | None = None) -> JsonObject:
    """The spec of one array in a store, with its metadata if that is already known."""
    prefix = f"{name}/" if name else ""
    inside = {**spec, "path": prefix if spec["driver"] == "ocdbt" else spec["path"] + prefix}
    whole: JsonObject = {"driver": _DRIVERS[version], "kvstore": inside, "recheck_cached_data": "open"}
    return whole | ({"metadata": metadata} if metadata is not None else {})


def open_to_read(spec: JsonObject, using: ts.Context, uri: str, path: str) -> Array:
    """Open an array such that reading a missing chunk fails instead of returning fill values.

    Raises:
        DamagedError, StorageError: it cannot be opened.
    """
    import tensorstore

    try:
        begun = tensorstore.open(
            {**spec, "fill_missing_data_reads": False},
            context=using,
            open=True,
            read=True,
            assume_metadata="metadata" in spec,
        )
        return await_result(begun, uri)
    except (ValueError, OSError) as error:
        raise translate_error(error, uri, path) from error


def translate_error(error: Exception, uri: str, path: str | None = None) -> WherryError:
    """The wherry error for an exception of tensorstore.

    A status about the data becomes a DamagedError; every other status becomes a StorageError.
    """
    if isinstance(error, OSError):
        return storage_error(error, uri)
    text = str(error)
    word = text.partition(":")[0]
    code = next((code for code in _WITH_CURE if os.strerror(code) in text), None)
    if code is not None and word != "NOT_FOUND":
        return storage_error(OSError(code, os.strerror(code)), uri)
    kind = _STATUS_ERRORS.get(word)
    if kind is None:
        return storage_error(OSError(errno.EIO, _first_sentence(text)), uri)
    return kind(
        _first_sentence(text), uri=uri, path=path, cure="copy the checkpoint again, or use another step"
    )


def _first_sentence(text: str) -> str:
    return text.split(" [", maxsplit=1)[0].partition(": ")[2] or text.split(" [", maxsplit=1)[0]


def read_whole(array: Any, region: tuple[slice, ...], uri: str) -> Any:
    """Elements of a region as a C-order array; raises what tensorstore raises, and StorageError as `await_result`."""
    view = array[region] if region else array
    return await_result(view.read(order="C"), uri, view.size * view.dtype.numpy_dtype.itemsize)


def await_result(begun: ts.Future[Any], uri: str, nbytes: int = 0) -> Any:
    """The result of a call of tensorstore, which repeats its requests itself; on a remote store within a deadline.

    Args:
        begun: the call.
        uri: what is read, for the user.
        nbytes: size of the transfer.

    Raises:
        StorageError: a remote store did not answer in time.
        ValueError, OSError: what tensorstore raises.
    """
    if "://" not in uri or uri.startswith("file:"):
        return begun.result()
    from wherry.store.failures import timed_out
    from wherry.store.waits import RetryPolicy, storage_timeout, waiting

    policy = RetryPolicy(storage_timeout())
    with waiting(uri):
        try:
            return begun.result(timeout=policy.budget + policy.deadline(nbytes) - policy.timeout)
        except TimeoutError as error:
            begun.cancel()
            raise timed_out(uri) from error
