"""Locates the bytes of each member in zip archives whose members are stored, not compressed.

Torch writes every tensor file as such an archive (torch.save) or as a series of them (DCP items). Offsets are never
computed: the central directory has the offset of a member's local header, and the local header that of its bytes,
because both have extra fields of different lengths. Torch pads with an extra field so that data begins at a
multiple of 64, and leaves sizes and CRC of the local header zero; the central directory has the true ones. A CRC of
zero means that none was computed (`torch.serialization.set_crc32_options(False)`).

Archives that could deceive malware scanners are refused: duplicate member names, compressed or encrypted members, a
local header that names another member, members that overlap. Source: PKWARE APPNOTE 6.3, sections 4.3 and 4.5.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from wherry.core.limits import MOST_TENSORS, beyond, exceeds, scale_limit
from wherry.errors import CorruptError, HostileError, UnsupportedError

if TYPE_CHECKING:
    from wherry.store.location import Location

LOCAL_MAGIC = b"PK\x03\x04"
LOCAL = struct.Struct("<4s5H3I2H")
CENTRAL = struct.Struct("<4s6H3I5H2I")
END = struct.Struct("<4s4H2IH")
END64 = struct.Struct("<4sQ2H2I4Q")
LOCATOR = struct.Struct("<4sIQI")
ZIP64, FULL = 0x0001, 0xFFFFFFFF  # the extra field of what does not fit 32 bits, and what these say then
_TAIL = 1 << 16
_LARGEST_DIRECTORY = 1 << 29
_MOST_MEMBERS = MOST_TENSORS + 10_000
_MOST_DIRECTORY = 64 << 20
_ENCRYPTED = 0x0001
STORED, DEFLATED = 0, 8


class Member(NamedTuple):
    """One member: `header` is the offset of its local header in the file, `size` its bytes as stored."""

    name: str
    header: int
    size: int
    full_size: int
    crc: int
    method: int
    flags: int


class Directory(NamedTuple):
    """The members by name, in the order of the directory, and where the directory itself begins."""

    members: Mapping[str, Member]
    start: int


def local_member(head: bytes) -> tuple[str, int, bool]:
    """Name of the member whose local header begins here, where its bytes begin, and whether they are compressed."""
    name, start, fields = _parse_local(head)
    return name, start, bool(fields and fields[3])


def _parse_local(head: bytes) -> tuple[str, int, tuple[int, ...]]:
    """Name, offset of the bytes and fields; without fields where no local header begins."""
    if len(head) < LOCAL.size or not head.startswith(LOCAL_MAGIC):
        return "", 0, ()
    fields = LOCAL.unpack_from(head)
    name = head[LOCAL.size : LOCAL.size + fields[9]].decode("utf-8", "backslashreplace")
    return name, LOCAL.size + fields[9] + fields[10], fields


def read_directory(
    location: Location, start: int = 0, stop: int | None = None, tail: int = _TAIL
) -> Directory:
    """Read the central directory of an archive.

    Args:
        location: the file.
        start: offset of the archive in it.
        stop: end of the archive; the end of the file by default.
        tail: number of bytes before the end in which the end record is searched.

    Raises:
        CorruptError: it is missing, as in a truncated file, or invalid.
        HostileError: two members have the same name.
    """
    entry = location.stat()
    end = (entry.size if entry else 0) if stop is None else stop
    offset, size, count = _end_record(location, max(end - tail, start), start, end)
    if size > _LARGEST_DIRECTORY or not start <= offset <= offset + size <= end:
        raise _corrupt(f"zip central directory of {size} bytes at {offset} is outside the archive", location)
    if exceeds(count, _MOST_MEMBERS) or exceeds(size, _MOST_DIRECTORY):
        raise beyond("zip archive", scale_limit(_MOST_MEMBERS), "members", uri=location.uri)
    data = location.read(offset, offset + size)
    members: dict[str, Member] = {}
    most = scale_limit(_MOST_MEMBERS)
    for member in _entries(data, start, location):
        if len(members) > most:
            raise beyond("zip archive", most, "members", uri=location.uri)
        if member.name in members:
            raise HostileError(
                f"duplicate zip member {member.name!r}", uri=location.uri, cure="do not use this file"
            )
        if not start <= member.header <= member.header + member.size <= offset:
            raise _corrupt(
                f"zip member {member.name!r} is outside the archive or overlaps the central directory",
                location,
            )
        members[member.name] = member
    if len(members) != count:
        raise _corrupt(
            f"invalid zip central directory: expected {count} members, got {len(members)}", location
        )
    return Directory(members, offset)


def _end_record(location: Location, base: int, start: int, end: int) -> tuple[int, int, int]:
    """Offset of the directory in the file, its size in bytes, and its number of members."""
    tail = location.read(base, end)
    found = tail.rfind(b"PK\x05\x06")
    if found < 0 or len(tail) - found < END.size:
        raise _corrupt(
            "zip central directory not found: the file is truncated or is not a zip archive", location
        )
    _, disk, first_disk, _, count, size, offset, _ = END.unpack_from(tail, found)
    wide = tail.rfind(b"PK\x06\x07", 0, found)
    if wide >= 0 and wide == found - LOCATOR.size:
        at = start + LOCATOR.unpack_from(tail, wide)[2]
        data = location.read(at, at + END64.size)
        if len(data) != END64.size or not data.startswith(b"PK\x06\x06"):
            raise _corrupt(f"zip64 end record not found at {at}", location)
        fields = END64.unpack(data)
        return start + fields[9], fields[8], fields[7]
    if disk or first_disk:
        raise UnsupportedError("unsupported zip archive: it spans several disks", uri=location.uri)
    return start + offset, size, count


def _entries(data: bytes, start: int, location: Location) -> Iterator[Member]:
    position = 0
    while position < len(data):
        if len(data) - position < CENTRAL.size or data[position : position + 4] != b"PK\x01\x02":
            raise _corrupt(f"invalid zip central directory: no entry at offset {position} of it", location)
        fields = CENTRAL.unpack_from(data, position)
        _, _, _, flags, method, _, _, crc, size, full, names, extras, comments, _, _, _, header = fields
        name_end = position + CENTRAL.size + names
        extra = data[name_end : name_end + extras]
        wide = _wide(extra, [full, size, header], location)
        name = data[name_end - names : name_end].decode("utf-8", "backslashreplace")
        yield Member(name, start + wide[2], wide[1], wide[0], crc, method, flags)
        position = name_end + extras + comments


def _wide(extra: bytes, numbers: list[int], location: Location) -> list[int]:
    """Sizes and offset with those that do not fit 32 bits taken from the zip64 extra field."""
    if FULL not in numbers:
        return numbers
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, position)
        if kind == ZIP64:
            stored = [
                item
                for (item,) in struct.iter_unpack("<Q", extra[position + 4 : position + 4 + length // 8 * 8])
            ]
            missing = [index for index, number in enumerate(numbers) if number == FULL]
            if len(stored) < len(missing):
                break
            for index, number in zip(missing, stored, strict=False):
                numbers[index] = number
            return numbers
        position += 4 + length
    raise _corrupt("invalid zip central directory: missing zip64 sizes of a member", location)


def data_offset(location: Location, member: Member, methods: tuple[int, ...] = (STORED,)) -> int:
    """Offset of a member's bytes in the file.

    Args:
        location: the file.
        member: one of its members.
        methods: the compression methods that are accepted.

    Raises:
        HostileError: it has another method or is encrypted, or its local header does not match the directory.
        CorruptError: the local header is missing.
    """
    unequal = member.method == STORED and member.size != member.full_size
    if member.method not in methods or member.flags & _ENCRYPTED or unequal:
        raise HostileError(
            f"zip member {member.name!r} is compressed or encrypted, which its format does not allow",
            uri=location.uri,
            cure="do not use this file; it may hide data from malware scanners",
        )
    start, fields, name = _local_header(location, member)
    if name != member.name or fields[3] != member.method or fields[2] & _ENCRYPTED:
        raise HostileError(
            f"local header of zip member {member.name!r} does not match the central directory: name {name!r}, "
            f"method {fields[3]}, flags {fields[2]:#x}",
            uri=location.uri,
            cure="do not use this file; it may hide data from malware scanners",
        )
    return start


def data_place(location: Location, member: Member) -> int:
    """Offset of a member's bytes, without the checks of `data_offset`: for inspection, not for reading.

    Raises:
        CorruptError: the local header is missing.
    """
    return _local_header(location, member)[0]


def _local_header(location: Location, member: Member) -> tuple[int, tuple[int, ...], str]:
    head = location.read(member.header, member.header + LOCAL.size + 4 * len(member.name) + 64)
    name, start, fields = _parse_local(head)
    if not fields:
        raise _corrupt(f"local header of zip member {member.name!r} not found at {member.header}", location)
    return member.header + start, fields, name


def read_member(location: Location, member: Member, most: int) -> bytes:
    """The bytes of a small stored member.

    Raises:
        HostileError: see `data_offset`; or the member has more than `most` bytes.
        CorruptError: the file is truncated.
    """
    if member.size > most:
        raise HostileError(
            f"zip member {member.name!r} of {member.size} bytes exceeds the limit of {most}",
            uri=location.uri,
            cure="do not use this file",
        )
    offset = data_offset(location, member)
    data = location.read(offset, offset + member.size)
    if len(data) != member.size:
        raise _corrupt(
            f"zip member {member.name!r} is truncated: expected {member.size} bytes, got {len(data)}",
            location,
        )
    return data


def _corrupt(what: str, location: Location) -> CorruptError:
    return CorruptError(what, uri=location.uri, cure="restore the file from a backup or download it again")
