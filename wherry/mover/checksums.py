"""Checksums that a container recorded, compared with the bytes as they pass.

Archives of torch record a CRC-32 for each member. The mover's fast path reads spans past such containers, so a
flipped bit would travel on with a fresh digest around it. A reader that knows the CRC of an extent says so; every
pass (converting, verifying, inspecting) then compares it once the whole extent was read. What a resumed run does
not read again is read here.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

from wherry.errors import CorruptError
from wherry.mover.crc32 import PieceCrc

if TYPE_CHECKING:
    from wherry.core.tensorspec import Span, TensorSpec
    from wherry.formats.checkpoint import Checkpoint
    from wherry.formats.format import Extent


class _Watched(NamedTuple):
    extent: Extent
    spec: TensorSpec
    crc: PieceCrc


class Recorded:
    """The extents of one pass whose CRC is known; safe from several threads."""

    def __init__(self) -> None:
        self._watched: dict[tuple[str, int], _Watched] = {}
        self._left: dict[tuple[str, int], int] = {}
        self._lock = threading.Lock()

    def update(self, extents: tuple[Extent, ...], span: Span, data: memoryview, spec: TensorSpec) -> None:
        """Take the bytes of a span of a tensor; each byte must come at most once.

        Raises:
            CorruptError: an extent is complete and its CRC is not the recorded one.
        """
        position = 0
        for extent in extents:
            start, stop = max(span.start, position), min(span.stop, position + extent.length)
            if start < stop and extent.crc32 is not None:
                piece = data[start - span.start : stop - span.start]
                self._take(extent, spec, start - position, piece)
            position += extent.length

    def finish(self) -> None:
        """Compare what is not complete, reading what is missing of it.

        Raises:
            CorruptError: a CRC is not the recorded one, or a file ends too early.
            StorageError: the storage failed.
        """
        for watched in list(self._watched.values()):
            self._compare(watched)

    def _take(self, extent: Extent, spec: TensorSpec, start: int, piece: memoryview) -> None:
        key = (extent.file, extent.offset)
        with self._lock:
            watched = self._watched.get(key)
            if watched is None:
                watched = self._watched[key] = _Watched(extent, spec, PieceCrc(extent.length))
                self._left[key] = extent.length
        watched.crc.update(start, piece)
        with self._lock:
            self._left[key] -= len(piece)
            complete = self._left[key] == 0
        if complete:
            self._compare(watched)

    def _compare(self, watched: _Watched) -> None:
        extent = watched.extent
        found = watched.crc.value(lambda start, stop: _read(extent, start, stop))
        if found != extent.crc32:
            raise CorruptError(
                f"its bytes have CRC {found:08x}, {extent.crc32:08x} was recorded when they were written",
                uri=extent.file,
                path=watched.spec.name,
                cure="copy the checkpoint again, or use another step",
            )
        with self._lock:
            self._watched.pop((extent.file, extent.offset), None)


def _read(extent: Extent, start: int, stop: int) -> memoryview:
    data = extent.location.read(extent.offset + start, extent.offset + stop)
    if len(data) != stop - start:
        raise CorruptError("the file ends before this tensor does", uri=extent.file)
    return memoryview(data)


def without_checksum(checkpoint: Checkpoint) -> int:
    """How many tensors there are whose bytes the container does not cover with checksums."""
    every = (checkpoint.reader.extents(spec) for spec in checkpoint.manifest.tensors.values())
    return sum(extents is None or any(one.crc32 is None for one in extents) for extents in every)
