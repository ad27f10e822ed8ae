"""The files of an evidence bundle: a zip file that every reader of archives reads in the same way.

Names are exact, every file is a regular one without options, the header before each file states what the list of files
states, compressed data ends where it is said to end, and every byte of the bundle belongs to a file. This module needs
only the standard library: the program of a bundle is this text and that of `wherry.auditor.check`.
"""

from __future__ import annotations

import re
import stat
import struct
import sys
import zipfile
import zlib
from collections import Counter
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

INDEX, REPORT, LEDGER, ANCHOR = "index.json", "report.json", "ledger.jsonl", "anchor.json"
PAGE, README, PROGRAM, MANIFESTS = "report.md", "README.txt", "__main__.py", "manifests/"
NAMES = frozenset({README, PAGE, REPORT, ANCHOR, PROGRAM, LEDGER, INDEX})
WHOLE_MAX = 64 << 20  # maximum bytes of a file that is read at once
PIECE = 1 << 20
_MANIFEST = re.compile(r"manifests/(?:blake3|sha256)-[0-9a-f]{64}\.json")
_MEMBERS_MAX = 200_000  # files
_DIRECTORY_MAX = 32 << 20  # bytes of the list of files
_RATIO_MAX, _RATIO_FREE = 100, 16 << 20  # inflated bytes for each stored one, and how many may be more
_END, _END64, _LOCATOR = struct.Struct("<4s4H2IH"), struct.Struct("<4sQ2H2I4Q"), struct.Struct("<4sIQI")
_LOCAL, _ENTRY, _EXTRA = struct.Struct("<4s5H3I2H"), struct.Struct("<4s6H3I5H2I"), struct.Struct("<HHQQ")
_UNCOUNTED = 12  # bytes of the wide end that its own length does not count
_MOST = 0xFFFFFFFF
_VERSIONS = (20, 45)  # of the format: with compressed data, and with sizes or places above 4 GiB
_WIDE = (0xFFFF, _MOST, _MOST)  # in the plain end, where only the wide one has the number
_PLAIN_MAX = (1 << 31) - 1  # above it Python writes sizes and places into the extra field
_REGULAR = (stat.S_IFREG | 0o777) << 16  # the attributes that a regular file may have


# Characters that nobody sees though Python calls them printable: fillers, and selectors of variations.
_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)


def visible(text: str) -> str:
    """A text without what a terminal obeys or nobody sees: controls, marks of direction, line breaks, selectors."""
    return "".join(
        one if one.isprintable() and not _UNSEEN.match(one) else one.encode("unicode_escape").decode("ascii")
        for one in text
    )


def member_problems(archive: zipfile.ZipFile, file: IO[bytes]) -> list[str]:
    """What is wrong with the files of an archive before their contents are looked at.

    Args:
        archive: the archive.
        file: the file that it is read from; `directory_problem` has found nothing there.

    Raises:
        zlib.error: compressed data is invalid.
    """
    infos = archive.infolist()
    problems = [*_name_problems(archive.namelist()), *_record_problems(infos)]
    return problems or [*_layout_problems(infos, file, archive.start_dir)]


def _name_problems(names: Sequence[str]) -> Iterator[str]:
    for name in sorted(name for name, count in Counter(names).items() if count > 1):
        yield f"{name}: duplicate file in the bundle"
    for name in sorted({*names} - NAMES):
        if not _MANIFEST.fullmatch(name):
            yield f"{name}: unknown file; a program in the bundle could import it"


def _record_problems(infos: Sequence[zipfile.ZipInfo]) -> Iterator[str]:
    for info in infos:
        most = min(info.compress_size * _RATIO_MAX, sys.maxsize if info.filename == LEDGER else WHOLE_MAX)
        known = info.compress_type == zipfile.ZIP_DEFLATED or (
            info.compress_type == zipfile.ZIP_STORED and info.compress_size == info.file_size
        )
        if info.file_size > max(_RATIO_FREE, most):
            yield f"{info.filename}: {info.file_size} bytes in {info.compress_size} exceed the limits"
        elif not known or info.filename != info.orig_filename or info.extract_version not in _VERSIONS:
            yield f"{info.filename}: another program may read it as a different file"
        elif info.external_attr & ~_REGULAR:
            yield f"{info.filename}: not a regular file"
        elif info.flag_bits or info.volume or info.comment or not _is_extra_of(info):
            yield f"{info.filename}: it has flags, a comment or an extra field"


