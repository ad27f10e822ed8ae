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
from dataclasses import dataclass
from typing import NamedTuple
from zlib import crc32

ALIGNMENT = 64
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_FLAGS = 0x0808
_FULL, _MANY = 0xFFFFFFFF, 0xFFFF
_ZIP64, _PADDING = 0x0001, 0x4246
_CRC_IN_DESCRIPTOR, _CRC_IN_ENTRY = 4, 16


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
        return self.size >= _FULL


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
            run += _header(slot)
            if slot.record.data is not None:
                run += slot.record.data + _descriptor(slot.record, crc32(slot.record.data))
        if is_last:
            directory, numbers = bytearray(), iter(range(number))
            for slot in map(self.slot, range(len(self.headers))):
                data = slot.record.data
                if data is None:
                    crcs.append((len(run) + len(directory) + _CRC_IN_ENTRY, next(numbers)))
                directory += _entry(slot, 0 if data is None else crc32(data))
            run += directory + _ending(self, len(directory))
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
        fixed = position + _LOCAL.size + name_size + (20 if member.wide else 0) + 4
        slot = MemberSlot(member, position, -(-fixed // ALIGNMENT) * ALIGNMENT)
        headers.append(slot.header)
        datas.append(slot.data)
        if member.data is None:
            tensors.append(number)
        position = slot.stop + len(_descriptor(member, 0))
        numbers = 2 * member.wide + (slot.header >= _FULL)
        entries += _CENTRAL.size + name_size + (4 + 8 * numbers if numbers else 0)
    end = _END64.size + _LOCATOR.size + _END.size
    return ArchiveForm(record, headers, datas, tensors, position, position + entries + end)


def _header(slot: MemberSlot) -> bytes:
    record, name = slot.record, slot.record.name.encode()
    wide = struct.pack("<2H2Q", _ZIP64, 16, record.size, record.size) if record.wide else b""
    said = _FULL if record.wide else 0
    padding = slot.data - slot.header - _LOCAL.size - len(name) - len(wide) - 4
    extra = wide + struct.pack("<2H", _PADDING, padding) + b"Z" * padding
    return _LOCAL.pack(b"PK\x03\x04", 0, _FLAGS, 0, 0, 0, 0, said, said, len(name), len(extra)) + name + extra


def _descriptor(record: MemberRecord, crc: int) -> bytes:
    return struct.pack("<4sI2Q" if record.wide else "<4s3I", b"PK\x07\x08", crc, record.size, record.size)


def _entry(slot: MemberSlot, crc: int) -> bytes:
    record, name = slot.record, slot.record.name.encode()
    far = slot.header >= _FULL
    numbers = [record.size, record.size] * record.wide + [slot.header] * far
    extra = struct.pack(f"<2H{len(numbers)}Q", _ZIP64, 8 * len(numbers), *numbers) if numbers else b""
    size, header = (_FULL if record.wide else record.size), (_FULL if far else slot.header)
    fixed = (b"PK\x01\x02", 0, 0, _FLAGS, 0, 0, 0, crc, size, size, len(name), len(extra), 0, 0, 0, 0, header)
    return _CENTRAL.pack(*fixed) + name + extra


def _ending(form: ArchiveForm, size: int) -> bytes:
    count, begin = len(form.headers), form.directory
    # A record of version 4.5 from version 3.0 (torch writes 0x031e); its length leaves out the first 12 bytes.
    wide = _END64.pack(b"PK\x06\x06", _END64.size - 12, 0x031E, 0x2D, 0, 0, count, count, size, begin)
    locator = _LOCATOR.pack(b"PK\x06\x07", 0, begin + size, 1)
    few = min(count, _MANY)
    end = _END.pack(b"PK\x05\x06", 0, 0, few, few, min(size, _FULL), min(begin, _FULL), 0)
    return wide + locator + end
