"""Writes a DCP checkpoint: archives in `.distcp` files, and `.metadata` last, which commits it.

A tensor that is cut lies in several archives, each of which holds one of its chunks as a tensor. The chunks follow one
another in the order of the tensor's bytes, so a span of it is a span of each chunk that it crosses.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from isal import isal_zlib

from wherry.core.keypath import render
from wherry.core.tensorspec import Span
from wherry.errors import UsageError, storage_error
from wherry.integrations.containers.torch.writer import ArchivesWriter
from wherry.integrations.formats.dcp.folder import METADATA
from wherry.storage.folders import sync_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import Region, TensorSpec
    from wherry.formats.reader import Extent
    from wherry.formats.writer import Checks
    from wherry.integrations.formats.dcp.layout import DcpLayout
    from wherry.storage.stores import Location


class _ChunkSpan(NamedTuple):
    """The bytes of a span in one chunk: its key path, the span within it, and where the chunk begins in the tensor."""

    path: KeyPath
    inside: Span
    start: int


class _CutTensor:
    """Where the chunks of a tensor begin in its bytes."""

    def __init__(self, chunks: Sequence[TensorSpec]) -> None:
        self._paths = [one.path for one in chunks]
        self._ends = list(accumulate(one.nbytes for one in chunks))
        self._starts, self.nbytes = [0, *self._ends[:-1]], self._ends[-1]

    def crossed(self, where: Span) -> Iterator[_ChunkSpan]:
        """The chunks that have bytes of a span; of an empty one, the chunk in which it lies."""
        first = bisect_right(self._starts, where.start) - 1
        last = bisect_right(self._starts, max(where.stop - 1, where.start)) - 1
        for number in range(first, last + 1):
            start = self._starts[number]
            inside = Span(max(where.start, start) - start, min(where.stop, self._ends[number]) - start)
            yield _ChunkSpan(self._paths[number], inside, start)


class DcpWriter(ArchivesWriter):
    """A writer of the engine's protocol over the files of one folder."""

    def __init__(self, folder: Location, layout: DcpLayout, metadata: bytes) -> None:
        """Create the files; see ArchivesWriter.

        Args:
            folder: an existing local folder.
            layout: the layout of the checkpoint.
            metadata: the bytes of `.metadata`.
        """
        chunks = frozenset(one.path for rows in layout.cuts.values() for one in rows)
        super().__init__(folder, layout.files, chunks)
        self._cuts = {path: _CutTensor(rows) for path, rows in layout.cuts.items()}
        self._metadata = isal_zlib.compress(
            metadata, 1
        )  # that of very many tensors is large, and waits for long
        self._place = folder.join(METADATA)

    def place(self, path: KeyPath, where: Region | Span) -> int:
        """The offset of a span in its file; of a tensor that is cut, in the first one."""
        part = next(self._crossed(path, where), None)
        return super().place(path, where) if part is None else super().place(part.path, part.inside)

    def extents(self, path: KeyPath, where: Region | Span) -> tuple[Extent, ...] | None:
        """The byte ranges of a span, one in each chunk; see ArchivesWriter."""
        if path not in self._cuts:
            return super().extents(path, where)
        found = [
            super(DcpWriter, self).extents(part.path, part.inside) or ()
            for part in self._crossed(path, where)
        ]
        return tuple(chain.from_iterable(found)) or None

    def write(self, path: KeyPath, where: Region | Span, data: memoryview) -> None:
        """Write a span; see ArchivesWriter.

        Raises:
            UsageError: `where` is not a span of this tensor, or does not agree with the data.
            StorageError: the storage failed.
        """
        cut = self._cuts.get(path)
        if cut is None:
            super().write(path, where, data)
            return
        if not isinstance(where, Span) or where.nbytes != len(data):
            raise UsageError(f"{where} is not a span of {len(data)} bytes", path=render(path))
        if not 0 <= where.start <= where.stop <= cut.nbytes:
            raise UsageError(f"span {where} is not inside the tensor", path=render(path))
        for part in cut.crossed(where):
            at = part.start + part.inside.start - where.start
            super().write(part.path, part.inside, data[at : at + part.inside.nbytes])

    def stored(self, path: KeyPath, where: Region | Span) -> bool:
        """Whether a span is durable after a `sync`."""
        if path not in self._cuts:
            return super().stored(path, where)
        return all(
            super(DcpWriter, self).stored(part.path, part.inside) for part in self._crossed(path, where)
        )

    def checks(self, path: KeyPath, where: Span) -> Checks:
        """The CRCs of the pieces of a span, none of which lies in two chunks."""
        if path not in self._cuts:
            return super().checks(path, where)
        return [
            (first + part.start, last + part.start, value)
            for part in self._crossed(path, where)
            for first, last, value in super(DcpWriter, self).checks(part.path, part.inside)
        ]

    def restore(self, path: KeyPath, where: Span, checks: Checks) -> None:
        """Take up the CRCs of stored pieces."""
        if path not in self._cuts:
            super().restore(path, where, checks)
            return
        for part in self._crossed(path, where):
            start, stop = part.start + part.inside.start, part.start + part.inside.stop
            own = [
                (first - part.start, last - part.start, value)
                for first, last, value in checks
                if start <= first and last <= stop
            ]
            super().restore(part.path, part.inside, own)

    def close(self) -> None:
        """Close the files; see ArchivesWriter."""
        super().close()
        self._metadata = b""

    def finish(self) -> None:
        """Complete the files; write the metadata when everything else is durable."""
        super().finish()
        try:
            self._place.store.put(self._place.path, isal_zlib.decompress(self._metadata))
            if self._place.store.capabilities.local:
                sync_folder(Path(self._place.parent.path))
        except OSError as error:
            raise storage_error(error, self._place.uri) from error

    def _crossed(self, path: KeyPath, where: Region | Span) -> Iterator[_ChunkSpan]:
        """The chunks that have bytes of a span of a tensor; none of a tensor that is not cut."""
        cut = self._cuts.get(path)
        return iter(()) if cut is None or not isinstance(where, Span) else cut.crossed(where)
