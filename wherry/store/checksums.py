"""checksums: those of parts and objects as text, `crc32c:` or `md5:` and hex digits, and what follows of them.

CRC-32C is the one checksum that both Google Cloud Storage and S3 compute of parts and of the object that they become.
Azure computes MD5 of what is sent at once: of parts and of small objects.
"""

from __future__ import annotations

import hashlib
from base64 import b64decode, b64encode
from typing import TYPE_CHECKING

from wherry.store.crc import combine, crc32c

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from wherry.store.store import Part, StoredObject

CRC32C, MD5 = "crc32c", "md5"
_BYTES = 4
_PREFIX = f"{CRC32C}:"


class PartBytes(list[memoryview]):
    """The pieces of one part, whose bytes never change: each checksum of them is computed once."""

    __slots__ = ("_known",)

    def __init__(self, pieces: Iterable[memoryview]) -> None:
        super().__init__(pieces)
        self._known: dict[str, str] = {}

    def checksum(self, algorithm: str) -> str:
        """As `checksum_of`."""
        if algorithm not in self._known:
            self._known[algorithm] = checksum_of(iter(self), algorithm)
        return self._known[algorithm]


def checksum_of(buffers: Iterable[memoryview], algorithm: str = CRC32C) -> str:
    """The checksum of buffers, one after the other."""
    if isinstance(buffers, PartBytes):
        return buffers.checksum(algorithm)
    if algorithm == MD5:
        found = hashlib.md5(usedforsecurity=False)
        for data in buffers:
            found.update(data)
        return f"{MD5}:{found.hexdigest()}"
    value = 0
    for data in buffers:
        value = crc32c(data.cast("B"), value)
    return f"{_PREFIX}{value:08x}"


def agrees(reported: str, buffers: Iterable[memoryview]) -> bool:
    """Whether a checksum that a store reports is that of these buffers; empty if it reports none."""
    return not reported or reported == checksum_of(buffers, reported.partition(":")[0])


def joined_checksum(parts: Sequence[Part]) -> str:
    """The CRC-32C of the object of these parts; empty if that of a part is unknown."""
    value = 0
    for part in parts:
        if not part.checksum.startswith(_PREFIX):
            return ""
        value = combine(value, int(part.checksum.removeprefix(_PREFIX), 16), part.nbytes, "CRC-32C")
    return f"{_PREFIX}{value:08x}"


def to_base64(checksum: str) -> str:
    """A checksum as stores write it: its bytes in base64, the highest first."""
    return b64encode(bytes.fromhex(checksum.removeprefix(_PREFIX))).decode()


def from_base64(text: str | None) -> str:
    """The inverse of `to_base64`; empty if the store reports none, or one of checksums, which ends with `-NUMBER`."""
    if not text or "-" in text:
        return ""
    data = b64decode(text)
    return f"{_PREFIX}{data.hex()}" if len(data) == _BYTES else ""


def by_algorithm(checksum: str) -> dict[str, str]:
    """The `checksums` of an object."""
    algorithm, _, digest = checksum.partition(":")
    return {algorithm: digest} if checksum else {}


def is_same(found: StoredObject, run: str, nbytes: int, checksum: str) -> bool:
    """Whether an object is the one that a run sent.

    Args:
        found: what the store has.
        run: id of the run.
        nbytes: size of what it sent.
        checksum: of what it sent; empty if it is unknown.
    """
    algorithm, _, digest = checksum.partition(":")
    same = found.checksums.get(algorithm, digest) == digest
    return same and (found.run, found.nbytes) == (run, nbytes)
