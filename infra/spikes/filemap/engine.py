"""The engine: one pass over a part of a FileMap, that writes, hashes and records; a commit is a pass over what is left.

    sweep    pieces that are not done → batches → computed by threads → applied in map order by one → recorded
    commit   the records of all logs → sweeps until nothing is left → hash again what could not be hashed as it came →
             complete the files → read back → the target appears

Threads compute ahead as far as the budget allows; what they have computed is applied in map order, so a pack is
appended in its order without a rule of its own, parts become full one after another, and few of them wait.
A piece that needs facts that are not known is put off, and applied as soon as they are.
"""

from __future__ import annotations

import mmap
import threading
from bisect import bisect_left, bisect_right
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from infra.spikes.filemap.hashed import Hashed, Leaves
from infra.spikes.filemap.nouns import (
    Coded,
    Copied,
    Crc32,
    File,
    FileMap,
    Late,
    Literal,
    Pack,
    Part,
    Piece,
    Range,
    Raw,
    Segments,
    Sizes,
    pieces,
)
from infra.spikes.filemap.transform import bands, batches
from wherry.core import dtypes
from wherry.core.digest import weights_digest
from wherry.core.tensorspec import Region, Span, region_shape, region_within
from wherry.storage.direct import BLOCK
from wherry.store.crc import KINDS, combine
from wherry.store.store import Upload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from concurrent.futures import Future

    from infra.spikes.filemap.hashed import Side
    from infra.spikes.filemap.log import SignedLog
    from infra.spikes.filemap.nouns import Batch
    from infra.spikes.filemap.sinks import Sink
    from infra.spikes.filemap.transform import Transform
    from wherry.core.keypath import KeyPath

STEP = 8 << 20  # bytes of a piece and of a part


# ---- what is known ---------------------------------------------------------------------------------------------------


