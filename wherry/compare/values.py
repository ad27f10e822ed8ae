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
    a_spec, b_spec = a.manifest.tensors[path], b.manifest.tensors[path]
    if dtypes.opaque(a_spec.dtype) or dtypes.opaque(b_spec.dtype):
        return None
    found = Distance(0.0, 0)
    limit = dtypes.canonical_size(a_spec.dtype, _BAND_ELEMENTS)
    for region, _span in row_bands(a_spec, limit):
        one = _of_arrays(a.read(path, region), b.read(path, region))
        found = Distance(max(found.error, one.error), found.elements + one.elements)
    return found


def _of_arrays(a: np.ndarray, b: np.ndarray) -> Distance:
    import numpy as np

    exact = a.dtype == b.dtype and a.dtype.kind in "biu"
    wide_a, wide_b = _wide(a), _wide(b)
    both_nan = np.isnan(wide_a) & np.isnan(wide_b)
    apart = (a != b) if exact else (wide_a != wide_b) & ~both_nan
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(wide_a - wide_b)[apart]
    error[~np.isfinite(error)] = np.inf
    return Distance(float(error.max(initial=0.0)), int(np.count_nonzero(apart)))


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype("complex128" if array.dtype.kind == "c" else "float64")
