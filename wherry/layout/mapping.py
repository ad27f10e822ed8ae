"""Mapping: which source entry becomes which target entry when both hold the same tree.

Every tensor is moved once or ignored by a named rule with a reason. Key paths are kept unless `split` turns one-part
names into a tree, a named form respells the tree (`wherry.layout.forms`: boxes, NNX variables, collections, rules), or
`join` turns the tree into one-part names, in this order. Key paths that would collide are refused. Renamings are
recorded in the manifest's origin, so that `verify --against` finds every tensor under its old name.

`require_held` checks that a target format can hold everything in a manifest, before any byte moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from wherry.core import dtypes
from wherry.core.account import COMPANIONS, OTHERS, IgnoredEntry
from wherry.core.keypath import KeyPath, parse, render
from wherry.core.lazy_dataclass import dataclass
from wherry.core.units import plural
from wherry.cures import Argument, Command, Cure
from wherry.errors import UnrepresentableError, UsageError, choose
from wherry.formats.companions import ignored_companion
from wherry.layout.axes import AXIS_OPTIONS, name_axes
from wherry.layout.forms import FORM_OPTIONS
from wherry.layout.spelling import (
    CUT_OPTIONS,
    NAMES,
    NUMBERED,
    RENAMED,
    carried_lists,
    changes_key_paths,
    record,
    recut,
    renamed_spec,
    spell,
    stated_names,
    with_renames,
)

if TYPE_CHECKING:
    from wherry.core.manifest import Manifest
    from wherry.formats.format import Format
    from wherry.layout.tree_reading import TreeReading


__all__ = ["RENAMED", "RULES", "TREE_OPTIONS", "MappedTree", "map_tree", "recut"]

# Options of every target: how the tree is spelled. They are set with --set, as the options of a format are.
TREE_OPTIONS = {**CUT_OPTIONS, **FORM_OPTIONS, **AXIS_OPTIONS}
RULES = ("values", "empties", COMPANIONS, OTHERS)
_PICKLED = "pickle"  # in `custom`: classes and keys of a pickle that plain values cannot represent
_Held = TypeVar("_Held")


@dataclass(frozen=True, slots=True)
class MappedTree:
    """A source manifest as the target's tree.

    Attributes:
        manifest: the target's tensors, values, empties and companions under their new paths.
        pairs: target key path → source key path.
        ignored: entries that are not carried.
    """

    manifest: Manifest
    pairs: Mapping[KeyPath, KeyPath]
    ignored: tuple[IgnoredEntry, ...]


def map_tree(
    source: Manifest,
    row: Format,
    tree: Mapping[str, Any],
    *,
    only: str | None,
    ignore: Iterable[str],
    uri: str,
    renames: Iterable[str] = (),
) -> MappedTree:
    """Map a checkpoint onto the same tree in another container.

    Args:
        source: what the source holds.
        row: the target format.
        tree: of TREE_OPTIONS; at most one of `split` and `join`.
        only: `params` or None.
        ignore: named rules of RULES.
        uri: the target, for errors.
        renames: rules of `wherry.layout.renames`, after those of the option `rename`.

    Raises:
        UsageError: a rule is unknown, both `split` and `join` are set, or a form is invalid or changes nothing.
        UnrepresentableError: two key paths collide, or `only` selects nothing.
        MismatchError: axis names that the user states contradict the checkpoint.
    """
    stated = true_names(source)
    if stated is not None:
        mapped = map_tree(stated.manifest, row, tree, only=only, ignore=ignore, uri=uri, renames=renames)
        return stated.as_stored(mapped)
    rules = frozenset(ignore)
    unknown = rules - set(RULES)
    if unknown:
        raise UsageError(f"unknown rule {', '.join(sorted(unknown))}", cure=choose(min(unknown), RULES))
    source = name_axes(source, tree)
    tree = with_renames(tree, renames)
    kept, ignored = _select(source, only, uri)
    chosen = replace(source, tensors={path: source.tensors[path] for path in kept})
    adapted = None if changes_key_paths(tree) or row.adapt is None else row.adapt(chosen, uri)
    changed = spell(chosen, tree, rules | ({"values", "empties"} if only else frozenset[str]()))
    if adapted and any(old != new for old, new in adapted.names.items()):
        changed = {**adapted.names}
    rename = recut(tree) if changed is None else _lookup(changed)
    pairs = _sources({path: rename(path) for path in kept}, uri)
    lists, lost = carried_lists(source, tree, None if adapted else changed)
    manifest = replace(
        source,
        tensors={name: renamed_spec(source.tensors[path], name) for name, path in pairs.items()},
        values=_carry(source.values, rename),
        empties=_carry(source.empties, rename),
        lists=adapted.lists if adapted else lists,
        custom={**source.custom, **adapted.custom} if adapted else source.custom,
        origin=source.origin if changed is None else {**source.origin, NAMES: record(tree, changed)},
        kind="params" if only == "params" else source.kind,
        digests={},
    )
    manifest, more = _apply_rules(manifest, rules, only, row)
    reason = "a sequence whose items were renamed; it becomes a mapping"
    gone = tuple(IgnoredEntry(path, "lists", reason, "sequence") for path in lost)
    return MappedTree(manifest, pairs, (*ignored, *gone, *more))


class TrueNames(NamedTuple):
    """A tree whose format stores its leaves under other key paths than the tree has.

    Attributes:
        manifest: the tree under its own key paths.
        stored: key path → the one under which it is stored.
        ignored: entries of the source that say no more than these names.
    """

    manifest: Manifest
    stored: Mapping[KeyPath, KeyPath]
    ignored: tuple[IgnoredEntry, ...]

    def as_stored(self, mapped: MappedTree) -> MappedTree:
        """The mapped tree with the source key paths under which the leaves are stored."""
        pairs = {target: self.stored[name] for target, name in mapped.pairs.items()}
        back = {stored: target for target, stored in pairs.items()}
        noted = {"requested": {}, **mapped.manifest.origin.get(NAMES, {})}
        noted[RENAMED] = {render(stored): render(target) for stored, target in sorted(back.items())}
        manifest = replace(mapped.manifest, origin={**mapped.manifest.origin, NAMES: noted})
        return MappedTree(manifest, pairs, (*mapped.ignored, *self.ignored))


def true_names(source: Manifest) -> TrueNames | None:
    """The tree under the names that PaxML's Flax type states in a text; None for every other tree."""
    names = stated_names(source)
    if not names:
        return None
    noted = source.custom[NUMBERED]
    manifest = replace(
        source,
        tensors={names[path]: replace(spec, path=names[path]) for path, spec in source.tensors.items()},
        values={},
        empties={names[path]: kind for path, kind in source.empties.items()},
        lists=frozenset(parse(node) for node in noted.get("lists", ())),
        custom={
            **source.custom,
            NUMBERED: {name: part for name, part in noted.items() if name not in ("names", "lists")},
        },
    )
    reason = "the key paths have the names that it states"
    ignored = tuple(IgnoredEntry(path, "names", reason, "value") for path in source.values)
    return TrueNames(manifest, {name: path for path, name in names.items()}, ignored)


