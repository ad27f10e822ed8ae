"""Reads the members of an `.npz` archive as tensors: stored ones raw or through strides, deflated ones in bands."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from zlib import crc32

from wherry.core.tensorspec import Region, TensorSpec, region_shape, region_within, shared_region
from wherry.errors import CorruptError, HostileError, UnsupportedError
from wherry.formats.contents import Access, Block, ChunkDecoder, Chunked
from wherry.integrations.containers.flat.reader import FilesReader
from wherry.integrations.containers.flat.strides import PlacedTensor, StridedReader
from wherry.integrations.containers.npz.inflate import HELD, DeflatedMember, beginning, checked_sizes
from wherry.integrations.containers.npz.layout import SUFFIX, leaves_folder
from wherry.integrations.containers.npz.npy import NpyHeader, read_header, text_of
from wherry.integrations.containers.zip.read import DEFLATED, STORED, Member, data_offset, read_directory
from wherry.mover.output import as_array, as_bytes
from wherry.store.content import combine

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from wherry.core.keypath import KeyPath
    from wherry.core.manifest import Value
    from wherry.storage.location import Location
    from wherry.store.store import Entry

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
