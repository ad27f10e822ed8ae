"""Templates: match the tensors of a checkpoint to the leaves of a live state.

Names are compared in this order: the key path as stored; the key path without the wrappers around it (`value`,
`raw_value`, `data_array`); the label of a Penzai array; and the parts joined by `.`, because a torch module has
`layers.0.weight` where a tree has three parts. An ambiguous name is an error. If everything in the checkpoint is below
one node (`params`) that the template does not have, or vice versa, that node is left out of the names, with a note.
Shape, element type and axis names are compared before any byte is read, and all mismatches are reported at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from wherry.core.keypath import KeyPath, render
from wherry.core.lazy_dataclass import dataclass
from wherry.core.tensorspec import AxisName, Sharding, TensorSpec
from wherry.errors import AmbiguousError
from wherry.layout.axes import BOX_TAG
from wherry.layout.forms import BOX, OLD_VARIABLE, wrapped_leaves

if TYPE_CHECKING:
    from wherry.core.manifest import Manifest, Value

LABEL = "label"  # in a spec's tags: the label of a Penzai array
_PRNG = "prng"
_NAMED_ARRAY = "data_array"


class Leaf(NamedTuple):
    """A leaf of a live state.

    Attributes:
        path: its name: the key path without boxes, variables and wrappers.
        stored: the key path as Orbax spells it.
        value: the array, tensor, stand-in (`jax.ShapeDtypeStruct`, a tensor on `meta`), number or text itself.
        shape: global extents; those of the key data for a typed PRNG key. () for a number or text.
        dtype: numpy or ml_dtypes name; None for a number or text, which is not a tensor.
        axes: logical names of its axes, from a box, an NNX variable or a NamedArray.
        sharding: mesh, partition spec and rules, if it is sharded over a mesh or a box has rules.
        box: `LogicallyPartitioned` or `Partitioned`.
        collection: class of the NNX variable (`Param`, `BatchStat`).
        label: of the Penzai variable.
        prng: implementation of a typed PRNG key.
        alias: key path (`path`) of an earlier leaf that is the same tensor: tied weights of a torch module.
    """

    path: KeyPath
    stored: KeyPath
    value: Any
    shape: tuple[int, ...]
    dtype: str | None
    axes: tuple[AxisName, ...] | None = None
    sharding: Sharding | None = None
    box: str | None = None
    collection: str | None = None
    label: str | None = None
    prng: str | None = None
    alias: KeyPath | None = None

    @property
    def name(self) -> str:
        """The printed `path`."""
        return render(self.path)

    def spec(self) -> TensorSpec:
        """The TensorSpec of the leaf under its stored key path; not for numbers and text."""
        tags = {
            name: text
            for name, text in ((BOX_TAG, self.box), (LABEL, self.label), (_PRNG, self.prng))
            if text is not None
        }
        return TensorSpec(
            self.stored,
            self.shape,
            self.dtype or "",
            axes=self.axes,
            sharding=self.sharding,
            tags=tags or None,
        )


class Pair(NamedTuple):
    """A leaf and the entry that fills it.

    Attributes:
        leaf: of the template.
        source: the tensor of the checkpoint; None if a value fills it.
        order: the tensor's axis for each axis of the leaf; None if they are the same.
        value: the number or text.
    """

    leaf: Leaf
    source: TensorSpec | None
    order: tuple[int, ...] | None = None
    value: Value = None


@dataclass(frozen=True, slots=True)
class TemplateMatch:
    """The result of matching a template to a checkpoint.

    Attributes:
        pairs: leaves and the entries that fill them.
        missing: leaves that are missing in the checkpoint.
        unexpected: key paths of the checkpoint that are missing in the template.
        wrong: mismatches as text, each with its name.
        notes: parts that were left out of names, as text.
    """

    pairs: tuple[Pair, ...]
    missing: tuple[Leaf, ...]
    unexpected: tuple[KeyPath, ...]
    wrong: tuple[str, ...]
    notes: tuple[str, ...]


def match(
    leaves: Sequence[Leaf], manifest: Manifest, names: Mapping[KeyPath, KeyPath], *, cast: bool, named: bool
) -> TemplateMatch:
    """Match a template to a checkpoint.

    Args:
        leaves: of the template.
        manifest: of the checkpoint.
        names: key path in the checkpoint → the name to match, for everything that is to be restored.
        cast: whether element types may differ.
        named: whether axis names of the checkpoint have the same meaning as those of the template.

    Raises:
        AmbiguousError: two tensors of the checkpoint match one leaf.
    """
    found, notes = _find_leaves(leaves, manifest, names)
    used = set(found.values())
    lacking = [leaf for leaf in leaves if leaf.stored not in found]
    tied = {leaf.path for leaf in leaves if leaf.stored in found}
    missing = tuple(leaf for leaf in lacking if leaf.alias not in tied)
    pairs, wrong = list[Pair](), list[str]()
    for leaf in leaves:
        if leaf.stored not in found:
            continue
        path = found[leaf.stored]
        spec = manifest.tensors.get(path)
        if spec is None:
            value = manifest.values[path]
            pairs.append(Pair(leaf, None, value=value))
            reasons = _wrong_value(leaf, value)
        else:
            order, reasons = _order(leaf, spec) if named else (None, [])
            pairs.append(Pair(leaf, spec, order))
            reasons += _wrong_tensor(leaf, spec, order, cast=cast)
        wrong += [f"{leaf.name}: {reason}" for reason in reasons]
    unexpected = tuple(path for path in names if path not in used)
    return TemplateMatch(tuple(pairs), missing, unexpected, tuple(wrong), tuple(notes))


def _find_leaves(
    leaves: Sequence[Leaf], manifest: Manifest, names: Mapping[KeyPath, KeyPath]
) -> tuple[dict[KeyPath, KeyPath], list[str]]:
    """Stored key path of a leaf → key path in the checkpoint, and the parts that were left out of names."""
    bare = {name: name for name in names.values()}  # → the name without the wrappers around its leaf
    for word in (_NAMED_ARRAY, BOX, OLD_VARIABLE):
        now = wrapped_leaves(bare.values(), word)
        bare = {name: short[:-1] if short in now else short for name, short in bare.items()}
    found = _lookup(leaves, manifest, names, bare, 0, 0)
    if len(found) == len(leaves) or not names:
        return found, []
    # A node that contains all paths of its side, the outer ones first; the other side is used from its root.
    roots: Iterable[tuple[KeyPath, KeyPath]] = chain(
        ((node, ()) for node in _holders(list(bare.values()))),
        (((), node) for node in _holders([leaf.path for leaf in leaves])),
    )
    for checkpoint_root, template_root in roots:
        cut = _lookup(leaves, manifest, names, bare, len(checkpoint_root), len(template_root))
        if len(cut) in (len(leaves), len(names)) and len(cut) > len(found):
            side = "checkpoint" if checkpoint_root else "template"
            return cut, [f"{render(checkpoint_root or template_root)}/ of the {side} is used as its root"]
    return found, []


def _holders(paths: list[KeyPath]) -> Iterable[KeyPath]:
    if not paths:
        return
    least = min(map(len, paths)) - 1
    first = paths[0]
    for depth in range(1, least + 1):
        if any(path[:depth] != first[:depth] for path in paths):
            return
        yield first[:depth]


def _lookup(
    leaves: Sequence[Leaf], manifest: Manifest, names: Mapping[KeyPath, KeyPath],
    bare: Mapping[KeyPath, KeyPath], checkpoint_depth: int, template_depth: int,
) -> dict[KeyPath, KeyPath]:  # fmt: skip
    exact = {name[checkpoint_depth:]: path for path, name in names.items()}
    spelled: dict[str, set[KeyPath]] = {}
    for path, name in names.items():
        spec = manifest.tensors.get(path)
        label = (spec.tags or {}).get(LABEL) if spec else None
        for text in {".".join(bare[name][checkpoint_depth:]), *([label] if label else [])}:
            spelled.setdefault(text, set()).add(path)
    found: dict[KeyPath, KeyPath] = {}
    for leaf in leaves:
        stored = exact.get(leaf.stored[template_depth:]) or exact.get(leaf.path[template_depth:])
        claims = {stored} if stored else set[KeyPath]()
        for text in (".".join(leaf.path[template_depth:]), leaf.label):
            claims = claims or (spelled.get(text, set()) if text else set())
        if len(claims) > 1:
            raise AmbiguousError(
                f"ambiguous name: {' and '.join(sorted(map(render, claims)))} of the checkpoint both match",
                path=leaf.name, cure="rename one of them with rename=…",
            )  # fmt: skip
        if claims:
            found[leaf.stored] = next(iter(claims))
    return found


def _order(leaf: Leaf, spec: TensorSpec) -> tuple[tuple[int, ...] | None, list[str]]:
    """The order of the checkpoint's axes in the leaf; only the axes of Penzai may have a different order."""
    penzai = leaf.stored[-1:] == (_NAMED_ARRAY,)
    if spec.axes is None or leaf.axes is None or spec.axes == leaf.axes or not (penzai or leaf.box):
        return None, []
    expected = [name for name in leaf.axes if name is not None]
    found = [name for name in spec.axes if name is not None]
    placed = [axis for axis, name in enumerate(spec.axes) if name is None]
    if not penzai or set(expected) != set(found) or len(leaf.axes) != len(spec.axes):
        return None, [f"axes mismatch: expected {_words(leaf.axes)}, got {_words(spec.axes)}"]
    order = [placed.pop(0) if name is None else spec.axes.index(name) for name in leaf.axes]
    return tuple(order), []


