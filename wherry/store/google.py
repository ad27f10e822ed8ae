"""google: gs://, with the JSON interface as gcsfs calls it, one attempt for each request.

The parts of an upload are temporary objects in a folder of its own, which `compose` joins on the condition that the
target does not exist (a multipart upload of the XML interface would replace it, and a resumable one sends its bytes one
after the other):

    FOLDER/.wherry-parts/NAME/KEY/upload        created by `begin`, removed last; an upload without it no longer exists
    FOLDER/.wherry-parts/NAME/KEY/part-00000    a part
    FOLDER/.wherry-parts/NAME/KEY/join-1-00000  up to 32 parts, if there are more than 32

Every object carries the id of its run and is put with the CRC-32C of its bytes, which the store compares with what it
received. A part is created, not replaced, so that a late attempt of an earlier request changes nothing.

A single request raises FileNotFoundError for a missing object and FileExistsError for a condition that does not hold,
as gcsfs does. Paths begin with the bucket.
Source: the reference of the JSON interface, `storage/v1`: objects.get, insert, compose, delete, list.
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import quote, urlencode
from uuid import uuid4

from wherry.core.json_document import json_value
from wherry.errors import StorageError
from wherry.store.addresses import guard, redirect_guard
from wherry.store.content import (
    CRC32C,
    Body,
    by_algorithm,
    checksum_of,
    from_base64,
    is_same,
    joined_checksum,
    to_base64,
)
from wherry.store.failures import (
    FAILURES,
    altered_error,
    bucket_not_found,
    is_plain_failure,
    kind_of,
    translate_error,
)
from wherry.store.remote_store import (
    ObjectStore,
    PassedOnError,
    RangedStore,
    aiohttp_timeout,
    call_async,
    for_each,
    in_thread,
    page_row,
    range_header,
    require_range,
    stated_options,
)
from wherry.store.store import Entry, Part, PartLimits, StoredObject, Upload
from wherry.store.transfers import BodyRequest, BufferFill, HttpAnswer, is_plain

MOST_SOURCES = 32  # of one `compose`
_LARGEST = 5 << 40  # bytes of an object
_FOLDER = ".wherry-parts"
_UPLOAD, _PART, _JOIN = "upload", "part-", "join-"
_REPEATS = 3  # of a part that another state of itself obstructs
_PAGE = 1000  # objects of one page of a listing
_BLOCK = 256 << 10  # bytes, as many as a socket of asyncio gives at a time
_RUN = "wherry-run"  # key of the metadata
_ABSENT = "0"  # the generation of an object that does not exist
_KIND = "application/octet-stream"
_INSERT = "upload/storage/v1/b/{}/o"
_NOT_FOUND = 404
_FIELDS = "bucket,name,size,generation,crc32c,metadata"
_METADATA = "169.254.169.254"  # where Google Cloud and others answer questions of a machine about itself
_METADATA_SECONDS = 1.0
_LONGEST_MESSAGE = 300
_FIRST_FAILURE = 400  # the smallest status of HTTP that is an error


class _PlacedPart(NamedTuple):
    """An object that becomes a part of another one."""

    path: str
    part: Part


class GoogleStore(RangedStore, ObjectStore):
    """Objects of Google Cloud Storage."""

    part_limits = PartLimits(1, _LARGEST, MOST_SOURCES**3)  # of `compose`, three times over

    def page(self, path: str, start: str) -> tuple[list[tuple[str, Entry]], bool]:
        """See Store."""
        bucket, prefix, _generation = self.fs.split_path(path)
        how: dict[str, Any] = {
            "prefix": f"{prefix}/" if prefix else None,
            "startOffset": start.partition("/")[2],
            "maxResults": _PAGE,
        }
        answer = self.call(path, "call", "GET", "b/{}/o", bucket, json_out=True, **how)
        rows = answer.get("items", [])
        found = [
            page_row(f"{bucket}/{row['name']}", row.get("size", 0), row.get("generation")) for row in rows
        ]
        return found, "nextPageToken" in answer

    def remove_object(self, path: str, mark: str, guard: Callable[[], None] = lambda: None) -> bool:
        """See Store: the store compares the state, and says which of both it is."""
        guard()
        sent = 0

        async def remove(fs: Any) -> bool:
            nonlocal sent
            sent += 1
            await delete_object(fs, path, mark)
            return True

        try:
            return self.request(path, remove)
        except FileExistsError:
            return False
        except FileNotFoundError:
            return sent > 1  # an attempt whose answer was lost has removed it

    def begin(self, path: str, run: str) -> Upload:
        """See Store."""
        upload = Upload(path, uuid4().hex, run)
        self.put_object(f"{_folder(upload)}{_UPLOAD}", b"", run)
        return upload

    def put_part(self, upload: Upload, number: int, data: Sequence[memoryview]) -> Part:
        """See Store. That the upload no longer exists is noticed when it is assembled."""
        path = f"{_folder(upload)}{_PART}{number:05d}"
        checksum, nbytes = checksum_of(data), sum(one.nbytes for one in data)
        generation = ""
        for _repeat in range(_REPEATS):
            with suppress(FileExistsError):
                sent = self._put(path, data, checksum, upload.run, generation)
                return Part(number, nbytes, sent.mark, checksum)
            found = self.head(path)
            if found is not None and is_same(found, upload.run, nbytes, checksum):
                return Part(number, nbytes, found.mark, checksum)
            generation = found.mark if found is not None else ""
        raise StorageError(
            f"another run replaces part {number}", uri=f"gs://{path}", cure="run it again", retryable=True
        )

    def parts(self, upload: Upload) -> list[Part]:
        """See Store."""
        folder = _folder(upload)
        rows = {path.removeprefix(folder): found for path, found in self._list_objects(folder)}
        if _UPLOAD not in rows:
            raise FileNotFoundError(f"no upload {upload.key} of {upload.path}")
        return [
            _part(int(name.removeprefix(_PART)), found)
            for name, found in sorted(rows.items())
            if name.startswith(_PART)
        ]

    def abort(self, upload: Upload) -> None:
        """See Store."""
        paths = [path for path, _found in self._list_objects(_folder(upload))]
        marks = [path for path in paths if path.endswith(f"/{_UPLOAD}")]

        def discard(path: str) -> None:
            with suppress(FileNotFoundError):
                self.request(path, lambda fs: delete_object(fs, path))

        for group in ([path for path in paths if path not in marks], marks):
            for_each(discard, group)

    def uploads(self, prefix: str) -> Iterator[Upload]:
        """See Store. All objects with the prefix are listed."""
        folder, _, name = prefix.rpartition("/")
        prefixes = [prefix, f"{folder}/{_FOLDER}/{name}"] if name and folder else [prefix]
        found: dict[tuple[str, str], Upload] = {}
        for one in prefixes:
            for path, row in self._list_objects(one):
                # A temporary object is in a folder that names its upload; no other object does.
                home, marked, rest = path.rpartition(f"/{_FOLDER}/")
                parts = rest.split("/")
                if marked and len(parts) == 3:  # noqa: PLR2004
                    upload = Upload(f"{home}/{parts[0]}", parts[1], row.run)
                    found.setdefault((upload.path, upload.key), upload)
        yield from found.values()

    def _open(self, timeout: float) -> Any:
        """Open gcsfs with one attempt for each request; decision 029 says why its class is that of `gcsfs.core`."""
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

    def _prepare(self, seconds: float) -> None:
        """Renew expired credentials of Google here; in the loop of fsspec that would stop all other calls."""
        login: Any = getattr(self.fs, "credentials", None)
        held: Any = getattr(login, "credentials", None)
        if held is not None and not held.valid:
            in_thread(login.maybe_refresh, seconds)

    async def _list_one(self, bucket: str) -> None:
        await self.fs._call("GET", "b/{}/o", bucket, maxResults=1)  # noqa: SLF001  fsspec's own way

    async def _range_request(self, path: str, start: int, nbytes: int, mark: str) -> BodyRequest | None:
        if not sends_plainly(self.fs):
            return None
        headers = {"Range": range_header(start, nbytes)}
        return body_request(self.fs, "GET", self.fs.url(path, generation=mark or None), headers, {})

    def _refusal(self, request: BodyRequest, answer: HttpAnswer, path: str) -> Exception | None:  # noqa: ARG002
        if answer.status == _NOT_FOUND:
            return FileNotFoundError(answer.status)
        error = AnswerError(answer.status, answer.headers, answer.body.decode(errors="replace"))
        return error if is_plain_failure(error) else None

    async def _receive(self, path: str, start: int, into: BufferFill, mark: str) -> None:
        """Receive a range with the session of gcsfs; its `_cat_file` would hold the whole answer in memory."""
        from gcsfs.core import GCSFileSystem

        generation = mark or None
        if type(self.fs) is not GCSFileSystem:  # that of zonal buckets, which reads by gRPC
            stop = start + into.size
            into.add(await self.fs._cat_file(path, start=start, end=stop, generation=generation))  # noqa: SLF001
            return
        gcs = cast("Any", self.fs)
        await gcs._set_session()  # noqa: SLF001  as every request of gcsfs begins
        how = {
            "params": gcs._get_params({}),  # noqa: SLF001
            "headers": gcs._get_headers({"Range": range_header(start, into.size)}),  # noqa: SLF001
            "timeout": gcs.requests_timeout,
            "middlewares": (),  # that of the session reads all of an answer
        }
        async with gcs.session.get(gcs.url(path, generation=generation), **how) as answer:
            await require_success(answer)
            answer.raise_for_status()
            require_range(answer.status, answer.headers, start)
            while block := await answer.content.read(_BLOCK):
                into.add(block)

    async def _look(self, fs: Any, path: str) -> StoredObject:
        return describe_row(await _call(fs, "GET", "b/{}/o/{}", *_split(path), json_out=True, fields=_FIELDS))

    def _put(
        self, path: str, data: Sequence[memoryview], checksum: str, run: str, replaces: str
    ) -> StoredObject:
        bucket, name = _split(path)
        row = {"name": name, "contentType": _KIND, "crc32c": to_base64(checksum), "metadata": {_RUN: run}}
        boundary = uuid4().hex
        head = f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{json.dumps(row)}\r\n"
        head += f"--{boundary}\r\nContent-Type: {_KIND}\r\n\r\n"
        body = [memoryview(head.encode()), *data, memoryview(f"\r\n--{boundary}--".encode())]
        headers = {"Content-Type": f'multipart/related; boundary="{boundary}"'}
        params = {"uploadType": "multipart", "ifGenerationMatch": replaces or _ABSENT, "fields": _FIELDS}

        async def insert() -> dict[str, Any]:
            whole = Body(body)
            how = {"headers": {**headers, "Content-Length": str(whole.nbytes)}, "data": whole, **params}
            url = f"{self.fs._location}/{_INSERT}"  # noqa: SLF001  gcsfs has no public name for it
            return await _call(self.fs, "POST", url, bucket, json_out=True, **how)

        def once(seconds: float) -> StoredObject:
            try:
                row = self._sent_plainly(path, headers, params, body, seconds)
                row = row or call_async(self.fs, insert, seconds)
            except FileNotFoundError as error:
                raise bucket_not_found("gs", path) from error
            found = describe_row(row)
            reported = f"{CRC32C}:{found.checksums[CRC32C]}"
            if reported != checksum:
                call_async(self.fs, lambda: delete_object(self.fs, path, found.mark), seconds)
                raise altered_error(f"gs://{path}", checksum, reported)
            return found

        return self.transfer(path, once, sum(one.nbytes for one in data))

    def _sent_plainly(
        self,
        path: str,
        headers: Mapping[str, str],
        params: Mapping[str, str],
        body: Sequence[memoryview],
        seconds: float,
    ) -> dict[str, Any] | None:
        """The row of an object that this thread has put; None if only gcsfs can send it."""
        request = None
        if sends_plainly(self.fs):
            bucket = quote(path.partition("/")[0], safe="")
            url = f"{self.fs._location}/{_INSERT.format(bucket)}"  # noqa: SLF001
            request = body_request(self.fs, "POST", url, headers, params)
        answer = self._exchanged(path, request, seconds, views=body)
        return None if answer is None else json_value(answer.body)

    def _copy(
        self, source: str, found: StoredObject, path: str, run: str, guard: Callable[[], None]
    ) -> StoredObject:
        """A composition of one object."""
        guard()
        return self._compose(path, [_PlacedPart(source, _part(0, found))], run)

    def _assemble(self, upload: Upload, parts: Sequence[Part]) -> StoredObject:
        folder = _folder(upload)
        sources = [_PlacedPart(f"{folder}{_PART}{part.number:05d}", part) for part in parts]
        for level in range(1, 4):
            if len(sources) > MOST_SOURCES:
                sources = self._join_parts(upload, sources, level)
        made = self._compose(upload.path, sources, upload.run)
        self.abort(upload)
        return made

    def _compose(self, path: str, sources: Sequence[_PlacedPart], run: str) -> StoredObject:
        """Make an object of others.

        Raises:
            FileExistsError: it exists, and is not the one that this call sent.
            FileNotFoundError: a source no longer exists, or is in another state.
        """
        parts = [one.part for one in sources]
        nbytes, checksum = sum(part.nbytes for part in parts), joined_checksum(parts)
        bucket, name = _split(path)
        rows = [
            {
                "name": _split(one.path)[1],
                "generation": one.part.mark,
                "objectPreconditions": {"ifGenerationMatch": one.part.mark},
            }
            for one in sources
        ]
        made = {"sourceObjects": rows, "destination": {"contentType": _KIND, "metadata": {_RUN: run}}}
        how = {"json": made, "fields": _FIELDS, "ifGenerationMatch": _ABSENT}

        async def send(fs: Any) -> StoredObject:
            row = await _call(fs, "POST", "b/{}/o/{}/compose", bucket, name, json_out=True, **how)
            found = describe_row(row)
            if not is_same(found, run, nbytes, checksum):
                await delete_object(fs, path, found.mark)
                raise altered_error(f"gs://{path}", checksum, f"{CRC32C}:{found.checksums[CRC32C]}")
            return found

        try:
            return self.request(path, send, nbytes)
        except FileExistsError as error:
            found = self.head(path)
            if found is None:
                raise FileNotFoundError(f"a part of {path} is in another state") from error
            if not is_same(found, run, nbytes, checksum):
                raise
            return found

    def _join_parts(self, upload: Upload, sources: Sequence[_PlacedPart], level: int) -> list[_PlacedPart]:
        """Join each 32 parts into one object."""
        groups = [sources[first : first + MOST_SOURCES] for first in range(0, len(sources), MOST_SOURCES)]

        def join(number: int) -> _PlacedPart:
            path = f"{_folder(upload)}{_JOIN}{level}-{number:05d}"
            found = self._compose(path, groups[number], upload.run)
            return _PlacedPart(path, _part(number, found))

        return for_each(join, range(len(groups)))

    def _list_objects(self, prefix: str) -> Iterator[tuple[str, StoredObject]]:
        """Path and description of all objects with a prefix."""
        bucket, name = _split(prefix)
        how: dict[str, Any] = {"prefix": name, "fields": f"items({_FIELDS}),nextPageToken"}

        async def listed(fs: Any) -> dict[str, Any]:
            return await _call(fs, "GET", "b/{}/o", bucket, json_out=True, **how)

        while True:
            page = self.request(prefix, listed)
            for row in page.get("items", ()):
                yield f"{row['bucket']}/{row['name']}", describe_row(row)
            if not page.get("nextPageToken"):
                return
            how["pageToken"] = page["nextPageToken"]


def _folder(upload: Upload) -> str:
    """Where the temporary objects of an upload are."""
    folder, _, name = upload.path.rpartition("/")
    return f"{folder}/{_FOLDER}/{name}/{upload.key}/"


def _part(number: int, found: StoredObject) -> Part:
    return Part(number, found.nbytes, found.mark, f"{CRC32C}:{found.checksums[CRC32C]}")


def describe_row(row: Mapping[str, Any]) -> StoredObject:
    """An object as a row of an answer describes it."""
    run = row.get("metadata", {}).get(_RUN, "")
    checksums = by_algorithm(from_base64(row.get("crc32c")))
    return StoredObject(int(row.get("size", 0)), row["generation"], run, checksums)


async def delete_object(fs: Any, path: str, generation: str | None = None) -> None:
    """Remove an object that is in a generation; without one, in any."""
    condition = {} if generation is None else {"ifGenerationMatch": generation}
    await _call(fs, "DELETE", "b/{}/o/{}", *_split(path), **condition)


def sends_plainly(fs: Any) -> bool:
    """Whether requests of a file system are ordinary HTTP: zonal buckets use gRPC, and some logins a certificate."""
    from gcsfs.core import GCSFileSystem

    if type(fs) is not GCSFileSystem:
        return False
    gcs: Any = fs
    own = getattr(gcs, "_use_client_cert", False) or "connector" in gcs.session_kwargs
    return not own and is_plain(gcs._location)  # noqa: SLF001  gcsfs has no public name for it


def body_request(
    fs: Any, method: str, url: str, headers: Mapping[str, str], params: Mapping[str, str]
) -> BodyRequest:
    """A request with the login and the parameters that gcsfs adds to each.

    Args:
        fs: the file system of gcsfs.
        method: of HTTP.
        url: quoted; it may have parameters.
        headers: of the request.
        params: further parameters.
    """
    query = urlencode(fs._get_params(dict(params)))  # noqa: SLF001
    joint = "" if not query else "&" if "?" in url else "?"
    return BodyRequest(method, f"{url}{joint}{query}", fs._get_headers(dict(headers)))  # noqa: SLF001


async def _call(fs: Any, method: str, path: str, *names: str, **what: Any) -> Any:
    return await fs._call(method, path, *names, **what)  # noqa: SLF001  of which `fs.call` is the synchronous form


def _split(path: str) -> tuple[str, str]:
    bucket, _, name = path.partition("/")
    return bucket, name


class AnswerError(Exception):
    """An answer of Google Cloud Storage with the status of a failure."""

    def __init__(self, status: int, headers: Mapping[str, str], text: str) -> None:
        super().__init__(f"HTTP {status}: {_message(text)}")
        self.status, self.headers = status, headers


async def _guarded_session(opening: Callable[[], Awaitable[Any]]) -> Any:
    """The session of gcsfs, whose connections are checked."""
    session = await opening()
    return session if "_resolve_host" in vars(session.connector) else guard(session, configured=True)


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
    """Raise if Google Cloud Storage answered with a failure that `wherry.store.failures` knows."""
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
