"""cut: cuts a plan into units. A pure function: the same plan gives the same units everywhere.

A unit is one file of the target, several small ones that together stay below the size that was chosen, or a region of
a larger one (`regions`). A tensor may lie in the files or regions of several units: `spread` shares it out, so that no
unit needs bytes of another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from wherry.core.units import DEFAULT_UNIT, parse_size
from wherry.records.unit import Unit, UnitFile, UnitPart
from wherry.units.spread import shares

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from wherry.core.keypath import KeyPath
    from wherry.units.target_files import TargetFiles

UNIT_BYTES = parse_size(DEFAULT_UNIT)
SMALLEST_UNIT = 256 << 20
LARGEST_UNIT = 4 << 30


@dataclass(frozen=True, slots=True)
class PlanContents:
    """What a plan moves, as far as its units depend on it.

    Attributes:
        plan: digest of the plan.
        pairs: target key path → key path in the source, or in the view of it.
        nbytes: target key path → canonical bytes.
        stored: key path of every stored tensor of the source → bytes.
        made_of: the stored tensors that a tensor of the view is made of.
        is_view: whether the source is seen through another layout, so that its own digests need reads of their own.
    """

    plan: str
    pairs: Mapping[KeyPath, KeyPath]
    nbytes: Mapping[KeyPath, int]
    stored: Mapping[KeyPath, int]
    made_of: Callable[[KeyPath], Collection[KeyPath]]
    is_view: bool = False


def most_of_file(unit_bytes: int, *, local: bool) -> int:
    """Bytes of a file above which it is cut into regions: the size of a unit.

    Another worker can read back a whole object, but not a part of an upload: so in a store of objects, files stay
    whole by default up to the largest unit there is.

    Args:
        unit_bytes: size of a unit.
        local: whether the target is on a file system.
    """
    return LARGEST_UNIT if unit_bytes == UNIT_BYTES and not local else unit_bytes


def cut(contents: PlanContents, files: TargetFiles, unit_bytes: int = UNIT_BYTES) -> tuple[Unit, ...]:
    """Cut a plan into units.

    Args:
        contents: what the plan moves.
        files: the files of its target.
        unit_bytes: size of a unit; a larger file that has no regions is one unit.

    Returns:
        The units, in the order of the target's files. Every file or region of one is in exactly one, and so is every
        tensor with elements whose files are.
    """
    groups = [list(files.sizes)] if files.whole else list(_groups(files, unit_bytes))
    parts, beside = _parts(contents, files, groups)
    sources = [
        tuple(dict.fromkeys(one for part in row for one in contents.made_of(part.source))) for row in parts
    ]
    moved = [sum(part.nbytes for part in (*own, *more)) for own, more in zip(parts, beside, strict=True)]
    hashed = _assign_hashing(contents, sources, moved) if contents.is_view else [[] for _ in groups]
    return tuple(
        Unit(
            number=number,
            plan=contents.plan,
            files=tuple(UnitFile(_file(files, name), files.sizes[name]) for name in names),
            parts=tuple(parts[number]),
            sources=sources[number],
            hashed=tuple(hashed[number]),
            nbytes_in=moved[number] + sum(contents.stored[path] for path in hashed[number]),
            beside=tuple(beside[number]),
            region=files.regions[names[0]].span if names[0] in files.regions else None,
        )
        for number, names in enumerate(groups)
    )


def _assign_hashing(
    contents: PlanContents, sources: list[tuple[KeyPath, ...]], moved: list[int]
) -> list[list[KeyPath]]:
    """The stored tensors that each unit hashes: each by the unit that reads least, of those that need it or of all."""
    needing: dict[KeyPath, list[int]] = {}
    for number, paths in enumerate(sources):
        for path in paths:
            needing.setdefault(path, []).append(number)
    loads, hashed = list(moved), [list["KeyPath"]() for _ in sources]
    for path, nbytes in sorted(contents.stored.items(), key=lambda row: (-row[1], row[0])):
        number = min(needing.get(path, range(len(sources))), key=loads.__getitem__)
        hashed[number].append(path)
        loads[number] += nbytes
    return hashed


def _parts(
    contents: PlanContents, files: TargetFiles, groups: Sequence[Sequence[str]]
) -> tuple[list[list[UnitPart]], list[list[UnitPart]]]:
    """What each unit writes, in the order of the target, and what it reads beside that."""
    unit_of = {name: number for number, names in enumerate(groups) for name in names}
    parts, beside = [list[UnitPart]() for _ in groups], [list[UnitPart]() for _ in groups]
    for target, source in contents.pairs.items():
        nbytes = contents.nbytes[target]
        if not nbytes:
            continue
        if target not in files.spread or len(groups) == 1:
            parts[unit_of.get(files.homes.get(target, ""), 0)].append(UnitPart(source, 0, nbytes))
            continue
        for share in shares(files.spread[target], unit_of):
            parts[share.unit] += [UnitPart(source, *span) for span in share.own]
            beside[share.unit] += [UnitPart(source, *span) for span in share.beside]
    return parts, beside


def _file(files: TargetFiles, name: str) -> str:
    return files.regions[name].file if name in files.regions else name


def _groups(files: TargetFiles, most: int) -> Iterator[list[str]]:
    """The names of files, in groups of at most so many bytes; a larger file, or a region, is a group of its own."""
    held: list[str] = []
    filled = 0
    for name, size in files.sizes.items():
        if held and (filled + size > most or name in files.regions):
            yield held
            held, filled = [], 0
        held.append(name)
        filled += most if name in files.regions else size
    if held:
        yield held
