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
from dataclasses import dataclass
from typing import TYPE_CHECKING
from zlib import crc32

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from wherry.core.keypath import KeyPath

ALIGNMENT = 64
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_FLAGS = 0x0808
_FULL, _MANY = 0xFFFFFFFF, 0xFFFF
_ZIP64, _PADDING = 0x0001, 0x4246
_CRC, _CRC_IN_DESCRIPTOR, _CRC_IN_ENTRY = struct.Struct("<I"), 4, 16


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


@dataclass(frozen=True, slots=True, eq=False)
class ArchiveForm:
    """The members of an archive with their offsets; archives that differ in the bytes of their tensors share it.

    Attributes:
        slots: its members, in order.
        directory: offset of the central directory from the archive's start.
        length: bytes of all of it.
    """

    slots: tuple[MemberSlot, ...]
    directory: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class ArchivePlan:
    """An archive that will be written.

    Attributes:
        start: its offset in the file.
        form: its members.
        paths: key paths of its tensors, in the order of their members.
        file: the name of the file.
    """

    start: int
    form: ArchiveForm
    paths: tuple[KeyPath, ...] = ()
    file: str = ""

    @property
    def slots(self) -> tuple[MemberSlot, ...]:
        """Its members, in order."""
        return self.form.slots

    @property
    def length(self) -> int:
        """Bytes of all of it."""
        return self.form.length

    def tensors(self) -> Iterator[tuple[KeyPath, MemberSlot]]:
        """The member of each tensor, by key path."""
        return zip(self.paths, (slot for slot in self.slots if slot.record.data is None), strict=True)


def is_of_one(form: ArchiveForm, most: int) -> bool:
    """Whether archives of a form have one tensor, of fewer bytes than so many."""
    sizes = [slot.record.size for slot in form.slots if slot.record.data is None]
    return len(sizes) == 1 and sizes[0] < most


def small(name: str, data: bytes) -> MemberRecord:
    """A record whose bytes are known."""
    return MemberRecord(name, data, len(data))


def lay_out(records: Sequence[MemberRecord]) -> ArchiveForm:
    """Assign an offset to every record."""
    slots: list[MemberSlot] = []
    position = 0
    for record in records:
        fixed = position + _LOCAL.size + len(record.name.encode()) + (20 if record.wide else 0) + 4
        slots.append(MemberSlot(record, position, -(-fixed // ALIGNMENT) * ALIGNMENT))
        position = slots[-1].stop + len(_descriptor(record, 0))
    entries = sum(map(_entry_size, slots))
    end = _END64.size + _LOCATOR.size + _END.size
    return ArchiveForm(tuple(slots), position, position + entries + end)


def frame(plan: ArchivePlan, crcs: Mapping[KeyPath, int]) -> Iterator[tuple[int, bytes]]:
    """All bytes of an archive except those of tensors, as runs with their offsets in the file.

    Args:
        plan: the archive.
        crcs: CRC-32 of each tensor's data.
    """
    return _frame(plan.start, plan.form, iter([crcs[path] for path in plan.paths]))


def _frame(start: int, form: ArchiveForm, crcs: Iterator[int]) -> Iterator[tuple[int, bytes]]:
    at, run = 0, bytearray()
    directory = bytearray()
    for slot in form.slots:
        record = slot.record
        run += _header(slot)
        if record.data is None:
            yield start + at, bytes(run)
            at, run, crc = slot.stop, bytearray(), next(crcs)
        else:
            run += record.data
            crc = crc32(record.data)
        run += _descriptor(record, crc)
        directory += _entry(slot, crc)
    yield start + at, bytes(run + directory + _ending(form, len(directory)))


def patch_descriptor(run: bytes, crc: int) -> bytes:
    """A run of a frame that begins with the descriptor of a tensor, with this CRC-32 in it."""
    changed = bytearray(run)
    _CRC.pack_into(changed, _CRC_IN_DESCRIPTOR, crc)
    return bytes(changed)


class SmallFrame:
    """The bytes around the tensor of archives of one form, each with one tensor.

    Attributes:
        data: the offset of the tensor's bytes from the start of the archive.
        size: their number.
    """

    def __init__(self, form: ArchiveForm) -> None:
        (_, self._head), (start, tail) = _frame(0, form, iter([0]))
        self._tail = bytearray(tail)
        self.data, self.size = len(self._head), start - len(self._head)
        before = [slot for slot in form.slots if slot.stop <= start]
        entry = form.directory - start + sum(map(_entry_size, before[:-1]))
        self._crcs = (_CRC_IN_DESCRIPTOR, entry + _CRC_IN_ENTRY)

    def around(self, data: memoryview, crc: int) -> bytes:
        """The archive of a tensor with these bytes, which have this CRC-32."""
        tail, (first, second) = self._tail.copy(), self._crcs
        _CRC.pack_into(tail, first, crc)
        _CRC.pack_into(tail, second, crc)
        return b"".join((self._head, data, tail))


def _header(slot: MemberSlot) -> bytes:
    record, name = slot.record, slot.record.name.encode()
    wide = struct.pack("<2H2Q", _ZIP64, 16, record.size, record.size) if record.wide else b""
    said = _FULL if record.wide else 0
    padding = slot.data - slot.header - _LOCAL.size - len(name) - len(wide) - 4
    extra = wide + struct.pack("<2H", _PADDING, padding) + b"Z" * padding
    return _LOCAL.pack(b"PK\x03\x04", 0, _FLAGS, 0, 0, 0, 0, said, said, len(name), len(extra)) + name + extra


def _descriptor(record: MemberRecord, crc: int) -> bytes:
    return struct.pack("<4sI2Q" if record.wide else "<4s3I", b"PK\x07\x08", crc, record.size, record.size)


def _entry_size(slot: MemberSlot) -> int:
    numbers = 2 * slot.record.wide + (slot.header >= _FULL)
    return _CENTRAL.size + len(slot.record.name.encode()) + (4 + 8 * numbers if numbers else 0)


def _entry(slot: MemberSlot, crc: int) -> bytes:
    record, name = slot.record, slot.record.name.encode()
    far = slot.header >= _FULL
    numbers = [record.size, record.size] * record.wide + [slot.header] * far
    extra = struct.pack(f"<2H{len(numbers)}Q", _ZIP64, 8 * len(numbers), *numbers) if numbers else b""
    size, header = (_FULL if record.wide else record.size), (_FULL if far else slot.header)
    fixed = (b"PK\x01\x02", 0, 0, _FLAGS, 0, 0, 0, crc, size, size, len(name), len(extra), 0, 0, 0, 0, header)
    return _CENTRAL.pack(*fixed) + name + extra


def _ending(form: ArchiveForm, size: int) -> bytes:
    count, begin = len(form.slots), form.directory
    # A record of version 4.5 from version 3.0 (torch writes 0x031e); its length leaves out the first 12 bytes.
    wide = _END64.pack(b"PK\x06\x06", _END64.size - 12, 0x031E, 0x2D, 0, 0, count, count, size, begin)
    locator = _LOCATOR.pack(b"PK\x06\x07", 0, begin + size, 1)
    few = min(count, _MANY)
    end = _END.pack(b"PK\x05\x06", 0, 0, few, few, min(size, _FULL), min(begin, _FULL), 0)
    return wide + locator + end
