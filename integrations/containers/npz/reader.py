"""Reads the members of an `.npz` archive as tensors: stored ones raw or through strides, deflated ones in bands.

A deflated member of a zip archive, decoded in bounded memory.

A tensor of any size is decoded in bands of at most 1 MiB, in stored order. Each band is converted to C order and little
endian separately, so that a member in Fortran order needs no more memory than one in C order. A member must decode to
exactly the number of bytes that its header and the archive's directory state, with the CRC of the directory: excess
bytes are never decoded, and missing bytes are an error.

The layout of `.npz` archives: stored members, each a `.npy` record, with every size in its local header.

Unlike torch's archives these have no data descriptors: readers that walk the local headers (such as cnpy) stop at the
first descriptor. As in numpy's files, every local header has zip64 sizes; an extra field of id 0x4246 pads it so
that elements begin at a multiple of 64 in the file. Source: numpy.lib._npyio_impl, zipfile of Python 3.13; APPNOTE 6.3.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

from wherry.core import dtypes
from wherry.core.keypath import KeyPath
from wherry.core.lazy_dataclass import dataclass
from wherry.core.tensorspec import Region, TensorSpec, region_shape, region_within, row_bands, shared_region
from wherry.errors import CorruptError, HostileError, UnsupportedError
from wherry.formats.format import Access, Block, ChunkDecoder, Chunked
from wherry.integrations.containers.flat.reader import FilesReader
from wherry.integrations.containers.flat.strides import PlacedTensor, StridedReader
from wherry.integrations.containers.npz.npy import ALIGNMENT, NpyHeader, build_header, read_header, text_of
from wherry.integrations.containers.zip.read import (
    DEFLATED,
    FULL,
    LOCAL,
    STORED,
    Member,
    data_offset,
    read_directory,
)
from wherry.integrations.containers.zip.write import CRC_IN_ENTRY, MANY, UTF8, Hand
from wherry.mover.output import as_array, as_bytes
from wherry.store.content import combine
from wherry.store.location import Location
from wherry.store.store import Entry
from wherry.target.file_map import Checksum, File, FileMap, Late, Literal, Segment, Segments, TensorSegments

if TYPE_CHECKING:
    import numpy as np

    from wherry.core.manifest import Value


BAND = 1 << 20
_PIECE = 1 << 18
HELD = (
    2 * BAND + 2 * _PIECE + (1 << 16)
)  # a band in stored and in canonical form, two pieces, deflate's window
_MOST_RATIO = 1032  # the largest compression ratio of deflate


@dataclass(frozen=True, slots=True)
class DeflatedMember:
    """One deflated member.

    Attributes:
        file: the archive.
        name: of the member.
        start: offset of its compressed bytes in the file.
        size: number of compressed bytes.
        full_size: number of decompressed bytes.
        crc: CRC-32 of the decompressed bytes.
        header: its parsed `.npy` header.
    """

    file: Location
    name: str
    start: int
    size: int
    full_size: int
    crc: int
    header: NpyHeader

    def bands(self, spec: TensorSpec) -> Iterator[tuple[Region, np.ndarray]]:
        """The whole tensor, band by band.

        Yields:
            A region, and its elements: C order, little endian, the tensor's dtype.

        Raises:
            CorruptError: the data does not match the sizes or the CRC in the directory.
        """
        import numpy as np

        stream = _Stream(self)
        stream.take(self.header.length)
        # Fortran order is C order of the reversed axes.
        stored = TensorSpec(spec.path, spec.shape[::-1] if self.header.fortran else spec.shape, spec.dtype)
        native, order = dtypes.numpy_dtype(spec.dtype), ">" if self.header.big_endian else "<"
        # To swap bytes, unsigned integers stand for ml_dtypes, which have no big-endian form.
        word = np.dtype(f"{order}u{native.itemsize}") if native.kind == "V" else native.newbyteorder(order)
        for region, span in row_bands(stored, BAND):
            raw = np.frombuffer(stream.take(span.nbytes), word)
            array = raw.reshape([part.stop - part.start for part in region]).view(raw.dtype)
            if self.header.fortran:
                region, array = region[::-1], array.T  # noqa: PLW2901  the same band, transposed
            yield region, _canonical(array, spec.dtype)
        stream.end()


def checked_sizes(name: str, size: int, full_size: int, uri: str) -> None:
    """Refuse a member whose claimed size exceeds what deflate can produce.

    Raises:
        HostileError: the claimed size is impossible.
    """
    if full_size > _MOST_RATIO * size + _PIECE:
        raise HostileError(
            f"zip member {name!r} claims to decompress from {size} to {full_size} bytes, more than deflate allows",
            uri=uri,
            cure="do not use this file",
        )


def beginning(file: Location, start: int, size: int, count: int) -> bytes:
    """The first decompressed bytes of a member, or all of them if there are fewer.

    Raises:
        CorruptError: the member cannot be decompressed.
    """
    engine, found, position = zlib.decompressobj(-zlib.MAX_WBITS), bytearray(), 0
    try:
        while len(found) < count and not engine.eof and position < size:
            data = engine.unconsumed_tail or file.read(start + position, start + min(position + _PIECE, size))
            position += 0 if engine.unconsumed_tail else len(data)
            if not data:
                break
            found += engine.decompress(data, count - len(found))
    except zlib.error as error:
        raise CorruptError(f"cannot decompress a zip member: {error}", uri=file.uri) from error
    return bytes(found)


class _Stream:
    """The decompressed bytes of one member, in order."""

    def __init__(self, member: DeflatedMember) -> None:
        self._member = member
        self._engine = zlib.decompressobj(-zlib.MAX_WBITS)
        self._position = self._crc = self._decoded = 0

    def take(self, count: int) -> bytearray:
        """Exactly the next `count` bytes."""
        found = bytearray()
        while len(found) < count:
            piece = self._next(min(count - len(found), _PIECE))
            if not piece:
                raise self._corrupt(
                    f"is truncated: expected {self._member.full_size} bytes, got {self._decoded + len(found)}"
                )
            found += piece
        self._crc = zlib.crc32(found, self._crc)
        self._decoded += len(found)
        return found

    def end(self) -> None:
        """Check that no bytes follow, and that the CRC is that of the directory."""
        member = self._member
        if self._next(1):
            raise self._corrupt(f"decompresses to more than the expected {member.full_size} bytes")
        if not self._engine.eof:
            raise self._corrupt("is truncated: its deflate stream has no end")
        if self._engine.unused_data or self._position != member.size:
            raise self._corrupt("has trailing bytes after its deflate stream")
        if self._crc != member.crc:
            raise self._corrupt(
                f"has a checksum mismatch: expected CRC-32 {member.crc:#010x}, got {self._crc:#010x}"
            )

    def _next(self, most: int) -> bytes:
        """At most `most` of the next bytes; empty at the end of the stream or of the member."""
        member = self._member
        while not self._engine.eof:
            data = self._engine.unconsumed_tail
            if not data:
                stop = min(self._position + _PIECE, member.size)
                data = member.file.read(member.start + self._position, member.start + stop)
                self._position += len(data)
            try:
                piece = self._engine.decompress(data, most)
            except zlib.error as error:
                raise self._corrupt(f"cannot be decompressed: {error}") from error
            if piece or not data:
                return piece
        return b""

    def _corrupt(self, reason: str) -> CorruptError:
        return CorruptError(
            f"zip member {self._member.name!r} {reason}",
            uri=self._member.file.uri,
            cure="restore the file from a backup or download it again",
        )


def _canonical(array: np.ndarray, dtype: str) -> np.ndarray:
    import numpy as np

    little = array.astype(array.dtype.newbyteorder("<"), order="C", copy=array.dtype.byteorder == ">")
    return np.ascontiguousarray(little).reshape(array.shape).view(dtypes.numpy_dtype(dtype))


SUFFIX = ".npy"
_VERSION, _DATE = 45, 0x0021  # zip64; 1980-01-01, as numpy writes
_UNIX = 3 << 8  # made by Unix, so that the permissions count
_NUMPY = Hand(_UNIX | _VERSION, _VERSION, _DATE, 0o600 << 16, b"\0", (_VERSION, _VERSION))
_CRC_IN_LOCAL = 14
_ROWS = 3  # segments of a member: local header, header of the record, elements


class _Member(NamedTuple):
    """One record: its name, the header of the record, and the bytes of both with the elements."""

    name: bytes
    head: bytes
    size: int

    @property
    def flags(self) -> int:
        """The flags of the member, which state whether its name is UTF-8."""
        return 0 if self.name.isascii() else UTF8


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
            fixed = self.segments.nbytes + LOCAL.size + len(name) + 20 + 4
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
            header = _NUMPY.header(found.name, found.flags, found.size, length, wide=True)
            return Late(header, (Checksum(_CRC_IN_LOCAL, 1, _ROWS),))
        return Literal(found.head if kind == 1 else b"")

    def _directory(self) -> Late:
        """The entries of all members, the zip64 end record with its locator where needed, and the end record."""
        entries, checksums = bytearray(), list[Checksum]()
        count = len(self._specs)
        for member, spec in enumerate(self._specs):
            first = _ROWS * (member - count)
            checksums.append(Checksum(len(entries) + CRC_IN_ENTRY, first + 1, first + _ROWS))
            found, start = _member(spec), self.segments.bounds(_ROWS * member).start
            entries += _NUMPY.entry(found.name, found.flags, found.size, 0, start)
        size = len(entries)
        # As in zipfile: an empty archive begins with its end record.
        wide = count >= MANY or self._start + size >= FULL
        entries += _NUMPY.ending(count, size, self._start, wide=wide)
        return Late(bytes(entries), tuple(checksums))


def leaves_folder(name: str) -> bool:
    """Whether a member of this name would be unpacked outside of the folder."""
    return name.startswith(("/", "\\")) or ".." in re.split(r"[/\\]", name)


def _member(spec: TensorSpec) -> _Member:
    name, head = (spec.path[0] + SUFFIX).encode(), build_header(spec.dtype, spec.shape)
    return _Member(name, head, len(head) + spec.nbytes)


_LONGEST_TEXT = 1 << 20


@dataclass(slots=True)
class NpzContents:
    """The contents of an archive.

    Attributes:
        specs: its tensors, in the order of the directory.
        placed: the positions of the stored ones.
        deflated: how the others are decoded.
        values: its single strings.
        notes: remarks on how its dtypes were written.
    """

    specs: dict[KeyPath, TensorSpec] = field(default_factory=dict["KeyPath", "TensorSpec"])
    placed: dict[KeyPath, PlacedTensor] = field(default_factory=dict["KeyPath", "PlacedTensor"])
    deflated: dict[KeyPath, DeflatedMember] = field(default_factory=dict["KeyPath", "DeflatedMember"])
    values: dict[KeyPath, Value] = field(default_factory=dict["KeyPath", "Value"])
    notes: set[str] = field(default_factory=set[str])


def read_contents(location: Location) -> NpzContents:
    """Read the headers of all members.

    Raises:
        CorruptError: the archive is truncated, or a member is invalid.
        UnsupportedError: a member is not an array, or its dtype is not supported.
        HostileError: members overlap or have the same name, or a size is impossible.
    """
    contents = NpzContents()
    directory = read_directory(location)
    end = 0
    for member in sorted(directory.members.values(), key=lambda member: member.header):
        if member.header < end:
            raise HostileError(
                f"zip member {member.name!r} overlaps another member",
                uri=location.uri,
                cure="do not use this file",
            )
        start = data_offset(location, member, (STORED, DEFLATED))
        end = start + member.size
        if end > directory.start:
            raise _corrupt(f"zip member {member.name!r} overlaps the central directory", location)
        _add(member, start, location, contents)
    return contents


def _add(member: Member, start: int, location: Location, contents: NpzContents) -> None:
    if leaves_folder(member.name):
        raise HostileError(
            f"zip member {member.name!r} would leave the folder into which the archive is unpacked",
            uri=location.uri,
            cure="do not unpack this file",
        )
    if not member.name.endswith(SUFFIX):
        raise UnsupportedError(
            f"zip member {member.name!r} is not an array: expected a name that ends in {SUFFIX}",
            uri=location.uri,
            cure="remove it from the archive",
        )
    if member.method == DEFLATED:
        checked_sizes(member.name, member.size, member.full_size, location.uri)
    header = read_header(lambda a, b: _bytes(location, member, start, a, b), location.uri, f"{member.name!r}")
    if header.length + header.nbytes != member.full_size:
        raise _corrupt(
            f"size mismatch in zip member {member.name!r}: expected {header.length + header.nbytes} bytes, "
            f"got {member.full_size}", location,
        )  # fmt: skip
    path = (member.name.removesuffix(SUFFIX),)
    if header.dtype in ("str", "bytes"):
        contents.values[path] = _text(header, member, start, location)
        return
    chunks = header.shape if member.method == DEFLATED and math.prod(header.shape) else None
    contents.specs[path] = TensorSpec(path, header.shape, header.dtype, chunks=chunks)
    if header.descr.endswith(("V2", "f1")):
        contents.notes.add(
            f"dtype {header.descr!r} is read as {header.dtype}: numpy writes this ml_dtypes type so"
        )
    if member.method == DEFLATED:
        contents.deflated[path] = DeflatedMember(
            location, member.name, start, member.size, member.full_size, member.crc, header
        )
        return
    crc = combine(header.crc, member.crc, header.nbytes)  # removes the header from the record's CRC
    contents.placed[path] = PlacedTensor(
        location, start + header.length, header.nbytes, 0, header.shape, header.strides, header.dtype,
        header.big_endian, crc if member.crc else 0,
    )  # fmt: skip


def _bytes(location: Location, member: Member, start: int, first: int, stop: int) -> bytes:
    """Decompressed bytes [first, stop) near the beginning of a member."""
    if member.method == DEFLATED:
        return beginning(location, start, member.size, stop)[first:]
    return location.read(start + first, start + min(stop, member.size))


def _text(header: NpyHeader, member: Member, start: int, location: Location) -> str:
    if header.nbytes > _LONGEST_TEXT:
        raise UnsupportedError(
            f"string of {header.nbytes} bytes in zip member {member.name!r} exceeds the limit of {_LONGEST_TEXT}",
            uri=location.uri,
        )
    data = _bytes(location, member, start, header.length, member.full_size)
    if crc32(data, header.crc) != member.crc:
        raise _corrupt(f"checksum mismatch in zip member {member.name!r}", location)
    text = text_of(header, data)
    if text is None:
        raise UnsupportedError(
            f"string in zip member {member.name!r} cannot be decoded as text",
            uri=location.uri,
            cure="save it as uint8",
        )
    return text


@dataclass(frozen=True, slots=True)
class NpzReader(FilesReader):
    """Reads one archive.

    Attributes:
        location: the file.
        contents: its contents.
        files: the file itself, as an entry.
        sound: members whose CRC was verified.
    """

    location: Location
    contents: NpzContents
    files: tuple[Entry, ...]
    sound: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])

    def access(self, spec: TensorSpec) -> Access:
        """Deflated members are one chunk that is decoded in bands, stored ones are read raw or through strides.

        The CRC of a stored member is that of its extent; the CRC of a deflated one is always compared.
        """
        member = self.contents.deflated.get(spec.path)
        if member is None:
            return StridedReader(self.location, self.contents.placed, self.files, sound=self.sound).access(
                spec
            )

        def decode(_whole: Region) -> Iterator[Block]:
            for region, elements in member.bands(spec):
                yield Block(region, iter([as_bytes(elements)]))

        def fill(region: Region, out: memoryview) -> None:
            result = as_array(out, spec.dtype, region_shape(region))
            for box, elements in member.bands(spec):
                shared = shared_region(region, box)
                if shared is not None:
                    result[region_within(shared, region)] = elements[region_within(shared, box)]

        return Chunked(spec.shape, ChunkDecoder(fill, "deflate", lambda _whole: HELD, decode))


def _corrupt(what: str, location: Location) -> CorruptError:
    return CorruptError(what, uri=location.uri, cure="restore the file from a backup or download it again")


def holds_floats(specs: Mapping[KeyPath, TensorSpec]) -> bool:
    """Whether any tensor could be a parameter."""
    return any("float" in spec.dtype or "complex" in spec.dtype for spec in specs.values())
