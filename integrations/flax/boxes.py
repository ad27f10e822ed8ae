"""Rebuild `nn.LogicallyPartitioned` boxes and partition specs for a tree from the names kept with a checkpoint.

    import wherry.integrations.flax.boxes as boxes

    state = ocp.StandardCheckpointer().restore(folder)          # or any target tree, abstract or of arrays
    state = boxes.boxed(state, folder)                          # nn.LogicallyPartitioned where names are kept
    specs = boxes.partition_specs(state, folder, rules=rules)   # PartitionSpec for every leaf

A tree is anything that JAX flattens: nested dicts, a TrainState with an optax state, an `nnx.State`. Leaves are matched
by their key paths, with or without a box or variable around them; a leaf without recorded names is left unchanged and
has the empty spec (None if it is not an array), as in Flax. Flax and JAX are imported when a function here is called,
never to move bytes.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from wherry.core.keypath import KeyPath, render
from wherry.core.manifest import Manifest
from wherry.core.tensorspec import AxisName, TensorSpec
from wherry.cures import Argument, Blank, Cure
from wherry.errors import MismatchError, NotFoundError, missing_extra
from wherry.layout.axes import BOX_TAG, BOXES, Rules, mesh_axes
from wherry.layout.forms import BOX, OLD_VARIABLE
from wherry.ledger.resolve import open_checkpoint
from wherry.store.sidecar import read_sidecar


def rebuild_boxes(tree: Any, checkpoint: Manifest | str | os.PathLike[str]) -> Any:
    """Rebuild the boxes around the leaves of a tree.

    Args:
        tree: arrays or placeholders for arrays; leaves that are boxed already must have the same names.
        checkpoint: the manifest with the names, or the URI of the checkpoint.

    Returns:
        The tree with `nn.LogicallyPartitioned` or `nn.Partitioned` around every leaf with recorded names.

    Raises:
        NotFoundError: no names are recorded, or none for a leaf of this tree.
        MismatchError: a leaf has another rank, or is boxed with other names.
        MissingExtraError: flax is not installed.
    """
    known = _known_specs(checkpoint)
    nn = _flax("flax.linen")
    found: list[KeyPath] = []

    def box(path: Any, leaf: Any) -> Any:
        spec = _spec_of(path, known)
        if spec is None:
            return leaf
        found.append(spec.path)
        return _box(leaf[BOX] if isinstance(leaf, dict) else leaf, spec, nn)

    boxed_ = _map_tree(box, tree, nn, opened=True)
    _require(found, checkpoint)
    return boxed_


def partition_specs(
    tree: Any,
    checkpoint: Manifest | str | os.PathLike[str],
    *,
    rules: Rules | None = None,
    logical: bool = False,
) -> Any:
    """The partition spec of every leaf of a tree.

    Args:
        tree: arrays, boxed or not, or placeholders for arrays.
        checkpoint: the manifest with the names, or the URI of the checkpoint.
        rules: logical axis name → mesh axes, in order of precedence; those recorded with the checkpoint by default.
        logical: whether to return the logical names unchanged, as `nn.get_partition_spec` does.

    Returns:
        The tree with a `PartitionSpec` at each leaf, empty without recorded names, and None for a leaf that is not an
        array.

    Raises:
        NotFoundError: no names are recorded, or none for a leaf of this tree; or no rules are recorded.
        MissingExtraError: flax is not installed.
    """
    known = _known_specs(checkpoint)
    nn = _flax("flax.linen")
    sharding: Any = _flax("jax.sharding")
    found: list[KeyPath] = []

    def entries(path: Any, leaf: Any) -> Any:
        spec = _spec_of(path, known)
        if spec is None:
            return sharding.PartitionSpec() if hasattr(leaf, "shape") else None
        found.append(spec.path)
        if logical:
            axes = _axes(spec)
        elif rules is not None:
            axes = mesh_axes(_axes(spec), rules)
        elif spec.sharding is None or not spec.sharding.rules:
            raise NotFoundError("no rules recorded for the axis names", path=spec.name, cure="pass rules=…")
        else:
            axes = spec.sharding.spec
        return sharding.PartitionSpec(*axes)

    specs = _map_tree(entries, tree, nn)
    _require(found, checkpoint)
    return specs


def _known_specs(checkpoint: Manifest | str | os.PathLike[str]) -> dict[KeyPath, TensorSpec]:
    """The tensors with axis names, by key path without wrapper."""
    if isinstance(checkpoint, Manifest):
        manifest = checkpoint
    else:
        with open_checkpoint(str(checkpoint)) as opened:
            manifest = opened.manifest
            sidecar = read_sidecar(opened.location)
        # The container's own manifest; if it names no axes, the manifest of the sidecar.
        if sidecar is not None and all(spec.axes is None for spec in manifest.tensors.values()):
            manifest = sidecar.manifest
    return {_bare(path): spec for path, spec in manifest.tensors.items() if spec.axes is not None}


def _spec_of(path: Any, known: dict[KeyPath, TensorSpec]) -> TensorSpec | None:
    return known.get(_bare(tuple(_part(key) for key in path)))


def _bare(path: KeyPath) -> KeyPath:
    """A key path without the box or variable around its leaf."""
    return path[:-1] if path[-1:] in ((BOX,), (OLD_VARIABLE,)) else path


def _part(key: Any) -> str:
    """One part of a JAX key path in a checkpoint's spelling: key of a dict, index, or attribute."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _axes(spec: TensorSpec) -> tuple[AxisName, ...]:
    return spec.axes or ()