def _words(axes: tuple[AxisName, ...]) -> str:
    return f"({', '.join('-' if name is None else str(name) for name in axes)})"


def _wrong_tensor(leaf: Leaf, spec: TensorSpec, order: tuple[int, ...] | None, *, cast: bool) -> list[str]:
    shape = tuple(spec.shape[axis] for axis in order) if order else spec.shape
    wrong: list[str] = []
    if leaf.shape != shape:
        wrong.append(f"shape mismatch: expected {_extents(leaf.shape)}, got {_extents(shape)}")
    if leaf.dtype is None:
        kinds = {bool: "bool", int: "int", float: "float"}
        wanted = kinds.get(type(leaf.value), "str")
        if not spec.dtype.removeprefix("u").removeprefix("b" if wanted == "float" else "").startswith(wanted):
            wrong.append(f"type mismatch: expected a value of type {wanted}, got an array of {spec.dtype}")
    elif leaf.dtype != spec.dtype and not cast:
        wrong.append(f"dtype mismatch: expected {leaf.dtype}, got {spec.dtype} (cast=True converts)")
    prng = (spec.tags or {}).get(_PRNG)
    if prng and leaf.prng and prng != leaf.prng:
        wrong.append(f"PRNG key mismatch: expected a key of {leaf.prng}, got one of {prng}")
    return wrong


def _wrong_value(leaf: Leaf, value: Any) -> list[str]:
    if leaf.dtype is None:
        same = type(value) is type(leaf.value) or (type(value) is int and type(leaf.value) is float)
        return (
            []
            if same
            else [
                f"type mismatch: expected {type(leaf.value).__name__}, got {type(value).__name__}: {value!r}"
            ]
        )
    fits = leaf.shape == () and type(value) in (bool, int, float)
    return (
        [] if fits else [f"type mismatch: expected an array {_extents(leaf.shape)}, got the value {value!r}"]
    )


def _extents(shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, shape))})"
