"""Evidence that was changed, also under an index that agrees: pages, programs, names, attributes and hidden bytes."""

from __future__ import annotations

import hashlib
import io
import json
import stat
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from infra.attacks import lies
from infra.attacks.case import OPEN, Case, as_json, write_file
from infra.attacks.lies import DIGITS

Contents = dict[str, bytes]

GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "golden"
_PROGRAM, _PAGE, _LEDGER, _REPORT, _INDEX = (
    "__main__.py", "report.md", "ledger.jsonl", "report.json", "index.json",
)  # fmt: skip
_HIDDEN = b"PK\3\4 a file for another reader"
_CODE = f"{OPEN}\n".encode()
_PAGES = (b"", b"# Audit of 2 checkpoints: no errors\n", b"# Audit \x1b]0;title\x07\n", b"\x9b31m", b"x" * (9 << 20),
          b"# Audit\n\nthe bundle is complete and consistent\n", b"[red]MARKUP[/red]", b"\xff\xfe")  # fmt: skip
_NAMES = (
    *lies.NAMES, "manifests/../../../../tmp/evil", "manifests/../sitecustomize.py", "manifests/__init__.py",
    "manifests/x.pth", "manifests/C:\\x", f"manifests/{'a' * 64}.json\n", f"manifests/{'A' * 64}.json",
    f"manifests/md5-{'a' * 64}.json", "REPORT.json", "report.json ", "hashlib.py", "json/__init__.py", "zipfile.py",
)  # fmt: skip
_MODES = {"link": stat.S_IFLNK | 0o777, "folder": stat.S_IFDIR | 0o755, "setuid": stat.S_IFREG | 0o4755,
          "fifo": stat.S_IFIFO, "device": stat.S_IFCHR}  # fmt: skip
_OPTIONS: dict[str, dict[str, Any]] = {
    "comment": {"comment": b"\x1b]0;title\x07"}, "extra": {"extra": struct.pack("<HH4s", 0x7075, 4, b"name")},
    "bzip2": {"compress_type": zipfile.ZIP_BZIP2}, "lzma": {"compress_type": zipfile.ZIP_LZMA},
    "stored": {"compress_type": zipfile.ZIP_STORED}, "dos-folder": {"external_attr": 0x10},
}  # fmt: skip
_FINDINGS: tuple[tuple[str, dict[str, str] | None, int], ...] = (
    ("controls", {"severity": "\x1b[2J", "kind": "a\nb: forged"}, 1), ("milder", {"severity": "note"}, 1),
    ("long", {"kind": "x" * 1_000_000}, 1), ("many", {"severity": "error"}, 30_000), ("none", None, 9000),
)  # fmt: skip
# Offset and form of a field of the header before the ledger, and its value.
_LOCAL = ((4, "<H", 99), (6, "<H", 1), (6, "<H", 8), (8, "<H", 0), (14, "<I", 7), (18, "<I", 1 << 20), (22, "<I", 1),
          (26, "<H", 3), (28, "<H", 4), (30, "<c", b"m"))  # fmt: skip
_LISTED = ((8, "<H", 1), (8, "<H", 0x800), (10, "<H", 0), (10, "<H", 12), (16, "<I", 7), (20, "<I", 0), (24, "<I", 0),
           (24, "<I", 0xFFFFFFF0), (34, "<H", 9), (42, "<I", 0), (42, "<I", 0xFFFFFFF0))  # fmt: skip
_LARGE: dict[str, Callable[[], Contents]] = {  # made when they are written
    **{f"zeros-{exponent}": lambda size=1 << exponent: {_LEDGER: bytes(size)} for exponent in (20, 26, 29)},
    "lines": lambda: {_LEDGER: b"{}\n" * 3_000_000},
    "values": lambda: {_REPORT: b"[" + b"{}," * 3_000_000 + b"{}]"},
    "many": lambda: {f"manifests/{number}": b"" for number in range(30_000)},
}


def evidence() -> Contents:
    """The members of the golden evidence, with the program that wherry puts into a bundle now."""
    from wherry.prove.bundle import program_text

    with zipfile.ZipFile(GOLDEN / "bundle-2.zip") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    return listed({**members, _PROGRAM: program_text()})


def listed(contents: Contents) -> Contents:
    """The contents under an index that agrees."""
    index = json.loads(contents[_INDEX])
    index["files"] = {
        name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in contents.items()
        if name != _INDEX
    }
    return {**contents, _INDEX: json.dumps(index).encode()}


def packed(
    contents: Contents,
    change: Callable[[zipfile.ZipInfo], object] | None = None,
    more: Contents | None = None,
) -> bytes:
    """An archive; `change` alters what it says of each file, and `more` are files whose names may be there already."""
    buffer = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        warnings.simplefilter("ignore")
        for name, data in (*contents.items(), *(more or {}).items()):
            info = zipfile.ZipInfo(name.encode("utf-8", "replace").decode())
            info.compress_type = zipfile.ZIP_DEFLATED
            if change:
                change(info)
            archive.writestr(info, data)
    return buffer.getvalue()


