"""LazyTensor: one tensor of an opened checkpoint, read when it is indexed: `checkpoint["params/w"][:8]`."""

from __future__ import annotations

from collections.abc import Callable
from types import EllipsisType
from typing import TYPE_CHECKING, Any

from wherry.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

    from wherry.core.tensorspec import Region, TensorSpec


Index = int | slice | EllipsisType | tuple[int | slice | EllipsisType, ...]


class LazyTensor:
    """A tensor in storage.

    Attributes:
        spec: its key path, shape and dtype.
    """

    def __init__(self, spec: TensorSpec, read: Callable[[Region], np.ndarray]) -> None:
        """Refer to a tensor; nothing is read.

        Args:
            spec: the tensor.
            read: reads the elements of a region.
        """
        self.spec = spec
        self._read = read

    @property
    def shape(self) -> tuple[int, ...]:
        """The extents of the tensor."""
        return self.spec.shape

    @property
    def dtype(self) -> str:
        """The name of the tensor's dtype."""
        return self.spec.dtype

    @property
    def nbytes(self) -> int:
        """The size of the tensor in bytes."""
        return self.spec.nbytes

    def __len__(self) -> int:
        return self.spec.shape[0]

    def __getitem__(self, index: Index) -> np.ndarray:
        """Read a part: integers, slices with step 1 and `...`, as for arrays; only these elements are read.

        Raises:
            IndexError: an integer is out of range, or there are too many indices.
            UsageError: a slice has a step.
            DamagedError: bytes are missing or inconsistent.
        """
        parts = _every_axis(index, self.spec)
        region = tuple(_bounds(part, extent) for part, extent in zip(parts, self.shape, strict=True))
        found = self._read(region)
        return found[tuple(0 if isinstance(part, int) else slice(None) for part in parts)]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The whole tensor, for NumPy."""
        found = self._read(self.spec.whole)
        return found if dtype is None else found.astype(dtype, copy=False)

    def __repr__(self) -> str:
        return f"<LazyTensor {self.spec.name!r} {self.dtype}[{', '.join(map(str, self.shape))}]>"


def _every_axis(index: Index, spec: TensorSpec) -> list[int | slice]:
    """One index for each axis; axes that are not indexed are taken whole."""
    given = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis not in given:
        given.append(Ellipsis)
    place = given.index(Ellipsis)
    missing = len(spec.shape) - len(given) + 1
    if missing < 0 or Ellipsis in given[place + 1 :]:
        raise IndexError(f"too many indices for {len(spec.shape)} axes of {spec.name}")
    whole: list[Any] = [slice(None)] * missing
    return [*given[:place], *whole, *given[place + 1 :]]  # pyright: ignore[reportReturnType]  no other ellipsis


def _bounds(part: int | slice, extent: int) -> slice:
    if isinstance(part, slice):
        start, stop, step = part.indices(extent)
        if step != 1:
            raise UsageError(f"{part} has a step", cure="read the whole range and index the array")
        return slice(start, max(start, stop))
    if not -extent <= part < extent:
        raise IndexError(f"index {part} is out of range for an extent of {extent}")
    return slice(part % extent, part % extent + 1)
