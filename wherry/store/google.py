"""google: gs://, with the JSON interface as gcsfs calls it.

The parts of an upload are temporary objects in a folder of its own, which `compose` joins on the condition that the
target does not exist (a multipart upload of the XML interface would replace it, and a resumable one sends its bytes one
after the other):

    FOLDER/.wherry-parts/NAME/KEY/upload        created by `begin`, removed last; an upload without it no longer exists
    FOLDER/.wherry-parts/NAME/KEY/part-00000    a part
    FOLDER/.wherry-parts/NAME/KEY/join-1-00000  up to 32 parts, if there are more than 32

Every object carries the id of its run and is put with the CRC-32C of its bytes, which the store compares with what it
received. A part is created, not replaced, so that a late attempt of an earlier request changes nothing.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from uuid import uuid4

from wherry.errors import StorageError
from wherry.remote.errors import altered_error, bucket_not_found
from wherry.remote.filesystems import call_async
from wherry.store.checksums import CRC32C, checksum_of, is_same, joined_checksum
from wherry.store.fsspec_store import page_row
from wherry.store.google_calls import (
    ABSENT,
    body_request,
    compose,
    delete_object,
    describe_row,
    insert,
    insert_object,
    insertion,
    list_page,
    read_row,
    refused_by_google,
    sends_plainly,
)
from wherry.store.google_session import open_google, refresh_login, require_success
from wherry.store.object_store import ObjectStore, for_each
from wherry.store.ranged_store import RangedStore, range_header, require_range
from wherry.store.store import Entry, Part, PartLimits, StoredObject, Upload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from wherry.remote.buffer_fill import BufferFill
    from wherry.remote.transfers import BodyRequest, HttpAnswer

MOST_SOURCES = 32  # of one `compose`
_LARGEST = 5 << 40  # bytes of an object
_FOLDER = ".wherry-parts"
_UPLOAD, _PART, _JOIN = "upload", "part-", "join-"
_REPEATS = 3  # of a part that another state of itself obstructs
_PAGE = 1000  # objects of one page of a listing
_BLOCK = 256 << 10  # bytes, as many as a socket of asyncio gives at a time


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

    def head(self, path: str) -> StoredObject | None:
        """See Store."""
        try:
            return describe_row(self.request(path, lambda fs: read_row(fs, path)))
        except FileNotFoundError:
            self.require_bucket(path)
            return None

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
        for group in ([path for path in paths if path not in marks], marks):
            for_each(self._discard, group)

    def uploads(self, prefix: str) -> Iterator[Upload]:
        """See Store. All objects with the prefix are listed."""
        folder, _, name = prefix.rpartition("/")
        prefixes = [prefix, f"{folder}/{_FOLDER}/{name}"] if name and folder else [prefix]
        found: dict[tuple[str, str], Upload] = {}
        for one in prefixes:
            for path, row in self._list_objects(one):
                # A temporary object lies in a folder that names its upload; no other object does.
                home, marked, rest = path.rpartition(f"/{_FOLDER}/")
                parts = rest.split("/")
                if marked and len(parts) == 3:  # noqa: PLR2004
                    upload = Upload(f"{home}/{parts[0]}", parts[1], row.run)
                    found.setdefault((upload.path, upload.key), upload)
        yield from found.values()

    def _open(self, timeout: float) -> Any:
        return open_google(timeout)

    def _prepare(self, seconds: float) -> None:
        refresh_login(self.fs, seconds)

    async def _list_one(self, bucket: str) -> None:
        await self.fs._call("GET", "b/{}/o", bucket, maxResults=1)  # noqa: SLF001  fsspec's own way

    async def _range_request(self, path: str, start: int, nbytes: int, mark: str) -> BodyRequest | None:
        if not sends_plainly(self.fs):
            return None
        headers = {"Range": range_header(start, nbytes)}
        return body_request(self.fs, "GET", self.fs.url(path, generation=mark or None), headers, {})

    def _refusal(self, answer: HttpAnswer, path: str) -> Exception | None:  # noqa: ARG002  the protocol's
        return refused_by_google(answer)

    async def _receive(self, path: str, start: int, into: BufferFill, mark: str) -> None:
        """With the session of gcsfs, but not its `_cat_file`, which takes an answer as a whole."""
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

    def _put(
        self, path: str, data: Sequence[memoryview], checksum: str, run: str, replaces: str
    ) -> StoredObject:
        fs, what = self.fs, insertion(path, data, run, checksum, replaces or ABSENT)

        def once(seconds: float) -> StoredObject:
            try:
                row = insert_object(fs, what, seconds) or call_async(fs, lambda: insert(fs, what), seconds)
            except FileNotFoundError as error:
                raise bucket_not_found("gs", path) from error
            found = describe_row(row)
            reported = f"{CRC32C}:{found.checksums[CRC32C]}"
            if reported != checksum:
                call_async(fs, lambda: delete_object(fs, path, found.mark), seconds)
                raise altered_error(f"gs://{path}", checksum, reported)
            return found

        return self.transfer(path, once, sum(one.nbytes for one in data))

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
        rows = [(one.path, one.part.mark) for one in sources]

        async def send(fs: Any) -> StoredObject:
            found = describe_row(await compose(fs, path, rows, run))
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
        """One object for each 32 sources."""
        groups = [sources[first : first + MOST_SOURCES] for first in range(0, len(sources), MOST_SOURCES)]

        def join(number: int) -> _PlacedPart:
            path = f"{_folder(upload)}{_JOIN}{level}-{number:05d}"
            found = self._compose(path, groups[number], upload.run)
            return _PlacedPart(path, _part(number, found))

        return for_each(join, range(len(groups)))

    def _discard(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self.request(path, lambda fs: delete_object(fs, path))

    def _list_objects(self, prefix: str) -> Iterator[tuple[str, StoredObject]]:
        """Path and description of all objects with a prefix."""
        page = ""
        while True:
            rows, page = self.request(prefix, lambda fs, page=page: list_page(fs, prefix, page))
            for row in rows:
                yield f"{row['bucket']}/{row['name']}", describe_row(row)
            if not page:
                return


def _folder(upload: Upload) -> str:
    """Where the temporary objects of an upload are."""
    folder, _, name = upload.path.rpartition("/")
    return f"{folder}/{_FOLDER}/{name}/{upload.key}/"


def _part(number: int, found: StoredObject) -> Part:
    return Part(number, found.nbytes, found.mark, f"{CRC32C}:{found.checksums[CRC32C]}")
