"""box_readings: cuts what is read of boxes into readings that workers share: a pure function of the plan.

Boxes are read in two ways, as the commit does it alone: the leaves of the target are hashed, and what the boxes
were made of is read back from the target through the inverse layout, or, where the source has the same tensors, read
again from the source. Each is read by two processes. So of every byte that counts, a process has read it that has not
written it, and no process alone can record a wrong digest.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING

from wherry.converter.plan import joint_moves
from wherry.core import dtypes
from wherry.core.digest import LEAF
from wherry.formats.registry import find_format
from wherry.readings.made_checkpoint import made_checkpoint
from wherry.readings.read_units import read_units
from wherry.records.unit import Unit, UnitPart
from wherry.view.inverse import inverse_view
from wherry.view.view import LayoutView

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from wherry.converter.plan import Plan
    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import Region, TensorSpec
    from wherry.formats.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class BoxReading:
    """Leaves that one worker reads.

    Attributes:
        number: its number among the readings.
        parts: key path → numbers of leaves.
        of_target: whether the key paths are those of the target, or of what its boxes were made of.
        twin: number of the reading of the same leaves by another process.
        unit: as what it is claimed; `nbytes_in` are the bytes of its leaves.
    """

    number: int
    parts: Mapping[KeyPath, range]
    of_target: bool
    twin: int
    unit: Unit


@dataclass(frozen=True, slots=True)
class Boxes:
    """The tensors of a plan that are carried in boxes and that workers can read before the commit.

    Attributes:
        pairs: key path in the target → in the source, or in the view of it.
        target: the tensors, by their key paths in the target.
        origin: what they were made of, by key paths in the source.
        readings: what is read of them.
    """

    pairs: Mapping[KeyPath, KeyPath] = field(default_factory=dict["KeyPath", "KeyPath"])
    target: Mapping[KeyPath, TensorSpec] = field(default_factory=dict["KeyPath", "TensorSpec"])
    origin: Mapping[KeyPath, TensorSpec] = field(default_factory=dict["KeyPath", "TensorSpec"])
    readings: tuple[BoxReading, ...] = ()


NO_BOXES = Boxes()


def box_readings(seen: Checkpoint, plan: Plan, units: Sequence[Unit], unit_bytes: int) -> Boxes:
    """Cut what is read of the boxes of a plan.

    Args:
        seen: the opened source, or its view in the layout of the target's system.
        plan: the plan.
        units: its units.
        unit_bytes: size of a reading.
    """
    pairs = _tensors_in_boxes(plan) if plan.verify == "digest" and units else {}
    if not pairs or not _is_readable(seen):
        return NO_BOXES
    with made_checkpoint(find_format(plan.to), plan, lambda extent: extent) as made:
        tensors = plan.manifest.tensors
        pairs = {path: source for path, source in pairs.items() if _has_places(made, tensors[path])}
        if not pairs:
            return NO_BOXES
        origin = origin_of(seen, made, pairs)
        every = origin.manifest.tensors
        taken = {path: every[path] for path in (pairs.values() if origin is seen else every)}
    target = {path: tensors[path] for path in pairs}
    groups = [(_cut(target, unit_bytes), True), (_cut(taken, unit_bytes), False)]
    readings = _readings(groups, {True: target, False: taken}, plan, len(units))
    return Boxes(pairs, target, taken, tuple(readings))


def origin_of(seen: Checkpoint, made: Checkpoint, pairs: Mapping[KeyPath, KeyPath]) -> Checkpoint:
    """Where what boxes were made of is read again: the target through the inverse layout, or the source.

    Args:
        seen: the opened source, or its view in the layout of the target's system.
        made: the target.
        pairs: key path in the target → in the source, of tensors that are carried in boxes.
    """
    return inverse_view(seen, made, pairs) if isinstance(seen, LayoutView) else seen


def _readings(
    groups: Sequence[tuple[Sequence[Mapping[KeyPath, range]], bool]],
    specs: Mapping[bool, Mapping[KeyPath, TensorSpec]],
    plan: Plan,
    units: int,
) -> Iterator[BoxReading]:
    number = 0
    for rows, of_target in groups:
        for twin in (len(rows), -len(rows)):  # from a reading to its twin
            for parts in rows:
                spans = [
                    UnitPart(
                        path, leaves.start * LEAF, min(leaves.stop * LEAF, specs[of_target][path].nbytes)
                    )
                    for path, leaves in parts.items()
                ]
                nbytes = sum(one.nbytes for one in spans)
                unit = Unit(2 * units + number, plan.digest, (), tuple(spans), (), (), nbytes)
                yield BoxReading(number, parts, of_target, number + twin, unit)
                number += 1


def _tensors_in_boxes(plan: Plan) -> dict[KeyPath, KeyPath]:
    """The tensors that are carried in boxes; key path in the target → in the source."""
    moves = joint_moves([plan])
    found: dict[KeyPath, KeyPath] = {}
    for target, source in plan.pairs.items():
        first = next(moves.of(source), None)
        if first is not None and first.box and not dtypes.opaque(plan.manifest.tensors[target].dtype):
            found[target] = source
    return found


def _is_readable(seen: Checkpoint) -> bool:
    """Whether workers can read what boxes were made of: not of a view of a view, whose digests nobody has."""
    return not seen.is_view or (isinstance(seen, LayoutView) and seen.source is seen.original)


def _has_places(made: Checkpoint, spec: TensorSpec) -> bool:
    """Whether the places of a tensor's chunks are known; that depends on their extents, which differ at the edges."""
    chunks = spec.chunks or spec.shape
    return all(made.reader.chunk(spec, cell) is not None for cell in _corners(spec.shape, chunks))


def _corners(shape: tuple[int, ...], chunks: tuple[int, ...]) -> Iterator[Region]:
    axes = [
        [slice(at, min(at + step, size)) for at in dict.fromkeys((0, (size - 1) // step * step))]
        for size, step in zip(shape, chunks, strict=True)
    ]
    return product(*axes)


def _cut(specs: Mapping[KeyPath, TensorSpec], unit_bytes: int) -> list[Mapping[KeyPath, range]]:
    """Leaves that are read together; chunks that are stored as they are can be read in parts."""
    plain = {path: replace(spec, chunks=None) for path, spec in specs.items()}
    return [unit.parts for unit in read_units(plain, unit_bytes)]
