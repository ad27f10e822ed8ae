"""TargetFiles: which files the writer of a format would create for a plan, and where each tensor lies in them.

Nothing is written: the writer is created in a store that holds nothing (`FileSketch`), and asked for the byte ranges of
every tensor. So this follows the writer itself, and no second description of a format can disagree with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from wherry.core.tensorspec import Span
from wherry.errors import UnsupportedError
from wherry.formats.registry import find_format
from wherry.formats.writer import extents_of
from wherry.storage.location import Location
from wherry.upload.selection import FileSketch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wherry.converter.plan import Plan
    from wherry.core.keypath import KeyPath
    from wherry.formats.writer import ExtentsFunction

_ROOT = "/target"


@dataclass(frozen=True, slots=True)
class TargetFiles:
    """The files of a target.

    Attributes:
        sizes: name relative to the target → bytes, in the writer's order; `.` for the target itself if it is one file.
        homes: target key path → name of the file that holds the tensor; only of tensors with elements.
        whole: why the target cannot be cut between its files; empty if it can.
    """

    sizes: Mapping[str, int]
    homes: Mapping[KeyPath, str]
    whole: str = ""


def target_files(plan: Plan) -> TargetFiles | None:
    """The files of a plan's target; None if its format is written through a file system, by one process.

    Raises:
        UnrepresentableError: the format cannot hold one of the tensors.
    """
    row = find_format(plan.to)
    if not row.streams or row.create is None:
        return None
    sketch = FileSketch()
    try:
        writer = row.create(Location(sketch, _ROOT), plan.manifest, plan.options)
    except UnsupportedError:  # it needs a file system, or stores of objects with parts
        return None
    try:
        homes = _homes(extents_of(writer), plan)
    finally:
        writer.close()
    sizes = {_name(path): size for path, size in sketch.sizes.items()}
    lost = next((path for path, home in homes.items() if home is None), None)
    if lost is not None:
        return TargetFiles(sizes, {}, f"the bytes of {'/'.join(lost)} are encoded before they are written")
    whole = f"{row.name} is one file" if len(sizes) == 1 else ""
    return TargetFiles(sizes, {path: home for path, home in homes.items() if home is not None}, whole)


def _homes(where: ExtentsFunction, plan: Plan) -> dict[KeyPath, str | None]:
    found: dict[KeyPath, str | None] = {}
    for path, spec in plan.manifest.tensors.items():
        if spec.nbytes:
            extents = where(path, Span(0, spec.nbytes))
            names = {_name(extent.location.path) for extent in extents or ()}
            found[path] = names.pop() if len(names) == 1 else None
    return found


def _name(path: str) -> str:
    return path[len(_ROOT) :].strip("/") or "."
