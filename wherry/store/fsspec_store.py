"""fsspec_store: any store that fsspec supports, with deadlines, retries and errors that name the cure."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from wherry.errors import StorageError
from wherry.remote.buffer_fill import RANGE_CURE
from wherry.remote.errors import bucket_not_found, library_errors
from wherry.remote.failures import FORBIDDEN
from wherry.remote.filesystems import call_async, call_with_deadline, in_thread
from wherry.remote.retries import RetryPolicy, call_with_retries
from wherry.store.protocols import protocol_of
from wherry.store.store import Entry, Store

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from datetime import datetime

_T = TypeVar("_T")

# Fields of a listing that identify the state of an object, by the names of the stores; the last ones are times.
_MARKS = ("generation", "etag", "ETag", "blob_id", "mtime", "created")
_answered: set[str] = set()  # buckets and hosts that have answered in this process


class FsspecStore(Store):
    """Any store that fsspec supports; its classes know more of one provider.

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
            WherryError: see `wherry.remote.errors.translate_error`.
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
        """One call of a method of the file system, which gets the seconds that it may take."""
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
