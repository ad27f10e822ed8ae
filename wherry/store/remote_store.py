"""remote_store: the stores that other machines have, with deadlines, retries and errors that name the cure.

- `FsspecStore`: any store that fsspec supports. Each library retries in its own way: gcsfs up to 36 times in half a
  minute, botocore 5 times within 5 of s3fs. The classes of the providers open them such that they attempt once, and
  `wherry.store.waits` repeats. A call of an asynchronous file system has a deadline in the loop of fsspec, which then
  closes the connection; any other call runs in a thread of its own, which is left behind when its time is over. No
  library keeps listings, of which wherry reads each anew: they take 1 kB for each object.
- `RangedStore`: its answers go straight into buffers, in the state that is named, if one is. The libraries hold an
  answer in small blocks, and then all of it once more. Here each block goes to its place as it comes, so that a range
  takes no memory but that of the buffer. Where the library can make a request without sending it, the thread that has
  the buffer sends it (`wherry.store.transfers`).
- `ObjectStore`: the rules of parts, puts and removals, over the single calls of a provider. An answer that was lost is
  resolved by asking: what the store has is the caller's own if its run, its size and its checksum are those of what was
  sent. Each change names the state of the object; an object in another state is left unchanged.
- `remote_store` opens the store of a protocol.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from datetime import datetime
from functools import partial
from importlib import import_module
from itertools import islice
from typing import Any, TypeVar, cast

from wherry.core import threads
from wherry.errors import (
    MismatchError,
    MissingExtraError,
    StorageError,
    UsageError,
    WherryError,
    missing_extra,
)
from wherry.store.content import CRC32C, checksum_of, is_same, joined_checksum, views_of
from wherry.store.failures import (
    AZURE,
    FORBIDDEN,
    bucket_not_found,
    library_errors,
    one_line,
    translate_error,
)
from wherry.store.store import (
    OF_OTHER_STORES,
    OF_SERVERS,
    OTHER,
    Content,
    Entry,
    Part,
    Store,
    StoredObject,
    Upload,
    protocol_of,
)
from wherry.store.transfers import CONNECT_SECONDS, RANGE_CURE, BodyRequest, BufferFill, HttpAnswer, exchange
from wherry.store.waits import RetryPolicy, call_with_retries, storage_timeout

_T = TypeVar("_T")

# Fields of a listing that identify the state of an object, by the names of the stores; the last ones are times.
_MARKS = ("generation", "etag", "ETag", "blob_id", "mtime", "created")
_answered: set[str] = set()  # buckets and hosts that have answered in this process
_WHOLE = 200  # status of HTTP; a range has 206
_CONTENT_RANGE = re.compile(r"\s*bytes\s+(\d{1,19})-")
_AT_ONCE = 16  # small requests at the same time
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


class FsspecStore(Store):
    """Any store that fsspec supports; its subclasses know more about one provider.

    Every call of a library goes through `transfer`, or through `_attempt` and `_once`, of which it is made.

    Attributes:
        policy: how often and how long a call is attempted.
        fs: the file system of fsspec.
    """

    def __init__(self, protocol: str, policy: RetryPolicy) -> None:
        self.protocol = protocol
        self.capabilities = protocol_of(protocol).capabilities
        self.policy = policy
        self.fs: Any = self._open(policy.timeout)

    def call(self, path: str, name: str, *args: Any, nbytes: int = 0, **kwargs: Any) -> Any:
        """Call a method of the file system, as often as the policy allows.

        Args:
            path: what is read or written.
            name: of the method.
            args: its arguments.
            nbytes: size of the transfer.
            kwargs: its arguments.

        Raises: what `transfer` does.
        """
        return self.transfer(path, self._calling(name, *args, **kwargs), nbytes, ranged="start" in kwargs)

    def request(self, path: str, function: Callable[[Any], Awaitable[_T]], nbytes: int = 0) -> _T:
        """Await a function of the asynchronous file system, as often as the policy allows.

        Args:
            path: what is read or written.
            function: gets the file system; it is called anew for each attempt.
            nbytes: size of the transfer.

        Raises: what `transfer` does.
        """

        def once(seconds: float) -> _T:
            return call_async(self.fs, lambda: function(self.fs), seconds)

        return self.transfer(path, once, nbytes, ranged=False)

    def run(self, path: str, call: Callable[[], _T], nbytes: int = 0) -> _T:
        """Call a function in a thread, as often as the policy allows.

        Args:
            path: what is read or written.
            call: is called anew for each attempt.
            nbytes: size of the transfer.

        Raises: what `transfer` does.
        """
        return self.transfer(path, partial(in_thread, call), nbytes, ranged=nbytes > 0)

    def transfer(self, path: str, once: Callable[[float], _T], nbytes: int = 0, *, ranged: bool = True) -> _T:
        """Call a function in this thread, as often as the policy allows.

        Args:
            path: what is read or written.
            once: one attempt, which ends within the seconds that it gets.
            nbytes: size of the transfer.
            ranged: whether a range was requested, which the store may refuse.

        Raises:
            FileNotFoundError, FileExistsError: the file does not exist, or is not in the required state.
            EOFError: a range begins at the end of the file, or after it.
            WherryError: see `wherry.store.failures.translate_error`.
        """
        return self._attempt(path, partial(self._once, path, once), nbytes, ranged=ranged)

    def stat(self, path: str) -> Entry | None:
        """See Store; never from a cached listing of fsspec."""

        def once(seconds: float) -> dict[str, Any]:
            self._once(path, self._calling("invalidate_cache", full), seconds)  # asks the store, on hf://
            return self._once(path, self._calling("info", full), seconds)

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

    def modified(self, path: str) -> datetime:
        """See Store."""
        return self.call(path, "modified", path)

    def read(self, path: str, start: int, stop: int) -> bytes:
        """See Store. Stores refuse a range that begins at the end of an object."""
        try:
            return self.call(path, "cat_file", self._full(path), start=start, end=stop, nbytes=stop - start)
        except EOFError:
            return b""

    def put(self, path: str, data: bytes, *, create_only: bool = False) -> None:
        """See Store. An object that appears during a create-only put with the same bytes is the one that was put.

        Its answer may have been lost: aiohttp and the policy repeat a put, which then finds its own object.
        """
        if create_only and self.stat(path) is not None:
            raise FileExistsError(path)
        mode = {"mode": "create"} if create_only else {}
        pipe = self._calling("pipe_file", self._full(path), data, **mode)

        def once(seconds: float) -> None:
            try:
                self._once(path, pipe, seconds)
            except FileExistsError:
                if not create_only or self.read(path, 0, len(data) + 1) != data:
                    raise
            except FileNotFoundError as error:
                raise bucket_not_found(self.protocol, path) from error

        self._attempt(path, once, len(data))

    def remove(self, path: str, *, recursive: bool = False) -> None:
        """See Store."""
        name, how = ("rm", {"recursive": True}) if recursive else ("rm_file", {})
        delete = self._calling(name, self._full(path), **how)
        sent = 0

        def once(seconds: float) -> None:
            nonlocal sent
            sent += 1
            try:
                self._once(path, delete, seconds)
            except FileNotFoundError:
                if sent == 1:
                    raise  # else an attempt whose answer was lost has deleted it

        self._attempt(path, once, 0)

    def require_bucket(self, path: str) -> None:
        """Check that a bucket exists, after a file was not found in it and before it has answered any request.

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
        if not getattr(self.fs, "async_impl", False):
            return
        bucket = path.partition("/")[0]

        def once(seconds: float) -> None:
            call_async(self.fs, lambda: self._list_one(bucket), seconds)

        try:
            self._once(path, once, self.policy.timeout)
        except FileNotFoundError as error:
            raise bucket_not_found(self.protocol, path) from error

    def _open(self, timeout: float) -> Any:  # noqa: ARG002  overridden
        """The file system; the same object for the same arguments.

        Args:
            timeout: seconds without progress after which a request fails.

        Raises:
            ImportError: the package is not installed.
            ValueError: fsspec does not know the protocol.
        """
        import fsspec

        return fsspec.filesystem(self.protocol)

    async def _list_one(self, bucket: str) -> None:
        """The cheapest call of a library that tells a missing bucket, and why access is denied, from other errors."""

    def _full(self, path: str) -> str:
        """A path as the library takes it."""
        return f"{self.protocol}://{path}" if protocol_of(self.protocol).whole_uris else path

    def _rows(self, path: str, full: str) -> list[dict[str, Any]]:
        fresh = {"refresh": True} if protocol_of(self.protocol).extra else {}
        return self.call(path, "ls", full, detail=True, **fresh)

    def _prepare(self, seconds: float) -> None:
        """Called before each attempt."""

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

    def _once(self, path: str, once: Callable[[float], _T], seconds: float) -> _T:
        with library_errors(self.protocol, path):
            try:
                self._prepare(seconds)
                return once(seconds)
            except StorageError as error:  # also one that the HTTP client of gcsfs passed on
                error.uri = f"{self.protocol}://{path}"
                raise

    def _calling(self, name: str, *args: Any, **kwargs: Any) -> Callable[[float], Any]:
        """A function that calls a method of the file system; its argument is the time limit in seconds."""
        if protocol_of(self.protocol).in_process:
            return lambda _seconds: getattr(self.fs, name)(*args, **kwargs)
        return lambda seconds: call_with_deadline(self.fs, name, seconds, *args, **kwargs)

    def _bucket(self, path: str) -> str:
        return f"{self.protocol}://{path.partition('/')[0]}"

    def _entry(self, row: dict[str, Any]) -> Entry:
        mark = next((str(row[key]) for key in _MARKS if row.get(key)), "")
        name = row["name"].rstrip("/").rsplit("/", 1)[-1]
        return Entry(name, int(row.get("size") or 0), row["type"] == "directory", mark=mark)


