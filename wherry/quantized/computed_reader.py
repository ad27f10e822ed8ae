"""ComputedReader: tensors that are computed from those of another reader, beside tensors that stay as they are."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from wherry.core import dtypes
from wherry.core.tensorspec import Region, TensorSpec, region_shape
from wherry.formats.companions_reader import CompanionsReader
from wherry.formats.reader import Access, ReaderOver

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from wherry.core.keypath import KeyPath
    from wherry.formats.reader import Reader


class ComputedReader(CompanionsReader):
    """A reader over another one, some of whose tensors are computed region by region; used from several threads."""

    def __init__(
        self, reader: Reader, stored: Mapping[KeyPath, TensorSpec], files: Mapping[str, bytes] | None = None
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

    def compute_at(self, spec: TensorSpec, region: Region, out: np.ndarray) -> bool:  # noqa: ARG002  for some readers
        """As `compute`, into an array with any strides.

        Returns:
            Whether that was done: not for a tensor that is not computed, nor where it would be slower than to copy it.
        """
        return False

    def inner(self, spec: TensorSpec) -> tuple[Reader, TensorSpec]:
        """The stored checkpoint's reader, for tensors that stay as they are."""
        return self._reader, self._stored[spec.path]

    def access(self, spec: TensorSpec) -> Access:
        """By region, if the tensor is computed."""
        if self.is_computed(spec):
            return Access("regions", gridded=False, computes=True)
        return super().access(spec)

    def extents(self, spec: TensorSpec) -> Any:
        """The extents of a stored tensor; None for one that is computed."""
        return None if self.is_computed(spec) else super().extents(spec)

    def held(self, spec: TensorSpec, cell: Region) -> int | None:
        """See Reader."""
        return None if self.is_computed(spec) else super().held(spec, cell)

    def encoded(self, spec: TensorSpec) -> Any:
        """See Reader."""
        return None if self.is_computed(spec) else super().encoded(spec)

    def stream(self, spec: TensorSpec, cell: Region) -> Any:
        """See Reader."""
        if self.is_computed(spec):
            return super(ReaderOver, self).stream(spec, cell)
        return super().stream(spec, cell)

    def read_bytes(self, spec: TensorSpec) -> bytes:
        """See Reader."""
        return self.read(spec, spec.whole).tobytes() if self.is_computed(spec) else super().read_bytes(spec)

    def read(self, spec: TensorSpec, region: Region) -> np.ndarray:
        """The elements of a region; errors are those of `compute`."""
        import numpy as np

        if not self.is_computed(spec):
            return super().read(spec, region)
        out = np.empty(region_shape(region), dtypes.numpy_dtype(spec.dtype))
        if out.size:
            self.compute(spec, region, out)
        return out

    def fill(self, spec: TensorSpec, region: Region, buffer: memoryview) -> None:
        """Fill a buffer with the elements of a region; see `read`."""
        import numpy as np

        if not self.is_computed(spec):
            super().fill(spec, region, buffer)
            return
        out = np.frombuffer(buffer, dtypes.numpy_dtype(spec.dtype)).reshape(region_shape(region))
        if out.size:
            self.compute(spec, region, out)
