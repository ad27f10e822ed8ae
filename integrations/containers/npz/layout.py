"""The layout of `.npz` archives: stored members, each a `.npy` record, with every size in its local header.

Unlike torch's archives these have no data descriptors: readers that walk the local headers (such as cnpy) stop at the
first descriptor. As in numpy's files, every local header has zip64 sizes; an extra field of id 0x4246 pads it so
that elements begin at a multiple of 64 in the file. Source: numpy.lib._npyio_impl, zipfile of Python 3.13; APPNOTE 6.3.
"""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING, NamedTuple

from wherry.integrations.containers.npz.npy import ALIGNMENT, build_header
from wherry.target.file_map import Checksum, File, FileMap, Late, Literal, Segment, Segments, TensorSegments

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from wherry.core.tensorspec import TensorSpec

SUFFIX = ".npy"
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_FULL, _MANY = 0xFFFFFFFF, 0xFFFF
_ZIP64, _PADDING = 0x0001, 0x4246
_VERSION, _UTF8, _DATE = 45, 0x0800, 0x0021  # zip64; names are UTF-8; 1980-01-01, as numpy writes
_UNIX = 3 << 8  # made by Unix, so that the permissions count
_PERMISSIONS = 0o600 << 16
_CRC_IN_LOCAL, _CRC_IN_ENTRY = 14, 16
_ROWS = 3  # segments of a member: local header, header of the record, elements


class _Member(NamedTuple):
    """One record: its name, the header of the record, and the bytes of both with the elements."""

    name: bytes
    head: bytes
    size: int


def lay_out(specs: Iterable[TensorSpec]) -> FileMap:
    """The one file of an archive.

    Args:
        specs: the tensors that it will hold.
    """
    archive = _Archive(list(specs))
    return FileMap((File(".", archive.segments),), archive.tensors.places, checksums=True)


class _Archive:
    """Members of three segments each, then the directory."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._specs, self.segments = specs, Segments(self._segment)
        self.tensors = TensorSegments([self.segments])
        for member, spec in enumerate(specs):
            name, head, _size = _member(spec)
            fixed = self.segments.nbytes + _LOCAL.size + len(name) + 20 + 4
            self.segments.add(-(-fixed // ALIGNMENT) * ALIGNMENT - self.segments.nbytes)
            self.segments.add(len(head))
            self.segments.add(spec.nbytes, tensor=True)
            if spec.nbytes:
                self.tensors.add(spec, 0, _ROWS * member + 2)
        self._start = self.segments.nbytes
        self.segments.add(len(self._directory().data))

    def _segment(self, number: int) -> Segment:
        if self.segments.tensors[number]:
            return self.tensors.raw(0, number)
        member, kind = divmod(number, _ROWS)
        if member == len(self._specs):
            return self._directory()
        found = _member(self._specs[member])
        if kind == 0:
            length = self.segments.bounds(number).nbytes
            return Late(_local(found, length), (Checksum(_CRC_IN_LOCAL, 1, _ROWS),))
        return Literal(found.head if kind == 1 else b"")

    def _directory(self) -> Late:
        """The entries of all members, the zip64 end record with its locator where needed, and the end record."""
        entries, checksums = bytearray(), list[Checksum]()
        count = len(self._specs)
        for member, spec in enumerate(self._specs):
            first = _ROWS * (member - count)
            checksums.append(Checksum(len(entries) + _CRC_IN_ENTRY, first + 1, first + _ROWS))
            entries += _entry(_member(spec), self.segments.bounds(_ROWS * member).start)
        begin, size, wide = self._start, len(entries), b""
        if (
            count >= _MANY or begin + size >= _FULL
        ):  # as in zipfile: an empty archive begins with its end record
            end = (b"PK\x06\x06", _END64.size - 12, _VERSION, _VERSION, 0, 0, count, count, size, begin)
            wide = _END64.pack(*end) + _LOCATOR.pack(b"PK\x06\x07", 0, begin + size, 1)
        few = min(count, _MANY)
        end = (b"PK\x05\x06", 0, 0, few, few, min(size, _FULL), min(begin, _FULL), 0)
        return Late(bytes(entries) + wide + _END.pack(*end), tuple(checksums))


def leaves_folder(name: str) -> bool:
    """Whether a member of this name would be unpacked outside of the folder."""
    return name.startswith(("/", "\\")) or ".." in re.split(r"[/\\]", name)


def _member(spec: TensorSpec) -> _Member:
    name, head = (spec.path[0] + SUFFIX).encode(), build_header(spec.dtype, spec.shape)
    return _Member(name, head, len(head) + spec.nbytes)


def _flags(name: bytes) -> int:
    return 0 if name.isascii() else _UTF8


def _local(member: _Member, length: int) -> bytes:
    """A local header of so many bytes, padded so that the elements begin at a multiple of 64."""
    wide = struct.pack("<2H2Q", _ZIP64, 16, member.size, member.size)
    padding = length - _LOCAL.size - len(member.name) - len(wide) - 4
    extra = wide + struct.pack("<2H", _PADDING, padding) + bytes(padding)
    fixed = (_VERSION, _flags(member.name), 0, 0, _DATE, 0, _FULL, _FULL, len(member.name), len(extra))
    return _LOCAL.pack(b"PK\x03\x04", *fixed) + member.name + extra


def _entry(member: _Member, at: int) -> bytes:
    far, wide = at >= _FULL, member.size >= _FULL
    numbers = [member.size, member.size] * wide + [at] * far
    extra = struct.pack(f"<2H{len(numbers)}Q", _ZIP64, 8 * len(numbers), *numbers) if numbers else b""
    size, start = min(member.size, _FULL), min(at, _FULL)
    system, name = (_UNIX | _VERSION, _VERSION, _flags(member.name)), member.name
    fixed = (*system, 0, 0, _DATE, 0, size, size, len(name), len(extra))
    return _CENTRAL.pack(b"PK\x01\x02", *fixed, 0, 0, 0, _PERMISSIONS, start) + name + extra