def page_row(path: str, size: int | str, mark: str | None) -> tuple[str, Entry]:
    """A row of a page; see Store."""
    return path, Entry(path.rstrip("/").rpartition("/")[2], int(size), is_dir=False, mark=mark or "")


class RangedStore(FsspecStore):
    """A store of which ranges of bytes are requested; its subclasses make the requests.

    Each class has `_receive`; `_refusal` is only called in those whose `_range_request` or `_part_request` gives a
    request, so it is not abstract.
    """

    def readinto(self, path: str, start: int, buffer: memoryview, mark: str = "") -> int:
        """See Store. Stores refuse a range that begins at the end of an object."""
        if not buffer:
            return 0
        try:
            return self.transfer(path, partial(self._fill, path, start, buffer, mark), len(buffer))
        except (EOFError, FileExistsError, FileNotFoundError) as error:
            if mark:
                what = "the object was replaced or removed while it was read"
                uri = f"{self.protocol}://{path}"
                raise MismatchError(
                    what, uri=uri, cure="convert it again once nothing writes to it"
                ) from error
            if isinstance(error, EOFError):
                return 0
            raise

    def _fill(self, path: str, start: int, buffer: memoryview, mark: str, seconds: float) -> int:
        """Fill a buffer in one attempt; the number of bytes.

        Raises:
            TimeoutError: it took longer.
            Exception: as `wherry.store.failures` translates it, FileNotFoundError or FileExistsError if nothing is in
                that state, EOFError beyond the end.
        """
        full = self._full(path)
        with closing(BufferFill(buffer)) as into:
            request = call_async(self.fs, lambda: self._range_request(full, start, into.size, mark), seconds)
            if (answer := self._exchanged(full, request, seconds, into=into)) is not None:
                require_range(answer.status, answer.headers, start)
                return into.count
            call_async(self.fs, lambda: self._receive(full, start, into, mark), seconds)
            return into.count

    async def _range_request(self, path: str, start: int, nbytes: int, mark: str) -> BodyRequest | None:  # noqa: ARG002
        """The request whose answer goes straight into the buffer; None if only the library can send it."""
        return None

    def _exchanged(
        self,
        path: str,
        request: BodyRequest | None,
        seconds: float,
        *,
        views: Sequence[memoryview] | None = None,
        into: BufferFill | None = None,
    ) -> HttpAnswer | None:
        """The answer to a request that this thread sends; None if only the library can send it.

        Args:
            path: of the object.
            request: as the library has made it, if this thread may send it.
            seconds: that it may take.
            views, into: as for `exchange`.

        Raises:
            Exception: what `exchange` raises, or what the answer means.
        """
        if request is None:
            return None
        answer = exchange(request, seconds, views=views, into=into)
        if answer.is_success:
            return answer
        if (error := self._refusal(request, answer, path)) is not None:
            raise error
        return None

    def _refusal(self, request: BodyRequest, answer: HttpAnswer, path: str) -> Exception | None:
        """The exception for an answer to such a request; None if the library must try it itself."""
        raise NotImplementedError

    async def _receive(self, path: str, start: int, into: BufferFill, mark: str) -> None:
        """Fill a buffer through the library, from an offset on."""
        raise NotImplementedError


