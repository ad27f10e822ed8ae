"""Logical axis names that a user states, for tensors whose axes are not named on disk.

    axes=FILE     TOML or JSON: `axes` maps patterns of printed key paths to a name for each axis (`null`, in TOML "",
                  for an axis without one), `boxes` the same patterns to `Partitioned` or `LogicallyPartitioned`,
                  `rules` is a list of pairs as below
    rules=TEXT    logical axis name → mesh axes, in order of precedence: `embed:data,mlp:fsdp+model,layers:-`; or a FILE

Names are read or stated, never guessed: if a container names the axes too, both must agree; every pattern must match,
and the number of names must equal the tensor's rank. Rules are applied as Flax applies them (linen
`spmd.logical_to_mesh_axes`): the first rule for a name wins whose mesh axes no other axis of the tensor uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeAlias

from wherry.core.lazy_dataclass import dataclass
from wherry.core.tensorspec import AxisName, Sharding, TensorSpec
from wherry.cures import Argument, Blank, Command, Cure
from wherry.errors import MismatchError, UsageError
from wherry.layout.forms import BOX

if TYPE_CHECKING:
    from wherry.core.manifest import Manifest

Rules: TypeAlias = "tuple[tuple[str, AxisName], ...]"
BOXES = ("LogicallyPartitioned", "Partitioned")
BOX_TAG = "box"  # in a tensor's tags: the class of the box that held it
AXIS_OPTIONS = {
    "axes": "file (TOML or JSON) that names the axes of tensors: `[axes]`, key path pattern = [name, …]",
    "rules": "mesh axes of each logical axis name, in order: `embed:data,mlp:fsdp+model,layers:-`, or a file",
}
_CURE = "write name:mesh-axes pairs, for example rules=embed:data,mlp:fsdp+model"


@dataclass(frozen=True, slots=True)
class AxisStatement:
    """The contents of an axes file.

    Attributes:
        axes: pattern → a name for each axis.
        boxes: pattern → class of the box.
        rules: logical axis name → mesh axes, in order.
    """

    axes: Mapping[str, tuple[AxisName, ...]]
    boxes: Mapping[str, str]
    rules: Rules


def settle_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with file names replaced by the contents of the files, so that a plan's digest covers them.

    Raises:
        UsageError: a file cannot be read.
    """
    done = dict(options)
    if isinstance(done.get("axes"), str):
        done["axes"] = _parse(done["axes"])
    if isinstance(done.get("rules"), str):
        done["rules"] = [[name, axes] for name, axes in rules_of(done["rules"])]
    return done


def name_axes(manifest: Manifest, options: Mapping[str, Any]) -> Manifest:
    """A manifest with the names and rules that the user states.

    Args:
        manifest: of the source.
        options: `axes` and `rules`, settled or not.

    Raises:
        UsageError: a file cannot be read, or a pattern matches nothing.
        MismatchError: the names contradict the tensor's rank or the names in the container.
    """
    given = settle_options(options)
    stated = _parse_statement(given.get("axes") or {})
    rules = rules_of(given["rules"]) if given.get("rules") is not None else stated.rules
    if not (stated.axes or stated.boxes or rules):
        return manifest
    used: set[str] = set()
    tensors = [_with_name(spec, stated, used) for spec in manifest.tensors.values()]
    for pattern in (*stated.axes, *stated.boxes):
        if pattern not in used:
            raise UsageError(
                f"axes: pattern {pattern!r} matches no remaining tensor",
                cure=Cure(
                    "run {} to list the key paths; the first pattern that matches a tensor is used",
                    Command("inspect"),
                ),
            )
    if rules and not any(spec.axes for spec in tensors):
        raise UsageError(
            "rules need axis names, but no tensor has any",
            cure=Cure("name the axes with {}", Argument("set", Blank("axes=FILE"))),
        )
    names = {name for spec in tensors for name in spec.axes or () if isinstance(name, str)}
    if given.get("rules") is not None and names.isdisjoint(name for name, _mesh in rules):
        raise UsageError(
            f"rules change nothing: none of them names an axis: {', '.join(sorted(names))}",
            cure="correct the names, or remove the option rules",
        )
    return replace(manifest, tensors={spec.path: _with_rules(spec, rules) for spec in tensors})


def mesh_axes(axes: Sequence[AxisName], rules: Rules) -> tuple[AxisName, ...]:
    """The partition spec of a tensor: the mesh axes that rules assign to its axis names.

    Args:
        axes: logical names, in order; an entry that is not a single name is kept.
        rules: in order of precedence.

    Raises:
        UsageError: two axes have the same name.
    """
    twice = [name for name in axes if isinstance(name, str) and list(axes).count(name) > 1]
    if twice:
        raise UsageError(f"duplicate axis name {twice[0]!r} in one tensor")
    spec: list[AxisName] = [None if isinstance(name, str) else name for name in axes]
    open_ = {name: place for place, name in enumerate(axes) if isinstance(name, str)}
    for name, wanted in rules:
        taken = {axis for entry in spec for axis in _several(entry)}
        if name in open_ and not taken & set(_several(wanted)):
            spec[open_.pop(name)] = wanted
    return tuple(spec)


