"""Filling: what a leaf of a template becomes, by the kind of array that it is.

`read(region)` gives a part of the tensor as a new numpy array in the leaf's element type; `room(nbytes)` is held while
such an array is in memory. What was made is compared with what was asked for before it is given back.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from wherry.core import dtypes
from wherry.errors import MismatchError
from wherry.integrations.live.leaves import is_plain
from wherry.integrations.live.nodes import is_torch
from wherry.integrations.live.trees import flatten, rebuilt, survey

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import numpy as np

    from wherry.core.tensorspec import Region
    from wherry.live.match import Leaf

__all__ = ["equals", "fill", "flatten", "of_value", "rebuilt", "survey"]


def fill(
    leaf: Leaf,
    read: Callable[[Region], np.ndarray],
    room: Callable[[int], AbstractContextManager[None]],
    memory: int,
) -> Any:
    """The array that a leaf becomes.

    Args:
        leaf: of the template.
        read: a region of the leaf as a new C-order array.
        room: held while so many bytes are in memory on their way.
        memory: bytes that a part may have where the array can be filled in parts.

    Raises:
        MismatchError: the framework made something else than the template asks for.
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
        raise MismatchError(f"an array of {made.dtype} {made.shape} was made", path=leaf.name)
    return made


def of_value(leaf: Leaf, value: Any) -> Any:
    """The number or text that a leaf becomes, or an array without axes that holds the number.

    Raises:
        MismatchError: the element type cannot hold the number.
    """
    import numpy as np

    if leaf.dtype is None:
        return type(leaf.value)(value)
    array = np.array(value).astype(dtypes.numpy_dtype(leaf.dtype))
    if array.item() != value:
        raise MismatchError(f"{leaf.dtype} cannot hold {value!r}", path=leaf.name)

    def room(_nbytes: int) -> AbstractContextManager[None]:
        from contextlib import nullcontext

        return nullcontext()

    return fill(leaf, lambda _region: array, room, array.nbytes)


def equals(made: Any, array: np.ndarray) -> bool:
    """Whether an array of a framework has these elements, bit by bit."""
    if is_torch(made):
        from wherry.integrations.live import torch_arrays

        return torch_arrays.host(made).tobytes() == array.tobytes()
    import numpy as np

    return np.asarray(made).tobytes() == array.tobytes()
