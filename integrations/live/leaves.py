"""Metadata of one leaf of a live state: shape, element type, axis names and sharding, without its bytes.

A typed PRNG key of JAX counts as the array of its key data (uint32, with the axes of the key behind its own), as Orbax
stores it. Element types have the names of numpy and ml_dtypes, whatever the framework of the array.
"""

from __future__ import annotations

import math
from typing import Any

from wherry.core import dtypes
from wherry.core.tensorspec import AxisName, Region, Sharding, region_shape
from wherry.errors import UnsupportedError
from wherry.integrations.live.nodes import WrapperFacts, is_torch

_PLAIN = (bool, int, float, str)


def is_plain(value: Any) -> bool:
    """Whether a leaf is a number or text instead of an array."""
    return type(value) in _PLAIN


def prng_of(value: Any) -> str | None:
    """The implementation of a typed PRNG key (`threefry2x32`); None for all other arrays."""
    dtype = getattr(value, "dtype", None)
    implementation = getattr(dtype, "_impl", None)
    return str(implementation.name) if implementation is not None else None


def shape_of(value: Any) -> tuple[int, ...]:
    """Global extents of an array; for a PRNG key, those of its key data."""
    shape = tuple(int(extent) for extent in value.shape)
    if prng_of(value) is None:
        return shape
    return (*shape, *(int(extent) for extent in value.dtype._impl.key_shape))  # noqa: SLF001  has no public name


def dtype_of(value: Any, name: str) -> str:
    """Name of the element type of an array.

    Raises:
        UnsupportedError: the value is not an array, or has a type that checkpoints cannot hold.
    """
    if prng_of(value) is not None:
        return "uint32"
    found = str(getattr(value, "dtype", "")).removeprefix("torch.")
    if not hasattr(value, "shape") or not dtypes.is_known(found):
        raise UnsupportedError(
            f"unsupported type {type(value).__module__}.{type(value).__name__} {found}".rstrip(), path=name,
            cure="remove it from the state; a state can hold arrays, numbers and text",
        )  # fmt: skip
    return found


def region_bytes(dtype: str | None, region: Region) -> int:
    """Bytes of a region of an array of this element type."""
    return dtypes.canonical_size(dtype or "uint8", math.prod(region_shape(region)))


def sharding_of(value: Any, facts: WrapperFacts) -> Sharding | None:
    """How an array is sharded over devices, with the rules of its box; None if nothing is known."""
    mesh, spec = _torch_mesh(value) if is_torch(value) else _jax_mesh(value)
    if not mesh and not facts.rules:
        return None
    return Sharding(mesh=mesh, spec=spec, rules=facts.rules)


def _jax_mesh(value: Any) -> tuple[tuple[tuple[str, int], ...], tuple[AxisName, ...]]:
    sharding = getattr(value, "sharding", None)
    mesh, spec = getattr(sharding, "mesh", None), getattr(sharding, "spec", None)
    if mesh is None or spec is None:
        return (), ()
    extents = tuple((str(name), int(extent)) for name, extent in mesh.shape.items())
    entries: list[AxisName] = [
        tuple(map(str, entry)) if isinstance(entry, tuple) else None if entry is None else str(entry)
        for entry in spec
    ]
    entries += [None] * (len(shape_of(value)) - len(entries))
    return extents, tuple(entries)


def _torch_mesh(value: Any) -> tuple[tuple[tuple[str, int], ...], tuple[AxisName, ...]]:
    """Mesh and spec of a DTensor; axes of a mesh without names are numbered."""
    mesh = getattr(value, "device_mesh", None)
    if mesh is None:
        return (), ()
    names = mesh.mesh_dim_names or tuple(str(number) for number in range(mesh.ndim))
    split: list[list[str]] = [[] for _ in value.shape]
    for name, placement in zip(names, value.placements, strict=True):
        if placement.is_shard():
            split[placement.dim].append(str(name))
    entries = tuple(None if not axes else axes[0] if len(axes) == 1 else tuple(axes) for axes in split)
    return tuple(zip(map(str, names), map(int, mesh.shape), strict=True)), entries
