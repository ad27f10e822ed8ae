"""values: how far the values of one tensor in two checkpoints differ, read in bands of bounded size."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from wherry.core import dtypes
from wherry.core.tensorspec import row_bands

if TYPE_CHECKING:
    import numpy as np

    from wherry.core.keypath import KeyPath
    from wherry.formats.checkpoint import Checkpoint

_BAND_ELEMENTS = 1 << 18


class Distance(NamedTuple):
    """How far the values of two tensors differ.

    Attributes:
        error: the largest absolute difference; infinite if only one of two values is NaN or infinite.
        elements: number of elements that differ; two NaNs do not.
    """

    error: float
    elements: int


def distance(a: Checkpoint, b: Checkpoint, path: KeyPath) -> Distance | None:
    """How far a tensor of equal shape differs; None if its values cannot be calculated with.

    Raises:
        DamagedError: bytes are missing or corrupt.
        StorageError: the storage failed.
    """
    mine, theirs = a.manifest.tensors[path], b.manifest.tensors[path]
    if dtypes.opaque(mine.dtype) or dtypes.opaque(theirs.dtype):
        return None
    found = Distance(0.0, 0)
    limit = dtypes.canonical_size(mine.dtype, _BAND_ELEMENTS)
    for region, _span in row_bands(mine, limit):
        one = _of_arrays(a.read(path, region), b.read(path, region))
        found = Distance(max(found.error, one.error), found.elements + one.elements)
    return found


def _of_arrays(mine: np.ndarray, theirs: np.ndarray) -> Distance:
    import numpy as np

    exact = mine.dtype == theirs.dtype and mine.dtype.kind in "biu"
    one, other = _wide(mine), _wide(theirs)
    both_nan = np.isnan(one) & np.isnan(other)
    apart = (mine != theirs) if exact else (one != other) & ~both_nan
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(one - other)[apart]
    error[~np.isfinite(error)] = np.inf
    return Distance(float(error.max(initial=0.0)), int(np.count_nonzero(apart)))


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype("complex128" if array.dtype.kind == "c" else "float64")
