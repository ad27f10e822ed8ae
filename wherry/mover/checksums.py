"""What a pass computes of the bytes that it reads: the hashes of leaves, and the checksums of byte ranges.

A large model has a hundred thousand small tensors. Each is read whole and has one leaf, so `LeafTable` keeps only the
hash of that leaf. Every other tensor has a `LeafHasher`, which takes it in pieces.

`ContainerChecksums` verifies the checksums that a container records, while its bytes are read. Torch and npz archives
record a CRC-32 for each member, tensor bundles a CRC-32C for each tensor. The mover's fast path reads spans without the
container's own reader, so a flipped bit would be copied and get a valid digest. A reader that knows the checksum of a
range of a file reports it; every pass (converting, verifying, inspecting) then compares it once the whole range was
read. Parts that no tensor covers, or that a resumed run does not read again, are read here.

`PieceCrc` computes the CRC of a byte string whose pieces come in any order, from several threads, and more than
once. Pieces are kept per cell of 4 MiB; a piece that overlaps known pieces of a cell replaces them, so after a
repeated write the last bytes count. Parts that no piece covers (an earlier process wrote them) are read when the CRC of
the whole is computed. Where a container records the CRCs of parts of a tensor, no piece is in two of them.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from wherry.core.digest import HASH_BYTES, LEAF, LeafHasher, hash_function
from wherry.core.keypath import KeyPath
from wherry.core.tensorspec import Span, TensorSpec
from wherry.errors import CorruptError
from wherry.store.content import KINDS, combine

if TYPE_CHECKING:
    from wherry.formats.format import Extent, RangeChecksum
    from wherry.store.location import Location


class _LeafColumn(Mapping["KeyPath", "tuple[bytes, ...]"]):
    """The hashes of leaves by tensor; those of tensors of one leaf become tuples only when they are read."""

    __slots__ = ("_only", "_paths", "_rest")

    def __init__(
        self,
        paths: Collection[KeyPath],
        only: Mapping[KeyPath, bytes],
        rest: Mapping[KeyPath, tuple[bytes, ...]],
    ) -> None:
        self._paths, self._only, self._rest = paths, only, rest

    def __getitem__(self, path: KeyPath) -> tuple[bytes, ...]:
        rest = self._rest.get(path)
        return (self._only[path],) if rest is None else rest

    def get(self, path: KeyPath, default: Any = None) -> Any:
        """The hashes of a tensor's leaves; `default` if it is not known."""
        leaf = self._only.get(path)
        return self._rest.get(path, default) if leaf is None else (leaf,)

    def __contains__(self, path: object) -> bool:
        return path in self._only or path in self._rest

    def __iter__(self) -> Iterator[KeyPath]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