def built(
    contents: Contents, *, gap: bytes = b"", tail: bytes = b"", local: Any = None, entry: Any = None
) -> bytes:
    """An archive written byte by byte: with bytes before the list or behind a stream, or with other fields."""
    out, directory = bytearray(), bytearray()
    for name, data in contents.items():
        chosen = name == _LEDGER
        packer = zlib.compressobj(9, zlib.DEFLATED, -15)
        stream = packer.compress(data) + packer.flush() + (tail if chosen else b"")
        sizes = (0, 33, zlib.crc32(data), len(stream), len(data), len(name), 0)
        head = bytearray(struct.pack("<4s3H2H3I2H", b"PK\3\4", 20, 0, 8, *sizes)) + name.encode()
        row = bytearray(struct.pack("<4s4H2H3I5H2I", b"PK\1\2", 20, 20, 0, 8, *sizes, 0, 0, 0, 0, len(out)))
        for record, field in ((head, local), (row, entry)):
            if field and chosen:
                struct.pack_into(field[1], record, field[0], field[2])
        directory += row + name.encode()
        out += head + stream
    out += gap
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, len(contents), len(contents), len(directory), len(out), 0)
    return bytes(out + directory + end)


# ---- What is changed


def _members(sound: Contents) -> Iterator[tuple[str, bytes]]:
    for number, page in enumerate(_PAGES):
        yield f"page-{number}", packed(listed({**sound, _PAGE: page}))
    for name in (_PROGRAM, "README.txt"):
        yield f"code-{name}", packed(listed({**sound, name: _CODE}))
        yield f"code-behind-{name}", packed(listed({**sound, name: sound[name] + _CODE}))
    for number, name in enumerate(_NAMES):
        yield f"name-{number}", packed(listed({**sound, name: _CODE}))
        yield f"unlisted-{number}", packed({**sound, name: _CODE})
    for name in (_PROGRAM, _PAGE, _LEDGER, _INDEX, _REPORT):
        yield f"without-{name}", packed({other: data for other, data in sound.items() if other != name})
        yield f"twice-{name}", packed(sound, more={name: _CODE})


def _attributes(sound: Contents) -> Iterator[tuple[str, bytes]]:
    modes = {name: {"external_attr": mode << 16} for name, mode in _MODES.items()}
    for options, files in ((modes, (_PAGE, _PROGRAM)), (_OPTIONS, (_LEDGER, _PROGRAM))):
        for name, stated in options.items():
            for file in files:
                yield f"{name}-{file}", packed(sound, partial(_set, file, stated))


def _set(file: str, options: dict[str, Any], info: zipfile.ZipInfo) -> None:
    for name, value in options.items() if info.filename == file else ():
        setattr(info, name, value)


def _bytes(sound: Contents) -> Iterator[tuple[str, bytes]]:
    for number, data in enumerate((b"\0", _HIDDEN, bytes(1 << 20))):
        yield f"gap-{number}", built(sound, gap=data)
        yield f"tail-{number}", built(sound, tail=data)
        yield f"before-{number}", data + built(sound)
        yield f"behind-{number}", built(sound) + data
    for field in _LOCAL:
        yield f"local-{field[0]}-{field[2]}", built(sound, local=field)
    for field in _LISTED:
        yield f"entry-{field[0]}-{field[2]}", built(sound, entry=field)


def _documents(sound: Contents) -> Iterator[tuple[str, bytes]]:
    def reported(text: bytes) -> bytes:
        return packed(listed({**sound, _REPORT: text}))

    def numbered(text: bytes, digits: str) -> bytes:
        stored = json.loads(text)
        return lies.with_digits(stored, lies.numbers(stored), digits)

    report = json.loads(sound[_REPORT])
    for number, found in enumerate(lies.documents(report, 40, "report")):
        yield f"report-{number}", reported(as_json(found))
    for form, digits in DIGITS.items():
        yield f"digits-report-{form}", reported(numbered(sound[_REPORT], digits))
        yield f"digits-index-{form}", packed({**sound, _INDEX: numbered(sound[_INDEX], digits)})
        lines = [numbered(line, digits) for line in sound[_LEDGER].splitlines()]
        yield f"digits-ledger-{form}", packed(listed({**sound, _LEDGER: b"\n".join([*lines, b""])}))
    for name in (_REPORT, "anchor.json", _INDEX):
        text = sound[name].rstrip()[:-1] + b', "schema": 2}'
        yield f"stated-twice-{name}", packed({**listed({**sound, name: text}), name: text})
    first = (report["findings"] or [{}])[0]
    for name, row, count in _FINDINGS:
        changed = {**report, "findings": [row and {**first, **row}] * count}
        yield f"findings-{name}", reported(json.dumps(changed).encode())


def _unlisted(sound: Contents) -> Iterator[tuple[str, Contents]]:
    """Members that are not those of the index."""
    for name in (name for name in sound if name.endswith(".json")):
        for number, found in enumerate(lies.documents(json.loads(sound[name]), 20, name)):
            yield f"{name}-{number}", {name: as_json(found)}
    names = (_PROGRAM, "hashlib.py", "json/__init__.py", "../evil.py", "/evil.py", "manifests/../x")
    for number, name in enumerate(names):
        yield f"program-{number}", {name: _CODE}


def cases() -> Iterator[Case]:
    """Every bundle: of evidence with findings, which wherry renders again."""
    sound = evidence()
    for make in (_members, _attributes, _bytes, _documents):
        for name, data in make(sound):
            evil = name.startswith(("code", "name", "unlisted", "twice"))
            yield Case(f"bundle-forged/{name}", write_file("evidence.zip", data), evil)
    for name, members in _unlisted(sound):
        make_one = write_file("evidence.zip", packed({**sound, **members}))
        yield Case(f"bundle/{name}", make_one, name.startswith("program"))
    for name, write in _LARGE.items():
        yield Case(
            f"bundle/{name}",
            lambda folder, write=write: write_file("evidence.zip", packed({**sound, **write()}))(folder),
        )
