"""Weighted sums of checkpoints of one tree: the same key paths, shapes and element types in each.

The weights are taken as they are stated, and not made to sum to 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from wherry.core.keypath import KeyPath, render
from wherry.core.units import plural
from wherry.errors import UnrepresentableError, UsageError
from wherry.formats.checkpoint import Checkpoint
from wherry.merger.join import JoinedCheckpoint, at
from wherry.merger.recipes import WeightedSum, is_summable
from wherry.merger.view import MergedView
from wherry.tree.tree_reading import read_tree

_SHOWN = 3
_CURE = "merge checkpoints of one model and one training, in one form; `wherry diff A B` compares two"


def weighted_sum(sources: Sequence[tuple[Checkpoint, float]]) -> MergedView:
    """The sum of checkpoints, each times its weight.

    Raises:
        UsageError: a weight is not finite.
        UnrepresentableError: key paths, shapes or element types differ, or a tensor has no floating-point type.
    """
    for checkpoint, weight in sources:
        if not math.isfinite(weight):
            raise UsageError(f"invalid weight {weight}", uri=checkpoint.uri, cure="state a finite number")
    first, *others = (checkpoint for checkpoint, _weight in sources)
    paths = [{path: path for path in first.manifest.tensors}, *(_paths_in(first, other) for other in others)]
    for other, named in zip(others, paths[1:], strict=True):
        _require_alike(first, other, named)
    for path, spec in first.manifest.tensors.items():
        if not is_summable(spec.dtype):
            raise UnrepresentableError(
                f"cannot add tensors of type {spec.dtype}", uri=first.uri, path=render(path),
                cure="merge checkpoints whose tensors are floating point",
            )  # fmt: skip
    recipes = {
        path: WeightedSum(
            tuple((at(place, paths[place][path]), weight) for place, (_one, weight) in enumerate(sources))
        )
        for path in first.manifest.tensors
    }
    merge = {
        "kind": "linear",
        "sources": [{"uri": one.uri, "weight": weight} for one, weight in sources],
    }
    terms = " + ".join(f"{weight:g} × {one.uri}" for one, weight in sources)
    return MergedView(
        JoinedCheckpoint([one for one, _weight in sources]), recipes, merge, (f"merged: {terms}",)
    )


def _paths_in(first: Checkpoint, other: Checkpoint) -> Mapping[KeyPath, KeyPath]:
    """Key path in the first source → key path of the same parameter in another, which may have other wrappers."""
    same = {path: path for path in other.manifest.tensors}
    if same.keys() == first.manifest.tensors.keys():
        return same
    known = [tree for tree in read_tree(first.manifest).trees if not tree.outside]
    for tree in read_tree(other.manifest).trees:
        paths = {name: path for path, name in tree.names.items()}
        for own in known:
            if not tree.outside and set(own.names.values()) == paths.keys():
                return {path: paths[name] for path, name in own.names.items()}
    return same


def _require_alike(one: Checkpoint, other: Checkpoint, paths: Mapping[KeyPath, KeyPath]) -> None:
    """Compare two sources.

    Args:
        one, other: the sources.
        paths: key path in the first → key path in the other.
    """
    tensors = one.manifest.tensors
    other_tensors = {path: other.manifest.tensors[stored] for path, stored in paths.items()}
    odd = sorted(set(tensors) ^ set(other_tensors))
    if odd:
        raise UnrepresentableError(
            f"{plural(len(odd), 'tensor')} of only one of {one.uri} and {other.uri}: {_name_paths(odd)}",
            uri=other.uri, cure=_CURE,
        )  # fmt: skip
    for path, spec in tensors.items():
        for what, here, there in (
            ("shape", spec.shape, other_tensors[path].shape),
            ("type", spec.dtype, other_tensors[path].dtype),
        ):
            if here != there:
                raise UnrepresentableError(
                    f"{what} is {here} in {one.uri} and {there} in {other.uri}",
                    uri=other.uri, path=render(path), cure=_CURE,
                )  # fmt: skip


def _name_paths(paths: Sequence[KeyPath]) -> str:
    return ", ".join([*map(render, paths[:_SHOWN]), *(["…"] if len(paths) > _SHOWN else [])])
