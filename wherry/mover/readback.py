"""Read-back in the same breath: durable parts of a target are read from storage while later parts are written.

A part is read after the group commit that made it durable, past the page cache, so that it is the storage that answers;
its leaves are hashed again and compared with those of the source. So no second pass over the target is needed at the
end, storage reads while processors hash and the other way round, and a mismatch ends the run at once.

A store has no files that grow: there, a part waits until its object is complete. Parts are read then
while later objects are being sent, and those of objects that the end of the pass completes follow at once.

Parts that other processes have read back (`ReadEvidence`) are not read again, if an earlier run has written them and
their files have not changed. What follows holds for them too.

Two things remain for the end, and `proved` does both. A block of a file that holds the end of one part and the
beginning of another is written again after the first part was compared, so the bytes of such blocks are compared once
more. And the metadata of the finished container must refer to these bytes: the byte ranges that were read must be those
that the target's reader names, and so must be the codec of encoded chunks. A tensor for which anything differs, that
only its reader can decode, or that is small, is read again by the reader.

A box is a chunk that is no run of the tensor's bytes. It is read as it is stored, and hashed as when it was written:
its leaves are complete when others have been read. That needs the places of chunks that are stored as they are.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from itertools import accumulate, chain
from typing import TYPE_CHECKING, NamedTuple, Protocol

from wherry.core.digest import (
    HASH_BYTES,
    LEAF,
    LeafHasher,
    LeafValues,
    hashes_boxes,
    leaf_count,
    leaves_touched,
    new_hash,
)
from wherry.core.keypath import KeyPath
from wherry.core.lazy_dataclass import dataclass
from wherry.core.tensorspec import Region, Span, TensorSpec
from wherry.errors import DamagedError, MismatchError
from wherry.formats.format import Access, Chunked, EncodedChunk, Extent, Stored
from wherry.mover.checksums import LeafTable, PieceCrc
from wherry.mover.move import SMALL, Move, begins_at, cells, region_span
from wherry.mover.read import place, read_span, region_bytes
from wherry.store.location import Location
from wherry.store.open_file import BLOCK, cut
from wherry.target.journal import Checks, DurableMove

if TYPE_CHECKING:
    from wherry.formats.checkpoint import Checkpoint


class WrittenBytes(Protocol):
    """Where the bytes of a target are: of the files that its writer writes, or of those that workers have made."""

    def extents(self, path: KeyPath, where: Region | Span) -> tuple[Extent, ...] | None:
        """The byte ranges that hold the canonical bytes of a span or chunk; None if they are encoded."""
        ...

    def encoded(self, path: KeyPath, where: Region) -> EncodedChunk | None:
        """A chunk that is encoded in one byte range; None for other chunks."""
        ...

    def lengths(self, spec: TensorSpec) -> Sequence[int]:
        """Bytes of each byte range of a tensor; none of one that is encoded or written on a grid."""
        ...


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A durable part of a target.

    Attributes:
        move: the move that wrote it.
        target: the tensor that it is a part of.
        extents: the byte ranges of files that hold it, as it is or encoded.
        chunks: the chunks to decode, if it is encoded.
        boxes: the chunks of a box, one of each byte range; empty if the part is a run of bytes.
    """

    move: Move
    target: TensorSpec
    extents: tuple[Extent, ...]
    chunks: tuple[EncodedChunk, ...] = ()
    boxes: tuple[Region, ...] = ()

    def hash_into(self, hasher: LeafHasher, data: memoryview) -> None:
        """Hash the bytes of the part; a box that does not count leaves the tensor without a digest."""
        if not self.boxes:
            hasher.update(self.move.span.start, data)
        at = 0
        for box, extent in zip(self.boxes, self.extents, strict=False):
            hasher.update_box(box, data[at : at + extent.length])
            at += extent.length

    @property
    def leaves(self) -> range:
        """The leaves that have bytes of the part, and those between."""
        if self.boxes and self.move.region is not None:
            return leaves_touched(self.target, self.move.region)
        return range(self.move.span.start // LEAF, leaf_count(self.move.span.stop))

    @property
    def place(self) -> int:
        """The offset in its file of the first byte that is read."""
        return self.extents[0].offset if self.extents else 0

    @property
    def chunk_memory(self) -> int:
        """Bytes of memory for a stored chunk, in whole blocks."""
        return max((-(-chunk.extent.length // BLOCK) * BLOCK for chunk in self.chunks), default=0)

    @property
    def memory(self) -> int:
        """Bytes of memory for its stored chunk and its canonical bytes."""
        return self.chunk_memory + self.move.span.nbytes

    @property
    def extra(self) -> int:
        """Bytes of other memory that decoding takes."""
        return max((chunk.memory for chunk in self.chunks), default=0)


@dataclass(frozen=True, slots=True)
class FilesBeingWritten:
    """When files of a target can be read that is not finished: on a disk always, in a store once they are objects.

    Attributes:
        readable: whether the file at a location can be read.
        settle: waits until every file can be of which all bytes were written.
        least: bytes of a tensor that is read back by itself; smaller ones are read in batches at the end.
    """

    readable: Callable[[Location], bool] = lambda _location: True
    settle: Callable[[], None] = lambda: None
    least: int = SMALL + 1


class SharedBlock(NamedTuple):
    """The bytes of a part in a block that it shares with others: where they are, and their hash."""

    extent: Extent
    digest: bytes


@dataclass(frozen=True, slots=True)
class ReadEvidence:
    """The parts of a target that other processes have read back, and found to be what was read from the source.

    Attributes:
        moves: source key path and span of each part → the checksums of what was read; see `MapWriter.checks`.
        leaves: source key path → number of each leaf that is in such parts alone → its raw hash.
        values: source key path → leaf and values of what such parts have of the other leaves, of boxes.
        blocks: source key path → the blocks that these parts share with others.
        changed: the paths of files that are no longer as they were read.
    """

    moves: Mapping[tuple[KeyPath, Span], Checks] = field(
        default_factory=dict["tuple[KeyPath, Span]", "Checks"]
    )
    leaves: Mapping[KeyPath, Mapping[int, bytes]] = field(
        default_factory=dict["KeyPath", "Mapping[int, bytes]"]
    )
    values: Mapping[KeyPath, Sequence[tuple[int, bytes]]] = field(
        default_factory=dict["KeyPath", "Sequence[tuple[int, bytes]]"]
    )
    blocks: Mapping[KeyPath, Sequence[SharedBlock]] = field(
        default_factory=dict["KeyPath", "Sequence[SharedBlock]"]
    )
    changed: Callable[[], frozenset[str]] = frozenset

    def nbytes(self, sources: Collection[KeyPath]) -> int:
        """Bytes of the parts of some tensors."""
        return sum(span.nbytes for source, span in self.moves if source in sources)


@dataclass(slots=True)
class _ReadTensor:
    """The parts of one tensor that were read back, here and by other processes.

    Attributes:
        hasher: its leaves.
        crc: the checksum of what was read, if it must be known.
        blocks: those that its parts share with others.
        parts: those that were read.
    """

    hasher: LeafHasher
    crc: PieceCrc | None
    blocks: list[SharedBlock]
    parts: list[StoredPart] = field(default_factory=list[StoredPart])


@dataclass(slots=True)
class ReadBack:
    """The parts of one target that were read back, or wait for it; used from several threads.

    Attributes:
        written: where the bytes of the target are.
        targets: source key path → target tensor.
        uri: of the target, for errors.
        files: when they can be read.
        with_checksums: sources of which an earlier run, or a worker, has computed checksums; those that the container
            records are compared with the bytes that are read.
        evidence: what other processes have read back.
        algorithms: with which the leaves of the source are hashed; by default, boxes are left to the reader.
    """

    written: WrittenBytes
    targets: Mapping[KeyPath, TensorSpec]
    uri: str
    files: FilesBeingWritten = FilesBeingWritten()
    with_checksums: set[KeyPath] = field(default_factory=set["KeyPath"])
    evidence: ReadEvidence = ReadEvidence()
    algorithms: tuple[str, ...] = ()
    _waiting: deque[StoredPart] = field(default_factory=deque["StoredPart"])
    _held: dict[Location, list[StoredPart]] = field(
        default_factory=lambda: defaultdict["Location", "list[StoredPart]"](list)
    )  # parts of files that cannot be read yet
    _tensors: dict[KeyPath, _ReadTensor] = field(default_factory=dict["KeyPath", _ReadTensor])
    _left: set[KeyPath] = field(
        default_factory=set["KeyPath"]
    )  # tensors in boxes that are left to the reader
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, moves: Iterable[Move]) -> None:
        """Note parts that are durable.

        Left to the reader are parts that it alone can decode, and small tensors: they cost more to read by themselves
        than in batches at the end.
        """
        for move in moves:
            part = self._readable_part(move)
            if part is not None:
                self._queue(part)

    def take_up(self, move: Move, leaves: LeafTable) -> None:
        """Note a part that an earlier run has written: it is read, unless another process has read it back.

        Args:
            move: that wrote it.
            leaves: of the source, as far as they are hashed; of boxes that an earlier run wrote they may not be known.
        """
        if move.box and not leaves.is_complete(move.source):
            self._left.add(move.source)
        part = self._readable_part(move)
        if part is None:
            return
        if (move.source, move.span) not in self.evidence.moves:
            self._queue(part)
            return
        with self._lock:
            tensor = self._tensor(part)
            if tensor.crc is not None:
                tensor.crc.take(self.evidence.moves[move.source, move.span])
            tensor.parts.append(part)

    def parts(self) -> Iterator[StoredPart]:
        """Take the parts that wait to be read, and can be."""
        with self._lock:
            opened = [place for place in self._held if self.files.readable(place)]
            parts = [part for place in opened for part in self._held.pop(place)]
        for part in parts:
            self._queue(part)
        while self._waiting:
            try:
                yield self._waiting.popleft()
            except IndexError:  # another thread took the last one
                return

    def _queue(self, part: StoredPart) -> None:
        """Let a part wait until every file that it is in can be read."""
        closed = next((one.location for one in part.extents if not self.files.readable(one.location)), None)
        if closed is None:
            self._waiting.append(part)
        else:
            with self._lock:
                self._held[closed].append(part)

    def read(self, part: StoredPart, memory: memoryview) -> memoryview:
        """Read a part from storage, and decode it if it is encoded.

        Args:
            part: the part.
            memory: as much as the part asks for.

        Returns:
            its canonical bytes, in this memory.

        Raises:
            MismatchError: a file is too short, or a chunk cannot be decoded.
            StorageError: the storage failed.
        """
        try:
            return self._read_part(part, memory)
        except DamagedError as error:
            raise self._differs(part, error.what) from error

    def _read_part(self, part: StoredPart, memory: memoryview) -> memoryview:
        stored, data = memory[: part.chunk_memory], memory[part.chunk_memory :]
        if not part.chunks:
            read_span(part.extents, Span(0, len(data)), data, part.target, straight=True)
            self._share(part, part.extents, data)
            return data
        first = part.move.span.start

        def write(piece: memoryview, offset: int) -> None:
            data[offset - first : offset - first + len(piece)] = piece

        for chunk in part.chunks:
            held = stored[: chunk.extent.length]
            read_span((chunk.extent,), Span(0, len(held)), held, part.target, straight=True)
            self._share(part, (chunk.extent,), held)
            for block in chunk.decode(held):
                place(part.target, block.region, block.pieces, write)
        return data

    def _share(self, part: StoredPart, extents: tuple[Extent, ...], data: memoryview) -> None:
        """Note the bytes before the first whole block of each extent and after its last one."""
        if not extents[0].location.store.capabilities.local:
            return  # an object is not written again
        algorithm = self.algorithms[0]
        shared: list[SharedBlock] = []
        position = 0
        for extent in extents:
            parts = cut(extent.offset, extent.length)
            for start, stop in ((parts.start, parts.body), (parts.tail, parts.stop)):
                if start < stop:
                    at = position + start - extent.offset
                    digest = new_hash(algorithm, data[at : at + stop - start]).digest()
                    shared.append(SharedBlock(Extent(extent.location, start, stop - start), digest))
            position += extent.length
        with self._lock:
            self._tensor(part).blocks.extend(shared)

    def hash(self, part: StoredPart, data: memoryview) -> LeafHasher:
        """Hash a part that was read; gives what was hashed of its tensor."""
        with self._lock:
            tensor = self._tensor(part)
            tensor.parts.append(part)
        part.hash_into(tensor.hasher, data)
        if tensor.crc is not None:
            tensor.crc.update(part.move.span.start, data)
        return tensor.hasher

    def compare(self, part: StoredPart, data: memoryview, expected: LeafHasher) -> None:
        """Hash a part that was read, and compare its leaves with those of the source.

        Raises:
            MismatchError: they differ; tensor and leaf are named.
        """
        own = self.hash(part, data)
        for leaf in part.leaves:
            found, wanted = own.leaves[leaf], expected.leaves[leaf]
            if found is None:
                continue
            if part.boxes and wanted is None:  # when it was written, a box did not count
                self._left.add(part.move.source)
            elif found != (wanted or b"")[:HASH_BYTES]:
                raise self._differs(part, f"first difference in leaf {leaf}")

    def _differs(self, part: StoredPart, reason: str) -> MismatchError:
        return MismatchError(
            f"read-back differs from what was written ({reason})",
            uri=self.uri,
            path=part.target.name,
            cure="check the storage; nothing was committed",
        )

    def proved(self, written: Checkpoint) -> set[KeyPath]:
        """The target's tensors of which every byte was compared, and which its reader reads from those same bytes.

        Args:
            written: the finished target, opened.
        """
        changed = self.evidence.changed()
        return {
            self.targets[source].path
            for source, tensor in self._tensors.items()
            if tensor.hasher.done()
            and source not in self._left
            and not (
                changed and any(one.location.path in changed for part in tensor.parts for one in part.extents)
            )
            and self._same_blocks(source, tensor)
            and self._same_bytes(source, tensor, written)
        }

    def moves_read(self) -> Iterator[tuple[DurableMove, LeafValues | None]]:
        """The moves that were hashed with all of their leaves; of boxes, with what was hashed of the tensor."""
        for source, tensor in self._tensors.items():
            hasher, crc = tensor.hasher, tensor.crc
            values = hasher.values() if any(part.boxes for part in tensor.parts) else None
            for part in tensor.parts:
                span = part.move.span
                if part.boxes:
                    yield DurableMove(source, span, {}), values
                elif (leaves := hasher.known(*span)) is not None:
                    yield DurableMove(source, span, leaves, tuple(crc.known(*span) if crc else ())), None

    def _tensor(self, part: StoredPart) -> _ReadTensor:
        """The read parts of a part's tensor, with the evidence of other processes; the caller has the lock."""
        source = part.move.source
        known = self._tensors.get(source)
        if known is None:
            hasher, crc = LeafHasher(part.target, self.algorithms[:1]), None
            for leaf, digest in self.evidence.leaves.get(source, {}).items():
                hasher.preset(leaf, digest)
            for leaf, values in self.evidence.values.get(source, ()):
                hasher.take_values(leaf, values)
            if source in self.with_checksums:
                crc = PieceCrc(part.target.nbytes, ends=accumulate(self.written.lengths(part.target)))
            known = _ReadTensor(hasher, crc, list(self.evidence.blocks.get(source, ())))
            self._tensors[source] = known
        return known

    def _same_blocks(self, source: KeyPath, tensor: _ReadTensor) -> bool:
        """Whether the blocks that were written again still hold what was compared."""
        block, algorithm = memoryview(bytearray(BLOCK)), self.algorithms[0]
        for extent, digest in tensor.blocks:
            held = block[: extent.length]
            read_span((extent,), Span(0, extent.length), held, self.targets[source])
            if new_hash(algorithm, held).digest() != digest:
                return False
        return True

    def shared(self) -> Iterator[tuple[KeyPath, SharedBlock]]:
        """The blocks that a part which was read shares with another part, with the part's source key path."""
        for source, tensor in self._tensors.items():
            for row in tensor.blocks:
                yield source, row

    def _readable_part(self, move: Move) -> StoredPart | None:
        """The part of a move; None if it is left to the reader."""
        target = self.targets[move.source]
        if target.nbytes < self.files.least:
            return None
        return self._box(move, target) if move.box else self._part(move, target)

    def _box(self, move: Move, target: TensorSpec) -> StoredPart | None:
        if move.source in self._left or move.region is None or target.chunks is None:
            return None
        boxes = tuple(cells(move.region, target.chunks))
        found = [self.written.extents(target.path, box) or () for box in boxes]
        if not all(
            len(extents) == 1 and hashes_boxes(target, box, self.algorithms)
            for box, extents in zip(boxes, found, strict=True)
        ):
            self._left.add(move.source)
            return None
        return StoredPart(move, target, tuple(chain.from_iterable(found)), boxes=boxes)

    def _part(self, move: Move, target: TensorSpec) -> StoredPart | None:
        if target.chunks is None or move.region is None:
            extents = self.written.extents(target.path, move.span) if target.chunks is None else None
            return None if extents is None else StoredPart(move, target, extents)
        regions = list(cells(move.region, target.chunks))
        # Chunks that are stored as they are and are, one after the other, the bytes of the move.
        found = (
            [self.written.extents(target.path, region) for region in regions] if is_run(target, move) else []
        )
        known = [extents for extents in found if extents is not None]
        if known and len(known) == len(regions):
            return StoredPart(move, target, tuple(chain.from_iterable(known)))
        chunks = tuple(filter(None, (self.written.encoded(target.path, region) for region in regions)))
        if len(chunks) < len(regions):
            return None
        return StoredPart(move, target, tuple(chunk.extent for chunk in chunks), chunks)

    def _same_bytes(self, source: KeyPath, tensor: _ReadTensor, written: Checkpoint) -> bool:
        spec = written.manifest.tensors[self.targets[source].path]
        parts = sorted(tensor.parts, key=lambda part: part.move.span.start)
        access = written.reader.access(spec)
        if any(part.boxes for part in parts) and not isinstance(access, Stored):
            return all(_same_boxes(part, spec, access) for part in parts)
        if chunks := [chunk for part in parts for chunk in part.chunks]:
            return _are_decoded(chunks, spec, access)
        ours = [extent for part in parts for extent in part.extents]
        return (
            isinstance(access, Stored)
            and all(
                begins_at(spec, box, region_span(spec, box).start) for part in parts for box in part.boxes
            )
            and _ranges(access.extents) == _ranges(ours)
            and self._same_checksums(source, tensor, access.extents)
        )

    def _same_checksums(self, source: KeyPath, tensor: _ReadTensor, raw: tuple[Extent, ...]) -> bool:
        """Whether the CRCs that the container records are those of the written bytes."""
        recorded = [extent.crc32 for extent in raw if extent.crc32 is not None]
        target = self.targets[source]
        if recorded and (crc := tensor.crc):
            start = 0
            for extent in raw:
                part = Span(start, start + extent.length)
                found = crc.value(lambda _start, _stop: memoryview(b""), part)  # every byte was read
                if extent.crc32 not in (None, found):
                    return False
                start += extent.length
            return True
        whole = self.written.extents(target.path, Span(0, target.nbytes)) if recorded else ()
        return recorded == [extent.crc32 for extent in whole or ()]


def _same_boxes(part: StoredPart, spec: TensorSpec, access: Access) -> bool:
    """Whether the chunks of a box of the finished target are where they were read back, as they are."""
    if not isinstance(access, Chunked) or access.decoder is not None:
        return False
    found = [(access.place(box), region_bytes(spec, box)) for box in part.boxes]
    known = [extent._replace(length=nbytes) for extent, nbytes in found if extent is not None]
    return len(known) == len(found) and _ranges(known) == _ranges(part.extents)


def _are_decoded(chunks: Sequence[EncodedChunk], spec: TensorSpec, access: Access) -> bool:
    """Whether chunks are all those of a tensor of the finished target, and decoded alike."""
    if not isinstance(access, Chunked) or access.decoder is None:
        return False
    found = [access.place(cell) for cell in cells(spec.whole, access.grid)]
    known = [extent for extent in found if extent is not None]
    keys = {access.decoder.key, *(chunk.codec for chunk in chunks)}
    return len(keys) == 1 and _places(known) == _places(chunk.extent for chunk in chunks)


def is_run(target: TensorSpec, move: Move) -> bool:
    """Whether the chunks of a move are, one after the other, a run of the tensor's canonical bytes."""
    if move.box:
        return False
    if target.chunks is None or move.region is None:
        return True
    regions, at = list(cells(move.region, target.chunks)), move.span.start
    if len(regions) == 1:
        return True
    for region in regions:
        if not begins_at(target, region, at):
            return False
        at = region_span(target, region).stop
    return True


def _places(extents: Iterable[Extent]) -> list[tuple[str, int, int]]:
    """Extents as (path, offset, length), each by itself."""
    return [(one.location.path, one.offset, one.length) for one in extents]


def _ranges(extents: Iterable[Extent]) -> list[tuple[str, int, int]]:
    """Extents as (path, start, stop), adjacent ones joined."""
    joined: list[tuple[str, int, int]] = []
    for extent in extents:
        path, start, stop = extent.location.path, extent.offset, extent.offset + extent.length
        if joined and joined[-1][0] == path and joined[-1][2] == start:
            joined[-1] = (path, joined[-1][1], stop)
        elif extent.length:
            joined.append((path, start, stop))
    return joined
