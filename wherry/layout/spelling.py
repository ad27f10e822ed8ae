"""Spelling: the key paths of a whole tree under options, and the record that leads back to the old ones.

It also finds out which nodes of a renamed tree are still sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wherry.core.keypath import KeyPath, parse, render
from wherry.core.tensorspec import TensorSpec
from wherry.errors import UsageError
from wherry.layout.axes import BOX_TAG, BOXES
from wherry.layout.forms import BOX, FORM_OPTIONS, Leaves, respell, rule_texts

if TYPE_CHECKING:
    from wherry.core.manifest import Manifest
    from wherry.layout.tree_reading import TreeReading


CUT_OPTIONS = {
    "split": "separator at which one-part key paths are split into a tree, for example `.`",
    "join": "separator with which key paths are joined into one part, for example `.`",
}
NUMBERED = (
    "paxml"  # in `custom`: `names` of leaves that are stored under numbers, and the `lists` among their nodes
)
RENAMED = "renamed"  # in a receipt's options: what a rewrite renamed, printed key path → new one
NAMES = "names"  # in a manifest's origin: the requested forms, and every key path that they changed


def recut(tree: Mapping[str, Any]) -> Callable[[KeyPath], KeyPath]:
    """The change of a key path by `split`, `join` or the renaming of a rewrite among these options.

    Raises:
        UsageError: both `split` and `join` are set.
    """
    split, join = tree.get("split"), tree.get("join")
    if split and join:
        raise UsageError("split and join are mutually exclusive", cure="remove one of the two options")
    if split:
        return lambda path: tuple(path[0].split(split)) if len(path) == 1 else path
    if join:
        return lambda path: (join.join(path),)
    if RENAMED in tree:
        names = {parse(old): parse(new) for old, new in tree[RENAMED].items()}
        return lambda path: names.get(path, path)
    return lambda path: path


def changes_key_paths(tree: Mapping[str, Any]) -> bool:
    """Whether options change key paths; they then replace the naming scheme of the format."""
    return any(tree.get(option) is not None for option in (*CUT_OPTIONS, *FORM_OPTIONS))


def with_renames(tree: Mapping[str, Any], renames: Iterable[str]) -> Mapping[str, Any]:
    """Options with more rules after those of `rename`."""
    texts = (*rule_texts(tree.get("rename") or ()), *renames)
    return {**tree, "rename": texts} if texts else tree


def spell(chosen: Manifest, tree: Mapping[str, Any], left: frozenset[str]) -> dict[KeyPath, KeyPath] | None:
    """Key path → new key path if named forms are requested; None if `split` and `join` are the only options.

    Args:
        chosen: the entries that are carried.
        tree: of TREE_OPTIONS.
        left: rules that ignore `values` or `empties`, which then need no new key path.

    Raises:
        UsageError, UnrepresentableError: see `forms.respelled`.
    """
    if not any(tree.get(option) is not None for option in FORM_OPTIONS):
        return None
    first = recut({"split": tree.get("split"), "join": tree.get("join")})
    before = first if tree.get("split") else _same
    after = first if tree.get("join") else _same
    values = chosen.values if "values" not in left else {}
    empties = chosen.empties if "empties" not in left else {}
    every = (*chosen.tensors, *values, *empties)
    names = respell(
        Leaves(
            tensors=frozenset(before(path) for path in chosen.tensors),
            others=frozenset(before(path) for path in (*values, *empties)),
            named=frozenset(before(path) for path, spec in chosen.tensors.items() if spec.axes is not None),
        ),
        tree,
    )
    return {path: after(names[before(path)]) for path in every}


def read_renamed(manifest: Manifest, rules: Sequence[str]) -> TreeReading:
    """The reading of a tree whose leaves the user renames, by the key paths that they are stored under.

    Args:
        manifest: what the checkpoint holds.
        rules: of `wherry.layout.renames`.

    Raises:
        UsageError: a rule is invalid or matches no key path.
        UnrepresentableError: two key paths become one.
    """
    from wherry.layout.tree_reading import read_tree

    stated = stated_names(manifest)
    if not rules:
        return read_tree(manifest, stated)
    tensors = frozenset(stated.get(path, path) for path in manifest.tensors)
    others = frozenset(stated.get(path, path) for path in (*manifest.values, *manifest.empties))
    renamed = respell(Leaves(tensors, others), {"rename": tuple(rules)})
    every = (*manifest.tensors, *manifest.values, *manifest.empties)
    return read_tree(manifest, {path: renamed[stated.get(path, path)] for path in every})


def stated_names(manifest: Manifest) -> dict[KeyPath, KeyPath]:
    """Key path → the name that PaxML's Flax type states for it in a text; empty for every other tree."""
    noted = manifest.custom.get(NUMBERED)
    if not isinstance(noted, dict) or not isinstance(noted.get("names"), dict):
        return {}
    names = {parse(stored): parse(name) for stored, name in noted["names"].items()}
    here = {*manifest.tensors, *manifest.empties}
    return names if here <= names.keys() and len(set(names.values())) == len(names) else {}