class Intervals:
    """Positions of a file, as few intervals as possible."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def add(self, start: int, stop: int) -> None:
        """Add [start, stop)."""
        first, last = bisect_left(self._stops, start), bisect_right(self._starts, stop)
        if first < last:
            start, stop = min(start, self._starts[first]), max(stop, self._stops[last - 1])
        self._starts[first:last], self._stops[first:last] = [start], [stop]

    def gaps(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """What is missing of [start, stop)."""
        for number in range(bisect_right(self._stops, start), len(self._starts)):
            if self._starts[number] >= stop:
                break
            if start < self._starts[number]:
                yield start, self._starts[number]
            start = self._stops[number]
        if start < stop:
            yield start, stop


class Facts:
    """The facts that pieces have left."""

    def __init__(self) -> None:
        self._crcs: dict[int, dict[int, tuple[int, int]]] = {}  # file → start → stop and CRC-32 of a piece
        self._stops: dict[int, set[int]] = {}
        self._sizes: dict[int, dict[int, int]] = {}  # file → number → stored size of a chunk
        self._known: dict[Crc32, int] = {}

    def add_crc(self, file: int, start: int, stop: int, crc: int) -> None:
        """Note the CRC-32 of a piece."""
        self._crcs.setdefault(file, {})[start] = (stop, crc)
        self._stops.setdefault(file, set()).add(stop)

    def add_sizes(self, file: int, first: int, sizes: Sequence[int]) -> None:
        """Note the stored sizes of chunks that follow one another."""
        self._sizes.setdefault(file, {}).update(enumerate(sizes, first))

    def crc32(self, need: Crc32) -> int | None:
        """See Known."""
        if need in self._known or need.stop not in self._stops.get(need.file, ()):
            return self._known.get(need)
        found, position, known = 0, need.start, self._crcs[need.file]
        while position < need.stop:
            if position not in known:
                return None
            stop, crc = known[position]
            found, position = combine(found, crc, stop - position), stop
        if position == need.stop:
            self._known[need] = found
        return self._known.get(need)

    def sizes(self, need: Sizes) -> list[int] | None:
        """See Known."""
        found = self._sizes.get(need.file, {})
        if len(found) != need.count:
            return None
        return [found[number] for number in range(need.count)]

    def has(self, need: Crc32 | Sizes) -> bool:
        """Whether a fact is known."""
        if isinstance(need, Sizes):
            return len(self._sizes.get(need.file, ())) == need.count
        return self.crc32(need) is not None

    def end(self, file: int, count: int) -> int:
        """Stored bytes of the first chunks of a pack."""
        found = self._sizes.get(file, {})
        return sum(found[number] for number in range(count))


@dataclass(slots=True)
class State:
    """All that records say; they join in any order, and again."""

    leaves: Leaves
    done: dict[int, Intervals] = field(default_factory=dict[int, Intervals])
    facts: Facts = field(default_factory=Facts)
    parts: list[Part] = field(default_factory=list[Part])
    uploads: dict[int, Upload] = field(default_factory=dict[int, Upload])

    def take(self, record: dict[str, Any]) -> None:
        """Take a record."""
        for file, start, stop in record["done"]:
            self.done.setdefault(file, Intervals()).add(start, stop)
        for row in record["crcs"]:
            self.facts.add_crc(*row)
        for row in record["sizes"]:
            self.facts.add_sizes(*row)
        self.leaves.take(record["hashed"])
        self.parts += [Part(*row) for row in record["parts"]]
        self.uploads |= {int(file): Upload(*row) for file, row in record["uploads"].items()}

    def left(self, part: Range) -> list[Range]:
        """What is not done of a range."""
        gaps = self.done.get(part.file, Intervals()).gaps(part.start, part.stop)
        return [Range(part.file, *gap) for gap in gaps]


# ---- the job ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Job:
    """What all processes of a conversion have in common.

    Attributes:
        file_map: of the target.
        transform: gives its bytes.
        budget: bytes of memory for what is in flight.
        group: bytes that are written between two records.
        threads: that compute.
        box_bytes: of a batch of chunks, at most.
        step: bytes of a piece and of a part, at most.
    """

    file_map: FileMap
    transform: Transform
    budget: int = 128 << 20
    group: int = 64 << 20
    threads: int = 2
    box_bytes: int = 16 << 20
    step: int = STEP
    specs: dict[Side, Any] = field(init=False)

    def __post_init__(self) -> None:
        """The tensors that are hashed: of the target only those that are not the source's bytes."""
        same, target = self.transform.same, self.transform.manifest.tensors
        own = {path: spec for path, spec in target.items() if path not in same}
        object.__setattr__(self, "specs", {"source": self.transform.sources, "target": own})

    def hashed_as(self, path: KeyPath) -> tuple[Side, KeyPath]:
        """As which tensor the bytes of a target tensor are hashed."""
        source = self.transform.same.get(path)
        return ("target", path) if source is None else ("source", source)

    @property
    def ranges(self) -> list[Range]:
        """All positions of all files."""
        return [Range(number, 0, file.length) for number, file in enumerate(self.file_map.files)]

    def state(self, logs: Iterable[SignedLog]) -> State:
        """What the records of some logs say."""
        state = State(Leaves(self.specs))
        for log in logs:
            for record in log.records:
                state.take(record)
        return state


class Computed(NamedTuple):
    """A piece with its bytes: as they are stored, or still to be encoded."""

    piece: Piece
    data: memoryview
    crc: int | None = None


