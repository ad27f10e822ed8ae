"""Archives of the same kind: chunks of one dtype and shape, which differ only in their data and its checksums.

A checkpoint of a hundred thousand chunks has only a few dozen kinds. An archive is of a known kind if it has the same
length, the same bytes before its data (pickle, byte order, local headers), and the same directory except for the CRC-32
of the members from the data on: then its tensor has the same offset as in the first archive of that kind. All other
archives are read member by member.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from wherry.integrations.containers.flat.strides import PlacedTensor

if TYPE_CHECKING:
    from wherry.integrations.containers.zip.read import Directory
    from wherry.integrations.formats.dcp.metadata import StoredItem
    from wherry.storage.location import Location

# A directory entry: size of its fixed part, and the offsets in it of the CRC and of the lengths of name, extra field
# and comment.
_CENTRAL_SIZE = 46
_CRC_AT, _CRC_SIZE = 16, 4
_LENGTHS, _LENGTHS_AT = struct.Struct("<3H"), 28
_MOST_KINDS = 10_000
_MOST_OF_A_LENGTH = 16


@dataclass(frozen=True, slots=True)
class _Kind:
    """Common parts of the archives of one kind.

    Attributes:
        before: the bytes before the tensor's data.
        pieces: the directory and the bytes after it, without the CRCs: offset from the archive's end, and bytes.
        crc: offset of the CRC of the tensor's storage from the archive's end.
        placed: the tensor of the first such archive; `start` counts from the archive's beginning.
        raw: whether the tensor's bytes are stored raw, and are the whole storage.
    """

    before: bytes
    pieces: tuple[tuple[int, bytes], ...]
    crc: int
    placed: PlacedTensor
    raw: bool

    def ends(self, data: bytes, stop: int) -> bool:
        """Whether the bytes before an offset are the last ones of an archive of this kind."""
        for at, piece in self.pieces:  # noqa: SIM110  a generator takes twice as long, for every tensor
            if not data.startswith(piece, stop - at):
                return False
        return True


class Alike:
    """The kinds of archives seen so far."""

    def __init__(self) -> None:
        self._kinds: dict[int, tuple[_Kind, ...]] = {}

    def find(self, stored: StoredItem, head: bytes, tail: bytes, file: Location) -> PlacedTensor | None:
        """The tensor of an item of a known kind; None if its kind is not known.

        Args:
            stored: location of the item.
            head: its first bytes.
            tail: its last bytes.
            file: its file.
        """
        for kind in self._kinds.get(stored.length, ()):
            if head.startswith(kind.before) and kind.ends(tail, len(tail)):
                like, crc = kind.placed, len(tail) - kind.crc
                return PlacedTensor(
                    file, stored.offset + like.start, like.length, like.offset, like.shape, like.strides,
                    like.dtype, like.big_endian, int.from_bytes(tail[crc : crc + 4], "little"),
                )  # fmt: skip
        return None

    def find_raw(self, data: bytes, start: int, length: int) -> tuple[_Kind, int] | None:
        """The kind of an archive whose tensor is raw, and the CRC of that; None if it is not known.

        Args:
            data: bytes that have all of the archive.
            start: offset of the archive in them.
            length: of the archive.
        """
        stop = start + length
        for kind in self._kinds.get(length, ()):
            if kind.raw and data.startswith(kind.before, start) and kind.ends(data, stop):
                return kind, int.from_bytes(data[stop - kind.crc : stop - kind.crc + _CRC_SIZE], "little")
        return None

    def learn(
        self, stored: StoredItem, head: bytes, tail: bytes, placed: PlacedTensor, directory: Directory
    ) -> None:
        """Remember the kind of an item that was read member by member.

        Args:
            stored: location of the item.
            head: its first bytes.
            tail: its last bytes.
            placed: its tensor, in its file.
            directory: its members, in the order of the archive's directory.
        """
        start, others = placed.start - stored.offset, self._kinds.get(stored.length, ())
        entries = _entries(tail, stored.offset + stored.length - directory.start, len(directory.members))
        inside = 0 < start <= len(head) and entries is not None and placed.crc != 0
        if not inside or entries is None or len(self._kinds) > _MOST_KINDS or len(others) > _MOST_OF_A_LENGTH:
            return
        headers = [member.header for member in directory.members.values()]
        index = headers.index(max(header for header in headers if header < placed.start))
        crc, like = len(tail) - entries[index] - _CRC_AT, replace(placed, start=start)
        kind = _Kind(head[:start], _without(tail, entries, index), crc, like, like.raw and like.whole)
        self._kinds[stored.length] = (*others, kind)


def _entries(tail: bytes, length: int, count: int) -> list[int] | None:
    """Offset of each directory entry in the last bytes of an archive; None if the directory is not complete there.

    Args:
        tail: the last bytes.
        length: bytes from the directory's beginning to the archive's end.
        count: number of entries.
    """
    at, found = len(tail) - length, list[int]()
    if at < 0:
        return None
    for _ in range(count):
        found.append(at)
        at += _CENTRAL_SIZE + sum(_LENGTHS.unpack_from(tail, at + _LENGTHS_AT))
    return found


def _without(tail: bytes, entries: list[int], first: int) -> tuple[tuple[int, bytes], ...]:
    """The directory and the bytes after it, split at the CRC of each of these entries."""
    pieces: list[tuple[int, bytes]] = []
    begin = entries[0]
    for entry in entries[first:]:
        crc = entry + _CRC_AT
        pieces.append((len(tail) - begin, tail[begin:crc]))
        begin = crc + _CRC_SIZE
    return (*pieces, (len(tail) - begin, tail[begin:]))
