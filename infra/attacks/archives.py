"""Zip archives that lie: every field of every record with values that it must not have, and names twice or outside.

Some of them two readers read differently, by two lists of files or two names of a file: what one reader checks must be
what another one loads, or the file must be refused.
"""

from __future__ import annotations

import struct
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path

from infra.attacks import bundles, lies, pickles
from infra.attacks.case import MARKER, OPEN, TOUCH, Case, Make, write_file

# Signature → offset and form of each field.
RECORDS: dict[bytes, dict[str, tuple[int, str]]] = {
    b"PK\x03\x04": {
        "version": (4, "<H"), "flags": (6, "<H"), "method": (8, "<H"), "crc": (14, "<I"), "packed": (18, "<I"),
        "size": (22, "<I"), "name length": (26, "<H"), "extra length": (28, "<H"),
    },
    b"PK\x01\x02": {
        "flags": (8, "<H"), "method": (10, "<H"), "crc": (16, "<I"), "packed": (20, "<I"), "size": (24, "<I"),
        "name length": (28, "<H"), "extra length": (30, "<H"), "comment length": (32, "<H"), "disk": (34, "<H"),
        "attributes": (38, "<I"), "offset": (42, "<I"),
    },
    b"PK\x05\x06": {
        "disk": (4, "<H"), "start disk": (6, "<H"), "entries here": (8, "<H"), "entries": (10, "<H"),
        "directory size": (12, "<I"), "directory offset": (16, "<I"), "comment length": (20, "<H"),
    },
}  # fmt: skip
_WIDE = {"<H": (0, 1, 0x41, 0x800, 0xFFFF), "<I": (0, 1, 1 << 20, 1 << 31, 0xFFFFFFFF)}
_VALUE = pickles.npy(bytes(4), "'<f4'")
_FILES = {"torch-zip": "model.pt", "npz": "model.npz", "npz-deflated": "model.npz", "zip": "model.zip"}
_TORCH = {"archive/data.pkl": pickles.STATE, "archive/version": b"3\n"}
_ARRAYS = {"a.npy": _VALUE, "b.npy": _VALUE}
SOUND = {
    "torch-zip": pickles.archive(_TORCH),
    "npz": pickles.archive(_ARRAYS),
    "npz-deflated": pickles.archive(_ARRAYS, zipfile.ZIP_DEFLATED),
}


def _fields() -> Iterator[Case]:
    for kind, sound in SOUND.items():
        for signature, fields in RECORDS.items():
            for field, (offset, form) in fields.items():
                for value in _WIDE[form]:
                    data = bytearray(sound)
                    struct.pack_into(form, data, data.rindex(signature) + offset, value)
                    make = write_file(_FILES[kind], bytes(data))
                    yield Case(f"{kind}/{signature[2]}-{field}={value}", make)


def _members() -> Iterator[tuple[str, Make]]:
    for number, name in enumerate(lies.NAMES):
        for kind, inner in (("npz", f"{name}.npy"), ("torch-zip", f"archive/{name}"), ("zip", name)):
            members = [("archive/data.pkl", pickles.STATE), (inner, _VALUE)]
            yield f"{kind}/member-{number}", _archive(_FILES[kind], members)
    for kind, inner in (("npz", "a.npy"), ("torch-zip", "archive/data.pkl")):
        file, data = _FILES[kind], SOUND[kind]
        yield f"{kind}/two-alike", _archive(file, [(inner, _VALUE), (inner, pickles.STATE)])
        yield f"{kind}/cases", _archive(file, [(inner, _VALUE), (inner.upper(), pickles.STATE)])
        for cut in (1, 4, 22, 40, 80, 200):
            yield f"{kind}/cut-{cut}", write_file(file, data[:-cut])
            yield f"{kind}/behind-{cut}", write_file(file, bytes(cut) + data)
            yield f"{kind}/twice-{cut}", write_file(file, data + data[cut:])
        for size in (1 << 20, 1 << 28):
            yield f"{kind}/zeros-{size}", _deflate_zeros(file, inner, size)


def _archive(file: str, members: list[tuple[str, bytes]]) -> Make:
    def make(folder: Path) -> Path:
        with warnings.catch_warnings(), zipfile.ZipFile(folder / file, "w") as archive:
            warnings.simplefilter("ignore")
            for name, data in members:
                archive.writestr(zipfile.ZipInfo(name.encode("utf-8", "replace").decode()), data)
        return folder / file

    return make


