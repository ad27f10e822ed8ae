"""npz: a zip archive whose local headers have the CRC-32 of what follows them, and whose directory is at the end.

The bytes are those of `wherry.integrations.containers.npz.writer`, which has the facts.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from infra.spikes.filemap.nouns import Crc32, File, FileMap, Late, Literal, Paths, Range, Raw, Segments
from wherry.core.tensorspec import Span
from wherry.integrations.containers.npz.npy import ALIGNMENT, build_header

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from infra.spikes.filemap.nouns import Scene, Segment
    from wherry.core.keypath import KeyPath
    from wherry.core.manifest import Manifest
    from wherry.core.tensorspec import Region, TensorSpec

_LOCAL, _CENTRAL = struct.Struct("<4s5H3I2H"), struct.Struct("<4s6H3I5H2I")
_END, _END64, _LOCATOR = struct.Struct("<4s4H2IH"), struct.Struct("<4sQ2H2I4Q"), struct.Struct("<4sIQI")
_FULL, _MANY, _ZIP64, _PADDING = 0xFFFFFFFF, 0xFFFF, 1, 0x4246
_VERSION, _UTF8, _DATE, _UNIX, _MODE = 45, 0x0800, 0x0021, 3 << 8, 0o600 << 16
_ROWS = 3  # of a member: local header, header of the record, elements


def layout(manifest: Manifest, _options: Mapping[str, Any], _scene: Scene) -> FileMap:
    """The one file of an archive."""
    archive = _Archive(list(manifest.tensors.values()))
    return FileMap((File(".", archive.segments),), archive.places, (".",), checksums=True)


class _Archive:
    """Members of three segments each, and the directory."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self.specs, self.paths, self.segments = specs, Paths(specs), Segments(self._segment)
        for spec in specs:
            at = self.segments.nbytes
            fixed = at + _LOCAL.size + len(_name(spec)) + 20 + 4
            self.segments.add(-(-fixed // ALIGNMENT) * ALIGNMENT - at)
            self.segments.add(len(_head(spec)))
            self.segments.add(spec.nbytes)
        self.start = self.segments.nbytes
        self.segments.add(len(self._directory([0] * len(specs))))

    def places(self, path: KeyPath, part: Region | Span) -> Iterator[Range]:
        """The bytes of a span of a tensor."""
        assert isinstance(part, Span), "npz has no chunks"
        start = self.segments.bounds(_ROWS * self.paths.number(path) + 2).start
        yield Range(0, start + part.start, start + part.stop)

    def _segment(self, row: int, _number: int) -> Segment:
        member, kind = divmod(row, _ROWS)
        if member == len(self.specs):
            needs = [self._need(one) for one in range(member)]
            directory = lambda known: self._directory([known.crc32(need) or 0 for need in needs])  # noqa: E731
            return Late(needs, directory, len(self._directory([0] * member)))
        spec = self.specs[member]
        if kind == 0:
            need, bounds = self._need(member), self.segments.bounds(row)
            return Late((need,), lambda known: _local(spec, bounds, known.crc32(need) or 0), bounds.nbytes)
        return Literal(_head(spec)) if kind == 1 else Raw(spec.path, Span(0, spec.nbytes))

    def _need(self, member: int) -> Crc32:
        """The checksum of a record: its header and its elements."""
        row = _ROWS * member
        return Crc32(0, self.segments.bounds(row + 1).start, self.segments.bounds(row + 2).stop)

    def _directory(self, crcs: Sequence[int]) -> bytes:
        """The entries of all members, the zip64 end record where it is needed, and the end record."""
        starts = (self.segments.bounds(_ROWS * member).start for member in range(len(self.specs)))
        entries = b"".join(map(_entry, self.specs, starts, crcs))
        count, begin, size, wide = len(self.specs), self.start, len(entries), b""
        if count >= _MANY or begin + size >= _FULL:
            end64 = (b"PK\x06\x06", _END64.size - 12, _VERSION, _VERSION, 0, 0, count, count, size, begin)
            wide = _END64.pack(*end64) + _LOCATOR.pack(b"PK\x06\x07", 0, begin + size, 1)
        few = min(count, _MANY)
        return (
            entries + wide + _END.pack(b"PK\x05\x06", 0, 0, few, few, min(size, _FULL), min(begin, _FULL), 0)
        )


def _name(spec: TensorSpec) -> bytes:
    return f"{spec.path[0]}.npy".encode()


def _head(spec: TensorSpec) -> bytes:
    return build_header(spec.dtype, spec.shape)


def _flags(name: bytes) -> int:
    return 0 if name.isascii() else _UTF8


def _local(spec: TensorSpec, bounds: Span, crc: int) -> bytes:
    """The local header, padded so that the record begins at a multiple of 64."""
    name, size = _name(spec), len(_head(spec)) + spec.nbytes
    wide = struct.pack("<2H2Q", _ZIP64, 16, size, size)
    padding = bounds.nbytes - _LOCAL.size - len(name) - len(wide) - 4
    extra = wide + struct.pack("<2H", _PADDING, padding) + bytes(padding)
    fixed = (_VERSION, _flags(name), 0, 0, _DATE, crc, _FULL, _FULL, len(name), len(extra))
    return _LOCAL.pack(b"PK\x03\x04", *fixed) + name + extra


def _entry(spec: TensorSpec, at: int, crc: int) -> bytes:
    """A member in the directory."""
    name, size = _name(spec), len(_head(spec)) + spec.nbytes
    numbers = [size, size] * (size >= _FULL) + [at] * (at >= _FULL)
    extra = struct.pack(f"<2H{len(numbers)}Q", _ZIP64, 8 * len(numbers), *numbers) if numbers else b""
    few, near = min(size, _FULL), min(at, _FULL)
    fixed = (_UNIX | _VERSION, _VERSION, _flags(name), 0, 0, _DATE, crc, few, few, len(name), len(extra))
    return _CENTRAL.pack(b"PK\x01\x02", *fixed, 0, 0, 0, _MODE, near) + name + extra