def _is_extra_of(info: zipfile.ZipInfo) -> bool:
    """Whether the extra field is none, or has the numbers that are too large for the list of files."""
    sizes = (info.file_size, info.compress_size)
    numbers = [
        *(sizes if max(sizes) > _PLAIN_MAX else ()),
        *([info.header_offset] if info.header_offset > _PLAIN_MAX else ()),
    ]
    wide = struct.pack(f"<HH{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""
    return info.extra == wide


def _layout_problems(infos: Sequence[zipfile.ZipInfo], file: IO[bytes], end: int) -> Iterator[str]:
    """The first fault of what stands before the list of files, which begins at `end`."""
    at = 0
    for info in sorted(infos, key=lambda one: one.header_offset):
        if info.header_offset != at:
            yield f"{info.filename}: it is not directly behind the file before it; bytes belong to no file"
            return
        begin = _begin(file, info)
        if begin is None:
            yield f"{info.filename}: the header before it differs from the list of files"
            return
        at = begin + info.compress_size
        if at > end or (info.compress_type and not _ends_exactly(file, begin, info)):
            yield f"{info.filename}: its data does not end where the list of files says"
            return
    if at != end:
        yield f"{end - at} bytes of the bundle belong to no file"


def _begin(file: IO[bytes], info: zipfile.ZipInfo) -> int | None:
    """Where the data of a file begins, if the header before it states the same as the list of files."""
    name, sizes = info.orig_filename.encode(), (info.compress_size, info.file_size)
    file.seek(info.header_offset)
    head = file.read(_LOCAL.size + len(name) + _EXTRA.size)
    if len(head) < _LOCAL.size or not head.startswith(b"PK\3\4"):
        return None
    version, flags, method, _time, _date, crc, *stated, named, extra = _LOCAL.unpack_from(head)[1:]
    if (flags, method, crc, named) != (info.flag_bits, info.compress_type, info.CRC, len(name)):
        return None
    if version not in _VERSIONS or version > info.extract_version:
        return None
    wide = _EXTRA.pack(1, 16, info.file_size, info.compress_size) if extra else b""
    # Before Python 3.11.4, zipfile states sizes that fit a second time in front of the wide ones.
    same = (stated == [*sizes] or (bool(extra) and stated == [_MOST, _MOST])) and extra == len(wide)
    return info.header_offset + _LOCAL.size + named + extra if (
        same and head[_LOCAL.size :].startswith(name + wide)
    ) else None  # fmt: skip


def _ends_exactly(file: IO[bytes], begin: int, info: zipfile.ZipInfo) -> bool:
    """Whether compressed data ends with its last byte, and becomes as many bytes as are stated."""
    state, left, size = zlib.decompressobj(-zlib.MAX_WBITS), info.compress_size, 0
    file.seek(begin)
    while left and not state.eof and (piece := file.read(min(PIECE, left))):
        left -= len(piece)
        more = True
        while more:
            inflated = state.decompress(piece, PIECE)
            size += len(inflated)
            piece = state.unconsumed_tail
            more = size <= info.file_size and (len(piece) > 0 or len(inflated) == PIECE)
        if size > info.file_size:
            return False
    return state.eof and not left and not state.unused_data and size == info.file_size


def directory_problem(file: IO[bytes]) -> str | None:
    """Why the list of files must not be read: it is too long, or another reader would find another list.

    Python takes a kilobyte of memory for each file. `python BUNDLE` finds the list by other records than zipfile does.
    """
    at = file.seek(0, 2) - _END.size
    before = max(at - _END64.size - _LOCATOR.size, 0)
    file.seek(before)
    tail = file.read()
    if at < 0 or not tail.endswith(b"\0\0") or not tail.startswith(b"PK\5\6", at - before):
        return "invalid evidence bundle: it does not end as a zip file without a comment does"
    disk, other, here, *plain = _END.unpack_from(tail, at - before)[1:7]
    count, size, offset = plain
    parts = [disk, other, here - count]
    if tail.startswith(b"PK\6\7", max(at - before - _LOCATOR.size, 0)):
        at = before
        length, _made, _needed, disk, other, here, *wide = _END64.unpack_from(tail)[1:]
        count, size, offset = wide
        first, stated, disks = _LOCATOR.unpack_from(tail, _END64.size)[1:]
        parts += [length - (_END64.size - _UNCOUNTED), disk, other, here - count, first, disks - 1]
        same = all(one in (other, most) for one, other, most in zip(plain, wide, _WIDE, strict=True))
        if not tail.startswith(b"PK\6\6") or stated != at or not same:
            return "invalid evidence bundle: it has two lists of files"
    if any(parts):
        return "invalid evidence bundle: it is a part of an archive"
    if count > _MEMBERS_MAX or size > _DIRECTORY_MAX:
        return f"the bundle exceeds the limit of {_MEMBERS_MAX} files: {count} files, listed in {size} bytes"
    if offset + size != at:
        return "invalid evidence bundle: bytes belong to no file"
    file.seek(offset)
    return (
        None if _is_list(file.read(size), count) else "invalid evidence bundle: its list of files is damaged"
    )


def _is_list(directory: bytes, count: int) -> bool:
    """Whether a list of files has as many entries as its end states, and nothing else."""
    at = 0
    for _entry in range(count):
        if not directory.startswith(b"PK\1\2", at) or at + _ENTRY.size > len(directory):
            return False
        at += _ENTRY.size + sum(_ENTRY.unpack_from(directory, at)[10:13])
    return at == len(directory)
