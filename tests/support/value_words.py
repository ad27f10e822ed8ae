"""Value words that change shapes: concat, pad and tie, each with its inverse, all exact.

`wherry.layout.copies` carries them out as regions, without ever holding a whole tensor; these are their definitions on
whole arrays, with which the tests compare it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wherry.errors import UnrepresentableError

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Concat:
    """Several arrays in one, along a dimension; its inverse is the split into unequal parts. Exact."""

    dimension: int
    parts: tuple[int, ...]

    def forward(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """The arrays in one.

        Raises:
            UnrepresentableError: their extents are not the parts.
        """
        import numpy as np

        if tuple(array.shape[self.dimension] for array in arrays) != self.parts:
            raise UnrepresentableError(f"concat of {self.parts} got other extents")
        return np.concatenate(list(arrays), axis=self.dimension)

    def inverse(self, array: np.ndarray) -> tuple[np.ndarray, ...]:
        """The parts again."""
        import numpy as np

        if array.shape[self.dimension] != sum(self.parts):
            raise UnrepresentableError(f"split into {self.parts} of {array.shape[self.dimension]}")
        cuts = [sum(self.parts[:place]) for place in range(1, len(self.parts))]
        return tuple(np.split(array, cuts, axis=self.dimension))


@dataclass(frozen=True, slots=True)
class Pad:
    """A dimension is longer than its axis; the rest is zeros. Its inverse is the crop. Exact.

    Attributes:
        dimension: which one.
        true: the axis's extent.
        stored: the dimension's.
    """

    dimension: int
    true: int
    stored: int

    def forward(self, array: np.ndarray) -> np.ndarray:
        """With zeros at the end."""
        import numpy as np

        widths = [(0, self.stored - self.true if axis == self.dimension else 0) for axis in range(array.ndim)]
        return np.pad(array, widths)

    def inverse(self, array: np.ndarray) -> np.ndarray:
        """Without the padding."""
        cut = [slice(0, self.true if axis == self.dimension else None) for axis in range(array.ndim)]
        return array[tuple(cut)]


@dataclass(frozen=True, slots=True)
class Tie:
    """The tensor is a second copy of another parameter. Exact; the inverse demands that both are equal."""

    parameter: str

    def forward(self, array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Both tensors."""
        return array, array

    def inverse(self, arrays: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        """The one parameter.

        Raises:
            UnrepresentableError: the two differ, so they are not tied.
        """
        first, second = arrays
        if first.dtype != second.dtype or first.tobytes() != second.tobytes():
            raise UnrepresentableError(
                f"the copy of {self.parameter} differs from it",
                cure="declare the two as untied in the config",
            )
        return first
