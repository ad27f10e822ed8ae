"""The step of a T5X checkpoint: its folder's name and `state/step` must match. T5X itself does not check this."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherry.errors import CorruptError
from wherry.integrations.formats.t5x.layout import STATE, TRAIN_STATE, stated_step
from wherry.mover.read import read_array

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wherry.core.keypath import KeyPath
    from wherry.core.manifest import Value
    from wherry.core.tensorspec import TensorSpec
    from wherry.integrations.containers.zarr.reader import ArrayReader
    from wherry.storage.location import Location

STEP = (STATE, "step")
_STEPS = (STEP, (TRAIN_STATE, *STEP))


def checked_step(
    location: Location,
    tensors: Mapping[KeyPath, TensorSpec],
    values: Mapping[KeyPath, Value],
    reader: ArrayReader,
) -> int | None:
    """The step inside, else the step in the name; None if neither is known.

    Raises:
        CorruptError: the step in the name differs from the step inside.
    """
    place = next((path for path in _STEPS if path in tensors or path in values), STEP)
    inside, spec = values.get(place), tensors.get(place)
    if spec is not None and "int" in spec.dtype and spec.size == 1:
        array, listing = reader.arrays.get(spec.path), reader.listing
        lacks = (
            array is not None and listing is not None and any(listing.lack(key) for key in array.chunk_keys())
        )
        if not lacks:
            inside = int(read_array(reader, spec, spec.whole).reshape(()).item())
    stated = stated_step(location.name)
    if type(inside) is not int:
        return stated
    if stated is not None and stated != inside:
        raise CorruptError(
            f"step mismatch: {stated} in the folder's name, {inside} in state/step",
            uri=location.uri,
            cure=f"rename the folder to checkpoint_{inside}, or use another step",
        )
    return inside
