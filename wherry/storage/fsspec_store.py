"""fsspec_store: any store that fsspec supports, with deadlines, retries and errors that name the cure."""

from __future__ import annotations

from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from wherry.errors import (
    MismatchError,
    MissingExtraError,
    StorageError,
    UsageError,
    WherryError,
    missing_extra,
)
from wherry.remote import azure, http_reads, hub
from wherry.remote.buffer_fill import RANGE_CURE, BufferFill
from wherry.remote.errors import bucket_not_found, library_errors, one_line, translate_error
from wherry.remote.failures import FORBIDDEN
from wherry.remote.filesystems import (
    call_async,
    call_with_deadline,
    in_thread,
    open_filesystem,
    refresh_login,
)
from wherry.remote.listings import PAGES
from wherry.remote.range_reads import FILLS, fill
from wherry.remote.retries import RetryPolicy, call_with_retries, storage_timeout
from wherry.storage.location import Entry
from wherry.storage.protocols import OF_OTHER_STORES, OF_SERVERS, OTHER, protocol_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator

_T = TypeVar("_T")

# Fields of a listing that identify the state of an object, by the names of the stores; the last ones are times.
_MARKS = ("generation", "etag", "ETag", "blob_id", "mtime", "created")
_SUPPORTED = "use file, gs, s3, az, hf, https or memory"
_Method: TypeAlias = "str | Callable[..., Awaitable[Any]]"
# protocol → the cheapest call of its library that tells a missing bucket, and why access is denied, from other errors.
_PROBES: dict[str, Callable[[str], tuple[_Method, tuple[Any, ...], dict[str, Any]]]] = {
    "gs": lambda bucket: ("call", ("GET", "b/{}/o", bucket), {"maxResults": 1}),
    "gcs": lambda bucket: ("call", ("GET", "b/{}/o", bucket), {"maxResults": 1}),
    "s3": lambda bucket: ("call_s3", ("list_objects_v2",), {"Bucket": bucket, "MaxKeys": 1}),
    **dict.fromkeys(azure.PROTOCOLS, lambda bucket: (azure.list_one, (bucket,), {})),
}
_answered: set[str] = set()  # buckets and hosts that have answered in this process


