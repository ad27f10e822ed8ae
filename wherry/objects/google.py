"""google: the ObjectStore of gs://, with the JSON interface as gcsfs calls it.

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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from wherry.errors import StorageError, UnsupportedError
from wherry.objects.body import views_of
from wherry.objects.checksums import CRC32C, checksum_of, is_same, joined_checksum
from wherry.objects.google_calls import (
    compose,
    delete_object,
    describe_row,
    insert,
    insert_object,
    insertion,
    list_page,
    read_row,
)
from wherry.objects.removals import remove_each
from wherry.objects.uploads import Part, PartLimits, StoredObject, Upload
from wherry.remote.errors import altered_error, bucket_not_found
from wherry.remote.filesystems import call_async
from wherry.runtime import threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from wherry.objects.body import Content
    from wherry.storage.fsspec_store import FsspecStore

_T = TypeVar("_T")
_R = TypeVar("_R")

MOST_SOURCES = 32  # of one `compose`
_LARGEST = 5 << 40  # bytes of an object
_FOLDER = ".wherry-parts"
_UPLOAD, _PART, _JOIN = "upload", "part-", "join-"
_ABSENT = "0"  # the generation of an object that does not exist
_AT_ONCE = 16  # small requests at the same time
_REPEATS = 3  # of a part that another state of itself obstructs


@dataclass(frozen=True, slots=True)
class _PlacedPart:
    """An object that becomes a part of another one."""

    path: str
    part: Part


class GoogleObjects:
    """Objects of Google Cloud Storage.

    Attributes:
        part_limits: of `compose`, three times over.
    """

    part_limits = PartLimits(1, _LARGEST, MOST_SOURCES**3)
    aborts_apart = True

    def __init__(self, store: FsspecStore) -> None:
        self._store = store

    def head(self, path: str) -> StoredObject | None:
        """See ObjectStore."""
        try:
            return describe_row(self._store.request(path, lambda fs: read_row(fs, path)))
        except FileNotFoundError:
            self._store.require_bucket(path)
            return None

    def put_object(self, path: str, data: Content, run: str, *, replaces: str = "") -> StoredObject:
        """See ObjectStore."""
        views = views_of(data)
        try:
            return self._insert(path, views, run, replaces or _ABSENT)
        except FileExistsError:
            if (found := self._ours(path, run, sum(map(len, views)), checksum_of(views))) is None:
                raise
            return found

    def remove_object(self, path: str, mark: str) -> bool:
        """See ObjectStore."""
        sent = 0

        async def remove(fs: Any) -> bool:
            nonlocal sent
            sent += 1
            await delete_object(fs, path, mark)
            return True

        try:
            return self._store.request(path, remove)
        except FileExistsError:
            return False
        except FileNotFoundError:
            return sent > 1  # an attempt whose answer was lost has removed it

    def remove_many(self, marks: Mapping[str, str]) -> None:
        """See ObjectStore."""
        remove_each(self, marks)

    def begin(self, path: str, run: str) -> Upload:
        """See ObjectStore."""
        upload = Upload(path, uuid4().hex, run)
        self.put_object(f"{_folder(upload)}{_UPLOAD}", b"", run)
        return upload

    def put_part(self, upload: Upload, number: int, data: Sequence[memoryview]) -> Part:
        """See ObjectStore. That the upload no longer exists is noticed when it is assembled."""
        path = f"{_folder(upload)}{_PART}{number:05d}"
        checksum, nbytes = checksum_of(data), sum(one.nbytes for one in data)
        generation = _ABSENT
        for _repeat in range(_REPEATS):
            with suppress(FileExistsError):
                sent = self._insert(path, data, upload.run, generation)
                return Part(number, nbytes, sent.mark, checksum)
            found = self.head(path)
            if found is not None and is_same(found, upload.run, nbytes, checksum):
                return Part(number, nbytes, found.mark, checksum)
            generation = found.mark if found is not None else _ABSENT
        raise StorageError(
            f"another run replaces part {number}", uri=f"gs://{path}", cure="run it again", retryable=True
        )

    def copy_part(
        self,
        upload: Upload,  # noqa: ARG002  the protocol's
        number: int,  # noqa: ARG002
        source: str,
        start: int,  # noqa: ARG002
        stop: int,  # noqa: ARG002
        mark: str,  # noqa: ARG002
    ) -> Part:
        """See ObjectStore: `compose` takes whole objects only, and `Capabilities.range_copy` does not hold."""
        raise UnsupportedError(
            "gs:// cannot copy a range of an object",
            uri=f"gs://{source}",
            cure="read the bytes and send them",
        )

    def copy_object(self, source: str, mark: str, path: str, run: str) -> StoredObject:
        """See ObjectStore. It is a composition of one object."""
        found = self.head(source)
        if found is None or found.mark != mark:
            raise FileNotFoundError(f"{source} in the state {mark}")
        if not found.nbytes:
            return self.put_object(path, b"", run)
        part = Part(0, found.nbytes, mark, f"{CRC32C}:{found.checksums[CRC32C]}")
        return self._compose(path, [_PlacedPart(source, part)], run, create_only=True)

    def parts(self, upload: Upload) -> list[Part]:
        """See ObjectStore."""
        folder = _folder(upload)
        rows = {path.removeprefix(folder): found for path, found in self._list_objects(folder)}
        if _UPLOAD not in rows:
            raise FileNotFoundError(f"no upload {upload.key} of {upload.path}")
        return [
            _part(int(name.removeprefix(_PART)), found)
            for name, found in sorted(rows.items())
            if name.startswith(_PART)
        ]

    def assemble(self, upload: Upload, parts: Sequence[Part], *, create_only: bool = True) -> StoredObject:
        """See ObjectStore."""
        folder = _folder(upload)
        sources = [_PlacedPart(f"{folder}{_PART}{part.number:05d}", part) for part in parts]
        try:
            for level in range(1, 4):
                if len(sources) > MOST_SOURCES:
                    sources = self._join_parts(upload, sources, level)
            made = self._compose(upload.path, sources, upload.run, create_only=create_only)
        except FileNotFoundError:
            nbytes, checksum = sum(part.nbytes for part in parts), joined_checksum(parts)
            if (made := self._ours(upload.path, upload.run, nbytes, checksum)) is None:
                raise
        self.abort(upload)
        return made

    def abort(self, upload: Upload) -> None:
        """See ObjectStore."""
        paths = [path for path, _found in self._list_objects(_folder(upload))]
        marks = [path for path in paths if path.endswith(f"/{_UPLOAD}")]
        for group in ([path for path in paths if path not in marks], marks):
            _each(self._discard, group)

    def uploads(self, prefix: str) -> Iterator[Upload]:
        """See ObjectStore. All objects with the prefix are listed."""
        folder, _, name = prefix.rpartition("/")
        prefixes = [prefix, f"{folder}/{_FOLDER}/{name}"] if name and folder else [prefix]
        found: dict[tuple[str, str], Upload] = {}
        for one in prefixes:
            for path, row in self._list_objects(one):
                upload = _upload_of(path, row.run)
                if upload is not None:
                    found.setdefault((upload.path, upload.key), upload)
        yield from found.values()

    def _insert(self, path: str, data: Sequence[memoryview], run: str, generation: str) -> StoredObject:
        """Put an object that is in a generation.

        Raises:
            FileExistsError: it is in another one.
        """
        checksum, nbytes = checksum_of(data), sum(one.nbytes for one in data)
        fs, what = self._store.fs, insertion(path, data, run, checksum, generation)

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

        return self._store.transfer(path, once, nbytes)

    def _compose(
        self, path: str, sources: Sequence[_PlacedPart], run: str, *, create_only: bool
    ) -> StoredObject:
        """Make an object of others.

        Raises:
            FileExistsError: it exists, and is not the one that this call sent.
            FileNotFoundError: a source no longer exists, or is in another state.
        """
        parts = [one.part for one in sources]
        nbytes, checksum = sum(part.nbytes for part in parts), joined_checksum(parts)
        rows = [(one.path, one.part.mark) for one in sources]

        async def send(fs: Any) -> StoredObject:
            found = describe_row(await compose(fs, path, rows, run, _ABSENT if create_only else ""))
            if not is_same(found, run, nbytes, checksum):
                await delete_object(fs, path, found.mark)
                raise altered_error(f"gs://{path}", checksum, f"{CRC32C}:{found.checksums[CRC32C]}")
            return found

        try:
            return self._store.request(path, send, nbytes)
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
            found = self._compose(path, groups[number], upload.run, create_only=True)
            return _PlacedPart(path, _part(number, found))

        return _each(join, range(len(groups)))

    def _discard(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._store.request(path, lambda fs: delete_object(fs, path))

    def _list_objects(self, prefix: str) -> Iterator[tuple[str, StoredObject]]:
        """Path and description of all objects with a prefix."""
        page = ""
        while True:
            rows, page = self._store.request(prefix, lambda fs, page=page: list_page(fs, prefix, page))
            for row in rows:
                yield f"{row['bucket']}/{row['name']}", describe_row(row)
            if not page:
                return

    def _ours(self, path: str, run: str, nbytes: int, checksum: str) -> StoredObject | None:
        """The object at a path, if it is the one that a call sent whose answer was lost."""
        found = self.head(path)
        return found if found is not None and is_same(found, run, nbytes, checksum) else None


def _each(call: Callable[[_T], _R], items: Iterable[_T]) -> list[_R]:
    """Call a function for each item, some at the same time."""
    with threads.executor(_AT_ONCE, "wherry-objects", numbers=False) as pool:
        return list(pool.map(call, items))


def _folder(upload: Upload) -> str:
    """Where the temporary objects of an upload are."""
    folder, _, name = upload.path.rpartition("/")
    return f"{folder}/{_FOLDER}/{name}/{upload.key}/"


def _upload_of(path: str, run: str) -> Upload | None:
    """The upload that a temporary object belongs to; None for any other object."""
    folder, found, rest = path.rpartition(f"/{_FOLDER}/")
    parts = rest.split("/")
    return Upload(f"{folder}/{parts[0]}", parts[1], run) if found and len(parts) == 3 else None  # noqa: PLR2004


def _part(number: int, found: StoredObject) -> Part:
    return Part(number, found.nbytes, found.mark, f"{CRC32C}:{found.checksums[CRC32C]}")
