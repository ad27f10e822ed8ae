"""PaxML's flat names: a key path as one folder name, and what the names show about optimizer and layers.

Facts (paxml 1.4.0, `extract_prefixed_keys_from_nested_map`): parts are joined with `.`; the index of a list or tuple
is appended to the part before it as `_<i>`, without brackets. Nothing on disk marks an appended index, so a name is
split at `.` only and keeps its index. `opt_states_<k>` is the k-th learner. With repeated layers a group follows,
`no_prefix_<j>` for single and `p#<dims>#<sharding>_<j>` for stacked variables, where j is the position in the optax
chain; without any stacked variable the index is appended to the learner, `opt_states_0_2`. Neither j nor the sharding
code is fixed: the group of the moments is the one that contains them (`m` and `v` for Adam).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from wherry.core.keypath import render
from wherry.errors import UnrepresentableError
from wherry.formats.systems import TreeForm

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from wherry.core.keypath import KeyPath
    from wherry.core.manifest import Manifest
    from wherry.core.tensorspec import TensorSpec

SEPARATOR = "."
VARIABLES = "mdl_vars"
OPTIMIZER = "opt_states"
_STACKED = re.compile(r"p#((?:\d{1,18}\.)*(?:\d{1,18})?)#.*")
_LAYER = re.compile(r"x_layers_(\d{1,18})")
_REPEAT = "repeat"
_MOMENTS_OF = "params"
_OTHER_ROOTS = ("step", "extra_state")


def _is_train_state(manifest: Manifest) -> bool:
    """Whether every root is one of PaxML's train state, and its variables are there."""
    roots = {path[0] for path in manifest.tensors if path}
    own = {VARIABLES, OPTIMIZER, *_OTHER_ROOTS}
    known = all(root in own or root.startswith(f"{OPTIMIZER}_") for root in roots)
    return VARIABLES in roots and known


FORM = TreeForm(_is_train_state, f"a train state, with parameters below `{VARIABLES}`")


def flat_name(path: KeyPath, lists: Collection[KeyPath]) -> str:
    """The folder name of an array.

    Args:
        path: its key path; an index of a list or tuple is a separate part.
        lists: the paths of the nodes that are lists or tuples.

    Raises:
        UnrepresentableError: the path has no part that is a name, or starts with an index.
    """
    parts: list[str] = []
    for depth, part in enumerate(path):
        if path[:depth] not in lists:
            parts.append(part)
        elif parts:
            parts[-1] = f"{parts[-1]}_{part}"
        else:
            parts.append("")
    name = SEPARATOR.join(parts)
    if not name or name.startswith("_"):
        raise UnrepresentableError(
            "PaxML cannot name a bare leaf or a list at the root",
            path=render(path),
            cure="put it into a dict",
        )
    return name


def split_name(name: str) -> KeyPath:
    """Split a folder name into a key path; list indices stay appended to their parts."""
    return tuple(name.split(SEPARATOR))


def optimizer_groups(specs: Mapping[KeyPath, TensorSpec]) -> dict[str, dict[str, Any]]:
    """The groups of the optimizer, by their contents.

    Returns:
        Printed path of each group → its `fields` (`count`, `m`, `v`, …) and, if it is stacked according to its name,
        the extents of the stack.
    """
    groups: dict[str, dict[str, Any]] = {}
    for path in specs:
        if not path or not path[0].startswith(OPTIMIZER):
            continue
        depth = _field_depth(path)
        if depth is None:
            continue
        row = groups.setdefault(render(path[:depth]), {"fields": set[str]()})
        row["fields"].add(path[depth])
        stack = next((found for part in path[:depth] if (found := _STACKED.fullmatch(part))), None)
        if stack is not None:
            row["stacked"] = [int(extent) for extent in stack.group(1).split(".") if extent]
    return {name: {**row, "fields": sorted(row["fields"])} for name, row in sorted(groups.items())}


def layers(paths: Iterable[KeyPath]) -> dict[str, Any] | None:
    """The form of the layers: `repeated` (stacked on axis 0) with the sublayers of a block, or one by one."""
    variables = [path for path in paths if path[:1] == (VARIABLES,)]
    found = [(path, at) for path in variables for at, part in enumerate(path) if _LAYER.fullmatch(part)]
    if not found:
        return None
    numbers = {int(part[len("x_layers_") :]) for path, at in found for part in (path[at],)}
    return {"repeated": any(_REPEAT in path[:at] for path, at in found), "x_layers": len(numbers)}


def _field_depth(path: KeyPath) -> int | None:
    """Position of the field of an optimizer state in its path: before the moments' `params`, else last."""
    if _MOMENTS_OF in path:
        depth = path.index(_MOMENTS_OF) - 1
        return depth if depth > 0 else None
    return len(path) - 1 if len(path) > 1 else None
