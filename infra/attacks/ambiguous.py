"""Files that two readers read differently: archives with two lists of files, JSON that states a name twice.

What one reader checks must be what another one loads, or the file must be refused.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

from attacks import lies, pickles, prepare
from attacks.archives import write_file
from attacks.case import MARKER, Case
from attacks.folders import copy_and_change, document, files_of

_END, _END64 = struct.Struct("<4s4H2IH"), struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_ENTRY, _OFFSET_AT, _NAME_AT, _EXTRA_AT = 46, 42, 28, 30
_UNICODE_NAME = 0x7075
_TWICE = 6  # names that are stated twice, in each file of JSON


# ---- Archives


class Archive:
    """The parts of an archive without zip64.

    Attributes:
        members: everything before the list of files.
        entries: the rows of the list of files.
    """

    def __init__(self, data: bytes) -> None:
        count, size, offset = _END.unpack_from(data, data.rindex(b"PK\5\6"))[4:7]
        self.members, listed = data[:offset], data[offset : offset + size]
        self.entries: list[bytes] = []
        for _number in range(count):
            length = _ENTRY + sum(struct.unpack_from("<3H", listed, _NAME_AT))
            self.entries.append(listed[:length])
            listed = listed[length:]

    @property
    def names(self) -> list[bytes]:
        """The file names."""
        return [row[_ENTRY : _ENTRY + struct.unpack_from("<H", row, _NAME_AT)[0]] for row in self.entries]

    def list_behind(self, size: int) -> bytes:
        """The list of files, of members that lie behind so many bytes."""
        return b"".join(_moved(row, size) for row in self.entries)

    def end(self, offset: int, comment: bytes = b"") -> bytes:
        """The record behind the list of files that begins at an offset."""
        count, size = len(self.entries), len(self.list_behind(0))
        return _END.pack(b"PK\5\6", 0, 0, count, count, size, offset, len(comment)) + comment

    def wide_end(self, offset: int, at: int) -> bytes:
        """The same for zip64, itself at a place, and the record that names this place."""
        count, size = len(self.entries), len(self.list_behind(0))
        wide = _END64.pack(b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, offset)
        return wide + _LOCATOR.pack(b"PK\6\7", 0, at, 1)


def _moved(row: bytes, size: int) -> bytes:
    found = bytearray(row)
    offset = struct.unpack_from("<I", row, _OFFSET_AT)[0] + size
    struct.pack_into("<I", found, _OFFSET_AT, offset)
    return bytes(found)


def two_lists(first: Archive, second: Archive) -> Iterator[tuple[str, bytes]]:
    """Archives with the members of both and a list of files of each; readers differ in the list that they find."""
    members = first.members + second.members
    one, two = first.list_behind(0), second.list_behind(len(first.members))
    begin, middle = len(members), len(members) + len(one)
    both, behind = members + one + two, len(members) + len(one) + len(two)
    yield "two-ends", members + one + first.end(begin) + two + second.end(middle + _END.size)
    yield "end-in-comment", both + second.end(middle, first.end(begin))
    yield "comment-without-end", both + second.end(middle, b"PK\5\6" + bytes(9))
    yield "wide-end", both + first.wide_end(begin, behind) + second.end(middle)
    yield "wide-end-other", both + second.wide_end(middle, behind) + first.end(begin)
    whole = first.members + one + first.end(len(first.members))
    yield "appended", whole + second.members + second.list_behind(0) + second.end(len(second.members))
    nested = _store(whole)
    shifted = first.list_behind(nested.index(first.members))
    at = len(nested) + len(second.members)
    listed = second.list_behind(len(nested))
    yield "nested", nested + second.members + listed + second.end(at)
    yield "nested-listed", nested + second.members + shifted + first.end(at)


def _store(data: bytes) -> bytes:
    """A member that holds an archive as it is."""
    return Archive(pickles.archive({"inner": data})).members


def two_names(archive: Archive) -> Iterator[tuple[str, bytes]]:
    """Archives whose first file has another name in its own header, or by an extra field of its row in the list."""
    name, members = archive.names[0], bytearray(archive.members)
    members[30 : 30 + len(name)] = bytes(reversed(name))
    yield "local-name", bytes(members) + archive.list_behind(0) + archive.end(len(members))
    for number, other in enumerate((archive.names[-1], b"../outside", b"evil.py")):
        field = b"\1" + struct.pack("<I", 0) + other
        extra = struct.pack("<HH", _UNICODE_NAME, len(field)) + field
        changed = Archive(archive.members + archive.list_behind(0) + archive.end(len(archive.members)))
        changed.entries[0] = _with_extra(changed.entries[0], len(name), extra)
        rows = changed.list_behind(0)
        yield f"unicode-name-{number}", archive.members + rows + changed.end(len(archive.members))


def _with_extra(row: bytes, length: int, extra: bytes) -> bytes:
    found = bytearray(row[: _ENTRY + length] + extra + row[_ENTRY + length :])
    struct.pack_into("<H", found, _EXTRA_AT, len(extra) + struct.unpack_from("<H", row, _EXTRA_AT)[0])
    return bytes(found)


def _pairs() -> Iterator[tuple[str, str, bytes, bytes]]:
    """Kind, file name, a sound archive and one that would run code."""
    from attacks.records import bundle

    evil = pickles.forms("os", "system", f"touch {MARKER}")["p2"]
    state = pickles.forms("collections", "OrderedDict", "x")["p2"].replace(b"X\1\0\0\0x\x85R", b")R")
    arrays = {"a.npy": pickles.npy(bytes(4), "'<f4'"), "b.npy": pickles.npy(bytes(4), "'<f4'")}
    yield (
        "torch-zip", "model.pt",
        pickles.archive({"archive/data.pkl": state, "archive/version": b"3\n"}),
        pickles.archive({"archive/data.pkl": evil, "archive/version": b"3\n"}),
    )  # fmt: skip
    yield "npz", "model.npz", pickles.archive(arrays), pickles.archive({"a.npy": pickles.npy(evil, "'|O'")})
    program = f"open({MARKER!r}, 'w')\n".encode()
    yield "bundle", "evidence.zip", bundle(lambda _all: None), pickles.archive({"__main__.py": program})


def _archives() -> Iterator[Case]:
    for kind, file, sound, evil in _pairs():
        for order, first, second in (("", sound, evil), ("-swapped", evil, sound)):
            for name, data in two_lists(Archive(first), Archive(second)):
                yield Case(f"ambiguous-{kind}/{name}{order}", write_file(file, data), evil=True)
        for name, data in two_names(Archive(sound)):
            yield Case(f"ambiguous-{kind}/{name}", write_file(file, data))
        for name, data in _behind_others(sound):
            yield Case(f"ambiguous-{kind}/{name}", write_file(file, data), evil=True)


def _behind_others(sound: bytes) -> Iterator[tuple[str, bytes]]:
    """Archives that begin as something else, which a reader that looks at the head takes for it."""
    evil = pickles.forms("os", "system", f"touch {MARKER}")
    for protocol in ("p0", "p2", "p4"):
        if protocol in evil:
            yield f"behind-pickle-{protocol}", evil[protocol] + sound
    yield "behind-script", b"#!/bin/sh\ntouch " + MARKER.encode() + b"\n" + sound
    yield "behind-safetensors", struct.pack("<Q", 2) + b"{}" + sound
    yield "behind-numpy", pickles.npy(bytes(4), "'<f4'") + sound


# ---- JSON


def _twice(place: Path) -> Iterator[Case]:
    for name, home, path in prepare.sound(place):
        for file in files_of(path):
            inner = file.relative_to(path) if path != file else file.name
            for number, text in enumerate(texts_with_a_name_twice(document(file), f"{name}{inner}")):
                change = _write(file.relative_to(path) if path != file else None, text)
                yield Case(f"twice-{name}/{inner}-{number}", copy_and_change(home, path, change))


def _write(inner: Path | None, text: bytes) -> Callable[[Path], object]:
    return lambda found: (found / inner if inner else found).write_bytes(text)


def texts_with_a_name_twice(sound: object, seed: str) -> Iterator[bytes]:
    """The document with one name stated twice, first or last with another value; and with a byte order mark."""
    generator = random.Random(seed)
    named = [place for place in lies.places(sound) if isinstance(place[-1], str)]
    for place in generator.sample(named, min(_TWICE, len(named))):
        yield lies.duplicate_at(sound, place, generator.choice(lies.VALUES)).encode("utf-8", "surrogatepass")
    if named:
        yield b"\xef\xbb\xbf" + json.dumps(sound).encode()
        yield json.dumps(sound).encode("utf-16")
        yield json.dumps(sound).encode() + b"\0"
        yield json.dumps(sound).encode() + b"{}"


def cases(place: Path) -> Iterator[Case]:
    """Every one; `place` has what `prepare` made."""
    yield from _archives()
    yield from _twice(place)
