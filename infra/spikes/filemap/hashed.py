"""What was hashed: leaves of source and target tensors, of bytes that come in any order, and how it is joined.

A group of pieces has hashers of its own; what these have is a part of the group's record. Records join to the leaves of
all: in one process, in one that goes on after another was killed, and in the commit of many. So there is one way.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from wherry.core.algorithms import BLAKE3
from wherry.core.digest import LeafHasher
from wherry.core.leaf_values import LeafValues

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import Region, TensorSpec

Side: TypeAlias = Literal["source", "target"]
Specs: TypeAlias = "Mapping[Side, Mapping[KeyPath, TensorSpec]]"


class Hashed:
    """The leaves of one group of pieces; used from several threads."""

    def __init__(self, specs: Specs) -> None:
        self._specs = specs
        self._hashers: dict[tuple[Side, KeyPath], LeafHasher] = {}
        self._refused: set[tuple[Side, KeyPath]] = set()  # runs are too short to be hashed as they come
        self._lock = threading.Lock()
        self.users = 0  # threads that hash; the owner counts them

    def span(self, side: Side, path: KeyPath, start: int, data: memoryview) -> None:
        """Take a span of a tensor."""
        self._hasher(side, path).update(start, data)

    def box(self, side: Side, path: KeyPath, region: Region, data: memoryview) -> None:
        """Take a region of a tensor; where its runs are too short, the tensor is hashed again later."""
        hasher = self._hasher(side, path)
        if region == hasher.spec.whole:
            hasher.update(0, data)
        elif not hasher.update_box(region, data):
            self._refused.add((side, path))

    def refused(self, side: Side, path: KeyPath) -> bool:
        """Whether a box of a tensor did not count."""
        return (side, path) in self._refused

    def rows(self) -> list[list[Any]]:
        """What has come, in the form of a record: side, key path, and values; None if they are left out."""
        found: list[list[Any]] = []
        for (side, path), hasher in sorted(self._hashers.items()):
            values = None if (side, path) in self._refused else hasher.values()
            found.append([side, list(path), None if values is None else values.to_json()])
        return found

    def _hasher(self, side: Side, path: KeyPath) -> LeafHasher:
        with self._lock:
            return self._hashers.setdefault((side, path), LeafHasher(self._specs[side][path], (BLAKE3,)))


class Leaves:
    """The leaves of all tensors, joined from records in any order and again."""

    def __init__(self, specs: Specs) -> None:
        self._specs = specs
        self._hashers: dict[tuple[Side, KeyPath], LeafHasher] = {}

    def take(self, rows: list[list[Any]]) -> None:
        """Take what a record has."""
        for side, path, values in rows:
            if values is not None:
                self.of(side, tuple(path)).take(LeafValues.from_json(values))

    def of(self, side: Side, path: KeyPath) -> LeafHasher:
        """The hasher of a tensor."""
        key = (side, path)
        if key not in self._hashers:
            self._hashers[key] = LeafHasher(self._specs[side][path], (BLAKE3,))
        return self._hashers[key]

    def open(self) -> Iterator[tuple[Side, KeyPath]]:
        """The tensors of which leaves are missing."""
        for side, specs in self._specs.items():
            yield from ((side, path) for path in specs if not self.of(side, path).done())

    def restart(self, side: Side, path: KeyPath) -> LeafHasher:
        """A hasher for a tensor that is hashed again from its beginning."""
        self._hashers[side, path] = LeafHasher(self._specs[side][path], (BLAKE3,))
        return self._hashers[side, path]

    def digests(self, side: Side) -> dict[KeyPath, str]:
        """The digest of each tensor; every leaf is there."""
        return {path: self.of(side, path).digest(BLAKE3) for path in self._specs[side]}
