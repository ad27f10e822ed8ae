"""ggml_view: a GGUF file as if its tensors had been saved plain, and a checkpoint in the types of a GGUF file.

Names stay. Tensors without dimensions to quantise stay plain, and some are stated by the model alone. How far the
stored values are from the source's is counted while they are made.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

from wherry.core import dtypes
from wherry.core.account import Bound, open_tally
from wherry.core.keypath import KeyPath
from wherry.core.tensorspec import Region, Span, TensorSpec, region_shape, row_bands
from wherry.core.units import plural
from wherry.cures import Cure, program
from wherry.errors import UnrepresentableError
from wherry.formats.checkpoint import Checkpoint
from wherry.formats.format import Access, Computed
from wherry.layout.losses import losses_of, note
from wherry.layout.words import rounding, widens
from wherry.mover.output import as_array
from wherry.mover.read import read_span
from wherry.transform.ggml import BOUNDS, KINDS, encode_blocks, exact, values_of
from wherry.transform.view import Transform, TransformReader, View, with_files

if TYPE_CHECKING:
    import numpy as np

DEQUANTIZED = "dequantized"  # in a manifest's origin
_PREFIX = "ggml:"
_DECODED = 1 << 18  # elements that are made at a time, or one row
_DECODING = 16  # bytes of memory for each of them
RECORD = "values"  # in a manifest's origin
_READ = 4 << 20  # bytes of values, as float32, that are read at a time, or one row
_BAND = 1 << 16  # elements that are encoded at a time
_WORKING = 64  # bytes of memory for each of them


class ReadBlocks(Transform):
    """Plain tensors from the quantised blocks of a file."""

    def __init__(self, stored: Mapping[KeyPath, TensorSpec], dtype: str) -> None:
        """Read nothing yet.

        Args:
            stored: the tensors of the file.
            dtype: element type of the dequantised tensors.
        """
        super().__init__(stored)
        rounded = rounding(dtype)
        self.losses = {
            path: rounded._replace(relative=0.0) if exact(spec.dtype, dtype) else rounded
            for path, spec in stored.items()
            if spec.dtype in KINDS
        }

    def sources(self, path: KeyPath) -> Collection[KeyPath]:
        """The tensor of this name."""
        return (path,)

    def unchanged(self, spec: TensorSpec) -> KeyPath | None:
        """The tensor itself, if it is not stored in blocks."""
        return None if self.stored[spec.path].dtype in KINDS else spec.path

    def memory(self, spec: TensorSpec, region: Region, source: TransformReader) -> int:  # noqa: ARG002
        """Memory for one band of rows."""
        return _DECODING * min(max(_DECODED, spec.shape[-1]), spec.size)

    def compute(self, spec: TensorSpec, region: Region, out: np.ndarray, source: TransformReader) -> None:
        """Dequantise a region, row by row."""
        import numpy as np

        stored = self.stored[spec.path]
        extents = source.access_of(spec.path).extents
        assert extents is not None
        elements = dtypes.block_elements(stored.dtype)
        size = dtypes.canonical_size(stored.dtype, elements)
        whole = math.prod(stored.shape[-1:]) // elements * size  # bytes of a row
        first, last = region[-1].start // elements, -(-region[-1].stop // elements)
        columns = slice(region[-1].start - first * elements, region[-1].stop - first * elements)
        for rows, place in _runs(stored.shape, region, max(_DECODED // max(stored.shape[-1], 1), 1)):
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


def without_blocks(checkpoint: Checkpoint, dtype: str) -> View | None:
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
                uri=checkpoint.uri,
                path=spec.name,
                cure=Cure(
                    "dequantise the file with {}",
                    program("llama-quantize", "--allow-requantize", "FILE", "OUT", "F32"),
                ),
            )
    if not kinds:
        return None
    source = checkpoint.manifest
    specs = {
        path: replace(spec, dtype=dtype) if spec.dtype in KINDS else spec
        for path, spec in source.tensors.items()
    }
    manifest = replace(source, tensors=specs, origin={**source.origin, DEQUANTIZED: {"dtype": dtype}})
    transform = ReadBlocks(source.tensors, dtype)
    note = f"{plural(len(transform.losses), 'tensor')} of blocks are dequantised to {dtype}"
    return View(checkpoint, transform, manifest, notes=(note,))


def typed_view(
    source: Checkpoint,
    types: Mapping[KeyPath, str],
    constants: Sequence[tuple[TensorSpec, bytes]],
    files: Mapping[str, bytes],
    record: Mapping[str, str],
) -> View:
    """The view of a checkpoint in other element types.

    Args:
        source: the checkpoint, whose tensors are plain.
        types: key path → element type of each tensor that gets another one.
        constants: further tensors, with their bytes, which follow from the model.
        files: new companion files, by name.
        record: the options that decide the types; recorded if a value can change.
    """
    stored = source.manifest.tensors
    typed = {path: replace(stored[path], dtype=dtype) for path, dtype in types.items()}
    specs = {**stored, **typed, **{spec.path: spec for spec, _data in constants}}
    transform = ChangeTypes(stored, types, {spec.path: data for spec, data in constants})
    origin = source.manifest.origin
    if transform.losses:
        origin = {**origin, RECORD: dict(record)}
    manifest = replace(with_files(source.manifest, files), tensors=specs, origin=origin)
    return View(source, transform, manifest, files)


def _bound(source: str, target: str) -> Bound | None:
    """The bound of a value's loss; None if none can."""
    if target in BOUNDS:
        return BOUNDS[target]
    return None if widens(source, target) else rounding(target)


