"""joined_leaves: what receipts say together: moves, and leaves of tensors that several units have hashed.

Leaves are joined from values: nobody reads a byte for that. A tensor of which something is missing (runs were short, a
worker had no kernels) has no leaves here; the commit reads it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from wherry.core.algorithms import HASH_BYTES
from wherry.core.digest import LEAF, LeafHasher, leaf_count, tensor_digest
from wherry.core.keypath import KeyPath, render
from wherry.errors import MismatchError
from wherry.mover.hashing import Hashes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from wherry.core.leaf_values import LeafValues
    from wherry.core.tensorspec import Span, TensorSpec
    from wherry.target.durable_move import DurableMove
    from wherry.workers.record import TaskRecord


class _Share(NamedTuple):
    """What one receipt has of a tensor."""

    receipt: TaskRecord
    values: LeafValues


def joined_leaves(
    rows: Iterable[tuple[TaskRecord, Mapping[KeyPath, LeafValues]]],
    specs: Mapping[KeyPath, TensorSpec],
    algorithm: str,
    uri: str,
) -> dict[KeyPath, tuple[bytes, ...]]:
    """The leaves of the tensors of which units together have hashed every byte.

    Args:
        rows: receipts, and what they have of some tensors.
        specs: the tensors.
        algorithm: of the hashes.
        uri: of the job, for errors.

    Raises:
        MismatchError: a receipt has values of another tensor, invalid ones, or other ones than another receipt.
    """
    shares: dict[KeyPath, defaultdict[int, list[_Share]]] = {}
    for receipt, held in rows:
        for path, values in held.items():
            count = leaf_count(specs[path].nbytes) if path in specs else -1
            if count < 0 or any(leaf >= count for leaf in (*values.leaves, *values.parts)):
                raise _invalid(receipt, path, uri)
            of_leaf = shares.setdefault(path, defaultdict(list))
            for leaf in (*values.leaves, *values.parts):
                of_leaf[leaf].append(_Share(receipt, values))
    found: dict[KeyPath, tuple[bytes, ...]] = {}
    for path, of_leaf in shares.items():
        hasher = LeafHasher(specs[path], (algorithm,))
        # One leaf after the other, so that one is open; where one is not known, the others are of no use.
        if all(_join_leaf(hasher, leaf, of_leaf[leaf], path, uri) for leaf in range(len(hasher.leaves))):
            found[path] = hasher.hashes(algorithm)
    return found


def _join_leaf(hasher: LeafHasher, leaf: int, shares: Iterable[_Share], path: KeyPath, uri: str) -> bool:
    """Whether a leaf is known, after what all receipts have of it was taken."""
    for receipt, values in shares:
        digest = values.leaves.get(leaf)
        if digest is not None and hasher.leaves[leaf] not in (None, digest):
            raise _invalid(receipt, path, uri)
        if digest is not None:
            hasher.preset(leaf, digest)
        elif leaf in values.parts:
            try:
                hasher.take_values(leaf, values.parts[leaf])
            except ValueError as error:
                raise _invalid(receipt, path, uri) from error
    return hasher.leaves[leaf] is not None


def _invalid(receipt: TaskRecord, path: KeyPath, uri: str) -> MismatchError:
    return MismatchError(
        f"the receipt {receipt.name} by {receipt.worker} has values of a tensor that are invalid, or differ from those"
        " of another receipt",
        uri=uri,
        path=render(path),
        cure=f"remove {receipt.name} and run `wherry work` again",
    )


def merged_moves(receipts: Iterable[TaskRecord], uri: str) -> list[DurableMove]:
    """The moves of all units, each once: one with chunks of two units was made by both.

    Raises:
        MismatchError: two workers have read different bytes.
    """
    found: dict[tuple[KeyPath, Span], tuple[DurableMove, TaskRecord]] = {}
    for receipt in receipts:
        for move in receipt.moves:
            first, maker = found.setdefault((move.source, move.span), (move, receipt))
            if first != move:
                raise MismatchError(
                    f"two workers have read different bytes: {maker.worker} and {receipt.worker}",
                    uri=uri,
                    path=render(move.source),
                    cure=f"check both machines, remove {maker.name} and {receipt.name}, and run `wherry work` again",
                )
    return [move for move, _receipt in found.values()]


def with_boxes(moves: Iterable[DurableMove], leaves: Mapping[KeyPath, Sequence[bytes]]) -> list[DurableMove]:
    """The moves, those in boxes with the leaves of their tensors.

    A box has no leaf of its own: its span only orders the boxes of a tensor. So each leaf goes to the moves that have
    its place among the spans.

    Args:
        moves: of all units.
        leaves: of tensors that were moved in boxes.
    """

    def complete(move: DurableMove) -> DurableMove:
        if move.source not in leaves or move.leaves:
            return move
        numbers = range(move.span.start // LEAF, leaf_count(move.span.stop))
        return move._replace(leaves={number: leaves[move.source][number] for number in numbers})

    return [complete(move) for move in moves]


def merged_hashes(
    receipts: Sequence[TaskRecord],
    specs: Mapping[KeyPath, TensorSpec],
    algorithms: Sequence[str],
    uri: str,
) -> dict[str, Hashes]:
    """The digests of the source's own tensors, by algorithm, that the units of a view have computed.

    Args:
        receipts: of all units.
        specs: the source's tensors.
        algorithms: of the digests.
        uri: of the job, for errors.

    Returns:
        The digests, without those of tensors that units have not hashed whole.

    Raises:
        MismatchError: a receipt has invalid values.
    """
    rows = [(name, hashed) for receipt in receipts for name, hashed in receipt.hashed.items()]
    shared = [(receipt, receipt.sources) for receipt in receipts] if len(algorithms) == 1 else []
    found: dict[str, Hashes] = {}
    for algorithm in algorithms:
        leaves = joined_leaves(shared, specs, algorithm, uri)
        raw = {path: leaves for name, hashed in rows if name == algorithm for path, leaves in hashed.items()}
        leaves |= {
            path: tuple(text[start : start + HASH_BYTES] for start in range(0, len(text), HASH_BYTES))
            for path, text in raw.items()
        }
        digests = {path: tensor_digest(specs[path], own, algorithm) for path, own in leaves.items()}
        found[algorithm] = Hashes(algorithm, digests, leaves)
    return found
