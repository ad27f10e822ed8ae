"""The objects of the double: conditional puts and removals, uploads in parts, listings; one lock guards them all."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from benchmarks.scale.parts import Kept, Received, kept_of_parts, kept_whole

PAGE = 1000  # entries of a listing


class Served(Protocol):
    """An object of which the bytes come from somewhere else."""

    @property
    def nbytes(self) -> int:
        """Its size."""
        ...

    @property
    def etag(self) -> str:
        """Names its state."""
        ...

    def pieces(self, start: int, stop: int, most: int) -> Iterator[memoryview]:
        """The bytes of a range, as views of at most some bytes."""
        ...


class RefusedError(Exception):
    """An answer of S3 that is an error: status, code."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status, self.code = status, code


@dataclass(slots=True)
class PartsUpload:
    """An upload that is not complete."""

    key: str
    metadata: Mapping[str, str]
    parts: dict[int, Received] = field(default_factory=dict[int, Received])


@dataclass(slots=True)
class Objects:
    """All objects, by `bucket/key`.

    Attributes:
        source: objects that are read-only.
    """

    source: Mapping[str, Served]
    _kept: dict[str, Kept] = field(default_factory=dict[str, Kept])
    _uploads: dict[str, PartsUpload] = field(default_factory=dict[str, PartsUpload])
    _ids: Iterator[int] = field(default_factory=count)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def get(self, path: str) -> Served | Kept:
        """The object at a path.

        Raises:
            RefusedError: there is none.
        """
        with self._lock:
            found = self._kept.get(path) or self.source.get(path)
        if found is None:
            raise RefusedError(404, "NoSuchKey")
        return found

    def put(self, path: str, body: Received, metadata: Mapping[str, str], headers: Mapping[str, str]) -> Kept:
        """Put an object in one request, under the conditions of its headers."""
        with self._lock:
            self._require(path, headers)
            made = self._kept[path] = kept_whole(body, metadata)
        return made

    def remove(self, path: str, headers: Mapping[str, str]) -> None:
        """Remove an object, if it is there."""
        with self._lock:
            if path in self._kept:
                self._require(path, headers)
                del self._kept[path]

    def begin(self, path: str, metadata: Mapping[str, str]) -> str:
        """Begin an upload in parts; its id."""
        with self._lock:
            name = f"upload-{next(self._ids)}"
            self._uploads[name] = PartsUpload(path, metadata)
        return name

    def add_part(self, upload: str, number: int, body: Received) -> None:
        """Keep a part."""
        with self._lock:
            self._upload(upload).parts[number] = body

    def complete(self, upload: str, rows: Sequence[tuple[int, str]], headers: Mapping[str, str]) -> Kept:
        """Make the object of an upload.

        Args:
            upload: its id.
            rows: number and ETag of each part.
            headers: with the conditions.
        """
        with self._lock:
            found = self._upload(upload)
            self._require(found.key, headers)
            parts = [found.parts.get(number) for number, _etag in rows]
            if not rows or any(
                part is None or part.etag != etag for part, (_number, etag) in zip(parts, rows, strict=True)
            ):
                raise RefusedError(400, "InvalidPart")
            made = kept_of_parts([part for part in parts if part is not None], found.metadata)
            self._kept[found.key] = made
            del self._uploads[upload]
        return made

    def abort(self, upload: str) -> None:
        """Forget an upload."""
        with self._lock:
            self._upload(upload)
            del self._uploads[upload]

    def parts_of(self, upload: str) -> list[tuple[int, Received]]:
        """The parts of an upload, in order."""
        with self._lock:
            return sorted(self._upload(upload).parts.items())

    def uploads(self, prefix: str) -> list[tuple[str, str]]:
        """Path and id of each upload under a prefix."""
        with self._lock:
            found = [(one.key, name) for name, one in self._uploads.items() if one.key.startswith(prefix)]
        return sorted(found)

    def listed(self, prefix: str) -> list[tuple[str, Served | Kept]]:
        """Path and object under a prefix, in order."""
        with self._lock:
            every = {**self.source, **self._kept}
        return [(path, every[path]) for path in sorted(every) if path.startswith(prefix)]

    def _upload(self, upload: str) -> PartsUpload:
        found = self._uploads.get(upload)
        if found is None:
            raise RefusedError(404, "NoSuchUpload")
        return found

    def _require(self, path: str, headers: Mapping[str, str]) -> None:
        """Check If-None-Match and If-Match."""
        if path in self.source:
            raise RefusedError(403, "AccessDenied")
        found = self._kept.get(path)
        if headers.get("If-None-Match") == "*" and found is not None:
            raise RefusedError(412, "PreconditionFailed")
        wanted = headers.get("If-Match")
        if wanted is not None and found is None:
            raise RefusedError(404, "NoSuchKey")
        if wanted is not None and found is not None and wanted != found.etag:
            raise RefusedError(412, "PreconditionFailed")
