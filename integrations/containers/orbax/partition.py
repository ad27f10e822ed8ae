"""Chunk grids that match a mesh: a shard is a whole number of chunks, so that no device reads the shard of another.

Besides `auto`, `whole` and a number of MiB, the option `chunks` accepts:

    8x1                                          parts along each axis; an axis that the number does not divide, and
                                                 axes beyond the last number, stay whole
    mesh:data=4,model=2;spec:*/kernel=data,model   a mesh, and partition specs by a pattern of the printed key path:
                                                 one entry for each axis, a mesh axis, several joined with `+`, or `-`
    mesh:data=4,model=2;rules:embed=data,mlp=model  the same by the logical axis names of a tensor, if it has any

Clauses are separated by `;`, `spec:` may come several times, the first pattern that matches counts and takes precedence
over `rules:`. As in JAX a spec must not be longer than the tensor's rank, and every extent must be divisible by the
number of devices that it is split over. A shard of more than 8 MiB becomes several chunks, none of which crosses its
border; if no divisor of its extent gives 1 to 8 MiB, the next larger one is used.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

from wherry.core import dtypes
from wherry.errors import UsageError
from wherry.integrations.containers.zarr.new import auto_chunks
from wherry.text.numbers import decimal_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wherry.core.tensorspec import AxisName, TensorSpec

Entry: TypeAlias = tuple[str, ...]  # the mesh axes that one axis is split over

HELP = (
    "chunk size: auto (4 to 8 MiB), store (up to 32 MiB), whole, a number of MiB, parts along each axis (8x1), or a "
    "mesh with partition specs so that each shard is whole chunks (mesh:data=4,model=2;spec:*/kernel=data,model, or "
    "with logical axis names mesh:data=4;rules:embed=data)"
)
_COUNTS = re.compile(r"[1-9]\d*(x[1-9]\d*)*x?")
_MOST, _LEAST = 8 << 20, 1 << 20
_CURE = (
    "write for example `--set chunks=8x1`, or "
    "`--set 'chunks=mesh:data=4,model=2;spec:*/kernel=data,model;rules:embed=data'`"
)


@dataclass(frozen=True, slots=True)
class Partition:
    """A parsed option.

    Attributes:
        mesh: mesh axis → devices along it.
        specs: pattern of printed key paths → entry of each axis, in the order given.
        rules: logical axis name → mesh axes.
    """

    mesh: dict[str, int]
    specs: tuple[tuple[str, tuple[Entry, ...]], ...]
    rules: dict[str, Entry]


def matches(option: str) -> bool:
    """Whether an option has one of the forms of this module."""
    return option.startswith("mesh:") or ("x" in option and _COUNTS.fullmatch(option) is not None)


def chunks_for(spec: TensorSpec, option: str) -> tuple[int, ...]:
    """The chunk grid of a tensor.

    Raises:
        UsageError: the option is invalid, or does not fit the tensor.
    """
    return shard_chunks(spec, parts_along(spec, option))


def parts_along(spec: TensorSpec, option: str) -> tuple[int, ...]:
    """Into how many equal parts an option cuts each axis of a tensor.

    Raises:
        UsageError: the option is invalid, or does not fit the tensor.
    """
    if option.startswith("mesh:"):
        return _parts_on_mesh(spec, parse(option))
    counts = [int(count) for count in option.split("x") if count]
    counts += [1] * (len(spec.shape) - len(counts))
    return tuple(1 if extent % count else count for extent, count in zip(spec.shape, counts, strict=False))


def shard_chunks(spec: TensorSpec, parts: Sequence[int]) -> tuple[int, ...]:
    """Extents of a chunk so that each shard is whole chunks, of at most 8 MiB where its extents can be divided.

    Args:
        spec: the tensor.
        parts: equal parts along each axis; each divides its extent.
    """
    shard = tuple(extent // count for extent, count in zip(spec.shape, parts, strict=True))
    if all(count == 1 for count in parts):
        return auto_chunks(spec.shape, spec.dtype)
    return _cut(shard, tuple(count > 1 for count in parts), spec.dtype)


def _cut(shard: tuple[int, ...], split: tuple[bool, ...], dtype: str) -> tuple[int, ...]:
    """Cut along the first axes; where an axis is split over devices, only by a divisor of the shard's extent."""
    if not shard or dtypes.canonical_size(dtype, math.prod(shard)) <= _MOST:
        return tuple(max(extent, 1) for extent in shard)
    row = dtypes.canonical_size(dtype, math.prod(shard[1:]))
    if row > _MOST:
        return (1, *_cut(shard[1:], split[1:], dtype))
    if not split[0]:
        return (_MOST // row, *shard[1:])
    small = [one for one in range(1, math.isqrt(shard[0]) + 1) if shard[0] % one == 0]
    divisors = sorted({*small, *(shard[0] // one for one in small)})
    fitting = max(rows for rows in divisors if rows * row <= _MOST)
    large = next((rows for rows in divisors if rows * row >= _LEAST), shard[0])
    return (max(fitting, large), *shard[1:])


@cache
def parse(option: str) -> Partition:
    """Read the `mesh:` form of the option.

    Raises:
        UsageError: it is not well formed, or names an axis that the mesh does not have.
    """
    mesh: dict[str, int] = {}
    specs: list[tuple[str, tuple[Entry, ...]]] = []
    rules: dict[str, Entry] = {}
    for clause in option.split(";"):
        kind, _, text = clause.partition(":")
        if kind == "mesh":
            mesh.update({name: _extent(size, option) for name, size in _pairs(text, option)})
        elif kind == "rules":
            rules.update({name: _entry(axes) for name, axes in _pairs(text, option)})
        elif kind == "spec" and "=" in text:
            pattern, _, entries = text.rpartition("=")
            specs.append((pattern, tuple(_entry(entry) for entry in entries.split(","))))
        else:
            raise UsageError(
                f"invalid clause {clause!r} in chunks; expected mesh:, spec: or rules:", cure=_CURE
            )
    every = [*rules.values(), *(entry for _pattern, spec in specs for entry in spec)]
    unknown = sorted({axis for entry in every for axis in entry} - mesh.keys())
    if unknown:
        raise UsageError(f"unknown mesh axis in chunks: {', '.join(unknown)}", cure=_CURE)
    if not every:
        raise UsageError("missing spec: or rules: in chunks", cure=_CURE)
    return Partition(mesh, tuple(specs), rules)


def _parts_on_mesh(spec: TensorSpec, partition: Partition) -> tuple[int, ...]:
    entries = _entries(spec, partition)
    if len(entries) > len(spec.shape):
        raise UsageError(
            f"partition spec has {len(entries)} entries, the tensor {len(spec.shape)} axes",
            path=spec.name,
            cure="add a spec: for this tensor before the pattern that matched it",
        )
    used = [axis for entry in entries for axis in entry]
    if len(used) != len(set(used)):
        raise UsageError(
            f"duplicate mesh axis in a partition spec: {', '.join(used)}", path=spec.name, cure=_CURE
        )
    entries += ((),) * (len(spec.shape) - len(entries))
    parts = tuple(math.prod(partition.mesh[axis] for axis in entry) for entry in entries)
    for extent, count in zip(spec.shape, parts, strict=True):
        if extent % count:
            raise UsageError(
                f"extent {extent} is not divisible by {count} devices",
                path=spec.name,
                cure="add a spec: for this tensor before the pattern that matched it",
            )
    return parts


def _entries(spec: TensorSpec, partition: Partition) -> tuple[Entry, ...]:
    """The partition spec of a tensor; empty if no clause matches it, and for a tensor of rank 0."""
    if not spec.shape:
        return ()
    found = next((entries for pattern, entries in partition.specs if fnmatchcase(spec.name, pattern)), None)
    if found is not None:
        return found
    return tuple(_apply_rules(axis, partition.rules) for axis in spec.axes or ())


def _apply_rules(axis: AxisName, rules: dict[str, Entry]) -> Entry:
    names = axis if isinstance(axis, tuple) else (axis,)
    return tuple(mesh_axis for name in names for mesh_axis in rules.get(str(name), ()))


def _pairs(text: str, option: str) -> list[tuple[str, str]]:
    pairs = [pair.partition("=") for pair in text.split(",")]
    if not all(name and separator and value for name, separator, value in pairs):
        raise UsageError(f"invalid value for chunks: {option!r}; expected pairs NAME=VALUE", cure=_CURE)
    return [(name.strip(), value.strip()) for name, _separator, value in pairs]


def _extent(text: str, option: str) -> int:
    extent = decimal_number(text)
    if not extent:
        raise UsageError(f"invalid number of devices {text!r} in chunks={option}", cure=_CURE)
    return extent


def _entry(text: str) -> Entry:
    return () if text.strip() in ("", "-") else tuple(axis.strip() for axis in text.split("+"))
