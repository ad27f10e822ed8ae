"""Describes what is missing from a sharded checkpoint: how many bytes, in how many arrays, and from which hosts.

"449 GB, expected 1,800" has one common cause: every host wrote to its own disk, and only one of these disks was
copied. Metadata alone can show it. `_sharding` says how each array was sharded over the devices, and therefore which
chunks each device wrote; an OCDBT tree says which process's data files it refers to. Sizes are those of decoded
elements, because files are compressed and `du` shows nothing.

Facts: with a NamedSharding a dimension is cut into as many equal parts as the mesh axes of its entry in the
partition spec have devices, the first of these axes varying slowest. Along the other mesh axes it is replicated: one of
the devices that hold a shard writes it, or, since Orbax 0.11.9, each of them writes a slice with separate chunks.
"""

from __future__ import annotations

import math
from itertools import islice, product
from typing import TYPE_CHECKING

from wherry.core import dtypes
from wherry.core.tensorspec import Region, Sharding, region_shape
from wherry.integrations.containers.ocdbt.read import PROCESS_PREFIX
from wherry.mover.move import cells

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from wherry.core.keypath import KeyPath
    from wherry.integrations.containers.zarr.reader import ArrayReader, StoredArray

_CHUNKS_LOOKED_AT = 1_000_000
_SHARES_LOOKED_AT = 2_000_000
_UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"), (1, "bytes"))
_NO_DECIMALS_FROM = 100


def shortfall(reader: ArrayReader, shardings: Mapping[KeyPath, Sharding]) -> str | None:
    """Describe what is missing.

    Args:
        reader: an opened item.
        shardings: how the writer sharded the arrays over devices, where known.

    Returns:
        One phrase; None if nothing is missing, or if there are too many chunks to check.
    """
    listing = reader.listing
    total = sum(array.zarr.chunk_count for array in reader.arrays.values())
    if listing is None or total > _CHUNKS_LOOKED_AT:
        return None
    present = expected = chunks = chunks_present = 0
    damaged: set[KeyPath] = set()
    files: set[str] = set()
    for path, array in reader.arrays.items():
        whole = tuple(slice(0, extent) for extent in array.zarr.shape)
        for region in cells(whole, array.zarr.chunks):
            nbytes = dtypes.canonical_size(array.zarr.dtype, math.prod(region_shape(region)))
            (key,) = islice(array.chunk_keys(region), 1)
            chunks += 1
            expected += nbytes
            if listing.lack(key) is None:
                chunks_present += 1
                present += nbytes
            else:
                damaged.add(path)
                value = listing.values.get(key)
                files |= {value.file} if value is not None and value.file else set()
    if not damaged:
        return None
    words = [
        f"{_amount(present, expected)} present",
        f"{chunks_present:,} of {chunks:,} chunks",
        f"{len(damaged):,} of {len(reader.arrays):,} arrays are incomplete",
    ]
    if files:
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        words.append(f"data file {min(files)}{more} missing or truncated")
    hosts = _processes(reader, files) or _devices(reader, shardings)
    return ", ".join([*([hosts] if hosts else []), *words])


def _amount(present: int, expected: int) -> str:
    size, unit = next((size, unit) for size, unit in _UNITS if expected >= size or size == 1)
    return f"{_number(present / size)} of {_number(expected / size)} {unit}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= _NO_DECIMALS_FROM or value == int(value) else f"{value:.2f}"


def _processes(reader: ArrayReader, files: set[str]) -> str | None:
    """Of a merged OCDBT database: how many stores of processes still exist."""
    if reader.listing is None or not files:
        return None
    parts = {value.file.split("/")[0] for value in reader.listing.values.values() if value.file}
    stores = {part for part in parts if part.startswith(PROCESS_PREFIX)}
    there = {entry.name for entry in reader.location.entries() if entry.is_dir}
    lost = stores - there
    return f"{len(stores) - len(lost)} of {len(stores)} hosts" if lost else None


def _devices(reader: ArrayReader, shardings: Mapping[KeyPath, Sharding]) -> str | None:
    """The devices whose chunks all exist, if those of all others are missing: the disks of some of the hosts."""
    meshes = {sharding.mesh for sharding in shardings.values()}
    if len(meshes) != 1:
        return None
    devices = list(_coordinates(meshes.pop()))
    if len(devices) * len(shardings) > _SHARES_LOOKED_AT:
        return None
    present, lost = [0] * len(devices), [0] * len(devices)
    for path, sharding in shardings.items():
        for device, keys in enumerate(_shares(reader.arrays[path], sharding, devices)):
            gone = sum(reader.listing is None or reader.listing.lack(key) is not None for key in keys)
            lost[device] += gone
            present[device] += len(keys) - gone
    if any(here and gone for here, gone in zip(present, lost, strict=True)):
        return None
    whole, empty = sum(map(bool, present)), sum(map(bool, lost))
    if not whole or not empty:
        return None
    share, total = math.gcd(whole, empty), whole + empty
    hosts = f"{whole // share} of {total // share} hosts"
    return f"{hosts} (the chunks of {whole} of {total} devices, as when each host wrote to its own disk)"


def _coordinates(mesh: tuple[tuple[str, int], ...]) -> Iterator[dict[str, int]]:
    """Every device of a mesh, by its index on each axis."""
    total = math.prod(extent for _name, extent in mesh)
    if total > _SHARES_LOOKED_AT:
        return
    names = [name for name, _extent in mesh]
    for numbers in product(*(range(extent) for _name, extent in mesh)):
        yield dict(zip(names, numbers, strict=True))


def _shares(array: StoredArray, sharding: Sharding, devices: list[dict[str, int]]) -> Iterator[list[str]]:
    """The chunks of an array that each device wrote.

    The first of the devices that hold a shard writes it, unless there is a chunk for each of them.
    """
    sizes, rank = dict(sharding.mesh), len(array.zarr.shape)
    named = [(axis,) if isinstance(axis, str) else axis or () for axis in sharding.spec[:rank]]
    parts = [math.prod(sizes.get(name, 1) for name in names) for names in named]
    others = [name for name in sizes if not any(name in names for names in named)]
    replicas = math.prod(sizes[name] for name in others)
    shards: dict[tuple[int, ...], list[str]] = {}
    for device in devices:
        shard = tuple(_place(names, device, sizes) for names in named)
        if shard not in shards:
            shards[shard] = list(array.chunk_keys(_shard_region(array.zarr.shape, parts, shard)))
        keys, replica = shards[shard], _place(others, device, sizes)
        if replicas > 1 and len(keys) % replicas == 0:
            each = len(keys) // replicas
            yield keys[replica * each : (replica + 1) * each]
        else:
            yield keys if replica == 0 else []


def _place(names: Sequence[str], device: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    """The number of a device along several mesh axes, the first varying slowest."""
    number = 0
    for name in names:
        number = number * sizes.get(name, 1) + device.get(name, 0)
    return number


def _shard_region(shape: tuple[int, ...], parts: list[int], shard: tuple[int, ...]) -> Region:
    region = [slice(0, extent) for extent in shape]
    for axis, (part, number) in enumerate(zip(parts, shard, strict=True)):
        step = -(-shape[axis] // part)
        start = min(number * step, shape[axis])
        region[axis] = slice(start, min(start + step, shape[axis]))
    return tuple(region)
