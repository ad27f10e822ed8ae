"""memory: the ObjectStore of memory://, with the rules of a real one.

All stores of a process share their objects and uploads, as fsspec shares its files. Parts have limits, every write
gives an object another mark, and an object that fsspec itself wrote has a mark, but no run.
"""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Any

from wherry.errors import StorageError
from wherry.objects.body import views_of
from wherry.objects.checksums import by_algorithm, checksum_of, is_same, joined_checksum
from wherry.objects.removals import remove_each
from wherry.objects.uploads import Part, PartLimits, StoredObject, Upload

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from wherry.objects.body import Content
    from wherry.storage.fsspec_store import FsspecStore

_lock = threading.RLock()
_numbers = itertools.count(1)
_uploads: dict[str, tuple[Upload, dict[int, tuple[Part, bytes]]]] = {}  # key → the upload and its parts


class MemoryObjects:
    """Objects in the memory of this process.

    Attributes:
        part_limits: of all instances; tests of small objects replace it.
    """

    part_limits = PartLimits()
    aborts_apart = True

    def __init__(self, store: FsspecStore) -> None:
        self._fs: Any = store.fs

    def head(self, path: str) -> StoredObject | None:
        """See ObjectStore."""
        file = self._file(path)
        return None if file is None else _describe(file)

    def put_object(self, path: str, data: Content, run: str, *, replaces: str = "") -> StoredObject:
        """See ObjectStore."""
        whole = b"".join(views_of(data))
        with _lock:
            found = self.head(path)
            if found is None and replaces:
                raise FileExistsError(f"{path} is no longer in the state {replaces}")
            if found is not None and found.mark != replaces:
                if self._same(path, run, whole):
                    return found
                raise FileExistsError(path)
            return self._write(path, whole, run)

    def remove_object(self, path: str, mark: str) -> bool:
        """See ObjectStore."""
        with _lock:
            found = self.head(path)
            if found is None or found.mark != mark:
                return False
            self._fs.rm_file(self._key(path))
            return True

    def remove_many(self, marks: Mapping[str, str]) -> None:
        """See ObjectStore."""
        remove_each(self, marks)

    def begin(self, path: str, run: str) -> Upload:
        """See ObjectStore."""
        upload = Upload(path, f"upload-{next(_numbers)}", run)
        with _lock:
            _uploads[upload.key] = (upload, {})
        return upload

    def put_part(self, upload: Upload, number: int, data: Sequence[memoryview]) -> Part:
        """See ObjectStore."""
        sent = b"".join(data)
        limits = self.part_limits
        if number not in range(limits.most) or len(sent) > limits.largest:
            raise _refuse(upload, f"part {number} of {len(sent)} bytes")
        part = Part(number, len(sent), f"part-{next(_numbers)}", checksum_of(data))
        with _lock:
            _parts_of(upload)[number] = part, sent
        return part

    def copy_part(self, upload: Upload, number: int, source: str, start: int, stop: int, mark: str) -> Part:
        """See ObjectStore."""
        return self.put_part(upload, number, [memoryview(self._bytes(source, mark))[start:stop]])

    def copy_object(self, source: str, mark: str, path: str, run: str) -> StoredObject:
        """See ObjectStore."""
        return self.put_object(path, self._bytes(source, mark), run)

    def parts(self, upload: Upload) -> list[Part]:
        """See ObjectStore."""
        with _lock:
            return [part for _number, (part, _data) in sorted(_parts_of(upload).items())]

    def assemble(self, upload: Upload, parts: Sequence[Part], *, create_only: bool = True) -> StoredObject:
        """See ObjectStore."""
        with _lock:
            if upload.key not in _uploads:
                return self._assemble(upload, parts)
            data = self._join_parts(upload, parts)
            found = self.head(upload.path)
            if found is None or not create_only:
                found = self._write(upload.path, data, upload.run)
            elif not self._same(upload.path, upload.run, data):
                raise FileExistsError(upload.path)
            del _uploads[upload.key]
            return found

    def abort(self, upload: Upload) -> None:
        """See ObjectStore."""
        with _lock:
            _uploads.pop(upload.key, None)

    def uploads(self, prefix: str) -> Iterator[Upload]:
        """See ObjectStore."""
        with _lock:
            found = [upload for upload, _parts in _uploads.values() if upload.path.startswith(prefix)]
        yield from found

    def _join_parts(self, upload: Upload, parts: Sequence[Part]) -> bytes:
        """The bytes of these parts.

        Raises:
            StorageError: the upload has other parts, or one but the last is too small.
        """
        sent = _parts_of(upload)
        if not parts or [part for part in parts if sent.get(part.number, (None,))[0] != part]:
            raise _refuse(upload, "parts that the store does not have")
        if any(part.nbytes < self.part_limits.smallest for part in parts[:-1]):
            raise _refuse(upload, f"a part of less than {self.part_limits.smallest} bytes")
        if any(first.number >= second.number for first, second in itertools.pairwise(parts)):
            raise _refuse(upload, "parts that are not in order")
        return b"".join(sent[part.number][1] for part in parts)

    def _assemble(self, upload: Upload, parts: Sequence[Part]) -> StoredObject:
        """The object that an upload became, which no longer exists.

        Raises:
            FileNotFoundError: it did not become one.
        """
        found = self.head(upload.path)
        nbytes = sum(part.nbytes for part in parts)
        if found is None or not is_same(found, upload.run, nbytes, joined_checksum(parts)):
            raise FileNotFoundError(f"no upload {upload.key} of {upload.path}")
        return found

    def _write(self, path: str, data: bytes, run: str) -> StoredObject:
        self._fs.pipe_file(self._key(path), data)
        file = self._file(path)
        file.wherry_run = run
        return _describe(file)

    def _bytes(self, path: str, mark: str) -> bytes:
        with _lock:
            file = self._file(path)
            if file is None or _describe(file).mark != mark:
                raise FileNotFoundError(f"{path} in the state {mark}")
            return file.getvalue()

    def _same(self, path: str, run: str, data: bytes) -> bool:
        """Whether an object is the one that a call sent."""
        file = self._file(path)
        return getattr(file, "wherry_run", "") == run and file.getvalue() == data

    def _file(self, path: str) -> Any:
        return self._fs.store.get(self._key(path))

    def _key(self, path: str) -> str:
        return self._fs._strip_protocol(path)  # noqa: SLF001  the form of its keys


def _describe(file: Any) -> StoredObject:
    """What a file of fsspec is as an object; it is numbered when it is first seen."""
    if "wherry_number" not in vars(file):
        file.wherry_number = next(_numbers)
    data = file.getvalue()
    mark = f"{file.wherry_number}-{file.modified.timestamp()}"
    checksum = checksum_of([memoryview(data)])
    return StoredObject(len(data), mark, getattr(file, "wherry_run", ""), by_algorithm(checksum))


def _parts_of(upload: Upload) -> dict[int, tuple[Part, bytes]]:
    if upload.key not in _uploads:
        raise FileNotFoundError(f"no upload {upload.key} of {upload.path}")
    return _uploads[upload.key][1]


def _refuse(upload: Upload, what: str) -> StorageError:
    return StorageError(
        f"the store refuses {what}", uri=f"memory://{upload.path}", cure="keep to the limits of parts"
    )
