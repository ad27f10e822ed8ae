"""cut: cuts a plan into units. A pure function: the same plan gives the same units everywhere.

A unit is one file of the target, or several small ones that together stay below the size that was chosen. Files are
never cut, so no unit needs bytes of another; a format whose target is one file is one unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from wherry.units.unit import Unit, UnitFile, UnitPart

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from wherry.core.keypath import KeyPath
    from wherry.units.target_files import TargetFiles

UNIT_BYTES = 1 << 30
SMALLEST_UNIT = 256 << 20
LARGEST_UNIT = 4 << 30


@dataclass(frozen=True, slots=True)
class Contents:
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


def cut(contents: Contents, files: TargetFiles, unit_bytes: int = UNIT_BYTES) -> tuple[Unit, ...]:
    """Cut a plan into units.

    Args:
        contents: what the plan moves.
        files: the files of its target.
        unit_bytes: size of a unit; a larger file is one unit.

    Returns:
        The units, in the order of the target's files. Every file and every tensor with elements is in exactly one.
    """
    inside = _inside(contents, files)
    groups = [list(files.sizes)] if files.whole else list(_groups(files.sizes, unit_bytes))
    unhashed = dict.fromkeys(contents.stored) if contents.is_view else {}
    units: list[Unit] = []
    for number, names in enumerate(groups):
        parts = [part for name in names for part in inside.get(name, ())]
        sources = tuple(dict.fromkeys(one for part in parts for one in contents.made_of(part.source)))
        own = [path for path in sources if path in unhashed]
        last = number == len(groups) - 1
        hashed = (
            tuple(unhashed) if last and contents.is_view else tuple(own)
        )  # the last takes what nobody moves
        for path in hashed:
            del unhashed[path]
        units.append(
            Unit(
                number=number,
                plan=contents.plan,
                files=tuple(UnitFile(name, files.sizes[name]) for name in names),
                parts=tuple(parts),
                sources=sources,
                hashed=hashed,
                nbytes_in=sum(part.nbytes for part in parts) + sum(contents.stored[path] for path in hashed),
            )
        )
    return tuple(units)


def _inside(contents: Contents, files: TargetFiles) -> dict[str, list[UnitPart]]:
    """File → the tensors in it, in the order of the target."""
    first = next(iter(files.sizes), ".")
    inside: dict[str, list[UnitPart]] = {}
    for target, source in contents.pairs.items():
        nbytes = contents.nbytes[target]
        if nbytes:
            inside.setdefault(files.homes.get(target, first), []).append(UnitPart(source, 0, nbytes))
    return inside


def _groups(sizes: Mapping[str, int], most: int) -> Iterator[list[str]]:
    """The names of files, in groups of at most so many bytes; a larger file is a group of its own."""
    held: list[str] = []
    filled = 0
    for name, size in sizes.items():
        if held and filled + size > most:
            yield held
            held, filled = [], 0
        held.append(name)
        filled += size
    if held:
        yield held
