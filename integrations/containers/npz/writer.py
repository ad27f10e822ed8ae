"""Writes `.npz` archives: stored members, each a `.npy` record, with every size in its local header.

Every offset follows from the manifest before the first byte is written; any span of any tensor can then be written at
any time from any thread, any number of times. CRCs are combined from those of the pieces; pieces that an earlier
process wrote are read again. `finish` writes the local headers and the directory; without them the file is not a valid
archive.

Unlike torch's archives these have no data descriptors: readers that walk the local headers (such as cnpy) stop at the
first descriptor. As in numpy's files, every local header has zip64 sizes; an extra field of id 0x4246 pads it so
that elements begin at a multiple of 64 in the file. Source: numpy.lib._npyio_impl, zipfile of Python 3.13; APPNOTE 6.3.
"""

from __future__ import annotations

import re
import struct
import threading
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

from wherry.core.keypath import render
from wherry.core.tensorspec import Span
from wherry.errors import UsageError
from wherry.formats.reader import Extent
from wherry.integrations.containers.flat.files import FlatFiles, FlatFilesWriter, open_files
from wherry.integrations.containers.npz.npy import ALIGNMENT, build_header
from wherry.mover.checksums import PieceCrc
from wherry.objects.crc import combine

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import Region, TensorSpec
    from wherry.formats.writer import Checks
    from wherry.storage.location import Location

SUFFIX = ".npy"
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_FULL, _MANY = 0xFFFFFFFF, 0xFFFF
_ZIP64, _PADDING = 0x0001, 0x4246
_VERSION, _UTF8, _DATE = 45, 0x0800, 0x0021  # zip64; names are UTF-8; 1980-01-01, as numpy writes
_PERMISSIONS = 0o600 << 16


class _Member(NamedTuple):
    """One record: `at` is the offset of its local header, `data` that of its elements."""

    name: bytes
    head: bytes
    at: int
    data: int
    crc: PieceCrc

    @property
    def size(self) -> int:
        return len(self.head) + self.crc.size


class NpzWriter(FlatFilesWriter):
    """Writes one archive."""

    def __init__(self, target: Location, specs: Sequence[TensorSpec]) -> None:
        """Create the file.

        Args:
            target: the file; its folder exists, or is one in the staged objects of a run.
            specs: the tensors that it will hold.

        Raises:
            UnsupportedError: the folder is neither.
            StorageError: the storage is full or failed.
        """
        self._target = target
        self._members: dict[KeyPath, _Member] = {}
        self._crcs: dict[KeyPath, int] = {}  # of the tensors, known when the archive is complete
        position = 0
        for spec in specs:
            member = _place_member(spec, position)
            self._members[spec.path] = member
            position = member.data + member.crc.size
        self._directory = position
        size = position + len(b"".join(self._ending(dict.fromkeys(self._members, 0))))
        self._left = {path: member.crc.size for path, member in self._members.items()}
        self._lock = threading.Lock()
        self._files = open_files(target.parent, {target.name: size})
        for path, member in self._members.items():
            if not member.crc.size:
                self._count(path, 0)

    def place(self, path: KeyPath, where: Region | Span) -> int:
        """The offset of a span in the archive."""
        return self._members[path].data + where.start if isinstance(where, Span) else 0

    def extents(self, path: KeyPath, where: Region | Span) -> tuple[Extent, ...] | None:
        """The byte range of a span; a whole tensor has its CRC after `finish`."""
        if not isinstance(where, Span):
            return None
        member = self._members[path]
        crc = self._crcs.get(path) if where.nbytes == member.crc.size else None
        return (Extent(self._target, member.data + where.start, where.nbytes, crc),)

    def write(self, path: KeyPath, where: Region | Span, data: memoryview) -> None:
        """Write a span.

        Raises:
            UsageError: `where` is not a span of this tensor, or does not agree with the data.
            StorageError: the storage failed.
        """
        member = self._members[path]
        if not isinstance(where, Span) or where.nbytes != len(data):
            raise UsageError(f"{where} is not a span of {len(data)} bytes", path=render(path))
        if not 0 <= where.start <= where.stop <= member.crc.size:
            raise UsageError(f"span {where} is not inside the tensor", path=render(path))
        if data:
            member.crc.update(where.start, data)
            self._files.write(self._target.name, member.data + where.start, data)
            self._count(path, len(data))

    def checks(self, path: KeyPath, where: Span) -> Checks:
        """The CRCs of the pieces of a span, if they cannot be read again."""
        return () if isinstance(self._files, FlatFiles) else self._members[path].crc.known(*where)

    def restore(self, path: KeyPath, where: Span, checks: Checks) -> None:
        """Take up the CRCs of stored pieces."""
        self._members[path].crc.take(checks)
        self._count(path, where.nbytes)

    def _count(self, path: KeyPath, nbytes: int) -> None:
        """Count bytes that are known; in an upload, the local header is written after the last ones of a tensor."""
        if isinstance(self._files, FlatFiles):
            return
        with self._lock:
            self._left[path] -= nbytes
            complete = not self._left[path]
        if complete:
            member = self._members[path]
            crc = combine(crc32(member.head), self._crc(member), member.crc.size)
            self._files.write(self._target.name, member.at, _local(member, crc) + member.head)

    def finish(self) -> None:
        """Write the local headers and the directory, which need all CRCs."""
        self._crcs = {path: self._crc(member) for path, member in self._members.items()}
        crcs = {
            path: combine(crc32(member.head), self._crcs[path], member.crc.size)
            for path, member in self._members.items()
        }
        for path, member in self._members.items():
            self._files.write(self._target.name, member.at, _local(member, crcs[path]) + member.head)
        self._files.write(self._target.name, self._directory, b"".join(self._ending(crcs)))
        self._files.finish()

    def _crc(self, member: _Member) -> int:
        """The CRC of a tensor; pieces that this process did not write are read from the staged file."""
        name, base = self._target.name, member.data
        return member.crc.value(lambda start, stop: self._files.read(name, base + start, base + stop))

    def _ending(self, crcs: dict[KeyPath, int]) -> Iterator[bytes]:
        """The directory, the zip64 end record with its locator where needed, and the end record."""
        size = 0
        for path, member in self._members.items():
            entry = _entry(member, crcs[path])
            size += len(entry)
            yield entry
        count, begin = len(self._members), self._directory
        if (
            count >= _MANY or begin + size >= _FULL
        ):  # as in zipfile: an empty archive must begin with its end record
            yield _END64.pack(
                b"PK\x06\x06", _END64.size - 12, _VERSION, _VERSION, 0, 0, count, count, size, begin
            )
            yield _LOCATOR.pack(b"PK\x06\x07", 0, begin + size, 1)
        few = min(count, _MANY)
        yield _END.pack(b"PK\x05\x06", 0, 0, few, few, min(size, _FULL), min(begin, _FULL), 0)


