"""groups: the pass over a view, in which the source's own tensors are digested too.

A view reads regions, of which no leaf of the source can be hashed, so the source is read for its digests as well. Both
are done group by group: the source tensors that some target tensors are made of, and these. So what was decoded or
read for the one is still at hand for the other, and the files of decoded tensors go as soon as their group is done:
pages that are used again cost a tenth of fresh ones.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from wherry.core.progress import Meter
from wherry.mover.carrier import Carrier, digest_moves
from wherry.mover.hashing import Hashes
from wherry.mover.source import Spill
from wherry.runtime import threads
from wherry.runtime.threads import StoppedError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping

    from wherry.core.keypath import KeyPath
    from wherry.core.progress import OnProgress
    from wherry.core.tensorspec import TensorSpec
    from wherry.formats.checkpoint import Checkpoint
    from wherry.formats.format import Reader
    from wherry.mover.move import JointMoves
    from wherry.runtime.threads import Task
    from wherry.view.view import RelaidReader

GROUP_BYTES = 256 << 20  # of source tensors; one that is larger is a group of its own
KEPT_BYTES = 8 << 20  # what is decoded into memory; a thread may hold so much


class Group(NamedTuple):
    """Source tensors, and everything that is made of them and of nothing else."""

    sources: list[KeyPath]
    targets: list[KeyPath]


def groups(
    needs: Mapping[KeyPath, Collection[KeyPath]], sizes: Mapping[KeyPath, int], limit: int = GROUP_BYTES
) -> Iterator[Group]:
    """Put together what hangs together, in the order of the targets; small groups are joined up to a limit.

    Args:
        needs: target → the sources that it is made of.
        sizes: source → bytes; what no target is made of comes last.
        limit: bytes of a joined group.
    """
    held, room = Group([], []), limit
    for one in _connected(needs, sizes):
        nbytes = sum(sizes[path] for path in one.sources)
        if held.sources and nbytes > room:
            yield held
            held, room = Group([], []), limit
        held.sources.extend(one.sources)
        held.targets.extend(one.targets)
        room -= nbytes
    if held.sources or held.targets:
        yield held


def _connected(needs: Mapping[KeyPath, Collection[KeyPath]], sizes: Mapping[KeyPath, int]) -> Iterator[Group]:
    head: dict[KeyPath, KeyPath] = {path: path for path in sizes}

    def first(path: KeyPath) -> KeyPath:
        while head[path] != path:
            head[path] = path = head[head[path]]
        return path

    for taken in needs.values():
        ends = [first(path) for path in taken]
        for end in ends[1:]:
            head[first(end)] = first(ends[0])
    found: dict[KeyPath | None, Group] = {}
    for target, taken in needs.items():
        key = first(next(iter(taken))) if taken else None
        found.setdefault(key, Group([], [])).targets.append(target)
    for source in sizes:
        found.setdefault(first(source), Group([], [])).sources.append(source)
    yield from found.values()


def _alone(needs: Mapping[KeyPath, Collection[KeyPath]], sizes: Mapping[KeyPath, int]) -> Iterator[KeyPath]:
    """Sources that are small together with everything that is used with them."""
    for one in _connected(needs, sizes):
        if sum(sizes[path] for path in one.sources) <= KEPT_BYTES:
            yield from one.sources


class _Stage:
    """The tasks of a group: once all were given out and are done, what they held goes."""

    def __init__(self, over: Callable[[], None]) -> None:
        self._over = over
        self._open = 1  # the giving out itself
        self._lock = threading.Lock()

    def counted(self, tasks: Iterable[Task]) -> Iterator[Task]:
        """The same tasks; the stage is not over before they are done."""
        for task in tasks:
            with self._lock:
                self._open += 1
            yield partial(self._do, task)

    def last(self, tasks: Iterable[Task]) -> Iterator[Task]:
        """The same for the last ones."""
        yield from self.counted(tasks)
        self._done()

    def _do(self, task: Task) -> None:
        task()
        self._done()

    def _done(self) -> None:
        with self._lock:
            self._open -= 1
            last = not self._open
        if last:
            self._over()


class _Work(NamedTuple):
    """A group, looked at: its source tensors are raw, encoded, or not used."""

    stage: _Stage
    targets: list[KeyPath]
    raw: list[TensorSpec]
    encoded: list[TensorSpec]
    unused: list[TensorSpec]


@dataclass(slots=True)
class ViewPass:
    """One pass over a view.

    Attributes:
        source: the checkpoint that is seen.
        reader: the view's reader.
        carrier: carries the view's tensors.
        moves: of all targets.
        progress: called a few times a second, for the stage `digest`.
    """

    source: Checkpoint
    reader: RelaidReader
    carrier: Carrier
    moves: JointMoves
    progress: OnProgress | None

    def carry(self) -> Hashes:
        """Carry everything; the digests of the source's own tensors.

        Raises: what `Carrier.carry` does.
        """
        specs, crew, decoded = self.source.manifest.tensors, self.carrier.crew, self.reader.decoded
        decoded.stopped, decoded.hashed = crew.stopped, {}
        meter = Meter("digest", sum(spec.nbytes for spec in specs.values()), self.progress)
        with (
            self._hashing(self.reader.canonical, meter) as used,
            self._hashing(self.source.reader, meter) as left,
        ):
            self.carrier.take_up()
            with self.carrier.settling():
                crew.work(self._tasks(used, left), threads.worker_count())
        return Hashes.of(specs, {**left.hashers, **used.hashers, **decoded.hashed})

    @contextmanager
    def _hashing(self, reader: Reader, meter: Meter) -> Generator[Carrier]:
        """What hashes the source as it is, in the same crew and budget."""
        pool, crew, specs = self.carrier.pool, self.carrier.crew, dict(self.source.manifest.tensors)
        with Spill(reader, pool) as read:
            carrier = Carrier(source=read, specs=specs, pool=pool, meter=meter, crew=crew)
            with carrier.settling():
                yield carrier

    def _tasks(self, used: Carrier, left: Carrier) -> Iterator[Task]:
        """What is to be done, group by group; `left` hashes what nothing is made of."""
        specs, moves, decoded = self.source.manifest.tensors, self.moves, self.reader.decoded
        needs = {path: self.reader.needs(path) for path in self.carrier.specs}
        sizes = {path: spec.nbytes for path, spec in specs.items()}
        decoded.kept = {path for path in _alone(needs, sizes) if self.reader.canonical.decodes(specs[path])}
        work = [self._work(group, needs) for group in groups(needs, sizes)]
        for one, following in zip(work, [*work[1:], None], strict=True):
            if one is work[0]:
                yield from one.stage.counted(self._prepared(one))
            if following is not None:  # so that nothing waits for what takes long to decode
                yield from following.stage.counted(self._prepared(following))
            yield from one.stage.last(self._carried(one, moves, used))
            yield from left.tasks(digest_moves(one.unused, left.source))
            if all(output.error for output in self.carrier.outputs):
                return

    def _work(self, group: Group, needs: Mapping[KeyPath, Collection[KeyPath]]) -> _Work:
        specs, canonical = self.source.manifest.tensors, self.reader.canonical
        taken = {path for target in group.targets for path in needs[target]}
        used = [specs[path] for path in group.sources if path in taken]
        encoded = sorted(filter(canonical.decodes, used), key=lambda spec: -spec.nbytes)
        return _Work(
            _Stage(partial(self.reader.decoded.drop, group.sources)),
            self._in_turn(group.targets, needs),
            [spec for spec in used if not canonical.decodes(spec)],
            encoded,
            [specs[path] for path in group.sources if path not in taken],
        )

    def _prepared(self, work: _Work) -> Iterator[Task]:
        """Decode what is not kept in memory."""
        decoded = self.reader.decoded
        return (partial(decoded.prepare, spec) for spec in work.encoded if spec.path not in decoded.kept)

    def _carried(self, work: _Work, moves: JointMoves, used: Carrier) -> Iterator[Task]:
        """Carry, and hash what was not hashed while it was decoded."""
        for path in work.targets:
            yield from self.carrier.tasks(moves.of(path))
        yield from used.tasks(digest_moves(work.raw, used.source))
        yield from (partial(self._hash, spec, used) for spec in work.encoded)

    def _in_turn(
        self, targets: Iterable[KeyPath], needs: Mapping[KeyPath, Collection[KeyPath]]
    ) -> list[KeyPath]:
        """What is made of tensors that are still being decoded comes last: it would wait for them."""
        specs, decoded, canonical = self.source.manifest.tensors, self.reader.decoded, self.reader.canonical

        def waits(target: KeyPath) -> bool:
            return any(path not in decoded.kept and canonical.decodes(specs[path]) for path in needs[target])

        return sorted(targets, key=waits)

    def _hash(self, spec: TensorSpec, used: Carrier) -> None:
        """Hash a tensor that did not come in order; one that did is counted."""
        decoded = self.reader.decoded
        decoded.prepare(spec)
        if decoded.hashed is not None and spec.path in decoded.hashed:
            used.meter.add(spec.nbytes, spec.name)
            return
        for task in used.tasks(digest_moves([spec], used.source)):
            if used.crew.stopped.is_set():
                raise StoppedError
            task()
