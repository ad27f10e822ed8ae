"""Tree forms: named ways to spell the same tree, each a renaming of key paths with its inverse.

    boxed     linen partition boxes: …/kernel  ↔  …/kernel/value             (only what is partitioned)
    nnx       variables of an `nnx.State`: …/kernel  ↔  …/kernel/value       (every array; `raw_value` in Flax 0.8)
    unnest    remove linen collections from key paths: params/Dense_0/kernel →  Dense_0/kernel
    nest      add them again: the collection of each array is stated         →  params/Dense_0/kernel
    rename    rules of `wherry.layout.renames`

A wrapper is a node whose only child is `value`; a parameter that is really called `value` has siblings, so it is not a
wrapper. The collection of a flat NNX array is not stored on disk (`BatchStat` is not either), so `nest` takes it from
patterns of printed key paths. Parts are removed in the order above and added in the reverse order, so that a request
and its opposite undo each other. Only names change, never a byte of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from wherry.core.keypath import KeyPath, render
from wherry.core.lazy_dataclass import dataclass
from wherry.cures import Argument, Blank, Command, Cure
from wherry.errors import UnrepresentableError, UsageError
from wherry.layout.renames import parse_rules, rename_paths

BOX = "value"
OLD_VARIABLE = "raw_value"
COLLECTION = "params"
# Options of every target, in the order in which `--set` lists them.
FORM_OPTIONS = {
    "boxed": "linen partition boxes: `false` removes the last part `value` of key paths, `true` appends it where axis "
    "names are known; or comma-separated patterns of the key paths to append it to",
    "nnx": "NNX variables: the last part of every key path, `value` (Flax 0.9 and later), `raw_value` (0.8) or `none`",
    "unnest": "comma-separated linen collections to remove from key paths, for example `params,batch_stats`",
    "nest": "collection of each array: `params`, or `batch_stats:*/mean,*/var;params:*`; the first match applies",
    "rename": "rules separated by `;`, such as `layers.{n}.w -> blocks/{n}/kernel; model/{rest*} -> params/{rest*}`",
}


@dataclass(frozen=True, slots=True)
class Leaves:
    """The tree that is renamed.

    Attributes:
        tensors: key paths of the tensors.
        others: key paths of non-tensor leaves and of empty nodes.
        named: tensors whose axes have logical names.
    """

    tensors: frozenset[KeyPath]
    others: frozenset[KeyPath] = frozenset()
    named: frozenset[KeyPath] = frozenset()

    @property
    def every(self) -> list[KeyPath]:
        """All key paths, in order."""
        return sorted(self.tensors | self.others)


def respell(leaves: Leaves, options: Mapping[str, Any]) -> dict[KeyPath, KeyPath]:
    """Key path → key path in the requested form, for everything in a tree.

    Args:
        leaves: the tree.
        options: of FORM_OPTIONS; `rename` may also be a sequence of rules.

    Raises:
        UsageError: a form is invalid, or the tree is already in it.
        UnrepresentableError: a key path has no equivalent in the form, or two key paths collide; they are named.
    """
    names = {path: path for path in leaves.every}
    idle = {option: options[option] for option in FORM_OPTIONS if options.get(option) is not None}
    for option, step in _STEPS:
        if options.get(option) is None:
            continue
        now = [
            frozenset(names[path] for path in some) for some in (leaves.tensors, leaves.others, leaves.named)
        ]
        change = step(Leaves(*now), options[option])
        if any(old != new for old, new in change.items()):
            idle.pop(option, None)
        names = {path: change.get(name, name) for path, name in names.items()}
        owners: dict[KeyPath, KeyPath] = {}
        for path, name in names.items():
            other = owners.setdefault(name, path)
            if other != path:
                raise UnrepresentableError(
                    f"key collision: {render(other)} and {render(path)} would both become {render(name)}",
                    path=render(path),
                    cure=Cure("rename one of them with {}", Argument("rename", "pattern -> template")),
                )
    for option, value in idle.items():
        raise UsageError(
            f"{option}={value} changes nothing: the tree is already in that form",
            cure=f"remove the option {option}",
        )
    return names


def wrapped_leaves(paths: Iterable[KeyPath], word: str) -> set[KeyPath]:
    """The leaves that are the only child of their node and are called `word`."""
    every = list(paths)
    called = [path for path in every if len(path) > 1 and path[-1] == word]
    if not called:
        return set()
    children: dict[KeyPath, int] = {}
    for path in every:
        for depth in range(len(path)):
            node = path[:depth]
            children[node] = children.get(node, 0) + (depth == len(path) - 1)
    inner = {path[:depth] for path in every for depth in range(len(path) - 1)}
    return {path for path in called if children[path[:-1]] == 1 and path[:-1] not in inner}


def _wrapped_tensors(leaves: Leaves, word: str) -> set[KeyPath]:
    return wrapped_leaves(leaves.every, word) & leaves.tensors


def _unbox(leaves: Leaves, value: Any) -> dict[KeyPath, KeyPath]:
    return {path: path[:-1] for path in _wrapped_tensors(leaves, BOX)} if _word(value) == "false" else {}


def _plain(leaves: Leaves, value: Any) -> dict[KeyPath, KeyPath]:
    """Remove every wrapper except the requested one."""
    if value not in ("none", BOX, OLD_VARIABLE):
        raise UsageError(
            f"invalid value for option nnx: {value!r}", cure=f"choose {BOX}, {OLD_VARIABLE} or none"
        )
    words = [word for word in (BOX, OLD_VARIABLE) if word != value]
    return {path: path[:-1] for word in words for path in _wrapped_tensors(leaves, word)}


def _unnest(leaves: Leaves, value: Any) -> dict[KeyPath, KeyPath]:
    collections = [part.strip() for part in str(value).split(",") if part.strip()]
    roots = {path[0] for path in leaves.every if path}
    absent = sorted(set(collections) - roots)
    if absent or not collections:
        raise UsageError(
            f"unnest={value}: collection not found: {', '.join(absent) or '(none named)'}",
            cure=f"choose one of: {', '.join(sorted(roots))}",
        )
    outside = [path for path in leaves.every if path[:1] == path or path[0] not in collections]
    if outside:
        raise UnrepresentableError(
            f"unnest={value}: {render(outside[0])} is not in any of these collections",
            path=render(outside[0]),
            cure=Cure("add its collection, or carry only the parameters with {}", Argument("only", "params")),
        )
    return {path: path[1:] for path in leaves.every}


def _nest(leaves: Leaves, value: Any) -> dict[KeyPath, KeyPath]:
    rows = _patterns(str(value))
    names: dict[KeyPath, KeyPath] = {}
    used: set[str] = set()
    for path in leaves.every:
        text = render(path)
        found = next(((name, one) for name, one in rows if fnmatchcase(text, one)), None)
        if found is None:
            raise UnrepresentableError(
                f"nest={value}: no pattern matches {text}",
                path=text,
                cure="add a pattern that matches it",
            )
        names[path] = (found[0], *path)
        used.add(":".join(found))
    idle = [f"{name}:{one}" for name, one in rows if f"{name}:{one}" not in used]
    if idle:
        raise UsageError(
            f"nest: pattern {idle[0]!r} matches no remaining array",
            cure=Cure(
                "run {} to list the key paths; the first pattern that matches is used", Command("inspect")
            ),
        )
    return names


def _patterns(text: str) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for clause in text.split(";"):
        name, separator, patterns = clause.strip().partition(":")
        found = [one.strip() for one in patterns.split(",") if one.strip()] if separator else ["*"]
        if not name or not found:
            raise UsageError(
                f"invalid value for option nest: {text!r}",
                cure="write for example params, or batch_stats:*/mean;params:*",
            )
        rows += [(name, one) for one in found]
    return rows


def _apply_rules(leaves: Leaves, value: Any) -> dict[KeyPath, KeyPath]:
    return rename_paths(leaves.every, parse_rules(rule_texts(value)))


def rule_texts(value: Any) -> tuple[str, ...]:
    """The rules of the option `rename`: one text with `;` between them, or a sequence of texts."""
    texts = value.split(";") if isinstance(value, str) else value
    return tuple(text.strip() for text in texts if text.strip())


def _wrapped_again(leaves: Leaves, value: Any) -> dict[KeyPath, KeyPath]:
    left = leaves.tensors - _wrapped_tensors(leaves, value)
    return {path: (*path, value) for path in left} if value != "none" else {}


def _box(leaves: Leaves, value: Any) -> dict[KeyPath, KeyPath]:
    word = _word(value)
    if word == "false":
        return {}
    chosen = leaves.named if word == "true" else _matching(leaves.tensors, word)
    if not chosen:
        raise UsageError(
            f"boxed={value}: cannot determine which arrays are partitioned: the checkpoint stores no axis names",
            cure=Cure(
                "state them with {}, or name the key paths: {}",
                Argument("set", Blank("axes=FILE")),
                Argument("set", "boxed=params/*/kernel"),
            ),
        )
    return {path: (*path, BOX) for path in chosen - _wrapped_tensors(leaves, BOX)}


def _matching(paths: frozenset[KeyPath], patterns: str) -> frozenset[KeyPath]:
    found: set[KeyPath] = set()
    for pattern in patterns.split(","):
        some = {path for path in paths if fnmatchcase(render(path), pattern.strip())}
        if not some:
            raise UsageError(
                f"boxed: pattern {pattern.strip()!r} matches no array",
                cure=Cure("run {} to list the key paths", Command("inspect")),
            )
        found |= some
    return frozenset(found)


def _word(value: Any) -> str:
    return str(value).lower() if str(value).lower() in ("true", "false") else str(value)


# The removals, in order; then the additions, in the reverse order.
_STEPS: tuple[tuple[str, Callable[[Leaves, Any], dict[KeyPath, KeyPath]]], ...] = (
    ("boxed", _unbox),
    ("nnx", _plain),
    ("unnest", _unnest),
    ("rename", _apply_rules),
    ("nest", _nest),
    ("nnx", _wrapped_again),
    ("boxed", _box),
)