def rules_of(value: Any) -> Rules:
    """Rules from `embed:data,mlp:fsdp+model`, a file, a list of pairs or a mapping.

    Raises:
        UsageError: the rules are invalid.
    """
    if isinstance(value, str) and value.endswith((".toml", ".json")):
        value = _parse(value).get("rules")
    if isinstance(value, str):
        pairs = [pair.partition(":") for pair in value.split(",")]
        value = [[name.strip(), _mesh_text(text)] for name, colon, text in pairs if colon]
        if len(value) < len(pairs):
            raise UsageError("invalid rules: missing ':' between an axis name and its mesh axes", cure=_CURE)
    rows: Any = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(rows, list | tuple) or not all(_is_rule(row) for row in rows):
        raise UsageError("invalid rules: expected pairs of an axis name and its mesh axes", cure=_CURE)
    return tuple((row[0], axis_name(row[1])) for row in rows)


def axis_name(value: Any) -> AxisName:
    """An axis name (one name, several, or none) from JSON or TOML.

    Raises:
        UsageError: the value is not an axis name.
    """
    if value is None or value in ("", "-"):
        return None
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(one, str) for one in value):
        return tuple(value)
    raise UsageError(f"invalid axis name {value!r}", cure="write a name, a list of names, or null")


def _is_rule(row: Any) -> bool:
    return isinstance(row, list | tuple) and len(row) == 2 and isinstance(row[0], str) and bool(row[0])  # noqa: PLR2004


def _mesh_text(text: str) -> Any:
    names = [name.strip() for name in text.split("+")]
    return names if len(names) > 1 else names[0]


def _several(entry: AxisName) -> tuple[str, ...]:
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def _parse(path: str) -> dict[str, Any]:
    try:
        from wherry.core.config_text import parse_table, read_config

        data = parse_table(read_config(path), "the file of axes", json=path.endswith(".json"), uri=path)
    except ValueError as error:
        raise UsageError(f"cannot read {path}: {error}", cure="pass a TOML or JSON file") from error
    if not isinstance(data, dict):
        raise UsageError(
            f"expected a table in {path}, got a {type(data).__name__}",
            cure="write `[axes]` and one pattern per line",
        )
    return data


def _parse_statement(data: Mapping[str, Any]) -> AxisStatement:
    unknown = sorted(set(data) - {"axes", "boxes", "rules"})
    if unknown:
        raise UsageError(f"axes: unknown key {', '.join(unknown)}", cure="use only axes, boxes and rules")
    rows, boxes = data.get("axes", {}), data.get("boxes", {})
    if not isinstance(rows, dict) or not all(isinstance(names, list | tuple) for names in rows.values()):
        raise UsageError(
            "axes: expected a table of lists", cure='write for example "params/*/kernel" = ["embed", "mlp"]'
        )
    if not isinstance(boxes, dict) or not all(kind in BOXES for kind in boxes.values()):
        raise UsageError("axes: expected a table of classes in boxes", cure=f"choose {' or '.join(BOXES)}")
    names = {pattern: tuple(axis_name(name) for name in some) for pattern, some in rows.items()}
    return AxisStatement(names, boxes, rules_of(data["rules"]) if "rules" in data else ())


def _with_name(spec: TensorSpec, stated: AxisStatement, used: set[str]) -> TensorSpec:
    found = _first(spec, stated.axes, used)
    kind = _first(spec, stated.boxes, used)
    tags = dict(spec.tags or {})
    if found is not None:
        axes = stated.axes[found]
        if len(axes) != len(spec.shape):
            raise MismatchError(
                f"expected {len(spec.shape)} axis names, got {len(axes)}",
                path=spec.name,
                cure="put a pattern for this tensor before the one that matched it",
            )
        if spec.axes is not None and spec.axes != axes:
            raise MismatchError(
                f"axis names differ: the file states {axes}, the checkpoint has {spec.axes}",
                path=spec.name,
                cure="correct the file, or remove the tensor from it",
            )
        spec = replace(spec, axes=axes)
        tags.setdefault(BOX_TAG, BOXES[0])
    if kind is not None:
        tags[BOX_TAG] = stated.boxes[kind]
    return replace(spec, tags=tags or None)


def _first(spec: TensorSpec, patterns: Mapping[str, Any], used: set[str]) -> str | None:
    """The first pattern that matches the key path, or the one of its box."""
    names = [spec.name, spec.name.removesuffix(f"/{BOX}")]
    found = next((one for one in patterns if any(fnmatchcase(name, one) for name in names)), None)
    used |= {found} if found is not None else set()
    return found


def _with_rules(spec: TensorSpec, rules: Rules) -> TensorSpec:
    """A tensor with the partition spec that follows from the rules; the devices of an older one are dropped."""
    if not rules or spec.axes is None:
        return spec
    try:
        return replace(spec, sharding=Sharding(spec=mesh_axes(spec.axes, rules), rules=rules))
    except UsageError as error:
        error.path = spec.name
        raise
