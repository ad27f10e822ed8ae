"""Lays out zip archives as torch writes them, before the first byte of a tensor is written.

Everything but the CRCs of the data is known in advance, so the offset of every byte is. Members are stored; flags
0x0808 (sizes follow in a descriptor, names are UTF-8); version and date fields zero; the local header has no sizes
(or, from 4 GiB on, zip64 ones), an extra field of id 0x4246 filled with `Z` pads so that data begins at a multiple
of 64 from the archive's start; the descriptor has 8-byte sizes for zip64 members. The zip64 end record and locator
are always present. torch's own C++ reader and its offset arithmetic (`calculate_storage_offsets`) rely on exactly this.
Source: caffe2/serialize/inline_container.cc of torch 2.13, observed; APPNOTE 6.3.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable
from typing import NamedTuple
from zlib import crc32

from wherry.core.lazy_dataclass import dataclass
from wherry.integrations.containers.zip.read import (
    CENTRAL,
    END,
    END64,
    FULL,
    LOCAL,
    LOCAL_MAGIC,
    LOCATOR,
    ZIP64,
)

ALIGNMENT = 64
MANY, UTF8, CRC_IN_ENTRY = 0xFFFF, 0x0800, 16
_PADDING = 0x4246
_CRC_IN_DESCRIPTOR = 4


class Hand(NamedTuple):
    """The values that a library writes into the header fields that do not describe the bytes.

    Attributes:
        made_by, needs: versions, of a member.
        date: of a member.
        permissions: of a member.
        padding: the byte that pads a local header.
        ends: versions of the zip64 end record.
    """

    made_by: int
    needs: int
    date: int
    permissions: int
    padding: bytes
    ends: tuple[int, int]

    def header(self, name: bytes, flags: int, size: int, length: int, *, wide: bool) -> bytes:
        """The local header of a stored member, padded to `length` bytes; its CRC is zero.

        Args:
            name: of the member.
            flags: of the member.
            size: of its data; only a zip64 header states it.
            length: of the header.
            wide: whether it is a zip64 header.
        """
        sizes = struct.pack("<2H2Q", ZIP64, 16, size, size) if wide else b""
        padding = length - LOCAL.size - len(name) - len(sizes) - 4
        extra = sizes + struct.pack("<2H", _PADDING, padding) + self.padding * padding
        said = FULL if wide else 0
        fixed = (self.needs, flags, 0, 0, self.date, 0, said, said, len(name), len(extra))
        return LOCAL.pack(LOCAL_MAGIC, *fixed) + name + extra

    def entry(self, name: bytes, flags: int, size: int, crc: int, header: int) -> bytes:
        """The entry of a stored member in the central directory; `header` is the offset of its local header."""
        numbers = [size, size] * (size >= FULL) + [header] * (header >= FULL)
        extra = struct.pack(f"<2H{len(numbers)}Q", ZIP64, 8 * len(numbers), *numbers) if numbers else b""
        size, header = min(size, FULL), min(header, FULL)
        fixed = (self.made_by, self.needs, flags, 0, 0, self.date, crc, size, size, len(name), len(extra))
        return CENTRAL.pack(b"PK\x01\x02", *fixed, 0, 0, 0, self.permissions, header) + name + extra

    def ending(self, count: int, size: int, begin: int, *, wide: bool) -> bytes:
        """The records after a central directory of `count` entries in `size` bytes from `begin`."""
        records = b""
        if wide:  # the length of a zip64 end record leaves out its first 12 bytes
            fixed = (END64.size - 12, *self.ends, 0, 0, count, count, size, begin)
            records = END64.pack(b"PK\x06\x06", *fixed) + LOCATOR.pack(b"PK\x06\x07", 0, begin + size, 1)
        few = min(count, MANY)
        return records + END.pack(b"PK\x05\x06", 0, 0, few, few, min(size, FULL), min(begin, FULL), 0)


# The zip64 end record is of version 4.5 and made by version 3.0.
_TORCH = Hand(0, 0, 0, 0, b"Z", (0x031E, 0x2D))
_FLAGS = UTF8 | 0x0008  # the sizes follow in a descriptor


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """One member that will be written: small known bytes, or the data of a tensor.

    Attributes:
        name: its name in the archive.
        data: its bytes; None for a tensor's.
        size: number of bytes.
    """

    name: str
    data: bytes | None
    size: int

    @property
    def wide(self) -> bool:
        """Whether it needs zip64."""
        return self.size >= FULL


@dataclass(frozen=True, slots=True)
class MemberSlot:
    """A record with the offsets of its local header and data from the start of the archive."""

    record: MemberRecord
    header: int
    data: int

    @property
    def stop(self) -> int:
        """End of its data."""
        return self.data + self.record.size


class Frame(NamedTuple):
    """Bytes between the tensors of an archive.

    Attributes:
        data: the bytes, with zeros for the checksums of tensors.
        crcs: offset in them of a CRC-32, and the number of the tensor whose it is.
    """

    data: bytes
    crcs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class ArchiveForm:
    """The members of an archive with their offsets; archives that differ in the bytes of their tensors share it.

    Attributes:
        record: computes a member from its number.
        headers, datas: the offset of each one's local header, and of its data, from the archive's start.
        tensors: the numbers of those that are tensors.
        directory: offset of the central directory from the archive's start.
        length: bytes of all of it.
    """

    record: Callable[[int], MemberRecord]
    headers: array[int]
    datas: array[int]
    tensors: array[int]
    directory: int
    length: int

    def slot(self, number: int) -> MemberSlot:
        """A member with its offsets."""
        return MemberSlot(self.record(number), self.headers[number], self.datas[number])

    def frame_bytes(self, number: int) -> int:
        """Bytes of a frame."""
        stop = self.length if number == len(self.tensors) else self.datas[self.tensors[number]]
        return stop - (self.slot(self.tensors[number - 1]).stop if number else 0)

    def frame(self, number: int) -> Frame:
        """A frame: the first is before the first tensor; the last one ends with the directory."""
        run, crcs = bytearray(), list[tuple[int, int]]()
        first = 0
        if number:
            first = self.tensors[number - 1]
            run += _descriptor(self.record(first), 0)
            crcs.append((_CRC_IN_DESCRIPTOR, number - 1))
            first += 1
        is_last = number == len(self.tensors)
        for slot in map(self.slot, range(first, len(self.headers) if is_last else self.tensors[number] + 1)):
            record, name = slot.record, slot.record.name.encode()
            run += _TORCH.header(name, _FLAGS, record.size, slot.data - slot.header, wide=record.wide)
            if record.data is not None:
                run += record.data + _descriptor(record, crc32(record.data))
        if is_last:
            directory, numbers = bytearray(), iter(range(number))
            for slot in map(self.slot, range(len(self.headers))):
                record, crc = slot.record, 0
                if record.data is None:
                    crcs.append((len(run) + len(directory) + CRC_IN_ENTRY, next(numbers)))
                else:
                    crc = crc32(record.data)
                directory += _TORCH.entry(record.name.encode(), _FLAGS, record.size, crc, slot.header)
            run += directory + _TORCH.ending(len(self.headers), len(directory), self.directory, wide=True)
        return Frame(bytes(run), tuple(crcs))


def small(name: str, data: bytes) -> MemberRecord:
    """A record whose bytes are known."""
    return MemberRecord(name, data, len(data))


def lay_out(count: int, record: Callable[[int], MemberRecord]) -> ArchiveForm:
    """Assign an offset to every member.

    Args:
        count: of the members.
        record: computes one from its number.
    """
    headers, datas, tensors = array("q"), array("q"), array("q")
    position = entries = 0
    for number in range(count):
        member = record(number)
        name_size = len(member.name.encode())
        fixed = position + LOCAL.size + name_size + (20 if member.wide else 0) + 4
        slot = MemberSlot(member, position, -(-fixed // ALIGNMENT) * ALIGNMENT)
        headers.append(slot.header)
        datas.append(slot.data)
        if member.data is None:
            tensors.append(number)
        position = slot.stop + len(_descriptor(member, 0))
        numbers = 2 * member.wide + (slot.header >= FULL)
        entries += CENTRAL.size + name_size + (4 + 8 * numbers if numbers else 0)
    end = END64.size + LOCATOR.size + END.size
    return ArchiveForm(record, headers, datas, tensors, position, position + entries + end)


def _descriptor(record: MemberRecord, crc: int) -> bytes:
    return struct.pack("<4sI2Q" if record.wide else "<4s3I", b"PK\x07\x08", crc, record.size, record.size)