class Buffers:
    """Memory that batches use again: fresh memory costs more than to fill it."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def take(self, nbytes: int) -> mmap.mmap:
        """Memory for so many bytes."""
        for number, memory in enumerate(self._free):
            if nbytes <= len(memory) <= 2 * nbytes:
                return self._free.pop(number)
        self._free.clear()
        return mmap.mmap(-1, max(nbytes, mmap.PAGESIZE))

    def give(self, memory: mmap.mmap) -> None:
        """Give memory back."""
        self._free.append(memory)


class Pass:
    """One sweep of a process over some ranges."""

    def __init__(self, job: Job, state: State, sink: Sink, log: SignedLog) -> None:
        self._job, self._state, self._sink, self._log = job, state, sink, log
        self._buffers = Buffers()
        self._late: list[Piece] = []
        self._applied: list[tuple[Range, int, int]] = []  # positions, stored bytes
        self._crcs: list[list[int]] = []
        self._ends: dict[int, int] = {}  # file → where the next chunk of a pack is stored
        self._written = 0
        self._hashed = Hashed(job.specs)
        self._swapping = threading.Lock()
        self._retired: list[Hashed] = []  # of earlier groups, in which threads still hash
        self._uploads: set[int] = set()

    def run(self, ranges: Iterable[Range]) -> int:
        """Do what is not done of some ranges; returns how many pieces were applied."""
        count = 0
        with ThreadPoolExecutor(self._job.threads) as pool:
            found = batches(self._ready(ranges), self._job.box_bytes)
            for batch, future in in_order(pool, self._compute, found, self._job.budget // 2):
                memory, computed = future.result()
                for piece, stored in self._encoded(pool, computed):
                    self._apply(piece, stored)
                    count += 1
                del batch, computed
                self._buffers.give(memory)
                count += self._render_late()
        self._record()
        return count

    def _ready(self, ranges: Iterable[Range]) -> Iterator[Piece]:
        for part in ranges:
            for gap in self._state.left(part):
                for piece in pieces(self._job.file_map, gap, self._job.step):
                    if isinstance(piece.segment, Late) and not self._is_known(piece.segment):
                        self._late.append(piece)
                    else:
                        yield piece

    def _is_known(self, late: Late) -> bool:
        return all(map(self._state.facts.has, late.needs))

    def _render_late(self) -> int:
        """Apply the pieces that were put off and whose facts are known now."""
        waiting, self._late = self._late, []
        ready: list[Piece] = []
        for piece in waiting:
            known = isinstance(piece.segment, Late) and self._is_known(piece.segment)
            (ready if known else self._late).append(piece)
        for piece in ready:
            self._apply(piece, self._bytes_of(piece))
        return len(ready)

    def _compute(self, batch: Batch) -> tuple[mmap.mmap, list[Computed]]:
        """The bytes of a batch, hashed; in a thread."""
        memory = self._buffers.take(sum(piece.within.nbytes for piece in batch.pieces))
        with self._swapping:
            hashed = self._hashed
            hashed.users += 1
        try:
            return memory, list(self._pieces_of(batch, memoryview(memory), hashed))
        finally:
            with self._swapping:
                hashed.users -= 1

    def _pieces_of(self, batch: Batch, view: memoryview, hashed: Hashed) -> Iterator[Computed]:
        if batch.region is not None:
            yield from self._box(batch, batch.region, view, hashed)
            return
        for piece in batch.pieces:
            data, view = view[: piece.within.nbytes], view[piece.within.nbytes :]
            if isinstance(piece.segment, Raw):
                span = shifted(piece.segment.span, piece.within)
                self._job.transform.fill_span(piece.segment.tensor, span, data, hashed)
                hashed.span(*self._job.hashed_as(piece.segment.tensor), span.start, data)
            else:
                data = self._bytes_of(piece)
            summed = self._job.file_map.checksums and not isinstance(piece.segment, Late)
            yield Computed(piece, data, KINDS["CRC-32"].of(data) if summed else None)

    def _box(self, batch: Batch, region: Region, view: memoryview, hashed: Hashed) -> Iterator[Computed]:
        """The chunks of a box: all are computed at once, and cut out of it."""
        first = batch.pieces[0].segment
        assert isinstance(first, Coded)
        shape = region_shape(region)
        nbytes = dtypes.canonical_size(first.dtype, int(np.prod(shape)))
        self._job.transform.fill_region(first.tensor, region, view[:nbytes], hashed)
        hashed.box(*self._job.hashed_as(first.tensor), region, view[:nbytes])
        array = np.frombuffer(view[:nbytes], "u1").reshape(*shape, -1)
        for piece in batch.pieces:
            assert isinstance(piece.segment, Coded)
            yield Computed(piece, padded(piece.segment, array[region_within(piece.segment.region, region)]))

    def _encoded(
        self, pool: ThreadPoolExecutor, computed: list[Computed]
    ) -> Iterator[tuple[Piece, memoryview]]:
        """Pieces with their stored bytes: chunks are encoded side by side, and come in order."""
        waiting: deque[tuple[Piece, Future[bytes]]] = deque()
        for piece, data, crc in computed:
            if isinstance(piece.segment, Coded):
                waiting.append((piece, pool.submit(piece.segment.codec.encode, data)))
                if len(waiting) > self._job.threads:
                    done, future = waiting.popleft()
                    yield done, memoryview(future.result())
                continue
            if crc is not None:
                self._state.facts.add_crc(*piece.range, crc)
                self._crcs.append([*piece.range, crc])
            yield piece, data
        for done, future in waiting:
            yield done, memoryview(future.result())

    def _bytes_of(self, piece: Piece) -> memoryview:
        return rendered(self._job, piece, self._state.facts)

    def _apply(self, piece: Piece, data: memoryview) -> None:
        """Write a piece, in map order but for those that were put off."""
        file, start, _stop = piece.range
        body = self._job.file_map.files[file].body
        if isinstance(body, Pack):
            offset = self._ends[file] if file in self._ends else self._state.facts.end(file, start)
            self._state.facts.add_sizes(file, start, [len(data)])
            self._ends[file] = offset + len(data)
            ends = piece.range.stop == len(body.chunks)
        else:
            offset, ends = start, isinstance(body, Late)
        self._sink.write(file, offset, data)
        if ends:
            self._sink.end(file, offset + len(data))
        self._applied.append((piece.range, offset, offset + len(data)))
        self._written += len(data)
        if self._written >= self._job.group:
            self._record()

    def _record(self) -> None:
        """Make durable what was applied, then say so. What is not durable yet is said later."""
        parts, self._written = self._sink.sync(), 0
        durable = [row for row in self._applied if self._sink.durable(row[0].file, *row[1:])]
        self._applied = [row for row in self._applied if not self._sink.durable(row[0].file, *row[1:])]
        done = Done(durable, self._job.file_map)
        with self._swapping:
            groups, self._hashed = [*self._retired, self._hashed], Hashed(self._job.specs)
            self._retired = [group for group in groups if group.users]  # what still comes is said again
        uploads = self._sink.uploads
        record = {
            "done": done.ranges(),
            "sizes": done.sizes(),
            "crcs": self._crcs,
            "hashed": [row for group in groups for row in group.rows()],
            "parts": [list(part) for part in parts],
            "uploads": {
                file: [upload.path, upload.key, upload.run]
                for file, upload in uploads.items()
                if file not in self._uploads
            },
        }
        if any(record.values()):
            self._log.append(record)
            self._uploads |= set(uploads)
            self._crcs = []
            self._state.take(record)


@dataclass(frozen=True, slots=True)
class Done:
    """Pieces that are durable, in the form of a record."""

    rows: list[tuple[Range, int, int]]
    file_map: FileMap

    def ranges(self) -> list[list[int]]:
        """Their positions, those that follow one another together."""
        found: list[list[int]] = []
        for (file, start, stop), _first, _last in sorted(self.rows):
            if found and found[-1][0] == file and found[-1][2] == start:
                found[-1][2] = stop
            else:
                found.append([file, start, stop])
        return found

    def sizes(self) -> list[list[Any]]:
        """The stored sizes of chunks in packs."""
        found: list[list[Any]] = []
        for (file, start, _stop), first, last in sorted(self.rows):
            if not isinstance(self.file_map.files[file].body, Pack):
                continue
            if found and found[-1][0] == file and found[-1][1] + len(found[-1][2]) == start:
                found[-1][2].append(last - first)
            else:
                found.append([file, start, [last - first]])
        return found


def in_order(
    pool: ThreadPoolExecutor, work: Callable[[Batch], Any], found: Iterable[Batch], budget: int
) -> Iterator[tuple[Batch, Future[Any]]]:
    """Work on batches in threads, as far ahead as the budget allows, and give them back in their order.

    What the caller works on counts until it asks for the next one.
    """
    waiting: deque[tuple[Batch, Future[Any]]] = deque()
    held = 0
    for batch in found:
        while waiting and held + batch.memory > budget:
            yield waiting[0]
            held -= waiting.popleft()[0].memory
        waiting.append((batch, pool.submit(work, batch)))
        held += batch.memory
    while waiting:
        yield waiting[0]
        waiting.popleft()


def rendered(job: Job, piece: Piece, facts: Facts) -> memoryview:
    """The bytes of a piece that no tensor has."""
    segment, within = piece.segment, piece.within
    if isinstance(segment, Literal):
        return memoryview(segment.data)[slice(*within)]
    if isinstance(segment, Copied):
        return memoryview(job.transform.read_member(segment.member, shifted(segment.span, within)))
    assert isinstance(segment, Late)
    data = memoryview(segment.render(facts))
    assert segment.nbytes in (None, len(data)), f"{len(data)} bytes were rendered of {segment.nbytes}"
    return data if segment.nbytes is None else data[slice(*within)]


def shifted(span: Span, within: Span) -> Span:
    """A part of a span, of which the bytes are counted from the beginning of the span."""
    return Span(span.start + within.start, span.start + within.stop)


def padded(chunk: Coded, array: np.ndarray) -> memoryview:
    """The bytes of a chunk, with zeros where it extends beyond its tensor."""
    size = array.shape[-1]
    if array.shape[:-1] != chunk.shape:
        whole = np.zeros((*chunk.shape, size), "u1")
        whole[tuple(slice(0, extent) for extent in array.shape)] = array
        array = whole
    return memoryview(np.ascontiguousarray(array).reshape(-1))


# ---- the commit ------------------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """What a commit has proved.

    Attributes:
        source: weights digest of the source.
        target: weights digest of the target.
        digests: key path → digest of each tensor of the target.
        again: bytes of tensors that were hashed again, because their runs are too short.
        swept: pieces that the commit had to write itself.
    """

    source: str
    target: str
    digests: dict[KeyPath, str]
    again: int
    swept: int


def work(job: Job, part: Iterable[Range], sink: Sink, log: SignedLog) -> None:
    """Do one slice, or what is left of it."""
    state = job.state([log])
    sink.resume(state.parts, state.uploads)
    Pass(job, state, sink, log).run(part)


def commit(job: Job, sink: Sink, own: SignedLog, others: Iterable[SignedLog]) -> Outcome:
    """Do what no worker has done, prove the whole and let it appear."""
    state = job.state([*others, own])
    sink.resume(state.parts, state.uploads)
    swept = 0
    while any(state.left(part) for part in job.ranges):
        count = Pass(job, state, sink, own).run(job.ranges)
        assert count, "a sweep has done nothing: facts need each other"
        swept += count
        sink.drop_waiting()
    again = _hash_again(job, state.leaves)
    sink.complete([_stored_size(file, number, state.facts) for number, file in enumerate(job.file_map.files)])
    _read_back(job, state, sink)
    sink.commit()
    source, target = state.leaves.digests("source"), state.leaves.digests("target")
    whole = target | {path: source[taken] for path, taken in job.transform.same.items()}
    return Outcome(weights_digest(source, "blake3"), weights_digest(whole, "blake3"), whole, again, swept)


def _stored_size(file: File, number: int, facts: Facts) -> int:
    if isinstance(file.body, Segments):
        return file.body.nbytes
    if isinstance(file.body, Pack):
        return facts.end(number, len(file.body.chunks))
    return len(file.body.render(facts))


def _hash_again(job: Job, leaves: Leaves) -> int:
    """Hash, in order, the tensors of which runs were too short to be hashed as they came."""
    nbytes = 0
    for side, path in list(leaves.open()):
        hasher, spec = leaves.restart(side, path), job.specs[side][path]
        for region, span in bands(spec):
            data = memoryview(bytearray(span.nbytes))
            if side == "source":
                job.transform.read_source(path, span, data)
            else:
                job.transform.fill_region(path, region, data, None)
            hasher.update(span.start, data)
        nbytes += spec.nbytes
    return nbytes


def _read_back(job: Job, state: State, sink: Sink) -> None:
    """Read every stored byte, and compare it with what was computed: leaves of tensors, all other bytes themselves.

    Raises:
        ValueError: they differ.
    """
    stored = Hashed(job.specs)
    for piece, data in _stored_pieces(job, state, sink):
        segment = piece.segment
        if isinstance(segment, Raw):
            stored.span(*job.hashed_as(segment.tensor), shifted(segment.span, piece.within).start, data)
        elif isinstance(segment, Coded):
            stored.box(*job.hashed_as(segment.tensor), segment.region, _decoded(segment, data))
        elif data != rendered(job, piece, state.facts):
            raise ValueError(f"{job.file_map.files[piece.range.file].name} differs from what was written")
    refused = {tuple(path) for _side, path, values in stored.rows() if values is None}
    for piece, data in _stored_pieces(job, state, sink) if refused else ():
        chunk = piece.segment
        if isinstance(chunk, Coded) and job.hashed_as(chunk.tensor)[1] in refused:
            _compare_chunk(job, chunk, _decoded(chunk, data))
    found = Leaves(job.specs)
    found.take(stored.rows())
    written = {job.hashed_as(path) for path in job.transform.manifest.tensors}
    for side, path in written:
        if path in refused:
            continue
        if found.of(side, path).leaves != state.leaves.of(side, path).leaves:
            raise ValueError(f"{path} differs from what was written")


def _stored_pieces(job: Job, state: State, sink: Sink) -> Iterator[tuple[Piece, memoryview]]:
    """Every piece with its stored bytes, in map order, valid until the next; storage is asked for a step at a time."""
    memory = mmap.mmap(-1, job.step)
    for part in job.ranges:
        body, offset = job.file_map.files[part.file].body, 0
        whole = _stored_size(job.file_map.files[part.file], part.file, state.facts)
        first, held = 0, memoryview(b"")
        sizes = state.facts.sizes(Sizes(part.file, part.stop)) if isinstance(body, Pack) else None
        for piece in pieces(job.file_map, part, job.step):
            size = whole if isinstance(body, Late) else piece.within.nbytes
            size = size if sizes is None else sizes[piece.range.start]
            if offset + size > first + len(held):
                first = offset // BLOCK * BLOCK  # so that memory is aligned like the file
                nbytes = min(max(offset + size, first + job.step), whole) - first
                memory = memory if len(memory) >= nbytes else mmap.mmap(-1, nbytes)
                held = memoryview(memory)[:nbytes]
                sink.read(part.file, first, held)
            yield piece, held[offset - first : offset - first + size]
            offset += size


def _decoded(chunk: Coded, data: memoryview) -> memoryview:
    """The elements of a stored chunk, without padding."""
    decoded = np.frombuffer(chunk.codec.decode(data, chunk.nbytes), "u1").reshape(*chunk.shape, -1)
    inner = tuple(slice(0, extent) for extent in region_shape(chunk.region))
    return memoryview(np.ascontiguousarray(decoded[inner]).reshape(-1))


def _compare_chunk(job: Job, chunk: Coded, data: memoryview) -> None:
    """Compare a chunk with what is computed again, where its runs are too short to be hashed."""
    expected = memoryview(bytearray(len(data)))
    job.transform.fill_region(chunk.tensor, chunk.region, expected, None)
    if data != expected:
        raise ValueError(f"a chunk of {chunk.tensor} differs from what was written")