def _lookup(names: Mapping[KeyPath, KeyPath]) -> Callable[[KeyPath], KeyPath]:
    return lambda path: names.get(path, path)


def parameters_of(source: Manifest, uri: str) -> list[KeyPath]:
    """The tensors that `only="params"` carries, in order."""
    return _select(source, "params", uri)[0]


def _select(source: Manifest, only: str | None, uri: str) -> tuple[list[KeyPath], tuple[IgnoredEntry, ...]]:
    paths = sorted(source.tensors)
    if only is None:
        return paths, ()
    if only != "params":
        raise UsageError(
            f"invalid value for --only: {only!r}", cure=Cure("pass {}", Argument("only", "params"))
        )
    from wherry.layout.tree_reading import read_tree

    reading = read_tree(source)
    kept = sorted(reading.parameters)
    if not kept:
        raise UnrepresentableError(
            f"--only params: {_why_nothing(reading)}",
            uri=uri,
            cure=Cure("remove {} to convert every tensor", Argument("only", "params")),
        )
    chosen = set(kept)
    words = {"parameter": "outside the model", "unknown": "not known to be a parameter"}
    left = ((path, reading.leaves[path]) for path in paths if path not in chosen)
    return kept, tuple(
        IgnoredEntry(
            path,
            "only params",
            f"{words.get(leaf.kind, leaf.kind)}: {leaf.why}; only parameters were requested",
        )
        for path, leaf in left
    )


def _why_nothing(reading: TreeReading) -> str:
    """Why no tensors are known to be the parameters."""
    unknown = sorted(map(render, reading.unknown))
    if not unknown:
        return "no parameters found in this tree"
    more = f", and {len(unknown) - _SHOWN_FAULTS} more" if len(unknown) > _SHOWN_FAULTS else ""
    shown = ", ".join(unknown[:_SHOWN_FAULTS])
    return f"{plural(len(unknown), 'tensor')} of unknown kind, parameters or not: {shown}{more}"


def _sources(names: Mapping[KeyPath, KeyPath], uri: str) -> dict[KeyPath, KeyPath]:
    """The key path of the source by that of the target; both must be unique, and no tensor be within another."""
    owners = {target: source for source, target in names.items()}
    for source, target in names.items() if len(owners) < len(names) else ():
        if owners[target] != source:
            raise UnrepresentableError(
                f"key collision: {render(source)} and {render(owners[target])} would both become {render(target)}",
                uri=uri,
                cure="choose another separator, or remove split and join",
            )
    for target in [one for one in owners if len(one) > 1]:
        inner = next((target[:cut] for cut in range(1, len(target)) if target[:cut] in owners), None)
        if inner is not None:
            raise UnrepresentableError(
                f"key collision: {render(inner)} would be both a tensor and the parent of {render(target)}",
                uri=uri,
                cure="choose another separator, or remove split and join",
            )
    return owners


