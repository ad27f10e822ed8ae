"""The key paths of Lingua's two forms, and the translation between them.

Its state is {model: {parameter: tensor}, optim: {state: {parameter: {exp_avg, exp_avg_sq, step}}, param_groups: […]}},
where names of parameters keep their dots. In DCP an item has one flat name, the parts joined with dots; dicts always
become items, lists only if they hold tensors or dicts, so that `betas` is one item with two values below it.
`consolidated.pth` stores the nested form. A bare state dict has only the parameters, without `model`.
Source: lingua/checkpoint.py at 437d680, torch/distributed/checkpoint/_nested_dict.py of torch 2.13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wherry.core.keypath import KeyPath, parse, render
from wherry.errors import UnrepresentableError
from wherry.formats.format import Adapted
from wherry.text.numbers import decimal_number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from wherry.core.manifest import Manifest

NESTED, _PICKLE = "planner_data", "pickle"
MODEL, OPTIM = "model", "optim"
EMBEDDINGS = "tok_embeddings.weight"
TIED = "output.tied_module.weight"
MOMENTS = ("exp_avg", "exp_avg_sq")
_STATE, _GROUPS = "state", "param_groups"
_METAS_OWN = "rope.freqs"
_ROOTS = (MODEL, OPTIM)


def nested_of(name: str) -> tuple[str | int, ...]:
    """The nested path of a flat name of Lingua; for other names, the name itself."""
    root, _, rest = name.partition(".")
    if root == MODEL and rest:
        return (MODEL, rest)
    kind, _, rest = rest.partition(".")
    if root == OPTIM and kind == _STATE and "." in rest:
        return (OPTIM, _STATE, *rest.rsplit(".", 1))
    number, _, key = rest.partition(".")
    at = decimal_number(number)
    if root == OPTIM and kind == _GROUPS and at is not None and key:
        return (OPTIM, _GROUPS, at, key)
    return (name,)


def flat(source: Manifest, uri: str) -> Adapted:
    """Translate a source's tree to the items of a Lingua step folder.

    Raises:
        UnrepresentableError: the names are not those of a Lingua model.
    """
    nested = any(len(path) > 1 and path[0] == MODEL for path in source.tensors)
    opened = _opened_lists(source) if nested else frozenset[KeyPath]()
    names = {path: _flat_path(path, source, opened, nested=nested) for path in _paths(source)}
    _require_model((path[0] for path in names.values() if path), f"{MODEL}.{EMBEDDINGS}", uri)
    lists = frozenset(_flat_path(path, source, opened, nested=nested) for path in source.lists - opened)
    own = {path[0]: list(nested_of(path[0])) for path in names.values() if path}
    notes = _notes(source, lambda path: _flat_path(path, source, opened, nested=nested))
    return Adapted(names, lists, {NESTED: {**own, **_planned_paths(source)}, **notes})


def deep(source: Manifest, uri: str) -> Adapted:
    """Translate a source's tree to the nested dict of `consolidated.pth`.

    Raises:
        UnrepresentableError: the names are not those of a Lingua model.
    """
    names = {path: _deep_path(path, source) for path in _paths(source)}
    _require_model(
        (path[1] for path in names.values() if len(path) > 1 and path[0] == MODEL), EMBEDDINGS, uri
    )
    lists = {_deep_path(path, source) for path in source.lists}
    for path in _paths(source):
        for depth, part in enumerate(_plan_of(path[0], source)):
            if type(part) is int:
                lists.add(tuple(map(str, _plan_of(path[0], source)[:depth])))
    return Adapted(names, frozenset(lists), _notes(source, lambda path: _deep_path(path, source)))


def _paths(source: Manifest) -> Iterable[KeyPath]:
    return (*source.tensors, *source.values, *source.empties)


def _bare(source: Manifest) -> bool:
    return (EMBEDDINGS,) in source.tensors


def _flat_path(path: KeyPath, source: Manifest, opened: frozenset[KeyPath], *, nested: bool) -> KeyPath:
    """Join the parts of a path that form the name of its item; a list of plain values is one item."""
    if nested and path and path[0] in _ROOTS:
        shut = (cut for cut in range(1, len(path)) if path[:cut] in source.lists and path[:cut] not in opened)
        cut = next(shut, len(path))
        return (".".join(path[:cut]), *path[cut:])
    if not path or not _bare(source):
        return path
    return (f"{MODEL}.{path[0]}", *path[1:])


def _opened_lists(source: Manifest) -> frozenset[KeyPath]:
    """The lists that hold tensors or dicts, which DCP splits into items."""
    holding: set[KeyPath] = set()
    for path in _paths(source):
        nodes = [path[:cut] for cut in range(len(path))]
        inside = path in source.tensors or source.empties.get(path) == "dict"
        for node in reversed(nodes):
            if inside and node in source.lists:
                holding.add(node)
            inside = inside or node not in source.lists
    return frozenset(holding)


def _notes(source: Manifest, rename: Callable[[KeyPath], KeyPath]) -> dict[str, Any]:
    """Classes and keys that key paths do not state (`pickle/tree.py`), under the new paths."""
    notes = source.custom.get(_PICKLE)
    if not isinstance(notes, dict):
        return {}
    return {
        _PICKLE: {
            kind: {render(rename(parse(path))): said for path, said in rows.items()}
            for kind, rows in notes.items()
        }
    }


def _planned_paths(source: Manifest) -> Mapping[str, Any]:
    planned = source.custom.get(NESTED)
    return planned if isinstance(planned, dict) else {}


def _plan_of(name: str, source: Manifest) -> tuple[str | int, ...]:
    """The nested path of a flat name: that of the source, else by Lingua's own rule."""
    if _bare(source):
        return (MODEL, name)
    return tuple(_planned_paths(source).get(name) or nested_of(name))


def _deep_path(path: KeyPath, source: Manifest) -> KeyPath:
    name, rest = path[:1], path[1:]
    if not name or (name[0] in _ROOTS and rest):
        return path
    return (*map(str, _plan_of(name[0], source)), *rest)


def _require_model(names: Iterable[str], wanted: str, uri: str) -> None:
    found = set(names)
    if wanted not in found:
        raise UnrepresentableError(
            f"missing parameter {wanted}: the source does not have Lingua's parameter names",
            uri=uri,
            cure="convert a checkpoint with Lingua's names, or choose another target format",
        )
    if {_METAS_OWN, f"{MODEL}.{_METAS_OWN}"} & found:
        raise UnrepresentableError(
            f"unsupported parameter {_METAS_OWN} of Meta's Llama: Lingua cannot use its params.json",
            uri=uri,
            cure="choose another target format",
        )
