"""groups: the pass over views of a source, which also computes the digests of the source's own tensors.

Where a view's tensor has all bytes of a source's, both have the same leaves. Otherwise the regions that a view reads
are hashed as pieces of the source's leaves; where several processes share the moves, each has a part of these, and
gives the values of its chunks to the others. Tensors that cannot be hashed in this way are read a second time: those
with short runs, with leaves of another algorithm than BLAKE3, or with a checksum in their container, and all tensors
where there are no kernels. Both reads are done group by group: some source tensors, and the target tensors that are
made of them. So the data that was decoded or read for one is still available for the other, and files of decoded
tensors are removed as soon as their group is done: reused memory pages cost a tenth of fresh ones.

Targets in several layouts are carried in one pass: each group is carried into all of them before the next. What one of
them has decoded, or fetched from a remote store, is there for the others; what one has read from a local file, the page
cache has, unless a group is larger than the cache. The first layout hashes the source's tensors. An error of a
transform fails the targets of its layout.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from types import TracebackType
from typing import NamedTuple, Self, TypeAlias

from wherry.core import threads
from wherry.core.digest import LeafValues
from wherry.core.keypath import KeyPath
from wherry.core.progress import Meter, OnProgress
from wherry.core.tensorspec import TensorSpec
from wherry.core.threads import StoppedError, Task
from wherry.errors import WherryError
from wherry.formats.checkpoint import Checkpoint
from wherry.formats.format import Contents, ContentsOver
from wherry.mover.carrier import Carrier, digest_moves
from wherry.mover.checksums import LeafTable
from wherry.mover.decode import DecodedReader
from wherry.mover.hashing import Hashes
from wherry.mover.move import JointMoves
from wherry.mover.source import Source
from wherry.transform.view import View

GROUP_BYTES = 256 << 20  # bytes of source tensors; a larger tensor forms its own group
KEPT_BYTES = 8 << 20  # limit of bytes decoded into memory, for each thread


# A tensor of a layout: the number of the layout, and the key path there.
LaidOut: TypeAlias = tuple[int, KeyPath]


class MoveGroup(NamedTuple):
    """Source tensors, and all target tensors that are made only of them."""

    sources: list[KeyPath]
    targets: list[LaidOut]


def groups(
    needs: Mapping[LaidOut, Collection[KeyPath]], sizes: Mapping[KeyPath, int], limit: int = GROUP_BYTES
) -> Iterator[MoveGroup]:
    """Group connected sources and targets, in the order of the targets; small groups are joined up to a limit.

    Args:
        needs: target → the sources of which it is made.
        sizes: source → bytes; sources without a target come last.
        limit: bytes of a joined group.
    """
    held, room = MoveGroup([], []), limit
    for one in _connect(needs, sizes):
        nbytes = sum(sizes[path] for path in one.sources)
        if held.sources and nbytes > room:
            yield held
            held, room = MoveGroup([], []), limit
        held.sources.extend(one.sources)
        held.targets.extend(one.targets)
        room -= nbytes
    if held.sources or held.targets:
        yield held


def _connect(
    needs: Mapping[LaidOut, Collection[KeyPath]], sizes: Mapping[KeyPath, int]
) -> Iterator[MoveGroup]:
    head: dict[KeyPath, KeyPath] = {path: path for path in sizes}

    def first(path: KeyPath) -> KeyPath:
        while head[path] != path:
            head[path] = path = head[head[path]]
        return path

    for taken in needs.values():
        ends = [first(path) for path in taken]
        for end in ends[1:]:
            head[first(end)] = first(ends[0])
    found: dict[KeyPath | None, MoveGroup] = {}
    for target, taken in needs.items():
        key = first(next(iter(taken))) if taken else None
        found.setdefault(key, MoveGroup([], [])).targets.append(target)
    for source in sizes:
        found.setdefault(first(source), MoveGroup([], [])).sources.append(source)
    yield from found.values()


class _Stage:
    """The tasks of a group; when all were handed out and are done, their data is released."""

    def __init__(self, over: Callable[[], None]) -> None:
        self._over = over
        self._open = 1  # counts the handing out itself
        self._lock = threading.Lock()

    def counted(self, tasks: Iterable[Task]) -> Iterator[Task]:
        """Yield the tasks and count them: the stage is not over before they are done."""
        for task in tasks:
            with self._lock:
                self._open += 1
            yield partial(self._do, task)

    def last(self, tasks: Iterable[Task]) -> Iterator[Task]:
        """Yield and count the last tasks of the stage."""
        yield from self.counted(tasks)
        self._finish_task()

    def _do(self, task: Task) -> None:
        task()
        self._finish_task()

    def _finish_task(self) -> None:
        with self._lock:
            self._open -= 1
            last = not self._open
        if last:
            self._over()


class _Work(NamedTuple):
    """A group with its source tensors by kind: raw, encoded, or not used."""

    stage: _Stage
    targets: list[LaidOut]
    raw: list[TensorSpec]
    encoded: list[TensorSpec]
    unused: list[TensorSpec]


class _UnhashedReader(ContentsOver):
    """The decoded source for a further layout, whose regions are not hashed again."""

    def __init__(self, base: DecodedReader) -> None:
        self.base = base


class ViewPass:
    """One pass over a source in one or several layouts; use it in a `with` statement, which removes decoded data.

    Attributes:
        readers: read the tensors of each layout; the first hashes the source's meanwhile if possible.
        values: what this process has hashed of the source's tensors whose digests it does not compute, or of which
            other processes have the rest; known when all is carried.
    """

    def __init__(
        self,
        layouts: Sequence[tuple[Checkpoint, Iterable[KeyPath]]],
        algorithms: tuple[str, ...],
        stopped: threading.Event,
        progress: OnProgress | None,
        hashed: Collection[KeyPath] | None = None,
        *,
        shared: bool = False,
    ) -> None:
        """Determine the groups; nothing is read yet.

        Args:
            layouts: the source itself, or a view of it, each with the tensors that will be carried.
            algorithms: with which the source's tensors are hashed; see LeafHasher.
            stopped: ends the pass.
            progress: called a few times a second, for the stage `digest`.
            hashed: the source's tensors whose digests are computed; all by default.
            shared: whether other processes carry moves of these tensors, too.
        """
        self._first = layouts[0][0]
        self._source = self._first.original
        self._shared = shared
        self._specs = self._source.manifest.tensors
        self._hashed = frozenset(self._specs if hashed is None else hashed)
        self._needs = {
            (number, path): seen.made_of(path)
            for number, (seen, paths) in enumerate(layouts)
            for path in paths
        }
        wanted = self._hashed.union(*self._needs.values())
        self._sizes = {path: spec.nbytes for path, spec in self._specs.items() if path in wanted}
        self._progress = progress
        self._algorithms = algorithms
        soon = {  # sources whose whole connected group is small
            path
            for one in _connect(self._needs, self._sizes)
            if sum(self._sizes[source] for source in one.sources) <= KEPT_BYTES
            for path in one.sources
        }
        self._decoded = DecodedReader(
            self._source.reader, soon=soon, algorithms=algorithms, stopped=stopped,
            times=len(layouts), fetches=len(layouts) > 1,
        )  # fmt: skip
        self.readers = [
            seen.reader_over(_UnhashedReader(self._decoded) if number else self._decoded)
            for number, (seen, _paths) in enumerate(layouts)
        ]
        # The source's tensor → the tensor of the first layout with the same bytes.
        self._equal: dict[KeyPath, KeyPath] = {}
        self.values: dict[KeyPath, LeafValues] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for reader in self.readers:
            reader.close()

    def carry(self, carriers: Sequence[Carrier], moves: Sequence[JointMoves]) -> Mapping[str, Hashes]:
        """Carry all tensors; returns the digests of the source's own tensors by algorithm.

        Args:
            carriers: carry the tensors of each layout; their sources have this pass's readers.
            moves: of all targets of each layout.

        Raises: what `Carrier.carry` does; of several layouts, an error of one is that of its outputs alone.
        """
        self._hash_on_the_way(moves[0])
        total = sum(nbytes for path, nbytes in self._sizes.items() if path in self._hashed)
        meter = Meter("digest", total, self._progress)
        first = carriers[0]
        with (
            self._hashing(self._decoded, first.source, meter) as used,
            self._hashing(self._source.reader, first.source, meter) as left,
            ExitStack() as settling,
        ):
            for carrier in carriers:
                carrier.take_up()
                settling.enter_context(carrier.settling())
            first.crew.work(self._tasks(carriers, moves, used, left), threads.worker_count())
            known = self._collect(first)
            for path in known:
                meter.add(self._specs[path].nbytes, self._specs[path].name)
            decoded = LeafTable(self._specs, self._algorithms)
            decoded.add(self._decoded.hashed or {})
            found = left.leaves.joined(used.leaves, decoded, known)
            if not _all_failed(carriers):
                taken = {*known, *self.values}
                elsewhere = {*self.values, *self._left_to_others(taken)}
                rest = [
                    self._specs[path] for path in self._hashed if path not in found and path not in elsewhere
                ]
                first.crew.work(used.tasks(digest_moves(rest, used.source)), threads.worker_count())
        specs = {path: self._specs[path] for path in self._hashed}
        found = found.joined(used.leaves, known)
        return {one: Hashes.of(specs, found, one) for one in self._algorithms}

    def _hash_on_the_way(self, moves: JointMoves) -> None:
        """Find the source's tensors that are hashed while those of the first layout are carried.

        Args:
            moves: of the first layout.
        """
        straight = [path for path in moves.targets if moves.ways[path].extents is not None]
        same: dict[KeyPath | None, KeyPath] = {}
        if not self._first.is_view:
            same = {path: path for path in moves.targets}
        elif isinstance(self._first, View):
            same = {self._first.same_bytes(path): path for path in straight}
        wanted = self._hashed.union(*self._needs.values()) if self._shared else self._hashed
        self._equal = {path: target for path, target in same.items() if path is not None and path in wanted}
        self._decoded.gather(wanted.difference(self._equal, *(self._needs[0, path] for path in straight)))

    def _collect(self, carrier: Carrier) -> LeafTable:
        """The leaves of the source's tensors that were hashed while the view's were carried.

        The hashes of incomplete tensors are kept in `values`, for the processes that have their other bytes.
        """
        found, leaves = LeafTable(self._specs, self._algorithms), carrier.leaves
        whole = {
            path: name
            for path, name in self._equal.items()
            if path in self._hashed and leaves.is_complete(name)
        }
        found.add_same(leaves, whole)
        same = (
            (path, leaves.hasher(name))
            for path, name in self._equal.items()
            if path not in whole and name in leaves
        )
        for path, hasher in chain(same, self._decoded.take_gathered(self._specs)):
            if path in self._hashed and hasher.done():
                found.add({path: hasher})
            elif self._shared and (values := hasher.values()) and values.nbytes:
                self.values[path] = values
        return found

    def _left_to_others(self, taken: Collection[KeyPath]) -> Iterator[KeyPath]:
        """The source's tensors of which this process has carried nothing, but something of those that lie with them.

        Args:
            taken: the tensors of which it has hashed something.
        """
        for needs in self._needs.values() if self._shared else ():
            if not set(needs).isdisjoint(taken):
                yield from (path for path in needs if path not in taken and self._decoded.gathers(path))

    @contextmanager
    def _hashing(self, reader: Contents, view: Source, meter: Meter) -> Generator[Carrier]:
        """A carrier that hashes the source itself, with the same memory budget and stop event."""
        with Source(reader, view.pool, stopped=view.stopped) as read:
            carrier = Carrier(read, dict(self._specs), meter, self._algorithms)
            with carrier.settling():
                yield carrier

    def _tasks(
        self, carriers: Sequence[Carrier], moves: Sequence[JointMoves], used: Carrier, left: Carrier
    ) -> Iterator[Task]:
        """All tasks, group by group; `left` hashes source tensors without a target."""
        work = [self._work(group) for group in groups(self._needs, self._sizes)]
        for one, following in zip(work, [*work[1:], None], strict=True):
            if one is work[0]:
                yield from one.stage.counted(self._prepare(one))
            if following is not None:  # so that no task waits for a long decoding
                yield from following.stage.counted(self._prepare(following))
            yield from one.stage.last(self._carry(one, carriers, moves, used))
            yield from left.tasks(digest_moves(one.unused, left.source))
            if _all_failed(carriers):
                return

    def _work(self, group: MoveGroup) -> _Work:
        decodes = self._decoded.decodes
        taken = {path for target in group.targets for path in self._needs[target]}
        used = [self._specs[path] for path in group.sources if path in taken]
        return _Work(
            _Stage(partial(self._decoded.drop, group.sources)),
            sorted(group.targets, key=self._waits),
            [spec for spec in used if not decodes(spec)],
            sorted(filter(decodes, used), key=lambda spec: -spec.nbytes),
            [self._specs[path] for path in group.sources if path not in taken],
        )

    def _waits(self, target: LaidOut) -> bool:
        """Whether a target needs tensors that are still being decoded; such targets come last."""
        return any(self._in_file(self._specs[path]) for path in self._needs[target])

    def _in_file(self, spec: TensorSpec) -> bool:
        return self._decoded.decodes(spec) and not self._decoded.keeps(spec)

    def _prepare(self, work: _Work) -> Iterator[Task]:
        """Decode tensors that are not kept in memory."""
        return (partial(self._decoded.prepare, spec) for spec in work.encoded if self._in_file(spec))

    def _carry(
        self, work: _Work, carriers: Sequence[Carrier], moves: Sequence[JointMoves], used: Carrier
    ) -> Iterator[Task]:
        """Carry the targets, and hash sources that were not hashed while they were decoded."""
        for number, path in work.targets:
            carrier = carriers[number]
            for task in carrier.tasks(moves[number].of(path)):
                yield task if len(carriers) == 1 else partial(_attempt, carrier, task)
        hashed = [spec for spec in work.raw if spec.path in self._hashed and spec.path not in self._equal]
        raw = [spec for spec in hashed if not self._decoded.gathers(spec.path)]
        yield from used.tasks(digest_moves(raw, used.source))
        yield from (partial(self._hash, spec, used) for spec in work.encoded if spec.path in self._hashed)

    def _hash(self, spec: TensorSpec, used: Carrier) -> None:
        """Hash a tensor that was not decoded in order; otherwise only count it."""
        self._decoded.prepare(spec)
        if self._decoded.hashed is not None and spec.path in self._decoded.hashed:
            used.meter.add(spec.nbytes, spec.name)
            return
        for task in used.tasks(digest_moves([spec], used.source)):
            if used.source.stopped.is_set():
                raise StoppedError
            task()


def _attempt(carrier: Carrier, task: Task) -> None:
    """Do a task of one of several layouts: an error fails its targets alone."""
    try:
        task()
    except WherryError as error:
        for output in carrier.outputs:
            output.error = output.error or error


def _all_failed(carriers: Sequence[Carrier]) -> bool:
    return all(output.error for carrier in carriers for output in carrier.outputs)