def _deflate_zeros(file: str, name: str, size: int) -> Make:
    def make(folder: Path) -> Path:
        with (
            zipfile.ZipFile(folder / file, "w", zipfile.ZIP_DEFLATED) as archive,
            archive.open(name, "w") as member,
        ):
            for _ in range(size >> 20):
                member.write(bytes(1 << 20))
        return folder / file

    return make


# ---- Read in two ways

_END, _END64 = struct.Struct("<4s4H2IH"), struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_ENTRY, _OFFSET_AT, _NAME_AT, _EXTRA_AT = 46, 42, 28, 30
_UNICODE_NAME = 0x7075


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
        moved = [bytearray(row) for row in self.entries]
        for row in moved:
            struct.pack_into("<I", row, _OFFSET_AT, struct.unpack_from("<I", row, _OFFSET_AT)[0] + size)
        return b"".join(moved)

    def end(self, offset: int, comment: bytes = b"") -> bytes:
        """The record behind the list of files that begins at an offset."""
        count, size = len(self.entries), len(self.list_behind(0))
        return _END.pack(b"PK\5\6", 0, 0, count, count, size, offset, len(comment)) + comment

    def wide_end(self, offset: int, at: int) -> bytes:
        """The same for zip64, itself at a place, and the record that names this place."""
        count, size = len(self.entries), len(self.list_behind(0))
        wide = _END64.pack(b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, offset)
        return wide + _LOCATOR.pack(b"PK\6\7", 0, at, 1)


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
    nested = Archive(pickles.archive({"inner": whole})).members
    shifted = first.list_behind(nested.index(first.members))
    at = len(nested) + len(second.members)
    listed = second.list_behind(len(nested))
    yield "nested", nested + second.members + listed + second.end(at)
    yield "nested-listed", nested + second.members + shifted + first.end(at)


def two_names(archive: Archive) -> Iterator[tuple[str, bytes]]:
    """Archives whose first file has another name in its own header, or by an extra field of its row in the list."""
    name, members = archive.names[0], bytearray(archive.members)
    members[30 : 30 + len(name)] = bytes(reversed(name))
    yield "local-name", bytes(members) + archive.list_behind(0) + archive.end(len(members))
    first = archive.entries[0]
    for number, other in enumerate((archive.names[-1], b"../outside", b"evil.py")):
        field = b"\1" + struct.pack("<I", 0) + other
        extra = struct.pack("<HH", _UNICODE_NAME, len(field)) + field
        row = bytearray(first[: _ENTRY + len(name)] + extra + first[_ENTRY + len(name) :])
        struct.pack_into("<H", row, _EXTRA_AT, len(extra) + struct.unpack_from("<H", first, _EXTRA_AT)[0])
        archive.entries[0] = bytes(row)
        yield (
            f"unicode-name-{number}",
            archive.members + archive.list_behind(0) + archive.end(len(archive.members)),
        )
    archive.entries[0] = first


def _ambiguous() -> Iterator[Case]:
    """Of a sound archive and one that would run code."""
    evil = pickles.forms("os", "system", TOUCH)
    pairs = {
        ("torch-zip", "model.pt"): (SOUND["torch-zip"], {**_TORCH, "archive/data.pkl": evil["p2"]}),
        ("npz", "model.npz"): (SOUND["npz"], {"a.npy": pickles.npy(evil["p2"], "'|O'")}),
        ("bundle", "evidence.zip"): (
            bundles.packed(bundles.evidence()),
            {"__main__.py": f"{OPEN}\n".encode()},
        ),
    }
    for (kind, file), (sound, members) in pairs.items():
        other = pickles.archive(members)
        for order, first, second in (("", sound, other), ("-swapped", other, sound)):
            for name, data in two_lists(Archive(first), Archive(second)):
                yield Case(f"ambiguous-{kind}/{name}{order}", write_file(file, data), evil=True)
        for name, data in two_names(Archive(sound)):
            yield Case(f"ambiguous-{kind}/{name}", write_file(file, data))
        heads = {  # an archive that begins as something else is taken for it by who looks at the head
            **{f"pickle-{protocol}": evil[protocol] for protocol in ("p0", "p2", "p4")},
            "script": b"#!/bin/sh\ntouch " + MARKER.encode() + b"\n",
            "safetensors": struct.pack("<Q", 2) + b"{}",
            "numpy": _VALUE,
        }
        for name, head in heads.items():
            yield Case(f"ambiguous-{kind}/behind-{name}", write_file(file, head + sound), evil=True)


def cases() -> Iterator[Case]:
    """Fields, names and sizes of archives, and archives that are read in two ways."""
    yield from _fields()
    for name, make in _members():
        yield Case(name, make)
    yield from _ambiguous()