def range_header(start: int, nbytes: int) -> str:
    """The header `Range` of a request for some bytes from an offset on."""
    return f"bytes={start}-{start + nbytes - 1}"


def require_range(status: int, headers: Mapping[str, str], start: int) -> None:
    """Require that an answer begins at the first byte of the requested range.

    Args:
        status: of HTTP.
        headers: their names in lower case, or of any case where the mapping does not care.
        start: offset of the first byte.

    Raises:
        StorageError: it is the complete object, where `Range` was lost on the way, or a range from another byte on.
    """
    if status == _WHOLE:
        if start:
            raise StorageError(
                f"the store sent the complete object instead of the requested range, which begins at byte {start}",
                cure=RANGE_CURE,
            )
        return
    found = _CONTENT_RANGE.match(headers.get("content-range", ""))
    if found is None or int(found[1]) != start:
        what = "a range that it does not name" if found is None else f"the range from byte {found[1]} on"
        raise StorageError(f"the store sent {what} instead of that from byte {start} on", cure=RANGE_CURE)


class ObjectStore(FsspecStore):
    """A store of objects that takes parts.

    A class has the single calls that raise NotImplementedError here. None is abstract, because a class that replaces a
    rule as a whole does without the calls of that rule: `MemoryStore` has no `_look`, and `GoogleStore` no `_delete`.

    Attributes:
        algorithm: of the checksum of an object that is put at once.
    """

    algorithm = CRC32C

    def head(self, path: str) -> StoredObject | None:
        """See Store."""
        try:
            return self.request(path, lambda fs: self._look(fs, path))
        except FileNotFoundError:
            self.require_bucket(path)
            return None

    def put_object(self, path: str, data: Content, run: str, *, replaces: str = "") -> StoredObject:
        """See Store."""
        views = views_of(data)
        checksum = checksum_of(views, self.algorithm)
        try:
            return self._put(path, views, checksum, run, replaces)
        except (FileExistsError, FileNotFoundError) as error:
            if (found := self._own(path, run, sum(map(len, views)), checksum)) is None:
                raise FileExistsError(path) from error
            return found

    def remove_object(self, path: str, mark: str, guard: Callable[[], None] = lambda: None) -> bool:
        """See Store. The state is compared here too, because not every store compares it.

        A client repeats a removal whose answer is lost, and the store then answers that the state is another one, or
        that there is no object.
        """
        found, sent = self.head(path), 0
        if found is None or found.mark != mark:
            return False
        guard()

        async def remove(fs: Any) -> bool:
            nonlocal sent
            if sent and (await self._look(fs, path)).mark != mark:
                return False
            sent += 1
            await self._delete(fs, path, mark)
            return True

        try:
            return self.request(path, remove)
        except (FileExistsError, FileNotFoundError):
            return sent > 0 and self.head(path) is None

    def remove_many(self, marks: Mapping[str, str]) -> None:
        """See Store."""
        for_each(self.remove_object, marks, marks.values())

    def copy_object(
        self, source: str, mark: str, path: str, run: str, guard: Callable[[], None] = lambda: None
    ) -> StoredObject:
        """See Store."""
        found = self.head(source)
        if found is None or found.mark != mark:
            raise FileNotFoundError(f"{source} in the state {mark}")
        if found.nbytes:
            return self._copy(source, found, path, run, guard)
        guard()
        return self.put_object(path, b"", run)

    def assemble(self, upload: Upload, parts: Sequence[Part]) -> StoredObject:
        """See Store."""
        try:
            return self._assemble(upload, parts)
        except (FileExistsError, FileNotFoundError):
            nbytes = sum(part.nbytes for part in parts)
            if (found := self._own(upload.path, upload.run, nbytes, joined_checksum(parts))) is None:
                raise
            if self.aborts_apart:  # else the parts went when the object appeared
                self.abort(upload)
            return found

    def _own(self, path: str, run: str, nbytes: int, checksum: str) -> StoredObject | None:
        """The object at a path, if it is the one that a call sent whose answer was lost."""
        found = self.head(path)
        return found if found is not None and is_same(found, run, nbytes, checksum) else None

    def _put(
        self, path: str, data: Sequence[memoryview], checksum: str, run: str, replaces: str
    ) -> StoredObject:
        """Put an object that is in a state; that does not exist, if none is named.

        Raises:
            FileExistsError, FileNotFoundError: it is in another one.
        """
        raise NotImplementedError

    async def _look(self, fs: Any, path: str) -> StoredObject:
        """The object at a path.

        Raises:
            FileNotFoundError: it does not exist.
        """
        raise NotImplementedError

    async def _delete(self, fs: Any, path: str, mark: str) -> None:
        """Remove an object in one state.

        Raises:
            FileExistsError, FileNotFoundError: it is in another one, or does not exist.
        """
        raise NotImplementedError

    def _copy(
        self, source: str, found: StoredObject, path: str, run: str, guard: Callable[[], None]
    ) -> StoredObject:
        """Create an object of all bytes of one that is not empty, in the state in which it was found; see Store."""
        raise NotImplementedError

    def _assemble(self, upload: Upload, parts: Sequence[Part]) -> StoredObject:
        """Make the object of all parts.

        Raises:
            FileExistsError: an object exists at the path.
            FileNotFoundError: the upload no longer exists.
        """
        raise NotImplementedError


