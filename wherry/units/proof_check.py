"""proof_check: what a commit takes from proofs: which parts of the target it does not have to read back itself.

A proof counts if another process than the maker of the unit made it, with the same wherry, of the files that the
receipts name, and if it has read the same leaves that the maker has hashed. A move that two units have made counts if
the proofs of both have it, a leaf that lies in several moves if all of them count. Of a tensor in boxes, a unit and its
proof must have hashed the same bytes, and a leaf counts if every unit that has bytes of it was read back. A file that
several units have made must be as it was before it was read, and its receipts do not say how: so proofs do. So of
every byte that the commit does not read, a process that has not written it says what storage gave, and the commit has
compared that.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from wherry.core.algorithms import HASH_BYTES
from wherry.core.digest import LEAF
from wherry.formats.reader import Extent
from wherry.mover.readback import ReadBefore, SharedBlock
from wherry.units.make import member
from wherry.version import __version__

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import Span
    from wherry.records.unit_proof import UnitProof
    from wherry.records.unit_receipt import UnitReceipt
    from wherry.staging.journal import DurableMove
    from wherry.storage.location import Location
    from wherry.units.split_job import SplitJob


class Difference(NamedTuple):
    """Bytes that were read back otherwise than their receipt says.

    Attributes:
        proof: which says so.
        source: key path of the tensor in the source.
        leaf: its number; None of boxes, of which no process has whole leaves.
    """

    proof: UnitProof
    source: KeyPath
    leaf: int | None

    @property
    def where(self) -> str:
        """Which bytes of the tensor, for a message."""
        return "" if self.leaf is None else f" of leaf {self.leaf}"


def valid_proofs(
    split: SplitJob,
    receipts: Sequence[UnitReceipt],
    proofs: Iterable[UnitProof],
    shared: Mapping[str, str] | None = None,
) -> list[UnitProof]:
    """The proofs that count.

    Args:
        split: the job.
        receipts: one of each unit, whose files are there.
        proofs: all that were found.
        shared: name of each file that several units have made → its present state.
    """
    present = shared or {}
    makers = {receipt.unit: receipt.worker for receipt in receipts}
    units, names = dict(enumerate(split.units)), {receipt.name: receipt.unit for receipt in receipts}
    return [
        proof
        for proof in proofs
        if proof.unit in units
        and (proof.digest, proof.version, proof.algorithm)
        == (units[proof.unit].digest, __version__, split.algorithms[0])
        and proof.worker != makers[proof.unit]
        and proof.unit in {names.get(name) for name in proof.receipts}
        and names.keys() >= set(proof.receipts)
        and all(units[proof.unit].has(move.source, move.span) for move in proof.moves)
        and proof.boxes.keys() <= {part.source for part in units[proof.unit].parts}
        and {file.name: file.mark for file in proof.shared}.items() <= present.items()
        and (units[proof.unit].region is None or units[proof.unit].files[0].name in _names(proof))
    ]


def _names(proof: UnitProof) -> set[str]:
    return {file.name for file in proof.shared}


def differences(
    proofs: Iterable[UnitProof], receipts: Iterable[UnitReceipt], moves: Iterable[DurableMove]
) -> Iterator[Difference]:
    """The bytes of which proofs and receipts say different things.

    Args:
        proofs: those that count.
        receipts: one of each unit.
        moves: of all receipts.
    """
    made = {(move.source, move.span): move for move in moves}
    boxes = {receipt.unit: receipt.boxes for receipt in receipts}
    for proof in proofs:
        for source, digest in proof.boxes.items():
            values = boxes[proof.unit].get(source)
            if values is not None and values.digest != digest:
                yield Difference(proof, source, None)
        for read in proof.moves:
            move = made.get((read.source, read.span))
            wrote = {} if move is None else move.leaves
            for leaf in sorted(wrote.keys() | read.leaves.keys()):
                if read.leaves.get(leaf) != wrote.get(leaf, b"")[:HASH_BYTES]:
                    yield Difference(proof, read.source, leaf)


def read_before(
    split: SplitJob,
    proofs: Iterable[UnitProof],
    receipts: Sequence[UnitReceipt],
    boxes: Mapping[KeyPath, Sequence[bytes]],
    staged: Location,
) -> ReadBefore:
    """What the commit does not have to read.

    Args:
        split: the job.
        proofs: those that count, in which nothing differs.
        receipts: one of each unit.
        boxes: the leaves of tensors in boxes that units together have hashed.
        staged: where the target is staged.
    """
    rows = list(proofs)
    read = {(proof.unit, move.source, move.span): move.checks for proof in rows for move in proof.moves}
    moves: dict[tuple[KeyPath, Span], DurableMove] = {}
    unread: defaultdict[KeyPath, set[int]] = defaultdict(set)  # leaves
    lost: set[tuple[KeyPath, Span]] = set()
    for receipt in receipts:
        for move in receipt.moves:  # one with chunks of two units must be in the proofs of both
            moves[move.source, move.span] = move
            if (receipt.unit, move.source, move.span) not in read:
                unread[move.source].update(move.leaves)
                lost.add((move.source, move.span))
    taken = [
        move for key, move in moves.items() if key not in lost and unread[move.source].isdisjoint(move.leaves)
    ]
    leaves: defaultdict[KeyPath, dict[int, bytes]] = defaultdict(dict)
    for move in taken:
        leaves[move.source] |= {leaf: raw[:HASH_BYTES] for leaf, raw in move.leaves.items()}
    checks = {(source, span): found for (_unit, source, span), found in read.items()}
    spans = {(move.source, move.span): checks[move.source, move.span] for move in taken}
    values: dict[KeyPath, list[tuple[int, bytes]]] = {}
    for source, wanted in boxes.items():
        proved = {proof.unit for proof in rows if source in proof.boxes}
        proved -= {one.unit for one in receipts if any((source, move.span) in lost for move in one.moves)}
        leaves[source], values[source] = _read_of_boxes(source, wanted, proved, receipts)
    return ReadBefore(split.algorithms[0], spans, dict(leaves), values, _blocks(rows, staged))


def _read_of_boxes(
    source: KeyPath, wanted: Sequence[bytes], proved: Collection[int], receipts: Iterable[UnitReceipt]
) -> tuple[dict[int, bytes], list[tuple[int, bytes]]]:
    """The leaves of a tensor in boxes that were read back whole, and what was read back of the others.

    Args:
        source: key path of the tensor in the source.
        wanted: its leaves.
        proved: the units whose boxes of it were read back.
        receipts: one of each unit.
    """
    held = [(receipt.unit in proved, receipt.boxes.get(source)) for receipt in receipts]
    rows = [(was_read, values) for was_read, values in held if values is not None]
    unread = {leaf for was_read, values in rows if not was_read for leaf in (*values.leaves, *values.parts)}
    whole = {leaf for was_read, values in rows if was_read for leaf in values.leaves}
    leaves = {leaf: digest for leaf, digest in enumerate(wanted) if leaf in whole or leaf not in unread}
    return leaves, [
        (leaf, part)
        for was_read, values in rows
        if was_read
        for leaf, part in values.parts.items()
        if leaf not in leaves
    ]


def is_blamed(split: SplitJob, receipt: UnitReceipt, odd: Difference) -> bool:
    """Whether a receipt is of a unit that has written what was read back otherwise."""
    unit, leaf = split.units[receipt.unit], odd.leaf
    if leaf is None:
        return unit.number == odd.proof.unit
    start, stop = leaf * LEAF, (leaf + 1) * LEAF
    return any(part.source == odd.source and part.start < stop and part.stop > start for part in unit.parts)


def _blocks(proofs: Iterable[UnitProof], staged: Location) -> dict[KeyPath, list[SharedBlock]]:
    """The blocks that parts share with others, where the target is staged."""
    found: defaultdict[KeyPath, list[SharedBlock]] = defaultdict(list)
    for one in (block for proof in proofs for block in proof.blocks):
        extent = Extent(member(staged, one.name), one.start, one.length)
        found[one.source].append(SharedBlock(extent, one.digest))
    return dict(found)
