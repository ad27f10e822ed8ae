"""Zip archives that lie: every field of every record with values that it must not have, and names twice or outside."""

from __future__ import annotations

import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from attacks import lies, pickles
from attacks.case import Case

_STATE = pickles.forms("collections", "OrderedDict", "x")["p2"].replace(b"X\x01\x00\x00\x00x\x85R", b")R")
# Signature → offset and form of each field.
RECORDS: dict[bytes, dict[str, tuple[int, str]]] = {
    b"PK\x03\x04": {
        "version": (4, "<H"),
        "flags": (6, "<H"),
        "method": (8, "<H"),
        "crc": (14, "<I"),
        "packed": (18, "<I"),
        "size": (22, "<I"),
        "name length": (26, "<H"),
        "extra length": (28, "<H"),
    },
    b"PK\x01\x02": {
        "flags": (8, "<H"),
        "method": (10, "<H"),
        "crc": (16, "<I"),
        "packed": (20, "<I"),
        "size": (24, "<I"),
        "name length": (28, "<H"),
        "extra length": (30, "<H"),
        "comment length": (32, "<H"),
        "disk": (34, "<H"),
        "attributes": (38, "<I"),
        "offset": (42, "<I"),
    },
    b"PK\x05\x06": {
        "disk": (4, "<H"),
        "start disk": (6, "<H"),
        "entries here": (8, "<H"),
        "entries": (10, "<H"),
        "directory size": (12, "<I"),
        "directory offset": (16, "<I"),
        "comment length": (20, "<H"),
    },
}
_WIDE = {"<H": (0, 1, 0x41, 0x800, 0xFFFF), "<I": (0, 1, 1 << 20, 1 << 31, 0xFFFFFFFF)}


def _sound() -> dict[str, tuple[str, bytes]]:
    arrays = {"a.npy": pickles.npy(bytes(4), "'<f4'"), "b.npy": pickles.npy(bytes(4), "'<f4'")}
    return {
        "torch-zip": ("model.pt", pickles.archive({"archive/data.pkl": _STATE, "archive/version": b"3\n"})),
        "npz": ("model.npz", pickles.archive(arrays)),
        "npz-deflated": ("model.npz", pickles.archive(arrays, zipfile.ZIP_DEFLATED)),
    }


def write_file(name: str, data: bytes) -> Callable[[Path], Path]:
    """Writes one file."""

    def make(folder: Path) -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    return make


def _fields() -> Iterator[Case]:
    for kind, (file, sound) in _sound().items():
        for signature, fields in RECORDS.items():
            for field, (offset, form) in fields.items():
                for value in _WIDE[form]:
                    data = bytearray(sound)
                    struct.pack_into(form, data, data.rindex(signature) + offset, value)
                    yield Case(f"{kind}/{signature[2]}-{field}={value}", write_file(file, bytes(data)))


def _members() -> Iterator[Case]:
    value = pickles.npy(bytes(4), "'<f4'")
    for number, name in enumerate(lies.NAMES):
        for kind, file, inner in (
            ("npz", "model.npz", f"{name}.npy"),
            ("torch-zip", "model.pt", f"archive/{name}"),
            ("zip", "model.zip", name),
        ):
            yield Case(
                f"{kind}/member-{number}", _archive(file, [("archive/data.pkl", _STATE), (inner, value)])
            )
    for kind, file in (("npz", "model.npz"), ("torch-zip", "model.pt")):
        inner = "a.npy" if kind == "npz" else "archive/data.pkl"
        yield Case(f"{kind}/two-alike", _archive(file, [(inner, value), (inner, _STATE)]))
        yield Case(f"{kind}/cases", _archive(file, [(inner, value), (inner.upper(), _STATE)]))
        for cut in (1, 4, 22, 40, 80, 200):
            data = _sound()[kind][1]
            yield Case(f"{kind}/cut-{cut}", write_file(file, data[:-cut]))
            yield Case(f"{kind}/behind-{cut}", write_file(file, bytes(cut) + data))
            yield Case(f"{kind}/twice-{cut}", write_file(file, data + data[cut:]))
        for size in (1 << 20, 1 << 28):
            yield Case(f"{kind}/zeros-{size}", _deflate_zeros(file, inner, size))


def _archive(file: str, members: list[tuple[str, bytes]]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        with warnings.catch_warnings(), zipfile.ZipFile(folder / file, "w") as archive:
            warnings.simplefilter("ignore")
            for name, data in members:
                archive.writestr(zipfile.ZipInfo(name.encode("utf-8", "replace").decode()), data)
        return folder / file

    return make


def _deflate_zeros(file: str, name: str, size: int) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        with (
            zipfile.ZipFile(folder / file, "w", zipfile.ZIP_DEFLATED) as archive,
            archive.open(name, "w") as member,
        ):
            for _ in range(size >> 20):
                member.write(bytes(1 << 20))
        return folder / file

    return make


def cases() -> Iterator[Case]:
    """Fields, names and sizes of archives."""
    yield from _fields()
    yield from _members()
