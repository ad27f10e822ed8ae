"""memory: memory://, with the rules of a real one.

All stores of a process share their objects and uploads, as fsspec shares its files. Parts have limits, every write
gives an object another mark, and an object that fsspec itself wrote has a mark, but no run.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from wherry.errors import StorageError
from wherry.store.content import by_algorithm, checksum_of
from wherry.store.remote_store import ObjectStore
from wherry.store.store import Part, StoredObject, Upload

_lock = threading.RLock()
_numbers = itertools.count(1)
_uploads: dict[str, tuple[Upload, dict[int, tuple[Part, bytes]]]] = {}  # key → the upload and its parts


class MemoryStore(ObjectStore):
    """Objects in the memory of this process; tests of small objects replace `part_limits`."""

    def head(self, path: str) -> StoredObject | None:
        """See Store."""
        file = self._file(path)
        return None if file is None else _describe(file)

    def remove_object(self, path: str, mark: str, guard: Callable[[], None] = lambda: None) -> bool:
        """See Store."""
        guard()
        with _lock:
            found = self.head(path)
            if found is None or found.mark != mark:
                return False
            self.fs.rm_file(self._key(path))
            return True

    def begin(self, path: str, run: str) -> Upload:
        """See Store."""
        upload = Upload(path, f"upload-{next(_numbers)}", run)
        with _lock:
            _uploads[upload.key] = (upload, {})
        return upload

    def put_part(self, upload: Upload, number: int, data: Sequence[memoryview]) -> Part:
        """See Store."""
        sent = b"".join(data)
        limits = self.part_limits
        if number not in range(limits.most) or len(sent) > limits.largest:
            raise _refuse(upload, f"part {number} of {len(sent)} bytes")
        part = Part(number, len(sent), f"part-{next(_numbers)}", checksum_of(data))
        with _lock:
            _parts_of(upload)[number] = part, sent
        return part

    def parts(self, upload: Upload) -> list[Part]:
        """See Store."""
        with _lock:
            return [part for _number, (part, _data) in sorted(_parts_of(upload).items())]

    def abort(self, upload: Upload) -> None:
        """See Store."""
        with _lock:
            _uploads.pop(upload.key, None)

    def uploads(self, prefix: str) -> Iterator[Upload]:
        """See Store."""
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

    def _put(
        self, path: str, data: Sequence[memoryview], checksum: str, run: str, replaces: str
    ) -> StoredObject:
        del checksum  # nothing is sent
        with _lock:
            found = self.head(path)
            if (found.mark if found else "") != replaces:
                raise FileExistsError(path)
            return self._write(path, b"".join(data), run)

    def _copy(
        self, source: str, found: StoredObject, path: str, run: str, guard: Callable[[], None]
    ) -> StoredObject:
        with _lock:
            file = self._file(source)
            if file is None or _describe(file).mark != found.mark:
                raise FileNotFoundError(f"{source} in the state {found.mark}")
            data = file.getvalue()
        guard()
        return self.put_object(path, data, run)

    def _assemble(self, upload: Upload, parts: Sequence[Part]) -> StoredObject:
        with _lock:
            data = self._join_parts(upload, parts)
            if self.head(upload.path) is not None:
                raise FileExistsError(upload.path)
            made = self._write(upload.path, data, upload.run)
            self.abort(upload)
            return made

    def _write(self, path: str, data: bytes, run: str) -> StoredObject:
        self.fs.pipe_file(self._key(path), data)
        file = self._file(path)
        file.wherry_run = run
        return _describe(file)

    def _file(self, path: str) -> Any:
        return self.fs.store.get(self._key(path))

    def _key(self, path: str) -> str:
        return self.fs._strip_protocol(path)  # noqa: SLF001  the form of its keys


def _describe(file: Any) -> StoredObject:
    """A file of fsspec as an object; it gets a generation when it is first seen."""
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
