"""made_checkpoint: the target of a job as it can be read before the commit: through the places that its writer names.

The writer of the format is created in a store that holds nothing, and asked where each chunk lies. There is no metadata
that the format's own reader could read: the commit checks that it names the same places.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherry.core import dtypes
from wherry.core.detection import Detection
from wherry.core.tensorspec import Span, region_shape
from wherry.errors import InternalError, MismatchError
from wherry.formats.checkpoint import Checkpoint
from wherry.formats.format import Opened
from wherry.formats.reader import Access, BaseReader
from wherry.formats.writer import extents_of
from wherry.mover.chunks import fill_from_chunks
from wherry.storage.location import Location
from wherry.upload.selection import ROOT, FileSketch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import numpy as np

    from wherry.converter.plan import Plan
    from wherry.core.tensorspec import Region, TensorSpec
    from wherry.formats.format import Format, Writer
    from wherry.formats.reader import Extent
    from wherry.storage.location import Entry


class MadeReader(BaseReader):
    """Reads tensors from the places that a writer names; only chunks that are stored as they are."""

    def __init__(self, plan: Plan, writer: Writer, located: Callable[[Extent], Extent]) -> None:
        """Create a reader; nothing is read yet.

        Args:
            plan: the plan.
            writer: of its target, which names places.
            located: gives a place in the files that were made.
        """
        self._specs, self._writer = plan.manifest.tensors, writer
        self._places, self._located = extents_of(writer), located

    def access(self, spec: TensorSpec) -> Access:
        """Raw if the tensor has no chunks, else by region."""
        extents = self.extents(spec)
        return Access("regions", gridded=False) if extents is None else Access("raw", extents, gridded=False)

    def extents(self, spec: TensorSpec) -> tuple[Extent, ...] | None:
        """The places of all bytes of a tensor without chunks."""
        if self._specs[spec.path].chunks is not None:
            return None
        found = self._places(spec.path, Span(0, spec.nbytes))
        return None if found is None else tuple(map(self._located, found))

    def chunk(self, spec: TensorSpec, cell: Region) -> Extent | None:
        """The place of a chunk; None if it is not stored as it is."""
        found = self._places(spec.path, cell)
        return self._located(found[0]) if found else None

    def read(self, spec: TensorSpec, region: Region) -> np.ndarray:
        """The elements of a region."""
        import numpy as np

        out = np.empty(region_shape(region), dtypes.numpy_dtype(spec.dtype))
        if out.size:
            self.fill(spec, region, out.reshape(-1).view("u1").data)
        return out

    def fill(self, spec: TensorSpec, region: Region, buffer: memoryview) -> None:
        """Copy a region from the chunks in which it lies.

        Raises:
            MismatchError: a chunk is not stored as it is.
        """

        def place(cell: Region) -> Extent:
            found = self.chunk(spec, cell)
            if found is None:
                raise MismatchError("a chunk is encoded or padded", path=spec.name)
            return found

        chunks = self._specs[spec.path].chunks
        fill_from_chunks(spec, spec.shape if chunks is None else chunks, place, region, buffer)

    def companion(self, name: str) -> Location:
        """There are none."""
        raise InternalError(f"no companion is read: {name}")

    def members(self) -> Iterable[Entry]:
        """There are none."""
        return ()

    def close(self) -> None:
        """Close the writer, which has written nothing."""
        self._writer.close()


def made_checkpoint(row: Format, plan: Plan, located: Callable[[Extent], Extent]) -> Checkpoint:
    """The target of a plan, as its writer would place it.

    Args:
        row: its format.
        plan: the plan.
        located: gives a place in the files that were made.
    """
    assert row.create is not None, "the format is one that can be written"
    writer = row.create(Location(FileSketch(), ROOT), plan.manifest, plan.options)
    detection = Detection(plan.target, row.name, format_version=plan.format_version)
    return Checkpoint(Opened(detection, plan.manifest, MadeReader(plan, writer, located)))
