"""NamedArrays from what Orbax restored: names are put back, so that no axis is taken for another of its size.

tree = ocp.StandardCheckpointer().restore(folder)
arrays = named_arrays(tree, folder)             # label → penzai NamedArray
model = pz.bind_variables(…)                    # as Penzai's own documentation has it
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from wherry.core.keypath import KeyPath, parse, render
from wherry.errors import MismatchError, NotFoundError, missing_extra
from wherry.integrations.containers.orbax.layout import TREE, read_json
from wherry.integrations.formats.penzai import names
from wherry.storage.stores import locate

if TYPE_CHECKING:
    import os

    from wherry.core.tensorspec import AxisName


def named_arrays(tree: Any, folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Build the NamedArrays of a checkpoint that has axis names.

    Args:
        tree: what Orbax restored from the folder: nested dicts and lists of arrays.
        folder: the item folder.

    Returns:
        Label → NamedArray; an array of which no axis is named comes with positional axes.

    Raises:
        NotFoundError: the folder has no axis names.
        CorruptError: the names do not fit the arrays.
        MissingExtraError: penzai is not installed.
    """
    location = locate(folder)
    rows = names.noted(location, read_json(location.join(TREE)))
    if rows is None:
        raise NotFoundError("no axis names are stored here", uri=location.uri)
    leaves = {_path(label, row, tree): row for label, row in rows.items()}
    arrays = {path: _leaf(tree, path, location.uri) for path in leaves}
    known = names.read(rows, {path: array.ndim for path, array in arrays.items()}, location.uri)
    return {one.label: named_array(arrays[path], one.axes) for path, one in known.items()}


def named_array(array: Any, axes: tuple[AxisName, ...] | None) -> Any:
    """One NamedArray.

    Args:
        array: shape as stored.
        axes: a name for each of its axes in order, None for a positional one; None where nothing is known.

    Raises:
        MismatchError: their number is not the array's rank.
        MissingExtraError: penzai is not installed.
    """
    try:
        pz: Any = import_module("penzai.pz")
        jnp: Any = import_module("jax.numpy")
    except ImportError as error:
        raise missing_extra("penzai", "penzai", "building NamedArrays") from error

    if axes is not None and len(axes) != array.ndim:
        raise MismatchError(f"{len(axes)} axis names for an array of rank {array.ndim}")
    wrapped = pz.nx.wrap(jnp.asarray(array))
    if axes is None:
        return wrapped
    places = [("positional", number) if axis is None else axis for number, axis in enumerate(axes)]
    tagged = wrapped.tag(*places)
    unnamed = [place for place, axis in zip(places, axes, strict=True) if axis is None]
    return tagged.untag(*unnamed) if unnamed else tagged


def _path(label: str, row: Any, tree: Any) -> KeyPath:
    """Where an array lies in the restored tree; rows of others do not say, and have it under the label."""
    if "path" in row:
        return parse(row["path"])
    inner = tree.get(label) if isinstance(tree, dict) else None
    return (label, names.NAMED_ARRAY) if isinstance(inner, dict) else (label,)


def _leaf(tree: Any, path: KeyPath, uri: str) -> Any:
    node = tree
    try:
        for part in path:
            node = node[int(part)] if isinstance(node, (list, tuple)) else node[part]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise MismatchError("the restored tree lacks an array", uri=uri, path=render(path)) from error
    return node