def for_each(call: Callable[..., Any], *items: Iterable[Any], at_once: int = _AT_ONCE) -> list[Any]:
    """Call a function as `map` does, for each item or for one item of each row; several calls at the same time.

    Raises: what the function raises.
    """
    with threads.executor(at_once, "wherry-objects", numbers=False) as pool:
        return list(pool.map(call, *items))


def heads(store: Store, paths: Iterable[str]) -> Iterator[tuple[str, StoredObject | None]]:
    """The object at each path, or None; several are requested at the same time.

    Raises:
        StorageError: the storage failed.
    """
    waiting, count = iter(paths), 1
    with threads.executor(_AT_ONCE, "wherry-heads", numbers=False) as pool:
        while some := list(islice(waiting, count)):  # a caller may stop after the first of a million
            yield from zip(some, pool.map(store.head, some), strict=True)
            count = min(2 * count, _AT_ONCE)


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
        if protocol not in _KINDS:
            return FsspecStore(protocol, policy)
        module, _, name = _KINDS[protocol].partition(".")
        return getattr(import_module(f"wherry.store.{module}"), name)(protocol, policy)
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


def _not_opened(protocol: str, why: str) -> UsageError:
    """The error for a protocol that fsspec knows, but whose file system wherry cannot open."""
    return UsageError(
        f"{protocol}:// cannot be read: {why}",
        cure=f"mount it as a folder, or copy the checkpoint; {_SUPPORTED}",
    )
