"""ggml_view: a GGUF file as if its quantised tensors had been saved plain, under the names that they have there."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

from wherry.core import dtypes
from wherry.core.tensorspec import Region, Span, TensorSpec
from wherry.core.units import plural
from wherry.errors import UnrepresentableError
from wherry.formats.checkpoint import Checkpoint
from wherry.formats.contents import Contents
from wherry.formats.format import Opened
from wherry.layout.losses import note
from wherry.layout.words import rounding
from wherry.mover.read import read_span
from wherry.quantized.computed_reader import ComputedReader
from wherry.quantized.ggml import KINDS, exact, values_of

if TYPE_CHECKING:
    import numpy as np


RECORD = "dequantized"  # in a manifest's origin
_PREFIX = "ggml:"
_BAND = 1 << 18  # elements that are made at a time, or one row
_WORKING = 16  # bytes of memory for each of them


class BlockReader(ComputedReader):
    """A reader over a file with quantised blocks; used from several threads."""

    def is_computed(self, spec: TensorSpec) -> bool:
        """Whether the tensor is stored in blocks."""
        return self._stored[spec.path].dtype in KINDS

    def memory(self, spec: TensorSpec, region: Region) -> int:  # noqa: ARG002  as much for all
        """Memory for one band of rows."""
        return _WORKING * min(max(_BAND, spec.shape[-1]), spec.size)

    def compute(self, spec: TensorSpec, region: Region, out: np.ndarray) -> None:
        """Dequantise a region, row by row."""
        import numpy as np

        stored = self._stored[spec.path]
        extents = self.base.access(stored).extents
        assert extents is not None
        elements = dtypes.block_elements(stored.dtype)
        size = dtypes.canonical_size(stored.dtype, elements)
        whole = math.prod(stored.shape[-1:]) // elements * size  # bytes of a row
        first, last = region[-1].start // elements, -(-region[-1].stop // elements)
        columns = slice(region[-1].start - first * elements, region[-1].stop - first * elements)
        for rows, place in _runs(stored.shape, region, max(_BAND // max(stored.shape[-1], 1), 1)):
            held = np.empty((rows.stop - rows.start) * whole, np.uint8)
            read_span(extents, Span(rows.start * whole, rows.stop * whole), held.data, stored)
            chosen = held.reshape(rows.stop - rows.start, -1, size)[:, first:last]
            values = values_of(np.ascontiguousarray(chosen).reshape(-1, size), stored.dtype)
            values = values.reshape(rows.stop - rows.start, -1)[:, columns]
            made = values.astype(out.dtype)
            note(values, made)
            out[place] = made.reshape(out[place].shape)


def _runs(shape: tuple[int, ...], region: Region, most: int) -> Iterator[tuple[slice, tuple[Any, ...]]]:
    """Runs of neighbouring rows, counted from the tensor's first, and where they are in the region."""
    if len(shape) == 1:
        yield slice(0, 1), (slice(None),)
        return
    for place in product(*(range(part.start, part.stop) for part in region[:-2])):
        row = 0
        for index, extent in zip(place, shape[:-2], strict=True):
            row = row * extent + index
        lead = tuple(index - part.start for index, part in zip(place, region[:-2], strict=True))
        for start in range(region[-2].start, region[-2].stop, most):
            stop, base = min(start + most, region[-2].stop), row * shape[-2]
            yield (
                slice(base + start, base + stop),
                (*lead, slice(start - region[-2].start, stop - region[-2].start)),
            )


class BlockView(Checkpoint):
    """A file whose blocks are dequantised; the source must stay open while the view is used."""

    is_view = True

    def __init__(self, source: Checkpoint, dtype: str) -> None:
        """Create a view; nothing is read yet.

        Args:
            source: the stored file.
            dtype: element type of the dequantised tensors.
        """
        self._source = source
        stored = source.manifest.tensors
        specs = {
            path: replace(spec, dtype=dtype) if spec.dtype in KINDS else spec for path, spec in stored.items()
        }
        origin = {**source.manifest.origin, RECORD: {"dtype": dtype}}
        manifest = replace(source.manifest, tensors=specs, origin=origin)
        super().__init__(Opened(source.detection, manifest, self.reader_over(source.reader), source.ignored))
        changed = [path for path, spec in stored.items() if spec.dtype in KINDS]
        rounded = rounding(dtype)
        self.bounds = {
            path: rounded._replace(relative=0.0) if exact(stored[path].dtype, dtype) else rounded
            for path in changed
        }
        self.notes = (
            *source.notes,
            f"{plural(len(changed), 'tensor')} of blocks are dequantised to {dtype}",
        )

    @property
    def original(self) -> Checkpoint:
        """The stored file."""
        return self._source

    def reader_over(self, reader: Contents) -> Contents:
        """A reader of the view over one of the stored file."""
        return BlockReader(reader, self._source.manifest.tensors)


def without_blocks(checkpoint: Checkpoint, dtype: str) -> BlockView | None:
    """The view of a GGUF file with plain tensors; None if it has no quantised blocks.

    Raises:
        UnrepresentableError: a tensor is stored in blocks that wherry does not dequantise.
    """
    kinds = {
        spec.dtype: spec for spec in checkpoint.manifest.tensors.values() if spec.dtype.startswith(_PREFIX)
    }
    for kind, spec in kinds.items():
        if kind not in KINDS:
            known = ", ".join(sorted(name.removeprefix(_PREFIX) for name in KINDS))
            raise UnrepresentableError(
                f"unsupported block type {kind.removeprefix(_PREFIX)}; supported types: {known}",
                uri=checkpoint.uri, path=spec.name,
                cure="dequantise the file with `llama-quantize --allow-requantize FILE OUT F32`",
            )  # fmt: skip
    return BlockView(checkpoint, dtype) if kinds else None
