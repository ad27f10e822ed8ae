"""The parameters that a forward pass takes: each by its key path and with the shape that the definition gives it.

`Leaves` reads those of a checkpoint, `Invented` makes random ones as they are taken: a checkpoint in the system's own
form, in which nothing of wherry's has part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


class DisagreementError(AssertionError):
    """A checkpoint is not what the target's definition reads."""


class Leaves:
    """Arrays by key path, parts joined by `/`."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self.arrays = dict(arrays)
        self._taken: set[str] = set()

    def __call__(self, name: str, *shape: int) -> Array:
        """One array in float64.

        Raises:
            DisagreementError: it is missing or has another shape.
        """
        found = self._find(name, shape)
        if found is None:
            raise DisagreementError(f"{name} is missing")
        if found.shape != shape:
            raise DisagreementError(f"{name} has shape {found.shape}, expected {shape}")
        self._taken.add(name)
        return found.astype(np.float64)

    def _find(self, name: str, shape: tuple[int, ...]) -> Array | None:
        return self.arrays.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self.arrays

    def require_all_taken(self) -> None:
        """Every array has its part in the forward pass.

        Raises:
            DisagreementError: some were not taken.
        """
        if left := sorted(set(self.arrays) - self._taken):
            raise DisagreementError(f"the forward pass does not read {', '.join(left)}")


class Invented(Leaves):
    """Random arrays, each made when it is first taken."""

    def __init__(self, seed: int = 0, scale: float = 0.2) -> None:
        super().__init__({})
        self._rng, self._scale = np.random.default_rng(seed), scale

    def _find(self, name: str, shape: tuple[int, ...]) -> Array:
        if name not in self.arrays:
            near = 1.0 if name.endswith(("scale", "scalar")) else 0.0
            self.arrays[name] = (near + self._scale * self._rng.standard_normal(shape)).astype(np.float32)
        return self.arrays[name]


@dataclass(frozen=True)
class Part:
    """The leaves below a key path; those of one layer, if layers are stacked.

    Attributes:
        leaves: all leaves.
        path: the key path.
        index: the layer's index in stacked arrays; None if they are not stacked.
        count: the number of layers that are stacked.
        axis: the axis that they are stacked along.
    """

    leaves: Leaves
    path: str
    index: int | None = None
    count: int = 0
    axis: int = 0

    def __call__(self, name: str, *shape: int) -> Array:
        """One array of this part, without the axis of layers."""
        if self.index is None:
            return self.leaves(f"{self.path}/{name}", *shape)
        stacked = (*shape[: self.axis], self.count, *shape[self.axis :])
        return self.leaves(f"{self.path}/{name}", *stacked).take(self.index, self.axis)

    def under(self, name: str) -> Self:
        """The part below a further key path."""
        return replace(self, path=f"{self.path}/{name}")


def stacked(leaves: Leaves, path: str, count: int, axis: int) -> list[Part]:
    """The layers of one stack."""
    return [Part(leaves, path, index, count, axis) for index in range(count)]