class LeafTable:
    """The leaves of tensors; used from several threads.

    Attributes:
        specs: the tensors by key path.
        algorithms: with which each leaf is hashed; see LeafHasher.
        equal: number of tensors that were read whole and whose only leaf is the expected one; nothing is kept of them.
    """

    __slots__ = ("_expected", "_hashers", "_lock", "_only", "algorithms", "equal", "specs")

    def __init__(
        self,
        specs: Mapping[KeyPath, TensorSpec],
        algorithms: tuple[str, ...],
        expected: Mapping[KeyPath, tuple[bytes, ...]] | None = None,
    ) -> None:
        """A table without any leaf.

        Args:
            specs: the tensors by key path.
            algorithms: with which each leaf is hashed.
            expected: key path → the hashes of the leaves, if the tensors are only compared with these.
        """
        self.specs = specs
        self.algorithms = algorithms
        self.equal = 0
        self._expected = expected
        self._only: dict[KeyPath, bytes] = {}  # of tensors of one leaf: its hashes, as LeafHasher has them
        self._hashers: dict[KeyPath, LeafHasher] = {}
        self._lock = threading.Lock()

    def hasher(self, path: KeyPath) -> LeafHasher:
        """The hasher of a tensor that comes in pieces; the same one for every caller."""
        known = self._hashers.get(path)
        if known is None:
            with self._lock:
                known = self._hashers.get(path)
                if known is None:
                    known = LeafHasher(self.specs[path], self.algorithms)
                    if path in self._only:
                        known.preset(0, self._only[path])
                    self._hashers[path] = known
        return known

    def hashers(self) -> Iterator[tuple[KeyPath, LeafHasher]]:
        """The tensors that come in pieces, each with its hasher."""
        yield from self._hashers.items()

    def take_whole(self, parts: Iterable[tuple[TensorSpec, memoryview]]) -> None:
        """Hash tensors of one leaf each, from all their bytes."""
        only, first, further = self._only, hash_function(self.algorithms[0]), self.algorithms[1:]
        expected, equal = self._expected, 0
        for spec, data in parts:
            leaf = first(data).digest()
            for algorithm in further:
                leaf += hash_function(algorithm)(data).digest()
            if expected is not None and expected.get(spec.path) == (leaf,):
                equal += 1
            else:
                only[spec.path] = leaf
        with self._lock:
            self.equal += equal

    def preset(self, path: KeyPath, leaves: Mapping[int, bytes]) -> None:
        """Set leaves' hashes from the journal of an earlier run; their bytes are not needed then."""
        if self.specs[path].nbytes <= LEAF and 0 in leaves:
            self._only[path] = leaves[0]
            return
        for leaf, digest in leaves.items():
            self.hasher(path).preset(leaf, digest)

    def known(self, path: KeyPath, span: Span) -> Mapping[int, bytes] | None:
        """The hashes of all leaves that a span touches; None while one of them is not complete."""
        leaf = self._only.get(path)
        return self._hashers[path].known(*span) if leaf is None else {0: leaf}

    def hashes(self, path: KeyPath, algorithm: str) -> tuple[bytes, ...] | None:
        """The hash of every leaf of a tensor by one of the algorithms; None if one is not complete."""
        leaf = self._only.get(path)
        if leaf is not None:
            if len(self.algorithms) == 1:
                return (leaf,)
            place = self.algorithms.index(algorithm) * HASH_BYTES
            return (leaf[place : place + HASH_BYTES],)
        known = self._hashers.get(path)
        if known is None:
            return None if self.specs[path].nbytes else ()
        return known.hashes(algorithm) if known.done() else None

    def is_complete(self, path: KeyPath) -> bool:
        """Whether every leaf of a tensor with bytes is hashed."""
        known = self._hashers.get(path)
        return path in self._only or (known is not None and known.done())

    def column(self, paths: Collection[KeyPath], algorithm: str) -> Mapping[KeyPath, tuple[bytes, ...]]:
        """The hashes of all leaves by one of the algorithms, of those tensors of which every leaf is complete.

        Args:
            paths: of the tensors; the keys are in this order.
            algorithm: one of the algorithms.
        """
        only = self._only if len(self.algorithms) == 1 else {}
        found = {path: self.hashes(path, algorithm) for path in paths if path not in only}
        rest = {path: leaves for path, leaves in found.items() if leaves is not None}
        gone = found.keys() - rest.keys()
        return _LeafColumn([path for path in paths if path not in gone], only, rest)

    def __contains__(self, path: KeyPath) -> bool:
        """Whether something of a tensor was hashed."""
        return path in self._only or path in self._hashers

    def __iter__(self) -> Iterator[KeyPath]:
        """The tensors of which something was hashed."""
        yield from self._only
        yield from (path for path in self._hashers if path not in self._only)

    def add(self, hashers: Mapping[KeyPath, LeafHasher]) -> None:
        """Take over hashers of more tensors."""
        self._hashers |= hashers

    def add_same(self, table: LeafTable, names: Mapping[KeyPath, KeyPath]) -> None:
        """Take over the complete leaves of tensors that another pass has hashed.

        Args:
            table: the leaves of that pass.
            names: key path here → key path there of the tensor with the same bytes.
        """
        for path, name in names.items():
            if name in table._only:
                self._only[path] = table._only[name]
            elif table.is_complete(name):
                self._hashers[path] = table._hashers[name]

    def joined(self, *tables: LeafTable) -> LeafTable:
        """The leaves of this pass and of others; those of a later one replace those of an earlier one."""
        found = LeafTable(self.specs, self.algorithms)
        for table in (self, *tables):
            found.extend(table)
        return found

    def extend(self, table: LeafTable) -> None:
        """Take over all leaves of another pass."""
        self._only |= table._only
        self._hashers |= table._hashers


class _WatchedRange(NamedTuple):
    location: Location
    spec: TensorSpec
    recorded: RangeChecksum
    crc: PieceCrc


