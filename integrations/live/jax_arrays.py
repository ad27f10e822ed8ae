"""Arrays of JAX from a checkpoint: every shard read alone and put on the devices that have it.

Of a shard that several devices share (replicas) one copy is read. An array that was committed to no device stays so.
Typed PRNG keys are made of their key data. JAX makes 32-bit arrays of 64-bit ones without a word where `jax_enable_x64`
is off, which the comparison at the end finds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wherry.errors import MismatchError
from wherry.integrations.live.leaves import dtype_of, prng_of, region_bytes, shape_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import numpy as np

    from wherry.core.tensorspec import Region
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
        made = _sharded(leaf, sharding, read, room)
    _require(leaf, made, None if loose else sharding)
    return made


def _sharded(
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
            some = [_put(jax, host, device, sharding) for device in devices]
            jax.block_until_ready(some)
            shards += some
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards, dtype=leaf.value.dtype)


def _put(jax: Any, host: Any, device: Any, sharding: Any) -> Any:
    kind = sharding.memory_kind
    return jax.device_put(host, jax.sharding.SingleDeviceSharding(device, memory_kind=kind))


def _require(leaf: Leaf, made: Any, sharding: Any) -> None:
    """Compare what was made with the template."""
    found = f"{dtype_of(made, leaf.name)} {shape_of(made)}"
    wanted = f"{leaf.dtype} {leaf.shape}"
    if found != wanted or prng_of(made) != leaf.prng:
        cure = "set jax_enable_x64" if (leaf.dtype or "").endswith("64") else None
        raise MismatchError(f"JAX made {found} where the template has {wanted}", path=leaf.name, cure=cure)
    if sharding is not None and not made.sharding.is_equivalent_to(sharding, made.ndim):
        raise MismatchError(f"JAX laid it as {made.sharding}, not as {sharding}", path=leaf.name)
