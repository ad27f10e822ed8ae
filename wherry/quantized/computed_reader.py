"""ComputedReader: some tensors are computed from those of another reader, the others stay as they are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from wherry.core.keypath import KeyPath
from wherry.core.tensorspec import Region, TensorSpec, region_shape
from wherry.formats.companions import CompanionsReader
from wherry.formats.contents import Access, Computed, Contents
from wherry.mover.output import as_array

if TYPE_CHECKING:
    import numpy as np


class ComputedReader(CompanionsReader):
    """A reader over another one, some of whose tensors are computed region by region; used from several threads."""

    def __init__(
        self, reader: Contents, stored: Mapping[KeyPath, TensorSpec], files: Mapping[str, bytes] | None = None
    ) -> None:
        """Read nothing yet.

        Args:
            reader: of the stored checkpoint; it is closed together with this reader.
            stored: its tensors.
            files: companion files that differ from the stored ones, by name.
        """
        super().__init__(reader, files or {})
        self._stored = stored

    @abstractmethod
    def is_computed(self, spec: TensorSpec) -> bool:
        """Whether a tensor is computed."""

    @abstractmethod
    def compute(self, spec: TensorSpec, region: Region, out: np.ndarray) -> None:
        """Write the elements of a region of a computed tensor into an array; the region is not empty."""

    def memory(self, spec: TensorSpec, region: Region) -> int:  # noqa: ARG002  for some readers
        """Bytes of memory that `compute` takes for a region of a computed tensor."""
        return 0

    def compute_at(self, spec: TensorSpec, region: Region, out: np.ndarray) -> bool:  # noqa: ARG002  for some readers
        """As `compute`, into an array with any strides.

        Returns:
            Whether that was done: not for a tensor that is not computed, nor where it would be slower than to copy it.
        """
        return False

    def inner(self, spec: TensorSpec) -> tuple[Contents, TensorSpec]:
        """The stored checkpoint's reader, for tensors that stay as they are."""
        return self.base, self._stored[spec.path]

    def access(self, spec: TensorSpec) -> Access:
        """Computed by region, or as the stored tensor is."""
        if not self.is_computed(spec):
            return super().access(spec)
        return Computed(partial(self._fill, spec), partial(self.memory, spec))

    def _fill(self, spec: TensorSpec, region: Region, buffer: memoryview) -> None:
        self.compute(spec, region, as_array(buffer, spec.dtype, region_shape(region)))
