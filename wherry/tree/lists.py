"""Lists under other names: which nodes of a renamed tree are sequences, when key paths are all that is renamed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from wherry.core.keypath import KeyPath


def kept_lists(
    lists: Iterable[KeyPath], names: Mapping[KeyPath, KeyPath]
) -> tuple[frozenset[KeyPath], tuple[KeyPath, ...]]:
    """Follow the sequences of a tree through a renaming.

    A sequence stays one where all that it holds still stands under one node by the same indices, and nothing else
    stands there.

    Args:
        lists: nodes that are sequences.
        names: key path → new key path of everything in the tree.

    Returns:
        The sequences of the new tree, and those of the old one that became mappings.
    """
    kept: dict[KeyPath, KeyPath] = {}
    lost: list[KeyPath] = []
    for node in sorted(lists, key=lambda path: (len(path), path)):
        held = {old: new for old, new in names.items() if old[: len(node)] == node and len(old) > len(node)}
        place = _place(node, held, set(kept.values()))
        others = {new for old, new in names.items() if old not in held}
        if place is None or any(new[: len(place)] == place for new in others):
            lost += [node] if held else []
        else:
            kept[node] = place
    return frozenset(kept.values()), tuple(lost)


def _place(node: KeyPath, held: Mapping[KeyPath, KeyPath], taken: set[KeyPath]) -> KeyPath | None:
    """The node under which everything still has its index; the old one where it can be that."""
    common: set[KeyPath] | None = None
    for old, new in held.items():
        index = old[len(node)]
        found = {new[:depth] for depth, part in enumerate(new) if part == index} - taken
        common = found if common is None else common & found
    if not common:
        return None
    return node if node in common else min(common, key=len)