def _same(path: KeyPath) -> KeyPath:
    return path


def renamed_spec(spec: TensorSpec, path: KeyPath) -> TensorSpec:
    """A tensor under its new key path; a newly boxed tensor records the class of its box."""
    boxed = path[-1:] == (BOX,) and spec.path[-1:] != (BOX,) and spec.axes is not None
    tags = {BOX_TAG: BOXES[0], **(spec.tags or {})} if boxed else spec.tags
    return spec if path == spec.path and tags is spec.tags else replace(spec, path=path, tags=tags)


def carried_lists(
    source: Manifest, tree: Mapping[str, Any], changed: Mapping[KeyPath, KeyPath] | None
) -> tuple[frozenset[KeyPath], tuple[KeyPath, ...]]:
    """The nodes that are sequences in the new tree, and those that no longer are."""
    if tree.get("split") or tree.get("join"):
        return frozenset(), ()
    if changed is None:
        return source.lists, ()
    return kept_lists(source.lists, changed)


def record(tree: Mapping[str, Any], changed: Mapping[KeyPath, KeyPath]) -> dict[str, Any]:
    """The requested forms and the resulting renaming, so that it can be undone and verified; see `renaming_of`."""
    requested = {option: tree[option] for option in FORM_OPTIONS if tree.get(option) is not None}
    noted: dict[str, Any] = {
        "requested": {
            **requested,
            **({"rename": list(requested["rename"])} if "rename" in requested else {}),
        },
        RENAMED: {render(old): render(new) for old, new in sorted(changed.items()) if old != new},
    }
    if list(requested) == ["rename"]:
        from wherry.layout.renames import inverse_rules, parse_rules

        back = inverse_rules(dict(changed), parse_rules(requested["rename"]))
        noted |= {"inverse": list(back)} if back else {}
    return noted


def renaming_of(manifest: Manifest | None, options: Mapping[str, Any]) -> Callable[[KeyPath], KeyPath]:
    """How a conversion changed key paths: old one → new one.

    Args:
        manifest: of the target, with its origin; None if unknown.
        options: of its receipt.

    Raises:
        UsageError: both `split` and `join` are set.
    """
    noted = manifest.origin.get(NAMES) if manifest is not None else None
    return recut({RENAMED: noted[RENAMED]} if isinstance(noted, dict) else options)


def kept_lists(
    lists: Iterable[KeyPath], names: Mapping[KeyPath, KeyPath]
) -> tuple[frozenset[KeyPath], tuple[KeyPath, ...]]:
    """Follow the sequences of a tree through a renaming.

    A node remains a sequence if all its items are still below one node under the same indices, and nothing else
    is there.

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
    """The node below which every item still has its index; the old node if possible."""
    common: set[KeyPath] | None = None
    for old, new in held.items():
        index = old[len(node)]
        found = {new[:depth] for depth, part in enumerate(new) if part == index} - taken
        common = found if common is None else common & found
    if not common:
        return None
    return node if node in common else min(common, key=len)
