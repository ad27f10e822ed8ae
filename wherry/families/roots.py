"""roots: which tree of a checkpoint a system's layouts fit, and the checkpoint under the names of that tree.

A reading (`wherry.layout.tree_reading`) lists the trees that the parameters of a checkpoint may be, the one with the
fewest removals first. The first that a system knows completely, below the system's own root (`params/params` of
MaxText), is taken; if there is none, the one of which it knows most and that leaves out fewest weights. One name of
each form is looked up, not every layer's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from wherry.core.keypath import KeyPath, parse, render
from wherry.core.manifest import Manifest
from wherry.families.bind import BoundFamily, unknown_tensors
from wherry.families.templates import form_choices, replace_macros
from wherry.formats.registry import is_container
from wherry.layout.layout import skeleton
from wherry.layout.tree_reading import WEIGHTS, ModelTree, TreeReading

if TYPE_CHECKING:
    from wherry.families.schema import Family, System

_HUGGINGFACE = "huggingface"
_DEEPEST_PREFIX = 4  # words of a prefix that no table knows
_PLACE = "@"  # in a slot: the parameter's own key path


class SourceTree(NamedTuple):
    """A system that stores a checkpoint, and the tree that it stores.

    Attributes:
        system: the system.
        tree: the checkpoint's parameters under the system's names.
        unknown: the number of forms of names that the system does not know.
    """

    system: System
    tree: ModelTree
    unknown: int


def source_tree(
    family: Family,
    format: str,
    manifest: Manifest,
    reading: TreeReading,
    *,
    peel: bool = True,
    system: str | None = None,
) -> SourceTree | None:
    """The system of a family that stores a checkpoint, and the tree; None if no system has checkpoints of the format.

    Several systems may share a format, and a container may hold one-part names as Hugging Face stores them. Where no
    tree is known completely, Hugging Face comes before other systems that know as much.

    Args:
        family: the model family.
        format: the format of the checkpoint.
        manifest: what it holds.
        reading: of its tree.
        peel: whether trees count whose wrappers are removed.
        system: the only system that counts, if it is known.
    """
    best: tuple[int, SourceTree] | None = None
    systems = [one for one in _systems(family, format) if system in (None, one.name)]
    for tree in reading.trees if peel else reading.trees[:1]:
        sample = _one_of_each_form(manifest, tree)
        apart = sum(tree.outside.get(path) in WEIGHTS for path in sample.tensors)
        for one in systems:
            for candidate in _place_below_roots(tree, one):
                unknown = unknown_tensors(family, one, named_manifest(sample, candidate), candidate.outside)
                if best is None or unknown + apart < best[0]:
                    best = unknown + apart, SourceTree(one, candidate, unknown)
        if best is not None and not best[0]:
            break
    return best[1] if best else None


def removal_rule(family: Family, format: str, manifest: Manifest, reading: TreeReading) -> str | None:
    """The rename rule without whose prefix a system of a family knows every name; None if there is none.

    It is for prefixes that no table knows: what they stand for, the user must say.

    Args:
        family: the model family.
        format: the format of the checkpoint.
        manifest: what it holds.
        reading: of its tree.
    """
    for whole in reading.trees:
        tree = whole.without_first()
        for _depth in range(_DEEPEST_PREFIX):
            if tree is None:
                break
            sample = _one_of_each_form(manifest, tree)
            for one in _systems(family, format):
                for candidate in _place_below_roots(tree, one):
                    if not unknown_tensors(family, one, named_manifest(sample, candidate), candidate.outside):
                        return _rule_of(tree)
            tree = tree.without_first()
    return None


def _rule_of(tree: ModelTree) -> str | None:
    """The rule that removes what precedes every name of a tree; None if it is not the same for all."""
    pairs = [(render(path), render(name)) for path, name in tree.names.items() if path not in tree.outside]
    stored, name = pairs[0]
    prefix = stored.removesuffix(name)
    if not prefix or any(path != prefix + name for path, name in pairs):
        return None
    return f"{prefix}{{rest*}} -> {{rest*}}"


def _systems(family: Family, format: str) -> Iterator[System]:
    """The systems of a family that may store trees in a format; Hugging Face first in a container."""
    contained = is_container(format)
    fits = [
        one
        for one in family.systems.values()
        if format in one.formats or (contained and one.name == _HUGGINGFACE)
    ]
    yield from sorted(fits, key=lambda one: one.name != _HUGGINGFACE) if contained else fits


def _place_below_roots(tree: ModelTree, system: System) -> Iterator[ModelTree]:
    """A tree as it is, and below each root of a system; with names of one part where Hugging Face's were nested."""
    yield tree
    if system.name == _HUGGINGFACE and any(len(name) > 1 for name in tree.names.values()):
        yield tree.joined(".")
    for parts, joint in _roots(system):
        if parts or joint:
            yield tree.below(parts, joint)
        for depth in range(1, 0 if joint else len(parts)):  # a part of the root is there (`lm` of PaxML)
            if all(name[: len(parts) - depth] == parts[depth:] for name in tree.names.values()):
                yield tree.below(parts[:depth], "")


def _roots(system: System) -> list[tuple[KeyPath, str]]:
    """The roots of a system in each of its forms: parts of key paths, and the start of a name of one part."""
    found: dict[tuple[KeyPath, str], None] = {}
    for forms in form_choices(system, {}):
        for slot in system.slots["params"]:
            conventions = {name: one.usual for name, one in system.conventions.items()}
            before = replace_macros(slot.partition(_PLACE)[0], system, {**forms, **conventions})
            parts, _slash, joint = before.rpartition("/")
            found[parse(parts), joint] = None
    return list(found)


def _one_of_each_form(manifest: Manifest, tree: ModelTree) -> Manifest:
    """A manifest with one tensor for each form of names, where forms differ in more than numbers."""
    kept: dict[str, KeyPath] = {}
    for path in manifest.tensors:
        kept.setdefault(skeleton(tree.name(path)), path)
    return replace(manifest, tensors={path: manifest.tensors[path] for path in kept.values()}, digests={})


def named_manifest(manifest: Manifest, tree: ModelTree | None) -> Manifest:
    """A manifest under the names of a tree."""
    changed = {} if tree is None else {path: name for path, name in tree.names.items() if path != name}
    if not changed:
        return manifest
    tensors = {
        (name := changed.get(path, path)): spec if name == path else replace(spec, path=name)
        for path, spec in manifest.tensors.items()
    }
    return replace(manifest, tensors=tensors, digests={})


def under_stored_names(bound: BoundFamily, manifest: Manifest, tree: ModelTree) -> BoundFamily:
    """A checkpoint that was bound under the names of a tree, with the key paths that it is stored under.

    Args:
        bound: the bound checkpoint.
        manifest: what it holds.
        tree: the tree.
    """
    changed = {name: path for path, name in tree.names.items() if path != name}
    if not changed:
        return bound

    def stored(name: KeyPath) -> KeyPath:
        return changed.get(name, name)

    return replace(
        bound,
        stored={
            stored(name): replace(one, spec=manifest.tensors[stored(name)])
            for name, one in bound.stored.items()
        },
        scalars={number: stored(name) for number, name in bound.scalars.items()},
        ignored=tuple(replace(entry, path=stored(entry.path)) for entry in bound.ignored),
        apart=tuple(replace(entry, path=stored(entry.path)) for entry in bound.apart),
        specs=manifest.tensors,
        copies={stored(name): parameter for name, parameter in bound.copies.items()},
        names={path: name for name, path in changed.items()},
    )