class ContainerChecksums:
    """The byte ranges of one pass whose checksum is known; safe from several threads."""

    def __init__(self) -> None:
        self._watched: dict[tuple[str, int], _WatchedRange] = {}
        self._compared: set[tuple[str, int]] = set()
        self._lock = threading.Lock()

    def update(self, extents: tuple[Extent, ...], span: Span, data: memoryview, spec: TensorSpec) -> None:
        """Add the bytes of a span of a tensor.

        Raises:
            CorruptError: a range is complete and its checksum differs from the recorded one.
        """
        only = extents[0] if len(extents) == 1 else None
        if only and only.crc32 is not None and only.length == len(data) <= CELL and _crc(data) == only.crc32:
            return  # the whole range, as almost always where tensors are small
        position = 0
        for extent in extents:
            start, stop = max(span.start, position), min(span.stop, position + extent.length)
            recorded = extent.checksum if start < stop else None
            if recorded is not None:
                piece = data[start - span.start : stop - span.start]
                at = extent.offset + start - position - recorded.offset
                if len(piece) == recorded.length <= CELL:
                    _require(recorded, KINDS[recorded.kind].of(piece), extent.location, spec)
                else:
                    self._take(extent, recorded, spec, at, piece)
            position += extent.length

    def finish(self) -> None:
        """Read the missing parts of incomplete ranges, and compare their checksums.

        Raises:
            CorruptError: a checksum differs from the recorded one, or a file is truncated.
            StorageError: the storage failed.
        """
        for key, watched in list(self._watched.items()):
            self._compare(watched)
            with self._lock:
                self._watched.pop(key, None)

    def _take(
        self, extent: Extent, recorded: RangeChecksum, spec: TensorSpec, start: int, piece: memoryview
    ) -> None:
        key = (extent.file, recorded.offset)
        with self._lock:
            if key in self._compared:
                return  # tensors may share their bytes
            watched = self._watched.get(key)
            if watched is None:
                crc = PieceCrc(recorded.length, recorded.kind)
                watched = self._watched[key] = _WatchedRange(extent.location, spec, recorded, crc)
        watched.crc.update(start, piece)
        with self._lock:
            complete = not watched.crc.left and key not in self._compared
            if complete:
                self._compared.add(key)
        if complete:
            self._compare(watched)
            with self._lock:
                self._watched.pop(key, None)

    def _compare(self, watched: _WatchedRange) -> None:
        recorded, location = watched.recorded, watched.location
        found = watched.crc.value(lambda start, stop: _read(location, recorded.offset, start, stop))
        _require(recorded, found, location, watched.spec)


_crc = KINDS["CRC-32"].of


def _require(recorded: RangeChecksum, found: int, location: Location, spec: TensorSpec) -> None:
    if found != recorded.value:
        raise CorruptError(
            f"checksum mismatch: expected {recorded.kind} {recorded.value:08x}, got {found:08x}",
            uri=location.uri,
            path=spec.name,
            cure="copy the checkpoint again, or use another step",
        )


def _read(location: Location, offset: int, start: int, stop: int) -> memoryview:
    data = location.read(offset + start, offset + stop)
    if len(data) != stop - start:
        raise CorruptError(
            f"the file is truncated: expected {offset + stop} bytes or more, got {offset + start + len(data)}",
            uri=location.uri,
        )
    return memoryview(data)


CELL = 4 << 20


class PieceCrc:
    """The CRC of one string of known length.

    Attributes:
        size: its length.
        left: how many of its bytes no piece covers.
    """

    def __init__(self, size: int, kind: str = "CRC-32", ends: Iterable[int] = ()) -> None:
        """A string of which no piece is known.

        Args:
            size: its length.
            kind: of the CRC.
            ends: of its parts whose CRC can be requested, in order.
        """
        self.size = self.left = size
        self._kind = kind
        self._ends = list(ends)
        self._lock = threading.Lock()
        self._cells: dict[int, dict[int, tuple[int, int]]] = {}  # cell → start → (stop, CRC)

    def update(self, start: int, data: memoryview) -> None:
        """Add the bytes [start, start + len(data))."""
        position, stop = start, start + len(data)
        while position < stop:
            part = self._ends[(at := bisect_right(self._ends, position)) : at + 1]
            end = min((position // CELL + 1) * CELL, stop, *part)
            self._keep(position, end, KINDS[self._kind].of(data[position - start : end - start]))
            position = end

    def known(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Start, stop and CRC of the pieces within [start, stop)."""
        with self._lock:
            cells = [self._cells.get(cell, {}) for cell in range(start // CELL, -(-stop // CELL))]
            return [
                (first, last, value)
                for pieces in cells
                for first, (last, value) in sorted(pieces.items())
                if start <= first and last <= stop
            ]

    def take(self, pieces: Iterable[tuple[int, int, int]]) -> None:
        """Take up pieces that `known` has returned for the same string."""
        for start, stop, value in pieces:
            self._keep(start, stop, value)

    def _keep(self, start: int, stop: int, value: int) -> None:
        with self._lock:
            pieces = self._cells.setdefault(start // CELL, {})
            for old in [old for old, (end, _) in pieces.items() if old < stop and start < end]:
                self.left += pieces.pop(old)[0] - old
            pieces[start] = (stop, value)
            self.left -= stop - start

    def value(self, read: Callable[[int, int], memoryview], part: Span | None = None) -> int:
        """The CRC of the whole string, or of a part of it.

        Args:
            read: returns bytes [start, stop) that no piece covers; at most one cell at a time.
            part: one of the parts whose ends were given.
        """
        total, (first, last) = 0, part or (0, self.size)
        for base in range(first // CELL * CELL, last, CELL):
            position, end = max(base, first), min(base + CELL, last)
            pieces = self._cells.get(base // CELL, {})
            while position < end:
                if position not in pieces:
                    stop = min((start for start in pieces if position < start < end), default=end)
                    self._keep(position, stop, KINDS[self._kind].of(read(position, stop)))
                    pieces = self._cells[base // CELL]
                stop, value = pieces[position]
                total = combine(total, value, stop - position, self._kind)
                position = stop
        return total
