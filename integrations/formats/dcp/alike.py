"""Archives that are alike: chunks of one dtype and shape, which differ in their data and in its checksums only.

A checkpoint of a hundred thousand chunks has a few dozen kinds of them. An archive is known to be of a kind that was
read before when it is as long, when everything before its data is the same, byte by byte (pickle, byte order, local
headers), and when its directory is the same but for the CRC-32 of members that follow: then its tensor lies where the
first one's did. All else is read member by member.
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

# Of an entry of the directory: its fixed part, and where in it are the CRC and the lengths of what follows (name,
# extra field, comment).
_CENTRAL_SIZE = 46
_CRC_AT, _CRC_SIZE = 16, 4
_LENGTHS, _LENGTHS_AT = struct.Struct("<3H"), 28
_MOST_KINDS = 10_000
_MOST_OF_A_LENGTH = 16


@dataclass(frozen=True, slots=True)
class _Kind:
    """What archives of a kind have in common.

    Attributes:
        before: the bytes up to the tensor's first.
        pieces: the directory and what follows it, without the CRCs: offset from the archive's end, and bytes.
        crc: where the CRC of the tensor's storage is, from the archive's end.
        placed: the tensor of the first such archive; `start` counts from the archive's beginning.
    """

    before: bytes
    pieces: tuple[tuple[int, bytes], ...]
    crc: int
    placed: PlacedTensor


class Alike:
    """The kinds of archives that were seen so far."""

    def __init__(self) -> None:
        self._kinds: dict[int, tuple[_Kind, ...]] = {}

    def find(self, stored: StoredItem, head: bytes, tail: bytes, file: Location) -> PlacedTensor | None:
        """The tensor of an item that is like an earlier one; None where none is.

        Args:
            stored: where the item lies.
            head: its first bytes.
            tail: its last bytes.
            file: its file.
        """
        for kind in self._kinds.get(stored.length, ()):
            if head.startswith(kind.before) and all(
                tail.startswith(piece, len(tail) - at) for at, piece in kind.pieces
            ):
                like, crc = kind.placed, len(tail) - kind.crc
                return PlacedTensor(
                    file, stored.offset + like.start, like.length, like.offset, like.shape, like.strides,
                    like.dtype, like.big_endian, int.from_bytes(tail[crc : crc + 4], "little"),
                )  # fmt: skip
        return None

    def learn(
        self, stored: StoredItem, head: bytes, tail: bytes, placed: PlacedTensor, directory: Directory
    ) -> None:
        """Remember the kind of an item that was read member by member.

        Args:
            stored: where the item lies.
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
        mine = headers.index(max(header for header in headers if header < placed.start))
        crc, like = len(tail) - entries[mine] - _CRC_AT, replace(placed, start=start)
        kind = _Kind(head[:start], _without(tail, entries, mine), crc, like)
        self._kinds[stored.length] = (*others, kind)


def _entries(tail: bytes, length: int, count: int) -> list[int] | None:
    """Where each entry of the directory begins in the last bytes of an archive; None where they are not all there.

    Args:
        tail: the last bytes.
        length: bytes from the directory's beginning to the archive's end.
        count: entries.
    """
    at, found = len(tail) - length, list[int]()
    if at < 0:
        return None
    for _ in range(count):
        found.append(at)
        at += _CENTRAL_SIZE + sum(_LENGTHS.unpack_from(tail, at + _LENGTHS_AT))
    return found


def _without(tail: bytes, entries: list[int], first: int) -> tuple[tuple[int, bytes], ...]:
    """The directory and all after it, cut at the CRC of its entries from the first one of these on."""
    pieces: list[tuple[int, bytes]] = []
    begin = entries[0]
    for entry in entries[first:]:
        crc = entry + _CRC_AT
        pieces.append((len(tail) - begin, tail[begin:crc]))
        begin = crc + _CRC_SIZE
    return (*pieces, (len(tail) - begin, tail[begin:]))
