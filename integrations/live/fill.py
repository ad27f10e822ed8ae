"""Fill the leaves of a template, by kind of array.

`read(region)` returns a part of the tensor as a new numpy array in the leaf's element type; `room(nbytes)` is held
while such an array is in memory. The result is compared with the template before it is returned.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from wherry.core import dtypes
from wherry.core.tensorspec import Region
from wherry.errors import MismatchError
from wherry.integrations.live.leaves import is_plain
from wherry.integrations.live.nodes import is_torch
from wherry.integrations.live.trees import flatten, rebuilt, survey
from wherry.live.match import Leaf

if TYPE_CHECKING:
    import numpy as np


__all__ = ["equals", "fill", "flatten", "of_value", "rebuilt", "survey"]


def fill(
    leaf: Leaf,
    read: Callable[[Region], np.ndarray],
    room: Callable[[int], AbstractContextManager[None]],
    memory: int,
) -> Any:
    """Make the array that replaces a leaf.

    Args:
        leaf: the leaf of the template.
        read: a region of the leaf as a new C-order array.
        room: held while that many bytes are in transit in memory.
        memory: largest part in bytes, for arrays that can be filled in parts.

    Raises:
        MismatchError: the framework made another dtype or shape than the template has.
    """
    whole = tuple(slice(0, extent) for extent in leaf.shape)
    if is_plain(leaf.value):
        return type(leaf.value)(read(whole).item())
    if is_torch(leaf.value):
        from wherry.integrations.live import torch_arrays

        return torch_arrays.fill(leaf, read, room, memory)
    if "jax" in sys.modules and hasattr(leaf.value, "sharding"):
        from wherry.integrations.live import jax_arrays

        return jax_arrays.fill(leaf, read, room)
    made = read(whole)
    if made.shape != leaf.shape or made.dtype.name != leaf.dtype:
        raise MismatchError(
            f"expected {leaf.dtype} {leaf.shape}, got {made.dtype} {made.shape}", path=leaf.name
        )
    return made


def of_value(leaf: Leaf, value: Any) -> Any:
    """The number or text that replaces a leaf, or a zero-dimensional array that holds the number.

    Raises:
        MismatchError: the element type cannot hold the number.
    """
    import numpy as np

    if leaf.dtype is None:
        return type(leaf.value)(value)
    array = np.array(value).astype(dtypes.numpy_dtype(leaf.dtype))
    if array.item() != value:
        raise MismatchError(f"value {value!r} cannot be represented as {leaf.dtype}", path=leaf.name)

    def room(_nbytes: int) -> AbstractContextManager[None]:
        from contextlib import nullcontext

        return nullcontext()

    return fill(leaf, lambda _region: array, room, array.nbytes)


def equals(made: Any, array: np.ndarray) -> bool:
    """Whether an array of a framework has the same elements, bit by bit."""
    if is_torch(made):
        from wherry.integrations.live import torch_arrays

        return torch_arrays.host(made).tobytes() == array.tobytes()
    import numpy as np

    return np.asarray(made).tobytes() == array.tobytes()