class FsspecStore:
    """Any store that fsspec supports."""

    def __init__(self, protocol: str, policy: RetryPolicy) -> None:
        self.protocol = protocol
        self.capabilities = protocol_of(protocol).capabilities
        self.policy = policy
        self.fs: Any = open_filesystem(protocol, policy.timeout)
        self._commits: dict[hub.HubPath, hub.HubPath] = {}  # root of a revision → that of its commit

    def call(self, path: str, name: _Method, *args: Any, nbytes: int = 0, **kwargs: Any) -> Any:
        """Call a method of the file system, as often as the policy allows.

        Args:
            path: what is read or written.
            name: the method, or a coroutine function that gets the file system.
            args: its arguments.
            nbytes: size of the transfer.
            kwargs: its arguments.

        Raises:
            FileNotFoundError, FileExistsError: the file does not exist, or exists.
            EOFError: a range begins at the end of the file, or after it.
            WherryError: see `translated`.
        """
        once = partial(self._once, path, name)
        ranged = "start" in kwargs
        return self._attempt(path, lambda seconds: once(seconds, *args, **kwargs), nbytes, ranged=ranged)

    def request(self, path: str, function: Callable[[Any], Awaitable[_T]], nbytes: int = 0) -> _T:
        """Await a function of the asynchronous file system, as often as the policy allows.

        Args:
            path: what is read or written.
            function: gets the file system; it is called anew for each attempt.
            nbytes: size of the transfer.

        Raises:
            FileNotFoundError, FileExistsError: the file does not exist, or is not in the required state.
            WherryError: see `translated`.
        """

        def once(seconds: float) -> _T:
            with self._named_errors(path):
                refresh_login(self.fs, seconds)
                return call_async(self.fs, lambda: function(self.fs), seconds)

        return self._attempt(path, once, nbytes)

    def transfer(self, path: str, once: Callable[[float], _T], nbytes: int) -> _T:
        """Call a function in this thread, as often as the policy allows.

        Args:
            path: what is read or written.
            once: one attempt, which ends within the seconds that it gets.
            nbytes: size of the transfer.

        Raises: what `request` does.
        """

        def named(seconds: float) -> _T:
            with self._named_errors(path):
                refresh_login(self.fs, seconds)
                return once(seconds)

        return self._attempt(path, named, nbytes, ranged=True)

    def run(self, path: str, call: Callable[[], _T], nbytes: int = 0) -> _T:
        """Call a function in a thread, as often as the policy allows.

        Args:
            path: what is read or written.
            call: is called anew for each attempt.
            nbytes: size of the transfer.

        Raises:
            FileNotFoundError, FileExistsError: as `request`.
            WherryError: see `translated`.
        """

        def once(seconds: float) -> _T:
            with self._named_errors(path):
                return in_thread(call, seconds)

        return self._attempt(path, once, nbytes, ranged=nbytes > 0)

    def stat(self, path: str) -> Entry | None:
        """See Store; never from a cached listing of fsspec."""

        def once(seconds: float) -> dict[str, Any]:
            self._once(path, "invalidate_cache", seconds, full)  # which asks the store, on hf://
            return self._once(path, "info", seconds, full)

        try:
            full = self._full(path)
            return self._entry(self._attempt(path, once, 0))
        except FileNotFoundError:
            self.require_bucket(path)
            return None
        except StorageError as error:
            if error.kind == FORBIDDEN:
                self.probe(path)
            raise

    def entries(self, path: str) -> list[Entry]:
        """See Store. Listings are never taken from fsspec's cache: another process may have written."""
        try:
            full = self._full(path)
            rows = self._rows(path, full)
        except FileNotFoundError:
            self.require_bucket(path)
            raise
        found = [self._entry(row) for row in rows if row["name"].strip("/") != full.strip("/")]
        return sorted(found, key=lambda entry: entry.name)

    def _rows(self, path: str, full: str) -> list[dict[str, Any]]:
        if self.protocol in azure.PROTOCOLS:
            return self.call(path, azure.children, full)
        fresh = {"refresh": True} if protocol_of(self.protocol).extra else {}
        return self.call(path, "ls", full, detail=True, **fresh)

    @property
    def lists_pages(self) -> bool:
        """Whether `page` is supported."""
        return self.protocol in PAGES

    def page(self, path: str, start: str) -> tuple[list[tuple[str, Entry]], bool]:
        """Some of the objects below a folder, in the order of their keys.

        Args:
            path: the folder.
            start: path of the first object, or what it begins with.

        Returns:
            Path and entry of each object; and whether there are more.

        Raises:
            WherryError: see `translated`.
        """
        rows, more = self.call(path, PAGES[self.protocol], self._full(path), start)
        return [(row["name"], self._entry({**row, "type": "file"})) for row in rows], more

    def read(self, path: str, start: int, stop: int) -> bytes:
        """See Store. Stores refuse a range that begins at the end of an object."""
        if self.protocol == hub.PROTOCOL:
            return self._read_hub(path, start, stop)
        if self.protocol in http_reads.PROTOCOLS:
            data = bytearray(stop - start)
            return bytes(memoryview(data)[: self.readinto(path, start, memoryview(data))])
        try:
            return self.call(path, "cat_file", self._full(path), start=start, end=stop, nbytes=stop - start)
        except EOFError:
            return b""

    def read_version(self, path: str, start: int, stop: int, mark: str) -> bytes:
        """Bytes [start, stop) of an object in one state; only where `Capabilities.version` is a generation or an ETag.

        Args:
            path: of the object.
            start: of the bytes.
            stop: of the bytes, within the object.
            mark: generation or ETag of the state, as in its entry.

        Raises:
            MismatchError: the object was replaced or removed.
            WherryError: see `translated`.
        """
        data = bytearray(stop - start)
        return bytes(memoryview(data)[: self.readinto_version(path, start, memoryview(data), mark)])

    def readinto(self, path: str, start: int, buffer: memoryview) -> int:
        """See Store."""
        if self.protocol not in FILLS:
            data = self.read(path, start, start + len(buffer))
            buffer[: len(data)] = data
            return len(data)
        try:
            return self._fill(path, start, buffer, "")
        except EOFError:
            return 0

    def readinto_version(self, path: str, start: int, buffer: memoryview, mark: str) -> int:
        """Fill a buffer from an offset of an object in one state; see `read_version`.

        Raises: what `read_version` does.
        """
        try:
            return self._fill(path, start, buffer, mark)
        except (FileNotFoundError, FileExistsError, EOFError) as error:
            what = "the object was replaced or removed while it was read"
            uri = f"{self.protocol}://{path}"
            raise MismatchError(what, uri=uri, cure="convert it again once nothing writes to it") from error

    def _fill(self, path: str, start: int, buffer: memoryview, mark: str) -> int:
        def once(seconds: float) -> int:
            with closing(BufferFill(buffer)) as filling:
                fill(self.fs, self.protocol, self._full(path), start, filling, mark, seconds)
                return filling.count

        return self.transfer(path, once, len(buffer)) if buffer else 0

    def put(self, path: str, data: bytes, *, create_only: bool = False) -> None:
        """See Store. An object that appears during a create-only put with the same bytes is the one that was put.

        Its answer may have been lost: aiohttp and the policy repeat a put, which then finds its own object.
        """
        if create_only and self.stat(path) is not None:
            raise FileExistsError(path)
        mode = {"mode": "create"} if create_only else {}

        def once(seconds: float) -> None:
            try:
                self._once(path, "pipe_file", seconds, self._full(path), data, **mode)
            except FileExistsError:
                if not create_only or self.read(path, 0, len(data) + 1) != data:
                    raise
            except FileNotFoundError as error:
                raise bucket_not_found(self.protocol, path) from error

        self._attempt(path, once, len(data))

    def remove(self, path: str, *, recursive: bool = False) -> None:
        """Delete an object, or everything below a prefix.

        Raises:
            FileNotFoundError: it did not exist before the first attempt.
            WherryError: see `translated`.
        """
        name, how = ("rm", {"recursive": True}) if recursive else ("rm_file", {})
        sent = 0

        def once(seconds: float) -> None:
            nonlocal sent
            sent += 1
            try:
                self._once(path, name, seconds, self._full(path), **how)
            except FileNotFoundError:
                if sent == 1:
                    raise  # else an attempt whose answer was lost has deleted it

        self._attempt(path, once, 0)

    def _attempt(self, path: str, once: Callable[[float], Any], nbytes: int, *, ranged: bool = False) -> Any:
        if protocol_of(self.protocol).in_process:
            return once(self.policy.timeout)
        uri, known = f"{self.protocol}://{path}", self._bucket(path) in _answered
        try:
            result = call_with_retries(once, uri, self.policy, nbytes=nbytes, known=known)
        except EOFError as error:
            if ranged:
                raise
            what = "the store refuses a range, although none was requested"
            raise StorageError(what, uri=uri, cure=RANGE_CURE) from error
        _answered.add(self._bucket(path))
        return result

    def _once(self, path: str, name: _Method, seconds: float, *args: Any, **kwargs: Any) -> Any:
        with self._named_errors(path):
            if isinstance(name, str) and protocol_of(self.protocol).in_process:
                return getattr(self.fs, name)(*args, **kwargs)
            refresh_login(self.fs, seconds)
            return call_with_deadline(self.fs, name, seconds, *args, **kwargs)

    @contextmanager
    def _named_errors(self, path: str) -> Generator[None]:
        """As `library_errors`; an error that the HTTP client of gcsfs passed on gets the path too."""
        with library_errors(self.protocol, path):
            try:
                if self.protocol == hub.PROTOCOL:
                    hub.check_connections(self.fs)
                yield
            except StorageError as error:
                error.uri = f"{self.protocol}://{path}"
                raise

    def require_bucket(self, path: str) -> None:
        """After a file was not found in a bucket that has not answered yet.

        Raises:
            NotFoundError: the bucket does not exist.
        """
        if self._bucket(path) in _answered:
            return
        with suppress(StorageError):
            self.probe(path)
        _answered.add(self._bucket(path))

    def probe(self, path: str) -> None:
        """List one object of the bucket: the answer to HEAD has no body, which would say why it failed.

        Raises:
            NotFoundError: the bucket does not exist.
            StorageError: why the store refuses, with its cure.
        """
        make = _PROBES.get(self.protocol)
        if make is None:
            return
        name, args, kwargs = make(path.partition("/")[0])
        try:
            self._once(path, name, self.policy.timeout, *args, **kwargs)
        except FileNotFoundError as error:
            raise bucket_not_found(self.protocol, path) from error

    def _bucket(self, path: str) -> str:
        return f"{self.protocol}://{path.partition('/')[0]}"

    def _pin(self, path: str) -> str:
        place = hub.parse_hub_path(path)
        if place is None:
            return path
        root = replace(place, path="")
        if root not in self._commits:
            seek = partial(hub.pin_revision, self.fs, root)
            self._commits[root] = self.run(path, seek)
        return replace(self._commits[root], path=place.path).text

    def _read_hub(self, path: str, start: int, stop: int) -> bytes:
        read = partial(hub.read_range, self.fs, self._full(path), start, stop)
        return self.run(path, read, stop - start)

    def _full(self, path: str) -> str:
        """A path as the library takes it; on hf://, in the commit that was seen first."""
        if self.protocol == hub.PROTOCOL:
            return self._pin(path)
        return f"{self.protocol}://{path}" if protocol_of(self.protocol).whole_uris else path

    def _entry(self, row: dict[str, Any]) -> Entry:
        mark = next((str(row[key]) for key in _MARKS if row.get(key)), "")
        name = row["name"].rstrip("/").rsplit("/", 1)[-1]
        return Entry(name, int(row.get("size") or 0), row["type"] == "directory", mark=mark)


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
        return FsspecStore(protocol, policy)
    except ImportError as error:
        raise _missing_package(protocol, error) from error
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


def _not_opened(protocol: str, why: str) -> UsageError:
    """The error for a protocol that fsspec knows, but whose file system wherry cannot open."""
    return UsageError(
        f"{protocol}:// cannot be read: {why}",
        cure=f"mount it as a folder, or copy the checkpoint; {_SUPPORTED}",
    )


def _missing_package(protocol: str, error: ImportError) -> MissingExtraError:
    """The error for a protocol whose package is not installed."""
    known = protocol_of(protocol)
    if known.extra:
        return missing_extra(known.package, known.extra, f"{protocol}:// storage")
    return MissingExtraError(
        f"{protocol}:// storage needs a package that no extra of wherry installs: {error}",
        cure="install the package that the message names, or copy the checkpoint to a store that wherry supports",
    )