class ChangeTypes(Transform):
    """Tensors in other element types, or in quantised blocks."""

    def __init__(
        self,
        stored: Mapping[KeyPath, TensorSpec],
        types: Mapping[KeyPath, str],
        constants: Mapping[KeyPath, bytes],
    ) -> None:
        """Read nothing yet.

        Args:
            stored: the tensors of the source.
            types: the element types of those that get another one.
            constants: bytes of further tensors, by key path.
        """
        super().__init__(stored)
        every = {path: _bound(stored[path].dtype, dtype) for path, dtype in types.items()}
        self.losses = {path: bound for path, bound in every.items() if bound is not None}
        self._constants = constants

    def sources(self, path: KeyPath) -> Collection[KeyPath]:
        """The tensor of this name; none of one that follows from the model."""
        return (path,) if path in self.stored else ()

    def unchanged(self, spec: TensorSpec) -> KeyPath | None:
        """The tensor itself, if it has the source's type."""
        stored = self.stored.get(spec.path)
        return spec.path if stored is not None and stored.dtype == spec.dtype else None

    def access(self, spec: TensorSpec, source: TransformReader) -> Access:
        """See Transform; a tensor is cut as the source's is."""
        if spec.path not in self.stored or self.unchanged(spec) is not None:
            return super().access(spec, source)
        below = source.access_of(spec.path)
        return source.computed(spec, gridded=isinstance(below, Computed) and below.gridded)

    def memory(self, spec: TensorSpec, region: Region, source: TransformReader) -> int:
        """Memory for one band, and for what the source needs to make it."""
        if spec.path in self._constants:
            return 0
        band, _first = next(_bands(region))
        values = _READ + source.memory_for(spec.path, band)
        return values + _WORKING * min(_BAND, math.prod(region_shape(band)))

    def compute(self, spec: TensorSpec, region: Region, out: np.ndarray, source: TransformReader) -> None:
        """Make the values of a region, band by band."""
        if spec.path in self._constants:
            out[...] = as_array(memoryview(self._constants[spec.path]), spec.dtype, spec.shape)[region]
            return
        flat = out.reshape(-1)
        for band, first in _bands(region):
            values = source.read(spec.path, band).reshape(-1)
            for start in range(0, values.size, _BAND):
                made = self._make(spec.dtype, values[start : start + _BAND])
                begin = dtypes.canonical_size(spec.dtype, first + start) // flat.itemsize
                flat[begin : begin + made.size] = made

    def _make(self, kind: str, values: np.ndarray) -> np.ndarray:
        """Values in a type, or the bytes of their blocks; what they lose is counted."""
        if kind not in BOUNDS:
            made = values.astype(dtypes.numpy_dtype(kind))
            note(values, made)
            self._measure(kind, values, made)
            return made
        values = values.astype("f4").reshape(-1, dtypes.block_elements(kind))
        blocks = encode_blocks(values, kind)
        stored, tally = values_of(blocks, kind), open_tally()
        if tally is not None:  # most small values become zero, as they should
            tally.losses += replace(losses_of(values, stored), zero=0, subnormal=0)
        self._measure(kind, values, stored)
        return blocks.reshape(-1)

    def _measure(self, kind: str, values: np.ndarray, stored: np.ndarray) -> None:
        """Where nothing is counted, as in a verification: the largest error, and as a share of the bound."""
        import numpy as np

        bound = _bound(values.dtype.name, kind)
        if open_tally() is not None or bound is None:
            return
        with np.errstate(all="ignore"):
            wide = np.abs(values.astype("f8"))
            error = np.abs(values.astype("f8") - stored.astype("f8"))
            allowed = bound.relative * wide + bound.absolute
            if bound.block:
                allowed = allowed + bound.block * wide.max(axis=1, keepdims=True)
            shares = np.where(error > 0, error / allowed, 0)
        self.measured.add(float(np.nanmax(error, initial=0)), float(np.nanmax(shares, initial=0)))


def _bands(region: Region) -> Iterator[tuple[Region, int]]:
    """The parts of a region that are read at a time, and the number of elements of it before each."""
    for band, span in row_bands(TensorSpec((), region_shape(region), "float32"), _READ):
        at = tuple(slice(a.start + b.start, a.start + b.stop) for a, b in zip(region, band, strict=True))
        yield at, span.start // 4