def _box(leaf: Any, spec: TensorSpec, nn: Any) -> Any:
    axes = _axes(spec)
    if isinstance(leaf, nn.meta.AxisMetadata):
        if tuple(getattr(leaf, "names", ())) != axes:
            raise MismatchError(f"the leaf is boxed with other axis names; expected {axes}", path=spec.name)
        return leaf
    if len(getattr(leaf, "shape", axes)) != len(axes):
        raise MismatchError(
            f"expected {len(axes)} axes ({axes}), got an array of shape {leaf.shape}", path=spec.name
        )
    if (spec.tags or {}).get(BOX_TAG, BOXES[0]) == "Partitioned":
        return nn.Partitioned(leaf, axes)
    rules = spec.sharding.rules if spec.sharding else ()
    return nn.LogicallyPartitioned(leaf, axes, rules=rules or None)


def _map_tree(change: Any, tree: Any, nn: Any, *, opened: bool = False) -> Any:
    """A tree with every leaf changed; with `opened`, a dict in place of a box, as Orbax restores it, is a leaf."""
    jax: Any = _flax("jax")

    def is_leaf(node: Any) -> bool:
        if opened and isinstance(node, dict) and list(node) == [BOX]:
            return jax.tree_util.all_leaves(node.values())
        return isinstance(node, nn.meta.AxisMetadata)

    return jax.tree_util.tree_map_with_path(change, tree, is_leaf=is_leaf)


def _require(found: list[KeyPath], checkpoint: Any) -> None:
    if not found:
        uri = None if isinstance(checkpoint, Manifest) else str(checkpoint)
        raise NotFoundError(
            "no axis names recorded for any leaf of this tree",
            uri=uri,
            cure=Cure("pass {} when you convert the checkpoint", Argument("set", Blank("axes=FILE"))),
        )


def _flax(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise missing_extra("flax", "jax", "rebuilding boxes") from error


def named_leaves(checkpoint: Manifest | str | os.PathLike[str]) -> dict[str, tuple[AxisName, ...]]:
    """Printed key path without wrapper → axis names, for all tensors with recorded names."""
    return {render(path): _axes(spec) for path, spec in sorted(_known_specs(checkpoint).items())}
