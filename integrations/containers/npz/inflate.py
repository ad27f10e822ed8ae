"""A deflated member of a zip archive, decoded in bounded memory.

A tensor of any size is decoded in bands of at most 1 MiB, in stored order. Each band is converted to C order and little
endian separately, so that a member in Fortran order needs no more memory than one in C order. A member must decode to
exactly the number of bytes that its header and the archive's directory state, with the CRC of the directory: excess
bytes are never decoded, and missing bytes are an error.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wherry.core import dtypes
from wherry.core.tensorspec import Region, TensorSpec, row_bands
from wherry.errors import CorruptError, HostileError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from wherry.integrations.containers.npz.npy import NpyHeader
    from wherry.storage.location import Location

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
