"""LeafTable: the leaves of the tensors of a pass.

A large model has a hundred thousand small tensors. Each is read whole and has one leaf, so only the hash of that leaf
is kept of it. Every other tensor has a `LeafHasher`, which takes it in pieces.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from wherry.core.algorithms import HASH_BYTES, hash_function
from wherry.core.digest import LEAF, LeafHasher

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import Span, TensorSpec


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
        equal: how many tensors have come whole whose only leaf is the expected one; of these nothing is kept.
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
            self.put(path, leaves[0])
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
            table.give(name, self, path)

    def give(self, path: KeyPath, table: LeafTable, name: KeyPath) -> None:
        """Give the leaves of a tensor to another table under a key path there, if they are complete."""
        known = self._hashers.get(path)
        if path in self._only:
            table.put(name, self._only[path])
        elif known is not None and known.done():
            table.add({name: known})

    def put(self, path: KeyPath, leaf: bytes) -> None:
        """Set the hashes of the only leaf of a tensor."""
        self._only[path] = leaf

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
