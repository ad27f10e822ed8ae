"""Hashing: a pass over a checkpoint's bytes that computes digests, and the comparison of two such passes."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, ItemsView, Iterator, Mapping, ValuesView
from dataclasses import field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wherry.core import threads
from wherry.core.blank_values import SeenValues, nans_notes, repeated_notes, zeros_notes
from wherry.core.digest import LEAF, tensor_digest, weights_digest
from wherry.core.keypath import KeyPath, render
from wherry.core.lazy_dataclass import dataclass
from wherry.core.progress import Meter, OnProgress
from wherry.core.tensorspec import TensorSpec, bytes_of
from wherry.core.units import short
from wherry.mover.carrier import Carrier, digest_moves
from wherry.mover.checksums import LeafTable
from wherry.mover.pool import Pool
from wherry.mover.source import Source

if TYPE_CHECKING:
    from wherry.formats.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Failure:
    """A tensor or file that differs from what was expected.

    Attributes:
        path: its printed key path.
        reason: the difference, as text.
        leaf: number of the first damaged leaf (4 MiB of canonical bytes), if it is known.
    """

    path: str
    reason: str
    leaf: int | None = None


@dataclass(slots=True)
class MeasuredError:
    """How far values differ after a round trip; every conversion that is not exact states its bound before it runs.

    Attributes:
        tensors: number of source tensors that differ after the round trip, within the bound.
        error: largest absolute difference of a value.
        share: the largest difference as a fraction of the bound; 1 is the bound itself.
    """

    tensors: int = 0
    error: float = 0.0
    share: float = 0.0


class DigestsWhenNeeded(Mapping["KeyPath", str]):
    """The digests of tensors whose leaves are known; all are computed when the first one is read."""

    def __init__(
        self,
        specs: Mapping[KeyPath, TensorSpec],
        leaves: Mapping[KeyPath, tuple[bytes, ...]],
        algorithm: str,
    ) -> None:
        self._specs, self._leaves, self._algorithm = specs, leaves, algorithm

    @cached_property
    def _digests(self) -> dict[KeyPath, str]:
        with threads.without_collection():
            return {
                path: tensor_digest(self._specs[path], raw, self._algorithm)
                for path, raw in self._leaves.items()
            }

    @cached_property
    def weights(self) -> str:
        """The weights digest of these tensors; of source and target it is the same if no key path is changed."""
        return weights_digest(self._digests, self._algorithm)

    def __getitem__(self, path: KeyPath) -> str:
        return self._digests[path]

    def get(self, path: KeyPath, default: Any = None) -> Any:
        """The digest of a tensor; `default` if it is not known."""
        return self._digests.get(path, default)

    def items(self) -> ItemsView[KeyPath, str]:
        """Each tensor with its digest."""
        return self._digests.items()

    def values(self) -> ValuesView[str]:
        """The digests."""
        return self._digests.values()

    def __contains__(self, path: object) -> bool:
        return path in self._leaves

    def __iter__(self) -> Iterator[KeyPath]:
        return iter(self._leaves)

    def __len__(self) -> int:
        return len(self._leaves)


@dataclass(frozen=True, slots=True)
class Hashes:
    """Digests of tensors of a checkpoint.

    Attributes:
        algorithm: of the digests and leaves.
        digests: key path → tensor digest.
        leaves: key path → raw hash of each leaf.
        seen: what this pass saw of the values; nothing of bytes that others read.
    """

    algorithm: str
    digests: Mapping[KeyPath, str] = field(default_factory=dict[KeyPath, str])
    leaves: Mapping[KeyPath, tuple[bytes, ...]] = field(default_factory=dict[KeyPath, tuple[bytes, ...]])
    seen: SeenValues = field(default_factory=SeenValues, compare=False)

    def renamed(self, names: Mapping[KeyPath, KeyPath]) -> Hashes:
        """The same digests under other key paths; digests do not depend on key paths.

        Args:
            names: key path → key path, of at least all tensors of which there is a digest.
        """
        if all(names[path] == path for path in self.digests):
            return self
        digests = {names[path]: digest for path, digest in self.digests.items()}
        leaves = {names[path]: leaves for path, leaves in self.leaves.items()}
        return Hashes(self.algorithm, digests, leaves, self.seen.renamed(names))

    def of_some(self, paths: Collection[KeyPath]) -> Hashes:
        """The digests of some tensors, in the order of `paths`."""
        if list(self.digests) == list(paths):
            return self
        taken = {path: self.digests[path] for path in paths if path in self.digests}
        return Hashes(self.algorithm, taken, {path: self.leaves[path] for path in taken}, self.seen)

    def joined(self, other: Hashes) -> Hashes:
        """These digests and those of other tensors, by the same algorithm."""
        if not other.digests:
            return replace(self, seen=self.seen.joined(other.seen))
        digests, leaves = {**self.digests, **other.digests}, {**self.leaves, **other.leaves}
        return Hashes(self.algorithm, digests, leaves, self.seen.joined(other.seen))

    def notes(self, specs: Mapping[KeyPath, TensorSpec]) -> list[str]:
        """Warnings on tensors of this pass that hold only zeros, another value again and again, or NaN."""
        zeros, repeated = zeros_notes(specs, self.digests), repeated_notes(specs, self.digests, self.seen)
        return [*zeros, *repeated, *nans_notes(specs, self.seen)]

    @classmethod
    def when_needed(
        cls,
        paths: Collection[KeyPath],
        specs: Mapping[KeyPath, TensorSpec],
        leaves: LeafTable,
        algorithm: str,
    ) -> Hashes:
        """Like `of`, but the digests are computed, and take memory, only when the first of them is read.

        Args:
            paths: tensors of the pass.
            specs: all tensors of the checkpoint.
            leaves: of the pass.
            algorithm: of the digests.
        """
        column = leaves.column(paths, algorithm)
        return cls(algorithm, DigestsWhenNeeded(specs, column, algorithm), column)

    @classmethod
    @threads.without_collection()
    def of(cls, specs: Mapping[KeyPath, TensorSpec], leaves: LeafTable, algorithm: str) -> Hashes:
        """Collect the digests of a pass, also of tensors without bytes; without those that miss a leaf."""
        column = leaves.column(specs, algorithm)
        digests = {path: tensor_digest(specs[path], raw, algorithm) for path, raw in column.items()}
        return cls(algorithm, digests, column)


def hash_checkpoint(
    checkpoint: Checkpoint,
    algorithm: str,
    *,
    memory: int,
    progress: OnProgress | None = None,
    stage: str = "verify",
    paths: Collection[KeyPath] | None = None,
    folder: Path | None = None,
    straight: bool = True,
) -> Hashes:
    """Read every tensor (or those of `paths`) once and digest it, in parallel and within the budget.

    Args:
        checkpoint: the checkpoint to read.
        algorithm: of the digests: that of the record which they are compared with, or a new record's.
        memory: the budget in bytes.
        progress: called a few times a second.
        stage: the name of the running verb.
        paths: the tensors to read; all by default.
        folder: for spill files; a temporary folder by default.
        straight: whether raw bytes are read with direct I/O, past the page cache: it is the storage that is verified,
            and a large checkpoint does not evict what other programs use. False if they are read again soon.

    Raises:
        DamagedError: bytes are missing or corrupt.
        StorageError: the storage failed.
    """
    specs = _choose_specs(checkpoint, paths)
    carrier = _read(checkpoint, specs, algorithm, memory, progress, folder, stage=stage, straight=straight)
    return replace(Hashes.of(specs, carrier.leaves, algorithm), seen=carrier.seen)


def read_back(
    checkpoint: Checkpoint,
    expected: Hashes,
    *,
    paths: Collection[KeyPath] | None,
    memory: int,
    progress: OnProgress | None = None,
    folder: Path | None = None,
) -> list[Failure]:
    """Read tensors from storage, and compare their leaves with the expected ones.

    Args:
        checkpoint: the checkpoint to read, whose tensors have the expected types and shapes.
        expected: what is expected of them.
        paths: the tensors to read; None for all.
        memory: the budget in bytes.
        progress: called a few times a second.
        folder: for spill files; a temporary folder by default.

    Returns:
        Every tensor that differs; see `compare`.

    Raises:
        DamagedError: bytes are missing or corrupt.
        StorageError: the storage failed.
    """
    specs, algorithm = _choose_specs(checkpoint, paths), expected.algorithm
    leaves = _read(
        checkpoint, specs, algorithm, memory, progress, folder, stage="verify", expected=expected.leaves
    ).leaves
    kept = list(leaves)
    if leaves.equal + len(kept) < len(specs):
        kept += [path for path, spec in specs.items() if not spec.nbytes]
    assert leaves.equal + len(kept) == len(specs), "every tensor was read"
    odd = {path: specs[path] for path in kept if leaves.hashes(path, algorithm) != expected.leaves[path]}
    return compare(
        Hashes.of(odd, leaves, algorithm), {path: expected.digests[path] for path in odd}, expected.leaves
    )


def _read(
    checkpoint: Checkpoint,
    specs: dict[KeyPath, TensorSpec],
    algorithm: str,
    memory: int,
    progress: OnProgress | None,
    folder: Path | None,
    *,
    stage: str,
    straight: bool = True,
    expected: Mapping[KeyPath, tuple[bytes, ...]] | None = None,
) -> Carrier:
    """A pass over tensors that only hashes, after its end; where leaves are expected, values are not looked at."""
    pool, meter = Pool(memory), Meter(stage, bytes_of(specs.values()), progress)
    with Source(checkpoint.reader, pool, folder, straight=straight) as source:
        carrier = Carrier(source, specs, meter, (algorithm,), look=expected is None, expected=expected)
        carrier.carry(digest_moves(specs.values(), source))
    return carrier


def hash_leaves(
    checkpoint: Checkpoint, algorithm: str, parts: Mapping[KeyPath, range], *, memory: int
) -> dict[KeyPath, tuple[bytes, ...]]:
    """Read some leaves of tensors and hash them; moves that hold a part of them are read whole.

    Args:
        checkpoint: the checkpoint to read.
        algorithm: of the hashes.
        parts: key path → numbers of leaves.
        memory: the budget in bytes.

    Returns:
        Key path → the raw hashes of these leaves.

    Raises:
        DamagedError: bytes are missing or corrupt.
        StorageError: the storage failed.
    """
    specs = _choose_specs(checkpoint, parts)
    meter = Meter("verify", bytes_of(specs.values()), None)
    with Source(checkpoint.reader, Pool(memory), straight=True) as source:
        carrier = Carrier(source=source, specs=specs, meter=meter, algorithms=(algorithm,))
        moves = digest_moves(specs.values(), source)
        carrier.carry(
            move
            for move in moves
            if move.span.start < parts[move.source].stop * LEAF
            and move.span.stop > parts[move.source].start * LEAF
        )
    return {
        path: tuple(leaf or b"" for leaf in carrier.leaves.hasher(path).leaves[rows.start : rows.stop])
        for path, rows in parts.items()
    }


def _choose_specs(checkpoint: Checkpoint, paths: Collection[KeyPath] | None) -> dict[KeyPath, TensorSpec]:
    every = checkpoint.manifest.tensors
    return dict(every) if paths is None else {path: every[path] for path in paths}


def compare(
    found: Hashes, expected: Mapping[KeyPath, str], leaves: Mapping[KeyPath, tuple[bytes, ...]]
) -> list[Failure]:
    """List every tensor whose digest differs from the expected one, with its first damaged leaf if leaves are known."""
    failed: list[Failure] = []
    for path, digest in sorted(expected.items()):
        if path not in found.digests:
            failed.append(Failure(render(path), "missing tensor"))
        elif found.digests[path] != digest:
            leaf = _first_difference(found.leaves.get(path, ()), leaves.get(path, ()))
            failed.append(
                Failure(
                    render(path),
                    f"digest mismatch: expected {short(digest)}, got {short(found.digests[path])}"
                    f"{'' if leaf is None else f' (first difference in leaf {leaf})'}",
                    leaf,
                )
            )
    return failed


def _first_difference(found: tuple[bytes, ...], expected: tuple[bytes, ...]) -> int | None:
    if len(found) != len(expected):
        return None
    return next(
        (index for index, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]), None
    )


def flat_hashes(
    checkpoint: Checkpoint,
    *,
    memory: int,
    progress: OnProgress | None = None,
    paths: Collection[KeyPath] | None = None,
) -> dict[KeyPath, str]:
    """SHA-256 over all canonical bytes of each tensor (or those of `paths`): what other tools call its hash.

    A flat hash needs the bytes in order, so tensors are hashed in parallel, each by one thread.
    """
    specs = _choose_specs(checkpoint, paths)
    pool, meter = Pool(memory), Meter("inspect", bytes_of(specs.values()), progress)
    with Source(checkpoint.reader, pool) as source:

        def one(path: KeyPath) -> str:
            state = hashlib.sha256()
            for move in digest_moves([specs[path]], source):
                with source.part(specs[path], move) as data:
                    state.update(data)
                meter.add(move.span.nbytes, specs[path].name)
            return state.hexdigest()

        with threads.executor(threads.worker_count()) as executor:
            return dict(zip(specs, executor.map(one, specs), strict=True))
