"""The file names of flax checkpoints, and the boxes in their trees.

Facts (flax `training/checkpoints.py`, 0.3 to 0.12): a checkpoint is the file `<prefix><step>`, prefix `checkpoint_`
by default, step an int or a float, possibly negative; it is written as `<prefix>tmp` and renamed. Arrays that no single
process held are in the folder `<file>_gda`, one zarr array below `a/b/c/` for the leaf with the text
`//GDAPlaceholder:a/b/c`. The folder is renamed first, then the file; on Google's store the folder has its final name
from the start and is committed when it has `commit_success.txt`. Transformers writes `flax_model.msgpack`.

linen boxes (`Partitioned`, `LogicallyPartitioned`) are one more key `value` around a leaf, and so are NNX variables
(`raw_value` in flax 0.8); logical axis names are not stored.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from wherry.core.detection import Evidence

if TYPE_CHECKING:
    from collections.abc import Iterable

    from wherry.core.keypath import KeyPath

PREFIX = "checkpoint_"
ARRAYS_SUFFIX = "_gda"
PLACEHOLDER = "//GDAPlaceholder:"
COMMITTED = "commit_success.txt"
SUFFIX = ".msgpack"
# Placeholders of Orbax and T5X for arrays stored elsewhere: a file with one is not a plain flax file.
FOREIGN = ("PLACEHOLDER://", "AGGREGATED://")
_NUMBERED = re.compile(r"(?:.*_)?(-?\d{1,15}(?:\.\d+)?)(?:\.msgpack)?")
_TEMPORARY = re.compile(r"(?:.*_)?tmp")
_BOXES = ("value", "raw_value")


def step_of(name: str) -> int | None:
    """The step in a file name; None if there is none, or a fraction."""
    found = _NUMBERED.fullmatch(name)
    step = float(found.group(1)) if found else None
    return int(step) if step is not None and step.is_integer() else None


def is_numbered(name: str) -> bool:
    """Whether a file has flax's name for a step, fractions included."""
    return _NUMBERED.fullmatch(name) is not None and "_" in name


def plausible(name: str, state: str) -> bool:
    """Whether the name makes a msgpack map without a visible array a flax file.

    Args:
        name: name of the file.
        state: how far its first bytes could be parsed (`Glance`); the less, the stricter the check of the name.
    """
    if state == "wrong":
        return name.startswith(PREFIX) or name.endswith(SUFFIX)
    return is_numbered(name) or (name.endswith(SUFFIX) and state != "whole")


def temporary(name: str) -> bool:
    """Whether a file has flax's name for an unfinished save."""
    return _TEMPORARY.fullmatch(name) is not None


def boxes(paths: Iterable[KeyPath], file: str) -> tuple[Evidence, ...]:
    """Evidence of the wrappers around the leaves of a tree."""
    known = list(paths)
    children: dict[KeyPath, int] = {}
    for path in known:
        children[path[:-1]] = children.get(path[:-1], 0) + 1
    rows: list[Evidence] = []
    for box in _BOXES:
        boxed = sum(path[-1:] == (box,) and children[path[:-1]] == 1 for path in known)
        if boxed:
            words = "an NNX variable of flax 0.8" if box == "raw_value" else "a linen box or an NNX variable"
            rows.append(Evidence(file, f"`{box}` alone around {boxed} of {len(known)} leaves: {words}"))
    return tuple(rows)
