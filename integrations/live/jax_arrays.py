"""JAX arrays from a checkpoint: each shard is read separately and put on the devices that hold it.

A shard that several devices hold (replicas) is read once. An array that was not committed to a device stays
uncommitted. Typed PRNG keys are rebuilt from their key data. Without `jax_enable_x64`, JAX silently turns 64-bit arrays
into 32-bit ones; the comparison at the end detects this.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from wherry.core.tensorspec import Region
from wherry.errors import MismatchError
from wherry.integrations.live.leaves import dtype_of, prng_of, region_bytes, shape_of

if TYPE_CHECKING:
    import numpy as np

    from wherry.live.match import Leaf


def fill(
    leaf: Leaf, read: Callable[[Region], np.ndarray], room: Callable[[int], AbstractContextManager[None]]
) -> Any:
    """See `filling.fill`."""
    import jax

    value, sharding = leaf.value, leaf.value.sharding
    whole = tuple(slice(0, extent) for extent in leaf.shape)
    loose = sharding is None or not getattr(value, "committed", True)
    if leaf.prng is not None or loose:
        with room(region_bytes(leaf.dtype, whole)):
            made: Any = jax.numpy.asarray(read(whole))
            if leaf.prng is not None:
                made = jax.random.wrap_key_data(made, impl=leaf.prng)
                made = made if loose else jax.device_put(made, sharding)
            jax.block_until_ready(made)
    else:
        made = _shard(leaf, sharding, read, room)
    found = f"{dtype_of(made, leaf.name)} {shape_of(made)}"
    wanted = f"{leaf.dtype} {leaf.shape}"
    if found != wanted or prng_of(made) != leaf.prng:
        cure = "set JAX_ENABLE_X64=1" if (leaf.dtype or "").endswith("64") else None
        raise MismatchError(f"expected {wanted}, but JAX created {found}", path=leaf.name, cure=cure)
    if not loose and not made.sharding.is_equivalent_to(sharding, made.ndim):
        raise MismatchError(f"expected sharding {sharding}, but JAX created {made.sharding}", path=leaf.name)
    return made


def _shard(
    leaf: Leaf,
    sharding: Any,
    read: Callable[[Region], np.ndarray],
    room: Callable[[int], AbstractContextManager[None]],
) -> Any:
    import jax

    owners: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
        box = tuple(part.indices(extent)[:2] for part, extent in zip(index, leaf.shape, strict=True))
        owners.setdefault(box, []).append(device)
    shards: list[Any] = []
    for box, devices in owners.items():
        region = tuple(slice(start, stop) for start, stop in box)
        with room(region_bytes(leaf.dtype, region)):
            host = read(region)
            some = [
                jax.device_put(
                    host, jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
                )
                for device in devices
            ]
            jax.block_until_ready(some)
            shards += some
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards, dtype=leaf.value.dtype)
