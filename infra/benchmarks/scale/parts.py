"""What the double keeps of what it is sent: size, CRC-32C and first bytes; small objects whole."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from google_crc32c import extend

from wherry.store.content import combine

KEPT_WHOLE = 8 << 20  # bytes of an object that is put in one request
KEPT_HEAD = 1 << 20  # bytes of an upload in parts
KEPT_ASIDE = 64 << 20  # bytes of an object that a run puts aside, and reads again itself


@dataclass(slots=True)
class Received:
    """The body of a request, as far as it has come."""

    kept: int
    nbytes: int = 0
    crc: int = 0
    _pieces: list[bytes] = field(default_factory=list[bytes])

    def add(self, piece: bytes) -> None:
        """Take the next bytes."""
        self.crc = extend(self.crc, piece)
        if self.nbytes < self.kept:
            self._pieces.append(piece[: self.kept - self.nbytes])
        self.nbytes += len(piece)

    @property
    def head(self) -> bytes:
        """The first bytes."""
        return b"".join(self._pieces)

    @property
    def checksum(self) -> str:
        """CRC-32C as S3 writes it."""
        return base64.b64encode(self.crc.to_bytes(4, "big")).decode()

    @property
    def etag(self) -> str:
        """Changes with the bytes."""
        return _etag([(self.crc, self.nbytes)])


@dataclass(frozen=True, slots=True)
class Kept:
    """An object of a target.

    Attributes:
        nbytes, crc, etag, head: what is known of its bytes.
        metadata: that its creator has given it.
    """

    nbytes: int
    crc: int
    etag: str
    head: bytes
    metadata: Mapping[str, str]

    @property
    def checksum(self) -> str:
        """CRC-32C as S3 writes it."""
        return base64.b64encode(self.crc.to_bytes(4, "big")).decode()


def kept_whole(body: Received, metadata: Mapping[str, str]) -> Kept:
    """The object of one request."""
    return Kept(body.nbytes, body.crc, body.etag, body.head, metadata)


def kept_of_parts(parts: Sequence[Received], metadata: Mapping[str, str]) -> Kept:
    """The object that parts become."""
    crc = 0
    for part in parts:
        crc = combine(crc, part.crc, part.nbytes, "CRC-32C")
    etag = f'{_etag((part.crc, part.nbytes) for part in parts)[:-1]}-{len(parts)}"'
    return Kept(sum(part.nbytes for part in parts), crc, etag, parts[0].head, metadata)


def _etag(rows: Iterable[tuple[int, int]]) -> str:
    return f'"{hashlib.md5(repr(list(rows)).encode(), usedforsecurity=False).hexdigest()}"'