def leaves_folder(name: str) -> bool:
    """Whether a member of this name would be unpacked outside of the folder."""
    return name.startswith(("/", "\\")) or ".." in re.split(r"[/\\]", name)


def _place_member(spec: TensorSpec, at: int) -> _Member:
    name, head = (spec.path[0] + SUFFIX).encode(), build_header(spec.dtype, spec.shape)
    fixed = at + _LOCAL.size + len(name) + 20 + 4
    data = -(-fixed // ALIGNMENT) * ALIGNMENT + len(head)
    return _Member(name, head, at, data, PieceCrc(spec.nbytes))


def _flags(name: bytes) -> int:
    return 0 if name.isascii() else _UTF8


def _local(member: _Member, crc: int) -> bytes:
    wide = struct.pack("<2H2Q", _ZIP64, 16, member.size, member.size)
    padding = member.data - len(member.head) - member.at - _LOCAL.size - len(member.name) - len(wide) - 4
    extra = wide + struct.pack("<2H", _PADDING, padding) + b"\0" * padding
    fixed = (_VERSION, _flags(member.name), 0, 0, _DATE, crc, _FULL, _FULL, len(member.name), len(extra))
    return _LOCAL.pack(b"PK\x03\x04", *fixed) + member.name + extra


def _entry(member: _Member, crc: int) -> bytes:
    far, wide = member.at >= _FULL, member.size >= _FULL
    numbers = [member.size, member.size] * wide + [member.at] * far
    extra = struct.pack(f"<2H{len(numbers)}Q", _ZIP64, 8 * len(numbers), *numbers) if numbers else b""
    size, at = min(member.size, _FULL), min(member.at, _FULL)
    made_by = 3 << 8 | _VERSION  # Unix, so that the permissions count
    fixed = (
        made_by,
        _VERSION,
        _flags(member.name),
        0,
        0,
        _DATE,
        crc,
        size,
        size,
        len(member.name),
        len(extra),
    )
    return _CENTRAL.pack(b"PK\x01\x02", *fixed, 0, 0, 0, _PERMISSIONS, at) + member.name + extra