def _carry(held: Mapping[KeyPath, _Held], rename: Callable[[KeyPath], KeyPath]) -> dict[KeyPath, _Held]:
    return {rename(path): value for path, value in held.items()}


def _apply_rules(
    manifest: Manifest, rules: frozenset[str], only: str | None, row: Format
) -> tuple[Manifest, tuple[IgnoredEntry, ...]]:
    ignored: list[IgnoredEntry] = []
    if "values" in rules or only:
        ignored += [
            IgnoredEntry(path, "values", "non-tensor leaf, ignored by rule", "value")
            for path in manifest.values
        ]
        manifest = replace(manifest, values={})
    if "empties" in rules or only:
        reason = "empty node, ignored by rule"
        ignored += [IgnoredEntry(path, "empties", reason, "empty node") for path in manifest.empties]
        manifest = replace(manifest, empties={})
    if COMPANIONS in rules or not row.holds.companions:
        cannot = f"{row.name} is one file and cannot hold companion files"
        reason = "ignored by rule" if COMPANIONS in rules else cannot
        stated = frozenset[str]() if COMPANIONS in rules else row.holds.stated
        kept = tuple(companion for companion in manifest.companions if companion.name in stated)
        left = [companion.name for companion in manifest.companions if companion.name not in stated]
        ignored += [ignored_companion(name, reason) for name in left]
        manifest = replace(manifest, companions=kept)
    pickled: Mapping[str, Mapping[str, Any]] | None = manifest.custom.get(_PICKLED)
    if not row.holds.types and isinstance(pickled, dict):  # the contents are kept; classes and keys are lost
        ignored += [
            IgnoredEntry((path,), "types", f"a {name}, which {row.name} stores as a plain value", "class")
            for path, name in pickled.get("types", {}).items()
        ]
        ignored += [
            IgnoredEntry((path,), "types", f"the key {key!r}, which {row.name} stores as text", "key")
            for path, key in pickled.get("keys", {}).items()
        ]
    return manifest, tuple(ignored)


_SHOWN_FAULTS = 3


def require_held(manifest: Manifest, row: Format, uri: str) -> None:
    """Check that a format can hold everything in a manifest.

    Raises:
        UnrepresentableError: it cannot; the first few entries are named.
    """
    faults = list(_faults(manifest, row))
    if faults:
        more = len(faults) - _SHOWN_FAULTS
        shown = "; ".join(faults[:_SHOWN_FAULTS]) + (f"; and {more} more" if more > 0 else "")
        raise UnrepresentableError(f"{row.name} cannot hold {shown}", uri=uri, cure=_cure(manifest, row))


def _faults(manifest: Manifest, row: Format) -> Iterator[str]:
    holds = row.holds
    for spec in manifest.tensors.values():
        if spec.dtype not in holds.dtypes:
            yield f"dtype {spec.dtype} (tensor {spec.name})"
        if not dtypes.is_known(spec.dtype):
            yield f"unknown dtype {spec.dtype} (tensor {spec.name})"
        if holds.depth is not None and len(spec.path) > holds.depth:
            yield f"a key path of {len(spec.path)} parts (tensor {spec.name})"
        if holds.depth is not None and not spec.path:
            yield "a tensor without a name"
        if holds.rank is not None and len(spec.shape) > holds.rank:
            yield f"a tensor of {len(spec.shape)} dimensions (tensor {spec.name})"
        if not holds.zero_size and spec.size == 0:
            yield f"a tensor without elements (tensor {spec.name})"
    if not holds.values:
        yield from (f"the non-tensor leaf {render(path)}" for path in manifest.values)
    if not holds.empties:
        yield from (f"the empty node {render(path)}" for path in manifest.empties)


def _cure(manifest: Manifest, row: Format) -> str:
    if row.holds.depth is not None and () in manifest.tensors:
        return "save it under a name, in a dict, or choose a target with trees such as orbax"
    if row.holds.depth is not None and any(len(path) > row.holds.depth for path in manifest.tensors):
        return Cure(
            "join the parts of key paths with `{}`, or omit entries with {} or {}",
            Argument("set", "join=."),
            Argument("only"),
            Argument("ignore"),
        )
    if (manifest.values and not row.holds.values) or (manifest.empties and not row.holds.empties):
        return Cure("omit them with {}", Argument("ignore", ("values", "empties")))
    return Cure(
        "choose a target that can hold them; run {} to list what this one holds", Command("formats", row.name)
    )
