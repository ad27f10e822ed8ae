"""Rebuild NamedArrays from a tree that Orbax restored, so that axes of equal size are not confused.

tree = ocp.StandardCheckpointer().restore(folder)
arrays = named_arrays(tree, folder)             # label → penzai NamedArray
model = llamalike_model(folder, arrays)         # built with the arguments in penzai_config.json
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from wherry.core.keypath import KeyPath, parse, render
from wherry.core.tensorspec import AxisName
from wherry.errors import MismatchError, NotFoundError, missing_extra
from wherry.integrations.containers.orbax.layout import ASSETS, TREE, read_json
from wherry.integrations.formats import penzai
from wherry.store.local_store import locate

CONFIG = "penzai_config.json"


def named_arrays(tree: Any, folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Build the NamedArrays of a checkpoint that has axis names.

    Args:
        tree: the tree that Orbax restored from the folder: nested dicts and lists of arrays.
        folder: the item folder.

    Returns:
        Label → NamedArray; an array without axis names has positional axes.

    Raises:
        NotFoundError: the folder has no axis names.
        CorruptError: the names do not match the arrays.
        MissingExtraError: penzai is not installed.
    """
    location = locate(folder)
    rows = penzai.noted_labels(location, read_json(location.join(TREE)))
    if rows is None:
        raise NotFoundError("no axis names stored in the checkpoint", uri=location.uri)
    leaves = {_path(label, row, tree): row for label, row in rows.items()}
    arrays = {path: _leaf(tree, path, location.uri) for path in leaves}
    known = penzai.read_names(rows, {path: array.ndim for path, array in arrays.items()}, location.uri)
    return {one.label: named_array(arrays[path], one.axes) for path, one in known.items()}


def llamalike_model(folder: str | os.PathLike[str], arrays: Mapping[str, Any]) -> Any:
    """Build Penzai's model of a converted checkpoint, with the arguments that wherry stored with it.

    Args:
        folder: the item folder, with `assets/penzai_config.json`.
        arrays: label → NamedArray, see `named_arrays`.

    Returns:
        Penzai's TransformerLM.

    Raises:
        NotFoundError: the folder has no such file.
        MissingExtraError: penzai is not installed.
    """
    common = _library("penzai.models.transformer.variants.llamalike_common", "building the model")
    given = _read_arguments(folder)
    window = (given.pop("attention_type", None) or {}).get("window_size")
    kind = common.AttentionTypeSlidingWindowCausal(window) if window else common.AttentionTypeGlobalCausal()
    model = common.build_llamalike_transformer(
        common.LlamalikeTransformerConfig(attention_type=kind, **given),
        init_base_rng=None,
        name="transformer",
    )
    return _bind(model, arrays)


def gpt_neox_model(folder: str | os.PathLike[str], arrays: Mapping[str, Any]) -> Any:
    """Build Penzai's GPT-NeoX of a converted checkpoint; `llamalike_model` describes arguments, result and errors.

    It computes in float32 unless the arguments state another `activation_dtype`.
    """
    neox = _library("penzai.models.transformer.variants.gpt_neox", "building the model")
    given = {"activation_dtype": "float32", **_read_arguments(folder)}
    model = neox.build_gpt_neox_transformer(
        neox.GPTNeoXTransformerConfig(**given), init_base_rng=None, name="transformer"
    )
    return _bind(model, arrays)


def _read_arguments(folder: str | os.PathLike[str]) -> dict[str, Any]:
    given = read_json(locate(folder).join(f"{ASSETS}/{CONFIG}"))
    given.pop("variant", None)
    return given


def _bind(model: Any, arrays: Mapping[str, Any]) -> Any:
    pz = _library("penzai.pz", "building the model")
    return pz.bind_variables(model, [pz.Parameter(value=one, label=label) for label, one in arrays.items()])


def named_array(array: Any, axes: tuple[AxisName, ...] | None) -> Any:
    """One NamedArray.

    Args:
        array: the array in its stored shape.
        axes: a name for each of its axes in order, None for a positional one; None if nothing is known.

    Raises:
        MismatchError: the number of names differs from the array's rank.
        MissingExtraError: penzai is not installed.
    """
    pz, jnp = (_library(name, "building NamedArrays") for name in ("penzai.pz", "jax.numpy"))

    if axes is not None and len(axes) != array.ndim:
        raise MismatchError(f"expected {array.ndim} axis names, got {len(axes)}: {axes}")
    wrapped = pz.nx.wrap(jnp.asarray(array))
    if axes is None:
        return wrapped
    places = [("positional", number) if axis is None else axis for number, axis in enumerate(axes)]
    tagged = wrapped.tag(*places)
    unnamed = [place for place, axis in zip(places, axes, strict=True) if axis is None]
    return tagged.untag(*unnamed) if unnamed else tagged


def _path(label: str, row: Any, tree: Any) -> KeyPath:
    """Key path of an array in the restored tree; rows of other tools lack it, their arrays are under the label."""
    if "path" in row:
        return parse(row["path"])
    inner = tree.get(label) if isinstance(tree, dict) else None
    return (label, penzai.NAMED_ARRAY) if isinstance(inner, dict) else (label,)


def _leaf(tree: Any, path: KeyPath, uri: str) -> Any:
    node = tree
    try:
        for part in path:
            node = node[int(part)] if isinstance(node, (list, tuple)) else node[part]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise MismatchError("array missing from the restored tree", uri=uri, path=render(path)) from error
    return node


def _library(name: str, purpose: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise missing_extra("penzai", "penzai", purpose) from error
